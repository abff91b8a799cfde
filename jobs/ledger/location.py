"""Where a SQLite ledger's home is, and how a ledger records where its stores are, so that a home can be
moved."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from jobs.own_files import own_path, read_own

#: Folder of a home that holds its ledger.
STATE_FOLDER = ".nightjar"
LEDGER_FILE = "ledger.sqlite"
_RELATIVE = "home:"


def place_of(ledger: Path | None) -> Path | None:
    """The folder that a SQLite ledger's stores are recorded relative to: its home, or the folder of a file
    that is in no home."""
    if ledger is None:
        return None
    folder = ledger.absolute().parent
    return folder.parent if folder.name == STATE_FOLDER else folder


def home_of(ledger: Path | None) -> Path | None:
    """The home that a SQLite ledger is the embedded one of; None for another ledger."""
    if ledger is None or ledger.absolute().parts[-2:] != (STATE_FOLDER, LEDGER_FILE):
        return None
    return place_of(ledger)


def embedded_broker_url(state_folder: Path) -> str | None:
    """Address of the broker that runs in a home, or None when none runs: its socket is asked, since
    another process may have its id by now, and one that was killed keeps it until somebody takes note."""
    try:
        url = str(json.loads(read_own(state_folder / "broker.json"))["url"])
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(unquote(urlsplit(url).path))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url


def embedded_workers(state_folder: Path) -> list[tuple[str, int]]:
    """Hosts and processes of the last workers of a home; none where there is no record."""
    try:
        record = json.loads(read_own(state_folder / "worker.json"))
        return [(str(record["host"]), int(pid)) for pid in record["pids"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def killed_workers(place: Path | None) -> list[tuple[str, int]]:
    """Hosts and processes of workers that no longer run, whatever the ledger heard of them lately: those
    of a home without a broker."""
    if place is None or embedded_broker_url(place / STATE_FOLDER) is not None:
        return []
    return embedded_workers(place / STATE_FOLDER)


def own_ledger(ledger: Path) -> Path:
    """The path of a SQLite ledger. Raises `store.forbidden` where a file of an embedded one, which its
    home names, is a link."""
    if home_of(ledger) is not None:
        for ending in ("", "-wal", "-shm", "-journal", ".migrate"):
            own_path(ledger.absolute().with_name(ledger.name + ending))
    return ledger


def recorded(store_url: str, place: Path | None) -> str:
    """The address of a store as the ledger keeps it: `home:` and a relative path for a folder in `place`,
    else as it is."""
    folder = _folder(store_url)
    if place is None or folder is None or not folder.is_relative_to(place):
        return store_url
    relative = folder.relative_to(place).as_posix()
    return _RELATIVE + ("" if relative == "." else quote(relative))


def located(address: str, place: Path | None) -> str:
    """The URL of the store that is recorded as `address`."""
    if place is None or not address.startswith(_RELATIVE):
        return address
    return (place / unquote(address[len(_RELATIVE) :])).as_uri()


def _folder(url: str) -> Path | None:
    """The folder of a `file://` URL; None for another store."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.path.startswith("/") else None

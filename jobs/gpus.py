"""The GPUs of this host, the choice of `--gpu`, and the cores for the worker of each GPU."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pipelines.errors import ConfigError, invalid
from pipelines.options import NO_GPU, VISIBLE

log = logging.getLogger(__name__)

ALL = "all"
#: Minimum number of cores of a worker: one for the engine's thread, the others for everything else.
MIN_CORES = 2
LIST_SECONDS = 60
_LISTED = re.compile(r"(?:GPU (\d+)|\s+MIG).*\(UUID: ((?:GPU|MIG)-[^)\s]+)\)")
_NAME = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")
_ADVICE = "Use the indexes of `nvidia-smi`, for example --gpu 0,1, or --gpu all for every GPU."


class Device(NamedTuple):
    """A GPU or MIG instance of one worker: `name` is its value in CUDA_VISIBLE_DEVICES, `uuid` its UUID.
    `bus_id` is its PCI address as written in /sys, empty if unknown."""

    name: str
    uuid: str
    bus_id: str = ""
    #: The name in `nvidia-smi`: a number, or the id of an instance.
    shown: str = ""


class NotListedError(Exception):
    """The GPUs of this host cannot be listed, for the reason in the message."""


def list_gpus() -> list[Device]:
    """All GPUs in the order of `nvidia-smi`, which is the order on the PCI bus. A GPU with MIG instances is
    replaced by its instances. Raises `NotListedError`.

    Uses `nvidia-smi`, because importing torch takes seconds and would start CUDA in the supervisor. If it fails
    because of one GPU, the GPUs that it lists are named by UUID, since CUDA may number them differently.
    """
    found: list[Device] = []
    bus_ids: dict[str, str] = {}
    with suppress(NotListedError):
        lines, _ = _nvidia_smi("--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
        # `00000000:41:00.0` is `0000:41:00.0` in /sys.
        bus_ids = {
            uuid: address.lower()[-12:] for uuid, _, address in (line.partition(", ") for line in lines)
        }
    lines, fault = _nvidia_smi("-L")
    if fault:
        log.warning("A GPU may be lost: %s", fault)
    bus_id = whole = ""
    for index, uuid in (listed.groups() for line in lines if (listed := _LISTED.match(line))):
        if index is not None:
            bus_id = bus_ids.get(uuid, "")
            whole = uuid
        elif found and found[-1].uuid == whole:
            found.pop()
        found.append(Device(uuid if fault or index is None else index, uuid, bus_id, index or uuid))
    return found


def _nvidia_smi(*arguments: str) -> tuple[list[str], str]:
    """Runs `nvidia-smi`; returns the lines of its output, and an error message if it failed. Raises
    `NotListedError` if it failed and lists no GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=LIST_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NotListedError(f"`nvidia-smi` could not be run: {error}") from None
    if done.returncode == 0:
        return done.stdout.splitlines(), ""
    failure = f"`nvidia-smi` ended with status {done.returncode}: {' '.join((done.stdout + done.stderr).split())[:1000]}"
    if "GPU-" not in done.stdout:
        raise NotListedError(failure[:340])
    return done.stdout.splitlines(), failure


def choose_gpus(
    wanted: str,
    variables: Mapping[str, str] = os.environ,
    listing: Callable[[], Sequence[Device]] = list_gpus,
) -> tuple[Device, ...]:
    """The devices of `--gpu`: comma-separated indexes, UUIDs and MIG ids, or `all`.

    CUDA_VISIBLE_DEVICES of `variables` limits the choice. If the GPUs cannot be listed, well-formed names are
    accepted unchecked. Raises `config.invalid`, with the existing GPUs, for other names.
    """
    visible = variables.get(VISIBLE)
    names = [str(int(name)) if name.isdecimal() else name for name in map(str.strip, wanted.split(","))]
    for name in names:
        if names != [ALL] and _NAME.fullmatch(name) is None:
            raise _refused(f"--gpu: {name!r} is not the name of a GPU.")
    try:
        existing = listing()
    except NotListedError as error:
        if names == [ALL]:
            raise _no_gpus(str(error)) from None
        log.warning("GPUs %s are not checked: %s.", ", ".join(names), error)
        existing = [Device(name, name, shown=name) for name in dict.fromkeys(names)]
        visible = None
    allowed = existing if visible is None else _allowed(existing, visible)
    existing_text = f"this host has {', '.join(device.shown for device in existing) or 'none'}"
    if names == [ALL]:
        if not existing:
            raise _no_gpus("`nvidia-smi` lists none")
        if not allowed:
            raise _refused(f"No GPU can be used: {VISIBLE} is {visible!r}, and {existing_text}.")
        return tuple(allowed)
    chosen: list[Device] = []
    for name in names:
        if (device := _named(name, existing)) is None:
            raise _refused(f"GPU {name} does not exist; {existing_text}.")
        if device not in allowed:
            raise _refused(f"GPU {name} must not be used: {VISIBLE} is {visible!r}.")
        if device in chosen:
            raise _refused(f"--gpu names GPU {name} twice. A GPU runs one worker.")
        chosen.append(device)
    return tuple(chosen)


def count_gpus(variables: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """The number of GPUs for this process, from CUDA_VISIBLE_DEVICES or the device files, because `nvidia-smi`
    takes a second."""
    if (visible := variables.get(VISIBLE)) is not None:
        return sum(name.strip() not in NO_GPU for name in visible.split(","))
    return len(list(devices.glob("nvidia[0-9]*")))


def _named(name: str, existing: Sequence[Device]) -> Device | None:
    """The device that CUDA finds by a name: an index, a UUID, a MIG id, or a unique prefix of a UUID or MIG
    id."""
    found = [
        device
        for device in existing
        if name == device.shown or (not name.isdecimal() and device.uuid.startswith(name))
    ]
    return found[0] if name and len(found) == 1 else None


def _allowed(existing: Sequence[Device], visible: str) -> list[Device]:
    """The devices that CUDA_VISIBLE_DEVICES allows. As in CUDA, names after an unknown one are ignored."""
    allowed: list[Device] = []
    for name in map(str.strip, visible.split(",")):
        if (device := _named(name, existing)) is None:
            break
        if device not in allowed:
            allowed.append(device)
    return allowed


def _no_gpus(reason: str) -> ConfigError:
    return invalid(
        f"--gpu all: no GPU was found on this host ({reason}).",
        "`nightjar doctor` shows what is missing. Omit --gpu to use the CPU, or name the GPUs: --gpu 0,1.",
    )


def _refused(message: str) -> ConfigError:
    return invalid(message, _ADVICE)


def share_cores(
    bus_ids: Sequence[str], allowed: Iterable[int] | None = None, system: Path = Path("/sys")
) -> list[frozenset[int] | None]:
    """The cores for each worker, in the order of `bus_ids` (empty: unknown). None: all cores, if there is
    only one worker or there are too few cores to divide.

    `allowed`: the cores for this process. Cores that are local to GPUs, as listed in /sys, are divided among
    the workers of those GPUs; all other cores are divided among all workers.
    """
    cores = set(os.sched_getaffinity(0) if allowed is None else allowed)
    workers = range(len(bus_ids))
    if len(bus_ids) < 2 or len(cores) < MIN_CORES * len(bus_ids):
        return [None for _ in workers]
    devices = system / "bus/pci/devices"
    near = [frozenset(_core_list(devices / bus_id / "local_cpulist") & cores) for bus_id in bus_ids]
    groups = {local: [number for number in workers if near[number] == local] for local in near}
    disjoint = sum(map(len, groups)) == len(frozenset().union(*groups))
    if not disjoint or any(len(local) < MIN_CORES * len(members) for local, members in groups.items()):
        groups = {frozenset(cores): list(workers)}

    shares = [set() for _ in workers]
    for local, members in [*groups.items(), (cores.difference(*groups), list(workers))]:
        # The hardware threads of one core are kept together.
        siblings = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
        ordered = sorted(
            local, key=lambda core: (min(_core_list(system / siblings.format(core)), default=core), core)
        )
        ends = [len(ordered) * part // len(members) for part in range(len(members) + 1)]
        for member, (first, last) in zip(members, pairwise(ends)):
            shares[member].update(ordered[first:last])
    return [frozenset(share) for share in shares]


def _core_list(path: Path) -> set[int]:
    """The cores that a file lists, for example as `0-3,8`; empty if it cannot be read."""
    cores = set[int]()
    with suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores

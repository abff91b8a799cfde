"""The GPUs of this host: which there are, which `--gpu` chooses, and the cores near each of them."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

from pipelines.engine_choice import NO_GPU, VISIBLE
from pipelines.errors import ConfigError, ErrorCode

log = logging.getLogger(__name__)

ALL = "all"
#: A worker with fewer cores would wait for them: its engine's thread takes one, everything else the others.
LEAST_CORES = 2
LIST_SECONDS = 60
_LISTED = re.compile(r"(?:GPU (\d+)|\s+MIG).*\(UUID: ((?:GPU|MIG)-[^)\s]+)\)")
_NAME = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z/-]+")
_ADVICE = "Give the indexes that `nvidia-smi` shows, for example --gpu 0,1, or --gpu all for every GPU."


@dataclass(frozen=True, slots=True)
class Device:
    """What one worker gets, a GPU or a MIG instance: `name` is its CUDA_VISIBLE_DEVICES, `uuid` what it is,
    whatever it was called. `bus_id` is its PCI address as in /sys, empty if unknown."""

    name: str
    uuid: str
    bus_id: str = ""
    #: That `nvidia-smi` shows; None for an instance.
    index: int | None = None
    #: A GPU that is divided into instances.
    divided: bool = False


class NotListedError(Exception):
    """The GPUs of this host cannot be listed; the message says why."""


def list_gpus() -> list[Device]:
    """Every GPU that the driver shows, in the order of `nvidia-smi`, which is that of the PCI bus, each
    before its MIG instances. Raises `NotListedError`.

    The driver's own program is asked: torch takes seconds to import, and would start CUDA in a process
    that only starts others. Where it fails because of one GPU, those that it lists all the same are there:
    by their UUIDs, since CUDA may count them in another way.
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
    if fault is not None:
        log.warning("A GPU may be lost: %s", fault)
    whole = 0
    for line in lines:
        if (listed := _LISTED.match(line)) is None:
            continue
        index, uuid = listed.groups()
        if index is not None:
            whole = len(found)
            found.append(Device(uuid if fault else index, uuid, bus_ids.get(uuid, ""), int(index)))
        elif found:
            found[whole] = replace(found[whole], divided=True)
            found.append(Device(uuid, uuid, found[whole].bus_id))
    return found


def _nvidia_smi(*arguments: str) -> tuple[list[str], str | None]:
    """Its lines, and what it says where it did not end well. Raises `NotListedError` where it did not and
    names no GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=LIST_SECONDS, check=False
        )
    except FileNotFoundError:
        raise NotListedError("`nvidia-smi`, which comes with NVIDIA's driver, is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise NotListedError(f"`nvidia-smi` could not be run: {error}") from None
    if done.returncode == 0:
        return done.stdout.splitlines(), None
    said = f"`nvidia-smi` ended with status {done.returncode}: {' '.join((done.stdout + done.stderr).split())[:1000]}"
    if "GPU-" not in done.stdout:
        raise NotListedError(said[:340])
    return done.stdout.splitlines(), said


def choose_gpus(
    wanted: str, visible: str | None = None, listing: Callable[[], Sequence[Device]] = list_gpus
) -> tuple[Device, ...]:
    """The devices of `--gpu`: indexes, UUIDs and MIG ids with commas between them, or `all`.

    `visible` is CUDA_VISIBLE_DEVICES, which limits the choice; None: it is not set. Where the GPUs cannot
    be listed, well-formed names are taken as they are. Raises `config.invalid` for everything else, with
    what there is.
    """
    names = [name.strip() for name in wanted.split(",")]
    if not any(names):
        raise _refused("--gpu names no GPU.")
    for name in names:
        if name != ALL and _NAME.fullmatch(name) is None:
            raise _refused(f"--gpu: {name!r} is no GPU.")
    if ALL in names and len(names) > 1:
        raise _refused("--gpu all stands alone.")
    try:
        there = listing()
    except NotListedError as error:
        if names == [ALL]:
            raise _no_gpus(str(error)) from None
        log.warning("GPUs %s are not checked: %s.", ", ".join(names), error)
        names = [str(int(name)) if name.isdigit() else name for name in names]
        chosen = [Device(name, name) for name in names]
    else:
        allowed = _allowed(there, visible)
        if names == [ALL]:
            if not there:
                raise _no_gpus("`nvidia-smi` lists none")
            if not allowed:
                raise _refused(f"No GPU may be used: {VISIBLE} is {visible!r}, and {_there_is(there)}.")
            return tuple(allowed.values())
        chosen = []
        for name in names:
            if (device := _named(name, there)) is None:
                shown = int(name) if name.isdigit() else name
                raise _refused(f"GPU {shown} does not exist; {_there_is(there)}.")
            if visible is not None and device.uuid not in allowed:
                raise _refused(f"GPU {name} may not be used: {VISIBLE} is {visible!r}.")
            chosen.append(device)
    for number, device in enumerate(chosen):
        if any(device.uuid == other.uuid for other in chosen[:number]):
            raise _refused(f"--gpu names GPU {device.name} twice. A GPU runs one worker.")
    return tuple(chosen)


def count_gpus(visible: str | None, devices: Path = Path("/dev")) -> int:
    """How many GPUs this process may use; `visible` as above. Looks at the device files: the driver's own
    program takes a second."""
    if visible is not None:
        return sum(name.strip() not in NO_GPU for name in visible.split(","))
    return len(list(devices.glob("nvidia[0-9]*")))


def _named(name: str, there: Sequence[Device]) -> Device | None:
    """What CUDA finds under a name: an index, a UUID or MIG id, or the beginning of only one of them."""
    if name.isdigit():
        return next((device for device in there if device.index == int(name)), None)
    found = [device for device in there if device.uuid.startswith(name)]
    return replace(found[0], name=name) if len(found) == 1 else None


def _allowed(there: Sequence[Device], visible: str | None) -> dict[str, Device]:
    """The devices that CUDA_VISIBLE_DEVICES allows, by their UUIDs. CUDA ignores what follows a name that
    it does not know, and so does this."""
    if visible is None:
        return {device.uuid: device for device in there if not device.divided}
    allowed: dict[str, Device] = {}
    for name in map(str.strip, visible.split(",")):
        if not name or (device := _named(name, there)) is None:
            break
        allowed[device.uuid] = device
    return allowed


def _there_is(there: Sequence[Device]) -> str:
    """`this host has 0, 1 and 2`."""
    *others, last = [str(device.index) for device in there if device.index is not None] or ["none"]
    return f"this host has {', '.join(others)} and {last}" if others else f"this host has {last}"


def _no_gpus(reason: str) -> ConfigError:
    looked = f"{reason}; /dev has {count_gpus(None)} NVIDIA devices"
    advice = "`nightjar doctor` shows what is missing. Leave --gpu out to use the CPU, or name the GPUs: --gpu 0,1."
    return ConfigError(
        ErrorCode.CONFIG_INVALID, f"--gpu all: no GPU was found on this host ({looked}).", advice
    )


def _refused(message: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, _ADVICE)


def share_cores(
    bus_ids: Sequence[str], allowed: Iterable[int] | None = None, system: Path = Path("/sys")
) -> list[frozenset[int] | None]:
    """The cores of each worker, one for each `bus_id` (empty: unknown); None for all: there is nothing to
    divide.

    `allowed`: the cores that this process may use. Cores near a GPU, as /sys tells, go to the workers of
    the GPUs there; cores near no GPU are divided among all workers. The hardware threads of one core stay
    together.
    """
    cores = set(os.sched_getaffinity(0) if allowed is None else allowed)
    everyone = range(len(bus_ids))
    if len(bus_ids) < 2 or len(cores) < LEAST_CORES * len(bus_ids):
        return [None for _ in everyone]
    devices = system / "bus/pci/devices"
    near = [frozenset(_core_list(devices / bus_id / "local_cpulist") & cores) for bus_id in bus_ids]
    groups = {local: [number for number in everyone if near[number] == local] for local in near}
    apart = sum(map(len, groups)) == len(frozenset().union(*groups))
    if not apart or any(len(local) < LEAST_CORES * len(members) for local, members in groups.items()):
        groups = {frozenset(cores): list(everyone)}

    shares: list[set[int]] = [set() for _ in everyone]
    for local, members in [*groups.items(), (cores.difference(*groups), list(everyone))]:
        for member, part in zip(members, _divided(local, len(members), system)):
            shares[member].update(part)
    return [frozenset(share) for share in shares]


def _divided(cores: Iterable[int], parts: int, system: Path) -> list[list[int]]:
    """Consecutive parts of nearly one size, by whole physical cores if each part then has enough."""
    threads: dict[int, list[int]] = {}
    for core in sorted(cores):
        siblings = system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        threads.setdefault(min(_core_list(siblings), default=core), []).append(core)
    physical = [threads[first] for first in sorted(threads)]
    divided: list[list[int]] = []
    for units in (physical, [[core] for one in physical for core in one]):
        ends = [len(units) * part // parts for part in range(parts + 1)]
        divided = [list(chain.from_iterable(units[first:last])) for first, last in pairwise(ends)]
        if min(map(len, divided)) >= LEAST_CORES:
            break
    return divided


def _core_list(path: Path) -> set[int]:
    """`0-3,8` of a file is {0, 1, 2, 3, 8}; empty where it cannot be read."""
    cores: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores

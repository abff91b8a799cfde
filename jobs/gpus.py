"""The GPUs of this host: which there are, which `--gpu` chooses, and the cores near each of them."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pipelines.engine_choice import NO_GPU, VISIBLE
from pipelines.errors import ConfigError, ErrorCode

log = logging.getLogger(__name__)

T = TypeVar("T")

ALL = "all"
#: A worker with fewer cores would wait for them: its engine's thread takes one, everything else the others.
LEAST_CORES = 2
LIST_SECONDS = 60
_GPU_LINE = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[^)\s]+)\)")
_MIG_LINE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)\s]+)\)")
_INDEX = re.compile(r"[0-9]{1,4}")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_ADVICE = "Give the indexes that `nvidia-smi` shows, for example --gpu 0,1, or --gpu all for every GPU."


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as `nvidia-smi` lists it. `bus_id` is its PCI address as in /sys, empty if unknown; `mig_ids`
    are its MIG instances.

    Where another GPU is lost, CUDA may count the others in another way than `nvidia-smi`: `sure` says
    whether the index is that of CUDA.
    """

    index: int
    uuid: str
    bus_id: str = ""
    mig_ids: tuple[str, ...] = ()
    sure: bool = True

    @property
    def name(self) -> str:
        """What CUDA finds it by."""
        return str(self.index) if self.sure else self.uuid


@dataclass(frozen=True, slots=True)
class Device:
    """What one worker gets: `name` is its CUDA_VISIBLE_DEVICES, `uuid` the GPU or MIG instance, whatever
    it was called."""

    name: str
    uuid: str
    bus_id: str = ""


class NotListedError(Exception):
    """The GPUs of this host cannot be listed; the message says why."""


def list_gpus() -> tuple[Gpu, ...]:
    """Every GPU that the driver shows, in the order of `nvidia-smi`, which is that of the PCI bus. Raises
    `NotListedError`.

    The driver's own program is asked: torch takes seconds to import, and would start CUDA in a process
    that only starts others. Where it fails because of one GPU, those that it lists all the same are there.
    """
    gpus: list[Gpu] = []
    bus_ids: dict[str, str] = {}
    with suppress(NotListedError):
        lines, _ = _nvidia_smi("--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
        bus_ids = dict(line.split(", ", 1) for line in lines if ", " in line)
    lines, fault = _nvidia_smi("-L")
    if fault is not None:
        log.warning("A GPU may be lost: %s", fault)
    for line in lines:
        if (gpu := _GPU_LINE.match(line)) is not None:
            gpus.append(Gpu(int(gpu[1]), gpu[2], _sys_address(bus_ids.get(gpu[2], "")), sure=fault is None))
        elif (mig := _MIG_LINE.match(line)) is not None and gpus:
            gpus[-1] = replace(gpus[-1], mig_ids=(*gpus[-1].mig_ids, mig[1]))
    return tuple(gpus)


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


def _sys_address(bus_id: str) -> str:
    """`00000000:41:00.0` of `nvidia-smi` is `0000:41:00.0` in /sys."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def choose_gpus(
    wanted: str, visible: str | None = None, listing: Callable[[], Sequence[Gpu]] = list_gpus
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
        if name != ALL and _INDEX.fullmatch(name) is None and _UUID.fullmatch(name) is None:
            raise _refused(f"--gpu: {name!r} is no GPU.")
    try:
        gpus = tuple(listing())
    except NotListedError as error:
        return _unchecked(names, str(error))
    allowed = _allowed(gpus, visible)
    if names == [ALL]:
        if not gpus:
            raise _no_gpus("`nvidia-smi` lists none")
        if not allowed:
            raise _refused(f"No GPU may be used: {VISIBLE} is {visible!r}, and {_there_is(gpus)}.")
        return tuple({device.uuid: device for _, device in allowed}.values())
    return _distinct([_find(name, gpus, allowed, visible) for name in names])


def count_gpus(visible: str | None, devices: Path = Path("/dev")) -> int:
    """How many GPUs this process may use; `visible` as above. Looks at the device files: the driver's own
    program takes a second."""
    if visible is not None:
        return sum(name.strip() not in NO_GPU for name in visible.split(","))
    return len(list(devices.glob("nvidia[0-9]*")))


def _unchecked(names: Sequence[str], reason: str) -> tuple[Device, ...]:
    if ALL in names:
        raise _no_gpus(reason)
    log.warning("GPUs %s are not checked: %s.", ", ".join(names), reason)
    plain = [str(int(name)) if _INDEX.fullmatch(name) else name for name in names]
    return _distinct([Device(name, name) for name in plain])


def _distinct(devices: Sequence[Device]) -> tuple[Device, ...]:
    for number, device in enumerate(devices):
        if any(device.uuid == other.uuid for other in devices[:number]):
            raise _refused(f"--gpu names GPU {device.name} twice. A GPU runs one worker.")
    return tuple(devices)


def _find(
    name: str, gpus: Sequence[Gpu], allowed: Sequence[tuple[Gpu, Device]], visible: str | None
) -> Device:
    if name == ALL:
        raise _refused("--gpu all stands alone.")
    found = _named(name, gpus)
    if found is None:
        raise _refused(f"GPU {int(name) if name.isdigit() else name} does not exist; {_there_is(gpus)}.")
    if visible is not None and all(found[0] != gpu for gpu, _ in allowed):
        raise _refused(f"GPU {name} may not be used: {VISIBLE} is {visible!r}.")
    return found[1]


def _named(name: str, gpus: Sequence[Gpu]) -> tuple[Gpu, Device] | None:
    """What CUDA finds under a name: an index, a UUID or MIG id, or the beginning of only one of them."""
    if name.isdigit():
        return next(
            ((gpu, Device(gpu.name, gpu.uuid, gpu.bus_id)) for gpu in gpus if gpu.index == int(name)), None
        )
    found: list[tuple[Gpu, Device]] = []
    for gpu in gpus:
        if name.startswith(f"MIG-{gpu.uuid}/"):
            # Older drivers name an instance by its GPU and two numbers.
            found.append((gpu, Device(name, name, gpu.bus_id)))
        found += [
            (gpu, Device(name, uuid, gpu.bus_id))
            for uuid in (gpu.uuid, *gpu.mig_ids)
            if uuid.startswith(name)
        ]
    return found[0] if len(found) == 1 else None


def _allowed(gpus: Sequence[Gpu], visible: str | None) -> list[tuple[Gpu, Device]]:
    """The devices that CUDA_VISIBLE_DEVICES allows. CUDA ignores what follows a name that it does not
    know, and so does this."""
    if visible is None:
        whole = [(gpu, Device(gpu.name, gpu.uuid, gpu.bus_id)) for gpu in gpus if not gpu.mig_ids]
        return whole + [(gpu, Device(mig, mig, gpu.bus_id)) for gpu in gpus for mig in gpu.mig_ids]
    allowed: list[tuple[Gpu, Device]] = []
    for name in visible.split(","):
        found = _named(name.strip(), gpus) if name.strip() else None
        if found is None:
            break
        allowed.append(found)
    return allowed


def _there_is(gpus: Sequence[Gpu]) -> str:
    """`this host has 0, 1 and 2`."""
    indexes = [str(gpu.index) for gpu in gpus]
    if not indexes:
        return "this host has none"
    return "this host has " + " and ".join(part for part in (", ".join(indexes[:-1]), indexes[-1]) if part)


def _no_gpus(reason: str) -> ConfigError:
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    looked = f"{reason}; /dev has {there} NVIDIA devices"
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
    count = len(bus_ids)
    if count < 2 or len(cores) < LEAST_CORES * count:
        return [None] * count
    near = [_near(bus_id, system) & cores for bus_id in bus_ids]
    groups = {
        local: [number for number, other in enumerate(near) if other == local]
        for local in map(frozenset, near)
    }
    apart = sum(map(len, groups)) == len(set().union(*groups))
    if not apart or any(len(local) < LEAST_CORES * len(members) for local, members in groups.items()):
        groups = {frozenset(cores): list(range(count))}
    shares: list[set[int]] = [set() for _ in bus_ids]
    rest = frozenset(cores.difference(*groups))
    for local, members in [*groups.items(), (rest, list(range(count)))]:
        for member, part in zip(members, _divided(local, len(members), system)):
            shares[member] |= part
    return [frozenset(share) for share in shares]


def _near(bus_id: str, system: Path) -> set[int]:
    try:
        return (
            _core_list((system / "bus/pci/devices" / bus_id / "local_cpulist").read_text())
            if bus_id
            else set()
        )
    except (OSError, ValueError):
        return set()


def _divided(cores: Iterable[int], parts: int, system: Path) -> list[set[int]]:
    """Consecutive parts of nearly one size, by whole physical cores if each part then has enough."""
    physical: dict[int, list[int]] = {}
    for core in sorted(cores):
        physical.setdefault(_first_sibling(core, system), []).append(core)
    whole = _slices([physical[first] for first in sorted(physical)], parts)
    divided = [{core for threads in part for core in threads} for part in whole]
    if all(len(part) >= LEAST_CORES for part in divided):
        return divided
    return [set(part) for part in _slices([core for threads in physical.values() for core in threads], parts)]


def _slices(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    return [values[len(values) * part // parts : len(values) * (part + 1) // parts] for part in range(parts)]


def _first_sibling(core: int, system: Path) -> int:
    try:
        return min(
            _core_list((system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text())
        )
    except (OSError, ValueError):
        return core


def _core_list(text: str) -> set[int]:
    """`0-3,8` is {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores

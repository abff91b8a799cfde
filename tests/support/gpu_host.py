"""A host with GPUs that are not there: an `nvidia-smi` of ours on the PATH, and a /sys with their cores."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

UUIDS = [f"GPU-{number}{number:07x}-0000-4000-8000-{number:012x}" for number in range(16)]
MIG_ID = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


def install_nvidia_smi(
    folder: Path, gpus: int, *, mig: int | None = None, status: int = 0, lost: int | None = None
) -> dict[str, str]:
    """Writes an `nvidia-smi` that lists so many GPUs; GPU `mig` has an instance, and `lost` fell off the
    bus. With a status it lists none. Returns the variables that make a process find it."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = [f"GPU {number}: NVIDIA H200 (UUID: {UUIDS[number]})" for number in range(gpus)]
    if mig is not None:
        listed.insert(mig + 1, f"  MIG 1g.18gb     Device  0: (UUID: {MIG_ID})")
    buses = [f"{UUIDS[number]}, 00000000:{0x41 + number:02X}:00.0" for number in range(gpus)]
    if lost is not None:
        status, listed[lost] = (
            15,
            f"Unable to determine the device handle for GPU0000:{0x41 + lost:02X}:00.0: Unknown Error",
        )
    program = folder / "nvidia-smi"
    lines = "\n".join(
        listed
        if status == 0 or lost is not None
        else ["Unable to determine the device handle for GPU0: Unknown Error"]
    )
    addresses = "\n".join(buses if lost is None else [listed[lost]])
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -L ]; then cat <<END\n{lines}\nEND\nelse cat <<END\n{addresses}\nEND\nfi\nexit {status}\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def bus_id(number: int) -> str:
    """The address in /sys of a GPU of `install_nvidia_smi`."""
    return f"0000:{0x41 + number:02x}:00.0"


def write_sys(folder: Path, near: Mapping[str, str], siblings: Sequence[tuple[int, ...]] = ()) -> Path:
    """A /sys in which each address of `near` has its list of cores, and the hardware threads of `siblings`
    share a core."""
    for address, cores in near.items():
        device = folder / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cores}\n")
    for threads in siblings:
        for core in threads:
            topology = folder / f"devices/system/cpu/cpu{core}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(",".join(map(str, threads)) + "\n")
    return folder


def core_text(cores: Collection[int]) -> str:
    """`0-3,8`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

"""Machine code of `kernels/cuda`: it is part of the wheel, or is compiled once per machine and cached. Imports neither
torch nor Triton.

`python -m kernels.binaries FOLDER` writes the files that a wheel contains: `<source>-<target>-<digest>.cubin`
and `.ptx`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels import toolchain

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cuda"
#: Targets of a wheel's code: machine code for Hopper, on which the kernels were measured, and PTX, which the
#: driver of a newer GPU compiles for that GPU.
HOPPER = "sm_90a"
NEWER = "compute_90"
_WHEEL = "// wheel: "
_INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def targets_of(name: str) -> list[str]:
    """The targets for which a wheel contains code of a source, as the source's first line lists them; empty
    if it lists none."""
    first, _, _ = _text(name).partition("\n")
    return first.removeprefix(_WHEEL).split() if first.startswith(_WHEEL) else []


def shipped_code() -> list[tuple[str, str]]:
    """Source and target of all code that a wheel contains."""
    names = sorted(path.stem for path in SOURCES.glob("*.cu"))
    return [(name, target) for name in names for target in targets_of(name)]


def target_for(capability: tuple[int, int]) -> str:
    """The compilers' name of a compute capability."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


def file_name(name: str, target: str) -> str:
    """The file name of a source's code for one target. It contains a hash of the source and its headers."""
    parts = [_text(name), *(text for _, text in sorted(_headers(name).items())), target]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{name}-{target}-{digest}.{'ptx' if target.startswith('compute_') else 'cubin'}"


def shipped() -> bool:
    """Whether this installation contains code of every source."""
    return all((SOURCES / file_name(name, target)).exists() for name, target in shipped_code())


def candidates(name: str, capability: tuple[int, int]) -> Iterator[bytes]:
    """Yields code of one source for a device, the best first: from the wheel, from the cache, or compiled now.

    The caller tries the next one if the driver refuses one, for example because the driver is older than the
    compiler. Raises RuntimeError with the compilers' messages if none is left.
    """
    target = target_for(capability)
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = user / "nightjar" / file_name(name, target)
    before = _read(kept) if _is_own(kept.parent) else None
    for code in (_read(SOURCES / kept.name), before, _read(SOURCES / file_name(name, NEWER))):
        if code is not None:
            yield code
    yield _compiled(name, target, kept, before)


def _compiled(name: str, target: str, kept: Path, before: bytes | None) -> bytes:
    """Compiles code and caches it. If two processes need the same code, one compiles it and the other waits."""
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with kept.with_suffix(".lock").open("w") as lock:
            # The operating system releases it when the process dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            now = _read(kept)
            if now is not None and now != before and _is_own(kept.parent):
                return now
            code = compiled(name, target)
            unfinished = kept.with_suffix(f".{os.getpid()}.tmp")
            unfinished.write_bytes(code)
            unfinished.replace(kept)
            return code
    except OSError as error:
        log.warning(
            "compiled kernels cannot be kept (%s), so every start compiles them again; set XDG_CACHE_HOME",
            error,
        )
        return compiled(name, target)


def compiled(name: str, target: str) -> bytes:
    """Code of one source for a target. Raises RuntimeError with the compilers' messages."""
    return toolchain.compile_cuda(SOURCES / f"{name}.cu", _headers(name), target)


def _text(name: str) -> str:
    return (SOURCES / f"{name}.cu").read_text()


def _headers(name: str) -> dict[str, str]:
    """Name -> text of the headers that a source includes, directly or through another header."""
    found = dict[str, str]()
    waiting = _INCLUDED.findall(_text(name))
    while waiting:
        header = waiting.pop()
        if header not in found:
            found[header] = (SOURCES / header).read_text()
            waiting += _INCLUDED.findall(found[header])
    return found


def _is_own(folder: Path) -> bool:
    """Whether only this user can write to the folder, which matters because its files are run on the GPU."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_shipped(folder: Path) -> list[Path]:
    """Compiles the code that a wheel contains, and writes it into `folder`. Raises RuntimeError with the
    compilers' messages."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(code: tuple[str, str]) -> Path:
        path = folder / file_name(*code)
        path.write_bytes(compiled(*code))
        return path

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(write, shipped_code()))


if __name__ == "__main__":
    for written in write_shipped(Path(sys.argv[1])):
        print(written)

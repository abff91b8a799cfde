"""Where the machine code of kernels comes from: the wheel, what was kept, or a compiler."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import binaries
from tests.support.rounds import wait_until

HOPPER = (9, 0)
#: A compiler that counts its runs beside itself and writes what it was asked for.
NVCC = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/runs"
sleep 0.3
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "made of $1" > "$out"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a counting compiler and an empty cache, and its folder; the sources are copies
    without shipped code."""
    sources, programs = tmp_path / "sources", tmp_path / "bin"
    sources.mkdir()
    programs.mkdir()
    for path in (*binaries.SOURCES.glob("*.cu"), *binaries.SOURCES.glob("*.cuh")):
        (sources / path.name).write_bytes(path.read_bytes())
    program = programs / "nvcc"
    program.write_text(NVCC)
    program.chmod(0o755)
    monkeypatch.setattr(binaries, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


def runs(machine: Path) -> list[str]:
    file = machine / "bin/runs"
    return file.read_text().splitlines() if file.exists() else []


def first(capability: tuple[int, int] = HOPPER) -> bytes:
    return next(binaries.candidates("skinny", capability))


def test_code_is_compiled_once_and_kept(machine: Path) -> None:
    assert first() == first()
    (command,) = runs(machine)
    assert command.startswith("-cubin -arch=sm_90a")
    kept = [path.name for path in (machine / "cache/nightjar").glob("*.cubin")]
    assert kept == [binaries.file_name("skinny", "sm_90a")]


def test_other_sources_and_other_devices_are_other_code(machine: Path) -> None:
    first()
    first((10, 0))
    shared = machine / "sources/common.cuh"
    shared.write_text(shared.read_text() + "\n")
    first()
    assert ["-arch=sm_90a" in command for command in runs(machine)] == [True, False, True]


def test_headers_of_other_sources_change_nothing_and_headers_of_headers_do(machine: Path) -> None:
    def names() -> list[str]:
        return [binaries.file_name(name, "sm_90a") for name in ("skinny", "persistent")]

    found = [names()]
    for header in ("persistent_shape.cuh", "instructions.cuh"):
        path = machine / "sources" / header
        path.write_text(path.read_text() + "\n")
        found.append(names())
    skinny, persistent = (list(column) for column in zip(*found))
    assert skinny[0] == skinny[1] != skinny[2]
    assert len(set(persistent)) == 3


def test_what_the_wheel_brings_comes_first_and_newer_devices_take_its_ptx(machine: Path) -> None:
    for name, target in binaries.shipped_code():
        assert not binaries.shipped()
        (machine / "sources" / binaries.file_name(name, target)).write_text(target)
    assert binaries.shipped()
    assert first() == b"sm_90a"
    assert first((12, 0)) == b"compute_90"
    assert runs(machine) == []


def test_code_that_the_driver_refused_is_compiled_anew(machine: Path) -> None:
    kept = machine / "cache/nightjar" / binaries.file_name("skinny", "sm_90a")
    kept.parent.mkdir(parents=True)
    kept.write_text("of a newer compiler")
    refused, new = binaries.candidates("skinny", HOPPER)
    assert (refused, new.split()[:2]) == (b"of a newer compiler", [b"made", b"of"])
    assert kept.read_bytes() == new


ASK = """
import sys
from pathlib import Path
from kernels import binaries
binaries.SOURCES = Path(sys.argv[1])
print(next(binaries.candidates("skinny", (9, 0))).decode())
"""


def test_processes_that_start_together_compile_once(machine: Path) -> None:
    command = [sys.executable, "-c", ASK, str(machine / "sources")]
    asked = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate(timeout=120)[0] for process in asked}
    assert len(runs(machine)) == 1
    assert len(answers) == 1


def test_a_process_that_died_while_it_compiled_holds_nobody_up(machine: Path) -> None:
    (machine / "bin/nvcc").write_text('#!/bin/sh\necho $$ > "$(dirname $0)/busy"; exec sleep 300\n')
    process = subprocess.Popen([sys.executable, "-c", ASK, str(machine / "sources")], start_new_session=True)
    wait_until((machine / "bin/busy").exists)
    process.kill()
    process.wait()
    (machine / "bin/nvcc").write_text(NVCC)
    assert first().startswith(b"made of")


def test_a_cache_that_cannot_be_written_is_a_warning(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (machine / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert first().startswith(b"made of")
    assert "set XDG_CACHE_HOME" in caplog.text


def test_without_any_compiler_the_error_says_so(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "bin/nvcc").unlink()
    monkeypatch.setenv("CUDA_HOME", str(machine))
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(RuntimeError, match="neither nvcc nor nvrtc was found"):
        first()


def test_a_compiler_that_fails_is_followed_by_the_other(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "bin/nvcc").write_text("#!/bin/sh\necho 'gcc: No such file' >&2\nexit 1\n")
    (machine / "lib64").mkdir()
    (machine / "lib64/libnvrtc.so.13").write_text("no library")
    monkeypatch.setenv("CUDA_HOME", str(machine))
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(RuntimeError, match=r"gcc: No such file; .*libnvrtc"):
        first()

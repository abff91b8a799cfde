"""A forked process is what `python -m` starts: output, exit code, signals, folder, environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import Forked, is_like_this_process

PROGRAM = """
import atexit, os, sys, threading, time
atexit.register(print, "the end")
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], "HOME" in os.environ, sys.stdin.read(), flush=True)
if "wait" in sys.argv:
    time.sleep(600)
if "fail" in sys.argv:
    threading.Thread(target=lambda: (time.sleep(0.05), print("the thread"))).start()
    sys.exit("in a sentence")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "program_of_this_test.py").write_text(PROGRAM)
    (tmp_path / "stdin").write_text("said")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def start(folder: Path, *arguments: str) -> Forked:
    files = {name: folder / name for name in ("stdin", "stdout", "stderr")}
    return Forked(
        "program_of_this_test", arguments, cwd=folder, env={"WORD": "a word"}, start_new_session=True, **files
    )


@pytest.mark.parametrize("arguments", [("x", "y z"), ("fail",)])
def test_it_says_what_python_says(folder: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "program_of_this_test", *arguments]
    python = subprocess.run(
        command, cwd=folder, env={"WORD": "a word"}, input="said", capture_output=True, text=True, check=False
    )
    code = start(folder, *arguments).wait(240)
    assert (code, (folder / "stdout").read_text(), (folder / "stderr").read_text()) == (
        python.returncode,
        python.stdout,
        python.stderr,
    )


def test_a_signal_ends_it(folder: Path) -> None:
    process = start(folder, "wait")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.terminate()
    assert process.wait(240) == process.poll() == process.returncode == -signal.SIGTERM
    process.kill()


def test_it_imports_from_folders_that_only_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "module_of_this_test.py").write_text("print('found')")
    files = {"stdout": tmp_path / "stdout", "stderr": tmp_path / "stderr"}
    process = Forked(
        "module_of_this_test", (), cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "elsewhere")}, **files
    )
    assert (process.wait(240), files["stdout"].read_text()) == (0, "found\n"), files["stderr"].read_text()


def test_another_python_is_no_fork_of_this_one(tmp_path: Path) -> None:
    assert is_like_this_process({**os.environ, "SPEECH_HOME": "x"})
    elsewhere = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert not is_like_this_process(elsewhere)
    assert is_like_this_process(elsewhere, but_for_paths=True)
    assert not is_like_this_process({**elsewhere, "PYTHONHASHSEED": "1"}, but_for_paths=True)
    (tmp_path / "sitecustomize.py").touch()
    assert not is_like_this_process(elsewhere, but_for_paths=True)

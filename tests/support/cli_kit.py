"""The `nightjar` command as a process, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.forked import Forked, is_like_this_process

JOBS = [sys.executable, "-m", "jobs"]
LINE = '{"example_id": "%s", "messages": [["user", "text", "%s"]]}\n'
CLOSED_PORT = 9


def call(
    folder: Path, *arguments: str, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
    clean["XDG_STATE_HOME"] = str(folder / "state")
    done = run_command(folder, arguments, clean | environment, stdin)
    assert "Traceback" not in done.stderr
    return done


def run_command(
    folder: Path, arguments: Sequence[str], environment: dict[str, str], stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `nightjar` in a folder to its end, with these variables and no others."""
    command = [*JOBS, *arguments]
    if not is_like_this_process(environment, but_for_paths=True):
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=400,
            check=False,
        )
    with TemporaryDirectory() as kept:
        files = [Path(kept, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin or "")
        process = Forked(
            "jobs", arguments, cwd=folder, env=environment, stdin=files[0], stdout=files[1], stderr=files[2]
        )
        try:
            code = process.wait(400)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, code, files[1].read_text(), files[2].read_text())


def error_code(done: subprocess.CompletedProcess[str]) -> str:
    view = json.loads(done.stderr.splitlines()[-1])
    assert view["schema"] == "nightjar.error/1"
    assert view["error"]["message"]
    return view["error"]["code"]

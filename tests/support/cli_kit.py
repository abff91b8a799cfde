"""The `nightjar` command as a process, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

JOBS = [sys.executable, "-m", "jobs"]
LINE = '{"example_id": "%s", "messages": [["user", "text", "%s"]]}\n'
CLOSED_PORT = 9


def call(folder: Path, *arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
    clean["XDG_STATE_HOME"] = str(folder / "state")
    done = subprocess.run(
        [*JOBS, *arguments], cwd=folder, env=clean | environment, capture_output=True, text=True, input=stdin, timeout=400, check=False
    )
    assert "Traceback" not in done.stderr
    return done


def error_code(done: subprocess.CompletedProcess[str]) -> str:
    view = json.loads(done.stderr.splitlines()[-1])
    assert view["schema"] == "nightjar.error/1"
    assert view["error"]["message"]
    return view["error"]["code"]

"""A Nightjar server for the time of the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PLACES = (_ROOT / ".venv/bin/nightjar", _ROOT / "integrations/pipecat-nightjar/.venv-server/bin/nightjar")
_PATIENCE_SECONDS = 600.0


def nightjar_command() -> list[str]:
    """How to start Nightjar, which lives in another environment than Pipecat. Raises `FileNotFoundError`
    where there is none."""
    if python := os.environ.get("NIGHTJAR_PYTHON"):
        return [python, "-P", "-m", "jobs"]
    found = shutil.which("nightjar") or next((str(place) for place in _PLACES if place.exists()), None)
    if found is None:
        raise FileNotFoundError(
            "There is no `nightjar` here. Install Nightjar with its extra `serve`, or give --server URL."
        )
    return [found]


@contextmanager
def speech_server(model: str) -> Iterator[str]:
    """Starts `nightjar serve` on a free port, waits until the model is loaded, and gives the server's
    address."""
    command = [*nightjar_command(), "serve", "--model", model, "--port", "0", "--json", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"The speech server did not start: {' '.join(command)}")
        url = json.loads(line)["url"]
        _wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait(120)


def running_server(url: str) -> str:
    """The address of a server that somebody else has started. Raises `ConnectionError` where none answers."""
    try:
        _ask(url)
    except urllib.error.HTTPError:
        # It is there, and may be loading its model.
        pass
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"No speech server answers at {url}: {error}. Start one with `nightjar serve`, or leave --server out."
        ) from None
    return url


def _ask(url: str) -> None:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        f"{url.rstrip('/')}/health", timeout=5
    ).close()


def _wait_until_ready(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            _ask(url)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError("The speech server did not load its model.")

"""A real browser for tests: Chromium without a window, driven over its debugging pipe. Tests skip where
there is none."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def require_browser() -> str:
    """The browser's path; skips the test where none is installed."""
    for name in _NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed")


class Browser:
    """One page of one browser. A context manager."""

    def __init__(self, path: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="nightjar-browser-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--mute-audio",
            "--disable-background-networking",
        ]
        flags += [
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}",
            f"--window-size={width},{height}",
        ]
        # The browser reads commands from descriptor 3 and answers on 4.
        shell = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        command = ["bash", "-c", shell, str(to_read), str(to_write), path, *flags, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        #: Every event so far, as (method, parameters).
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self._first_page()
        self._session = self.call("Target.attachToTarget", session=False, targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def _first_page(self) -> str:
        """The page that the browser opens at its start; extensions and workers of its own may come before
        it."""
        while True:
            for target in self.call("Target.getTargets", session=False)["targetInfos"]:
                if target["type"] == "page":
                    return target["targetId"]
            time.sleep(0.02)

    def call(self, method: str, *, session: bool = True, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        """Loads a page to its end."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until(lambda: any(method == "Page.loadEventFired" for method, _ in self.events))

    def value(self, expression: str) -> Any:
        """What an expression in the page comes to; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key as a person presses it."""
        codes = {"Tab": (9, ""), "Enter": (13, "\r"), "Space": (32, " ")}
        code, text = codes[key]
        name = " " if key == "Space" else key
        common: dict[str, Any] = {
            "key": name,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, to: Path) -> None:
        """The whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        to.write_bytes(base64.b64decode(data))

    def until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        """Waits until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the browser took too long"
            self.value("1")
            time.sleep(0.02)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(message)
        if "method" in answer:
            self.events.append((answer["method"], answer.get("params", {})))
        return answer

"""The demo with a browser: a client that acts like its page asks a question, gets an answer and interrupts
it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pipecat.frames.protobufs.frames_pb2 as frames
import pytest
from conftest import PATIENCE_SECONDS, Ears, NightjarServer
from run import read_question
from stub_llm import answer
from test_voice_agent import DEMO, QUESTION, environment
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

PAGE = DEMO / "page"
MICROPHONE_RATE, SPEECH_RATE = 16_000, 24_000
BLOCK_BYTES = MICROPHONE_RATE // 50 * 2


class Page:
    """Acts like the page, without a browser: sends the audio of a microphone in blocks of 20 ms, and keeps
    the audio that it receives."""

    def __init__(self, socket: ClientConnection, question: bytes) -> None:
        self._socket = socket
        self._question = question
        self._to_say = b""
        self._heard = asyncio.Condition()
        #: The speech since the last interruption.
        self.audio = b""
        #: Seconds of the answer that had arrived at each interruption.
        self.cut_seconds: list[float] = []

    def ask(self) -> None:
        self._to_say = self._question

    async def speak(self) -> None:
        """Sends the question, and silence when there is no question."""
        while True:
            block, self._to_say = self._to_say[:BLOCK_BYTES], self._to_say[BLOCK_BYTES:]
            audio: Any = frames.AudioRawFrame(
                audio=block.ljust(BLOCK_BYTES, b"\0"), sample_rate=MICROPHONE_RATE, num_channels=1
            )
            await self._socket.send(frames.Frame(audio=audio).SerializeToString())
            # A microphone is not faster.
            await asyncio.sleep(0.02)

    async def hear(self) -> None:
        async for message in self._socket:
            frame = frames.Frame.FromString(message)
            kind = frame.WhichOneof("frame")
            async with self._heard:
                if kind == "interruption":
                    self.cut_seconds.append(len(self.audio) / 2 / SPEECH_RATE)
                    self.audio = b""
                elif kind == "audio":
                    assert frame.audio.sample_rate == SPEECH_RATE
                    self.audio += frame.audio.audio
                self._heard.notify_all()

    async def until_seconds(self, seconds: float) -> None:
        """Waits until this much of an answer has arrived."""
        async with asyncio.timeout(PATIENCE_SECONDS), self._heard:
            await self._heard.wait_for(lambda: len(self.audio) >= seconds * SPEECH_RATE * 2)

    async def until_interrupted(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), self._heard:
            await self._heard.wait_for(lambda: len(self.cut_seconds) >= count)


@contextlib.asynccontextmanager
async def opened(address: str, origin: str | None = None) -> AsyncIterator[Page]:
    """The page's connection; `origin`: as from a page of another site."""
    parts = urlsplit(address)
    site: Any = origin or f"http://{parts.netloc}"
    async with connect(
        f"ws://127.0.0.1:{parts.query.removeprefix('audio=')}", origin=site, max_size=None
    ) as socket:
        page = Page(socket, read_question(DEMO / "question.wav"))
        tasks = [asyncio.create_task(page.speak()), asyncio.create_task(page.hear())]
        yield page
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def demo(server: NightjarServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, DEMO / "run.py", "--browser", "--port", "0", "--server", server.url]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    yield process
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()


def lines_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    found = next((found for line in process.stdout if (found := re.search(pattern, line))), None)
    assert found is not None, "the demo ended"
    return found


def test_a_page_asks_hears_the_answer_and_interrupts_it(
    demo: subprocess.Popen[str], server: NightjarServer, ears: Ears
) -> None:
    address = lines_until(demo, r"Open (\S+)")[1]
    netloc = urlsplit(address).netloc
    for path in ("/", *(f"/{file.name}" for file in PAGE.glob("*.js"))):
        page = http.client.HTTPConnection(netloc, timeout=60)
        page.request("GET", path)
        served = page.getresponse()
        assert (served.status, b"http" in served.read().replace(b"https", b"")) == (200, False), (
            "a page of its own"
        )
        page.close()

    spoken = server.metrics()["speech_engine_requests_total"]

    async def talk() -> None:
        with pytest.raises(InvalidStatus, match="403"):
            async with opened(address, "http://evil.example"):
                pass
        async with opened(address) as page:
            page.ask()
            await page.until_seconds(1)
            # A user who begins to speak interrupts, even if no answer is being spoken.
            assert page.cut_seconds == [0]
            page.ask()
            await page.until_interrupted(2)
            # Both answers are the same, so the report of either says how long one is.
            seconds = float((await asyncio.to_thread(lines_until, demo, r"\((\d+\.\d) s of speech"))[1])
            assert 1 <= page.cut_seconds[1] < seconds - 1
            await page.until_seconds(seconds - 0.1)
            heard = await asyncio.to_thread(ears.word_error_rate, page.audio, SPEECH_RATE, answer(QUESTION))
            assert heard <= 0.1

    asyncio.run(talk())
    assert server.metrics()["speech_engine_requests_total"] > spoken


@pytest.mark.skipif(shutil.which("node") is None, reason="node reads the page's JavaScript")
def test_the_page_reads_and_writes_frames_of_pipecat(tmp_path: Path) -> None:
    spoken = frames.Frame(
        audio=frames.AudioRawFrame(
            id=300, name="n", audio=b"\x01\x02\xff\xff", sample_rate=24_000, num_channels=1, pts=7
        )
    )
    interrupted = frames.Frame(interruption=frames.InterruptionFrame(id=1, name="i"))
    script = f"""
        import {{ audioFrame, readFrame }} from "{PAGE / "frames.js"}";
        const hex = (bytes) => Buffer.from(bytes).toString("hex"), bytes = (text) => new Uint8Array(Buffer.from(text, "hex"));
        const heard = readFrame(bytes("{spoken.SerializeToString().hex()}"));
        console.log(hex(audioFrame(Int16Array.of(1, -2, 300), 16000)));
        console.log(JSON.stringify([[...heard.samples], heard.rate, readFrame(bytes("{interrupted.SerializeToString().hex()}"))]));
    """
    (tmp_path / "script.mjs").write_text(script)
    done = subprocess.run(
        ["node", tmp_path / "script.mjs"], capture_output=True, text=True, timeout=60, check=True
    )
    sent, heard = done.stdout.splitlines()
    frame = frames.Frame.FromString(bytes.fromhex(sent)).audio
    assert (frame.audio, frame.sample_rate, frame.num_channels) == (b"\x01\x00\xfe\xff\x2c\x01", 16_000, 1)
    assert heard == '[[513,-1],24000,{"interrupted":true}]'
    for file in PAGE.glob("*.js"):
        subprocess.run(["node", "--check", "--input-type=module"], stdin=file.open(), timeout=60, check=True)

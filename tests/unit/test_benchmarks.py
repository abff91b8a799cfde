"""What benchmarks read and compute from it: answers of servers, when speech is audible, and the energy of a span."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from benchmarks.clients import HttpConnection, first_audible
from benchmarks.common import GpuReading, Use, energy


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("*.py")))
def test_the_modules_of_benchmarks_use_what_the_product_has(name: str) -> None:
    import_module(f"benchmarks.{name}")


def test_speech_is_audible_from_two_loud_frames_on() -> None:
    rate, tone = 24_000, np.sin(np.arange(24_000) / 4)
    sound = np.zeros(36_000)
    # One loud frame of 20 ms: those that begin 10 ms before and after it have half of its sound.
    sound[2544:2736] = 500 * tone[:192]
    sound[12_000:] += 300 * tone
    content = (sound + 2000).astype("<i2").tobytes()
    # The second piece comes 0.15 s after the first one, of 0.1 s and half a sample, was played.
    found = first_audible([(5.0, content[:4801]), (5.25, content[4801:])], rate)
    assert found == (pytest.approx(5.0 + 0.15 + 0.5, abs=1e-3), 0.5)
    assert first_audible([(0.0, content[: 2 * 11_000])], rate) is None
    assert first_audible([(0.0, b"\0" * 9)], rate) is None


#: The text of a request -> what a server answers.
ANSWERS = {
    b"speak": b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    b"wait!": b'429 Full\r\nContent-Length: 33\r\n\r\n{"error": {"code": "queue_full"}}',
    b"leave": b"200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab",
    b"break": b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na",
}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    content = b"speak"
    while content in (b"speak", b"wait!"):
        assert b"Content-Length: 5\r\n" in await reader.readuntil(b"\r\n\r\n")
        content = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 " + ANSWERS[content] if content in ANSWERS else b"220 example SMTP\r\n\r\n")
    writer.close()


def test_an_answer_is_read_to_its_end_and_the_connection_kept_where_it_may_be() -> None:
    async def heard(*contents: bytes) -> list[tuple[str, bytes, bool]]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connection, found = await HttpConnection(f"http://127.0.0.1:{port}").open(), []
            for content in contents:
                pieces: list[bytes] = []
                failure = await connection.ask(content, lambda _at, piece, to=pieces: to.append(piece))
                found.append((failure, b"".join(pieces), connection.closed))
            connection.hang_up()
            return found

    kept = [("", b"abcde", False), ("429 queue_full", b"", False), ("", b"ab", True)]
    assert asyncio.run(heard(b"speak", b"wait!", b"leave")) == kept
    assert asyncio.run(heard(b"break")) == [("connection lost", b"a", True)]
    assert asyncio.run(heard(b"other")) == [("no answer of this protocol", b"", True)]


def test_energy_is_that_of_the_counters_for_the_audio_made() -> None:
    boards = [
        [GpuReading(at, 1.0, 0, 1980, 600.0, 100 + watts * at) for at in (3.0, 3.5, 5.0)]
        for watts in (400, 200)
    ]
    assert energy(boards, 1200.0) == {"joules_per_audio_s": pytest.approx(0.5)}
    # Nothing is known of one reading, or without audio.
    assert energy([boards[0][:1]], 1200.0) == energy(boards, None) == energy([], 1200.0) == {}
    Use.traces = True
    try:
        assert energy(boards[:1], 1000.0)["power_trace"][0][1] == [0.5, 600.0, 1980]
    finally:
        Use.traces = False

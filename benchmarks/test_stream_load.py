"""The load generator of streams: its arithmetic with a fake clock, its parsers at every cut, and whole
runs on this host."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stream_gpu, stream_load
from benchmarks.process_use import family_memory_mib, listener_pid, thread_seconds
from benchmarks.stream_client import Address, AnswerParser, FrameParser, fetch, masked_frame
from benchmarks.stream_figures import goals_of, lines_of, load_of, over_seeds, percentile, plot, row_of, table
from benchmarks.stream_local import LocalServer, _frame, _message, chunks_of
from benchmarks.stream_probe import cancel_times, first_requests, left_over
from benchmarks.stream_worker import Player, arrivals, text_of

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Rate: 24000\r\n\r\n"
    b"5\r\nab\r\nc\r\n3;name=value\r\n\x00\x01\x02\r\n00A\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)
COUNTED = b"HTTP/1.1 429 Too Many\r\nContent-Length: 7\r\nRetry-After: 1\r\n\r\nab\r\n\r\nc"


def fed(data: bytes, cuts: list[int]) -> tuple[AnswerParser, bytes]:
    parser, body = AnswerParser(), b""
    for start, end in pairwise([0, *cuts, len(data)]):
        body += parser.feed(data[start:end])
    return parser, body


@pytest.mark.parametrize(
    ("answer", "status", "content"),
    [(CHUNKED, 200, b"ab\r\nc\x00\x01\x020123456789"), (COUNTED, 429, b"ab\r\n\r\nc")],
)
def test_an_answer_is_the_same_wherever_it_is_cut(answer: bytes, status: int, content: bytes) -> None:
    chance = random.Random(3)
    ways = [[cut] for cut in range(1, len(answer))] + [list(range(1, len(answer)))]
    ways += [sorted(chance.sample(range(1, len(answer)), 6)) for _ in range(50)]
    for cuts in ways:
        parser, body = fed(answer, cuts)
        assert (parser.status, body, parser.done) == (status, content, True)
    parser, body = fed(answer + b"HTTP/1.1", [])
    assert (body, parser.rest) == (content, b"HTTP/1.1")
    assert not fed(answer[:-1], [])[0].done


def test_an_answer_without_a_length_ends_with_the_connection_and_others_do_not() -> None:
    parser, body = fed(b"HTTP/1.1 200 OK\r\n\r\nabc", [])
    assert (body, parser.done, parser.ended()) == (b"abc", False, True)
    assert not fed(CHUNKED[:-3], [])[0].ended()
    with pytest.raises(ValueError, match=r"no HTTP/1\.1 answer"):
        AnswerParser().feed(b"SSH-2.0 x\r\n\r\n")


@pytest.mark.parametrize("size", [0, 5, 125, 126, 65535, 65536])
def test_a_websocket_message_is_the_same_wherever_it_is_cut(size: int) -> None:
    message = {"data": "x" * size}
    data = _frame(message) + b"\x89\x02hi" + b"\x01\x01{\x80\x01}"
    cuts = range(1, len(data)) if size < 200 else (1, 2, 3, 4, 9, 10, 11, len(data) - 1)
    for cut in cuts:
        parser = FrameParser()
        found = parser.feed(data[:cut]) + parser.feed(data[cut:])
        assert [(opcode, json.loads(content) if opcode == 1 else content) for opcode, content in found] == [
            (1, message),
            (9, b"hi"),
            (1, {}),
        ]


def test_a_clients_messages_are_masked_and_read_by_a_server() -> None:
    async def read(content: bytes) -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(masked_frame(content))
        return await _message(reader)

    for size in (0, 125, 126, 65535, 65536):
        assert masked_frame(b"x" * size)[1] & 128
        assert asyncio.run(read(b"x" * size)) == b"x" * size


def test_arrivals_are_those_of_their_seed_and_come_at_the_rate() -> None:
    first = list(arrivals(20.0, random.Random(1), 100.0, 1100.0))
    assert first == list(arrivals(20.0, random.Random(1), 100.0, 1100.0))
    assert first[:5] != list(arrivals(20.0, random.Random(2), 100.0, 1100.0))[:5]
    assert 100.0 < first[0] < first[-1] < 1100.0
    waits = [later - earlier for earlier, later in pairwise(first)]
    mean = sum(waits) / len(waits)
    variance = sum((wait - mean) ** 2 for wait in waits) / len(waits)
    # A Poisson process: waits are as spread as they are long.
    assert mean == pytest.approx(1 / 20, rel=0.03)
    assert variance == pytest.approx(mean**2, rel=0.06)
    assert list(arrivals(1.0, random.Random(1), 5.0, 5.0)) == []


def test_a_player_starts_with_the_first_audio_and_waits_when_it_has_none() -> None:
    player = Player()
    for at, seconds in ((10.0, 0.08), (10.05, 0.16), (10.24, 0.32), (10.66, 0.1), (11.0, 1.0)):
        player.heard(at, seconds)
    # Audio ends at 10.24, 10.56 (in time), 10.56 -> waits until 10.66, ends at 10.76, waits until 11.
    assert player.underruns == [pytest.approx(0.1), pytest.approx(0.24)]
    assert player.silent_at == pytest.approx(12.0)
    assert player.audio_seconds == pytest.approx(1.66)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([3.0], 0.5) == percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) is None


def test_texts_are_one_sentence_as_long_as_their_speech() -> None:
    for seconds in (2.0, 5.0, 8.0):
        text = text_of(seconds, 7)
        assert text == text_of(seconds, 7) != text_of(seconds, 8)
        assert 15 * seconds - 3 <= len(text) <= 15 * seconds + 1
        assert text.count(".") == 1
        assert "?" not in text


def heard(sent: float, **more: Any) -> dict[str, Any]:
    found = {
        "sent": sent,
        "late": 0.0,
        "batch": False,
        "asked_audio": 4.0,
        "first": 0.02,
        "took": 1.0,
        "audio": 4.0,
        "underruns": [],
    }
    return found | {"failure": ""} | more


def test_a_row_counts_what_was_sent_in_its_span() -> None:
    process = {
        "heard": [
            heard(9.0, first=9.0),
            heard(10.0, first=0.01),
            heard(11.0, first=0.03, underruns=[0.05, 0.1], took=2.0),
            heard(12.0, first=None, audio=0.0, failure="429 queue_full"),
            heard(13.0, first=None, failure="no audio in time"),
            heard(14.0, failure="cancelled"),
            heard(15.0, failure="cut off", audio=1.0),
            heard(16.0, batch=True, first=1.0),
            heard(17.0, audio=1.0),
            heard(20.0, first=9.0),
        ],
        "stream_audio_s": 15.0,
        "batch_audio_s": 5.0,
    }
    row = row_of([process, {"heard": [], "stream_audio_s": 5.0, "batch_audio_s": 0.0}], 10.0, 20.0)
    assert row["first_pcm_ms"] == {"50": 20.0, "95": 30.0, "99": 30.0, "max": 30.0}
    assert (row["underrun_share"], row["underruns"], row["underrun_ms"]["95"]) == (0.2, 2, 100.0)
    assert (row["audio_s_per_s"], row["batch_audio_s_per_s"], row["batch_requests"]) == (2.0, 0.5, 1)
    assert (row["requests"], row["cancelled"], row["cut_off"], row["too_short"]) == (8, 1, 1, 1)
    assert row["failures"] == {"429 queue_full": 1, "no audio in time": 1}
    assert row["rtf"] == pytest.approx(0.5)


def test_seeds_give_medians_of_figures_and_sums_of_counts() -> None:
    rows = [
        {
            "first_pcm_ms": {"95": value},
            "requests": 10,
            "failures": {"429": 1} if value == 3.0 else {},
            "underrun_share": share,
            "rtf": None,
        }
        for value, share in ((3.0, 0.0), (1.0, 0.5), (2.0, 0.1))
    ]
    joined = over_seeds(rows)
    assert joined == {
        "first_pcm_ms": {"95": 2.0},
        "requests": 30,
        "failures": {"429": 1},
        "underrun_share": 0.1,
        "rtf": None,
    }
    assert over_seeds(rows[:1]) is rows[0]


ROW = row_of([{"heard": [heard(1.0)], "stream_audio_s": 4.0, "batch_audio_s": 0.0}], 0.0, 2.0)
OPEN = {"size": "1b7", "mode": "open", "rate": 20.0, "protocol": "http", **ROW}
CLOSED = {"size": "1b7", "mode": "closed", "clients": 64, "protocol": "websocket", **ROW}


def test_rows_are_shown_beside_their_goals() -> None:
    assert goals_of(OPEN) == (25, 45)
    assert goals_of(CLOSED) == (50, 120)
    assert goals_of({**CLOSED, "listen": True}) is None
    assert goals_of({**CLOSED, "size": ""}) is None
    assert (
        load_of({**CLOSED, "listen": True, "batch_clients": 192, "cancel": 0.3})
        == "listen 64 + 192 whole cancel 30%"
    )
    shown = table([OPEN, CLOSED]).splitlines()
    assert shown[1].split()[:7] == ["1b7", "open", "20/s", "http", "20.0", "20.0", "20.0"]
    assert shown[2].split()[7] == "120"
    lines = {
        line.name: line
        for line in lines_of([OPEN, {**OPEN, "rate": 50.0}, CLOSED, {**OPEN, "batch_clients": 3}], "open")
    }
    assert lines["1b7, http"].points == ((20.0, 20.0), (50.0, 20.0))
    assert lines["must"].dashed
    assert plot({"rows": [OPEN, CLOSED]}, "closed").count("<polyline") == 3
    with pytest.raises(ValueError, match="nothing"):
        plot({"rows": [OPEN]}, "closed")


@pytest.fixture
def local() -> Iterator[tuple[LocalServer, str]]:
    """A local server on a thread of its own, and its address."""
    loop = asyncio.new_event_loop()
    server = LocalServer(first_seconds=0.002, chunk_seconds=0.002, slots=6)
    listening = loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever, name="local-server")
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        listening.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


QUICK = ("--warm-up", "0.1", "--duration", "0.5", "--drain", "2", "--processes", "2", "--seconds", "0.3", "1")


def run(url: str, path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    status = stream_load.main([url, *QUICK, "--json", str(path), *more])
    return status, json.loads(path.read_text())


def test_the_tool_measures_both_protocols_in_a_closed_loop(
    local: tuple[LocalServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = local
    status, found = run(
        url, tmp_path / "found.json", "--clients", "3", "--protocol", "http", "websocket", "--size", "tiny"
    )
    assert status == 0
    assert [(row["protocol"], row["clients"], row["size"]) for row in found["rows"]] == [
        ("http", 3, "tiny"),
        ("websocket", 3, "tiny"),
    ]
    for row in found["rows"]:
        assert row["requests"] > 0
        assert 0 < row["first_pcm_ms"]["50"] <= row["first_pcm_ms"]["95"]
        assert (row["failures"], row["too_short"], row["left_over"]) == ({}, 0, 0)
        assert row["audio_s_per_s"] > 0
        assert sum(row["threads"].values()) > 0
    assert found["first_request_ms"] > 0
    assert server.answered > 6
    assert (tmp_path / "found_closed.svg").read_text().startswith("<svg")
    assert "closed 3" in capsys.readouterr().out


def test_the_open_loop_has_medians_over_seeds_and_refusals_count(
    local: tuple[LocalServer, str], tmp_path: Path
) -> None:
    server, url = local
    status, found = run(url, tmp_path / "found.json", "--mode", "open", "--rate", "30", "--seeds", "2")
    (row,) = found["rows"]
    assert (status, row["seeds"], row["rate"]) == (0, 2, 30)
    assert row["requests"] > 10
    server.slots = 0
    status, found = run(url, tmp_path / "found.json", "--clients", "1")
    assert status == 1
    assert set(found["rows"][0]["failures"]) == {"429 queue_full"}


def test_listeners_keep_to_the_time_of_their_audio(local: tuple[LocalServer, str], tmp_path: Path) -> None:
    _, url = local
    _, found = run(
        url,
        tmp_path / "found.json",
        "--clients",
        "4",
        "--listen",
        "--batch-clients",
        "1",
        "--text-lengths",
        "--field",
        "max_seconds=0.4",
    )
    (row,) = found["rows"]
    # A listener of 0.4 s asks at most twice in half a second, one that goes on at once a hundred times.
    assert 0 < row["requests"] - row["batch_requests"] <= 4 * 2
    assert row["batch_requests"] > 3


@pytest.mark.parametrize("protocol", ["http", "websocket"])
def test_cancelled_streams_are_no_failures_and_their_places_are_free(
    local: tuple[LocalServer, str], tmp_path: Path, protocol: str
) -> None:
    _, url = local
    status, found = run(
        url, tmp_path / "found.json", "--clients", "3", "--cancel", "0.5", "--protocol", protocol
    )
    (row,) = found["rows"]
    assert status == 0
    assert 0 < row["cancelled"] < row["requests"]
    assert found["cancel"]["stuck"] == row["left_over"] == 0
    assert found["cancel"]["server_ms"]["max"] > 0


def test_what_has_no_audio_when_time_is_up_is_a_failure(
    local: tuple[LocalServer, str], tmp_path: Path
) -> None:
    server, url = local
    server.first_seconds = 3.0
    target = stream_load.target_of(url)
    load = stream_load.Load("closed", clients=2, warm_up=0.0, duration=0.5, drain=0.2, processes=1)
    row = stream_load.measure(target, load)
    assert row["failures"] == {"no audio in time": 2}
    server.first_seconds = 0.0


def test_a_load_starts_when_all_its_clients_are_connected(
    local: tuple[LocalServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = local
    greet = server._websocket

    async def late(*arguments: Any) -> None:
        await asyncio.sleep(1.0)
        await greet(*arguments)

    monkeypatch.setattr(server, "_websocket", late)
    load = stream_load.Load(
        "closed",
        "websocket",
        clients=2,
        warm_up=0.0,
        duration=0.5,
        drain=2.0,
        seconds=(0.3, 1.0),
        processes=2,
    )
    assert stream_load.measure(stream_load.target_of(url), load)["requests"] > 0


def test_single_requests_and_the_places_that_are_taken(local: tuple[LocalServer, str]) -> None:
    server, url = local
    plan = stream_load.target_of(url).plan()
    found = asyncio.run(first_requests(plan, 0.5, 3))
    assert len(found["next_requests_ms"]) == 2
    assert asyncio.run(cancel_times(plan, 3, 1.0))["streams"] == 3
    server.running += 1
    assert asyncio.run(left_over(Address(url), 0.0)) > 0
    assert asyncio.run(fetch(Address(url), "/nothing"))[0] == 404


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert stream_load.main(["http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("The server does not answer")


def test_silence_is_cut_as_a_stream_is() -> None:
    assert [len(piece) // 3840 for piece in chunks_of(2.0)] == [1, 2, 4, 8, 10]


def test_a_listening_process_and_its_threads_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert listener_pid(listener.getsockname()[1]) == os.getpid()
    assert sum(thread_seconds([os.getpid()]).values()) > 0
    assert family_memory_mib([os.getpid()]) > 10


def test_the_gpu_script_measures_a_real_pipeline_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "stream.json"
    asked = [
        "--device",
        "cpu",
        "--sizes",
        "tiny",
        "--clients",
        "2",
        "--parts",
        "first",
        "closed",
        "cancel",
        "--cancels",
        "3",
    ]
    asked += [
        "--closed-seconds",
        "2",
        "--closed-warm-up",
        "0.5",
        "--seconds",
        "0.3",
        "0.6",
        "--json",
        str(path),
        "--folder",
        str(tmp_path),
    ]
    assert stream_gpu.main([*asked, "--server", "--slots 4 --waiting-room 8 --option slots=4"]) == 0
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    assert (row["size"], row["failures"], row["too_short"], row["left_over"]) == ("tiny", {}, 0, 0)
    assert row["requests"] > 0
    assert found["facts_tiny"]["first_request_ms"] > 0
    assert found["facts_tiny"]["cancel"]["stuck"] == 0
    assert any("engine" in name for name in row["threads"])

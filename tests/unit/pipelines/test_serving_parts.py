"""The parts of a server: its gate, what it takes for audio, and how it writes streams."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import socket
import threading
import time
import wave
from contextlib import suppress

import numpy as np
import pytest
import soundfile

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ConfigError, ErrorCode, InputError, SynthesisError
from pipelines.request import EngineStats
from pipelines.serving import ServeOptions, request_body
from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.connections import Connections
from pipelines.serving.encoding import SpeechFormat, read_audio, stream_encoder, whole_file
from pipelines.serving.errors import ApiError, as_api_error
from pipelines.serving.model import Progress
from pipelines.serving.request_body import MAX_DELIMITERS, MAX_DEPTH, MAX_VALUES, BodyMemory, LimitedBody
from pipelines.serving.server import bound_socket
from pipelines.serving.speech import SpeechBody
from tests.support.fakes import FakeClock
from tests.support.serving_kit import b64, heard, wav


def tone(samples: int) -> np.ndarray:
    return (0.3 * np.sin(np.arange(samples) / 20)).astype(np.float32)


async def asked(gate: AdmissionQueue, count: int) -> list[asyncio.Task[Permit]]:
    turns = [asyncio.create_task(gate.admit()) for _ in range(count)]
    await turned()
    return turns


async def turned() -> None:
    """Gives those who were let in, or gave up, their turn on the loop."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_gate_serves_in_order_and_says_when_to_come_back() -> None:
    async def play() -> None:
        gate = AdmissionQueue(slots=2, waiting_room=2)
        first, second, third, fourth = turns = await asked(gate, 4)
        assert [turn.done() for turn in turns] == [True, True, False, False]
        with pytest.raises(ApiError) as caught:
            await gate.admit()
        assert caught.value.status_code == 429
        assert int((caught.value.headers or {})["retry-after"]) >= 1
        first.result().release()
        await turned()
        assert (third.done(), fourth.done(), gate.running, gate.waiting) == (True, False, 2, 1)
        fourth.cancel()
        third.result().release()
        second.result().release()
        await turned()
        assert (gate.running, gate.waiting) == (0, 0)
        gate.closed = True
        with pytest.raises(ApiError) as caught:
            await gate.admit()
        assert caught.value.status_code == 503

    asyncio.run(play())


def test_a_gate_that_grows_lets_waiters_in_and_one_that_shrinks_sends_nobody_away() -> None:
    async def play() -> None:
        gate = AdmissionQueue(slots=1, waiting_room=4)
        turns = await asked(gate, 5)
        gate.resize(3)
        await turned()
        assert ([turn.done() for turn in turns], gate.running, gate.waiting) == (
            [True, True, True, False, False],
            3,
            2,
        )
        gate.resize(1)
        turns[0].result().release()
        turns[1].result().release()
        await turned()
        assert (turns[3].done(), gate.running) == (False, 1)
        turns[2].result().release()
        await turned()
        assert (turns[3].done(), turns[4].done(), gate.running) == (True, False, 1)

    asyncio.run(play())


def test_a_slot_is_free_when_the_last_one_lets_go() -> None:
    async def play() -> None:
        gate = AdmissionQueue(slots=1, waiting_room=1)
        permit = await gate.admit()
        permit.hold()
        permit.release()
        assert gate.running == 1
        (waiting,) = await asked(gate, 1)
        permit.release()
        await turned()
        assert waiting.done()
        waiting.result().release()
        assert gate.running == 0

    asyncio.run(play())


def test_a_slot_that_was_given_to_a_client_that_leaves_goes_to_the_next() -> None:
    async def play() -> None:
        gate = AdmissionQueue(slots=1, waiting_room=2)
        first, second, third = await asked(gate, 3)
        first.result().release()
        # The slot is its own already.
        second.cancel()
        await turned()
        assert (third.done(), gate.running, gate.waiting) == (True, 1, 0)

    asyncio.run(play())


def test_a_connection_ends_once_and_the_time_of_waiting_is_told() -> None:
    async def play() -> None:
        waited = list[float]()
        gate = AdmissionQueue(slots=1, waiting_room=0, admitted=waited.append)
        permit = await gate.admit(since=time.monotonic() - 5)
        assert 5 <= waited[0] < 60
        permit.hold()
        permit.disconnect()
        permit.disconnect()
        assert gate.running == 1
        permit.release()
        assert gate.running == 0

    asyncio.run(play())


def test_a_closed_gate_lets_the_next_part_of_a_request_in() -> None:
    gate = AdmissionQueue(slots=1, waiting_room=0, closed=True)
    asyncio.run(gate.admit(continuing=True))
    assert gate.running == 1


def test_random_comings_and_goings_leave_no_slot_taken() -> None:
    async def visit(gate: AdmissionQueue, dice: np.random.Generator) -> None:
        turn = asyncio.create_task(gate.admit())
        await asyncio.wait((turn,), timeout=float(dice.uniform(0, 0.004)))
        turn.cancel()
        with suppress(ApiError, asyncio.CancelledError):
            permit = await turn
            await asyncio.sleep(float(dice.uniform(0, 0.002)))
            permit.release()

    async def play() -> None:
        gate, dice = AdmissionQueue(slots=3, waiting_room=20), np.random.default_rng(7)
        for _ in range(20):
            await asyncio.gather(*(visit(gate, dice) for _ in range(30)))
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(play())


def flac(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(8000 * seconds)), 8000, format="FLAC")
    return file.getvalue()


def test_audio_is_base64_or_a_data_url() -> None:
    sound = wav(0.5)
    lines = base64.encodebytes(sound).decode()
    for text in (
        b64(sound),
        lines,
        f"data:audio/wav;base64,{b64(sound)}",
        f"data:audio/x-wav;codecs=1;base64,{b64(sound)}",
    ):
        assert read_audio(text, 1.0) == sound
    assert read_audio(b64(flac(0.5)), 1.0) == flac(0.5)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("%%%%", ErrorCode.INPUT_AUDIO_UNREADABLE),
        (b64(wav(0.1))[:-3], ErrorCode.INPUT_AUDIO_UNREADABLE),
        (b64(b"no sound at all"), ErrorCode.INPUT_AUDIO_UNREADABLE),
        (b64(wav(0.1)[:44]), ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("data:audio/wav,abc", ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("https://example.org/a.wav", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("file:///etc/passwd", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        (" s3://bucket/key", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("/etc/passwd", ErrorCode.INPUT_AUDIO_UNREADABLE),
        (b64(wav(7200, 1000)), ErrorCode.INPUT_TOO_LONG),
        (b64(flac(7200)), ErrorCode.INPUT_TOO_LONG),
    ],
)
def test_what_is_no_usable_audio_has_a_reason(text: str, code: ErrorCode) -> None:
    with pytest.raises(InputError) as caught:
        read_audio(text, 600.0)
    assert caught.value.code is code


@pytest.mark.parametrize("head", ["data:", "data:a/", "data:audio/wav;a=", "data:audio/wav;a"])
def test_a_long_head_of_a_data_url_is_not_searched_over_and_over(head: str) -> None:
    """With a pattern that can split it in many ways, this would hold the server for days."""
    with pytest.raises(InputError) as caught:
        read_audio(head + "a" * 2_000_000, 600.0)
    assert caught.value.code is ErrorCode.INPUT_AUDIO_UNREADABLE


@pytest.mark.parametrize("kind", ["wav", "flac", "pcm"])
def test_a_stream_holds_the_samples_of_the_whole_file(kind: SpeechFormat) -> None:
    samples = tone(50_000)
    encoder = stream_encoder(16_000, kind)
    pieces = [encoder.add(samples[start : start + 999]) for start in range(0, len(samples), 999)]
    assert len(b"".join(pieces[:30])) > 5000, "a stream that holds everything back is none"
    data = b"".join(pieces) + encoder.end()
    expected = np.frombuffer(whole_file(samples, 16_000, "pcm"), "<i2")
    if kind == "flac":
        file = soundfile.SoundFile(io.BytesIO(data))
        found = np.zeros(60_000, np.int16)
        # soundfile's own read goes back to a place that it works out of the length, which a stream does not
        # tell.
        place = soundfile._ffi.cast("short*", found.ctypes.data)
        count = soundfile._snd.sf_readf_short(file._file, place, len(found))
        np.testing.assert_array_equal(found[:count], expected)
        assert file.samplerate == 16_000
        return
    if kind == "wav":
        with wave.open(io.BytesIO(data)) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        assert soundfile.info(io.BytesIO(data)).frames == len(samples)
        data = data[44:]
    np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected)


@pytest.mark.parametrize("sample_rate", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_an_mp3_stream_comes_in_pieces_and_has_its_length_for_readers_of_files(sample_rate: int) -> None:
    samples = tone(3 * sample_rate)
    encoder = stream_encoder(sample_rate, "mp3")
    pieces = [encoder.add(samples[start : start + 999]) for start in range(0, len(samples), 999)]
    data = b"".join(pieces) + encoder.end()
    assert len(b"".join(pieces[: len(pieces) // 2])) > 0.4 * len(data), (
        "a stream that holds everything back is none"
    )
    found, rate = soundfile.read(io.BytesIO(data))
    assert rate == sample_rate
    # An encoder's own delay, and the fill of the last frame.
    assert 0 <= len(found) - len(samples) < 0.2 * sample_rate
    assert np.abs(found).max() == pytest.approx(np.abs(samples).max(), rel=0.05)


def test_a_file_says_its_length_and_what_is_no_number_is_refused() -> None:
    for kind in ("wav", "flac"):
        samples, rate = heard(whole_file(tone(1000), 24_000, kind))
        assert (len(samples), rate) == (1000, 24_000)
    with pytest.raises(SynthesisError):
        whole_file(np.array([np.nan], np.float32), 24_000, "pcm")


def test_errors_have_a_status_and_keep_the_engines_words() -> None:
    assert as_api_error(InputError(ErrorCode.INPUT_EMPTY_TEXT, "Nothing.")).status_code == 400
    assert as_api_error(SynthesisError(ErrorCode.SYNTH_NO_EOS, "No end.")).status_code == 422
    assert as_api_error(SynthesisError(ErrorCode.SYNTH_TIMEOUT, "Late.")).status_code == 504
    dead = as_api_error(SynthesisError(ErrorCode.SYNTH_ENGINE, "vLLM failed at /secret/place."))
    assert (dead.status_code, "secret" in str(dead.detail)) == (503, False)
    assert (dead.headers or {})["retry-after"]


def test_keys_are_in_no_text_of_the_options() -> None:
    assert "hunter2" not in repr(ServeOptions(("m",), ("hunter2",)))


def messages(*parts: bytes, more: bool = False) -> list[dict[str, object]]:
    last = len(parts) - 1
    return [
        {"type": "http.request", "body": part, "more_body": more or place < last}
        for place, part in enumerate(parts)
    ]


def inlet(
    script: list[dict[str, object]],
    max_bytes: int = 100,
    seconds: float = 5.0,
    memory: BodyMemory | None = None,
) -> LimitedBody:
    async def receive() -> dict[str, object]:
        if script:
            return script.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return LimitedBody(receive, memory or BodyMemory(max_bytes), seconds)


def test_a_body_is_bounded_in_bytes_and_time() -> None:
    async def play() -> None:
        source = inlet(messages(b"a" * 60, b"b" * 60, b"c" * 1000))
        await source()
        with pytest.raises(ApiError) as caught:
            await source()
        assert (caught.value.status_code, caught.value.code) == (400, "body_too_large")
        source = inlet(messages(b"a", more=True), seconds=0.05)
        await source()
        with pytest.raises(ApiError) as caught:
            await source()
        assert caught.value.status_code == 408

    asyncio.run(play())


def test_signs_of_json_are_counted_while_a_body_arrives() -> None:
    async def play() -> None:
        source = inlet(messages(b"[]," * 200_000, b"[]," * 200_000, b"never read"), max_bytes=1 << 30)
        await source()
        with pytest.raises(ApiError) as caught:
            await source()
        assert (caught.value.status_code, caught.value.code) == (400, "input.bad_json")

    asyncio.run(play())


def test_large_bodies_without_a_slot_are_bounded_together_and_small_ones_are_not() -> None:
    async def play() -> None:
        memory = BodyMemory(1 << 17)
        large = [inlet(messages(b"a" * (1 << 17)), memory=memory) for _ in range(9)]
        for source in large[:8]:
            await source()
        with pytest.raises(ApiError) as caught:
            await large[8]()
        assert (caught.value.status_code, int((caught.value.headers or {})["retry-after"])) == (429, 5)
        await inlet(messages(b"a" * (1 << 16)), memory=memory)()
        large[0].release()
        await inlet(messages(b"a" * (1 << 17)), memory=memory)()
        for source in large:
            source.release()
        assert memory.bytes == 1 << 17

    asyncio.run(play())


def test_fields_that_nobody_knows_are_no_settings() -> None:
    unknown = {"mode": "sung", "instruct": "Whisper.", "max_tokens": 5, "text_temperature": "hot"}
    body = SpeechBody.model_validate({"model": "fake", "input": "Hello.", "cfg": 2.0, **unknown})
    settings = body.settings()
    assert settings["cfg"] == 2.0
    assert not settings.keys() & unknown.keys()


def test_a_host_without_both_ip_versions_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with suppress(ConfigError):
        bound_socket("::1", 0).close()


def shaped(*, opened: int = 0, values: int = 0) -> bytes:
    return (
        b'{"text": "'
        + b'\\\\\\"[{,' * 20_000
        + b'\\\\", "more": '
        + b"[" * opened
        + b"1," * values
        + b"1"
        + b"]" * opened
        + b"}"
    )


def test_json_is_bounded_in_values_and_depth_and_its_texts_are_not() -> None:
    # The object is one level and one value, the comma behind its text another value.
    for given in (shaped(opened=MAX_DEPTH - 1), shaped(opened=1, values=MAX_VALUES - 3)):
        assert request_body.parse(given) == json.loads(given)
    for given in (
        shaped(opened=MAX_DEPTH),
        shaped(opened=1, values=MAX_VALUES - 2),
        b'"' * (MAX_DELIMITERS + 1),
    ):
        with pytest.raises(ApiError) as caught:
            request_body.parse(given)
        assert (caught.value.code, "too many values" in str(caught.value.detail)) == ("input.bad_json", True)


def test_only_short_json_is_parsed_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        request_body, "parse", lambda data: seen.append(threading.current_thread() is threading.main_thread())
    )

    async def play() -> None:
        await request_body.read(b" " * request_body.INLINE_BYTES)
        await request_body.read(" " * (request_body.INLINE_BYTES + 1))

    asyncio.run(play())
    assert seen == [True, False]


def test_requests_are_stuck_when_nothing_has_come_of_any_for_a_while() -> None:
    clock = FakeClock()
    progress = Progress(60.0, clock.monotonic)
    idle = EngineStats()

    def after(seconds: float, stats: EngineStats = idle) -> bool:
        clock.advance(seconds)
        return progress.is_stuck(stats)

    assert not after(0)
    assert not after(1000), "nobody asks for anything"
    progress.calls += 1
    assert [after(59), after(1)] == [False, True]
    assert not after(0, EngineStats(frames=1)), "the engine made a frame"
    assert after(60, EngineStats(frames=1))
    progress.advanced()
    assert not after(0, EngineStats(frames=1)), "a stream gave a chunk"
    progress.calls += 1
    assert not after(59, EngineStats(frames=1))
    progress.advanced()
    progress.calls -= 1
    assert not after(59, EngineStats(frames=1)), "one of two is answered"
    progress.calls += 1
    progress.calls -= 1
    assert after(60, EngineStats(frames=1)), "a client that came and left is no answer"
    progress.calls -= 1
    assert not after(1000, EngineStats(frames=1))


def test_connections_that_cannot_be_accepted_are_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    connections = Connections(10, 10.0, clock.monotonic)
    loop = asyncio.new_event_loop()
    others: list[dict[str, object]] = []
    loop.default_exception_handler = others.append  # type: ignore[method-assign]
    try:
        for second in range(120):
            for _ in range(50):
                connections.on_loop_error(
                    loop, {"exception": OSError(errno.EMFILE, "Too many open files"), "socket": object()}
                )
            clock.advance(1)
            assert len(caplog.records) == 1 + second // 60
        assert "(3000 times" in caplog.records[1].getMessage()
        assert "Too many open files" in caplog.records[1].getMessage()
        connections.on_loop_error(loop, {"exception": OSError(errno.EBADF, "Bad"), "socket": object()})
        connections.on_loop_error(loop, {"message": "Something else."})
        assert len(others) == 2
    finally:
        loop.close()


def test_threads_work_in_order_and_never_keep_a_process() -> None:
    threads = DaemonThreads(2, "work")
    gate = threading.Event()
    try:
        held = [threads.submit(gate.wait, 60) for _ in range(2)]
        behind, failing, unwanted = (
            threads.submit(lambda: "done"),
            threads.submit(lambda: 1 / 0),
            threads.submit(lambda: "never"),
        )
        assert unwanted.cancel()
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("work-"))
        gate.set()
        assert [future.result(240) for future in (*held, behind)] == [True, True, "done"]
        with pytest.raises(ZeroDivisionError):
            failing.result(240)
        gate.clear()
        running, waiting = [threads.submit(gate.wait, 60) for _ in range(2)], threads.submit(lambda: "late")
        threads.shutdown(cancel_futures=True)
        assert waiting.cancelled()
        with pytest.raises(RuntimeError):
            threads.submit(lambda: None)
    finally:
        gate.set()
        threads.shutdown()
    assert all(future.result(240) for future in running if not future.cancelled())


@pytest.mark.parametrize("rate", [16_000, 24_000, 32_000, 44_100])
def test_the_length_of_an_mp3_stream_is_that_of_its_decoded_audio(rate: int) -> None:
    encoder = stream_encoder(rate, "mp3")
    samples = np.random.default_rng(1).normal(0, 0.1, rate + 123).astype(np.float32)
    file = io.BytesIO(encoder.add(samples) + encoder.end())
    found, found_rate = soundfile.read(file)
    assert found_rate == rate
    assert len(found) == pytest.approx(rate * encoder.length(len(samples) / rate))

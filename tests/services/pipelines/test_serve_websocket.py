"""Speech over a WebSocket: contexts, text in pieces, what an agent's client may do, and the key."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pipelines.request import Handle
from pipelines.serving import cartesia
from pipelines.text_units import unit_seed
from tests.services.pipelines.test_serve_speech import alike, qwen
from tests.support.serving_kit import PATIENCE_SECONDS, Running, error_of
from tests.support.stream_voice import SAMPLE_RATE, StreamVoice, tone
from tests.support.websocket_kit import PATH, Talk, talk

TEXT = "Good morning. Dr. Smith paid 3.14 dollars! Is it late?"
UNITS = ["Good morning.", "Dr. Smith paid 3.14 dollars!", "Is it late?"]
SEEDED = {"generation_config": {"seed": 7, "speed": 1.2, "emotion": "calm"}}


@pytest.fixture
def voice() -> StreamVoice:
    return StreamVoice()


@pytest.fixture
def server(voice: StreamVoice) -> Iterator[Running]:
    with Running(voice, slots=4, waiting_room=2) as running:
        yield running
        running.until_idle()
        voice.let_go()


@pytest.fixture
def client(server: Running) -> Iterator[Talk]:
    with talk(server.url) as one:
        yield one


def samples_of(units: list[str], seed: int = 7, rate: int = SAMPLE_RATE) -> NDArray[np.float32]:
    whole = [tone(unit, unit_seed(seed, number)) for number, unit in enumerate(units)]
    return np.concatenate(
        [soxr.resample(one, SAMPLE_RATE, rate, quality="HQ") if rate != SAMPLE_RATE else one for one in whole]
    )


def spoken(units: list[str], seed: int = 7) -> bytes:
    return np.rint(samples_of(units, seed) * 32767).astype("<i2").tobytes()


def output(encoding: str = "pcm_s16le", rate: int = SAMPLE_RATE) -> dict[str, Any]:
    return {"output_format": {"container": "raw", "encoding": encoding, "sample_rate": rate}}


def test_text_in_pieces_gives_the_speech_of_the_joined_text(client: Talk, voice: StreamVoice) -> None:
    client.say("once", TEXT, model_id="tone", voice={"mode": "id", "id": "ada"}, language="en", **SEEDED)
    once = client.hear("once")
    for size in (1, 3, 10):
        for begin in range(0, len(TEXT), size):
            client.say(f"by {size}", TEXT[begin : begin + size], more=True, **SEEDED)
        client.say(f"by {size}", " ")
        assert client.hear(f"by {size}") == once
    assert once == spoken(UNITS)
    assert voice.texts == UNITS * 4
    first = voice.requests[0].generation
    assert (first.voice, first.language) == ("ada", "en")


def test_words_are_spoken_when_their_time_is_over_and_at_a_flush(client: Talk, voice: StreamVoice) -> None:
    client.say("a", "One two ", more=True, max_buffer_delay_ms=1, **SEEDED)
    assert client.next("a")["type"] == "chunk"
    client.say("a", "thr", more=True)
    client.say("a", "ee four", more=True, flush=True)
    client.hear("a", until="flush_done")
    client.say("a", "", flush=True, more=True)
    flushed = client.next("a")
    assert (flushed["type"], flushed["flush_id"], flushed["flush_done"], flushed["done"]) == (
        "flush_done",
        2,
        True,
        False,
    )
    client.say("a", "Five", more=True, max_buffer_delay_ms=0)
    client.say("a")
    client.hear("a")
    assert voice.texts == ["One two", "three four", "Five"]


def test_contexts_share_a_connection_and_not_a_slot(
    client: Talk, server: Running, voice: StreamVoice
) -> None:
    for name in ("a", "b", "c"):
        client.say(name, f"Please hold {name}.", **SEEDED)
        assert client.next(name)["type"] == "chunk"
    assert server.busy()[0] == 3
    client.say("d", "Me too.", **SEEDED)
    assert client.hear("d") == spoken(["Me too."])
    client.cancel("b")
    assert client.next("b") == {"type": "done", "done": True, "status_code": 206, "context_id": "b"}
    server.until(lambda: server.busy()[0] == 2)
    assert len(voice.aborted) >= 1
    client.cancel("b")
    assert client.error("b")["error_code"] == "context_not_found"
    voice.let_go()
    client.hear("a")
    client.hear("c")


@pytest.mark.parametrize("encoding", ["pcm_s16le", "pcm_f32le", "pcm_mulaw", "pcm_alaw"])
@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_every_encoding_and_rate(client: Talk, encoding: str, rate: int) -> None:
    client.say("a", TEXT, **SEEDED, **output(encoding, rate))
    data = client.hear("a")
    subtype = {"pcm_s16le": "PCM_16", "pcm_f32le": "FLOAT", "pcm_mulaw": "ULAW", "pcm_alaw": "ALAW"}[encoding]
    raw: dict[str, Any] = {
        "format": "RAW",
        "channels": 1,
        "samplerate": rate,
        "subtype": subtype,
        "endian": "LITTLE",
    }
    found, _ = soundfile.read(io.BytesIO(data), dtype="float32", **raw)
    wanted = samples_of(UNITS, rate=rate)
    assert len(found) == len(wanted)
    assert np.abs(found - wanted).max() < (0.02 if subtype in ("ULAW", "ALAW") else 1e-4)


def test_a_long_chunk_comes_in_messages_that_clients_take(
    client: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cartesia, "MAX_PIECE_BYTES", 1_000)
    client.say("a", UNITS[0], **SEEDED)
    pieces: list[bytes] = []
    while (message := client.next("a"))["type"] == "chunk":
        pieces.append(base64.b64decode(message["data"]))
    assert max(map(len, pieces)) == 1_000
    assert b"".join(pieces) == spoken(UNITS[:1])


def test_an_ending_of_white_space_says_nothing(client: Talk, voice: StreamVoice) -> None:
    client.say("a", " ")
    assert client.next("a")["type"] == "done"
    client.say("b", "\U0001f389 ...")
    assert client.next("b")["type"] == "done"
    client.say("b", "Hello", more=True)
    client.say("b", " ", more=True)
    client.say("b", " ")
    client.hear("b")
    assert voice.texts == ["Hello"]


def test_what_fails_ends_its_context_and_no_other(client: Talk, server: Running, voice: StreamVoice) -> None:
    client.say("kept", "Please hold.", **SEEDED)
    client.say("a", "I refuse.")
    refused = client.error("a")
    assert (refused["status_code"], refused["error_code"]) == (400, "input.unpronounceable")
    client.say("a", "I break.")
    assert client.next("a")["type"] == "chunk"
    assert client.error("a")["status_code"] == 503
    client.say("a", "Again.", **SEEDED)
    assert client.hear("a") == spoken(["Again."])
    voice.let_go()
    assert client.hear("kept") == spoken(["Please hold."])
    counted = server.metrics()
    assert [
        counted[f"speech_http_requests_total{{route={PATH},status={status}}}"] for status in (200, 400, 503)
    ] == [2, 1, 1]


def test_an_error_of_the_system_in_the_engine_is_no_client_that_left() -> None:
    class CutOff(StreamVoice):
        def start(self, *_: object, **__: object) -> Handle:
            raise BrokenPipeError("the engine's socket is gone")

    with Running(CutOff()) as server, talk(server.url) as client:
        client.say("a", "Hello.")
        broken = client.error("a")
        assert (broken["status_code"], broken["error_code"]) == (500, "internal_error")
        counted = server.metrics()
        assert counted[f"speech_http_requests_total{{route={PATH},status=500}}"] == 1
        assert f"speech_http_requests_total{{route={PATH},status=499}}" not in counted


def test_a_later_sentence_waits_no_longer_for_a_slot_than_the_first(voice: StreamVoice) -> None:
    with Running(voice, slots=1, stream_queue_seconds=0.1) as server, talk(server.url) as client:
        client.say("a", "One. ", more=True, **SEEDED)
        for _ in range(4):
            assert client.next("a")["type"] == "chunk"
        server.until_idle()
        client.say("b", "Please hold.")
        assert client.next("b")["type"] == "chunk"
        client.say("a", "Two.", **SEEDED)
        late = client.error("a")
        assert (late["status_code"], late["error_code"]) == (429, "rate_limit_exceeded")
        assert late["retry_after"] >= 1
        voice.let_go()
        assert client.hear("b")


def test_a_full_server_says_429_and_keeps_the_connection(server: Running, voice: StreamVoice) -> None:
    with talk(server.url) as many, talk(server.url) as other:
        for number in range(6):
            many.say(f"c{number}", "Please hold.")
        server.until(lambda: server.busy()[:2] == (4, 2))
        other.say("x", "Too much.")
        busy = other.error("x")
        assert (busy["status_code"], busy["error_code"]) == (429, "rate_limit_exceeded")
        assert busy["retry_after"] >= 1
        # One that still waits for a slot is given up like any other.
        many.cancel("c5")
        many.hear("c5")
        voice.let_go()
        for number in range(5):
            many.hear(f"c{number}")
        other.say("x", "Now.", **SEEDED)
        assert other.hear("x") == spoken(["Now."])


def test_a_client_who_leaves_frees_all_its_slots(server: Running, voice: StreamVoice) -> None:
    for number in range(3):
        with talk(server.url) as one:
            for name in ("a", "b", "c", "d", "e"):
                one.say(name, "Please hold.")
            server.until(lambda: server.busy()[:2] == (4, 1))
            if number:
                one.socket.socket.close()
        server.until_idle()
    assert voice.running == 0


def test_a_server_whose_engine_is_away_says_so_and_loses_no_slot(voice: StreamVoice) -> None:
    opened = threading.Event()

    def open_model() -> StreamVoice:
        opened.wait()
        return voice

    with (
        Running(voice, wait=False, open_model=open_model, slots=1) as server,
        contextlib.ExitStack() as ending,
    ):
        ending.callback(opened.set)
        server.until(lambda: server.health() == 503)
        client = ending.enter_context(talk(server.url))
        for _ in range(3):
            client.say("a", "Hello.")
            away = client.error("a")
            assert (away["status_code"], away["error_code"]) == (503, "engine_starting")
        assert server.metrics()["speech_server_running"] == 0
        opened.set()
        server.until(lambda: server.health() == 200)
        client.say("a", "Hello.", **SEEDED)
        assert client.hear("a") == spoken(["Hello."])


def test_a_connection_without_a_context_makes_room_and_no_other(voice: StreamVoice) -> None:
    with Running(voice, connections=3) as server, talk(server.url) as busy, talk(server.url) as idle:
        busy.say("a", "Please hold.", **SEEDED)
        busy.next("a")
        with talk(server.url) as new:
            assert server.health() == 200
            with pytest.raises(ConnectionClosed):
                idle.socket.recv(PATIENCE_SECONDS)
            new.say("b", "Hello.", **SEEDED)
            assert new.hear("b") == spoken(["Hello."])
        voice.let_go()
        assert busy.hear("a")


def test_a_context_without_text_and_a_connection_without_a_context_end_by_themselves(
    voice: StreamVoice,
) -> None:
    with (
        Running(voice, context_idle_seconds=0.2, connection_idle_seconds=0.2) as server,
        talk(server.url) as client,
    ):
        client.say("a", "Hello. ", more=True, **SEEDED)
        client.say("a", "It is lat", more=True, max_buffer_delay_ms=1)
        # The last word waits for its end, and is whole when the context ends.
        assert client.hear("a") == spoken(["Hello.", "It is", "lat"])
        assert list(client.socket) == []
        assert client.socket.close_code == 1000


def test_the_key_comes_as_a_header_or_in_the_query_and_is_in_no_log(
    voice: StreamVoice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Running(voice, keys=("s3cret", "other"), wait=False) as server:
        server.until(lambda: server.health() == 200)
        ways: list[tuple[str, dict[str, str]]] = [
            ("api_key=s3cret&cartesia_version=2025-04-16", {}),
            ("", {"X-API-Key": "s3cret"}),
            ("", {"Authorization": "Bearer other"}),
        ]
        for query, headers in ways:
            with talk(server.url, query, **headers) as client:
                client.say("a", "Hello.", **SEEDED)
                assert client.hear("a") == spoken(["Hello."])
        wrong: list[tuple[str, dict[str, str]]] = [
            ("", {}),
            ("api_key=", {}),
            ("api_key=s3cre", {}),
            ("", {"X-API-Key": "S3CRET"}),
            ("", {"Authorization": "Basic s3cret"}),
        ]
        for query, headers in wrong:
            with pytest.raises(InvalidStatus) as refused, talk(server.url, query, **headers):
                pass
            assert refused.value.response.status_code == 401
            assert b"invalid_api_key" in refused.value.response.body
        # Over HTTP too, but not in an address that others may log.
        body = {"model": "tone", "input": "Hello."}
        assert (
            server.http.post("/v1/audio/speech", json=body, headers={"X-API-Key": "s3cret"}).status_code
            == 200
        )
        assert server.http.post("/v1/audio/speech?api_key=s3cret", json=body).status_code == 401
        metrics = server.metrics(authorization="Bearer s3cret")
        assert metrics[f"speech_http_requests_total{{route={PATH},status=401}}"] == 5
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith(("pipelines", "uvicorn", "websockets.server"))
    ]
    assert any("401" in line for line in said)
    assert not any("s3cre" in line or "handshake" in line for line in said)


def test_other_paths_and_pages_of_other_sites_are_refused_at_the_handshake(server: Running) -> None:
    for path in ("/v1/audio/speech", "/", "/tts/websocket/"):
        with pytest.raises(InvalidStatus) as refused, talk(server.url, path=path):
            pass
        assert refused.value.response.status_code == 404
    with pytest.raises(InvalidStatus) as refused, talk(server.url, Origin="http://evil.example"):
        pass
    assert refused.value.response.status_code == 403
    with talk(server.url, Origin=server.url) as client:
        client.say("a", "Hello.", **SEEDED)
        assert client.hear("a") == spoken(["Hello."])
    assert error_of(server.http.get(PATH))["code"] == "not_found"


def test_contexts_that_are_open_are_said_to_their_end_before_a_server_that_stops(voice: StreamVoice) -> None:
    with Running(voice) as server, talk(server.url) as client, talk(server.url) as idle:
        client.say("a", "Please hold. Good morning. How", more=True, **SEEDED)
        first = client.next("a")
        server.server.stop()
        assert list(idle.socket) == []
        assert idle.socket.close_code == 1001
        client.say("b", "Not any more.")
        assert client.error("b")["error_code"] == "shutting_down"
        voice.let_go()
        client.say("a", " are you?")
        rest = client.hear("a")
        assert base64.b64decode(first["data"]) + rest == spoken(
            ["Please hold.", "Good morning.", "How are you?"]
        )
        assert list(client.socket) == []
        assert client.socket.close_code == 1001


def test_a_real_model_says_the_same_over_a_websocket_and_http() -> None:
    with Running(qwen("custom"), slots=6, waiting_room=100) as server, talk(server.url) as client:
        name = server.pipeline.capabilities.voices[0]
        over_http = server.speak("Good morning.", response_format="pcm", voice=name, seed=3, max_seconds=0.48)
        settings = {
            "voice": {"mode": "id", "id": name},
            "generation_config": {"seed": 3, "max_seconds": 0.48},
        }
        for piece in ("Good", " morn", "ing."):
            client.say("a", piece, more=True, **settings)
        client.say("a", "")
        assert alike(client.hear("a"), over_http.content)

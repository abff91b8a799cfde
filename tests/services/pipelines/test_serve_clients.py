"""What clients of other servers send over HTTP: Cartesia's bytes, formats and voices of OpenAI, fields of vLLM-Omni, long texts."""

from __future__ import annotations

import base64
import gzip
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from numpy.typing import NDArray

from pipelines.serving import encoding, speech
from pipelines.stored_voices import OPENAI_VOICES
from tests.services.pipelines.test_serve_websocket import TEXT, UNITS, output, samples_of, spoken
from tests.support.fakes import spoken_text
from tests.support.serving_kit import Running, b64, error_of, events, wav
from tests.support.stream_voice import SAMPLE_RATE, StreamVoice
from tests.support.websocket_kit import talk

SEEDED = {"generation_config": {"seed": 7}}


@pytest.fixture
def voice() -> StreamVoice:
    return StreamVoice()


@pytest.fixture
def server(voice: StreamVoice) -> Iterator[Running]:
    with Running(voice) as running:
        yield running
        running.until_idle()


def bytes_of(server: Running, transcript: str = TEXT, **fields: Any) -> Any:
    return server.http.post("/tts/bytes", json={"transcript": transcript, "model_id": "tone", **SEEDED, **fields})


def test_bytes_are_the_speech_of_the_websocket(server: Running) -> None:
    raw = bytes_of(server, voice={"mode": "id", "id": "bob"}, language="en", **output())
    assert (raw.status_code, raw.headers["x-seed"], raw.content) == (200, "7", spoken(UNITS))
    with talk(server.url) as client:
        client.say("a", TEXT, **SEEDED, **output(rate=16_000))
        assert bytes_of(server, **output(rate=16_000)).content == client.hear("a")
    file = bytes_of(server, output_format={"container": "wav", "encoding": "pcm_mulaw", "sample_rate": 8000})
    assert file.headers["content-type"] == "audio/wav"
    found, rate = soundfile.read(io.BytesIO(file.content), dtype="float32")
    assert rate == 8000
    assert np.abs(found - samples_of(UNITS, rate=8000)).max() < 0.02


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"transcript": ""}, 400, "input.empty_text"),
        ({"transcript": "word " * 10_001}, 400, "input.too_long"),
        ({"transcript": "I refuse."}, 400, "input.unpronounceable"),
        ({"transcript": "I break."}, 503, "synth.engine"),
        ({"transcript": 5}, 400, "invalid_value"),
        ({"voice": {"mode": "id", "id": "nobody"}}, 400, "input.unknown_voice"),
        ({"model_id": "sonic-3"}, 404, "model_not_found"),
        ({"output_format": {"container": "mp3"}}, 400, "invalid_value"),
    ],
)
def test_bytes_that_cannot_be_are_an_error(server: Running, fields: dict[str, Any], status: int, code: str) -> None:
    if fields.get("transcript") == "I break.":
        # Its first bytes are out: what can still be said is that the answer is not whole.
        with pytest.raises(Exception, match=r"peer closed|incomplete|disconnect"):
            bytes_of(server, **fields)
        return
    answer = bytes_of(server, **fields)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


@pytest.mark.parametrize(
    "body", [b"{", b"[" * 100_000, '{"model": "café"}'.encode("latin-1"), gzip.compress(b"{}")], ids=["cut", "deep", "latin-1", "gzip"]
)
@pytest.mark.parametrize("route", ["/tts/bytes", "/v1/audio/speech"])
def test_what_is_not_json_is_an_error(server: Running, route: str, body: bytes) -> None:
    answer = server.http.post(route, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "input.bad_json")


@pytest.mark.parametrize("kind", ["mp3", "flac"])
def test_streams_are_compressed_beside_the_event_loop_and_in_order(server: Running, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    threads: set[str] = set()

    class Watched:
        def __init__(self, sample_rate: int, kind: encoding.SpeechFormat) -> None:
            self._encoder = encoding.stream_encoder(sample_rate, kind)

        def add(self, samples: NDArray[np.float32]) -> bytes:
            threads.add(threading.current_thread().name)
            return self._encoder.add(samples)

        def end(self) -> bytes:
            threads.add(threading.current_thread().name)
            return self._encoder.end()

    whole = server.speak(TEXT, response_format=kind, stream=True, seed=7).content
    monkeypatch.setattr(speech, "stream_encoder", Watched)
    streamed = server.speak(TEXT, response_format=kind, stream=True, seed=7).content
    assert streamed == whole
    assert threads
    assert "server" not in threads


@pytest.mark.parametrize(("kind", "media"), [("mp3", "audio/mpeg"), ("opus", "audio/ogg")])
def test_files_of_openai(server: Running, kind: Any, media: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        for stream in (False, True):
            answer = client.audio.speech.with_raw_response.create(
                model="tone", voice="nova", input=TEXT, response_format=kind, extra_body={"seed": 7, "stream": stream}
            )
            assert answer.headers["content-type"] == media
            found, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
            wanted = server.pipeline.submit(server.pipeline.requests[-1]).result().samples  # type: ignore[attr-defined]
            assert rate == SAMPLE_RATE
            assert abs(len(found) - len(wanted)) < 0.15 * SAMPLE_RATE
            assert np.abs(found).max() > 0.2


def test_a_client_of_openai_that_names_no_format_gets_an_mp3(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        for stream in (False, True):
            answer = client.audio.speech.with_raw_response.create(model="tone", voice="nova", input=TEXT, extra_body={"stream": stream})
            assert answer.headers["content-type"] == "audio/mpeg"
            assert soundfile.info(io.BytesIO(answer.content)).format == "MP3"


def test_an_mp3_is_streamed_while_it_is_made(server: Running) -> None:
    view = {"model": "tone", "input": TEXT, "stream_format": "sse"}
    with server.http.stream("POST", "/v1/audio/speech", json=view) as answer:
        deltas = [base64.b64decode(one["audio"]) for one in events(answer.iter_lines()) if one["type"] == "speech.audio.delta"]
    assert len(deltas) > 2
    assert soundfile.info(io.BytesIO(b"".join(deltas))).format == "MP3"


def test_names_of_openai_are_voices_of_the_model(server: Running, voice: StreamVoice) -> None:
    for name in OPENAI_VOICES:
        assert server.speak("Hello.", voice=name).status_code == 200
    assert [request.generation.voice for request in voice.requests] == [("ada", "bob")[number % 2] for number in range(len(OPENAI_VOICES))]
    assert server.speak("Hello.", voice={"id": "bob"}).status_code == 200
    assert voice.requests[-1].generation.voice == "bob"
    assert error_of(server.speak("Hello.", voice="nobody"))["code"] == "input.unknown_voice"


def test_fields_of_other_servers_are_taken_or_ignored() -> None:
    others = {"task_type": "Base", "max_new_tokens": 2048, "non_streaming_mode": False, "x_vector_only_mode": False}
    cloned = {"ref_audio": b64(wav(1.0)), "ref_text": "A sine."}
    voice = StreamVoice(cloning=True)
    with Running(voice) as server:
        known = server.speak("Hello.", **others, **cloned)
        assert (known.status_code, "x-ignored-fields" in known.headers) == (200, False)
        assert (len(voice.requests[0].messages), voice.requests[0].generation.reference_text) == (2, "A sine.")
        unknown = server.speak("Hello.", speeed=1, **{"x\r\ny: z": 2})
        assert (unknown.status_code, unknown.headers["x-ignored-fields"]) == (200, "speeed")
    with Running(StreamVoice(), strict=True) as server:
        assert server.speak("Hello.", **others).status_code == 200
        refused = server.speak("Hello.", speeed=1)
        assert (refused.status_code, error_of(refused)["param"], error_of(refused)["code"]) == (400, "speeed", "unknown_field")
        assert error_of(bytes_of(server, speeed=1))["code"] == "unknown_field"
        with talk(server.url) as client:
            client.say("a", "Hello.", speeed=1)
            assert client.error("a")["error_code"] == "unknown_field"


def test_a_long_text_is_spoken_sentence_by_sentence(server: Running, voice: StreamVoice) -> None:
    text = "Good morning to you. " * 300
    units = ["Good morning to you."] * 300
    streamed = server.speak(text, response_format="pcm", seed=7)
    assert streamed.content == spoken(units)
    assert len(voice.requests) == 300
    assert len({spoken_text(request) for request in voice.requests}) == 1
    file = server.speak(text, seed=7)
    assert file.content[44:] == streamed.content


def test_events_end_with_the_usage(server: Running) -> None:
    view = {"model": "tone", "input": "Hello.", "seed": 7, "stream_format": "sse", "response_format": "pcm"}
    with server.http.stream("POST", "/v1/audio/speech", json=view) as answer:
        found = list(events(answer.iter_lines()))
    assert b"".join(base64.b64decode(one["audio"]) for one in found[:-1]) == spoken(["Hello."])
    assert found[-1] == {"type": "speech.audio.done", "usage": {"input_tokens": 6, "output_tokens": 0, "total_tokens": 6}}

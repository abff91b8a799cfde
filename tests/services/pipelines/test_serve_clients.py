"""What clients of other servers send over HTTP: Cartesia's bytes, formats and voices of OpenAI, fields of
vLLM-Omni, long texts."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from numpy.typing import NDArray

from pipelines.serving import encoding, speech
from pipelines.serving.metrics import ROUTES
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
    return server.http.post(
        "/tts/bytes", json={"transcript": transcript, "model_id": "tone", **SEEDED, **fields}
    )


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


#: Bodies as Cartesia's own client 4.2 sends them, for the newest version of the protocol.
OFFICIAL: dict[str, Any] = {
    "model_id": "tone",
    "output_format": {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000},
    "transcript": TEXT,
    "voice": "bob",
}


def sse_of(server: Running, **fields: Any) -> list[dict[str, Any]]:
    with server.http.stream(
        "POST", "/tts/sse", json={**OFFICIAL, **SEEDED, **fields}, headers={"accept": "text/event-stream"}
    ) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream"), (
            answer.read()
        )
        return list(events(answer.iter_lines()))


def test_requests_of_cartesias_own_client_are_spoken(server: Running, voice: StreamVoice) -> None:
    answer = server.http.post(
        "/tts/bytes", json={**OFFICIAL, **SEEDED, "locale": "en-US"}, headers={"accept": "audio/wav"}
    )
    assert answer.content == spoken(UNITS)
    *chunks, last = sse_of(server, voice={"id": "bob"}, context_id="c1", add_timestamps=None)
    assert b"".join(base64.b64decode(one["data"]) for one in chunks) == spoken(UNITS)
    assert {(one["type"], one["done"], one["status_code"], one["context_id"]) for one in chunks} == {
        ("chunk", False, 206, "c1")
    }
    assert (last["type"], last["done"], last["context_id"]) == ("done", True, "c1")
    assert {(request.generation.voice, request.generation.language) for request in voice.requests} == {
        ("bob", "en-US"),
        ("bob", None),
    }
    with talk(server.url) as client:
        client.say("a", **{**OFFICIAL, **SEEDED})
        assert client.hear("a") == spoken(UNITS)
    assert server.metrics()["speech_first_audio_seconds_count{route=/tts/sse}"] == 1


def test_events_end_with_an_error_where_the_speech_does(server: Running) -> None:
    first, last = (found := sse_of(server, transcript="I break."))[0], found[-1]
    assert (first["type"], last["type"], last["status_code"], last["error_code"]) == (
        "chunk",
        "error",
        503,
        "synth.engine",
    )
    assert last["request_id"].startswith("req-")


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/tts/bytes", "add_timestamps"),
        ("/tts/bytes", "add_phoneme_timestamps"),
        ("/tts/sse", "add_phoneme_timestamps"),
        ("/tts/bytes", "save"),
        ("/tts/sse", "save"),
    ],
)
def test_what_cartesia_has_and_we_do_not_is_refused_by_name(server: Running, route: str, name: str) -> None:
    for value in (True, "dict-1") if name == "save" else (True,):
        refused = server.http.post(route, json={**OFFICIAL, name: value})
        assert (refused.status_code, error_of(refused)["code"], error_of(refused)["param"]) == (
            400,
            "input.unsupported",
            name,
        )
        assert f"`{name}`" in error_of(refused)["message"]
    assert server.http.post(route, json={**OFFICIAL, name: False}).status_code == 200
    wav_events = server.http.post("/tts/sse", json={**OFFICIAL, "output_format": {"container": "wav"}})
    assert (wav_events.status_code, error_of(wav_events)["param"]) == (400, "output_format.container")


def test_voices_are_one_page_of_cartesias(server: Running) -> None:
    whole = server.http.get("/voices?limit=1").json()
    assert ([one["id"] for one in whole["data"]], whole["has_more"]) == (["ada", "bob"], False)
    # The client asks for pages until one is empty.
    assert server.http.get("/voices?starting_after=bob").json() == {"data": [], "has_more": False}
    assert server.http.get("/voices/ada").json() == whole["data"][0]
    refused = server.http.get("/voices/nobody")
    assert (refused.status_code, error_of(refused)["param"]) == (404, "name")


def test_a_server_says_what_it_is_and_has_a_page_that_loads_nothing(server: Running) -> None:
    about = server.http.get("/").json()
    assert (about["name"], about["models"], about["docs"]) == ("Nightjar", ["tone"], "/docs")
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "Nightjar serves tone" in page.text
    assert "GET /tts/websocket (WebSocket)" in about["routes"]
    for route in about["routes"]:
        assert f"</b> <code>{route.split()[1]}</code>" in page.text
    # Every body that a route names, with its fields; nothing comes from another host, or is run.
    links = set(re.findall(r'href="#(\w+)"', page.text))
    assert {"SpeechBody", "ChatBody", "VoiceBody", "SpeechFields", "EventsRequest", "OutputFormat"} <= links
    assert links <= set(re.findall(r'id="(\w+)"', page.text))
    assert not re.search(r"<script|<link|<img|https?://|@import|url\(", page.text)
    schema = server.http.get("/openapi.json").json()
    named = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema))
    assert set(named) <= set(schema["components"]["schemas"])
    for method, path in (("GET", "/nowhere"), ("POST", "/voices/clone"), ("GET", "/accents")):
        refused = server.http.request(method, path)
        assert refused.status_code in (404, 405)
        assert error_of(refused)["message"] == f"There is no {method} {path} here. GET / lists the routes."


def test_a_form_to_no_route_is_answered_as_such_and_every_post_asks_for_json(server: Running) -> None:
    # Cartesia's own client clones a voice by a form.
    refused = server.http.post("/voices/clone", files={"clip": b"RIFF"}, data={"name": "anna"})
    assert (refused.status_code, error_of(refused)["message"]) == (
        405,
        "There is no POST /voices/clone here. GET / lists the routes.",
    )
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {path for path in paths if "{" not in path} <= set(ROUTES)
    for path in (path for path, methods in paths.items() if "post" in methods):
        assert server.http.post(path, data={"transcript": TEXT}).status_code == 415, path


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
def test_bytes_that_cannot_be_are_an_error(
    server: Running, fields: dict[str, Any], status: int, code: str
) -> None:
    if fields.get("transcript") == "I break.":
        # Its first bytes are out: what can still be said is that the answer is not whole.
        with pytest.raises(Exception, match=r"peer closed|incomplete|disconnect"):
            bytes_of(server, **fields)
        return
    answer = bytes_of(server, **fields)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[" * 100_000, '{"model": "café"}'.encode("latin-1"), gzip.compress(b"{}")],
    ids=["cut", "deep", "latin-1", "gzip"],
)
@pytest.mark.parametrize("route", ["/tts/bytes", "/v1/audio/speech"])
def test_what_is_not_json_is_an_error(server: Running, route: str, body: bytes) -> None:
    answer = server.http.post(route, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "input.bad_json")


@pytest.mark.parametrize("kind", ["mp3", "flac"])
def test_streams_are_compressed_beside_the_event_loop_and_in_order(
    server: Running, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    threads: set[str] = set()

    class Watched(encoding.FileStream):
        def add(self, samples: NDArray[np.float32], last: bool = False) -> bytes:
            threads.add(threading.current_thread().name)
            return super().add(samples, last)

        def end(self) -> bytes:
            threads.add(threading.current_thread().name)
            return super().end()

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
                model="tone",
                voice="nova",
                input=TEXT,
                response_format=kind,
                extra_body={"seed": 7, "stream": stream},
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
            answer = client.audio.speech.with_raw_response.create(
                model="tone", voice="nova", input=TEXT, extra_body={"stream": stream}
            )
            assert answer.headers["content-type"] == "audio/mpeg"
            assert soundfile.info(io.BytesIO(answer.content)).format == "MP3"


def test_an_mp3_is_streamed_while_it_is_made(server: Running) -> None:
    view = {"model": "tone", "input": TEXT, "stream_format": "sse"}
    with server.http.stream("POST", "/v1/audio/speech", json=view) as answer:
        deltas = [
            base64.b64decode(one["audio"])
            for one in events(answer.iter_lines())
            if one["type"] == "speech.audio.delta"
        ]
    assert len(deltas) > 2
    assert soundfile.info(io.BytesIO(b"".join(deltas))).format == "MP3"


def test_names_of_openai_are_voices_of_the_model(server: Running, voice: StreamVoice) -> None:
    for name in OPENAI_VOICES:
        assert server.speak("Hello.", voice=name).status_code == 200
    assert [request.generation.voice for request in voice.requests] == [
        ("ada", "bob")[number % 2] for number in range(len(OPENAI_VOICES))
    ]
    assert server.speak("Hello.", voice={"id": "bob"}).status_code == 200
    assert voice.requests[-1].generation.voice == "bob"
    assert error_of(server.speak("Hello.", voice="nobody"))["code"] == "input.unknown_voice"


def test_fields_of_other_servers_are_taken_or_ignored() -> None:
    others = {
        "task_type": "Base",
        "max_new_tokens": 2048,
        "non_streaming_mode": False,
        "x_vector_only_mode": False,
        "initial_codec_chunk_frames": 1,
        "user": "someone",
    }
    cloned = {"ref_audio": b64(wav(1.0)), "ref_text": "A sine."}
    voice = StreamVoice(cloning=True)
    with Running(voice, max_audio_seconds=3.0) as server:
        known = server.speak("Hello.", **others, **cloned)
        assert (known.status_code, "x-ignored-fields" in known.headers) == (200, False)
        assert (len(voice.requests[0].messages), voice.requests[0].generation.reference_text) == (
            2,
            "A sine.",
        )
        long = server.speak("Hello.", ref_audio=b64(wav(4.0)))
        assert (long.status_code, error_of(long)["code"]) == (400, "input.too_long")
        unknown = server.speak("Hello.", speeed=1, **{"x\r\ny: z": 2})
        assert (unknown.status_code, unknown.headers["x-ignored-fields"]) == (200, "speeed")


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
    assert found[-1] == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 6, "output_tokens": 0, "total_tokens": 6},
    }

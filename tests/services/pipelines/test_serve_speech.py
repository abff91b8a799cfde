"""Speech over HTTP by pipelines that really speak: the embedded voice, and Qwen3-TTS on small checkpoints,
streamed and cloned."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import soundfile

from pipelines.hibari.pipeline import HibariPipeline
from pipelines.qwen3_tts.pipeline import Qwen3TTSPipeline, open_pipeline
from tests.support.golden_checkpoint import whole
from tests.support.qwen3_golden import GOLDEN
from tests.support.serving_kit import PATIENCE_SECONDS, Running, b64, error_of, events, heard

SPEECH = "/v1/audio/speech"
SIZES: dict[str, Any] = {
    "slots": 4,
    "pages": 96,
    "page_size": 16,
    "max_context": 512,
    "keep_unfinished": True,
}
REFERENCE = (GOLDEN / "refs" / "ref_a_24k_mono.wav").read_bytes()
SHORT = {"max_seconds": 0.48, "seed": 3}


@pytest.fixture(scope="module")
def hibari() -> Iterator[Running]:
    pipeline = HibariPipeline(threads=1)
    with Running(pipeline) as running:
        yield running


def qwen(kind: str) -> Qwen3TTSPipeline:
    return open_pipeline(whole(GOLDEN / f"checkpoint-{kind}"), **SIZES)


@pytest.fixture(scope="module")
def custom() -> Iterator[Running]:
    with Running(qwen("custom"), slots=6, waiting_room=100) as running:
        yield running


@pytest.fixture(scope="module")
def base() -> Iterator[Running]:
    with Running(qwen("base"), max_audio_seconds=5.0) as running:
        yield running


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.mark.parametrize("kind", ["wav", "flac", "pcm"])
def test_the_embedded_voice_in_every_format_by_both_clients(hibari: Running, kind: Any) -> None:
    bare = hibari.speak("Good morning.", response_format=kind, seed=7, voice="heart")
    assert (bare.status_code, bare.headers["x-sample-rate"], bare.headers["x-seed"]) == (200, "24000", "7")
    with client_of(hibari) as client:
        spoken = client.audio.speech.create(
            model="hibari", voice="heart", input="Good morning.", response_format=kind, extra_body={"seed": 7}
        )
        assert spoken.content == bare.content
        with client.audio.speech.with_streaming_response.create(
            model="hibari", voice="heart", input="Good morning.", response_format=kind, extra_body={"seed": 7}
        ) as streamed:
            assert b"".join(streamed.iter_bytes()) == bare.content
    samples = np.frombuffer(bare.content, "<i2") / 32768 if kind == "pcm" else heard(bare.content)[0]
    assert 0.5 < len(samples) / 24_000 < 3
    assert np.abs(samples).max() > 0.03


def test_a_seed_that_was_told_makes_the_same_speech_again(hibari: Running) -> None:
    first = hibari.speak("Good morning.")
    again = hibari.speak("Good morning.", seed=int(first.headers["x-seed"]))
    assert again.content == first.content


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"speed": 1.5}, "speed", "input.unsupported"),
        ({"instructions": "Whisper."}, "instructions", "input.unsupported"),
        ({"response_format": "aac"}, "response_format", "invalid_value"),
        ({"voice": "nobody"}, "voice", "input.unknown_voice"),
        ({"language": "Klingon"}, "language", "input.unknown_language"),
        ({"temperature": 0.5}, "temperature", "input.unsupported"),
        ({"cfg": -1}, "cfg", "input.bad_generation"),
        ({"cfg": 3.0}, "cfg", "input.unsupported"),
        ({"reference_audio": b64(REFERENCE)}, None, "input.unsupported"),
        ({"reference_audio": "%%%"}, "reference_audio", "input.audio_unreadable"),
        ({"reference_audio": "/etc/passwd"}, "reference_audio", "input.audio_unreadable"),
        ({"reference_audio": "http://127.0.0.1/a.wav"}, "reference_audio", "input.audio_forbidden"),
        ({"input": ""}, "input", "input.empty_text"),
        ({"input": "語"}, "input", "input.unpronounceable"),
        ({"input": "long " * 11_000}, "input", "input.too_long"),
        ({"input": 5}, "input", "invalid_value"),
    ],
)
def test_what_the_embedded_voice_cannot_do_is_a_400_that_says_so(
    hibari: Running, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = hibari.speak(**{"text": fields.pop("input")} if "input" in fields else {}, **fields)
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert not re.search("dialogue|line|object", error["message"]), "those are words of jobs"
    assert hibari.speak("Good morning.", speed=1.0, instructions="").status_code == 200


@pytest.mark.parametrize("language", ["English", "en", "en_US", "en-US"])
def test_a_language_has_its_names_and_codes_on_every_route(hibari: Running, language: str) -> None:
    assert hibari.speak("Good morning.", language=language).status_code == 200
    spoken = {"transcript": "Good morning.", "model_id": "hibari", "language": language}
    assert hibari.http.post("/tts/bytes", json=spoken).status_code == 200


def test_a_model_that_clones_asks_for_the_field_of_the_route() -> None:
    with Running(qwen("base")) as server:
        error = error_of(server.speak("Good morning."))
    assert (error["param"], error["code"]) == ("reference_audio", "input.audio_missing")
    assert (
        error["message"]
        == "This model needs a voice to clone. Name a stored voice, or send `reference_audio`."
    )


def test_the_embedded_voice_streams_sentence_by_sentence(hibari: Running) -> None:
    text = "Good morning. How are you today?"
    whole_speech = np.frombuffer(
        hibari.speak(text, response_format="pcm", stream=False, seed=7).content, "<i2"
    )
    view = {"model": "hibari", "input": text, "seed": 7, "stream_format": "sse", "response_format": "pcm"}
    with hibari.http.stream("POST", SPEECH, json=view) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        found = list(events(answer.iter_lines()))
    sentences = [base64.b64decode(one["audio"]) for one in found if one["type"] == "speech.audio.delta"]
    assert len(sentences) == 2
    assert found[-1]["type"] == "speech.audio.done"
    streamed = np.frombuffer(b"".join(sentences), "<i2")
    assert len(streamed) == len(whole_speech)
    # One gain apart: each was rounded to 16 bits.
    gain = np.abs(streamed).max() / np.abs(whole_speech).max()
    assert np.abs(streamed - gain * whole_speech).max() < 3
    bare = hibari.speak(text, response_format="pcm", seed=7).content
    assert bare == b"".join(sentences)


def alike(one: bytes, other: bytes) -> bool:
    """Whether PCM is the same but for the rounding of a codec that works in pieces."""
    first, second = (np.frombuffer(data, "<i2").astype(int) for data in (one, other))
    return len(first) == len(second) and int(np.abs(first - second).max()) <= 2


def test_a_stream_is_the_whole_speech_in_pieces(custom: Running) -> None:
    fields = {"voice": custom.pipeline.capabilities.voices[0], **SHORT}
    once = custom.speak("Good morning.", response_format="pcm", stream=False, **fields)
    with custom.http.stream(
        "POST",
        SPEECH,
        json={"model": custom.pipeline.name, "input": "Good morning.", "response_format": "pcm", **fields},
    ) as answer:
        assert "content-length" not in answer.headers
        pieces = list(answer.iter_raw())
    assert len(pieces) > 1
    assert alike(b"".join(pieces), once.content)
    for kind in ("wav", "flac"):
        streamed = custom.speak("Good morning.", response_format=kind, stream=True, **fields)
        assert streamed.content[:4] == (b"RIFF" if kind == "wav" else b"fLaC")
        assert soundfile.info(io.BytesIO(streamed.content)).samplerate == 24_000
        if kind == "wav":
            assert alike(streamed.content[44:], once.content)
    file, rate = heard(custom.speak("Good morning.", **fields).content)
    assert (2 * len(file), rate) == (len(once.content), 24_000)
    assert custom.metrics()["speech_first_audio_seconds_count{route=/v1/audio/speech}"] >= 3


def test_a_cloned_voice_comes_from_base64_or_a_data_url(base: Running) -> None:
    settings = {"voice": "default", "reference_text": "It was a bright day.", **SHORT}
    plain = base.speak("Good morning.", reference_audio=b64(REFERENCE), **settings)
    link = base.speak(
        "Good morning.", reference_audio=[f"data:audio/wav;base64,{b64(REFERENCE)}"], **settings
    )
    assert (plain.status_code, link.content) == (200, plain.content)
    missing = base.speak("Good morning.", **SHORT)
    assert (missing.status_code, error_of(missing)["param"]) == (400, "reference_audio")
    many = base.speak("Good morning.", reference_audio=[b64(REFERENCE)] * 2, **SHORT)
    assert many.status_code == 400
    named = base.speak("Good morning.", voice="serena", reference_audio=b64(REFERENCE), **SHORT)
    assert (named.status_code, error_of(named)["param"]) == (400, "voice")


def test_a_listener_who_leaves_frees_engine_and_slot(custom: Running) -> None:
    view = {
        "model": custom.pipeline.name,
        "input": "Good morning. " * 20,
        "max_seconds": 20,
        "voice": custom.pipeline.capabilities.voices[0],
        "seed": 1,
    }
    data = json.dumps({**view, "response_format": "pcm"}).encode()
    host, port = custom.url.removeprefix("http://").split(":")
    for _ in range(6):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
            head = f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            assert b"200 OK" in connection.recv(100)
    custom.until_idle()
    assert custom.speak("Next.", voice=view["voice"], **SHORT).status_code == 200


def test_many_listeners_hear_what_each_hears_alone(custom: Running) -> None:
    def ask(number: int) -> bytes:
        kind = ("wav", "pcm", "flac")[number % 3]
        view = {
            "model": custom.pipeline.name,
            "input": f"Line {number % 6}.",
            "response_format": kind,
            "stream": number % 2 == 0,
        }
        view |= {"voice": custom.pipeline.capabilities.voices[0], "seed": number % 6, "max_seconds": 0.16}
        answer = httpx2.post(custom.url + SPEECH, json=view, timeout=PATIENCE_SECONDS, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.content

    alone = [ask(number) for number in range(6)]
    with ThreadPoolExecutor(18) as pool:
        assert list(pool.map(ask, range(18))) == alone * 3
    custom.until_idle()

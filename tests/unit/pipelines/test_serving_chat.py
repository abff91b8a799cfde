"""Dialogues over HTTP: every mode by openai's own client and by a bare one, and what bad requests get."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.fake_dialogues import FRAME, DialoguePipeline
from tests.support.serving_kit import Running, b64, error_of, events, heard, wav

AUDIO = {
    "mode": "text_audio",
    "phase": "text",
    "text_temperature": 0.6,
    "audio_temperature": 0.8,
    "audio_topk": 20,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pipeline = DialoguePipeline()
    with Running(pipeline, max_body_bytes=20_000_000) as running:
        yield running
    pipeline.close()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def sound(data: str, kind: str = "wav") -> dict[str, Any]:
    return user([{"type": "input_audio", "input_audio": {"data": data, "format": kind}}])


def link(url: str) -> dict[str, Any]:
    return user([{"type": "audio_url", "audio_url": {"url": url}}])


def pipeline_of(server: Running) -> DialoguePipeline:
    assert isinstance(server.pipeline, DialoguePipeline)
    return server.pipeline


MODES: list[tuple[list[dict[str, Any]], dict[str, Any], int]] = [
    ([user("What is new?")], {"max_tokens": 4096, "temperature": 0.6, "top_k": 20, "stop_token_ids": [3]}, 0),
    ([sound(b64(wav(0.2))), user("What was said?")], {"temperature": 0.6, "stop_token_ids": [3]}, 0),
    ([user("A bell rings.")], {"temperature": 0.8, "top_k": 20, "vllm_xargs": AUDIO}, 8),
    ([user("A bell rings.")], {"vllm_xargs": {**AUDIO, "cfg": 3.0}}, 8),
    ([user("A bell rings.")], {"modalities": ["text", "audio"], "audio": {"format": "wav"}}, 8),
]


@pytest.mark.parametrize(("dialogue", "fields", "frames"), MODES)
def test_every_mode_by_a_bare_client_and_by_openais(
    server: Running,
    client: openai.OpenAI,
    dialogue: list[dict[str, Any]],
    fields: dict[str, Any],
    frames: int,
) -> None:
    bare = server.chat(*dialogue, seed=4, **fields)
    assert bare.status_code == 200, bare.text
    assert bare.headers["x-seed"] == "4"
    view = bare.json()
    message = view["choices"][0]["message"]
    assert view["choices"][0]["finish_reason"] == "stop"
    assert view["usage"]["completion_tokens"] == len(message["content"].split()) + frames
    by_openai = client.chat.completions.create(
        model="dialogues", messages=dialogue, seed=4, extra_body=fields
    )
    assert by_openai.choices[0].message.content == message["content"]
    audio = by_openai.choices[0].message.audio
    if not frames:
        assert (audio, message["audio"]) == (None, None)
        return
    assert audio is not None
    assert audio.data == message["audio"]["data"]
    assert audio.transcript == message["content"]
    assert audio.expires_at == by_openai.created + 3600
    samples, rate = heard(base64.b64decode(audio.data))
    assert (len(samples), rate) == (frames * FRAME, 16_000)


@pytest.mark.parametrize(("dialogue", "fields", "frames"), MODES)
def test_a_stream_tells_what_the_whole_answer_tells(
    server: Running,
    client: openai.OpenAI,
    dialogue: list[dict[str, Any]],
    fields: dict[str, Any],
    frames: int,
) -> None:
    whole = server.chat(*dialogue, seed=4, **fields).json()["choices"][0]["message"]
    extra = {**fields, "stream_options": {"include_usage": True}}
    chunks = list(
        client.chat.completions.create(
            model="dialogues", messages=dialogue, seed=4, stream=True, extra_body=extra
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    pieces = [delta.content for delta in deltas if delta.content]
    assert len(pieces) > 2
    assert "".join(pieces).strip() == whole["content"]
    assert deltas[0].role == "assistant"
    audio = [delta.audio for delta in deltas if delta.audio]
    assert [one.data for one in audio] == ([whole["audio"]["data"]] if frames else [])
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    body = {"model": "dialogues", "messages": dialogue, "seed": 4, "stream": True, **fields}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as bare:
        lines = list(bare.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""]
    said = [event["choices"][0]["delta"].get("content") or "" for event in events(iter(lines))]
    assert "".join(said).strip() == whole["content"]


def test_roles_have_the_models_names_and_a_top_k_below_0_is_none(server: Running) -> None:
    turns = [
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": "Yes."},
        user([{"type": "text", "text": "Hi."}]),
    ]
    assert server.chat(*turns, vllm_xargs={**AUDIO, "audio_topk": -1}).status_code == 200
    seen = pipeline_of(server).seen[-1]
    assert [(message.role, message.content) for message in seen.messages] == [
        ("system", "Be kind."),
        ("assistant", "Yes."),
        ("user", "Hi."),
    ]
    assert seen.generation.audio_top_k == 0


def test_null_is_a_field_that_was_left_out(server: Running) -> None:
    names = (
        "vllm_xargs",
        "audio",
        "stream",
        "stream_options",
        "stop_token_ids",
        "n",
        "max_tokens",
        "seed",
        "stop",
        "tools",
    )
    assert server.chat(user("A bell."), **dict.fromkeys(names)).status_code == 200
    assert (
        server.chat(
            user("A bell."), vllm_xargs={**AUDIO, "cfg": None}, stream_options={"include_usage": None}
        ).status_code
        == 200
    )


def test_the_voice_that_openais_client_must_name_may_be_the_models_own(
    server: Running, client: openai.OpenAI
) -> None:
    made = client.chat.completions.create(
        model="dialogues",
        messages=[user("A bell.")],
        modalities=["text", "audio"],
        audio={"voice": "default", "format": "wav"},
    )
    assert made.choices[0].message.audio is not None
    refused = server.chat(
        user("A bell."), modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}
    )
    assert (refused.status_code, error_of(refused)["param"]) == (400, "audio.voice")


def test_audio_reaches_the_engine_byte_for_byte(server: Running) -> None:
    for message in (sound(b64(wav(0.3))), link(f"data:audio/wav;base64,{b64(wav(0.3))}")):
        assert server.chat(message).status_code == 200
        assert pipeline_of(server).seen[-1].messages[0].content == wav(0.3)


def test_text_without_its_audio_is_an_answer(server: Running, client: openai.OpenAI) -> None:
    view = server.chat(user("[[no_audio]] A bell."), vllm_xargs=AUDIO).json()
    answer = view["choices"][0]
    assert answer["message"]["audio"] is None
    assert (answer["finish_reason"], view["usage"]["prompt_tokens"]) == ("stop", 5)
    assert "A bell." in answer["message"]["content"]
    stream = client.chat.completions.create(
        model="dialogues",
        messages=[user("[[no_audio]] A bell.")],
        stream=True,
        extra_body={"vllm_xargs": AUDIO},
    )
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert not any(chunk.choices[0].delta.audio for chunk in chunks)


def test_a_limit_that_was_reached_is_said(server: Running) -> None:
    mute = server.chat(user("[[no_audio]] A bell."), vllm_xargs=AUDIO, max_tokens=8).json()
    assert (mute["choices"][0]["message"]["audio"], mute["choices"][0]["finish_reason"]) == (None, "length")
    assert mute["usage"]["completion_tokens"] == 8
    assert (
        server.chat(user("A bell."), vllm_xargs=AUDIO, max_tokens=6).json()["choices"][0]["finish_reason"]
        == "length"
    )


@pytest.mark.parametrize("kind", ["flac", "pcm16"])
def test_audio_in_the_format_that_was_asked_for(server: Running, kind: str) -> None:
    message = server.chat(user("A bell."), modalities=["audio", "text"], audio={"format": kind}).json()[
        "choices"
    ][0]["message"]
    data = base64.b64decode(message["audio"]["data"])
    assert data[:4] == b"fLaC" if kind == "flac" else len(data) == 2 * 8 * FRAME


BAD: list[tuple[list[dict[str, Any]], dict[str, Any], str | None, str]] = [
    ([user("x")], {"vllm_xargs": {**AUDIO, "cfg": -1}}, "vllm_xargs.cfg", "input.bad_generation"),
    ([user("x")], {"vllm_xargs": {**AUDIO, "cfg": "3"}}, "vllm_xargs.cfg", "invalid_value"),
    ([user("x")], {"vllm_xargs": {"cgf": 3}}, "vllm_xargs.cgf", "unknown_field"),
    ([user("x")], {"vllm_xargs": {"mode": "sing"}}, "vllm_xargs.mode", "invalid_value"),
    ([user("x")], {"vllm_xargs": {"phase": "audio"}}, "vllm_xargs.phase", "invalid_value"),
    ([user("x")], {"vllm_xargs": {"cfg": 3}}, "vllm_xargs.cfg", "input.bad_generation"),
    (
        [user("x")],
        {"vllm_xargs": {**AUDIO, "audio_temperature": -2}},
        "vllm_xargs.audio_temperature",
        "input.bad_generation",
    ),
    ([user("x")], {"stop_token_ids": [7]}, "stop_token_ids[0]", "invalid_value"),
    ([user("x")], {"temperature": -1}, "temperature", "input.bad_generation"),
    ([user("x")], {"max_tokens": 0}, "max_tokens", "input.bad_generation"),
    ([user("x")], {"n": 2}, "n", "invalid_value"),
    ([user("x")], {"seed": -1}, "seed", "invalid_value"),
    ([user("x")], {"logprobs": True}, "logprobs", "unknown_field"),
    ([user("x")], {"audio": {"format": "mp3"}}, "audio.format", "invalid_value"),
    ([], {}, "messages", "invalid_value"),
    ([user("")], {}, "messages", "input.empty_text"),
    ([user(None)], {}, "messages[0].content", "invalid_value"),
    ([{"role": "tool", "content": "x"}], {}, "messages[0].role", "invalid_value"),
    (
        [user([{"type": "image_url", "image_url": {"url": "x"}}])],
        {},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    ([{"role": "assistant", "content": sound(b64(wav(0.1)))["content"]}], {}, "messages", "invalid_value"),
    ([sound("%%%")], {}, "messages", "input.audio_unreadable"),
    ([sound(b64(b"no sound"))], {}, "messages", "input.audio_unreadable"),
    ([sound(b64(wav(7200, 1000)))], {}, "messages", "input.too_long"),
    ([sound("/etc/passwd")], {}, "messages", "input.audio_unreadable"),
    ([link("http://127.0.0.1:9/a.wav")], {}, "messages", "input.audio_forbidden"),
    ([link("file:///etc/passwd")], {}, "messages", "input.audio_forbidden"),
    ([link("/etc/passwd")], {}, "messages", "input.audio_unreadable"),
]


@pytest.mark.parametrize(("dialogue", "fields", "param", "code"), BAD)
def test_a_bad_request_is_a_400_that_names_its_fault(
    server: Running, dialogue: list[dict[str, Any]], fields: dict[str, Any], param: str | None, code: str
) -> None:
    before = len(pipeline_of(server).seen)
    answer = server.chat(*dialogue, **fields)
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"], error["type"]) == (
        400,
        param,
        code,
        "invalid_request_error",
    )
    streamed = server.chat(*dialogue, stream=True, **fields)
    assert (streamed.status_code, error_of(streamed)) == (400, error)
    assert len(pipeline_of(server).seen) == before


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"null", "application/json"),
        (b'{"model": "dialogues", "messages": [], "temperature": NaN}', "application/json"),
        (b'{"model": "dialogues", "messages": [{"role": "user", "content": "\\ud800"}]}', "application/json"),
    ],
)
def test_a_body_that_is_no_request_is_a_400(server: Running, body: bytes, kind: str) -> None:
    answer = server.http.post("/v1/chat/completions", content=body, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text
    error_of(answer)


def test_a_body_over_its_bound_is_refused_whatever_it_says_of_its_length(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A client that is still sending when that is over finds its connection reset.
    monkeypatch.setattr("pipelines.serving.request_body.DISCARD_SECONDS", 240.0)
    body = json.dumps({"model": "dialogues", "messages": [sound("A" * 20_000_000)]}).encode()
    known, pieces = (
        server.http.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        for content in (body, iter([body[:9_000_000], body[9_000_000:]]))
    )
    for answer in (known, pieces):
        assert (answer.status_code, error_of(answer)["code"]) == (400, "body_too_large")
    server.until_idle()


def test_what_is_not_there(server: Running, client: openai.OpenAI) -> None:
    missing = server.http.post("/v1/chat/completions", json={"model": "gpt-9", "messages": [user("x")]})
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert [model.id for model in client.models.list()] == ["dialogues"]
    assert client.models.retrieve("dialogues").owned_by == "nightjar"
    assert error_of(server.http.get("/nope"))["code"] == "not_found"
    assert server.http.get("/v1/chat/completions").status_code == 405
    speech = server.speak("Hello.")
    assert (speech.status_code, error_of(speech)["code"]) == (400, "input.unsupported")


def test_an_engine_that_fails_says_no_more_than_that(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        failed = server.chat(user("[[fail:synth.engine]]"))
    assert (failed.status_code, error_of(failed)["type"]) == (503, "server_error")
    assert failed.headers["retry-after"]
    assert "asked to fail" in caplog.text
    final = server.chat(user("[[fail:synth.no_eos]]"))
    assert (final.status_code, error_of(final)["code"]) == (422, "synth.no_eos")
    body = {"model": "dialogues", "messages": [user("[[fail:synth.engine]]")], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as streamed:
        last = list(events(streamed.iter_lines()))[-1]
    assert last["error"]["code"] == "synth.engine"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError),
    ):
        list(client.chat.completions.create(**body))


def test_an_engine_that_does_not_stream_answers_streams_at_once() -> None:
    pipeline = DialoguePipeline(streaming=False)
    with Running(pipeline) as server:
        body = {"model": "dialogues", "messages": [user("A bell.")], "stream": True, "vllm_xargs": AUDIO}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            deltas = [event["choices"][0]["delta"] for event in events(answer.iter_lines())]
    assert "A bell." in "".join(delta.get("content") or "" for delta in deltas)
    assert any("audio" in delta for delta in deltas)
    pipeline.close()

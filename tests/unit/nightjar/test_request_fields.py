"""Every field of a request for speech, on each way in, becomes the setting that it is named after, and no
other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobs.ledger.records import JobSpec
from jobs.shard_file import ShardLine
from nightjar.voice import Voice
from pipelines.recording import SizedCache
from pipelines.request import AudioChunk, Generation, Message, SynthesisRequest
from pipelines.serving.cartesia import GenerationConfig, SpeechFields
from pipelines.serving.chat import AudioOut, ChatBody, Xargs
from pipelines.serving.speech import SpeechBody
from tests.support.fakes import MemoryStore
from tests.support.field_tables import changed, fields_of
from tests.support.serving_kit import Running, b64, card_of, wav
from tests.support.stream_voice import SAMPLE_RATE, StreamVoice, tone
from tests.support.websocket_kit import talk
from worker.feeding import RequestBuilder

TEXT = "Good morning."
SAID = Message("user", "text", TEXT)
RECORDING = wav(1.0)
CLONED = (Message("user", "audio", RECORDING), SAID)
Row = tuple[dict[str, Any], dict[str, Any]]

#: A value of each setting of a line.
VALUES: dict[str, Any] = {
    "voice": "bob",
    "language": "german",
    "instruct": "softly",
    "reference_text": "Said.",
    "seed": 8,
    "temperature": 0.7,
    "top_k": 11,
    "top_p": 0.8,
    "repetition_penalty": 1.1,
    "cfg": 3.0,
    "max_seconds": 12.0,
    "mode": "text_only",
    "text_temperature": 0.2,
    "audio_temperature": 0.3,
    "audio_top_k": 13,
    "max_tokens": 99,
    "roles": {"user": Generation(top_k=5)},
}
_SETTINGS = ("temperature", "top_k", "top_p", "repetition_penalty", "max_seconds")


def rows(*names: str, inside: str = "") -> list[Row]:
    """Rows of fields that are called as the setting is."""
    return [
        (
            {inside: {name: VALUES[name]}} if inside else {name: VALUES[name]},
            {f"generation.{name}": VALUES[name]},
        )
        for name in names
    ]


IN_PYTHON: list[Row] = [
    *rows(*(name for name in VALUES if name != "seed")),
    ({"seed": 8}, {"seed": 8}),
    ({"reference": RECORDING}, {"messages": CLONED}),
]
SPEECH: list[Row] = [
    *rows(*_SETTINGS, "voice", "language", "reference_text", "cfg"),
    ({"input": "Other words."}, {"messages": (Message("user", "text", "Other words."),)}),
    ({"instructions": "softly"}, {"generation.instruct": "softly"}),
    ({"reference_audio": b64(RECORDING)}, {"messages": CLONED}),
    ({"seed": 8}, {"seed": 8}),
    ({"timestamps": True, "stream_format": "sse"}, {"timestamps": True}),
]
SPEECH_ELSEWHERE = {
    "model", "response_format", "speed", "stream", "stream_format", "trim_leading_silence_ms",
}  # fmt: skip
CHAT: list[Row] = [
    *rows(*_SETTINGS, "max_tokens"),
    *rows("mode", "cfg", "text_temperature", "audio_temperature", inside="vllm_xargs"),
    ({"vllm_xargs": {"audio_topk": 13}}, {"generation.audio_top_k": 13}),
    (
        {"messages": [{"role": "system", "content": "Softly."}]},
        {"messages": (Message("system", "text", "Softly."),)},
    ),
    ({"modalities": ["text"], "vllm_xargs": {"mode": None}}, {"generation.mode": "text_only"}),
    ({"audio": {"voice": "bob"}}, {"generation.voice": "bob"}),
    ({"max_completion_tokens": 98}, {"generation.max_tokens": 98}),
    ({"seed": 8}, {"seed": 8}),
]
CHAT_ELSEWHERE = {
    "model",
    "audio.format",
    "stop_token_ids",
    "stream",
    "stream_options",
    "n",
    "user",
    "vllm_xargs.phase",
}
AGENTS: list[Row] = [
    *rows("instruct", *_SETTINGS, "cfg", inside="generation_config"),
    ({"generation_config": {"seed": 8}}, {"seed": 8}),
    ({"transcript": "Other words."}, {"messages": (Message("user", "text", "Other words."),)}),
    ({"voice": {"id": "bob"}}, {"generation.voice": "bob"}),
    ({"language": "german"}, {"generation.language": "german"}),
    ({"language": "de"}, {"generation.language": "de"}),
    ({"language": "EN-gb"}, {"generation.language": "EN-gb"}),
    ({"language": "klingon"}, {"generation.language": "klingon"}),
]
AGENTS_ELSEWHERE = {"model_id", "output_format", "generation_config.trim_leading_silence_ms"}


class Recorder(StreamVoice):
    """Takes whatever it is asked for."""

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        self.requests.append(request)
        yield AudioChunk(tone("", 0), SAMPLE_RATE)


def last(recorder: Recorder) -> dict[str, Any]:
    """The fields of the request that came last, apart from its id."""
    found = fields_of(recorder.requests[-1])
    del found["request_id"]
    return found


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            name: {**base.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in more.items()
        },
    }


def leaves(said: Mapping[str, Any]) -> set[str]:
    """The names of the fields that a row gives; of one with fields of its own, those."""
    return {
        f"{name}.{inner}" if name in ("vllm_xargs", "audio", "generation_config") else name
        for name in said
        for inner in _names(said[name])
    }


def _names(value: Any) -> Any:
    return value if isinstance(value, dict) else ("",)


@pytest.fixture(scope="module")
def speaking() -> Iterator[tuple[Running, Recorder]]:
    recorder = Recorder(languages=("english", "german"), cloning=True, instruct=True, guidance=True)
    with Running(recorder) as server:
        yield server, recorder


@pytest.fixture(scope="module")
def answering() -> Iterator[tuple[Running, Recorder]]:
    recorder = Recorder(
        multi_turn=True, text_out=True, audio_in=True, guidance=True, modes=("text_audio", "text_only")
    )
    with Running(recorder) as server:
        yield server, recorder


def identity(row: Row) -> str:
    return ",".join(sorted(leaves(row[0])))


def posted(
    server: Running, recorder: Recorder, route: str, base: Mapping[str, Any], said: Mapping[str, Any]
) -> dict[str, Any]:
    answer = server.http.post(route, json=merged(base, said))
    assert answer.status_code == 200, answer.text
    return last(recorder)


def check(row: Row, arrives: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    said, expected = row
    assert changed(arrives({}), arrives(said)) == expected


@pytest.mark.parametrize("row", SPEECH, ids=identity)
def test_a_field_of_openais_speech(speaking: tuple[Running, Recorder], row: Row) -> None:
    base = {"model": "tone", "input": TEXT, "seed": 7}
    check(row, lambda said: posted(*speaking, "/v1/audio/speech", base, said))


@pytest.mark.parametrize("row", CHAT, ids=identity)
def test_a_field_of_openais_chat(answering: tuple[Running, Recorder], row: Row) -> None:
    messages = [{"role": "user", "content": TEXT}]
    base = {"model": "tone", "messages": messages, "seed": 7, "vllm_xargs": {"mode": "text_audio"}}
    check(row, lambda said: posted(*answering, "/v1/chat/completions", base, said))


@pytest.mark.parametrize("row", AGENTS, ids=identity)
def test_a_field_of_cartesias_bytes(speaking: tuple[Running, Recorder], row: Row) -> None:
    base = {"transcript": TEXT, "generation_config": {"seed": 7}}
    check(row, lambda said: posted(*speaking, "/tts/bytes", base, said))


@pytest.mark.parametrize("row", AGENTS, ids=identity)
def test_a_field_of_cartesias_websocket(speaking: tuple[Running, Recorder], row: Row) -> None:
    server, recorder = speaking

    def arrives(said: dict[str, Any]) -> dict[str, Any]:
        with talk(server.url) as one:
            one.send(
                {"context_id": "a", **merged({"transcript": TEXT, "generation_config": {"seed": 7}}, said)}
            )
            one.hear("a")
        return last(recorder)

    check(row, arrives)


@pytest.mark.parametrize("row", IN_PYTHON, ids=identity)
@pytest.mark.parametrize("streams", [False, True])
def test_a_setting_in_python(row: Row, streams: bool) -> None:
    recorder = Recorder(languages=("english", "german"), cloning=True)
    voice = Voice(card_of(recorder), recorder)

    def arrives(said: dict[str, Any]) -> dict[str, Any]:
        if streams:
            list(voice.stream(TEXT, **said))
        else:
            voice.speak(TEXT, **said)
        return last(recorder)

    check(row, arrives)


def built(line: Generation, job: Generation, role: str | None) -> dict[str, Any]:
    """The request of a worker for an item of a line and a job with these settings."""
    lease = SimpleNamespace(job=SimpleNamespace(id="job", spec=JobSpec("m", generation=job, seed=3)), epoch=1)
    builder = RequestBuilder(cast("Any", SimpleNamespace(lease=lease)), MemoryStore(), SizedCache(100, len))
    own = line if role is None else line.of(cast("Any", role))
    found = fields_of(builder.build(ShardLine(0, 1, "a", (SAID,), own, 0, cast("Any", role))))
    del found["request_id"]
    return found


@pytest.mark.parametrize("name", [name for name in VALUES if name not in ("seed", "roles")])
def test_a_setting_of_a_line_or_a_job(name: str) -> None:
    nothing, said = Generation(), Generation(**{name: VALUES[name]})
    of_role = Generation(roles={"user": said})
    expected = {f"generation.{name}": VALUES[name]}
    plain = built(nothing, nothing, "user")
    for line, job in ((said, nothing), (nothing, said), (of_role, nothing), (nothing, of_role)):
        assert changed(plain, built(line, job, "user")) == expected
    assert changed(plain, built(said, Generation(**{name: type(VALUES[name])()}), "user")) == expected
    assert changed(plain, built(Generation(roles={"assistant": said}), nothing, "user")) == {}


def test_no_field_is_missing_in_the_tables() -> None:
    assert set(VALUES) == set(Generation.__struct_fields__)
    assert {name for said, _ in IN_PYTHON for name in said} == {"reference", *Generation.__struct_fields__}
    assert {path.removeprefix("generation.") for _, expected in IN_PYTHON for path in expected} == {
        "messages",
        *VALUES,
    }
    inside = {"vllm_xargs": Xargs, "audio": AudioOut}
    chat = {name for name in ChatBody.model_fields if name not in inside}
    chat |= {f"{name}.{inner}" for name, body in inside.items() for inner in body.model_fields}
    agents = {name for name in SpeechFields.model_fields if name != "generation_config"}
    agents |= {f"generation_config.{name}" for name in GenerationConfig.model_fields}
    for table, elsewhere, known in (
        (SPEECH, SPEECH_ELSEWHERE, set(SpeechBody.model_fields)),
        (CHAT, CHAT_ELSEWHERE, chat),
        (AGENTS, AGENTS_ELSEWHERE, agents),
    ):
        assert set().union(*(leaves(said) for said, _ in table)) | elsewhere == known

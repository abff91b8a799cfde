"""Lines against a model: the quick verdict is the full one, bad ones have a code, and shards are cut
evenly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.shard_file import ENGINE_SECONDS, ITEMS_PER_GROWTH, MAX_SHARD_BYTES, MIN_ITEMS, ShardSize, cut
from jobs.source import LineBatch
from jobs.spec import GoodLine
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import ModelCard
from pipelines.request import Capabilities, Generation, Message
from pipelines.validation import speech_task
from tests.support.checked_lines import line_checker

PLAIN = ModelCard(
    "plain",
    "plain",
    "cpu",
    24_000,
    Capabilities(voices=("v",), max_text_characters=20),
    seconds_per_character=0.1,
)
CLONING = replace(PLAIN, capabilities=Capabilities(cloning=True, needs_reference=True))
DIALOGUE = replace(PLAIN, capabilities=Capabilities(multi_turn=True, audio_in=True))

MESSAGES = st.tuples(
    st.sampled_from(["user", "assistant", "system"]),
    st.sampled_from(["text", "audio", "image"]),
    st.text(max_size=25) | st.just(" a"),
)


def line(example_id: str = "a", messages: object = (("user", "text", "hi"),), **rest: object) -> bytes:
    return json.dumps({"example_id": example_id, "messages": messages, **rest}).encode()


def verdict(card: ModelCard, defaults: Generation, messages: list[tuple[str, str, str]]) -> ErrorCode | None:
    try:
        speech_task([Message(*message) for message in messages], defaults, card.capabilities)
    except InputError as error:
        return error.code
    return None


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.sampled_from([PLAIN, CLONING, DIALOGUE]), st.booleans())
def test_a_line_that_is_one_item_gets_the_verdict_on_its_task(
    messages: list[tuple[str, str, str]], card: ModelCard, voice: bool
) -> None:
    defaults = Generation(voice="V" if voice and card is PLAIN else None)
    checker = line_checker(card, defaults, speak="answer")
    raw = json.dumps({"example_id": "a", "messages": messages}, ensure_ascii=False).encode()
    good, rejected = checker.check(LineBatch(1, [raw]), lambda content: f"key of {content}")
    assert [line.code for line in rejected] == [code for code in [verdict(card, defaults, messages)] if code]
    assert len(good) + len(rejected) == 1


def test_a_batch() -> None:
    keys: list[str] = []
    checker = line_checker(replace(CLONING, seconds_per_character=0.1), Generation(), speak="answer")
    spoken = [["user", "audio", "v.wav"], ["user", "text", "hello"], ["assistant", "audio", "gt.wav"]]
    lines = [
        b"\xef",
        line(messages=spoken),
        b"",
        None,
        line("b"),
        b"  " + line("c", spoken) + b"\r",
        line("a", spoken),
        line("b", spoken),
    ]
    good, rejected = checker.check(
        LineBatch(11, lines), lambda content: keys.append(content) or f"key-{content}"
    )
    assert [(one.line, one.example_id, one.estimated_ms, one.references) for one in good] == [
        (12, "a", 500, {0: "key-v.wav"}),
        (16, "c", 500, {0: "key-v.wav"}),
        (18, "b", 500, {0: "key-v.wav"}),
    ]
    assert good[1].raw == line("c", spoken)
    assert [(one.line, one.code, one.example_id) for one in rejected] == [
        (11, ErrorCode.INPUT_BAD_JSON, None),
        (14, ErrorCode.INPUT_TOO_LONG, None),
        (15, ErrorCode.INPUT_AUDIO_MISSING, "b"),
        (17, ErrorCode.INPUT_DUPLICATE_ID, "a"),
    ]


def test_what_stands_in_the_place_of_a_text_is_named() -> None:
    lines = [line(messages=[["user", "video", "x.mp4"]]), line("b", [["user", "audio", "x.wav"]])]
    _, rejected = line_checker(PLAIN, Generation(), speak="auto").check(
        LineBatch(1, [*lines]), lambda content: content
    )
    assert [(one.code, one.message.partition(".")[0]) for one in rejected] == [
        (ErrorCode.INPUT_EMPTY_TEXT, "The dialogue has no text to speak, but a message of modality 'video'"),
        (ErrorCode.INPUT_EMPTY_TEXT, "The dialogue has no text to speak"),
    ]


def test_a_line_is_kept_with_its_example_id() -> None:
    raw = b'{"id": "a", "messages": [["user", "text", "hi"]]}'
    good, rejected = line_checker(PLAIN, Generation(), speak="auto").check(
        LineBatch(1, [raw, raw]), lambda content: content
    )
    assert json.loads(good[0].raw)["example_id"] == good[0].example_id == "a"
    assert [(one.line, one.code) for one in rejected] == [(2, ErrorCode.INPUT_DUPLICATE_ID)]


@pytest.mark.parametrize(
    ("generation", "code"),
    [
        ({"voice": "w"}, ErrorCode.INPUT_UNKNOWN_VOICE),
        ({"language": "English"}, ErrorCode.INPUT_UNKNOWN_LANGUAGE),
        ({"cfg": 2.0}, ErrorCode.INPUT_UNSUPPORTED),
        ({"instruct": "slowly"}, ErrorCode.INPUT_UNSUPPORTED),
        ({"seed": -1}, ErrorCode.INPUT_BAD_GENERATION),
        ({"seed": 2**63}, ErrorCode.INPUT_BAD_GENERATION),
        ({"temperature": -0.1}, ErrorCode.INPUT_BAD_GENERATION),
        ({"top_p": 0}, ErrorCode.INPUT_BAD_GENERATION),
        ({"top_p": 1.01}, ErrorCode.INPUT_BAD_GENERATION),
        ({"top_k": -1}, ErrorCode.INPUT_BAD_GENERATION),
        ({"repetition_penalty": 0}, ErrorCode.INPUT_BAD_GENERATION),
        ({"max_seconds": 0}, ErrorCode.INPUT_BAD_GENERATION),
    ],
)
def test_settings_of_a_line_and_of_a_job(generation: dict[str, object], code: ErrorCode) -> None:
    good, rejected = line_checker(PLAIN, Generation(), speak="answer").check(
        LineBatch(1, [line(generation=generation)]), str
    )
    assert not good
    assert rejected[0].code is code
    with pytest.raises(InputError) as caught:
        line_checker(PLAIN, Generation(**generation), speak="answer")  # type: ignore[arg-type]
    assert caught.value.code is code


def made(estimated_ms: int, raw: bytes = b"") -> GoodLine:
    return GoodLine(1, "a", raw, estimated_ms, {})


def test_shards_are_cut_by_time_count_and_bytes() -> None:
    size = ShardSize(1000, 3)
    lines = [made(ms) for ms in (400, 400, 400, 5000, 100, 100, 100, 100, 0)]
    assert [[one.estimated_ms for one in run] for run in cut(lines, size)] == [
        [400, 400],
        [400],
        [5000],
        [100, 100, 100],
        [100, 0],
    ]
    big = made(1, bytes(MAX_SHARD_BYTES // 2))
    assert [len(run) for run in cut([big] * 5, size)] == [2, 2, 1]
    assert list(cut([], size)) == []


@given(st.lists(st.integers(0, 3000), max_size=50), st.integers(1, 5))
def test_no_line_is_lost_in_cutting(times: list[int], most: int) -> None:
    runs = list(cut([made(ms) for ms in times], ShardSize(1000, most)))
    assert [one.estimated_ms for run in runs for one in run] == times
    assert all(
        0 < len(run) <= most and (len(run) == 1 or sum(one.estimated_ms for one in run) <= 1000)
        for run in runs
    )


def test_the_size_of_a_shard_comes_from_the_models_speed() -> None:
    assert ShardSize.of(replace(PLAIN, rtf=0.5), 3600, 256) == ShardSize(
        int(ENGINE_SECONDS * 2000), 256, 2000
    )
    assert ShardSize.of(replace(PLAIN, rtf=0.001), 3600, 256) == ShardSize(3_600_000, 256, 1_000_000)
    assert ShardSize.of(replace(PLAIN, rtf=0.5), 3600, 256, measured_rtf=0.25) == ShardSize(
        int(ENGINE_SECONDS * 4000), 256, 4000
    )
    assert ShardSize.of(replace(PLAIN, rtf=0.5), 3600, 256, measured_rtf=0.0) == ShardSize(
        3_600_000, 256, 3_600_000
    )


@pytest.mark.parametrize(
    ("engine", "audio_ms"), [("cpu", 600_000), ("vllm", 42_000_000), ("native", 120_000_000)]
)
def test_a_model_whose_speed_nobody_knows_has_the_usual_one_of_its_engine(
    engine: Literal["cpu", "native", "vllm"], audio_ms: int
) -> None:
    assert ShardSize.of(replace(PLAIN, engine=engine), 1_000_000, 8192) == ShardSize(audio_ms, 8192)


def sizes(size: ShardSize, items: int, batch: int = 10_000) -> list[int]:
    """Items of the shards of a job whose items are 9 s each."""
    runs = [cut([made(9000)] * min(batch, items - first), size, first) for first in range(0, items, batch)]
    return [len(run) for shards in runs for run in shards]


def test_shards_grow_with_their_job() -> None:
    size = ShardSize.of(replace(PLAIN, engine="native"), 100_000, 8192)
    assert sizes(size, 64) == [64]
    assert sizes(size, 300) == [64, 64, 65, 65, 42]
    of_a_day = sizes(size, 20_000)
    assert 140 <= len(of_a_day) <= 180
    assert max(of_a_day) <= MIN_ITEMS + 20_000 // ITEMS_PER_GROWTH
    of_a_month = sizes(size, 1_000_000)
    assert sum(of_a_month) == 1_000_000
    assert len(of_a_month) < 1000
    assert max(of_a_month) == 64 + 990_000 // ITEMS_PER_GROWTH


def test_the_first_shards_have_a_second_of_work_where_the_speed_is_known() -> None:
    size = ShardSize.of(replace(PLAIN, engine="native"), 100_000, 8192, measured_rtf=1 / 2000)
    assert sizes(size, 1000) == [222, 222, 222, 222, 112]
    slow = ShardSize.of(replace(PLAIN, engine="native"), 100_000, 8192, measured_rtf=1.0)
    assert sizes(slow, 20) == [6, 6, 6, 2]

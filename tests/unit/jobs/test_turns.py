"""Whose turn is spoken, in whose voice, and where its audio stands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.cli.options import job_options
from jobs.dialogue import Speak, reference_places, spoken_turns, turn_messages, with_audio
from jobs.ledger.records import ItemRow, ItemState, JobSpec
from jobs.source import LineBatch
from jobs.spec import resolve
from pipelines.errors import ErrorCode, InputError, StoreError
from pipelines.registry import ModelCard
from pipelines.request import Capabilities, Generation, Message
from pipelines.validation import speech_task
from tests.support.checked_lines import line_checker

Triple = tuple[str, str, str]
CARD = ModelCard(
    "plain",
    "plain",
    "cpu",
    24_000,
    Capabilities(voices=("a", "b"), max_text_characters=20),
    seconds_per_character=0.1,
)
CLONER = replace(CARD, capabilities=Capabilities(cloning=True, needs_reference=True))
U, A, S = ("user", "text", "U"), ("assistant", "text", "A"), ("system", "text", "S")
HEARD, SAID, VOICE = ("user", "audio", "u.wav"), ("assistant", "audio", "a.wav"), ("system", "audio", "s.wav")
SHOWS_NOTHING = ("assistant", "text", " \u200b")


@pytest.mark.parametrize(
    ("messages", "auto", "user", "assistant", "all_of_them"),
    [
        ([U], [0], [0], [], [0]),
        ([S, U, A], [2], [1], [2], [1, 2]),
        ([U, A, SAID], [0], [0], [1], [0, 1]),
        ([U, SAID, A], [0], [0], [2], [0, 2]),
        ([U, A, SAID, U, A], [4], [0, 3], [1, 4], [0, 1, 3, 4]),
        ([U, A, A, SAID], [1], [0], [1, 2], [0, 1, 2]),
        ([U, A, U, SAID], [1], [0, 2], [1], [0, 1, 2]),
        ([U, SAID], [0], [0], [], [0]),
        ([HEARD, A], [1], [], [1], [1]),
        ([A], [0], [], [0], [0]),
        ([U, SHOWS_NOTHING], [0], [0], [], [0]),
        ([HEARD, SAID], [], [], [], []),
        ([U, U], [0, 1], [0, 1], [], [0, 1]),
    ],
)
def test_whose_turns_are_spoken(
    messages: list[Triple], auto: list[int], user: list[int], assistant: list[int], all_of_them: list[int]
) -> None:
    expected: dict[Speak, list[int]] = {
        "auto": auto,
        "user": user,
        "assistant": assistant,
        "all": all_of_them,
    }
    assert {speak: list(spoken_turns(messages, speak)) for speak in expected} == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "audio", "expected"),
    [
        ([S, U, A], {2: "x"}, [S, U, A, ("assistant", "audio", "x")]),
        ([S, U, A], {1: "x"}, [S, U, ("user", "audio", "x"), A]),
        (
            [U, A, U, A],
            {1: "x", 3: "y"},
            [U, A, ("assistant", "audio", "x"), U, A, ("assistant", "audio", "y")],
        ),
        # What ours replaces goes, and what says something else stays.
        ([U, A, SAID], {1: "x"}, [U, A, ("assistant", "audio", "x")]),
        ([U, SAID, A], {2: "x"}, [U, A, ("assistant", "audio", "x")]),
        ([U, A, SAID], {0: "x"}, [U, ("user", "audio", "x"), A, SAID]),
        # A user's text alone and its speech are a pair; its voice to clone stays beside it.
        ([U, SAID], {0: "x"}, [U, ("assistant", "audio", "x")]),
        ([S, U], {1: "x"}, [S, U, ("assistant", "audio", "x")]),
        ([HEARD, U], {1: "x"}, [HEARD, U, ("assistant", "audio", "x")]),
        ([U, HEARD], {0: "x"}, [U, HEARD, ("assistant", "audio", "x")]),
        ([U, SHOWS_NOTHING], {0: "x"}, [U, ("assistant", "audio", "x"), SHOWS_NOTHING]),
        ([U, U], {0: "x", 1: "y"}, [U, ("user", "audio", "x"), U, ("user", "audio", "y")]),
        (
            [U, SAID, U, SAID],
            {0: "x", 2: "y"},
            [U, ("user", "audio", "x"), SAID, U, ("user", "audio", "y"), SAID],
        ),
        ([HEARD, U, A], {1: "x"}, [HEARD, U, ("user", "audio", "x"), A]),
    ],
)
def test_audio_stands_behind_the_text_it_says(
    messages: list[Triple], audio: dict[int, str], expected: list[Triple]
) -> None:
    assert [tuple(message) for message in with_audio(messages, audio)] == expected


def test_the_audio_of_the_shipped_example_is_the_assistants() -> None:
    for line in (Path(__file__).parents[3] / "examples" / "hello.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        (turn,) = spoken_turns(messages, "auto")
        assert list(with_audio(messages, {turn: "x"})) == [*messages, ["assistant", "audio", "x"]]


@pytest.mark.parametrize(
    ("messages", "turn", "places"),
    [
        ([HEARD, U, A], 1, [0]),
        ([U, HEARD, A], 0, [1]),
        ([HEARD, U, A], 2, []),
        ([VOICE, HEARD, U, A], 3, [0]),
        ([VOICE, U], 1, []),
        # A voice stays; audio without a text beside it is what the user said.
        ([HEARD, U, A, U], 3, [0]),
        ([HEARD, A, U], 2, []),
        ([HEARD, U, A, ("user", "audio", "v.wav"), U], 4, [3]),
    ],
)
def test_whose_recording_a_turn_is_spoken_from(messages: list[Triple], turn: int, places: list[int]) -> None:
    assert list(reference_places(messages, turn)) == places  # type: ignore[arg-type]


def test_a_turn_in_the_words_of_a_pipeline() -> None:
    messages = [S, VOICE, U, A, SAID]
    assert turn_messages(messages, 3, {1: "key"}) == (  # type: ignore[arg-type]
        Message("system", "text", "S"),
        Message("user", "audio", "key"),
        Message("user", "text", "A"),
    )
    assert turn_messages(messages, 2) == (Message("system", "text", "S"), Message("user", "text", "U"))  # type: ignore[arg-type]


def row_id(example_id: str, turn: int, *, several: bool) -> str:
    outcome = (ItemState.DONE, 0, 1, None, None, None)
    return ItemRow(0, example_id, *outcome, turn, several, speaks_turns=True).id


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "a:turn1", "b:turn", ":turn0"]), st.integers(0, 3), st.booleans()),
        unique=True,
    )
)
def test_no_two_items_share_an_id(items: list[tuple[str, int, bool]]) -> None:
    # A dialogue has one spoken turn, its first, or several.
    several = {example_id: flag for example_id, _, flag in items}
    real = {(example_id, turn) for example_id, turn, _ in items if several[example_id] or turn == 0}
    assert len({row_id(example_id, turn, several=several[example_id]) for example_id, turn in real}) == len(
        real
    )
    assert row_id("utterance-7", 0, several=False) == "utterance-7"


def test_settings_of_a_role() -> None:
    line = Generation(voice="line", reference_text="user's", roles={"assistant": Generation(language="x")})
    job = Generation(voice="job", cfg=2.0, roles={"assistant": Generation(voice="job's assistant", cfg=3.0)})
    assert line.of("user").over(job.of("user")) == Generation(voice="line", reference_text="user's", cfg=2.0)
    assert line.of("assistant").over(job.of("assistant")) == Generation(voice="line", language="x", cfg=3.0)
    assert Generation().of("assistant").over(job.of("assistant")).voice == "job's assistant"
    own = Generation(
        voice="line", roles={"assistant": Generation(voice="line's assistant", reference_text="assistant's")}
    )
    assert own.of("assistant").over(job.of("assistant")) == Generation(
        voice="line's assistant", reference_text="assistant's", cfg=3.0
    )


MESSAGES = st.tuples(
    st.sampled_from(["user", "assistant", "system"]),
    st.sampled_from(["text", "text", "audio", "image"]),
    st.text(max_size=25) | st.just(" a"),
)


def verdict(
    card: ModelCard, defaults: Generation, messages: list[Triple], speak: Speak
) -> tuple[ErrorCode | None, tuple[int, ...]]:
    turns = spoken_turns(messages, speak)  # type: ignore[arg-type]
    for turn in turns:
        try:
            speech_task(turn_messages(messages, turn), defaults.of(messages[turn][0]), card.capabilities)  # type: ignore[arg-type]
        except InputError as error:
            return error.code, turns
    return (None, turns) if turns else (ErrorCode.INPUT_EMPTY_TEXT, turns)


@given(
    st.lists(MESSAGES, min_size=1, max_size=4),
    st.sampled_from([CARD, CLONER]),
    st.sampled_from(("auto", "user", "assistant", "all")),
    st.booleans(),
)
def test_the_quick_verdict_is_the_full_one(
    messages: list[Triple], card: ModelCard, speak: Speak, voice: bool
) -> None:
    defaults = (
        Generation(voice="A", roles={"assistant": Generation(voice="b")})
        if voice and card is CARD
        else Generation()
    )
    checker = line_checker(card, defaults, speak=speak)
    raw = json.dumps({"example_id": "a", "messages": messages}, ensure_ascii=False).encode()
    good, rejected = checker.check(LineBatch(1, [raw]), lambda content: f"key of {content}")
    code, turns = verdict(card, defaults, messages, speak)
    assert [line.code for line in rejected] == ([code] if code else [])
    assert [(line.turns, line.items) for line in good] == ([] if code else [(turns, len(turns))])


def check(
    card: ModelCard, *messages: Triple, speak: Speak = "auto", **rest: object
) -> list[tuple[ErrorCode, str]]:
    raw = json.dumps({"example_id": "a", "messages": messages, **rest}).encode()
    return [
        (line.code, line.message)
        for line in line_checker(card, Generation(), speak=speak).check(LineBatch(1, [raw]), str)[1]
    ]


def test_what_is_refused_says_what_to_do() -> None:
    assert check(CARD, U, speak="assistant") == [
        (
            ErrorCode.INPUT_EMPTY_TEXT,
            "The dialogue has no assistant text. Add such a text message to the line, or choose another role with --speak.",
        )
    ]
    ((code, message),) = check(CLONER, HEARD, U, A)
    assert code is ErrorCode.INPUT_AUDIO_MISSING
    assert "system audio message" in message
    assert not check(CLONER, VOICE, HEARD, U, A, speak="all")
    ((code, message),) = check(CARD, U, ("assistant", "text", "a" * 21), speak="all")
    assert (code, message.startswith("Message 1: ")) == (ErrorCode.INPUT_TOO_LONG, True)
    ((code, _),) = check(CARD, U, A, generation={"roles": {"assistant": {"voice": "nobody"}}})
    assert code is ErrorCode.INPUT_UNKNOWN_VOICE
    ((code, message),) = check(CARD, U, generation={"roles": {"system": {"voice": "a"}}})
    assert code is ErrorCode.INPUT_BAD_GENERATION, message
    ((code, _),) = check(CARD, U, generation={"roles": {"user": {"roles": {}}}})
    assert code is ErrorCode.INPUT_UNSUPPORTED


@pytest.mark.parametrize("speak", ["auto", "user", "all", "answer"])
def test_a_plain_text_is_held_to_the_limit_of_the_model(speak: Speak) -> None:
    for length, codes in ((20, []), (21, [ErrorCode.INPUT_TOO_LONG])):
        raw = json.dumps({"example_id": "a", "messages": [("user", "text", "a" * length)]}).encode()
        _, rejected = line_checker(CARD, Generation(), speak=speak).check(LineBatch(1, [raw]), str)
        assert [line.code for line in rejected] == codes


def test_estimates_count_every_turn() -> None:
    raw = json.dumps({"example_id": "a", "messages": [U, A, U]}).encode()
    (line,), _ = line_checker(CARD, Generation(), speak="all").check(LineBatch(1, [raw]), str)
    assert (line.turns, line.estimated_ms) == ((0, 1, 2), 300)


def spec_of(*arguments: str) -> JobSpec:
    taken: list[JobSpec] = []

    @click.command()
    @job_options
    def command(spec: JobSpec, **_: Any) -> None:
        taken.append(spec)

    command.main(list(arguments), standalone_mode=False)
    return taken[0]


def test_options_of_the_command_line() -> None:
    options = spec_of(
        "--speak", "all", "--voice", "heart", "--voice-of", "assistant=bella", "--voice-of", "user=heart"
    )
    assert options.speak == "all"
    assert (options.generation.of("assistant").voice, options.generation.of("user").voice) == (
        "bella",
        "heart",
    )
    assert (spec_of().speak, spec_of().generation) == ("auto", Generation())
    for wrong in (
        ["--voice-of", "system=a"],
        ["--voice-of", "user="],
        ["--voice-of", "user=a", "--voice-of", "user=b"],
        ["--speak", "answer"],
    ):
        with pytest.raises(click.UsageError):
            spec_of(*wrong)
    with pytest.raises(InputError) as caught:
        resolve(spec_of("--voice-of", "assistant=nobody"))
    assert caught.value.code is ErrorCode.INPUT_UNKNOWN_VOICE


def test_only_recordings_of_lines_that_nothing_else_refuses_are_read_and_a_failing_store_ends_it() -> None:
    def line(name: str, recording: str, text: str = "Hello.", **rest: object) -> bytes:
        messages = [("user", "audio", recording), ("user", "text", text)]
        return json.dumps({"example_id": name, "messages": messages, **rest}).encode()

    read = list[str]()

    def key(recording: str) -> str:
        read.append(recording)
        if recording == "lost.wav":
            raise InputError(ErrorCode.INPUT_AUDIO_MISSING, "There is no such file.")
        if recording == "down.wav":
            raise StoreError(ErrorCode.STORE_UNREACHABLE, "The store does not answer.")
        return f"key of {recording}"

    checker = line_checker(CLONER, Generation(), speak="auto")
    lines = [
        line("a", "a.wav"),
        line("b", "lost.wav"),
        line("a", "again.wav"),
        line("c", "c.wav", " "),
        line("d", "d.wav"),
    ]
    good, rejected = checker.check(LineBatch(1, lines), key)
    assert [(one.example_id, one.references) for one in good] == [
        ("a", {0: "key of a.wav"}),
        ("d", {0: "key of d.wav"}),
    ]
    assert [(one.line, one.code) for one in rejected] == [
        (2, ErrorCode.INPUT_AUDIO_MISSING),
        (3, ErrorCode.INPUT_DUPLICATE_ID),
        (4, ErrorCode.INPUT_EMPTY_TEXT),
    ]
    assert sorted(read) == ["a.wav", "d.wav", "lost.wav"]
    read.clear()
    many = [line(str(number), "down.wav") for number in range(1000)]
    with pytest.raises(StoreError):
        checker.check(LineBatch(1, many), key)
    assert len(read) < 50, "each of them was asked for"

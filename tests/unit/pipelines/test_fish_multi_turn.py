"""Long items of Fish Speech S2 turn by turn, on a host that answers when it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.duration import longest_seconds
from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.pipeline import FishRequestInfo, TurnPlan
from pipelines.fish_speech.prompt import Conversation, Vocabulary
from pipelines.tokens import TokenRequest, Tokens, TokenSampling
from tests.support.fish_checkpoint import whole
from tests.support.fish_turns import Asked

CONFIG = FishConfig.from_folder(whole())
VOCABULARY = Vocabulary.from_folder(CONFIG)
FIRST, END = CONFIG.semantic.start, CONFIG.end


class FakeHost:
    """Keeps what is submitted; the test plays the engine."""

    def __init__(self) -> None:
        self.sent: list[tuple[TokenRequest, Any]] = []
        self.cancelled: list[TokenRequest] = []
        self.refusal: NightjarError | None = None

    def submit(self, request: TokenRequest, receiver: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append((request, receiver))

    def abort(self, request_id: str) -> None:
        self.cancelled += [request for request, _ in self.sent if request.request_id == request_id]

    def cancel(self, request: TokenRequest) -> None:
        self.cancelled.append(request)

    def answer(self, codes: Sequence[int], finish: str = "stop", streamed: bool = False) -> None:
        """The turn under way speaks frames with these first codes, and ends, as on vLLM."""
        _, receiver = self.sent[-1]
        columns = np.array(
            [[FIRST + code, *[code] * 10] for code in codes] + [[END, *[0] * 10]] * (finish == "stop")
        )
        ids = columns[:, 0].tolist()
        if streamed:
            for index in range(len(columns)):
                receiver.tokens(ids[index : index + 1], columns[index : index + 1])
        receiver.finished(Tokens(ids, finish, columns))  # pyright: ignore[reportArgumentType]


class Heard:
    """A receiver that remembers."""

    def __init__(self, streamed: bool = False) -> None:
        self.streamed = streamed
        self.frames: list[int] = []
        self.end: Tokens | NightjarError | None = None

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        assert codes is not None
        assert codes.shape == (len(ids), 10)
        self.frames += codes[:, 0].tolist()

    def finished(self, tokens: Tokens) -> None:
        self.end = tokens

    def failed(self, error: NightjarError) -> None:
        self.end = error


def start(
    texts: Sequence[str],
    heard: Heard,
    most: int = 20,
    frames: int | None = None,
    context: int = 400,
    keep: bool = False,
) -> tuple[FakeHost, Asked, TurnPlan]:
    host = FakeHost()
    sampling = TokenSampling(most, 0.8, 30, 0.8, seed=7, stop_ids=(END,))
    plan = TurnPlan("item", Conversation(VOCABULARY, 10, []), texts, sampling, frames, context, keep, 20.0)
    return host, Asked(host, plan, heard), plan


def codes_of(request: TokenRequest) -> list[int]:
    """First codes of the speech in a prompt."""
    return request.prompt.codes[:, 0].tolist()


def end_of(heard: Heard) -> Tokens:
    assert isinstance(heard.end, Tokens), heard.end
    assert heard.end.codes is not None
    return heard.end


@pytest.mark.parametrize("streamed", [False, True])
def test_turns_follow_one_another_and_hear_what_was_said(streamed: bool) -> None:
    heard = Heard(streamed)
    host, _, _ = start(
        ["One.", "Two.", "Three."], heard, most=5
    )  # of each turn; all of them together have more columns
    host.answer([1, 2, 3], streamed=streamed)
    assert heard.end is None
    host.answer([4], streamed=streamed)
    host.answer([5, 6], streamed=streamed)
    assert [codes_of(request) for request, _ in host.sent] == [[], [1, 2, 3], [1, 2, 3, 4]]
    assert len({request.sampling.seed for request, _ in host.sent}) == 3
    assert all(0 <= request.sampling.seed < 2**63 for request, _ in host.sent)
    assert host.sent[0][0].sampling.seed == 7, "an item of one turn has its own seed"
    ended = end_of(heard)
    assert (ended.finish, ended.ids) == ("stop", [1, 2, 3, 4, 5, 6])
    assert heard.frames == ([1, 2, 3, 4, 5, 6] if streamed else [])
    prompts = [list(request.prompt.ids) for request, _ in host.sent]
    assert [request.longest for request, _ in host.sent] == [
        round(longest_seconds(text) * 20) for text in ("One.", "Two.", "Three.")
    ], "each turn has the time of its own text"
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert prompts[2][: len(prompts[1])] == prompts[1]
    system = host.sent[0][0].prompt.shared[0]
    assert VOCABULARY.encode("<|im_start|>user\n")[0] == prompts[0][system], (
        "all turns begin with the system message"
    )
    behind = [system, *(len(prompt) - 1 for prompt in prompts[:2])]
    assert [list(request.prompt.shared) for request, _ in host.sent] == [behind[:2], behind, behind], (
        "nothing follows the last turn"
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_the_last_possible_column_is_no_speech(streamed: bool) -> None:
    heard = Heard(streamed)
    host, _, _ = start(["One."], heard, most=4)
    host.answer([1, 2, 3, 4], "length", streamed=streamed)
    assert (end_of(heard).finish, end_of(heard).ids) == ("length", [1, 2, 3])
    assert heard.frames == ([1, 2, 3] if streamed else [])


def test_a_turn_that_is_cut_ends_the_item_unless_it_is_kept() -> None:
    heard = Heard()
    host, _, _ = start(["One.", "Two."], heard, most=3)
    host.answer([1, 2, 3], "length")
    assert len(host.sent) == 1
    assert end_of(heard).finish == "length"
    kept = Heard()
    host, _, _ = start(["One.", "Two."], kept, most=3, keep=True)
    host.answer([1, 2, 3], "length")
    host.answer([4])
    assert (end_of(kept).finish, end_of(kept).ids) == ("length", [1, 2, 4])


def test_all_turns_share_the_seconds() -> None:
    heard = Heard()
    host, _, _ = start(["One.", "Two.", "Three."], heard, frames=5)
    assert host.sent[0][0].sampling.max_tokens == 6
    host.answer([1, 2, 3])
    assert host.sent[1][0].sampling.max_tokens == 3
    host.answer([4, 5])
    assert len(host.sent) == 2, "no time is left for the third turn"
    assert (end_of(heard).finish, end_of(heard).ids) == ("length", [1, 2, 3, 4, 5])


def test_a_turn_without_a_frame_fails_the_item() -> None:
    heard = Heard()
    host, _, plan = start(["One.", "Two."], heard)
    host.answer([1])
    host.answer([])
    info = FishRequestInfo("", 44_100, {}, False, plan, CONFIG.codec.codes)
    with pytest.raises(SynthesisError) as caught:
        info.read(end_of(heard))
    assert caught.value.code is ErrorCode.SYNTH_NO_AUDIO


def test_our_own_engine_hands_over_no_end() -> None:
    heard = Heard()
    host, _, plan = start(["One.", "Two."], heard)
    columns = np.array([[FIRST + 1, *[1] * 10]])
    host.sent[-1][1].finished(Tokens(columns[:, 0].tolist(), "stop", columns))
    assert codes_of(plan.current) == [1]
    host.sent[-1][1].finished(Tokens([], "stop", columns[:0]))
    assert (end_of(heard).finish, end_of(heard).codes.shape) == ("stop", (0, 10))  # pyright: ignore[reportOptionalMemberAccess]


def test_log_probabilities_are_those_of_all_turns() -> None:
    heard = Heard()
    host, _, plan = start(["One.", "Two."], heard, most=3, keep=True)
    for first, finish, count in ((1, "length", 3), (5, "stop", 1)):
        columns = np.array([[FIRST + code, *[code] * 10] for code in range(first, first + count)])
        measured = -columns[:, 1].astype(float)
        host.sent[-1][1].finished(Tokens(columns[:, 0].tolist(), finish, columns, measured))  # pyright: ignore[reportArgumentType]
    found = end_of(heard)
    assert found.log_probabilities is not None
    assert (found.ids, found.log_probabilities.tolist()) == ([1, 2, 5], [-1, -2, -5])
    info = FishRequestInfo("", 44_100, {}, True, plan, CONFIG.codec.codes)
    assert info.read(found).log_probabilities is found.log_probabilities


def test_a_dialogue_that_outgrows_the_engine_says_where() -> None:
    heard = Heard()
    host, _, plan = start(["One.", "Two."], heard, most=300, context=300)
    assert host.sent[0][0].sampling.max_tokens == 300 - len(plan.current.prompt)
    host.answer(range(24), "stop")
    host.sent.clear()
    heard = Heard()
    host, _, _ = start(["One.", "Two."], heard, most=300, context=100)
    host.answer([*range(24), *range(24)])
    assert isinstance(heard.end, InputError)
    assert heard.end.code is ErrorCode.INPUT_TOO_LONG
    assert "message 2" in heard.end.message


def test_an_abort_between_two_turns_starts_no_further_one() -> None:
    heard = Heard()
    host, item, _ = start(["One.", "Two."], heard)
    item.cancel()
    host.answer([1, 2])
    assert len(host.sent) == 1


@pytest.mark.parametrize("before", [True, False])
def test_an_abort_while_the_next_turn_starts_ends_that_turn(before: bool) -> None:
    """The host hears of the abort before it knows the turn, or after."""
    heard = Heard()
    host, item, plan = start(["One.", "Two."], heard)
    send = host.submit

    def submit(request: TokenRequest, receiver: Any) -> None:
        if before:
            item.cancel()
            host.cancelled.clear()
        send(request, receiver)
        if not before:
            item.cancel()

    host.submit = submit
    host.answer([1, 2])
    assert plan.current is host.sent[1][0]
    assert plan.current in host.cancelled


def test_a_stream_that_is_left_cancels_the_turn_under_way() -> None:
    heard = Heard(True)
    host, item, _ = start(["One.", "Two."], heard)
    host.answer([1])
    item.cancel()
    assert host.cancelled == [host.sent[1][0]]


def test_a_host_that_refuses_a_turn_fails_the_item() -> None:
    heard = Heard()
    host, _, _ = start(["One.", "Two."], heard)
    host.refusal = SynthesisError(ErrorCode.SYNTH_ENGINE, "gone")
    host.answer([1])
    assert heard.end is host.refusal

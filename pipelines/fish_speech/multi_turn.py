"""An item turn by turn: every group of turns is a sequence of the engine, whose prompt holds what was
spoken before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, InputError, NightjarError
from pipelines.fish_speech.prompt import Conversation, Prompt
from pipelines.request import Listener
from pipelines.results import FinishedCodes, Receiver, RequestInfo, Streamer, Utterance, no_audio
from pipelines.tokens import TokenRequest, Tokens, TokenSampling

#: Apart by this much, the seeds of an item's turns meet those of no other turn of it (2**64 / golden ratio).
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 1 << 63


@dataclass(slots=True, eq=False)
class TurnPlan:
    """What is left to say of one item, and the sequence under way."""

    request_id: str
    conversation: Conversation
    #: The user messages.
    texts: Sequence[str]
    #: Of every turn, with its most columns.
    sampling: TokenSampling
    #: Of all turns that are left; None: no limit.
    frames: int | None
    #: Positions that the engine holds.
    context: int
    #: Whether a turn that was cut is followed by the next one.
    keep_unfinished: bool
    #: Whether a turn has reached its limit without an end, or there was no time left for one.
    cut: bool = False
    turn: int = 0
    prompt: Prompt = field(init=False)
    current: TokenRequest = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = self._ask()
        self.current = self._request(self.prompt)

    @property
    def most(self) -> int:
        """Columns of the turn under way; the last one is the end, or is dropped."""
        return self.current.sampling.max_tokens

    def heard(self, frames: NDArray[np.int64], cut: bool) -> bool:
        """Takes up what the turn under way has spoken, to its end or `cut`; whether there is another one,
        which is then `current`.

        Raises `InputError` (`input.too_long`) when the dialogue has outgrown the engine.
        """
        self.turn += 1
        self.cut |= cut
        if self.turn == len(self.texts) or not len(frames) or (cut and not self.keep_unfinished):
            return False
        if self.frames is not None:
            self.frames -= len(frames)
            if self.frames < 1:
                self.cut = True
                return False
        self.conversation.answer(frames)
        self.current = self._request(self._ask())
        if self.most < 2:
            raise InputError(
                ErrorCode.INPUT_TOO_LONG,
                f"The dialogue has outgrown the engine's {self.context} positions before its message {self.turn + 1}.",
                "Split it into several lines, or open the model with a larger max_context.",
            )
        return True

    def _ask(self) -> Prompt:
        return self.conversation.ask(self.texts[self.turn], self.turn + 1 < len(self.texts))

    def _request(self, prompt: Prompt) -> TokenRequest:
        most = min(self.sampling.max_tokens, self.context - len(prompt.ids))
        if self.frames is not None:
            most = min(most, self.frames + 1)
        seed = (self.sampling.seed + self.turn * _SEED_STEP) % _SEEDS
        sampling = replace(self.sampling, max_tokens=max(most, 1), seed=seed)
        return TokenRequest(
            self.request_id, prompt.ids, sampling, prompt_codes=prompt.codes, shared_positions=prompt.shared
        )


@dataclass(frozen=True, slots=True)
class FishRequestInfo(RequestInfo[CodecState]):
    """What results need to know of a request."""

    plan: TurnPlan

    def read(self, tokens: Tokens) -> FinishedCodes[CodecState]:
        """The frames of all turns. Raises `SynthesisError`: `synth.no_eos`, `synth.no_audio` when a turn
        has none."""
        assert tokens.codes is not None
        self.check_end(tokens.finish, len(tokens.codes))
        if not len(tokens.codes):
            raise no_audio("The model ended a turn before its first frame.")
        return FinishedCodes(tokens.codes, tokens.finish)


class Turns(Receiver[CodecState]):
    """Mixed in before a receiver of one sequence: it hears of all turns as if they were one."""

    def __init__(self, info: FishRequestInfo, stage: CodecStage[CodecState], listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self._plan = info.plan
        self._columns = 0
        self._parts: list[NDArray[np.int64]] = []

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        assert codes is not None
        # Whatever the last possible column holds, it is no speech, as in the published loop.
        whole = codes[: max(self._plan.most - 1 - self._columns, 0)]
        self._columns += len(ids)
        spoken = _spoken(whole, self._plan.current)
        if len(spoken):
            super().tokens(ids[: len(spoken)], spoken)

    def finished(self, tokens: Tokens) -> None:
        assert tokens.codes is not None
        plan = self._plan
        frames = _spoken(tokens.codes[: plan.most - 1], plan.current)
        self._parts.append(frames)
        self._columns = 0
        try:
            if plan.heard(frames, tokens.finish == "length"):
                self.go_on(plan.current)
                return
        except NightjarError as error:
            self.failed(error)
            return
        codes = np.concatenate(self._parts) if len(frames) else frames
        super().finished(Tokens(codes[:, 0].tolist(), "length" if plan.cut else "stop", codes))


class FishUtterance(Turns, Utterance[CodecState]):
    """The speech of all turns."""


class FishStreamer(Turns, Streamer[CodecState]):
    """A stream of frames, 21.5 a second: the first chunk is the first frame."""


def _spoken(columns: NDArray[np.int64], request: TokenRequest) -> NDArray[np.int64]:
    """The codes [frames, codebooks] of columns [n, 1 + codebooks] before their end."""
    ends = np.flatnonzero(np.isin(columns[:, 0], request.sampling.stop_ids))
    return columns[: ends[0] if len(ends) else len(columns), 1:]

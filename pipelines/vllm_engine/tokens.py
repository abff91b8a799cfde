"""What families on vLLM share: tokens of a sequence to codes for the codec's stage, and how a request is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.request import Generation
from pipelines.results import FinishedCodes, OnDone, RequestInfo, Streamer, UtteranceFuture
from pipelines.streams import Heard
from pipelines.validation import bounded, bounded_top_k, check_seed, either
from pipelines.vllm_engine.options import Tokens, TokenSampling

#: The highest temperature that vLLM takes.
MAX_TEMPERATURE = 2.0

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class TokenReader(Protocol[S_co]):
    """Reads the tokens of one stream while they come."""

    def read(self, ids: list[int], codes: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """The frames [frames, codebooks] that are whole with these tokens; often none."""
        ...

    def start(self) -> S_co | None:
        """Where the codec starts, a state of this stream alone; None while the tokens do not say it. Asked once there is a frame."""
        ...


@dataclass(frozen=True, slots=True)
class TokenRequestInfo(RequestInfo, Generic[S]):
    """A request's info, and what its tokens mean. A family overrides both methods, the second only where it streams."""

    def read(self, tokens: Tokens) -> FinishedCodes[S]:
        """The utterance that a finished sequence holds.

        Raises `SynthesisError`: `synth.no_eos` (`check_end`) when it did not end, `synth.no_audio` (`no_audio`) when it holds no speech.
        """
        raise NotImplementedError

    def reader(self) -> TokenReader[S]:
        """A new reader of a stream."""
        raise NotImplementedError


class TokenUtteranceFuture(UtteranceFuture[S]):
    """A `pipelines.vllm_engine.host.TokenReceiver` of whole utterances."""

    streamed = False

    def __init__(self, info: TokenRequestInfo[S], stage: CodecStage[S], settled: OnDone) -> None:
        super().__init__(info, stage, settled)
        self._read = info.read

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        """Whole utterances wait for their end."""

    def finished(self, tokens: Tokens) -> None:
        try:
            made = self._read(tokens)
        except SynthesisError as error:
            self.failed(error)
        else:
            self.decode(made)


class TokenStreamer(Streamer[S]):
    """A `pipelines.vllm_engine.host.TokenReceiver` of streams."""

    streamed = True
    #: Whether the codec looks ahead, so that empty codes must tell it of the end.
    looks_ahead: ClassVar[bool] = False

    def __init__(self, info: TokenRequestInfo[S], stage: CodecStage[S], heard: Heard) -> None:
        super().__init__(info, stage, heard)
        self._read = info.read
        self._reader = info.reader()

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        frames = self._reader.read(ids, codes)
        if self._state is None and (len(frames) or self._buffer):
            self._state = self._reader.start()
        self.push(frames)

    def finished(self, tokens: Tokens) -> None:
        try:
            made = self._read(tokens)
        except SynthesisError as error:
            self.close(error)
            return
        self.flush()
        if self.looks_ahead:
            self.mark_end(made.codes.shape[1])
        self.close(None)


class Drawing(Protocol):
    """How a model draws by itself."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


def token_sampling(defaults: Drawing, generation: Generation, max_tokens: int, seed: int, stops: tuple[int, ...]) -> TokenSampling:
    """How a request is drawn: its own settings over the model's; at most `max_tokens` tokens.

    Raises `InputError` (`input.bad_generation`) for a seed out of range, and for a temperature that vLLM would refuse.
    """
    check_seed(seed)
    temperature = either(generation.temperature, defaults.temperature)
    if temperature > MAX_TEMPERATURE:
        message = f"`temperature` is {temperature!r}; this model takes 0 to {MAX_TEMPERATURE:g}."
        raise InputError(ErrorCode.INPUT_BAD_GENERATION, message, "Correct the `generation` object.")
    return TokenSampling(
        max_tokens=max_tokens,
        temperature=bounded(temperature),
        top_k=bounded_top_k(either(generation.top_k, defaults.top_k)),
        top_p=either(generation.top_p, defaults.top_p),
        repetition_penalty=bounded(either(generation.repetition_penalty, defaults.repetition_penalty)),
        seed=seed,
        stop_ids=stops,
    )

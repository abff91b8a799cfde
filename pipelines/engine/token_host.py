"""Sequences of tokens on our own engine: the contract of `pipelines.tokens.TokenHost`, codes as ids of a model's vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.engine.core import Finish
from pipelines.engine.engine import Engine
from pipelines.engine.executor import PromptLike
from pipelines.engine.prefixes import PromptPrefix
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import NightjarError
from pipelines.request import EngineInfo, EngineStats
from pipelines.tokens import TokenReceiver, TokenRequest, Tokens, TokenSampling

P = TypeVar("P", bound=PromptLike)


class NativeHost(Generic[P]):
    """A `pipelines.tokens.TokenHost` over `Engine`.

    A code is a row of the model's head, `ids` [codes] the id of each. A sequence is what vLLM makes of the same draws, without the id that
    ended it. Where a frame has more than one codebook, the codes of a step are its id and then those of all codebooks.
    """

    def __init__(
        self,
        engine: Engine,
        ids: NDArray[np.int64],
        ends: tuple[int, ...],
        prompt: Callable[[TokenRequest], P],
        prefixes: Callable[[P], Sequence[PromptPrefix]] = lambda _: (),
        codebooks: int = 1,
    ) -> None:
        """`ends`: the codes that end a sequence of this model; `prompt`: what the model embeds for a request; `prefixes`: the positions of
        that which other prompts begin with too; `codebooks`: of a frame.
        """
        self._engine = engine
        self._ids = ids
        self._stop_ids = frozenset(ids[list(ends)].tolist())
        #: The code of each id that is one, for the penalty of what a prompt holds.
        self._codes = {int(token): code for code, token in enumerate(ids.tolist())}
        self._prompt = prompt
        self._prefixes = prefixes
        self._codebooks = codebooks
        self._lock = threading.Lock()
        self._asked: dict[TokenRequest, GenerationRequest] = {}

    @property
    def max_context(self) -> int:
        """Positions of a sequence: prompt and new tokens."""
        info = self._engine.info
        return min(info.kv_pages * info.page_size, info.max_context)

    @property
    def dtype(self) -> str:
        return self._engine.info.dtype

    @property
    def info(self) -> EngineInfo:
        """Sizes of the engine and how it runs a frame."""
        return self._engine.info

    def submit(self, request: TokenRequest, receiver: TokenReceiver) -> None:
        """Queues a sequence; see `pipelines.tokens.TokenHost.submit`. A receiver may call it, and a stream never waits.

        Raises `SynthesisError` as `Engine.submit`; ValueError for stop ids that are not the model's ends, and for a shadow.
        """
        asked = self._generation(request, receiver.streamed)
        with self._lock:
            self._asked[request] = asked
        try:
            self._engine.submit(asked, _Receiver(receiver, self._tokens_of, request.sampling.max_tokens, lambda: self._forget(request)))
        except BaseException:
            self._forget(request)
            raise

    def abort(self, request_id: str) -> None:
        """Ends all sequences with this id; their receivers hear `synth.aborted`. Unknown ids are ignored."""
        with self._lock:
            named = [asked for asked in self._asked.values() if asked.request_id == request_id]
        # One by one: a sequence that takes the name after this must not end with them.
        for asked in named:
            self._engine.cancel(asked)

    def cancel(self, request: TokenRequest) -> None:
        """Ends this one sequence; its receiver hears `synth.aborted`. Does nothing when it is over."""
        with self._lock:
            asked = self._asked.get(request)
        if asked is not None:
            self._engine.cancel(asked)

    def stats(self, audio_seconds: float = 0.0) -> EngineStats:
        return self._engine.stats(audio_seconds)

    def close(self) -> None:
        """Ends the engine's thread; sequences under way fail with `synth.aborted`. May be called more than once."""
        self._engine.close()

    def _generation(self, request: TokenRequest, streamed: bool) -> GenerationRequest:
        sampling = request.sampling
        if request.shadow is not None:
            raise ValueError("the native engine runs no shadow of a sequence")
        if not sampling.ignore_end and frozenset(sampling.stop_ids) != self._stop_ids:
            raise ValueError(f"the native engine ends a sequence at {sorted(self._stop_ids)}, not at {sorted(sampling.stop_ids)}")
        # The engine's last draw only tells whether the sequence has ended.
        draws = sampling.max_tokens + 1
        prompt = self._prompt(request)
        counted = set(request.prompt_ids) if sampling.repetition_penalty != 1 else set[int]()
        return GenerationRequest(
            request_id=request.request_id,
            prompt=prompt,
            sampling=_sampling(sampling, draws),
            seed=sampling.seed,
            max_tokens=draws,
            stream=streamed,
            unheard=request.unheard,
            drawn=[self._codes[token] for token in counted if token in self._codes],
            prefixes=self._prefixes(prompt),
        )

    def _tokens_of(self, codes: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64] | None]:
        """Ids of frames [frames, codebooks], which may be none, and the codes of their steps."""
        frames = codes if len(codes) else codes.reshape(0, self._codebooks)
        ids = self._ids[frames[:, 0]]
        return ids.tolist(), None if self._codebooks == 1 else np.concatenate((ids[:, None], frames), axis=1)

    def _forget(self, request: TokenRequest) -> None:
        with self._lock:
            self._asked.pop(request, None)


class _Receiver:
    """Tells a `TokenReceiver` what the engine says of its request."""

    def __init__(
        self,
        receiver: TokenReceiver,
        tokens_of: Callable[[NDArray[np.int64]], tuple[list[int], NDArray[np.int64] | None]],
        most: int,
        over: Callable[[], None],
    ) -> None:
        self._receiver = receiver
        self._tokens_of = tokens_of
        self._most = most
        self._over = over
        self._passed = 0

    def frames(self, codes: NDArray[np.int64]) -> None:
        self._passed += len(codes)
        self._receiver.tokens(*self._tokens_of(codes))

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        self._over()
        if self._receiver.streamed and len(codes) > self._passed:
            self._receiver.tokens(*self._tokens_of(codes[self._passed :]))
        ids, columns = self._tokens_of(codes)
        self._receiver.finished(Tokens(ids, "length" if len(ids) == self._most else "stop", columns))

    def failed(self, error: NightjarError) -> None:
        self._over()
        self._receiver.failed(error)


def _sampling(asked: TokenSampling, draws: int) -> SamplingParams:
    """What the engine draws with; all codebooks alike."""
    return SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        repetition_penalty=asked.repetition_penalty,
        residual_temperature=asked.temperature,
        residual_top_k=asked.top_k,
        residual_top_p=asked.top_p,
        min_new_tokens=draws if asked.ignore_end else 0,
    )

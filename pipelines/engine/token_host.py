"""Sequences of tokens on our own engine: the contract of `pipelines.tokens.TokenHost`, codes as ids of a
model's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.engine.engine import Engine
from pipelines.engine.scheduler import Finish, GenerationRequest, PromptPrefix
from pipelines.engine.state import SamplingParams
from pipelines.request import EngineInfo
from pipelines.results import Receiver
from pipelines.tokens import TokenRequest, Tokens

#: Frames to ids, and to the codes of their steps.
TokensOf = Callable[[NDArray[np.int64]], tuple[list[int], NDArray[np.int64] | None]]


class NativeHost:
    """A `pipelines.tokens.TokenHost` over `Engine`.

    A code is a row of the model's head, `ids` [codes] the id of each. A sequence is what vLLM makes of the
    same draws, without the id that ended it. Where a frame has more than one codebook, the codes of a step
    are its id and then those of all codebooks.
    """

    def __init__(
        self,
        engine: Engine,
        ids: NDArray[np.int64],
        prompt: Callable[[TokenRequest], Any],
        prefixes: Callable[[Any], Sequence[PromptPrefix]] = lambda _: (),
        codebooks: int = 1,
    ) -> None:
        """`prompt`: what the model embeds for a request; `prefixes`: the positions of that which other
        prompts begin with too; `codebooks`: of a frame."""
        self._engine = engine
        self._ids = ids
        #: The code of each id that is one, for the penalty of what a prompt holds.
        self._codes = {int(token): code for code, token in enumerate(ids.tolist())}
        self._prompt = prompt
        self._prefixes = prefixes
        self._codebooks = codebooks
        #: Ends the engine's thread, or one sequence: those fail with `synth.aborted`.
        self.close, self.cancel, self.stats = engine.close, engine.cancel, engine.stats

    @property
    def info(self) -> EngineInfo:
        """Sizes of the engine and how it runs a frame."""
        return self._engine.info

    def submit(self, request: TokenRequest, receiver: Receiver[Any]) -> None:
        """Queues a sequence; see `pipelines.tokens.TokenHost`. A receiver may call it, and a stream
        never waits.

        It ends at the model's own ends, whatever the stop ids, and has no shadow. Raises `SynthesisError`
        as `Engine.submit`.
        """
        sampling = request.sampling
        # The engine's last draw only tells whether the sequence has ended.
        draws = sampling.max_tokens + 1
        prompt = self._prompt(request)
        counted = set(request.prompt_ids) if sampling.repetition_penalty != 1 else set[int]()
        wanted = GenerationRequest(
            request_id=request.request_id,
            prompt=prompt,
            # All codebooks are drawn alike.
            sampling=SamplingParams(
                sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty,
                sampling.temperature, sampling.top_k, sampling.top_p, min_new_tokens=draws if sampling.ignore_end else 0,
            ),
            seed=sampling.seed,
            max_tokens=draws,
            stream=receiver.streamed,
            unheard=request.unheard,
            drawn=[self._codes[token] for token in counted if token in self._codes],
            prefixes=self._prefixes(prompt),
            origin=request,
        )  # fmt: skip
        self._engine.submit(wanted, _Receiver(receiver, self._tokens_of, sampling.max_tokens))

    def _tokens_of(self, codes: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64] | None]:
        """Ids of frames [frames, codebooks], which may be none, and the codes of their steps."""
        frames = codes if len(codes) else codes.reshape(0, self._codebooks)
        ids = self._ids[frames[:, 0]]
        return ids.tolist(), None if self._codebooks == 1 else np.concatenate((ids[:, None], frames), axis=1)


class _Receiver:
    """Tells a receiver of tokens what the engine says of its request, whose sequence has a maximum of so many
    tokens."""

    def __init__(self, receiver: Receiver[Any], tokens_of: TokensOf, most: int) -> None:
        self._receiver, self._tokens_of, self._most = receiver, tokens_of, most
        self._passed = 0
        self.failed = receiver.failed

    def frames(self, codes: NDArray[np.int64]) -> None:
        self._passed += len(codes)
        self._receiver.tokens(*self._tokens_of(codes))

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        if self._receiver.streamed and len(codes) > self._passed:
            self.frames(codes[self._passed :])
        ids, columns = self._tokens_of(codes)
        self._receiver.finished(Tokens(ids, "length" if len(ids) == self._most else "stop", columns))

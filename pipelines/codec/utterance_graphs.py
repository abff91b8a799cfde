"""Steps of a continuous batch of whole utterances: each row decodes the next frames of its own, in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipelines.codec.blocks import Past
from pipelines.codec.chunk_graphs import ChunkGraphs, Codes, launch_bytes
from pipelines.codec.states import CodecShape, CodecState
from pipelines.codec.transfer import SamplesOnTheWay, recorded

#: Frames of a step: the last step of an utterance is filled up, and a state is read and written once a step.
STEP_FRAMES = 16
#: A step of few utterances has a half, a quarter ... of the rows, so many times halved at most.
_HALVINGS = 4


class UtteranceGraphs(ChunkGraphs):
    """Decodes the next frames of up to `rows` utterances, each in a row of its own from its first frame to its last.

    The machinery is that of streams, of which this is a second set: a step fills the device for tens of milliseconds, which a chunk of a
    stream may not wait for, and an arena, its buffers and its graphs belong to one CUDA stream.
    """

    def __init__(
        self,
        run: Callable[[Tensor, Past], Tensor],
        shape: CodecShape,
        rows: int,
        frames: int = STEP_FRAMES,
        fixed: bool = False,
        check: Callable[[Sequence[Tensor]], None] = lambda _: None,
    ) -> None:
        """`fixed`: every step has all rows, so that an utterance meets the same kernels in any company. `check` raises for wrong codes."""
        counts = (rows,) if fixed else tuple(sorted({max(rows >> halved, 1) for halved in range(_HALVINGS + 1)}))
        super().__init__(run, shape, rows, {frames: counts})
        self.rows, self.frames = rows, frames
        self.samples_per_frame = shape.samples_per_frame
        self._check = check

    @torch.inference_mode()
    def enter(self, codes: Tensor, start: CodecState | None) -> CodecState | None:
        """The state, in a row of its own, of an utterance [frames, codebooks] that follows `start`, which stays as it is.

        None where all rows are taken. Raises `SynthesisError` (`synth.engine`) for codes of another shape or outside the codebooks.
        """
        self._check([codes])
        state = CodecState() if start is None else start.copy()
        with self.on_stream():
            return state if state.enter(self.arena) else None

    def leave(self, state: CodecState) -> None:
        """Gives the row back. What was started for it before is decoded."""
        state.close()

    @torch.inference_mode()
    def step(self, states: Sequence[CodecState], codes: Sequence[Codes]) -> SamplesOnTheWay:
        """Starts a step and moves the states on. codes: [n, codebooks] each, n at most `frames`; fewer only at the end of an utterance."""
        with self.on_stream():
            buffer = self.launch(states, codes, self.frames)
            event = recorded() if self._stream is not None else None
        parts = [[self.heard(buffer, row, self.frames, len(one))] for row, one in enumerate(codes)]
        return SamplesOnTheWay(parts, event, lambda: self.take_back([buffer]))


def utterance_bytes(shape: CodecShape, rows: int, frames: int = STEP_FRAMES) -> int:
    """Bytes of device memory of the graphs of so many rows: their arena, and what one step has at once."""
    return launch_bytes(shape, rows, rows, rows * frames)

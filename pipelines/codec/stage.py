"""The last stage: codes of finished utterances become audio in batches, those of streams chunk by chunk beside them."""

from __future__ import annotations

from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.codec.continuous_lane import ContinuousLane
from pipelines.codec.lane import Decoder, Done, S
from pipelines.codec.stream_lane import StreamLane
from pipelines.codec.utterance_lane import UtteranceLane


class CodecStage(Generic[S]):
    """Decodes what it is given on threads of its own: a lane of whole utterances, and one of streams that never waits for the other.

    `done` is called on a thread of its lane with float32 samples [n], or with the error of that utterance alone. On a CUDA `device` each
    lane has a stream, beside the frames; that of streams goes first. Whole utterances wait up to `gather_seconds` for company until they
    have `gather_frames` frames together, where more than a few came within the last second.

    Where the decoder has steps for whole utterances (`CausalDecoder.utterances`) these are a continuous batch, which waits as long at most
    from one step to the next until all of its rows are taken.
    """

    def __init__(
        self,
        decoder: Decoder[S],
        max_batch: int = 64,
        device: torch.device | None = None,
        gather_seconds: float = 0.0,
        gather_frames: int = 4096,
    ) -> None:
        self._decoder = decoder
        self._streams = StreamLane(decoder, max_batch, device)
        gathered = (device, gather_seconds, gather_frames, self._streams.alive)
        self._utterances: UtteranceLane[S] | ContinuousLane[Any]
        if (steps := getattr(decoder, "utterances", None)) is not None:
            self._utterances = ContinuousLane(steps, *gathered)
        else:
            self._utterances = UtteranceLane(decoder, max_batch, *gathered)

    @property
    def behind(self) -> bool:
        """Whether a full batch of whole utterances waits to be started, so that more codes would only wait longer."""
        return self._utterances.behind

    @property
    def is_current(self) -> bool:
        """Whether this is a thread of the stage's own, on which `done` is called: were it to wait, the stage would not go on."""
        return self._streams.is_current or self._utterances.is_current

    def new_state(self) -> S:
        """Where a stream starts that follows nothing."""
        return self._decoder.new_state()

    def decode(self, codes: NDArray[np.int64], done: Done, start: S | None = None) -> None:
        """Decodes a whole utterance [frames, codebooks], from the state `start` on when it follows a reference."""
        self._utterances.put(torch.from_numpy(codes), done, start)

    def decode_chunk(self, codes: NDArray[np.int64], done: Done, state: S, last: bool = False, deadline: float = 0.0) -> None:
        """Decodes the next frames of a stream and moves `state` on; chunks of one stream keep their order.

        `last`: no chunk of this stream follows, so `state` need not be right afterwards. `deadline`: earlier ones go first.
        """
        self._streams.put(torch.from_numpy(codes), done, state, last, deadline)

    def end(self, state: S) -> None:
        """Says that the stream of this state is over: no chunk of it is decoded any more, and what it holds of the device goes back.

        May be called on any thread and more than once. A state that nobody holds any more needs none of it.
        """
        if callable(close := getattr(state, "close", None)):
            close()

    def close(self) -> None:
        """Decodes what is queued, then ends the threads. May be called more than once."""
        self._streams.close()
        self._utterances.close()

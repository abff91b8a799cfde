"""Work of a CUDA device as a graph, captured while other threads use the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Of CUDA streams, where a lower one goes first on the device: chunks that listeners wait for, then the frames of an engine for streams.
#: Everything else has 0.
CHUNK_PRIORITY, FRAME_PRIORITY = -2, -1


def capture(work: Callable[[], None], pool: Any, aside: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of this work, which runs once before, on the stream `aside`. Other threads may use the device meanwhile."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(aside.device)
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        work()  # builds kernels and sets up libraries, which a capture may not do
        # What other threads ask of the device does not end this capture, and nothing waits for the device.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    current.wait_stream(aside)
    return graph

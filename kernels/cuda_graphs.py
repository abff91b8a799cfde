"""Captures work of a CUDA device as a graph while other threads use the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

#: Priorities of CUDA streams; a stream with a lower number runs first. First the chunks that listeners wait for,
#: then the frames of an engine that serves listeners. All other work has priority 0.
CHUNK_PRIORITY = -2
FRAME_PRIORITY = -1


class GraphPool:
    """Memory that the graphs of one thread share, because only one of them runs at a time."""

    def __init__(self) -> None:
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self._handle: Any = None

    def handle(self) -> Any:
        """The handle for a capture. The allocator frees a pool together with its last graph, or after a
        failed capture; then a new pool is made."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def keep(self, graph: torch.cuda.CUDAGraph) -> None:
        """Registers a graph that was captured in the pool."""
        self._graphs.add(graph)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means that the device has no memory left. Drivers and libraries report it differently
    from PyTorch's allocator."""
    message = str(error).lower().replace("_", " ")
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in message or "alloc failed" in message)
    )


def capture(work: Callable[[], None], pool: GraphPool, aside: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Runs this work once on the stream `aside`, then captures it as a graph. Other threads may use the device
    meanwhile.

    Raises `torch.OutOfMemoryError` if there is no memory for the graph.
    """
    current = torch.cuda.current_stream(aside.device)
    aside.wait_stream(current)
    try:
        with torch.cuda.stream(aside):
            work()  # builds kernels and sets up libraries, which a capture must not do
            graph = _recorded(work, pool)
            if graph is None:
                # During a capture the allocator cannot return cached memory, such as what the work has just
                # used.
                torch.cuda.empty_cache()
                graph = _recorded(work, pool, last=True)
    except RuntimeError as error:
        if lacks_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
    finally:
        # Also after a failure, because the caller may then reuse the memory that the work reads.
        current.wait_stream(aside)
    assert graph is not None
    return graph


def _recorded(work: Callable[[], None], pool: GraphPool, last: bool = False) -> torch.cuda.CUDAGraph | None:
    """Captures this work on the current stream. Returns None if there is no memory for it; on the `last` try
    it raises the error instead."""
    graph = torch.cuda.CUDAGraph()
    # In this mode calls of other threads do not invalidate the capture.
    graph.capture_begin(pool=pool.handle(), capture_error_mode="thread_local")
    try:
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the error of the work itself is raised
                graph.capture_end()
            raise
        graph.capture_end()  # instantiates the graph, in the driver's memory
    except RuntimeError as error:
        if last or not lacks_memory(error):
            raise
        return None
    pool.keep(graph)
    return graph


class BucketGraphs:
    """Batches of a few shapes on one CUDA stream, each batch one graph launch."""

    #: Maximum graphs; batches of further shapes are launched op by op.
    MOST = 128

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._pool = GraphPool()
        #: By shape: the memory of the inputs, the graph, and the memory of its result.
        self.graphs = dict[Hashable, tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor]]()

    @contextmanager
    def following(self, *inputs: Tensor) -> Iterator[None]:
        """Within the block the stream is the current one. It waits for the work of the one before, which makes
        these inputs."""
        current = torch.cuda.current_stream(self.stream.device)
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(current)
            for one in inputs:
                one.record_stream(self.stream)
            yield

    def __call__(self, key: Hashable, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The result of `work` on a device's copies of these inputs, until the next call. `key`: whatever
        decides the work and its shapes. One thread at a time may call it, on the stream."""
        if key not in self.graphs:
            places = [one.to(self.stream.device, copy=True) for one in inputs]
            if len(self.graphs) == self.MOST:
                return work(*places)
            made = list[Tensor]()
            graph = capture(lambda: made.append(work(*places)), self._pool, self.stream)
            self.graphs[key] = places, graph, made[-1]
        places, graph, result = self.graphs[key]
        for place, one in zip(places, inputs):
            place.copy_(one)
        graph.replay()
        return result

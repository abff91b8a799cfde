"""Chunks of many streams as CUDA graphs, in sizes that bound how long a first chunk waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from kernels.cuda_graphs import CHUNK_PRIORITY
from pipelines.codec.batches import FIXED_ROWS
from pipelines.codec.blocks import Past
from pipelines.codec.chunk_graphs import ChunkGraphs, launch_bytes
from pipelines.codec.states import CodecShape, CodecState
from pipelines.codec.transfer import Samples

#: Streams and frames that a graph is captured for. Fewer streams are filled up with a row that is nobody's.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
FRAMES = (1, 2, 4, 8, 12)
#: Frames of all streams of one launch: it bounds how long a first chunk may wait for the device, and the memory of a launch.
GROUP_FRAMES = 512


@lru_cache(4096)
def pieces(frames: int, last: bool) -> tuple[tuple[int, int], ...]:
    """Cuts a chunk into sizes that have a graph: frames of the chunk, and frames of the graph, for each in turn.

    Only the last chunk of a stream may be filled up: what its state is afterwards matters to nobody.
    """
    found: list[tuple[int, int]] = []
    while frames:
        filled = next((size for size in FRAMES if size >= frames), None) if last else None
        size = filled or max(size for size in FRAMES if size <= frames)
        found.append((min(frames, size), size))
        frames -= found[-1][0]
    return tuple(found)


class StreamGraphs(ChunkGraphs):
    """Decodes chunks of streams, on a CUDA stream of high priority."""

    def __init__(
        self,
        run: Callable[[Tensor, Past], Tensor],
        shape: CodecShape,
        streams: int,
        fixed: bool = False,
        group_frames: int = GROUP_FRAMES,
    ) -> None:
        """`streams`: rows of the arena. `fixed`: all launches have `FIXED_ROWS` rows."""
        most = next((rows for rows in ROWS if rows >= streams), ROWS[-1])
        counts = (FIXED_ROWS,) if fixed else tuple(rows for rows in ROWS if rows <= most)
        rows = {frames: [rows for rows in counts if rows * frames <= group_frames] or [counts[0]] for frames in FRAMES}
        super().__init__(run, shape, streams, rows, CHUNK_PRIORITY)

    def company(self, frames: int, last: bool) -> tuple[int, int]:
        """Frames of the first launch of a chunk, and how many streams can share it."""
        size = next((size for _, size in pieces(frames, last)), FRAMES[0])
        return size, self._rows[size][-1]

    def replay(self, states: Sequence[CodecState], codes: Sequence[Tensor], last: Sequence[bool]) -> tuple[list[list[Samples]], list[Any]]:
        """Launches the next frames of streams that have a row, on the current CUDA stream, and moves their states on.

        codes: one [n, codebooks] each, on the host. Returns for each stream the parts of its samples, on their way to the host, and the
        buffers that they lie in, for `take_back` once they were read.
        """
        parts: list[list[Samples]] = [[] for _ in codes]
        buffers: list[Any] = []
        plans = [pieces(len(one), final) for one, final in zip(codes, last)]
        left = [one.numpy() for one in codes]
        for turn in range(max(map(len, plans), default=0)):
            alike: dict[int, list[int]] = {}
            for index, plan in enumerate(plans):
                if turn < len(plan):
                    alike.setdefault(plan[turn][1], []).append(index)
            for frames, same in alike.items():
                limit = self._rows[frames][-1]
                for start in range(0, len(same), limit):
                    group = same[start : start + limit]
                    taken = [plans[index][turn][0] for index in group]
                    some = [left[index][:count] for index, count in zip(group, taken)]
                    buffer = self.launch([states[index] for index in group], some, frames)
                    buffers.append(buffer)
                    for row, (index, count) in enumerate(zip(group, taken)):
                        parts[index].append(self.heard(buffer, row, frames, count))
                        left[index] = left[index][count:]
        return parts, buffers


def graph_bytes(shape: CodecShape, streams: int) -> int:
    """Bytes of device memory of the graphs of so many streams: their arena, and what one launch has at once."""
    return launch_bytes(shape, streams, min(max(streams, 1), ROWS[-1]), GROUP_FRAMES)

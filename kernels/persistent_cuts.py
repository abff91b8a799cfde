"""Which stacks of layers the persistent kernels are built for, and how they are cut. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """How a kernel cuts a stack of layers: its name, blocks, warps that compute, tiles of a warp in a chunk, shared memory."""

    name: str
    blocks: int
    warps: int
    tiles: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        """Of a block: the warps that compute, and the one that streams weights."""
        return 32 * (self.warps + 1)


#: The compute capability of the GPU that the pace of the weights' copies and the times of benchmarks/NOTES.md are from.
MEASURED_ON = (9, 0)
#: By width, inner width, heads, kv heads, size of a head, codes, layers, codebooks behind code 0. Those of 0.6B and 1.7B are alike.
PREDICTORS: dict[tuple[int, ...], Cut] = {(1024, 3072, 16, 8, 128, 2048, 5, 15): Cut("persistent_published", 128, 8, 4, 232_448)}
#: By width, inner width, heads, kv heads, size of a head.
TALKERS: dict[tuple[int, ...], Cut] = {(1024, 3072, 16, 8, 128): Cut("persistent_talker_published", 128, 8, 4, 232_448)}

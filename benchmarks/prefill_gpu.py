"""Times packed prefill (`kernels/prefill.py`).

    python -m benchmarks.prefill_gpu [--rows 512,2048,6144] [--prompts 36,228] [--sizes 0.6B,1.7B]

A row of so many positions is filled with prompts of one length, over random weights of the published
sizes. Each row of the result has the milliseconds of a graph replay, microseconds of a position, and
whether SwiGLU is the CUDA C++ kernel's at so many positions (`fills`).
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from benchmarks.gpu import Bench, graph_us, numbers, parser
from benchmarks.random_models.frames import TINY, Maker, Shape
from benchmarks.wide_products import SHAPES
from kernels import lm_products
from kernels.attention import PackedPrompts
from kernels.lm_products import fills, processors
from kernels.prefill import prefill_packed

PAGE, SCRATCH = 64, 0


def prompts_of(total: int, length: int, device: torch.device) -> tuple[PackedPrompts, int]:
    """Prompts of one length that fill `total` positions, the last one cut off, each on pages of its own;
    and how many pages there are."""
    counts = [min(length, total - begin) for begin in range(0, total, length)]
    each = -(-length // PAGE)
    table = torch.arange(1, len(counts) * each + 1, device=device).view(len(counts), each)
    told = list(range(len(counts))), [0] * len(counts), counts
    return PackedPrompts(table, *(torch.tensor(values, device=device) for values in told)), len(
        counts
    ) * each + 1


def measure(bench: Bench, name: str, shape: Shape, rows: int, length: int) -> None:
    maker = Maker(str(bench.device), bench.dtype)
    stack = maker.stack(shape.hidden, shape.inter, shape.layers, shape, length)
    prompts, pages = prompts_of(rows, length, bench.device)
    (k, v), embeddings = maker.caches(shape, pages, PAGE), maker.normal(rows, shape.hidden)
    filled = lm_products.serves_swiglu(stack.layers[0].down) and fills(
        rows, shape.inter, processors(bench.device.index or 0)
    )
    us = graph_us(partial(prefill_packed, embeddings, prompts, stack, k, v, SCRATCH), 1, 11)
    row = {"part": "prefill", "sizes": name, "rows": rows, "prompt": length, "fills": filled}
    bench.add({**row, "ms": us / 1000, "us_per_position": us / rows})


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rows", type=numbers, default=[512, 2048, 6144])
    made.add_argument("--prompts", type=numbers, default=[36, 228])
    made.add_argument("--sizes", default=",".join(SHAPES))
    options = made.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = Bench("prefill_gpu", options)
    shapes = {"tiny": TINY} if options.tiny else {name: SHAPES[name] for name in options.sizes.split(",")}
    for name, shape in shapes.items():
        for rows in options.rows:
            for length in options.prompts:
                bench.attempt(f"{name} {rows} {length}", partial(measure, bench, name, shape, rows, length))
                bench.clean()
    return bench.end()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

"""Times SwiGLU of many rows in CUDA C++ (`kernels/lm_products.py`) beside cuBLAS's and the launches around
those, and frames with it.

    python -m benchmarks.wide_products [--rows 512,640,1024] [--parts check,products,frame]

`check` compares it with float64 (`error`: the worst one over cuBLAS's) and launches it twice; `products`
times chains of launches over the weights of 28 layers, each behind a norm, us of both, and `alone`,
without what is around a product; `fills`: whether a frame has it at so many rows; `frame` whole frames,
ms, by contexts of 108 and 300, without and with it where it fills the GPU. Random weights of the 0.6B
sizes, and at the most rows of the 1.7B ones.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import Bench, graph_us, numbers, parser
from benchmarks.random_models.frames import LARGE, SMALL, Maker, Shape
from kernels import layers, lm_products
from kernels.lm_frame import FusedFrame, Plan, plan_for
from kernels.lm_products import fills, processors
from kernels.lm_triton import add_norm, swiglu

LAYERS, EPS = 28, 1e-6
SHAPES = {"0.6B": SMALL, "1.7B": LARGE}
CONTEXTS = (108, 300)
PAGE = 64
#: After which a part, a minute where kernels are compiled, is given up: a kernel that does not end takes the
#: process along.
SECONDS = 90


class Product:
    """Gate and up of some layers, and the activations of one."""

    def __init__(self, maker: Maker, shape: Shape, rows: int, layers: int) -> None:
        n, inner = shape.inter, shape.hidden
        self.weights = [maker.matrix(2 * n, inner) for _ in range(layers)]
        self.norm = maker.normal(inner, std=0.1, mean=1.0)
        self.x, self.y = maker.normal(rows, inner), maker.normal(rows, n)
        self.both, self.h = maker.normal(rows, 2 * n), torch.empty_like(self.x)
        self.pending = torch.zeros_like(self.x)  # what a norm adds to x, which stays as it is

    def ours(self, around: bool = True) -> None:
        for weight in self.weights:
            x = add_norm(self.x, self.pending, self.norm, EPS, self.h, early=True) if around else self.x
            lm_products.swiglu(x, weight, self.y, pdl=around)

    def cublas(self, around: bool = True) -> None:
        for weight in self.weights:
            x = add_norm(self.x, self.pending, self.norm, EPS, self.h) if around else self.x
            torch.mm(x, weight.t(), out=self.both)
            if around:
                swiglu(self.both, self.y)

    def twin(self, dtype: torch.dtype) -> Tensor:
        return layers.swiglu(functional.linear(self.x.to(dtype), self.weights[0].to(dtype)))


def shapes(bench: Bench, rows: int) -> dict[str, Shape]:
    """Those that are measured at so many rows."""
    return SHAPES if rows == max(bench.options.rows) else {"0.6B": SMALL}


def check(bench: Bench, rows: int) -> None:
    for name, shape in shapes(bench, rows).items():
        given = Product(Maker(str(bench.device), torch.bfloat16, seed=rows), shape, rows, 1)
        exact = given.twin(torch.float64)
        allowed = float((given.twin(torch.bfloat16) - exact).norm())
        found = [lm_products.swiglu(given.x, given.weights[0], given.y.clone()) for _ in range(2)]
        worst = max(float((y - exact).norm()) / allowed for y in found)
        same = all(torch.equal(y, found[0]) for y in found)
        bench.add({"part": "check", "rows": rows, "sizes": name, "error": worst, "same": same})
        if not (worst < 1.5 and same):
            raise RuntimeError(f"{name} is wrong: {worst:.2f} times cuBLAS's error, launches agree: {same}.")


def products(bench: Bench, rows: int) -> None:
    for name, shape in shapes(bench, rows).items():
        given = Product(Maker(str(bench.device), torch.bfloat16), shape, rows, LAYERS)
        row = {
            "cublas": graph_us(given.cublas, LAYERS, 9),
            "ours": graph_us(given.ours, LAYERS, 9),
            "cublas_alone": graph_us(partial(given.cublas, around=False), LAYERS, 9),
            "ours_alone": graph_us(partial(given.ours, around=False), LAYERS, 9),
        }
        filled = fills(*given.y.shape, processors(bench.device.index or 0))
        bench.add({"part": "products", "rows": rows, "sizes": name, "fills": filled, **row})


def pages_for(rows: int, context: int) -> int:
    """Enough for the state of so many slots whose contexts are half as long to half as much again."""
    return rows * -(-(context * 3 // 2 + 64) // PAGE) + 1


def frame(bench: Bench, rows: int) -> None:
    for name, shape in shapes(bench, rows).items():
        plan = plan_for(rows, shape.hidden)
        plans = {"without": replace(plan, wide_swiglu=False), "with": replace(plan, wide_swiglu=True)}
        for context in CONTEXTS if shape is SMALL else CONTEXTS[:1]:
            found = frame_ms(bench, shape, rows, context, plans)
            bench.add({"part": "frame", "rows": rows, "sizes": name, "context": context, **found})
            bench.clean()


def frame_ms(
    bench: Bench, shape: Shape, rows: int, context: int, plans: Mapping[str, Plan]
) -> dict[str, float]:
    """Milliseconds of whole frames by plan, contexts from half to one and a half of `context`."""
    maker = Maker(str(bench.device), torch.bfloat16)
    weights, contexts = maker.frame(shape), maker.integers(context // 2, context * 3 // 2, rows)
    pages, slots = pages_for(rows, context), torch.arange(rows, device=bench.device)
    state, (k, v) = maker.state(shape, rows, pages, PAGE, contexts), maker.caches(shape, pages, PAGE)
    codes = torch.zeros(rows, shape.codebooks, dtype=torch.int64, device=bench.device)
    flags = torch.zeros(rows, dtype=torch.uint8, device=bench.device)
    found: dict[str, float] = {}
    for name, plan in plans.items():
        runner = FusedFrame(weights, state, k, v, rows, plan)

        def again(runner: FusedFrame = runner) -> None:
            state.positions[:rows] = contexts
            runner.run(slots, codes, flags)

        found[name] = graph_us(again, 1, 11) / 1000
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rows", type=numbers, default=[512, 640, 1024])
    made.add_argument("--parts", default="check,products,frame")
    options = made.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = Bench("wide_products", options)
    parts: dict[str, Callable[[Bench, int], None]] = {"check": check, "products": products, "frame": frame}
    for part in options.parts.split(","):
        for rows in options.rows:
            signal.alarm(SECONDS)
            bench.attempt(f"{part} {rows}", partial(parts[part], bench, rows))
            signal.alarm(0)
    return bench.end()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

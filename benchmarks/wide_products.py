"""Times the products of many rows in CUDA C++ (`kernels/lm_wide.py`) beside cuBLAS's and the launches around those, and frames with them.

    python -m benchmarks.wide_products [--rows 128,256,512,1024] [--parts check,products,frame]

`check` compares every cut with float64 (`error`: the worst one over cuBLAS's) and launches it twice; `products` times chains of launches
over the weights of 28 layers, each behind a norm, us of both, by cut (rows of weights in a tile x blocks of a cluster), without an early
start, and `alone`, without what is around a product; `frame` whole frames, ms, by contexts of 108 and 300, without and with the products.
Random weights of the 0.6B sizes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import Bench, graph_us, numbers, parser
from kernels import layers
from kernels.dummy import SMALL, Maker
from kernels.lm_frame import FusedFrame, plan_for
from kernels.lm_triton import add_norm, swiglu
from kernels.lm_wide import HEIGHTS, ROWS, Cut, cut_for, processors, product

LAYERS, EPS = 28, 1e-6
#: Outputs, inner size, and whether they are SwiGLU's.
SIZES = {"gate_up": (3072, 1024, True), "qkv": (4096, 1024, False)}
CONTEXTS = (108, 300)
PAGE = 64
#: After which a part, a minute where kernels are compiled, is given up: a kernel that does not end takes the process along.
SECONDS = 90


class Product:
    """Weights of some layers, and the activations of one, of one product."""

    def __init__(self, maker: Maker, name: str, rows: int, layers: int) -> None:
        self.n, self.inner, self.swiglu = SIZES[name]
        self.weights = [maker.matrix(2 * self.n if self.swiglu else self.n, self.inner) for _ in range(layers)]
        self.norm = maker.normal(self.inner, std=0.1, mean=1.0)
        self.x, self.y = maker.normal(rows, self.inner), maker.normal(rows, self.n)
        self.both, self.h = maker.normal(rows, 2 * self.n), torch.empty_like(self.x)
        self.pending = torch.zeros_like(self.x)  # what a norm adds to x, which stays as it is

    def cuts(self) -> dict[str, Cut]:
        """All whose clusters fall into the rows evenly, by name."""
        tiles = -(-len(self.x) // ROWS)
        cuts = (Cut(height, cluster) for height in HEIGHTS[self.swiglu] for cluster in (1, 2, 4) if tiles % cluster == 0)
        return {f"{cut.height}x{cut.cluster}": cut for cut in cuts}

    def chosen(self) -> str:
        cut = cut_for(len(self.x), self.n, self.swiglu, processors(self.x.device.index or 0))
        return f"{cut.height}x{cut.cluster}"

    def ours(self, cut: Cut, norms: bool = True, pdl: bool = True) -> None:
        for weight in self.weights:
            x = add_norm(self.x, self.pending, self.norm, EPS, self.h, early=pdl) if norms else self.x
            product(x, weight, self.y, swiglu=self.swiglu, cut=cut, pdl=pdl)

    def cublas(self, around: bool = True) -> None:
        for weight in self.weights:
            x = add_norm(self.x, self.pending, self.norm, EPS, self.h) if around else self.x
            torch.mm(x, weight.t(), out=self.both if self.swiglu else self.y)
            if self.swiglu and around:
                swiglu(self.both, self.y)

    def twin(self, dtype: torch.dtype) -> Tensor:
        y = functional.linear(self.x.to(dtype), self.weights[0].to(dtype))
        return layers.swiglu(y) if self.swiglu else y


def check(bench: Bench, rows: int) -> None:
    for name in SIZES:
        given = Product(Maker(str(bench.device), torch.bfloat16, seed=len(name)), name, rows, 1)
        exact = given.twin(torch.float64)
        allowed = float((given.twin(torch.bfloat16) - exact).norm())
        found = {label: [given.y.clone(), given.y.clone()] for label in given.cuts()}
        for label, cut in given.cuts().items():
            for y in found[label]:
                product(given.x, given.weights[0], y, swiglu=given.swiglu, cut=cut)
        worst = max(float((y - exact).norm()) / allowed for pair in found.values() for y in pair)
        first = found[given.chosen()][0]
        same = all(torch.equal(y, first) for pair in found.values() for y in pair)
        bench.add({"part": "check", "rows": rows, "product": name, "error": worst, "same": same})
        if not (worst < 1.5 and same):
            raise RuntimeError(f"{name} is wrong: {worst:.2f} times cuBLAS's error, launches and cuts agree: {same}.")


def products(bench: Bench, rows: int) -> None:
    for name in SIZES:
        given = Product(Maker(str(bench.device), torch.bfloat16), name, rows, LAYERS)
        chosen, cuts = given.chosen(), given.cuts()
        found = {label: graph_us(partial(given.ours, cut), LAYERS, 9) for label, cut in cuts.items()}
        row = {
            "cublas": graph_us(given.cublas, LAYERS, 9), "ours": found[chosen],
            "ours_not_early": graph_us(partial(given.ours, cuts[chosen], pdl=False), LAYERS, 9),
            "cublas_alone": graph_us(partial(given.cublas, around=False), LAYERS, 9),
            "ours_alone": graph_us(partial(given.ours, cuts[chosen], norms=False, pdl=False), LAYERS, 9),
        }  # fmt: skip
        bench.add({"part": "products", "rows": rows, "product": name, **row, "chosen": chosen, "cuts": found})
        print("   ", "  ".join(f"{label} {us:.2f}" for label, us in found.items()), flush=True)


def pages_for(rows: int, context: int) -> int:
    """Enough for the state of so many slots whose contexts are half as long to half as much again."""
    return rows * -(-(context * 3 // 2 + 64) // PAGE) + 1


def frame(bench: Bench, rows: int) -> None:
    for context in CONTEXTS:
        bench.add({"part": "frame", "rows": rows, "context": context, **frame_ms(bench, rows, context)})
        bench.clean()


def frame_ms(bench: Bench, rows: int, context: int) -> dict[str, float]:
    """Whole frames by plan, contexts from half to one and a half of `context`."""
    maker, plan = Maker(str(bench.device), torch.bfloat16), plan_for(rows)
    weights, contexts = maker.frame(SMALL), maker.integers(context // 2, context * 3 // 2, rows)
    pages, slots = pages_for(rows, context), torch.arange(rows, device=bench.device)
    state, (k, v) = maker.state(SMALL, rows, pages, PAGE, contexts), maker.caches(SMALL, pages, PAGE)
    codes = torch.zeros(rows, SMALL.codebooks, dtype=torch.int64, device=bench.device)
    flags = torch.zeros(rows, dtype=torch.uint8, device=bench.device)
    found: dict[str, float] = {}
    for name, wide in (("without", ()), ("gate_up", ("gate_up",)), ("both", ("gate_up", "qkv"))):
        runner = FusedFrame(weights, state, k, v, rows, replace(plan, wide=wide))

        def again(runner: FusedFrame = runner) -> None:
            state.positions[:rows] = contexts
            runner.run(slots, codes, flags)

        found[name] = graph_us(again, 1, 11) / 1000
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rows", type=numbers, default=[128, 256, 512, 1024])
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

"""Times the products of 17 to 64 rows in CUDA C++ (`kernels/lm_products.py`) beside cuBLAS and the skinny
ones, and frames with them.

    python -m benchmarks.products_gpu [--rows 32,64] [--parts check,products,frame]

`check` compares every product with float64 (`error`: its error over cuBLAS's) and launches it twice;
`products` times chains of launches over the weights of 28 layers, us a launch, by cut (splits_stages);
`frame` whole frames at context 300, ms, without and with the products. Random weights of the 0.6B sizes.
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
from benchmarks.lm_gpu import frame_us
from benchmarks.random_models.frames import SMALL, Maker
from kernels import lm_cuda
from kernels.layers import swiglu
from kernels.lm_frame import plan_for
from kernels.lm_products import PLAIN, RESIDUAL, SWIGLU, Cut, cut_for, product, room_for
from kernels.lm_triton import swiglu as swiglu_launch

LAYERS = 28
#: Outputs, inner size and epilogue.
SIZES = {
    "qkv": (4096, 1024, PLAIN), "o": (1024, 2048, RESIDUAL), "gate_up": (3072, 1024, SWIGLU), "down": (1024, 3072, RESIDUAL),
    "head": (2048, 1024, PLAIN),
}  # fmt: skip
#: After which a part, of a few seconds on a GPU, is given up: a kernel that does not end takes the process
#: along.
SECONDS = 40


class Product:
    """Weights of some layers, and the activations of one, of one product."""

    def __init__(self, maker: Maker, name: str, rows: int, layers: int) -> None:
        self.n, self.inner, self.epilogue = SIZES[name]
        self.weights = [
            maker.matrix(2 * self.n if self.epilogue == SWIGLU else self.n, self.inner) for _ in range(layers)
        ]
        self.norm = maker.normal(self.inner, std=0.1, mean=1.0)
        self.x, self.y = maker.normal(rows, self.inner), maker.normal(rows, self.n)
        self.both = maker.normal(rows, 2 * self.n)

    def cuts(self) -> set[Cut]:
        """The one in force, and others around it."""
        rows, weight_rows = len(self.x), len(self.weights[0])
        others = [Cut(splits, stages) for splits in (1, 2, 4, 8) for stages in (3, 4, 8)]
        fitting = {cut for cut in others if cut.fault(room_for(rows), weight_rows, self.inner) is None}
        return fitting | {cut_for(rows, weight_rows, self.inner)}

    def launch(self, weight: Tensor, y: Tensor, cut: Cut) -> Tensor:
        return product(
            self.x, weight, y, cut, epilogue=self.epilogue, extra=y if self.epilogue == RESIDUAL else None
        )

    def twin(self, dtype: torch.dtype) -> Tensor:
        y = functional.linear(self.x.to(dtype), self.weights[0].to(dtype))
        if self.epilogue == SWIGLU:
            return swiglu(y)
        return y + self.y.to(dtype) if self.epilogue == RESIDUAL else y

    def ours(self, cut: Cut) -> None:
        for weight in self.weights:
            self.launch(weight, self.y, cut)

    def cublas(self) -> None:
        for weight in self.weights:
            torch.mm(self.x, weight.t(), out=self.both if self.epilogue == SWIGLU else self.y)
            if self.epilogue == SWIGLU:
                swiglu_launch(self.both, self.y)

    def skinny(self) -> None:
        added = self.epilogue == RESIDUAL
        for index, weight in enumerate(self.weights):
            options = {
                "epilogue": self.epilogue,
                "extra": self.y if added else None,
                "norm": None if added else self.norm,
            }
            ahead = self.weights[(index + 2) % len(self.weights)]
            lm_cuda.skinny(self.x, weight, self.y, eps=1e-6, ahead=ahead, late=not added, **options)  # type: ignore[arg-type]


def check(bench: Bench, rows: int) -> None:
    for name in SIZES:
        given = Product(Maker(str(bench.device), torch.bfloat16, seed=len(name)), name, rows, 1)
        exact = given.twin(torch.float64)
        allowed = float((given.twin(torch.bfloat16) - exact).norm())
        worst, same = 0.0, True
        for cut in given.cuts():
            found, again = (given.launch(given.weights[0], given.y.clone(), cut) for _ in range(2))
            worst, same = (
                max(worst, float((found - exact).norm()) / allowed),
                same and torch.equal(found, again),
            )
        bench.add({"part": "check", "rows": rows, "product": name, "error": worst, "same": same})
        if not (worst < 1.5 and same):
            raise RuntimeError(f"{name} is wrong: {worst:.2f} times cuBLAS's error, launches agree: {same}.")


def products(bench: Bench, rows: int) -> None:
    for name in SIZES:
        given = Product(Maker(str(bench.device), torch.bfloat16), name, rows, LAYERS)
        skinny = {"skinny": graph_us(given.skinny, LAYERS, 7)}
        found = {
            f"{cut.splits}_{cut.stages}": graph_us(partial(given.ours, cut), LAYERS, 7)
            for cut in given.cuts()
        }
        chosen = cut_for(rows, len(given.weights[0]), given.inner)
        row = {
            "part": "products",
            "rows": rows,
            "product": name,
            "cublas": graph_us(given.cublas, LAYERS, 7),
            **skinny,
        }
        bench.add({**row, "in_force": found[f"{chosen.splits}_{chosen.stages}"], "cuts": found})


def frame(bench: Bench, rows: int) -> None:
    plan = plan_for(rows)
    plans = {"without": replace(plan, products=False), "with": replace(plan, products=True)}
    found = frame_us(SMALL, Maker(str(bench.device), torch.bfloat16), rows, plans)
    bench.add({"part": "frame", "rows": rows, **{name: us / 1000 for name, us in found.items()}})


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rows", type=numbers, default=[32, 64])
    made.add_argument("--parts", default="check,products,frame")
    options = made.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = Bench("products_gpu", options)
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

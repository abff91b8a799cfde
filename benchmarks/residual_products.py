"""Times residual products of many rows in CUDA C++ (`kernels/lm_products.py`) beside cuBLAS's and the
norms behind those, and frames.

    python -m benchmarks.residual_products [--rows 128,256,384] [--parts check,products,frame]

`check` compares them with float64 (`error`: the worst one over cuBLAS's), launches each cut twice, and a
chain of them early. `products` times chains of launches over the weights of 28 layers, us of each:
`cublas` with the norm behind it, `cublas_alone` without; `split_4` and `split_8` with the norm behind,
which starts early, and `alone` without. `cut`: a frame's, or none, where it has cuBLAS's; `needed`:
clusters of a cut, `room_4` and `room_8`: those that the GPU holds at once. `frame`: whole frames, ms, at a
context of 300, without and with them. Random weights of the 0.6B and the 1.7B sizes.
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

from benchmarks.gpu import Bench, captured, graph_us, numbers, parser
from benchmarks.random_models.frames import Maker
from benchmarks.wide_products import SHAPES, frame_ms
from kernels.lm_frame import plan_for
from kernels.lm_products import (
    RESIDUAL_OUTPUTS,
    ROWS,
    SPLITS,
    add_product,
    clusters_of,
    residual_fault,
    splits_for,
)
from kernels.lm_triton import add_norm

LAYERS, EPS, CONTEXT = 28, 1e-6, 300
#: Outputs and inner size.
SIZES = {"O 0.6B": (1024, 2048), "down 0.6B": (1024, 3072), "O 1.7B": (2048, 2048), "down 1.7B": (2048, 6144)}
#: After which a part, a minute where kernels are compiled, is given up: a kernel that does not end takes the
#: process along.
SECONDS = 90
COLUMNS = (
    "cublas",
    "cublas_alone",
    *(f"split_{splits}{alone}" for splits in SPLITS for alone in ("", "_alone")),
)


class Product:
    """One product of some layers, its activations, and what it is added to."""

    def __init__(self, maker: Maker, rows: int, n: int, inner: int, layers: int) -> None:
        self.weights = [maker.matrix(n, inner) for _ in range(layers)]
        self.norm = maker.normal(n, std=0.1, mean=1.0)
        self.x, self.a = maker.normal(rows, n), maker.normal(rows, inner)
        self.pending, self.h = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def cublas(self, around: bool = True) -> None:
        for weight in self.weights:
            torch.mm(self.a, weight.t(), out=self.pending)
            if around:
                add_norm(self.x, self.pending, self.norm, EPS, self.h)

    def ours(self, splits: int, around: bool = True, pdl: bool = True) -> None:
        for weight in self.weights:
            add_product(self.x, self.a, weight, splits, pdl=pdl)
            if around:
                add_norm(self.x, None, self.norm, EPS, self.h, pdl=pdl)

    def twin(self, dtype: torch.dtype) -> Tensor:
        return self.x.to(dtype) + functional.linear(self.a.to(dtype), self.weights[0].to(dtype))


def made(bench: Bench, rows: int, sizes: tuple[int, int], layers: int) -> Product:
    return Product(Maker(str(bench.device), torch.bfloat16, seed=rows), rows, *sizes, layers)


def cuts(sizes: tuple[int, int]) -> list[int]:
    return [splits for splits in SPLITS if residual_fault(*sizes, splits) is None]


def check(bench: Bench, rows: int) -> None:
    """Also of a few rows less, which fill no tile."""
    for name, sizes in SIZES.items():
        for some in (rows, rows - 55):
            given = made(bench, some, sizes, 3)
            exact, start = given.twin(torch.float64), given.x.clone()
            allowed = float((given.twin(torch.bfloat16) - exact).norm())
            for splits in cuts(sizes):
                found = [add_product(start.clone(), given.a, given.weights[0], splits) for _ in range(2)]
                worst = max(float((x - exact).norm()) / allowed for x in found)
                same, early = torch.equal(*found), starts_early(given, start, splits)
                row = {
                    "rows": some,
                    "product": name,
                    "splits": splits,
                    "error": worst,
                    "same": same,
                    "early": early,
                }
                bench.add({"part": "check", **row})
                if not (worst < 1.5 and same and early):
                    raise RuntimeError(f"{name} in {splits} parts is wrong at {some} rows: {row}")


def starts_early(given: Product, start: Tensor, splits: int) -> bool:
    """Whether launches that may start early in a graph have the bits of those that may not."""
    given.x.copy_(start)
    given.ours(splits, pdl=False)
    wanted = given.x.clone(), given.h.clone()
    graph = captured(partial(given.ours, splits))
    for _ in range(3):
        given.x.copy_(start)
        given.h.fill_(float("nan"))
        graph.replay()
        if not (torch.equal(given.x, wanted[0]) and torch.equal(given.h, wanted[1])):
            return False
    given.x.copy_(start)
    return True


def products(bench: Bench, rows: int) -> None:
    clusters = clusters_of(bench.device.index or 0)
    for name, sizes in SIZES.items():
        given = made(bench, rows, sizes, LAYERS)
        times = {}
        for suffix, around in (("", True), ("_alone", False)):
            times[f"cublas{suffix}"] = graph_us(partial(given.cublas, around=around), LAYERS, 9)
            for splits in cuts(sizes):
                times[f"split_{splits}{suffix}"] = graph_us(
                    partial(given.ours, splits, around=around), LAYERS, 9
                )
        room = {f"room_{splits}": count for splits, count in clusters.items()}
        about = {
            "cut": splits_for(rows, *sizes, clusters),
            "needed": -(-rows // ROWS) * sizes[0] // RESIDUAL_OUTPUTS,
            **room,
        }
        bench.add({"part": "products", "rows": rows, "product": name, **about, **times})


def frame(bench: Bench, rows: int) -> None:
    for name, shape in SHAPES.items():
        plan = plan_for(rows, shape.hidden)
        plans = {
            "without": replace(plan, residual_products=False),
            "with": replace(plan, residual_products=True),
        }
        bench.add(
            {
                "part": "frame",
                "rows": rows,
                "sizes": name,
                "context": CONTEXT,
                **frame_ms(bench, shape, rows, CONTEXT, plans),
            }
        )
        bench.clean()


def table(rows: list[dict]) -> str:
    """Of the products alone."""
    lines = [
        f"{'rows':>5} {'product':9} {'cut':>4} {'needed':>6}" + "".join(f"{name:>14}" for name in COLUMNS)
    ]
    for row in rows:
        if row["part"] == "products":
            cells = "".join(f"{row[name]:14.2f}" if name in row else " " * 14 for name in COLUMNS)
            lines.append(
                f"{row['rows']:5} {row['product']:9} {row['cut'] or '-':>4} {row['needed']:6}{cells}"
            )
    return "\n".join(lines)


def main() -> int:
    wanted = parser(__doc__)
    wanted.add_argument("--rows", type=numbers, default=[128, 256, 384])
    wanted.add_argument("--parts", default="check,products,frame")
    options = wanted.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = Bench("residual_products", options)
    parts: dict[str, Callable[[Bench, int], None]] = {"check": check, "products": products, "frame": frame}
    for part in options.parts.split(","):
        for rows in options.rows:
            signal.alarm(SECONDS)
            bench.attempt(f"{part} {rows}", partial(parts[part], bench, rows))
            signal.alarm(0)
    print(table(bench.rows))
    return bench.end()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

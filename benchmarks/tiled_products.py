"""Times Triton's products of many rows with what is fused into them (`Plan.tiles`) beside cuBLAS's and the launches around those.

    python -m benchmarks.tiled_products [--rows 512,1024] [--parts products,frame]

`products`: us a launch over the weights of 28 layers, cuBLAS's with the norm ahead and the SwiGLU behind it, and Triton's by tiles (rows x
columns x depth, warps, stages); `error` is the worst one over plain bfloat16's. `frame`: whole frames at context 300, ms, without and with
the fastest tiles, which "o" and "down" share, and with the predictor's attention in rounds too. Random weights of the 0.6B sizes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import Bench, graph_us, numbers, parser
from benchmarks.lm_gpu import frame_us
from kernels.compile_together import compiled_together
from kernels.dummy import SMALL, Maker
from kernels.layers import rms_norm
from kernels.layers import swiglu as swiglu_twin
from kernels.lm_frame import plan_for
from kernels.lm_products import Norm
from kernels.lm_triton import PLAIN, RESIDUAL, SWIGLU, Tiles, add_norm, product, swiglu

LAYERS, EPS = 28, 1e-6
#: Outputs, inner size, epilogue.
SIZES = {
    "qkv": (4096, 1024, PLAIN), "o": (1024, 2048, RESIDUAL), "gate_up": (3072, 1024, SWIGLU), "down": (1024, 3072, RESIDUAL),
    "head": (2048, 1024, PLAIN),
}  # fmt: skip
#: Those that the compiler gives no spills (tests/parity/test_kernels_compile.py).
TILES = {
    PLAIN: [Tiles(128, 128, 64, 8, 3), Tiles(128, 128, 64, 8, 4), Tiles(64, 256, 64, 4, 3), Tiles(128, 64, 64, 4, 3)],
    RESIDUAL: [Tiles(128, 64, 64, 8, 4), Tiles(64, 64, 64, 4, 4), Tiles(64, 64, 128, 4, 3), Tiles(64, 128, 64, 8, 4)],
    SWIGLU: [Tiles(128, 64, 64, 8, 3), Tiles(128, 128, 64, 8, 3), Tiles(128, 64, 64, 4, 3), Tiles(64, 64, 64, 4, 4)],
}


def candidates(epilogue: int) -> list[Tiles]:
    """By the tensor memory accelerator, and the first without it."""
    return [*(replace(tiles, tma=True) for tiles in TILES[epilogue]), TILES[epilogue][0]]


def label(tiles: Tiles) -> str:
    """As in the rows of this benchmark."""
    return f"{tiles.m}x{tiles.n}x{tiles.k} {tiles.warps}w {tiles.stages}s{'' if tiles.tma else ' no tma'}"


class Product:
    """One product of `rows` rows in all layers, as it stands in a frame: QKV, gate and up behind a norm, O and down ahead of one."""

    def __init__(self, maker: Maker, name: str, rows: int) -> None:
        self.n, self.inner, self.epilogue = SIZES[name]
        self.normed = name in ("qkv", "gate_up")
        self.weights = [maker.matrix(2 * self.n if self.epilogue == SWIGLU else self.n, self.inner) for _ in range(LAYERS)]
        self.x, self.extra, self.y = maker.normal(rows, self.inner), maker.normal(rows, self.n), maker.normal(rows, self.n)
        self.norm, self.next_norm = (maker.normal(width, std=0.1, mean=1.0) for width in (self.inner, self.n))
        self.both, self.h = maker.normal(rows, 2 * self.n), torch.empty_like(self.x)
        self.pending = torch.zeros_like(self.x)  # what a norm adds to x, which stays as it is
        squares = self.x.float().square().unflatten(1, (-1, 64)).sum(-1)
        self.ahead = Norm((self.x.float() * self.norm.float()).to(self.x.dtype), squares, EPS)

    def into(self, tiles: Tiles) -> Norm:
        """What a norm behind this product reads."""
        return Norm(torch.empty_like(self.y), torch.empty((len(self.y), -(-self.n // tiles.n)), device=self.y.device), EPS)

    def tiled(self, weight: Tensor, tiles: Tiles, into: Norm) -> Tensor:
        """One launch into y."""
        added = {"extra": self.extra, "norm": self.next_norm, "into": into} if self.epilogue == RESIDUAL else {}
        return product(self.ahead if self.normed else self.x, weight, self.y, tiles, self.epilogue, pdl=True, **added)

    def all_tiled(self, tiles: Tiles, into: Norm) -> None:
        for weight in self.weights:
            self.tiled(weight, tiles, into)

    def cublas(self) -> None:
        for weight in self.weights:
            x = add_norm(self.x, self.pending, self.norm, EPS, self.h) if self.normed else self.x
            torch.mm(x, weight.t(), out=self.both if self.epilogue == SWIGLU else self.y)
            if self.epilogue == SWIGLU:
                swiglu(self.both, self.y)

    def twin(self, dtype: torch.dtype) -> Tensor:
        x, weight, norm = (t.to(dtype) for t in (self.x, self.weights[0], self.norm))
        y = (rms_norm(x, norm, EPS) if self.normed else x) @ weight.t()
        if self.epilogue == SWIGLU:
            return swiglu_twin(y)
        return y + self.extra.to(dtype) if self.epilogue == RESIDUAL else y


def products(bench: Bench, best: dict[int, dict[str, Tiles]], rows: int) -> None:
    chosen: dict[str, dict[str, float]] = {}
    for name, (_, _, epilogue) in SIZES.items():
        given = Product(Maker(str(bench.device), torch.bfloat16), name, rows)
        tried = {label(tiles): (tiles, given.into(tiles)) for tiles in candidates(epilogue)}
        with compiled_together():
            for tiles, into in tried.values():
                given.tiled(given.weights[0], tiles, into)
        exact = given.twin(torch.float32)
        plain = float((given.twin(torch.bfloat16) - exact).norm())
        errors = {key: float((given.tiled(given.weights[0], *how) - exact).norm()) / plain for key, how in tried.items()}
        times = {key: graph_us(partial(given.all_tiled, *how), LAYERS, 9) for key, how in tried.items() if errors[key] < 1.5}
        bench.add(
            {
                "part": "products",
                "rows": rows,
                "product": name,
                "cublas": graph_us(given.cublas, LAYERS, 9),
                "error": max(errors.values()),
                **times,
            }
        )
        chosen[name] = times
    by_label = {label(tiles): tiles for epilogue in TILES for tiles in candidates(epilogue)}
    best[rows] = {name: by_label[min(times, key=lambda key: times[key])] for name, times in chosen.items()}
    # What "o" and "down" write to `squares` has the same parts.
    shared = min(chosen["o"], key=lambda key: chosen["o"][key] + chosen["down"].get(key, torch.inf))
    best[rows] |= dict.fromkeys(("o", "down"), by_label[shared])


def frame(bench: Bench, best: dict[int, dict[str, Tiles]], rows: int) -> None:
    tiles = best.get(rows) or {name: candidates(epilogue)[0] for name, (_, _, epilogue) in SIZES.items()}
    plan = plan_for(rows)
    plans = {"without": plan, "with": replace(plan, tiles=tiles), "with_rounds": replace(plan, tiles=tiles, attention_rounds=0)}
    found = frame_us(SMALL, Maker(str(bench.device), torch.bfloat16), rows, plans)
    named = {name: label(each) for name, each in tiles.items()}
    bench.add({"part": "frame", "rows": rows, **{name: us / 1000 for name, us in found.items()}, "tiles": named})


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rows", type=numbers, default=[512, 1024])
    made.add_argument("--parts", default="products,frame")
    options = made.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = Bench("tiled_products", options)
    best: dict[int, dict[str, Tiles]] = {}
    parts = {"products": products, "frame": frame}
    for part in options.parts.split(","):
        for rows in options.rows:
            bench.attempt(f"{part} {rows}", partial(parts[part], bench, best, rows))
    return bench.end()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

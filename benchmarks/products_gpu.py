"""Times the products of 17 to 128 rows in CUDA C++ (`kernels/lm_products.py`) beside cuBLAS and the skinny ones, and frames with them.

    python -m benchmarks.products_gpu [--rows 32,64,128] [--parts check,norms,cuts,layer,frame]

For each number of rows, in a process of its own: `check` compares every product with float64 (`error`: its error over cuBLAS's) and
launches it twice, `norms` one that norms its rows; `cuts` times each cut in a chain of launches over the weights of 28 layers, us a launch;
`layer` a layer without its attention, us; `frame` whole frames at context 300, ms, with today's plan and with the products as `cut_for`
cuts them and as `cuts` found best. Random weights of the 0.6B sizes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from itertools import product as product_of
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import Bench, graph_us, numbers, parser
from benchmarks.lm_gpu import frame_us
from kernels import lm_cuda
from kernels.dummy import SMALL, Maker
from kernels.layers import rms_norm, swiglu
from kernels.lm_frame import Plan, plan_for
from kernels.lm_products import PIECE, PLAIN, RESIDUAL, SWIGLU, Cut, Products, cut_for, product, room_for
from kernels.lm_triton import add_norm
from kernels.lm_triton import swiglu as swiglu_launch

LAYERS = 28
#: Outputs, inner size and epilogue of a layer's products, and of the heads.
SIZES = {"qkv": (4096, 1024, PLAIN), "o": (1024, 2048, RESIDUAL), "gate_up": (3072, 1024, SWIGLU), "down": (1024, 3072, RESIDUAL)}
CHECKED = {**SIZES, "head": (2048, 1024, PLAIN), "first head": (3072, 1024, PLAIN), "1.7b down": (2048, 6144, RESIDUAL)}
#: Cuts of which a product has this many blocks are timed.
BLOCKS = range(64, 257)
STAGES = {32: (4, 8), 64: (3, 6), 128: (2, 3, 4)}
#: After which a part, of a few seconds on a GPU, is given up.
SECONDS = 40


class Layer:
    """Weights of as many layers as there are, and the activations of one, of one product."""

    def __init__(self, maker: Maker, name: str, rows: int, layers: int) -> None:
        self.n, self.inner, self.epilogue = CHECKED[name]
        self.weights = [maker.matrix(2 * self.n if self.epilogue == SWIGLU else self.n, self.inner) for _ in range(layers)]
        self.norm = maker.normal(self.inner, std=0.1, mean=1.0)
        self.x, self.y = maker.normal(rows, self.inner), maker.normal(rows, self.n)
        self.both = maker.normal(rows, 2 * self.n)

    def made(self, cut: Cut, extra: Tensor) -> Tensor:
        y = extra.clone() if self.epilogue == RESIDUAL else torch.full_like(extra, float("nan"))
        return product(self.x, self.weights[0], y, cut, epilogue=self.epilogue, extra=y if self.epilogue == RESIDUAL else None, pdl=False)

    def twin(self, extra: Tensor, dtype: torch.dtype) -> Tensor:
        y = functional.linear(self.x.to(dtype), self.weights[0].to(dtype))
        if self.epilogue == SWIGLU:
            return swiglu(y)
        return y + extra.to(dtype) if self.epilogue == RESIDUAL else y

    def launch_all(self, cut: Cut) -> None:
        extra = self.y if self.epilogue == RESIDUAL else None
        for weight in self.weights:
            product(self.x, weight, self.y, cut, epilogue=self.epilogue, extra=extra)

    def cublas(self) -> None:
        for weight in self.weights:
            torch.mm(self.x, weight.t(), out=self.both if self.epilogue == SWIGLU else self.y)
            if self.epilogue == SWIGLU:
                swiglu_launch(self.both, self.y)

    def skinny(self) -> None:
        shape = {"epilogue": self.epilogue, "extra": self.y if self.epilogue == RESIDUAL else None, "late": self.epilogue != RESIDUAL}
        normed = self.epilogue == SWIGLU or self.n == SIZES["qkv"][0]
        for index, weight in enumerate(self.weights):
            ahead = self.weights[(index + 2) % len(self.weights)]
            lm_cuda.skinny(self.x, weight, self.y, norm=self.norm if normed else None, eps=1e-6, ahead=ahead, **shape)  # type: ignore[arg-type]


def cuts_of(rows: int, weight_rows: int, inner: int) -> Iterator[Cut]:
    """All that are worth a measurement."""
    room = room_for(rows)
    for groups in (1, 2):
        for splits in (1, 2, 4, 8):
            tiles, pieces = weight_rows // (PIECE * groups), inner // (splits * PIECE)
            for stages, boxed in product_of(STAGES[room], (False, True)):
                cut = Cut(groups, splits, stages, boxed)
                if cut.fault(room, weight_rows, inner) is None and tiles * splits in BLOCKS and stages <= max(2, pieces):
                    yield cut


def check(bench: Bench, rows: int) -> None:
    """Every product as `cut_for` cuts it, and the cuts that are timed; also for a few rows less."""
    for name, (n, inner, epilogue) in CHECKED.items():
        worst, same, wrong = 0.0, True, []
        weight_rows = 2 * n if epilogue == SWIGLU else n
        maker = Maker(str(bench.device), torch.bfloat16, seed=len(name))
        for fewer in (0, 5):
            layer = Layer(maker, name, rows - fewer, 1)
            extra = maker.normal(rows - fewer, n)
            exact = layer.twin(extra, torch.float64)
            allowed = float((layer.twin(extra, torch.bfloat16) - exact).norm())
            for cut in {cut_for(rows, weight_rows, inner), *cuts_of(rows, weight_rows, inner)}:
                found, again = layer.made(cut, extra), layer.made(cut, extra)
                error = float((found - exact).norm()) / allowed
                same &= torch.equal(found, again)
                worst = max(worst, error)
                if not error < 1.5:
                    wrong.append(astuple(cut))
        bench.add({"part": "check", "rows": rows, "product": name, "error": worst, "same": same, "wrong": wrong})
        if wrong or not same:
            raise RuntimeError(f"{name} is wrong: {worst:.2f} times cuBLAS's error, launches agree: {same}, cuts {wrong}.")


def check_norms(bench: Bench, rows: int) -> None:
    """A residual product that writes the squares of its rows, and a product of their norm."""
    maker = Maker(str(bench.device), torch.bfloat16, seed=7)
    o, qkv = Layer(maker, "o", rows, 1), Layer(maker, "qkv", rows, 1)
    found: list[tuple[Tensor, Tensor]] = []
    before = o.y.clone()
    for _ in range(3):
        x, y, squares = before.clone(), torch.full_like(qkv.y, float("nan")), o.x.new_full((rows, 16), float("nan"), dtype=torch.float32)
        product(o.x, o.weights[0], x, cut_for(rows, 1024, 2048), epilogue=RESIDUAL, extra=x, sums=squares)
        cut = cut_for(rows, 4096, 1024, normed=True)
        found.append((x, product(x, qkv.weights[0], y, cut, norm=qkv.norm, eps=1e-6, squares=squares)))
    x, y = found[0]
    wide = x.double()
    exact = qkv.norm.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) @ qkv.weights[0].double().T
    plain = functional.linear(rms_norm(x, qkv.norm, 1e-6), qkv.weights[0])
    error = float((y - exact).norm() / (plain - exact).norm())
    same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
    bench.add({"part": "check", "rows": rows, "product": "norm, qkv", "error": error, "same": same})
    if not (error < 1.5 and same):
        raise RuntimeError(f"A product with a norm is wrong: {error:.2f} times the twin's error, launches agree: {same}.")


def cuts(bench: Bench, rows: int, best: dict[str, Cut]) -> None:
    """us of a launch: cuBLAS (with SwiGLU's), skinny (with its norm), and each cut; the fastest goes into `best`."""
    for name, (_, inner, _) in SIZES.items():
        layer = Layer(Maker(str(bench.device), torch.bfloat16), name, rows, LAYERS)
        weight_rows = len(layer.weights[0])
        row: dict[str, Any] = {"part": "cuts", "rows": rows, "product": name, "cublas": graph_us(layer.cublas, LAYERS, 7)}
        if rows <= 64:
            row["skinny"] = graph_us(layer.skinny, LAYERS, 7)
        standard = cut_for(rows, weight_rows, inner)
        found = {cut: graph_us(partial(layer.launch_all, cut), LAYERS, 7) for cut in {standard, *cuts_of(rows, weight_rows, inner)}}
        best[name] = min(found, key=lambda cut: found[cut])
        ordered = sorted(found.items(), key=lambda item: item[1])
        row |= {"standard": found[standard], "best": found[best[name]], "cut": astuple(best[name])}
        bench.add({**row, "all": {"_".join(map(str, astuple(cut))): us for cut, us in ordered}})


def layers(bench: Bench, rows: int, best: dict[str, Cut]) -> None:
    """us of a layer's two norms and four products in their order, without attention, over the weights of 28 layers."""
    made = {name: Layer(Maker(str(bench.device), torch.bfloat16), name, rows, LAYERS) for name in SIZES}
    qkv, o, gate_up, down = made.values()
    squares = torch.ones(rows, o.n // PIECE, device=bench.device)

    def chain(products: Products | None) -> None:
        for index in range(LAYERS):
            for name, layer, norm in (("qkv", qkv, True), ("o", o, False), ("gate_up", gate_up, True), ("down", down, False)):
                weight, y = layer.weights[index], o.y if layer.epilogue == RESIDUAL else layer.y
                fused = products is not None and products.norms
                if norm and not fused:
                    add_norm(o.y, None, layer.norm, 1e-6, layer.x, pdl=products is not None)
                if products is None:
                    torch.mm(layer.x, weight.t(), out=layer.both if layer.epilogue == SWIGLU else y)
                    if layer.epilogue == SWIGLU:
                        swiglu_launch(layer.both, y)
                    continue
                following = list(made.values())[(list(made).index(name) + products.ahead) % 4]
                ahead = following.weights[index] if products.ahead else None
                shape: dict[str, Any] = {"epilogue": layer.epilogue, "ahead": ahead}
                shape["extra"] = y if layer.epilogue == RESIDUAL else None
                if fused:
                    shape |= {"norm": layer.norm, "eps": 1e-6, "squares": squares} if norm else {"sums": squares}
                product(
                    o.y if fused and norm else layer.x, weight, y, products.cut(name, rows, *weight.shape, normed=fused and norm), **shape
                )

    found = {name: graph_us(partial(chain, variant), LAYERS, 7) for name, variant in {"cublas": None, **variants(rows, best)}.items()}
    bench.add({"part": "layer", "rows": rows, **found})


def variants(rows: int, best: dict[str, Cut]) -> dict[str, Products]:
    """Products by name, with the cuts that were found where there are any."""
    sizes = {**SIZES, "head": CHECKED["head"]}
    boxed = {name: replace(cut_for(rows, (2 if e == SWIGLU else 1) * n, inner), boxed=True) for name, (n, inner, e) in sizes.items()}
    found = {"standard": Products(), "boxed": Products(boxed), "norms": Products(norms=True)}
    tuned = {**boxed, **best}
    return {**found, "best": Products(tuned), "best ahead": Products(tuned, ahead=2), "best norms": Products(tuned, norms=True)}


def plans_for(rows: int, best: dict[str, Cut]) -> dict[str, Plan]:
    return {"today": plan_for(rows)} | {name: Plan(skinny_rows=0, products=products) for name, products in variants(rows, best).items()}


def compile_kernels(bench: Bench, rows: int) -> None:
    """Makes the kernels that the parts launch."""
    shape = replace(SMALL, layers=1, predictor_layers=1)
    plans = plans_for(rows, {})
    frame_us(shape, Maker(str(bench.device), torch.bfloat16), rows, {name: plans[name] for name in ("today", "standard", "boxed")})


def frame(bench: Bench, rows: int, best: dict[str, Cut]) -> None:
    """ms of a frame."""
    found = frame_us(SMALL, Maker(str(bench.device), torch.bfloat16), rows, plans_for(rows, best))
    bench.add({"part": "frame", "rows": rows, **{name: us / 1000 for name, us in found.items()}})


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """All parts of one number of rows. Others of this benchmark wait meanwhile; a kernel that does not end takes the process along."""
    rows, best = options.rows[0], dict[str, Cut]()
    signal.alarm(2 * SECONDS)
    bench.attempt(f"compile {rows}", partial(compile_kernels, bench, rows))
    signal.alarm(0)
    known = {
        "check": partial(check, bench, rows),
        "norms": partial(check_norms, bench, rows),
        "cuts": partial(cuts, bench, rows, best),
        "layer": partial(layers, bench, rows, best),
        "frame": partial(frame, bench, rows, best),
    }
    with options.lock.open("w") as file:
        for part in (part for part in options.parts.split(",") if part in known):
            fcntl.flock(file, fcntl.LOCK_EX)
            signal.alarm(SECONDS)
            bench.attempt(f"{part} {rows}", known[part])
            signal.alarm(0)
            fcntl.flock(file, fcntl.LOCK_UN)


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Each number of rows in a process of its own, so that one that fails leaves the others alone."""
    found: dict[str, Any] = {"rows": [], "faults": {}}
    with tempfile.TemporaryDirectory() as folder:
        running: list[tuple[int, Path, subprocess.Popen[bytes]]] = []
        for rows in options.rows:
            path = Path(folder) / f"{rows}.json"
            command = [sys.executable, "-m", "benchmarks.products_gpu", "--rows", str(rows), "--parts", options.parts, "--json", str(path)]
            running.append((rows, path, subprocess.Popen([*command, "--lock", str(Path(folder) / "lock")])))
        for number, path, process in running:
            status = process.wait()
            part = json.loads(path.read_text()) if path.exists() else {"rows": [], "faults": {}}
            rows, faults = found["rows"] + part.pop("rows"), found["faults"] | part.pop("faults")
            if status < 0 or not path.exists():
                faults[str(number)] = f"its process ended with {status}"
            found |= {**part, "rows": rows, "faults": faults}
    return found


def summary(rows: list[dict[str, Any]]) -> None:
    for row in sorted(rows, key=lambda row: row["part"]):
        figures = ", ".join(f"{name} {value:.3f}" for name, value in row.items() if isinstance(value, float))
        print(f"{row['part']:6}{row['rows']:5} rows  {row.get('product', ''):10} {figures}  {row.get('cut', '')}")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rows", type=numbers, default=[32, 64, 128])
    made.add_argument("--parts", default="check,norms,cuts,layer,frame")
    made.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if options.lock:
        bench = Bench("products_gpu", options)
        measure(bench, options)
        return int(bool(bench.faults))
    path: Path = options.json or Path(os.environ.get("OUT", ".")) / "products_gpu.json"
    found = measure_all(options)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    summary(found["rows"])
    print(f"faults: {', '.join(found['faults']) or 'none'}")
    return int(bool(found["faults"]))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

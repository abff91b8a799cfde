"""Times what may make frames faster (0.6B sizes, random weights), each beside what is in force.

    python -m benchmarks.lm_rows [--rows 32,128,512,1024] [--context 108] [--parts attention,talker,frame]

`attention`: the predictor's at its 14 later positions, us a launch, and how many values of the kernel in rounds differ; `talker`: the
talker's attention, us, by splits, block, warps and stages; `frame`: whole frames, ms, by plan, and whether those with the kernels for many
rows draw the same codes.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import Bench, graph_us, numbers, parser
from benchmarks.roofline import DEVICES, device_named
from kernels import lm_cuda
from kernels.dummy import SMALL, Maker, Shape
from kernels.layers import rope_table
from kernels.lm_attention import SplitScratch, decode_attention
from kernels.lm_frame import FusedFrame, Plan, plan_for

PAGE, POSITIONS = 64, range(2, 16)
#: Splits of a row, positions of a block, warps, stages.
BLOCKS = [(splits, *each) for splits in (1, 2, 4) for each in ((64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 2, 3), (64, 2, 3), (128, 4, 2))]


def attention(bench: Bench, rows: int) -> None:
    layers, heads = SMALL.predictor_layers, SMALL.kv_heads
    maker = Maker(str(bench.device), torch.bfloat16)
    past = maker.normal(2, layers, rows, heads, 16, 128)
    qkv, out = maker.normal(rows, 4 * heads * 128), maker.normal(rows, 2 * heads * 128)
    norms = maker.normal(128, std=0.1, mean=1.0), maker.normal(128, std=0.1, mean=1.0)
    table = rope_table(16, 128, 1e6, torch.bfloat16, str(bench.device))

    def launch(cache: Tensor, position: int, rounds: bool) -> Tensor:
        return lm_cuda.predictor_attention(qkv, *norms, 1e-6, table, cache[0], cache[1], position, 128**-0.5, out, pdl=False, rounds=rounds)

    def frame(positions: list[int], rounds: bool) -> None:
        for position in positions:
            for layer in range(layers):
                launch(past[:, layer], position, rounds)

    differ = 0
    for position in range(1, 16):
        caches = past[:, 0].clone(), past[:, 0].clone()
        made = [launch(cache, position, rounds).clone() for cache, rounds in zip(caches, (False, True), strict=True)]
        differ += int((made[0] != made[1]).sum()) + int((caches[0] != caches[1]).sum())
    found: dict[str, float] = {}
    for name, rounds in (("in_force", False), ("rounds", True)):
        found[name] = graph_us(partial(frame, list(POSITIONS), rounds), len(POSITIONS) * layers, 7)
        found |= {f"{name}_at_{at}": graph_us(partial(frame, [at], rounds), layers, 7) for at in (2, 8, 15)}
    positions = sum(POSITIONS) / len(POSITIONS) + 1
    read = (device_named(torch.cuda.get_device_name()) or DEVICES[0]).bandwidth
    bench.add({"part": "attention", "rows": rows, "differ": differ, "floor": rows * heads * positions * 512 / read * 1e6, **found})


def pages_for(rows: int, context: int) -> int:
    """Enough for the state of so many slots whose contexts are half as long to half as much again."""
    return rows * -(-(context * 3 // 2 + 64) // PAGE) + 1


def talker(bench: Bench, rows: int, context: int) -> None:
    maker, shape = Maker(str(bench.device), torch.bfloat16), Shape(layers=8)
    pages, contexts = pages_for(rows, context), maker.integers(context // 2, context * 3 // 2, rows)
    state, (k, v) = maker.state(shape, rows, pages, PAGE, contexts), maker.caches(shape, pages, PAGE)
    qkv, out, slots = maker.normal(rows, 4096), maker.normal(rows, 2048), torch.arange(rows, device=bench.device)
    norm, table = maker.normal(128, std=0.1, mean=1.0), rope_table(4096, 128, 1e6, torch.bfloat16, str(bench.device))
    scratch = SplitScratch(rows * 8, 4, 2, 128, k.device)

    def attend(splits: int, block: int, warps: int, stages: int) -> None:
        for layer in range(shape.layers):
            decode_attention(
                qkv, norm, norm, 1e-6, table, k[layer], v[layer], state.page_table, state.positions, slots, 128**-0.5, out, scratch,
                splits, block, warps, stages,
            )  # fmt: skip

    found = {"_".join(str(part) for part in each): graph_us(partial(attend, *each), shape.layers, 7) for each in BLOCKS}
    read = (device_named(torch.cuda.get_device_name()) or DEVICES[0]).bandwidth
    bench.add({"part": "talker", "rows": rows, "floor": float(contexts.sum()) * 4096 / read * 1e6, **found})


def frame(bench: Bench, rows: int, context: int) -> None:
    maker, plan = Maker(str(bench.device), torch.bfloat16), plan_for(rows)
    weights, contexts = maker.frame(SMALL), maker.integers(context // 2, context * 3 // 2, rows)
    pages, slots = pages_for(rows, context), torch.arange(rows, device=bench.device)
    first, (k, v) = maker.state(SMALL, rows, pages, PAGE, contexts), maker.caches(SMALL, pages, PAGE)
    plans: dict[str, Plan] = {"in_force": plan, "few": replace(plan, many_rows=False), "many": replace(plan, many_rows=True)}
    plans |= {f"splits_{splits}": replace(plan, splits=((1 << 30, splits),)) for splits in (1, 2, 4)}
    found, made = dict[str, float](), dict[str, Tensor]()
    for name, each in plans.items():
        state, codes = deepcopy(first), torch.zeros(rows, SMALL.codebooks, dtype=torch.int64, device=bench.device)
        flags = torch.zeros(rows, dtype=torch.uint8, device=bench.device)
        runner = FusedFrame(weights, state, k, v, rows, each)
        runner.run(slots, codes, flags)
        made[name] = codes.clone()

        def again(runner: FusedFrame = runner, state=state, codes: Tensor = codes, flags: Tensor = flags) -> None:
            state.positions[:rows] = contexts
            runner.run(slots, codes, flags)

        found[name] = graph_us(again, 1, 15) / 1000
    same = torch.equal(made["few"], made["many"])
    bench.add({"part": "frame", "rows": rows, "context": context, "same_codes": same, **found})


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rows", type=numbers, default=[32, 128, 512, 1024])
    made.add_argument("--context", type=int, default=108)
    made.add_argument("--parts", default="attention,talker,frame")
    options = made.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = Bench("lm_rows", options)
    parts = {"attention": attention, "talker": partial(talker, context=options.context), "frame": partial(frame, context=options.context)}
    for part in options.parts.split(","):
        for rows in options.rows:
            bench.attempt(f"{part} {rows}", partial(parts[part], bench, rows))
    return bench.end()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

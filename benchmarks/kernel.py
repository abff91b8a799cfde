"""Frames and prompts of an LM on a GPU, with random weights of the published sizes; times are medians of graph replays.

    python -m benchmarks.kernel [--parts frame,prefill] [--sizes 0b6,1b7,spark,fish] [--rows 1,8,32,64,128,256,512,1024]
        [--contexts 108,300] [--positions 2048,6144] [--prompts 36,228]

`frame`: whole frames, ms, by plan: the one in force, the same with cuBLAS alone, and for one or two rows the persistent
kernels. `prefill`: a row of positions that is filled with prompts of one length. `tests/gpu` compares all kernels with
their twins.

`frame_floor` is the least time that a frame can take on a device. The sizes of the models are in
`tests.support.lm_tensors`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks.common import Bench, graph_us, parser, read
from kernels import lm_products
from kernels.attention import PackedPrompts
from kernels.frame import FrameTensors
from kernels.lm_frame import FusedFrame, PersistentFrame, plan_for
from kernels.lm_persistent import Predictor, PredictorRun, Talker, predictor_config, talker_config
from kernels.prefill import prefill_packed
from tests.support.lm_tensors import PUBLISHED, Maker, Shape

PAGE = 64
PARTS = ("frame", "prefill")
#: Rows of a part, and seconds after which it is given up: a kernel that does not end takes the process along.
ROWS, SECONDS = (1, 8, 32, 64, 128, 256, 512, 1024), 90


class Device(NamedTuple):
    """Measured limits: bytes a second of streaming reads, floating-point operations a second of large bfloat16
    products."""

    name: str
    bandwidth: float
    flops: float


DEVICES = (Device("H200", 4.3e12, 790e12), Device("H100", 3.0e12, 790e12))
_BYTES = 2  # of a bfloat16 value


def device_named(name: str) -> Device | None:
    """The known device whose name is part of this one; None for others, which have no floor."""
    return next((device for device in DEVICES if device.name in name), None)


def frame_floor(shape: Shape, rows: int, context: float, device: Device) -> float:
    """Seconds of one frame of `rows` rows at this mean context, without prefill and codec: of backbone and depth each
    the longer one of the time to read every weight and key once, and the time of all products at the matrix units'
    speed."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def weights(hidden: int, inter: int, layers: int) -> int:
        return layers * (2 * hidden * (q + kv) + 3 * hidden * inter)

    def seconds(values: float, flops: float) -> float:
        return max(_BYTES * values / device.bandwidth, flops / device.flops)

    backbone = weights(shape.hidden, shape.inter, shape.layers) + shape.vocab * shape.hidden
    kept, attention = 2 * kv * shape.layers, 4 * q * shape.layers
    found = seconds(backbone + rows * context * kept, rows * (2 * backbone + attention * context))
    if (steps := shape.codebooks - 1) == 0:
        return found
    depth = weights(shape.width, shape.width_inter, shape.predictor_layers)
    heads = steps * shape.codes * shape.width
    heads += shape.hidden * shape.width if shape.hidden != shape.width else 0
    kept, attention = 2 * kv * shape.predictor_layers, 4 * q * shape.predictor_layers
    # Positions that the depth's queries see: 1 and 2 in its first step, then one more each.
    seen = sum(range(1, steps + 2))
    flops = rows * (2 * ((steps + 1) * depth + heads) + attention * seen)
    return found + seconds(steps * depth + heads + rows * (seen - 1) * kept, flops)


def frame_part(bench: Bench, name: str, rows: int, context: int) -> None:
    """Whole frames of slots at contexts around this one; of the persistent kernels the predictor's alone, and the
    talker's too where it has one."""
    maker, shape = Maker(str(bench.device), torch.bfloat16), PUBLISHED[name]
    weights, contexts = maker.frame(shape), maker.integers(context * 2 // 3, context * 4 // 3 + 1, rows)
    pages = rows * -(-(context * 4 // 3 + 64) // PAGE) + 1
    state, (k, v) = maker.state(shape, rows, pages, PAGE, contexts), maker.caches(shape, pages, PAGE)
    slots, plan = torch.arange(rows, device=bench.device), plan_for(rows, shape.hidden)
    codes = torch.zeros(rows, shape.codebooks, dtype=torch.int64, device=bench.device)
    flags = torch.zeros(rows, dtype=torch.uint8, device=bench.device)
    bare = plan._replace(products=False, wide_swiglu=False, residual_products=False)
    made: dict[str, Callable[[], FusedFrame]] = {
        "plan": lambda: FusedFrame(weights, state, k, v, rows, plan),
        "cublas": lambda: FusedFrame(weights, state, k, v, rows, bare),
        **persistent(weights, rows, lambda run, talker: PersistentFrame(run, state, k, v, plan, talker)),
    }
    us: dict[str, float] = {}
    for way, make in made.items():
        runner = make()

        def again(runner: FusedFrame = runner) -> None:
            state.positions[:rows] = contexts
            runner.run(slots, codes, flags)

        us[way] = graph_us(again, 15)
        del runner
    device, best = device_named(bench.found["device"]), min(us.values())
    row = {"part": "frame", "sizes": name, "rows": rows, "context": context, "us": us, "best_ms": best / 1000}
    if device is not None:
        row["floor_ms"] = 1000 * frame_floor(shape, rows, context, device)
    bench.add(row | {"frames_s": rows / best * 1e6})


def persistent(
    weights: FrameTensors, rows: int, frame: Callable[[PredictorRun, Talker | None], FusedFrame]
) -> dict[str, Callable[[], FusedFrame]]:
    if rows > 2 or predictor_config(weights) is None:
        return {}
    predictor = Predictor(weights)
    found = {"predictor persistent": lambda: frame(PredictorRun(predictor, rows), None)}
    if talker_config(weights) is not None:
        talker = Talker(weights)
        found["talker too"] = lambda: frame(PredictorRun(predictor, rows), talker)
    return found


def prefill_part(bench: Bench, name: str, positions: int, length: int) -> None:
    """Prompts of one length that fill the positions, the last one cut off, each on pages of its own."""
    maker, device, shape = Maker(str(bench.device), bench.dtype), bench.device, PUBLISHED[name]
    stack = maker.stack(shape.hidden, shape.inter, shape.layers, shape, length)
    counts, each = (
        [min(length, positions - begin) for begin in range(0, positions, length)],
        -(-length // PAGE),
    )
    table = torch.arange(1, len(counts) * each + 1, device=device).view(len(counts), each)
    told = list(range(len(counts))), [0] * len(counts), counts
    prompts = PackedPrompts(table, *(torch.tensor(values, device=device) for values in told))
    (k, v), embeddings = maker.caches(shape, table.numel() + 1, PAGE), maker.normal(positions, shape.hidden)
    us = graph_us(partial(prefill_packed, embeddings, prompts, stack, k, v, 0), 11)
    processors = lm_products.processors(bench.device.index or 0)
    fills = lm_products.supports_swiglu(stack.layers[0].down)
    fills = fills and lm_products.fills(positions, shape.inter, processors)
    row = {"part": "prefill", "sizes": name, "rows": positions, "prompt": length, "fills": fills}
    bench.add({**row, "ms": us / 1000, "us_per_position": us / positions})


def main() -> int:
    options = read(
        parser(__doc__), parts=list(PARTS), sizes=["0b6", "1b7"], rows=list(ROWS), contexts=[108, 300],
        positions=[512, 2048, 6144], prompts=[36, 228], known={"parts": PARTS, "sizes": PUBLISHED},
    )  # fmt: skip
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bench = Bench("kernel", options)
    if not bench.on_gpu:
        print("These kernels need a GPU; tests/parity runs them on a CPU in emulators.")
        return 0

    works: dict[str, tuple[Callable[..., None], Any]] = {
        "frame": (frame_part, product(options.sizes, options.rows, options.contexts)),
        "prefill": (prefill_part, product(options.sizes, options.positions, options.prompts)),
    }
    for part, (work, sizes) in works.items():
        for given in sizes if part in options.parts else ():
            signal.alarm(SECONDS)
            bench.attempt(" ".join(map(str, (part, *given))), work, bench, *given)
            signal.alarm(0)
    return bench.end("part", "sizes", "rows", "context", "best_ms", "floor_ms", "ms", "us_per_position")


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

# ruff: noqa: B023 - every closure here is called within its turn of the loop
"""Times the talker and code-predictor frame on a GPU with random weights of the published sizes.

    python -m benchmarks.lm_gpu [--part gemm,ops,frame] [--model 0.6b,1.7b] [--batch 1,32,128,512] [--context 300]

`tests/gpu/test_lm_kernels.py` compares every kernel with its twin. Times are medians of CUDA-graph
replays. A short table comes last; JSON goes to $OUT (or the working folder) as lm_gpu.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import captured, graph_us
from benchmarks.random_models.frames import LARGE, SMALL, Maker, Shape
from kernels import lm_cuda
from kernels.lm_attention import SplitScratch, decode_attention, predictor_attention
from kernels.lm_frame import FusedFrame, Plan, plan_for
from kernels.lm_products import PLAIN, RESIDUAL, SWIGLU
from kernels.lm_triton import add_norm, swiglu

LAYERS = 28
CONTEXT = 300
#: Of a frame at context 300 (ms): floor, aim, must, for the 0.6B shapes.
AIMS = {1: (0.78, 1.3, 2.0), 32: (1.05, 1.8, 2.6), 128: (1.88, 2.9, 4.0), 512: (5.98, 9.2, 12.0)}

SKINNY_VARIANTS: dict[str, dict[str, int]] = {
    "skinny": {"late": 0, "ahead": 0},
    "skinny late": {"late": 1, "ahead": 2},
}


def gemm_part(maker: Maker, batches: list[int]) -> list[dict[str, object]]:
    """The four products of a layer: cuBLAS and skinny, over the rotating weights of 28 layers."""
    found: list[dict[str, object]] = []
    specs = {
        "qkv": (4096, 1024, PLAIN),
        "o": (1024, 2048, RESIDUAL),
        "gate_up": (3072, 1024, SWIGLU),
        "down": (1024, 3072, RESIDUAL),
    }
    for name, (n, inner, epilogue) in specs.items():
        weights = [maker.matrix(2 * n if epilogue == SWIGLU else n, inner) for _ in range(LAYERS)]
        norm = maker.normal(inner, std=0.1, mean=1.0)
        for rows in batches:
            x = maker.normal(rows, inner)
            y = maker.normal(rows, n)
            both = maker.normal(rows, 2 * n)

            def cublas(
                x: Tensor = x,
                y: Tensor = y,
                both: Tensor = both,
                weights: list[Tensor] = weights,
                wide: bool = epilogue == SWIGLU,
            ) -> None:
                for weight in weights:
                    torch.mm(x, weight.t(), out=both if wide else y)

            row: dict[str, object] = {"op": name, "rows": rows, "cublas": graph_us(cublas, LAYERS)}
            if rows <= 64:
                for label, options in SKINNY_VARIANTS.items():

                    def thin(options: dict[str, int] = options) -> None:
                        for index, weight in enumerate(weights):
                            ahead = weights[(index + options["ahead"]) % LAYERS] if options["ahead"] else None
                            lm_cuda.skinny(
                                x, weight, y, norm=None if epilogue == RESIDUAL else norm, eps=1e-6, epilogue=epilogue,
                                extra=y if epilogue == RESIDUAL else None, ahead=ahead, late=bool(options["late"]),
                            )  # fmt: skip

                    row[label] = graph_us(thin, LAYERS)
            found.append(row)
            short = {k: (round(v, 2) if isinstance(v, float) else v) for k, v in row.items()}
            print("gemm", json.dumps(short), flush=True)
    return found


def ops_part(maker: Maker, batches: list[int], context: int) -> list[dict[str, object]]:
    """Attention, norms, SwiGLU: microseconds a launch, over the rotating pages of several layers."""
    found: list[dict[str, object]] = []
    shape = Shape(layers=8)
    talker = maker.stack(1024, 3072, 1, shape, 4096)
    for rows in batches:
        pages = rows * -(-(context * 4 // 3 + 64) // 64) + 1
        contexts = maker.integers(context * 2 // 3, context * 4 // 3 + 1, rows)
        state = maker.state(shape, rows, pages, 64, contexts)
        k, v = maker.caches(shape, pages, 64)
        qkv, out = maker.normal(rows, 4096), maker.normal(rows, 2048)
        slots = torch.arange(rows, device="cuda")
        q_norm, k_norm = (
            norm for norm in (talker.layers[0].q_norm, talker.layers[0].k_norm) if norm is not None
        )
        row: dict[str, object] = {"rows": rows, "attention floor": float(contexts.sum()) * 4096 / 4.3e6}
        for splits in (2, 4, 8, 16) if rows <= 8 else (1, 2, 4) if rows <= 32 else (1,):
            for block, warps, stages in (
                (16, 1, 5),
                (16, 1, 2),
                (32, 1, 3),
                (64, 4, 3),
                (64, 4, 2),
                (64, 2, 2),
                (32, 2, 4),
            ):
                scratch = SplitScratch(rows * 8, splits, 2, 128, k.device)

                def attend(
                    splits: int = splits,
                    block: int = block,
                    warps: int = warps,
                    stages: int = stages,
                    scratch: SplitScratch = scratch,
                ) -> None:
                    for layer in range(shape.layers):
                        decode_attention(
                            qkv, q_norm, k_norm, 1e-6, talker.rope_table, k[layer], v[layer], state.page_table, state.positions, slots,
                            128**-0.5, out, scratch, splits, block, warps, stages, True,
                        )  # fmt: skip

                row[f"attention splits={splits} block={block} warps={warps} stages={stages}"] = graph_us(
                    attend, shape.layers
                )
        past = maker.normal(2, 5, rows, 8, 16, 128)
        for warps in (1, 2, 4):

            def short(warps: int = warps) -> None:
                for layer in range(5):
                    predictor_attention(
                        qkv,
                        q_norm,
                        k_norm,
                        1e-6,
                        talker.rope_table,
                        past[0, layer],
                        past[1, layer],
                        12,
                        128**-0.5,
                        out,
                        warps,
                        True,
                    )

            row[f"predictor attention warps={warps}"] = graph_us(short, 5)
        row["predictor attention cuda"] = graph_us(
            lambda: [
                lm_cuda.predictor_attention(
                    qkv,
                    q_norm,
                    k_norm,
                    1e-6,
                    talker.rope_table,
                    past[0, layer],
                    past[1, layer],
                    12,
                    128**-0.5,
                    out,
                )
                for layer in range(5)
            ],
            5,
        )
        x, y, h = (maker.normal(rows, 1024) for _ in range(3))
        norm = maker.normal(1024)
        row["add+norm"] = graph_us(lambda: [add_norm(x, y, norm, 1e-6, h, True) for _ in range(8)], 8)
        both, act = maker.normal(rows, 6144), maker.normal(rows, 3072)
        row["swiglu"] = graph_us(lambda: [swiglu(both, act, True) for _ in range(8)], 8)
        found.append(row)
        print(
            "ops",
            json.dumps({k: (round(v, 2) if isinstance(v, float) else v) for k, v in row.items()}),
            flush=True,
        )
    return found


def frame_us(
    shape: Shape, maker: Maker, rows: int, plans: dict[str, Plan], page_size: int = 64
) -> dict[str, float]:
    """Microseconds of a whole frame under several plans, contexts around 300."""
    weights = maker.frame(shape)
    pages = rows * 9 + 1
    contexts = maker.integers(CONTEXT - 100, CONTEXT + 101, rows)
    state = maker.state(shape, rows, pages, page_size, contexts)
    k, v = maker.caches(shape, pages, page_size)
    slots = torch.arange(rows, device="cuda")
    codes = torch.zeros(rows, shape.codebooks, dtype=torch.int64, device="cuda")
    flags = torch.zeros(rows, dtype=torch.uint8, device="cuda")
    times = {}
    for name, plan in plans.items():
        runner = FusedFrame(weights, state, k, v, rows, plan)

        def frame(runner: FusedFrame = runner) -> None:
            state.positions[:rows] = contexts
            runner.run(slots, codes, flags)

        times[name] = graph_us(frame, 1, 15)
        del runner
    return times


def profile_part(maker: Maker, batches: list[int], pdl: bool) -> list[dict[str, object]]:
    """Where a frame's time goes: microseconds a launch and launches a frame, by kernel, of one captured
    frame's replay."""
    found: list[dict[str, object]] = []
    for rows in batches:
        weights, contexts = maker.frame(SMALL), maker.integers(CONTEXT - 100, CONTEXT + 101, rows)
        state = maker.state(SMALL, rows, rows * 9 + 1, 64, contexts)
        k, v = maker.caches(SMALL, rows * 9 + 1, 64)
        slots = torch.arange(rows, device="cuda")
        codes = torch.zeros(rows, SMALL.codebooks, dtype=torch.int64, device="cuda")
        flags = torch.zeros(rows, dtype=torch.uint8, device="cuda")
        runner = FusedFrame(weights, state, k, v, rows, dataclasses.replace(plan_for(rows), pdl=pdl))
        graph = captured(
            lambda runner=runner, slots=slots, codes=codes, flags=flags: runner.run(slots, codes, flags)
        )
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        rows_found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        lines = [
            (event.key[:70], event.count, round(event.self_device_time_total / event.count, 2))
            for event in rows_found[:14]
        ]
        found.append({"rows": rows, "pdl": pdl, "kernels": lines})
        print(f"profile rows {rows} pdl {pdl}")
        for name, count, us in lines:
            print(f"  {count:4} x {us:8.2f} us = {count * us:8.0f}  {name}", flush=True)
        torch.cuda.empty_cache()
    return found


def shell_us(maker: Maker, rows: int) -> float:
    """Microseconds of a frame with one layer a stack: mostly heads and draws."""
    return frame_us(Shape(layers=1, predictor_layers=1), maker, rows, {"shell": plan_for(rows)})["shell"]


def frame_part(
    model: str, maker: Maker, batches: list[int], plans: dict[int, dict[str, Plan]]
) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for rows in batches:
        shape = SMALL if model == "0.6b" else LARGE
        found_plans = dict(
            next(p for limit, p in sorted(plans.items()) if rows <= limit), plan=plan_for(rows, shape.hidden)
        )
        times = frame_us(shape, maker, rows, found_plans)
        best = min(times.values())
        floor, aim, must = AIMS.get(rows, (0.0, 0.0, 0.0)) if model == "0.6b" else (0.0, 0.0, 0.0)
        found.append({"model": model, "rows": rows, "us": times, "best_ms": best / 1000, "frames_s": rows / best * 1e6, "floor_ms": floor,
                      "aim_ms": aim, "must_ms": must})  # fmt: skip
        found[-1]["shell_us"] = shell_us(maker, rows)
        print("shell", rows, round(float(str(found[-1]["shell_us"]))))
        print("frame", model, rows, {name: round(us) for name, us in times.items()}, flush=True)
        torch.cuda.empty_cache()
    return found


def frame_plans() -> dict[int, dict[str, Plan]]:
    """Plans to compare, by the largest row count."""
    wide = {"plan": plan_for(512), "pdl": Plan(skinny_rows=0)}
    by_rows = {
        rows: {"plan": plan_for(rows), "no pdl": dataclasses.replace(plan_for(rows), pdl=False)}
        for rows in (2, 16)
    }
    middle = {"plan": plan_for(32), "norms in the products": Plan(skinny_rows=64, ahead=2)}
    return by_rows | {32: middle, 1 << 30: wide}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="gemm,ops,frame")
    parser.add_argument("--model", default="0.6b")
    parser.add_argument("--batch", default="1,32,128,512")
    parser.add_argument("--context", type=int, default=CONTEXT, help="of the part ops, on average")
    parser.add_argument(
        "--commit",
        default=os.environ.get("NIGHTJAR_COMMIT", ""),
        help="the commit that is measured, for the JSON",
    )
    arguments = parser.parse_args()
    parts, batches = arguments.part.split(","), [int(b) for b in arguments.batch.split(",")]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    maker = Maker("cuda", torch.bfloat16)
    result: dict[str, object] = {
        "commit": arguments.commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    began = time.monotonic()

    def save() -> None:
        folder = Path(os.environ.get("OUT", "."))
        (folder / "lm_gpu.json").write_text(json.dumps(result, indent=1))

    frames: list[dict[str, object]] = []
    with torch.inference_mode():
        if "frame" in parts:
            for model in arguments.model.split(","):
                frames += frame_part(model, maker, batches, frame_plans())
            result["frames"] = frames
            save()
            print(f"frames done after {time.monotonic() - began:.0f} s", flush=True)
        if "profile" in parts:
            result["profile"] = profile_part(maker, batches, False)
        if "ops" in parts:
            result["ops"] = ops_part(maker, batches, arguments.context)
        if "gemm" in parts:
            result["gemm"] = gemm_part(maker, batches)
    save()
    print(
        f"{'model':6} {'rows':>5} {'ms':>8} {'floor':>6} {'aim':>5} {'must':>5} {'frames/s':>9} {'RTFx':>11}"
    )
    for row in frames:
        print(
            f"{row['model']:6} {row['rows']:5} {row['best_ms']:8.3f} {row['floor_ms']:6} {row['aim_ms']:5} {row['must_ms']:5} "
            f"{row['frames_s']:9.0f} {row['frames_s'] / 12.5:11.0f}"  # type: ignore[operator]
        )
    print(f"total {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

"""Times the codec decoder on a GPU with random weights of the published size.

    python -m benchmarks.codec_gpu [--part tiles,decode,stream] [--rows 32] [--frames 100]

`tiles` finds the fastest tile of each kernel that is right against its float32 twin (the parts after it
use them; `tests/gpu` checks the ones in force), `decode` times whole utterances and compares the audio
with float32, `stream` times chunks of streams in all sizes of their graphs, on the device and on the host.
Times are medians of CUDA-graph replays or of event pairs. A short table comes last; JSON goes to $OUT (or
the working folder) as codec_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import TritonError

from benchmarks.codec_shapes import FRAME_MACS, Problem, problems, tiles
from benchmarks.gpu import event_us, graph_us
from benchmarks.random_models.qwen3_tts import PUBLISHED_CODEC, dummy_decoder
from kernels import codec_launch
from kernels.codec_launch import Tile
from pipelines.codec.graphs import FRAMES, ROWS, StreamGraphs
from pipelines.codec.transfer import recorded
from pipelines.nn.checkpoint import open_device
from pipelines.qwen3_tts.codec import CodecDecoder

#: What the whole decoder should take, in microseconds a frame at 32 x 100 frames: floor, aim, must,
#: torch.compile with cudnn.benchmark.
AIMS = {"floor": 6.3, "aim": 10.0, "must": 16.0, "compiled": 24.9}
#: A kernel may err 2^-7 of its result's RMS: inputs are exact, the result and one value in between are
#: rounded to bfloat16.
CHECK_LIMIT = 2.0**-7


def compile_in_parallel(processes: int) -> None:
    """Fills Triton's cache: every candidate of every kernel, in as many processes."""
    command = [sys.executable, "-m", "benchmarks.codec_gpu", "--compile"]
    running = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    for process in running:
        process.wait()


def compile_share(share: str) -> None:
    index, count = map(int, share.split("/"))
    jobs = [(problem, tile) for problem in problems() for tile in tiles(problem)]
    for problem, tile in jobs[index::count]:
        launch, _, _ = problem.bind(16, 256)
        attempt(lambda launch=launch, tile=tile: launch(tile))


def attempt(work: Callable[[], object]) -> str:
    """Runs `work`; a candidate that the compiler or the device cannot run is reported, not fatal."""
    try:
        work()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, TritonError) as error:
        return str(error).splitlines()[0][:120]
    return ""


def relative_rms(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def wrong(problem: Problem, tile: Tile) -> str:
    """Why a tile may not be used for a kernel, or nothing: its error against the float32 twin, and whether
    two runs agree."""
    launch, twin, outputs = problem.bind(2, 1000)
    twin()
    made = [i for i, wanted in enumerate((problem.raw, problem.active)) if wanted]
    runs: list[list[Tensor]] = []
    for _ in range(2):
        for output in outputs[:2]:
            output.fill_(float("nan"))
        failure = attempt(lambda: launch(tile))
        if failure:
            return failure
        runs.append([outputs[i].clone() for i in made])
    errors = [relative_rms(got, outputs[i + 2]) for i, got in zip(made, runs[0])]
    if not all(error <= CHECK_LIMIT for error in errors):
        return f"wrong by {' '.join(f'{error:.1e}' for error in errors)}"
    return (
        "" if all(torch.equal(first, second) for first, second in zip(*runs)) else "differs from run to run"
    )


def tiles_part(rows: int, frames: int, processes: int) -> list[dict[str, Any]]:
    """The fastest tile of each kernel at the real number of steps; the choice stays in force for the parts
    that follow."""
    began = time.monotonic()
    compile_in_parallel(processes)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    for problem in problems():
        launch, _, outputs = problem.bind(rows, frames * problem.steps)
        timed: list[tuple[float, Tile]] = []
        for tile in tiles(problem):
            failure = wrong(problem, tile) or attempt(lambda launch=launch, tile=tile: launch(tile))
            if failure:
                print(f"  {problem.name} {tile}: {failure}", flush=True)
            else:
                timed.append((event_us(lambda launch=launch, tile=tile: launch(tile)), tile))
        timed.sort(key=lambda pair: pair[0])
        best_us, best = timed[0]
        codec_launch.TILES[problem.shape] = best
        rate = 2.0 * problem.macs * rows * frames * problem.steps / best_us / 1e6
        share = best_us * problem.count / (rows * frames)
        found.append(
            {
                "kernel": problem.name,
                "us": best_us,
                "tflops": rate,
                "us_per_frame": share,
                "best": asdict(best),
            }
            | {"all": [{"us": us, **asdict(tile)} for us, tile in timed]}
        )
        print(
            f"tile {problem.name:10} {best_us:9.1f} us {rate:6.0f} TFLOP/s {share:6.2f} us/frame  {best}",
            flush=True,
        )
        del launch, outputs
        torch.cuda.empty_cache()
    return found


def decoder(dtype: torch.dtype, fused: bool) -> CodecDecoder:
    return dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), dtype, fused)


def random_codes(rows: int, frames: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(7)
    return torch.randint(
        PUBLISHED_CODEC.codebook_size,
        (rows, frames, PUBLISHED_CODEC.num_quantizers),
        generator=generator,
        device="cuda",
    )


def quality() -> dict[str, float]:
    """Relative RMS error of the audio against float32: plain bfloat16 and fused bfloat16."""
    codes = random_codes(4, 64)
    wanted = decoder(torch.float32, False)._run(codes, None)
    plain = relative_rms(decoder(torch.bfloat16, False)._run(codes, None), wanted)
    fused = relative_rms(decoder(torch.bfloat16, True)._run(codes, None), wanted)
    print(
        f"audio error against float32: plain bf16 {plain:.4f}, fused bf16 {fused:.4f} ({fused / plain:.2f} x)",
        flush=True,
    )
    return {"plain_bf16": plain, "fused_bf16": fused, "ratio": fused / plain}


def decode_part(rows: int, frames: int) -> list[dict[str, Any]]:
    """Whole utterances, fused and (at the first size) plain; and how the time splits before and in the
    convolution stack."""
    fused, plain = decoder(torch.bfloat16, True), decoder(torch.bfloat16, False)
    found: list[dict[str, Any]] = []
    for r, f in ((rows, frames), (1, 100), (8, 100), (64, 64), (16, 256)):
        codes = random_codes(r, f)
        row: dict[str, Any] = {
            "rows": r,
            "frames": f,
            "graph_us": graph_us(lambda codes=codes: fused._run(codes, None)) / (r * f),
        }
        row["launched_us"] = event_us(lambda codes=codes: fused._run(codes, None)) / (r * f)
        row["tflops"] = 2 * FRAME_MACS / row["graph_us"] / 1e6
        if not found:
            front = torch.randn(r, f * 4, PUBLISHED_CODEC.latent_dim, device="cuda").bfloat16()
            row["stack_us"] = graph_us(lambda front=front: fused._stack(front, None)) / (r * f)
            row["plain_us"] = event_us(lambda codes=codes: plain._run(codes, None), 3) / (r * f)
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found.append(row)
        torch.cuda.empty_cache()
        print(
            "decode "
            + " ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            flush=True,
        )
    return found


def stream_part() -> dict[str, Any]:
    """Chunks of so many frames for so many streams at once: one launch of a graph with its copies, the
    host's share of it, and op by op."""
    fused, (rows, frames) = decoder(torch.bfloat16, True), (ROWS[-1], FRAMES[-1])
    free, began = torch.cuda.mem_get_info()[0], time.monotonic()
    graphs = StreamGraphs(fused._run, fused.shape, rows, group_frames=rows * frames)
    graphs.prepare()
    result: dict[str, Any] = {"graphs": len(graphs.sizes), "prepare_s": time.monotonic() - began}
    result |= {
        "gib": (free - torch.cuda.mem_get_info()[0]) / 2**30,
        "state_kib": fused.state_size * fused.dtype.itemsize / 2**10,
        "times": [],
    }
    print("stream " + " ".join(f"{k} {v:.2f}" for k, v in result.items() if k != "times"), flush=True)
    for r, n in sorted(graphs.sizes):
        row = {"rows": r, "frames": n, **launch_us(fused, graphs, r, n)}
        row["us_per_frame"] = row["us"] / (r * n)
        result["times"].append(row)
        print(
            "stream "
            + " ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            flush=True,
        )
    return result


def launch_us(fused: CodecDecoder, graphs: StreamGraphs, rows: int, frames: int) -> dict[str, float]:
    """Microseconds: of the graph, of the host for a launch with its copies, until the samples are on the
    host, and op by op."""
    codes, last = list(random_codes(rows, frames).cpu()), [False] * rows
    states, own = ([fused.new_state() for _ in range(rows)] for _ in range(2))
    host: list[float] = []
    whole: list[float] = []
    with graphs.on_stream():
        for state in states:
            state.enter(graphs.arena)
        for _ in range(21):
            begin = time.perf_counter()
            _, buffers = graphs.replay(states, codes, last)
            host.append((time.perf_counter() - begin) * 1e6)
            recorded().synchronize()
            whole.append((time.perf_counter() - begin) * 1e6)
            graphs.take_back(buffers)
        us = event_us(graphs.graph(rows, frames), 21)
        launched = event_us(lambda: fused.decode_chunk(own, codes), 5)
    for state in states:
        state.close()
    return {
        "us": us,
        "host_us": statistics.median(host),
        "there_us": statistics.median(whole),
        "launched_us": launched,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="tiles,decode,stream")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        if arguments.compile:
            compile_share(arguments.compile)
            return
        report(arguments)


def report(arguments: argparse.Namespace) -> None:
    parts, began = arguments.part.split(","), time.monotonic()
    open_device("cuda")
    result: dict[str, Any] = {
        "commit": os.environ.get("NIGHTJAR_COMMIT", ""),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "aims_us": AIMS,
    }
    work: dict[str, Callable[[], Any]] = {
        "tiles": lambda: tiles_part(arguments.rows, arguments.frames, arguments.processes),
        "decode": lambda: {"quality": quality(), "times": decode_part(arguments.rows, arguments.frames)},
        "stream": stream_part,
    }
    for part in parts:
        result[part] = work[part]()
        (Path(os.environ.get("OUT", ".")) / "codec_gpu.json").write_text(json.dumps(result, indent=1))
        print(f"{part} done after {time.monotonic() - began:.0f} s", flush=True)
    for row in result.get("tiles", []):
        print(f"{row['kernel']:10} {row['tflops']:6.0f} TFLOP/s {row['us_per_frame']:6.2f} us/frame")
    for row in result.get("decode", {}).get("times", []):
        print(
            f"{row['rows']:3} x {row['frames']:3} frames: {row['graph_us']:6.2f} us/frame (aim {AIMS['aim']}, must {AIMS['must']})"
        )
    print(f"total {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

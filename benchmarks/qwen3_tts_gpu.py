"""Qwen3-TTS end to end on full-size random weights: prompt ids in, float32 samples on the host out, through the real engine.

    NIGHTJAR_COMMIT=... python -m benchmarks.qwen3_tts_gpu --sizes 0b6 1b7 --slots 128 512 --json qwen3_tts.json
    python -m benchmarks.qwen3_tts_gpu --device cpu --tiny

A closed loop keeps every slot taken with utterances of 3 to 15 seconds. Each has its length from the start, but the engine does not
know it: the weights draw the end at the first frame that `min_new_tokens` allows. Measured, once twice as many utterances are out as
there are slots: the whole, the language model without the codec, and the codec alone; each row has its share of the roofline floor.
What is quoted is sustained: the smaller of what the language model made and what was heard. `--sweep` adds the whole at more numbers of
slots, `--reproducible` the whole in reproducible mode, `--reference` the rows of `benchmarks.qwen3_tts_reference`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.qwen3_tts_load import FRAMES_PER_SECOND, MAX_TOKENS, ClosedLoop, Load, Pool, Tally, memory, requests
from benchmarks.roofline import device_named, floor_ms, mean_context
from benchmarks.watched import Watched, profile
from pipelines.errors import NightjarError
from pipelines.nn.options import open_device
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.dummy import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder, dummy_model
from pipelines.qwen3_tts.execution import engine_options, open_executor, open_stage
from pipelines.qwen3_tts.model import Qwen3TTSModel

PAGE_SIZE = 64
MAX_CONTEXT = 4096
#: Seconds at most until a loop has settled, compilation of kernels included.
SETTLE_SECONDS = 60.0


def codec_alone(decoder: CodecDecoder, pool: Pool, seconds: float, at_once: int = 512) -> dict[str, Any]:
    """Whole utterances from codes on the host to samples on the host, through the engine's own stage, which always has more to do."""
    draw, size = np.random.default_rng(0), decoder.config.codebook_size
    codes = [draw.integers(0, size, (frames, decoder.config.num_quantizers)) for _, frames in pool]
    stage, tally, room = open_stage(decoder), Tally(), threading.Semaphore(at_once)

    def order(one: NDArray[np.int64]) -> None:
        def done(samples: NDArray[np.float32] | NightjarError) -> None:
            right = not isinstance(samples, NightjarError) and len(samples) == len(one) * decoder.samples_per_frame
            tally.heard(len(one), right)
            room.release()

        room.acquire()
        stage.decode(one, done)

    for one in codes:
        order(one)
    while tally.utterances < len(codes):  # kernels are built
        time.sleep(0.001)
    feed = itertools.cycle(codes)
    for one in itertools.islice(feed, 2 * at_once):
        order(one)
    before, began = tally.frames, time.perf_counter()
    for one in feed:
        if tally.frames > before and time.perf_counter() - began >= seconds:
            break
        order(one)
    took, frames = time.perf_counter() - began, tally.frames - before
    stage.close()
    rate = frames / took
    figures = {"us_per_frame": 1e6 / rate, "ms_per_frame": 1000 / rate, "frames_per_s": rate, "audio_s_per_s": rate / FRAMES_PER_SECOND}
    return {**figures, "seconds": took, "wrong_lengths": tally.wrong}


class Bench:
    """One model and one decoder on one device, and the rows that they give."""

    def __init__(self, size: str, device: torch.device, decoder: CodecDecoder, load: Load) -> None:
        self.size, self.device, self.decoder, self.load = size, device, decoder, load
        #: Options of the engine that are not its own choice, to try others.
        self.overrides: dict[str, int] = {}
        self.limits = device_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.model: Qwen3TTSModel = dummy_model(size, device, dtype, MAX_CONTEXT, ends=True)

    def rows(
        self, slots: int, parts: Sequence[str], windows: int, sampled: bool = False, reproducible: bool = False
    ) -> list[dict[str, Any]]:
        """The parts "all" (with the codec) and "lm" (without it) with so many slots."""
        clean(self.device)
        options = engine_options(self.model, slots, slots * -(-self.load.positions // PAGE_SIZE), PAGE_SIZE, MAX_CONTEXT)
        options = replace(options, **self.overrides)
        began = time.perf_counter()
        on_cpu = self.device.type == "cpu"
        executor = Watched(open_executor(self.model, options, reproducible=reproducible and not on_cpu))
        opened = time.perf_counter() - began
        most = min(MAX_TOKENS, options.pages * PAGE_SIZE - 64)
        pool = requests(self.model, self.load, max(4 * slots, 64), most)
        context = mean_context((len(request.prompt), frames) for request, frames in pool)
        decoder = dummy_decoder(self.decoder.config, self.device, self.decoder.dtype, reproducible=True) if reproducible else self.decoder
        found: list[dict[str, Any]] = []
        for part in parts:
            loop = ClosedLoop(executor, options, pool, decoder if part == "all" else None)
            try:
                settled = loop.settle(2 * slots + 8, SETTLE_SECONDS)
                row = {
                    "size": self.size,
                    "part": part,
                    "slots": slots,
                    "frames_per_turn": options.frames_per_turn,
                    "admit_turns": options.admit_turns,
                    "settled": settled,
                }
                row |= {"reproducible": reproducible, "open_s": opened, "context": context}
                row |= loop.measure(self.load.seconds, windows) | memory(self.device)
                row["floor_ms"] = floor_ms(part, self.size, slots, context, self.limits)
                row["floor_share"] = share(row)
                if sampled:
                    row["host_profile"] = profile(("engine", "codec-stage"), min(2.0, self.load.seconds))
            finally:
                loop.close()
            found.append(row)
            tell(row)
        return found


def share(row: dict[str, Any]) -> float | None:
    """The floor's part of the time that a frame took."""
    return row["floor_ms"] / row["ms_per_frame"] if row.get("floor_ms") and row.get("ms_per_frame") else None


def clean(device: torch.device) -> None:
    """Gives back the memory of what was measured before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def tell(row: dict[str, Any]) -> None:
    flat = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items() if key not in ("host_profile",)}
    print(json.dumps(flat), flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The short table; a row without a figure leaves its place empty."""

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    titles = f"{'audio-s/s':>11}{'frames/s':>10}{'ms/frame':>10}{'floor ms':>10}{'of floor':>9}{'spread':>8}{'GPU GiB':>9}"
    lines = [f"{'size':5}{'part':14}{'slots':>6}{titles}"]
    for row in rows:
        if "audio_s_per_s" not in row:
            continue
        part = row["part"] + (" same bits" if row.get("reproducible") else "")
        lines.append(
            f"{row.get('size', ''):5}{part:14}{row.get('slots') or '':>6}{row['audio_s_per_s']:11,.0f}{row['frames_per_s']:10,.0f}"
            f"{cell(row.get('ms_per_frame'), 10, '.3f')}{cell(row.get('floor_ms'), 10, '.3f')}{cell(row.get('floor_share'), 9, '.0%')}"
            f"{cell(row.get('spread'), 8, '.1%')}{cell(row.get('peak_gib'), 9, '.1f')}"
        )
    return "\n".join(lines)


def headlines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say together: against the reference at its best batch, and what reproducible mode costs."""
    lines: list[str] = []
    for size in dict.fromkeys(row.get("size") for row in rows if row.get("size")):
        ours = [row for row in rows if row.get("size") == size and row["part"] == "all" and "audio_s_per_s" in row]
        theirs = [row for row in rows if row.get("size") == size and row["part"] == "reference" and "audio_s_per_s" in row]
        free = {row["slots"]: row["audio_s_per_s"] for row in ours if not row["reproducible"]}
        if free and theirs:
            best, other = max(free.values()), max(row["audio_s_per_s"] for row in theirs)
            lines.append(f"{size}: {best:,.0f} audio-s/s, the reference at its best batch {other:,.0f}: {best / other:.1f} times")
        for row in ours:
            if row["reproducible"] and free.get(row["slots"]):
                lines.append(f"{size}, {row['slots']} slots: reproducible mode keeps {row['audio_s_per_s'] / free[row['slots']]:.0%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="*", default=["0b6", "1b7"])
    parser.add_argument("--slots", nargs="*", type=int, default=[512, 128])
    parser.add_argument("--parts", nargs="*", default=["all", "lm"], choices=("all", "lm"))
    parser.add_argument("--sweep", nargs="*", type=int, default=[], help="more numbers of slots, the whole only, in short windows")
    parser.add_argument("--reproducible", nargs="*", type=int, default=[], help="numbers of slots for the whole in reproducible mode")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--turns", type=int, help="frames a scheduling turn, instead of the engine's choice")
    parser.add_argument("--admit-turns", type=int, help="turns that newcomers may wait for company, instead of the engine's choice")
    parser.add_argument("--codec", action="store_true", help="measure the codec alone first")
    parser.add_argument("--reference", type=Path, help="JSON of the reference implementation's rows")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and short utterances, to try this on a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = open_device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    load = Load(0.3, 0.8, 0.5) if options.tiny else Load(3.0, 15.0, options.seconds)
    sizes, windows = (["tiny"], 2) if options.tiny else (options.sizes, options.windows)
    decoder = dummy_decoder(TINY_CODEC if options.tiny else PUBLISHED_CODEC, device, dtype)
    result: dict[str, Any] = {
        "commit": os.environ.get("NIGHTJAR_COMMIT", ""),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "load": {"shortest_s": load.shortest, "longest_s": load.longest, "window_s": load.seconds, "windows": windows},
        "rows": [],
    }

    def save(rows: Sequence[dict[str, Any]]) -> None:
        result["rows"] += rows
        result["headlines"] = headlines(result["rows"])
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    if options.reference and options.reference.exists():
        known = json.loads(options.reference.read_text(encoding="utf-8"))["rows"]
        save([row for row in known if row["size"] in sizes])
    for size in sizes:
        bench = Bench(size, device, decoder, load)
        chosen = {"frames_per_turn": options.turns, "admit_turns": options.admit_turns}
        bench.overrides = {name: value for name, value in chosen.items() if value is not None}
        if options.codec and size == sizes[0]:
            row = {
                "part": "codec",
                "size": "",
                **codec_alone(decoder, requests(bench.model, load, 16 if options.tiny else 1024), load.seconds, 8 if options.tiny else 512),
                **memory(device),
            }
            row["floor_ms"] = floor_ms("codec", size, 1, 0, bench.limits)
            row["floor_share"] = share(row)
            tell(row)
            save([row])
        for slots in options.slots:
            save(bench.rows(slots, options.parts, windows, sampled=True))
        for slots in options.reproducible:
            save(bench.rows(slots, ["all"], windows, reproducible=True))
        for slots in options.sweep:
            save(bench.rows(slots, ["all"], 2))
        del bench
        clean(device)
    print(table(result["rows"]))
    print("\n".join(result.get("headlines", [])))


if __name__ == "__main__":
    main()

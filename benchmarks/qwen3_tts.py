"""Qwen3-TTS end to end on full-size random weights: prompt ids in, float32 samples on the host out,
through the real engine.

    NIGHTJAR_COMMIT=... python -m benchmarks.qwen3_tts --sizes 0b6 1b7 --slots 128 512 --json qwen3_tts.json
    python -m benchmarks.qwen3_tts --device cpu --tiny

A closed loop keeps every slot taken with utterances of 3 to 15 seconds. Each has its length from the
start, but the engine does not know it: the weights draw the end at the first frame that `min_new_tokens`
allows. Measured, once twice as many utterances are out as there are slots: the whole, the language model
without the codec, and the codec alone; each row has its share of the roofline floor. What is quoted is
sustained: the smaller of what the language model made and what was heard. `--sweep` adds the whole at more
numbers of slots, `--reproducible` the whole in reproducible mode, `--long-prompts` the whole at a mean
context of 300, `--also` the rows of other runs, such as those of `benchmarks.qwen3_tts_reference`.
"""

from __future__ import annotations

import gc
import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import Bench, Row, ThreadUse, memory, parser, serves
from benchmarks.qwen3_load import FRAMES_PER_SECOND, MAX_TOKENS, ClosedLoop, Load, Tally, profile, requests
from benchmarks.random_models.qwen3_tts import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder, dummy_model
from benchmarks.roofline import device_named, floor_ms, mean_context
from benchmarks.watched_executor import Watched
from pipelines.engine.opening import NativeModelOptions, open_executor
from pipelines.errors import NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder, fuses_front
from pipelines.qwen3_tts.execution import engine_options, open_stage
from pipelines.qwen3_tts.model import Qwen3TTSModel

PAGE_SIZE = 64
MAX_CONTEXT = 4096
#: Positions that long prompts have more: a mean context of 300.
MORE_TEXT = 192
#: Seconds at most until a loop has settled, compilation of kernels included.
SETTLE_SECONDS = 60.0


def codec_alone(
    decoder: CodecDecoder, pool: Sequence[tuple[object, int]], seconds: float, at_once: int = 512
) -> dict[str, Any]:
    """Whole utterances from codes on the host to samples on the host, through the engine's own stage,
    which always has more to do."""
    draw, size = np.random.default_rng(0), decoder.config.codebook_size
    codes = [draw.integers(0, size, (frames, decoder.config.num_quantizers)) for _, frames in pool]
    stage, tally, room = open_stage(decoder), Tally(), threading.Semaphore(at_once)

    def order(one: NDArray[np.int64]) -> None:
        def done(samples: NDArray[np.float32] | NightjarError) -> None:
            right = (
                not isinstance(samples, NightjarError)
                and len(samples) == len(one) * decoder.samples_per_frame
            )
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
    before, began, threads = tally.frames, time.perf_counter(), ThreadUse()
    for one in feed:
        if tally.frames > before and time.perf_counter() - began >= seconds:
            break
        order(one)
    took, frames, shares = time.perf_counter() - began, tally.frames - before, threads.shares()
    stage.close()
    rate = frames / took
    figures = {
        "us_per_frame": 1e6 / rate,
        "ms_per_frame": 1000 / rate,
        "frames_per_s": rate,
        "audio_s_per_s": rate / FRAMES_PER_SECOND,
    }
    return {
        **figures,
        "seconds": took,
        "wrong_lengths": tally.wrong,
        "thread_cpu_share": {name: s for name, s in shares.items() if s >= 0.01},
    }


class Throughput:
    """One model and one decoder on one device, and the rows that they give."""

    def __init__(self, bench: Bench, size: str, decoder: CodecDecoder, load: Load) -> None:
        self.bench, self.size, self.decoder, self.load = bench, size, decoder, load
        #: Options of the engine that are not its own choice, to try others.
        chosen = {"frames_per_turn": bench.options.turns, "admit_turns": bench.options.admit_turns}
        self.overrides: dict[str, int] = {name: value for name, value in chosen.items() if value is not None}
        self.limits = device_named(bench.found["device"])
        self.model: Qwen3TTSModel = dummy_model(size, bench.device, bench.dtype, MAX_CONTEXT, ends=True)

    def measure(
        self,
        slots: int,
        parts: Sequence[str],
        windows: int,
        *,
        sampled: bool = False,
        reproducible: bool = False,
        **sizes: Any,
    ) -> None:
        """Rows of the parts "all" (with the codec) and "lm" (without it) with so many slots; `sizes`: more
        of `EngineOptions`."""
        gc.collect()
        self.bench.clean()
        device = self.bench.device
        each = -(-self.load.positions // PAGE_SIZE)
        asked = NativeModelOptions(
            slots=slots, pages=slots * each, page_size=PAGE_SIZE, max_context=MAX_CONTEXT
        )
        options = engine_options(
            self.model.config, self.model.device, self.model.dtype, asked, wide=not reproducible
        )
        options = replace(options, **self.overrides, **sizes)
        options = replace(options, pages=(slots + options.spare_slots) * each)
        began = time.perf_counter()
        executor = Watched(
            open_executor(self.model, options, reproducible=reproducible and self.bench.on_gpu)
        )
        opened = time.perf_counter() - began
        pool = requests(
            self.model,
            self.load,
            max(4 * slots, 64),
            min(MAX_TOKENS, options.pages * PAGE_SIZE - 64 - self.load.more_text),
        )
        context = mean_context((len(request.prompt), frames) for request, frames in pool)
        decoder = self.fixed_decoder() if reproducible else self.decoder
        for part in parts:
            loop = ClosedLoop(executor, options, pool, decoder if part == "all" else None)
            try:
                settled = loop.settle(2 * slots + 8, SETTLE_SECONDS)
                row: Row = {
                    "size": self.size,
                    "part": part,
                    "slots": slots,
                    "frames_per_turn": options.frames_per_turn,
                }
                row |= {"admit_turns": options.admit_turns, "settled": settled}
                row |= {
                    "reproducible": reproducible,
                    "more_text": self.load.more_text,
                    "open_s": opened,
                    "context": context,
                    "spare_slots": options.spare_slots,
                    **sizes,
                }
                row |= loop.measure(self.load.seconds, windows) | memory(device)
                row["floor_ms"] = floor_ms(part, self.size, slots, context, self.limits)
                row["floor_share"] = share(row)
                if sampled:
                    row["host_profile"] = profile(("engine", "codec-stage"), min(2.0, self.load.seconds))
            finally:
                loop.close()
            self.bench.add(row)

    def fixed_decoder(self) -> CodecDecoder:
        """The decoder of reproducible mode."""
        chosen = self.bench.options
        device, dtype = self.bench.device, self.decoder.dtype
        fused = fuses_front(device, dtype, True, chosen.codec_rows)
        made = dummy_decoder(self.decoder.config, device, dtype, reproducible=True, fused_front=fused)
        made.prepare_utterances(chosen.codec_rows)
        return made

    def codec(self, tiny: bool) -> None:
        """The row of the codec alone."""
        pool = requests(self.model, self.load, 16 if tiny else 1024)
        row: Row = {
            "part": "codec",
            "size": "",
            **codec_alone(self.decoder, pool, self.load.seconds, 8 if tiny else 512),
        }
        row |= {**memory(self.bench.device), "floor_ms": floor_ms("codec", self.size, 1, 0, self.limits)}
        self.bench.add({**row, "floor_share": share(row)})


def share(row: dict[str, Any]) -> float | None:
    """The floor's part of the time that a frame took."""
    return row["floor_ms"] / row["ms_per_frame"] if row.get("floor_ms") and row.get("ms_per_frame") else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The short table; a row without a figure leaves its place empty."""

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    titles = f"{'RTFx':>11}{'frames/s':>10}{'ms/frame':>10}{'floor ms':>10}{'of floor':>9}{'spread':>8}{'GPU GiB':>9}"
    lines = [f"{'size':5}{'part':14}{'slots':>6}{titles}"]
    for row in rows:
        if "audio_s_per_s" not in row:
            continue
        part = (
            row["part"]
            + (" same bits" if row.get("reproducible") else "")
            + (" long" if row.get("more_text") else "")
        )
        lines.append(
            f"{row.get('size', ''):5}{part:14}{row.get('slots') or '':>6}{row['audio_s_per_s']:11,.0f}{row['frames_per_s']:10,.0f}"
            f"{cell(row.get('ms_per_frame'), 10, '.3f')}{cell(row.get('floor_ms'), 10, '.3f')}{cell(row.get('floor_share'), 9, '.0%')}"
            f"{cell(row.get('spread'), 8, '.1%')}{cell(row.get('peak_gib'), 9, '.1f')}"
        )
    return "\n".join(lines)


def headlines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say together: against the reference at the best of its batches that were measured, and
    what reproducible mode costs."""
    lines: list[str] = []
    for size in dict.fromkeys(row.get("size") for row in rows if row.get("size")):
        ours = [
            row
            for row in rows
            if row.get("size") == size
            and row["part"] == "all"
            and "audio_s_per_s" in row
            and not row.get("more_text")
        ]
        theirs = [
            row
            for row in rows
            if row.get("size") == size and row["part"] == "reference" and "audio_s_per_s" in row
        ]
        free = {row["slots"]: row["audio_s_per_s"] for row in ours if not row["reproducible"]}
        if free and theirs:
            best, other = max(free.values()), max(row["audio_s_per_s"] for row in theirs)
            lines.append(
                f"{size}: {best:,.0f} RTFx, the reference at the best batch measured {other:,.0f}: {best / other:.1f} times"
            )
        for row in ours:
            if row["reproducible"] and free.get(row["slots"]):
                lines.append(
                    f"{size}, {row['slots']} slots: reproducible mode keeps {row['audio_s_per_s'] / free[row['slots']]:.0%}"
                )
    return lines


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="*", default=["0b6", "1b7"])
    made.add_argument("--slots", nargs="*", type=int, default=[512, 128])
    made.add_argument("--parts", nargs="*", default=["all", "lm"], choices=("all", "lm"))
    made.add_argument(
        "--sweep",
        nargs="*",
        type=int,
        default=[],
        help="more numbers of slots, the whole only, in short windows",
    )
    made.add_argument(
        "--reproducible",
        nargs="*",
        type=int,
        default=[],
        help="numbers of slots for the whole in reproducible mode",
    )
    made.add_argument("--seconds", type=float, default=3.0, help="seconds of each window")
    made.add_argument("--windows", type=int, default=5)
    made.add_argument("--turns", type=int, help="frames a scheduling turn, instead of the engine's choice")
    made.add_argument(
        "--admit-turns",
        type=int,
        help="turns that newcomers may wait for company, instead of the engine's choice",
    )
    made.add_argument(
        "--codec-rows", type=int, default=0, help="rows of the codec's continuous batch; 0: gathered batches"
    )
    made.add_argument("--codec-plain-front", action="store_true", help="the codec's front on single ops")
    made.add_argument("--codec", action="store_true", help="measure the codec alone first")
    made.add_argument(
        "--long-prompts",
        nargs="*",
        type=int,
        default=[],
        help=f"numbers of slots, the whole with {MORE_TEXT} positions more in every prompt",
    )
    made.add_argument(
        "--also",
        nargs="*",
        type=Path,
        default=[],
        help="JSON files whose rows stand first: the reference's, other runs' of this",
    )
    options = made.parse_args()
    load = Load(0.3, 0.8, 0.5) if options.tiny else Load(3.0, 15.0, options.seconds)
    sizes, windows = (["tiny"], 2) if options.tiny else (options.sizes, options.windows)
    limits = {
        "shortest_s": load.shortest,
        "longest_s": load.longest,
        "window_s": load.seconds,
        "windows": windows,
    }
    bench = Bench("qwen3_tts", options, load=limits, switch_ms=serves())
    config = TINY_CODEC if options.tiny else PUBLISHED_CODEC
    decoder = dummy_decoder(
        config, bench.device, bench.dtype, fused_front=False if options.codec_plain_front else None
    )
    decoder.prepare_utterances(options.codec_rows)
    for path in options.also:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        for row in rows:
            if row["size"] in sizes:
                bench.add(row)
    for size in sizes:
        work = Throughput(bench, size, decoder, load)
        if options.codec and size == sizes[0]:
            work.codec(options.tiny)
        for slots in options.slots:
            work.measure(slots, options.parts, windows, sampled=True)
        for slots in options.reproducible:
            work.measure(slots, ["all"], windows, reproducible=True)
        for slots in options.sweep:
            work.measure(slots, ["all"], 2)
        work.load = replace(load, more_text=MORE_TEXT)
        for slots in options.long_prompts:
            work.measure(slots, ["all"], windows)
        del work
    bench.keep(headlines=headlines(bench.rows))
    print(table(bench.rows))
    print("\n".join(bench.found["headlines"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

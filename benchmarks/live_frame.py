"""What a live frame costs beyond the table's: frames of 512 rows on the engine's executor, one thing changed at a time, with clocks.

    NIGHTJAR_COMMIT=... python -m benchmarks.live_frame [--size 0b6] [--limit 60] [--json FILE]
    python -m benchmarks.live_frame --device cpu --tiny

`table`: the frame's kernels as one graph at one context, as `benchmarks.lm_gpu` times them, and what `benchmarks.roofline` predicts.
`frame`: the same on the executor with the weights, slots and pages of the engine, in turns of two frames of which one is under way while
the next is started, at the mean context of utterances of 3 to 15 s. Each further row differs from the first in what its name says;
`all together` has everything that a live engine has. `live`: the engine itself in a closed loop without the codec (beside the codec:
`benchmarks.side_by_side`). Times are the device's, from the start of a turn to its end, as the engine's own figures are (`stream_frames`).
Each row has the clock and the power of its time. JSON goes to $OUT (or the working folder) as live_frame.json.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import Bench, GpuUse, captured, event_us, parser
from benchmarks.qwen3_load import Load, requests
from benchmarks.qwen3_tts import MAX_CONTEXT, PAGE_SIZE, Throughput
from benchmarks.roofline import device_named, frame_ms, mean_context, qwen3_frame
from benchmarks.side_by_side import lm_frame
from kernels.dummy import LARGE, SMALL, TINY, Maker
from kernels.sampler import DrawFlags
from pipelines.engine.executor import FrameExecutor, FrameSettings, PrefillRun
from pipelines.engine.opening import open_executor
from pipelines.engine.state import Placement, SamplingParams
from pipelines.qwen3_tts.dummy import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder
from pipelines.qwen3_tts.execution import engine_options

#: Frames between two placements of all rows, and positions of a prompt that is prefilled.
FRAMES, PROMPT = 32, 36
#: Turns from one prefill to the next, as the engine lets newcomers in.
_ADMIT_TURNS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One row: how its frames differ from those of the first."""

    name: str
    #: Contexts as a live engine has them, instead of their mean for all.
    ragged: bool = False
    #: Pages of a row anywhere, instead of one after the other.
    scattered: bool = False
    #: The rows of a turn in another order than those of the turn before, so that their numbers are sent.
    reordered: bool = False
    #: Prompts that are prefilled in every fourth turn; their own time does not count.
    prompts: int = 0
    #: Turns under way while the next is started.
    ahead: int = 1
    frames_per_turn: int = 2
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(min_new_tokens=1 << 30))
    rounds: int = 3


def cases(prompts: int) -> list[Case]:
    """The first is what all others are compared with; `prompts`: newcomers of a prefill."""
    first = Case("as in the table")
    drawn = first.sampling
    live = replace(first, ragged=True, scattered=True, reordered=True, prompts=prompts)
    return [
        first,
        replace(first, name="ragged contexts", ragged=True),
        replace(first, name="scattered pages", scattered=True),
        replace(first, name="other rows each turn", reordered=True),
        replace(first, name="prefill between", prompts=prompts),
        replace(first, name="the device waits for the host", ahead=0),
        replace(first, name="four frames a turn", frames_per_turn=4),
        replace(first, name="no penalty", sampling=replace(drawn, repetition_penalty=1.0)),
        replace(first, name="top_p 0.9", sampling=replace(drawn, top_p=0.9, residual_top_p=0.9)),
        replace(first, name="greedy", sampling=replace(drawn, temperature=0.0, residual_temperature=0.0)),
        replace(first, name="for seconds", rounds=12),
        replace(live, name="all together"),
        replace(live, name="all together, for seconds", rounds=12),
        replace(first, name="as in the table, again"),
    ]


class Frames:
    """The executor of the engine, and frames on it."""

    def __init__(self, bench: Bench, work: Throughput, rows: int) -> None:
        self.bench, self.rows = bench, rows
        model, load = work.model, work.load
        options = engine_options(
            model.config, model.device, model.dtype, slots=rows, pages=rows * -(-load.positions // PAGE_SIZE), page_size=PAGE_SIZE,
            max_context=MAX_CONTEXT,
        )  # fmt: skip
        self.executor: FrameExecutor = open_executor(model, options)
        lengths = [(len(request.prompt), frames) for request, frames in requests(model, load, 4 * rows)]
        self.context = round(mean_context(lengths))
        self._ragged = ragged(lengths, rows)

    def measure(self, case: Case) -> list[float]:
        """Milliseconds of a frame in every turn, at this context in the middle of them."""
        found: list[float] = []
        for number in range(case.rounds):
            dice = random.Random(number)
            pages = self._place(case, dice)
            try:
                found += self._turns(case, dice)
            finally:
                self.executor.kv.give_back(pages)
        return found

    def _place(self, case: Case, dice: random.Random) -> list[int]:
        """Places all rows; the pages that they have."""
        kv, state = self.executor.kv, self.executor.state
        contexts = [max(one - FRAMES // 2, 1) for one in (self._ragged if case.ragged else [self.context] * self.rows)]
        each = [kv.pages_for(context + FRAMES + 1) for context in contexts]
        taken = kv.take(sum(each))
        if taken is None:
            raise ValueError(f"{sum(each)} pages do not fit {kv.pages}")
        taken.sort()
        if case.scattered:
            dice.shuffle(taken)
        hidden, none, used = torch.zeros_like(state.inputs[0]), np.zeros(0, np.int64), 0
        placed: list[Placement] = []
        for row, (context, count) in enumerate(zip(contexts, each)):
            placed.append(Placement(row, taken[used : used + count], row, case.sampling, none, hidden, context))
            used += count
        state.place(placed)
        return taken

    def _turns(self, case: Case, dice: random.Random) -> list[float]:
        slots, count, drawn = list(range(self.rows)), case.frames_per_turn, case.sampling
        flags = [
            DrawFlags.of([one])
            for one in (
                (drawn.temperature, drawn.top_k, drawn.top_p),
                (drawn.residual_temperature, drawn.residual_top_k, drawn.residual_top_p),
            )
        ]
        longest = (max(self._ragged) if case.ragged else self.context) + FRAMES + 1
        settings, spans, under_way = FrameSettings(longest, *flags), [], []
        embeddings = self.executor.state.inputs.new_zeros(PROMPT, self.executor.state.inputs.shape[1])
        for turn in range(FRAMES // count):
            if case.prompts and turn % _ADMIT_TURNS == 0:
                self.executor.prefill([PrefillRun(row, 0, embeddings) for row in range(case.prompts)])
            if case.reordered:
                dice.shuffle(slots)
            begin = self._mark()
            under_way.append(self.executor.frames(slots, count, settings))
            spans.append((begin, self._mark()))
            if len(under_way) > case.ahead:
                under_way.pop(0).result()
        for pending in under_way:
            pending.result()
        self.bench.wait()
        return [_milliseconds(begin, end) / count for begin, end in spans]

    def _mark(self) -> Any:
        if not self.bench.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _milliseconds(begin: Any, end: Any) -> float:
    return 1000 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def ragged(lengths: Sequence[tuple[int, int]], rows: int) -> list[int]:
    """Contexts of so many rows at one moment, for utterances of (prompt positions, frames): long ones are under way more often."""
    dice = random.Random(0)
    chosen = dice.choices(lengths, [frames for _, frames in lengths], k=rows)
    return [prompt + dice.randrange(frames) for prompt, frames in chosen]


class Rows:
    """The rows of one run."""

    def __init__(self, bench: Bench, rows: int) -> None:
        self.bench, self.rows, self.first = bench, rows, 0.0

    def add(self, part: str, name: str, ms: float, clocks: dict[str, float], **more: Any) -> None:
        self.first = self.first or (ms if part == "frame" else 0.0)
        over = {"over_ms": ms - self.first} if self.first else {}
        self.bench.add({"part": part, "name": name, "batch": self.rows, "ms": ms, **over, **clocks, **more})

    @torch.inference_mode()
    def table(self, size: str, context: int) -> None:
        """The frame's kernels alone; and what is predicted of them."""
        maker, on_gpu = Maker(str(self.bench.device), self.bench.dtype), self.bench.on_gpu
        frame = lm_frame(maker, {"0b6": SMALL, "1b7": LARGE}.get(size, TINY), self.rows, context, on_gpu)
        use = GpuUse(self.bench.device)
        ms = event_us(captured(frame).replay, 41) / 1000 if on_gpu else self.bench.milliseconds(frame, 1)
        use.stop()
        device = device_named(self.bench.found["device"])
        predicted = {} if device is None or size == "tiny" else {"predicted_ms": frame_ms(qwen3_frame(size), self.rows, context, device)}
        self.add("table", f"context {context}", ms, use.clocks(), **predicted)

    def case(self, frames: Frames, case: Case) -> None:
        """One row on the executor, after turns that do not count."""
        if self.bench.on_gpu:
            frames.measure(replace(case, rounds=1))
        else:
            case = replace(case, rounds=1)
        use = GpuUse(self.bench.device)
        found = frames.measure(case)
        use.stop()
        half = len(found) // 2
        halves = {"first_half_ms": statistics.median(found[:half]), "second_half_ms": statistics.median(found[half:])}
        self.add("frame", case.name, statistics.mean(found), use.clocks(), median_ms=statistics.median(found), **halves)

    def live(self, work: Throughput) -> None:
        """The engine in a closed loop, and its own account of its frames."""
        work.measure(self.rows, ["lm"], 2)
        row = work.bench.rows[-1]
        if "stream_frames" in row:
            frames = row["turns"] * row["frames_per_turn"]
            ms = 1000 * row["stream_frames"] * row["seconds"] / frames
            clocks = row.get("clocks", {})
            self.add("live", "LM alone", ms, clocks, running=row["running"], context=row["context"], ms_per_frame=row["ms_per_frame"])


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The short table."""
    found = [f"{'':38}{'ms':>8}{'more':>8}{'MHz':>7}{'W':>6}"]
    for row in rows:
        if "name" in row:
            more = f"{row['over_ms']:8.2f}" if "over_ms" in row else " " * 8
            clocks = f"{row['mhz']:7.0f}{row['watts']:6.0f}" if "mhz" in row else ""
            predicted = f"  predicted {row['predicted_ms']:.2f}" if "predicted_ms" in row else ""
            found.append(f"{row['part'] + ', ' + row['name']:38}{row['ms']:8.2f}{more}{clocks}{predicted}")
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--size", default="0b6", choices=("0b6", "1b7"))
    made.add_argument("--rows", type=int, default=512)
    made.add_argument("--limit", type=float, default=60.0, help="seconds after which no row is begun")
    options = made.parse_args()
    # What a benchmark of the whole engine may be told; this one leaves it to the engine.
    options.turns = options.admit_turns = None
    began = time.monotonic()
    tiny = options.tiny
    size, rows, load = ("tiny", 4, Load(0.3, 0.8, 0.3)) if tiny else (options.size, options.rows, Load(3.0, 15.0, 1.5))
    bench = Bench("live_frame", options, rows_of_a_frame=rows)
    work = Throughput(bench, size, dummy_decoder(TINY_CODEC if tiny else PUBLISHED_CODEC, bench.device, bench.dtype), load)
    left_out = _measure(Rows(bench, rows), work, began + options.limit)
    bench.keep(left_out=left_out)
    print("\n".join(lines(bench.rows)))
    print(f"no time was left for: {', '.join(left_out) or 'nothing'}")
    print(f"faults: {', '.join(bench.faults) or 'none'}")
    return 1 if bench.faults else 0


def _measure(rows: Rows, work: Throughput, until: float) -> list[str]:
    """All rows that there is time for; the names of the others."""
    frames = Frames(rows.bench, work, rows.rows)
    steps = [(f"table, {context}", partial(rows.table, work.size, context)) for context in (frames.context, 300)]
    steps += [(f"frame, {case.name}", partial(rows.case, frames, case)) for case in cases(min(32, rows.rows))]
    left_out: list[str] = []
    for name, step in [*steps, ("live", partial(rows.live, work))]:
        if time.monotonic() < until:
            rows.bench.attempt(name, step)
        else:
            left_out.append(name)
    return left_out


if __name__ == "__main__":
    sys.exit(main())

"""The persistent kernels on a GPU: their codes, times and speech beside the graph's, and frames with delays.

    python -m benchmarks.megakernel [--part codes,times,soak,rtf,streams] [--rows 1,2] [--frames 100000] [--gaps 900,1200]
    python -m benchmarks.megakernel --part rtf --device cpu --tiny

All but `rtf` and `streams` once for each of `--kinds`: `predictor`, and `whole`, whose talker's layers
have a persistent kernel too. `codes`: from one state the graph's frame, this one's and the one of single
PyTorch ops, over and over: which share of their codes is equal. `times`: the predictor and the whole frame
at context 300, each as a replayed graph, ours for several pauses between the copies of the weight stream.
`soak`: launches whose blocks stumble at random, which must all give the same codes. `rtf`: one utterance
after the other through a pipeline with each executor, in turn: text in, samples out. `streams`: first
chunks of one and of two listeners. Sizes are those of 0.6B, with `--large` of 1.7B for the parts without a
pipeline.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import Bench, graph_us, numbers, parser
from benchmarks.random_checkpoint import FRAMES_PER_SECOND, write_checkpoint
from benchmarks.random_models.frames import LARGE, SMALL, Maker, Shape
from benchmarks.speech_load import first_chunks
from kernels import lm_persistent
from kernels.frame import FrameTensors, StateTensors
from kernels.lm_frame import FusedFrame, PersistentFrame, plan_for
from kernels.lm_persistent import GAP, Predictor, PredictorRun, Talker, Trial
from kernels.reference import run_frame
from kernels.sampler import DrawFlags
from pipelines.registry import open_pipeline
from pipelines.request import Generation, Message, Pipeline, SynthesisRequest, submit

CONTEXT = 300
#: Milliseconds of the predictor of one row: the graph's, and what this one aims to be below.
TODAY, AIM = 1.25, 1.15
#: Frames that are compared, and how much smaller than between graph and single ops the share of equal codes
#: may be.
COMPARED, SLACK = 80, 0.03
#: Launches of the soak between two looks at what they made.
_LOOK = 1000
#: Turns of the executors in `streams`.
_ROUNDS = 4
#: Seconds of the utterances of `rtf`: the ones that are judged, and shorter ones, which show what a frame
#: more takes.
SPOKEN, SHORT = 10.0, 2.0
_TINY_SPOKEN, _TINY_SHORT = 0.8, 0.4
_TEXT = (
    "The birch canoe slid on the smooth planks, and the boy was there when the sun rose over the quiet water."
)
_ANY_DRAWS = DrawFlags(1 << 20, any_top_p=True, all_greedy=False)


class Setting:
    """Weights, and slots at context 300 for one number of rows."""

    def __init__(
        self,
        bench: Bench,
        shape: Shape,
        weights: FrameTensors,
        predictor: Predictor,
        talker: Talker | None,
        rows: int,
    ) -> None:
        maker = Maker(str(bench.device), torch.bfloat16, rows)
        self.weights, self.predictor, self.talker, self.count = weights, predictor, talker, rows
        self.plan = plan_for(rows, shape.hidden)
        self.kind = "predictor" if talker is None else "whole"
        contexts = torch.full((rows,), CONTEXT, device=bench.device)
        self.state = maker.state(shape, rows, rows * 9 + 1, 64, contexts)
        self.k, self.v = maker.caches(shape, rows * 9 + 1, 64)
        self.rows = torch.arange(rows, device=bench.device)
        self.codes = torch.zeros(rows, shape.codebooks, dtype=torch.int64, device=bench.device)
        self.flags = torch.zeros(rows, dtype=torch.uint8, device=bench.device)

    def graph(self, state: StateTensors) -> FusedFrame:
        return FusedFrame(self.weights, state, self.k, self.v, self.count, self.plan)

    def ours(self, state: StateTensors, gap: int = GAP, trial: Trial | None = None) -> PersistentFrame:
        behind = PredictorRun(self.predictor, self.count, gap=gap, trial=trial)
        return PersistentFrame(behind, state, self.k, self.v, self.plan, self.talker)

    def made(self, frame: FusedFrame) -> Tensor:
        frame.run(self.rows, self.codes, self.flags)
        return self.codes.clone()


def copied(state: StateTensors) -> StateTensors:
    """A state that another frame may advance."""
    names = [name for name in StateTensors.__slots__ if isinstance(getattr(state, name), Tensor)]
    return replace(state, **{name: getattr(state, name).clone() for name in names})


def restore(state: StateTensors, before: StateTensors) -> None:
    for name in ("inputs", "positions", "frames", "seen"):
        getattr(state, name).copy_(getattr(before, name))


def equal_share(one: list[Tensor], other: list[Tensor]) -> float:
    """Of the codes whose earlier ones of the frame are equal too, those that are: what differs feeds the
    ones behind."""
    same = torch.stack(one) == torch.stack(other)
    alike = same.cumprod(-1)[..., :-1].bool()
    return float(same[..., 1:][alike].double().mean())


def compare_codes(bench: Bench, setting: Setting) -> None:
    """Adds a row; raises AssertionError when codes agree less than rounding explains."""
    main, mine, single = setting.state, copied(setting.state), copied(setting.state)
    graph, ours = setting.graph(main), setting.ours(mine)
    found: tuple[list[Tensor], ...] = ([], [], [])
    before = copied(main)
    for _ in range(COMPARED):
        before = copied(main)
        found[0].append(setting.made(graph))
        restore(mine, before)
        found[1].append(setting.made(ours))
        assert not int(setting.flags.max()) & 4, ours.behind.fault
        restore(single, before)
        made = run_frame(
            setting.weights, single, setting.k, setting.v, setting.rows, CONTEXT + 64, _ANY_DRAWS, _ANY_DRAWS
        )
        found[2].append(made.codes)
        main.positions.copy_(before.positions)
    again: list[Tensor] = []
    for _ in range(3):
        restore(mine, before)
        again.append(setting.made(ours))
    shares = equal_share(found[0], found[1]), equal_share(found[0], found[2])
    same_bits = all(torch.equal(one, found[1][-1]) for one in again)
    bench.add(
        {
            "part": "codes",
            "kind": setting.kind,
            "rows": setting.count,
            "graph_and_ours": shares[0],
            "graph_and_single_ops": shares[1],
            "same_again": same_bits,
        }
    )
    assert same_bits, "one frame gave different codes"
    assert shares[0] >= shares[1] - SLACK, shares


def time_frames(bench: Bench, setting: Setting, gaps: list[int]) -> None:
    before = copied(setting.state)
    depth = setting.weights.depth
    assert depth is not None

    def timed(name: str, frame: FusedFrame, **more: int) -> None:
        def behind() -> None:
            frame._behind(depth, setting.rows, setting.codes, setting.flags)

        def whole() -> None:
            setting.state.positions.copy_(before.positions)
            frame.run(setting.rows, setting.codes, setting.flags)

        setting.made(frame)
        row = {
            "part": "times",
            "kind": setting.kind,
            "rows": setting.count,
            "frame": name,
            **more,
            "predictor_ms": graph_us(behind, 1, 41) / 1000,
        }
        bench.add({**row, "frame_ms": graph_us(whole, 1, 41) / 1000})

    timed("graph", setting.graph(setting.state))
    for gap in gaps:
        timed("megakernel", setting.ours(setting.state, gap), gap=gap)
    timed("graph again", setting.graph(setting.state))


def soak(bench: Bench, setting: Setting, frames: int) -> None:
    """Launches with delays from one state: those of the talker where it has a kernel, then those of the
    predictor."""
    before, state = copied(setting.state), setting.state
    plain = setting.ours(state)
    wanted = setting.made(plain)
    restore(state, before)
    x = torch.zeros(setting.count, setting.weights.backbone.hidden, dtype=torch.bfloat16, device=bench.device)
    plain._backbone(setting.rows, x)
    wanted_x, ours = (
        x.clone(),
        setting.ours(state, trial=Trial(seed=setting.count, delay=bench.options.delay)),
    )
    wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    depth = setting.weights.depth
    assert depth is not None
    setting.made(ours)
    done = 0
    while done < frames and ours.behind.fault is None and not int(wrong):
        turn = min(_LOOK, frames - done)
        for _ in range(turn):
            restore(state, before)
            if ours.talker is not None:
                ours._backbone(setting.rows, x)
                wrong += (x != wanted_x).sum()
            setting.codes[:, 1:] = -1
            ours._behind(depth, setting.rows, setting.codes, setting.flags)
            wrong += (setting.codes != wanted).sum()
        done += turn
    fault = ours.behind.fault
    about = {"part": "soak", "kind": setting.kind, "rows": setting.count, "naps": bench.options.delay}
    bench.add({**about, "frames": done, "wrong": int(wrong), "fault": fault})
    assert not int(wrong)
    assert fault is None, fault


def speech_times(pipeline: Pipeline, seconds: float, index: int) -> tuple[float, float]:
    """Seconds that an utterance of so many takes, from its text to its samples, and those that it has."""
    request = SynthesisRequest(
        f"{seconds:g}-{index}", (Message("user", "text", _TEXT),), Generation(max_seconds=seconds), seed=index
    )
    began = time.perf_counter()
    speech = submit(pipeline, request).result()
    return time.perf_counter() - began, speech.duration_ms / 1000


def speech_row(
    asked: str, opened: str, long: list[tuple[float, float]], short: list[tuple[float, float]], frame: float
) -> dict[str, Any]:
    """A row of `rtf` from pairs (took, spoken) of both lengths; `frame`: seconds of speech in one.

    frame_ms: what a frame more takes, its share of the codec too. rest_ms: what a speech takes beside its
    frames. rtf: seconds of speech in a second, of the whole way.
    """
    rates = [spoken / took for took, spoken in long]
    frames = (long[0][1] - short[0][1]) / frame
    took, brief = (statistics.median(times[0] for times in found) for found in (long, short))
    each = (took - brief) / frames
    return {
        "part": "rtf", "executor": asked, "opened": opened, "frame_ms": 1000 * each, "rest_ms": 1000 * (took - each * long[0][1] / frame),
        "rtf": statistics.median(rates), "rtf_least": min(rates), "rtf_most": max(rates), "spoken_s": long[0][1], "utterances": len(long),
    }  # fmt: skip


def speak(bench: Bench, executors: list[str], utterances: int) -> None:
    """Adds a row for each executor, whose utterances take turns."""
    tiny = bench.options.tiny
    lm_persistent.GAP = bench.options.speech_gap
    size, long, short = ("tiny", _TINY_SPOKEN, _TINY_SHORT) if tiny else ("0b6", SPOKEN, SHORT)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        write_checkpoint(folder, size, bench.device, [_TEXT], long)
        pipelines: dict[str, Pipeline] = {}
        for name in executors:
            device = str(bench.device)
            pipelines[name] = open_pipeline(
                str(folder), executor=name, device=device, slots=1, max_context=1024, keep_unfinished=True
            )
        found: dict[tuple[str, float], list[tuple[float, float]]] = {}
        for turn in range(-2, utterances):  # the first two make whatever was not made yet
            for seconds in (long, short):
                for name, pipeline in pipelines.items():
                    times = speech_times(pipeline, seconds, turn + 2)
                    if turn >= 0:
                        found.setdefault((name, seconds), []).append(times)
        for name, pipeline in pipelines.items():
            bench.add(
                speech_row(
                    name, pipeline.info.executor, found[name, long], found[name, short], 1 / FRAMES_PER_SECOND
                )
            )
            pipeline.close()


def listen(bench: Bench, executors: list[str], streams: int) -> None:
    """Adds a row for each executor and for one and two streams at a time: first chunks, and how long a
    stream takes."""
    tiny = bench.options.tiny
    size, seconds = ("tiny", _TINY_SHORT) if tiny else ("0b6", SHORT)

    def request(index: int) -> SynthesisRequest:
        return SynthesisRequest(
            f"stream-{index}", (Message("user", "text", _TEXT),), Generation(max_seconds=seconds), seed=index
        )

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        write_checkpoint(folder, size, bench.device, [_TEXT], seconds)
        options = {
            "device": str(bench.device),
            "slots": 2,
            "streams": 2,
            "max_context": 1024,
            "keep_unfinished": True,
        }
        pipelines = {name: open_pipeline(str(folder), executor=name, **options) for name in executors}
        found: dict[tuple[str, int], list[float]] = {}
        took: dict[tuple[str, int], float] = {}
        for turn in range(-1, _ROUNDS):  # the first makes whatever was not made yet
            for name, pipeline in pipelines.items():
                for at_once in (1, 2):
                    began = time.perf_counter()
                    waits = first_chunks(pipeline, at_once, streams if turn >= 0 else at_once, request)
                    if turn >= 0:
                        found.setdefault((name, at_once), []).extend(waits)
                        took[name, at_once] = took.get((name, at_once), 0.0) + time.perf_counter() - began
        for (name, at_once), waits in found.items():
            p50, p95 = np.percentile(waits, (50, 95)).tolist()
            each = 1000 * at_once * took[name, at_once] / (_ROUNDS * streams)
            bench.add(
                {
                    "part": "streams",
                    "executor": name,
                    "opened": pipelines[name].info.executor,
                    "at_once": at_once,
                    "streams": len(waits),
                }
                | {
                    "p50_ms": p50,
                    "p95_ms": p95,
                    "longest_ms": max(waits),
                    "spoken_s": seconds,
                    "stream_ms": each,
                }
            )
        for pipeline in pipelines.values():
            pipeline.close()


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--part", default="codes,times,soak,rtf")
    made.add_argument(
        "--large", action="store_true", help="the talker of 1.7B, whose layers have no persistent kernel"
    )
    made.add_argument("--rows", type=numbers, default=[1, 2])
    made.add_argument(
        "--frames", type=int, default=100_000, help="launches of the soak for each number of rows"
    )
    made.add_argument(
        "--delay", type=int, default=16, help="naps of 100 ns of a block that stumbles, at most"
    )
    made.add_argument(
        "--gaps", type=numbers, default=[GAP, 900, 1000, 1200, 1300, 1400], help="clocks between two copies"
    )
    made.add_argument("--executors", default="graph,megakernel", help="those of `rtf` and `streams`")
    made.add_argument("--kinds", default="predictor,whole")
    made.add_argument("--speech-gap", type=int, default=GAP, help="clocks between two copies in `rtf`")
    made.add_argument(
        "--streams",
        type=int,
        default=25,
        help="streams of `streams` for each executor, number at once and turn of four",
    )
    made.add_argument(
        "--utterances", type=int, default=11, help="utterances of `rtf` for each executor and length"
    )
    return run(made.parse_args())


def run(options: argparse.Namespace) -> int:
    bench = Bench("megakernel", options, today_ms=TODAY, aim_ms=AIM)
    parts = options.part.split(",")
    if bench.on_gpu:
        measure_kernel(bench, [part for part in parts if part not in ("rtf", "streams")])
    elif not {"rtf", "streams"}.issuperset(parts):
        print("the persistent kernel needs a GPU; its tests run it on a CPU in an emulator")
    executors = options.executors.split(",") if bench.on_gpu else ["eager", "auto"]
    if "rtf" in parts and (bench.on_gpu or options.tiny):
        bench.attempt("rtf", lambda: speak(bench, executors, options.utterances))
    if "streams" in parts and (bench.on_gpu or options.tiny):
        bench.attempt("streams", lambda: listen(bench, executors, options.streams))
    return bench.end()


@torch.inference_mode()
def measure_kernel(bench: Bench, parts: list[str]) -> None:
    """The parts that need no pipeline."""
    options = bench.options
    work: dict[str, Callable[[Setting], None]] = {
        "codes": lambda setting: compare_codes(bench, setting),
        "times": lambda setting: time_frames(bench, setting, options.gaps),
        "soak": lambda setting: soak(bench, setting, options.frames),
    }
    if not parts:
        return
    shape = LARGE if options.large else SMALL
    weights = Maker(str(bench.device), torch.bfloat16).frame(shape)
    predictor = Predictor(weights)
    for kind in ["predictor"] if options.large else options.kinds.split(","):
        talker = Talker(weights) if kind == "whole" else None
        for part in parts:
            for rows in options.rows:
                made = partial(Setting, bench, shape, weights, predictor, talker, rows)
                bench.attempt(f"{kind} {part} {rows}", lambda part=part, made=made: work[part](made()))


if __name__ == "__main__":
    sys.exit(main())

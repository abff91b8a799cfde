"""The persistent kernel of the code predictor on a GPU: its codes and its times beside the graph's, and frames with delays.

    python -m benchmarks.megakernel [--part codes,times,soak] [--rows 1,2] [--frames 100000] [--gaps 0,600,900]

`codes`: from one state the graph's frame, this one's and the one of single PyTorch ops, over and over: which share of their codes is
equal. `times`: the predictor and the whole frame at context 300, each as a replayed graph, ours for several pauses between the copies of
the weight stream. `soak`: launches whose blocks stumble at random, which must all give the same codes. Sizes are those of Qwen3-TTS 0.6B.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu import Bench, graph_us, numbers, parser
from kernels.dummy import SMALL, Maker
from kernels.frame import FrameTensors, StateTensors
from kernels.lm_frame import FusedFrame, plan_for
from kernels.lm_persistent import GAP, PersistentFrame, Predictor, PredictorRun, Trial
from kernels.reference import run_frame
from kernels.sampler import DrawFlags

CONTEXT = 300
#: Milliseconds of the predictor of one row: the graph's, and what this one aims to be below.
TODAY, AIM = 1.25, 1.15
#: Frames that are compared, and how much smaller than between graph and single ops the share of equal codes may be.
COMPARED, SLACK = 200, 0.03
#: Launches of the soak between two looks at what they made.
_LOOK = 1000
_ANY_DRAWS = DrawFlags(1 << 20, any_top_p=True, all_greedy=False)


class Setting:
    """Weights, and slots at context 300 for one number of rows."""

    def __init__(self, bench: Bench, weights: FrameTensors, predictor: Predictor, rows: int) -> None:
        maker = Maker(str(bench.device), torch.bfloat16, rows)
        self.weights, self.predictor, self.count = weights, predictor, rows
        contexts = torch.full((rows,), CONTEXT, device=bench.device)
        self.state = maker.state(SMALL, rows, rows * 9 + 1, 64, contexts)
        self.k, self.v = maker.caches(SMALL, rows * 9 + 1, 64)
        self.rows = torch.arange(rows, device=bench.device)
        self.codes = torch.zeros(rows, SMALL.codebooks, dtype=torch.int64, device=bench.device)
        self.flags = torch.zeros(rows, dtype=torch.uint8, device=bench.device)

    def graph(self, state: StateTensors) -> FusedFrame:
        return FusedFrame(self.weights, state, self.k, self.v, self.count, plan_for(self.count))

    def ours(self, state: StateTensors, gap: int = GAP, trial: Trial | None = None) -> PersistentFrame:
        behind = PredictorRun(self.predictor, self.count, gap=gap, trial=trial)
        return PersistentFrame(behind, state, self.k, self.v, plan_for(self.count))

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
    """Of the codes whose earlier ones of the frame are equal too, those that are: what differs feeds the ones behind."""
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
        made = run_frame(setting.weights, single, setting.k, setting.v, setting.rows, CONTEXT + 64, _ANY_DRAWS, _ANY_DRAWS)
        found[2].append(made.codes)
        main.positions.copy_(before.positions)
    again: list[Tensor] = []
    for _ in range(3):
        restore(mine, before)
        again.append(setting.made(ours))
    shares = equal_share(found[0], found[1]), equal_share(found[0], found[2])
    same_bits = all(torch.equal(one, found[1][-1]) for one in again)
    bench.add(
        {"part": "codes", "rows": setting.count, "graph_and_ours": shares[0], "graph_and_single_ops": shares[1], "same_again": same_bits}
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
        row = {"part": "times", "rows": setting.count, "frame": name, **more, "predictor_ms": graph_us(behind, 1, 41) / 1000}
        bench.add({**row, "frame_ms": graph_us(whole, 1, 41) / 1000})

    timed("graph", setting.graph(setting.state))
    for gap in gaps:
        timed("megakernel", setting.ours(setting.state, gap), gap=gap)
    timed("graph again", setting.graph(setting.state))


def soak(bench: Bench, setting: Setting, frames: int) -> None:
    before, state = copied(setting.state), setting.state
    wanted = setting.made(setting.ours(state))
    restore(state, before)
    ours = setting.ours(state, trial=Trial(seed=setting.count, delay=64))
    wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    depth = setting.weights.depth
    assert depth is not None
    setting.made(ours)
    done = 0
    while done < frames and ours.behind.fault is None and not int(wrong):
        turn = min(_LOOK, frames - done)
        for _ in range(turn):
            restore(state, before)
            setting.codes[:, 1:] = -1
            ours._behind(depth, setting.rows, setting.codes, setting.flags)
            wrong += (setting.codes != wanted).sum()
        done += turn
    bench.add({"part": "soak", "rows": setting.count, "frames": done, "wrong_codes": int(wrong), "fault": ours.behind.fault})
    assert not int(wrong)
    assert ours.behind.fault is None, ours.behind.fault


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--part", default="codes,times,soak")
    made.add_argument("--rows", type=numbers, default=[1, 2])
    made.add_argument("--frames", type=int, default=100_000, help="launches of the soak for each number of rows")
    made.add_argument("--gaps", type=numbers, default=[GAP, 0, 500, 700, 800, 1000], help="clocks between two copies")
    return run(made.parse_args())


def run(options: argparse.Namespace) -> int:
    bench = Bench("megakernel", options, today_ms=TODAY, aim_ms=AIM)
    if not bench.on_gpu:
        print("the persistent kernel needs a GPU; its tests run it on a CPU in an emulator")
        return bench.end()
    with torch.inference_mode():
        weights = Maker(str(bench.device), torch.bfloat16).frame(SMALL)
        predictor = Predictor(weights)
        work: dict[str, Callable[[Setting], None]] = {
            "codes": lambda setting: compare_codes(bench, setting),
            "times": lambda setting: time_frames(bench, setting, options.gaps),
            "soak": lambda setting: soak(bench, setting, options.frames),
        }
        for part in options.part.split(","):
            for rows in options.rows:
                bench.attempt(f"{part} {rows}", lambda part=part, rows=rows: work[part](Setting(bench, weights, predictor, rows)))
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())

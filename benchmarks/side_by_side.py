"""Whether LM and codec side by side on one GPU make more speech than one after the other: on two streams, and on parts of the chip.

    NIGHTJAR_COMMIT=... python -m benchmarks.side_by_side [--parts 72,88,56,112] [--limit 80] [--json FILE]
    python -m benchmarks.side_by_side --device cpu --tiny

Qwen3-TTS 0.6B with random weights, 512 rows at context 108, frames as one graph; the codec as a graph of a gathered batch (32 utterances of
128 frames) and of a step of its continuous batch (256 rows, 16 frames). `alone`: each by itself. `serial`: eight frames, then what they
decode to, on one stream. `streams`: both kept busy on two streams, with and without priorities. `parts`: both kept busy, each on
multiprocessors of its own (`benchmarks.partitions`); the LM has the number that is asked for or a few more, the codec the others.

`in step` is what comes out while one waits for the other; `balanced` lets the slower one go on alone on the whole chip in the time that is
left, for which each needs a second graph. `gain` is that above the better of the serial rates. JSON goes to $OUT (or the working folder)
as side_by_side.json.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import Bench, GpuUse, Row, numbers, parser
from benchmarks.partitions import products_of, two_parts
from benchmarks.qwen3_load import FRAMES_PER_SECOND
from kernels.cuda_graphs import GraphPool, capture
from kernels.dummy import SMALL, TINY, Maker, Shape
from kernels.lm_frame import FusedFrame, plan_for
from kernels.reference import run_frame
from kernels.registry import on_device
from kernels.sampler import DrawFlags
from pipelines.codec.utterance_graphs import UtteranceGraphs
from pipelines.qwen3_tts.dummy import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder

CONTEXT, PAGE_SIZE = 108, 64
#: What the joint rate must be above the serial one for the engine to be built so.
GO = 0.12
#: Runs that a lane has under way, and the fewest of which its pace is taken, the first left out.
_AHEAD, _FEWEST = 2, 4
#: Seconds after which a lane that is slower than that is given up.
_PATIENCE = 6.0
#: Of two streams: the LM's priority, the codec's; a lower one goes first.
PRIORITIES = {"streams": (0, 0), "lm first": (-1, 0), "codec first": (0, -1)}

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Lane:
    """Work that is done over and over on a stream of its own, and the seconds of audio that it makes each time."""

    run: Work
    audio_seconds: float
    stream: torch.cuda.Stream | None


class _Keeper(threading.Thread):
    """Keeps a lane busy until `over`; `ends` are the moments at which its runs ended until then."""

    def __init__(self, lane: Lane, device: torch.device, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._lane, self._device, self._over = lane, device, over
        self.ends: list[Any] = []
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            with on_device(self._device), torch.cuda.stream(self._lane.stream), torch.inference_mode():
                self._keep()
                if self._lane.stream is not None:
                    self._lane.stream.synchronize()
        except Exception as error:  # noqa: BLE001 - raised where the lanes are measured
            self.fault = error

    def _keep(self) -> None:
        under_way: deque[Any] = deque()
        while not self._over.is_set():
            self._lane.run()
            under_way.append(self._mark())
            if len(under_way) > _AHEAD:
                end = under_way.popleft()
                if isinstance(end, torch.cuda.Event):
                    end.synchronize()
                if not self._over.is_set():
                    self.ends.append(end)

    def _mark(self) -> Any:
        if self._lane.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def pace(self) -> float:
        """Seconds of a run."""
        ends = self.ends[1:]
        first, last = ends[0], ends[-1]
        seconds = last - first if isinstance(first, float) else first.elapsed_time(last) / 1000
        return seconds / (len(ends) - 1)


def paces(lanes: Sequence[Lane], device: torch.device, seconds: float) -> list[float]:
    """Seconds of a run of each lane while all are kept busy. Raises what a lane raises, and TimeoutError for one that is too slow."""
    over = threading.Event()
    keepers = [_Keeper(lane, device, over) for lane in lanes]
    began = time.perf_counter()
    for keeper in keepers:
        keeper.start()

    def lasts() -> bool:
        took = time.perf_counter() - began
        few = any(len(keeper.ends) < _FEWEST for keeper in keepers)
        return all(keeper.is_alive() for keeper in keepers) and (took < seconds or (few and took < _PATIENCE))

    while lasts():
        time.sleep(0.005)
    over.set()
    for keeper in keepers:
        keeper.join()
    for keeper in keepers:
        if keeper.fault is not None:
            raise keeper.fault
        if len(keeper.ends) < _FEWEST:
            raise TimeoutError(f"{len(keeper.ends)} runs of a lane in {_PATIENCE} s")
    return [keeper.pace() for keeper in keepers]


def balanced(lm: float, codec: float, lm_alone: float, codec_alone: float) -> float:
    """Audio-seconds a second where both run side by side at these rates until the faster has done its part, then the slower one alone."""
    (slow, alone), fast = ((codec, codec_alone), lm) if codec < lm else ((lm, lm_alone), codec)
    together = alone / (fast - slow + alone)
    return fast * together


def lm_frame(maker: Maker, shape: Shape, rows: int, context: int, fused: bool) -> Work:
    """A frame of so many rows, each time at the same context: in fused kernels, or in single PyTorch ops."""
    weights, contexts = maker.frame(shape), torch.full((rows,), context, device=maker.device)
    pages = rows * -(-(context + PAGE_SIZE) // PAGE_SIZE) + 1
    state, (keys, values) = maker.state(shape, rows, pages, PAGE_SIZE, contexts), maker.caches(shape, pages, PAGE_SIZE)
    slots = torch.arange(rows, device=maker.device)
    codes = torch.zeros(rows, shape.codebooks, dtype=torch.int64, device=maker.device)
    flags = torch.zeros(rows, dtype=torch.uint8, device=maker.device)
    drawn = DrawFlags(50, any_top_p=False, all_greedy=False)
    runner = FusedFrame(weights, state, keys, values, rows, plan_for(rows)) if fused else None

    def frame() -> None:
        state.positions[:rows] = contexts
        if runner is not None:
            runner.run(slots, codes, flags)
        else:
            run_frame(weights, state, keys, values, slots, context + 1, drawn, drawn)

    return frame


def graph_of(work: Work, stream: torch.cuda.Stream | None) -> Work:
    """The work as a graph that was captured on this stream, with memory of its own; as it is where there are no streams."""
    return work if stream is None else capture(work, GraphPool(), stream).replay


class Works:
    """LM and codec on one device: what each does, and lanes of it."""

    def __init__(self, bench: Bench) -> None:
        self.device, self.on_gpu, tiny = bench.device, bench.on_gpu, bench.options.tiny
        self.rows, self.context = (4, 20) if tiny else (512, CONTEXT)
        self.batch, self.step = ((2, 8), (4, 4)) if tiny else ((32, 128), (256, 16))
        self._maker = Maker(str(bench.device), bench.dtype)
        self.frame = lm_frame(self._maker, TINY if tiny else SMALL, self.rows, self.context, self.on_gpu)
        config = TINY_CODEC if tiny else PUBLISHED_CODEC
        decoder = dummy_decoder(config, bench.device, bench.dtype)
        gathered = self._maker.integers(0, config.codebook_size, *self.batch, config.num_quantizers)
        self._steps = UtteranceGraphs(decoder._run, decoder.shape, *self.step)
        self._largest = config.codebook_size
        self.codecs: dict[str, Work] = {
            "gathered": lambda: _done(decoder._run(gathered, None)),
            "continuous": partial(self._steps._work, *self.step),
        }

    def _fill_step(self) -> None:
        """A row for each utterance of a step, all of them in their middle."""
        (rows, frames), inputs = self.step, self._steps._inputs
        if self.on_gpu:
            torch.cuda.synchronize(self.device)  # the steps' own stream made these tensors
        self._steps.arena.values.zero_()
        inputs[:rows] = torch.arange(rows, device=self.device)
        inputs[rows : 2 * rows] = 4 * frames
        inputs[2 * rows :] = self._maker.integers(0, self._largest, len(inputs) - 2 * rows)

    def prepare(self) -> None:
        """Compiles the codec's kernels on all cores, and fills in what its steps read."""
        if self.on_gpu:
            from kernels.compile_together import compiled_together

            with compiled_together():
                for work in (self._fill_step, *self.codecs.values()):
                    work()
        self._fill_step()

    def stream(self, priority: int = 0) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device, priority=priority) if self.on_gpu else None

    def lm(self, stream: torch.cuda.Stream | None) -> Lane:
        return Lane(graph_of(self.frame, stream), self.rows / FRAMES_PER_SECOND, stream)

    def codec(self, way: str, stream: torch.cuda.Stream | None) -> Lane:
        rows, frames = self.batch if way == "gathered" else self.step
        return Lane(graph_of(self.codecs[way], stream), rows * frames / FRAMES_PER_SECOND, stream)

    def serial(self, way: str) -> Lane:
        """Frames, then what they decode to, on one stream."""
        stream = self.stream()
        lm, codec = self.lm(stream), self.codec(way, stream)
        frames = round(codec.audio_seconds / lm.audio_seconds)

        def run() -> None:
            for _ in range(frames):
                lm.run()
            codec.run()

        return replace(codec, run=run)


def _done(_: torch.Tensor) -> None: ...


class Probe:
    """The rows: rates are audio-seconds a second."""

    def __init__(self, bench: Bench, works: Works, seconds: float) -> None:
        self.bench, self.works, self.seconds = bench, works, seconds
        self.alone: dict[str, float] = {}
        self.serial: dict[str, float] = {}

    def _paces(self, lanes: Sequence[Lane], seconds: float) -> tuple[list[float], dict[str, float]]:
        use = GpuUse(self.works.device)
        try:
            found = paces(lanes, self.works.device, seconds)
        finally:
            use.stop()
        return found, use.clocks()

    def measure_alone(self, name: str) -> None:
        stream = self.works.stream()
        lane = self.works.lm(stream) if name == "lm" else self.works.codec(name, stream)
        (pace,), clocks = self._paces([lane], self.seconds / 2)
        self.alone[name] = lane.audio_seconds / pace
        self.bench.add({"part": "alone", "what": name, **self._costs(name, lane, pace), "audio_s_per_s": self.alone[name], **clocks})

    def measure_serial(self, way: str) -> None:
        lane = self.works.serial(way)
        (pace,), clocks = self._paces([lane], self.seconds)
        self.serial[way] = lane.audio_seconds / pace
        self.bench.add({"part": "serial", "codec": way, "audio_s_per_s": self.serial[way], **clocks})

    def measure_streams(self, how: str, way: str) -> None:
        streams = (self.works.stream(priority) for priority in PRIORITIES[how])
        self._together(how, way, self.works.lm(next(streams)), self.works.codec(way, next(streams)))

    def measure_parts(self, wanted: int, way: str) -> None:
        first, others = two_parts(self.works.device, wanted)
        with products_of(first.multiprocessors):
            lm = self.works.lm(first.stream)
        with products_of(others.multiprocessors):
            codec = self.works.codec(way, others.stream)
        sizes = {"lm_multiprocessors": first.multiprocessors, "codec_multiprocessors": others.multiprocessors}
        for name, lane in (("lm", lm), (way, codec)):
            (pace,), clocks = self._paces([lane], self.seconds / 4)
            self.bench.add({"part": "alone in its part", "what": name, **sizes, **self._costs(name, lane, pace), **clocks})
        self._together("parts", way, lm, codec, **sizes)

    def _costs(self, name: str, lane: Lane, pace: float) -> dict[str, float]:
        """Milliseconds of the LM's frame, or microseconds of a frame of the codec."""
        return {"lm_ms": 1e3 * pace} if name == "lm" else {"codec_us": 1e6 * pace / (lane.audio_seconds * FRAMES_PER_SECOND)}

    def _together(self, how: str, way: str, lm: Lane, codec: Lane, **sizes: int) -> None:
        (lm_pace, codec_pace), clocks = self._paces([lm, codec], self.seconds)
        rates = lm.audio_seconds / lm_pace, codec.audio_seconds / codec_pace
        joint = balanced(*rates, self.alone["lm"], self.alone[way])
        costs = {**self._costs("lm", lm, lm_pace), **self._costs(way, codec, codec_pace)}
        row: Row = {"part": "together", "how": how, "codec": way, **sizes, **costs}
        row |= {"lm_audio_s_per_s": rates[0], "codec_audio_s_per_s": rates[1], "in_step": min(rates), "balanced": joint}
        serial = max(self.serial.values())
        self.bench.add({**row, "in_step_gain": min(rates) / serial - 1, "gain": joint / serial - 1, **clocks})


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The short table, and the verdict."""
    found = [f"{'':14}{'codec':12}{'LM, codec':>11}{'LM ms':>8}{'codec us':>10}{'in step':>9}{'balanced':>10}{'gain':>8}"]
    for row in rows:
        parts = f"{row['lm_multiprocessors']}, {row['codec_multiprocessors']}" if "lm_multiprocessors" in row else ""
        costs = "".join(f"{row[name]:{width}.2f}" if name in row else " " * width for name, width in (("lm_ms", 8), ("codec_us", 10)))
        rates = f"{row['in_step']:9,.0f}{row['balanced']:10,.0f}{row['gain']:8.1%}" if "gain" in row else ""
        if "audio_s_per_s" in row:
            rates = f"{row['audio_s_per_s']:9,.0f}"
        found.append(f"{row.get('how', row['part'])[:13]:14}{row.get('codec', row.get('what', '')):12}{parts:>11}{costs}{rates}")
    joint = [row["gain"] for row in rows if "gain" in row]
    if joint:
        found.append(f"best gain {max(joint):.1%}, needed {GO:.0%}: {'go' if max(joint) >= GO else 'no go'}")
    return found


def main() -> int:
    # Else a graph may wait for work of another stream that shares its hardware queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    made = parser(__doc__)
    made.add_argument("--codec", default="continuous,gathered", help="ways of the codec")
    made.add_argument("--parts", type=numbers, default=[72, 88, 56, 112], help="multiprocessors of the LM")
    made.add_argument("--seconds", type=float, default=1.0, help="seconds of a row at least")
    made.add_argument("--limit", type=float, default=80.0, help="seconds after which no row is begun")
    options = made.parse_args()
    began = time.monotonic()
    bench = Bench("side_by_side", options, go=GO)
    with torch.inference_mode():
        works = Works(bench)
        works.prepare()
        probe = Probe(bench, works, 0.05 if options.tiny else options.seconds)
        left_out = []
        for name, row in _rows(probe, options.codec.split(","), options.parts):
            if time.monotonic() - began < options.limit:
                bench.attempt(name, row)
            else:
                left_out.append(name)
    bench.keep(left_out=left_out)
    print("\n".join(lines(bench.rows)))
    print(f"no time was left for: {', '.join(left_out) or 'nothing'}")
    return bench.end()


def _rows(probe: Probe, ways: Sequence[str], parts: Sequence[int]) -> list[tuple[str, Work]]:
    """All rows: what others are compared with first, and what may break the device last."""
    found: list[tuple[str, Work]] = [(f"{name} alone", partial(probe.measure_alone, name)) for name in ("lm", *ways)]
    found += [(f"serial, {way}", partial(probe.measure_serial, way)) for way in ways]
    if probe.works.on_gpu:
        found += [(f"{how}, {way}", partial(probe.measure_streams, how, way)) for how in PRIORITIES for way in ways]
        found += [(f"parts of {wanted}, {way}", partial(probe.measure_parts, wanted, way)) for wanted in parts for way in ways]
    return found


if __name__ == "__main__":
    sys.exit(main())

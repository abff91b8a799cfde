"""Qwen3-TTS end to end on random weights of full size: prompt ids in, float32 samples on the host out, through the
real engine.

    python -m benchmarks.engine --sizes 0b6 1b7 --slots 1024 512 128 --codec --reproducible 512 --long-prompts 1024
    python -m benchmarks.engine --device cpu --tiny --slots 4

A closed loop keeps every slot taken with utterances of 3 to 15 seconds. Each has its length from the start, but the
engine does not know it: the weights draw the end at the first frame that `min_new_tokens` allows. Measured, once
twice as many utterances are out as there are slots, is the whole; each row has its share of the floor. The quoted
rate is sustained: the smaller of the frames that the language model made and those that were heard.
`joules_per_audio_s` is the energy of the whole board, by its counter; `precision` is `exact` (bfloat16 weights and
products). `split_ms` cuts a frame of all slots: `prefill` and `idle` as the engine's stream had them, `codec` as the
codec takes alone, where it was measured, and `lm` the rest.

`--codec` measures the codec alone first. `--sweep` are further numbers of slots, `--reproducible` those in
reproducible mode (its codec has `--codec-rows` rows; 0: batches of one length), `--long-prompts` those at a mean
context of 300. `--also` names results whose rows come first: those of the reference. A row that fails is named at the
end, and the others follow.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.checkpoint import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder, dummy_model
from benchmarks.common import FRAMES_PER_SECOND, Bench, Row, ThreadUse, Use, memory, parser, read, serves
from benchmarks.kernel import device_named, frame_floor
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.opening import NativeModelOptions, open_executor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.qwen3_tts.codec import CodecDecoder, fuses_front
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.pipeline import FrameRequestInfo, engine_options, open_stage
from pipelines.qwen3_tts.prompt import Prompt, TokenizedTask, build_prompt
from pipelines.request import Done, Event, Failed, Listener
from pipelines.results import Utterance
from tests.support.lm_tensors import PUBLISHED

SAMPLE_RATE = 24_000
#: Ids before the text of every prompt.
ROLE = [151644, 77091, 198]
#: Text tokens of a second of speech.
TOKENS_PER_SECOND = 3.3
MAX_TOKENS, MAX_CONTEXT, PAGE_SIZE = 2048, 4096, 64
#: Positions that long prompts have more: a mean context of 300.
MORE_TEXT = 192
#: Multiply-adds of the published codec decoder for one frame.
CODEC_MACS = 2.48e9
#: Seconds at most until a loop has settled, compilation of kernels included.
SETTLE_SECONDS = 60.0

Pool = Sequence[tuple[GenerationRequest, int]]


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds of the shortest and the longest utterance, and of a window that is measured."""

    shortest: float
    longest: float
    seconds: float
    #: Text tokens of every prompt beside those of its speech.
    more_text: int = 0

    @property
    def positions(self) -> int:
        """Positions of the longest utterance, its prompt included."""
        return round(self.longest * (FRAMES_PER_SECOND + TOKENS_PER_SECOND)) + 32 + self.more_text

    def lengths(self, count: int, seed: int = 0) -> list[int]:
        """Frames of `count` utterances."""
        draw = np.random.default_rng(seed)
        drawn = (float(draw.uniform(self.shortest, self.longest)) for _ in range(count))
        return [max(round(seconds * FRAMES_PER_SECOND), 3) for seconds in drawn]


def prompt_of(model: Qwen3TTSModel, draw: np.random.Generator, tokens: int) -> Prompt:
    """The prompt of a text of so many random tokens."""
    body = draw.integers(0, 150_000, tokens).tolist()
    return build_prompt(model.config, TokenizedTask(ROLE, body, language="english", speaker="ryan"))


def requests(model: Qwen3TTSModel, load: Load, count: int, most_tokens: int = MAX_TOKENS) -> Pool:
    """Requests with the frames each will have; texts as long as the speech suggests."""
    draw, made = np.random.default_rng(0), list[tuple[GenerationRequest, int]]()
    for index, frames in enumerate(load.lengths(count)):
        tokens = max(round(frames / FRAMES_PER_SECOND * TOKENS_PER_SECOND), 1) + load.more_text
        prompt, sampling = prompt_of(model, draw, tokens), SamplingParams(min_new_tokens=frames)
        made.append((GenerationRequest(str(index), prompt, sampling, index, most_tokens), frames))
    return made


class Watched:
    """A stopwatch around an executor, between `start` and `stop`: the host's time in its calls, and the time of their
    work on the device's stream."""

    #: Calls that are timed.
    _TIMED = ("embed", "prefill", "frames")

    def __init__(self, executor: FrameExecutor) -> None:
        self._executor, self.device, self._on = executor, executor.kv.k.device, False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._executor, name)
        return partial(self._call, name, found) if name in self._TIMED else found

    def start(self) -> None:
        marked = ("prefill", "frames") if self.device.type == "cuda" else ()
        self._spans = {name: list[tuple[torch.cuda.Event, torch.cuda.Event]]() for name in marked}
        self._host: dict[str, float] = dict.fromkeys((*self._TIMED, "wait"), 0.0)
        self._calls, self._began, self._on = Counter[str](), time.perf_counter(), True

    def stop(self) -> dict[str, Any]:
        """Shares of the time between: what the host did, `host_other` being the scheduler; the device's stream with
        this executor."""
        self._on, seconds = False, time.perf_counter() - self._began
        found: dict[str, Any] = {f"host_{name}": spent / seconds for name, spent in self._host.items()}
        found["host_other"] = 1 - sum(found.values())
        if self._spans:
            # The engine's thread may still add one: what is not synchronized is left out.
            ended = {name: [*spans] for name, spans in self._spans.items()}
            torch.cuda.synchronize(self.device)
            for name, spans in ended.items():
                took = sum(begin.elapsed_time(end) for begin, end in spans)
                found[f"stream_{name}"] = took / 1000 / seconds
            found["stream_idle"] = 1 - found["stream_prefill"] - found["stream_frames"]
        counted = {"turns": "frames", "prefills": "prefill", "admitted": "embed"}
        return found | {name: self._calls[call] for name, call in counted.items()}

    def _call(self, name: str, work: Callable[..., Any], *given: Any) -> Any:
        """A call of the executor; what `frames` returns is a call too, which waits for the codes."""
        if not self._on:
            return work(*given)
        self._calls[name] += len(given[0]) if name == "embed" else 1
        made = self._timed(name, work, *given)
        return partial(self._timed, "wait", made) if name == "frames" else made

    def _timed(self, name: str, work: Callable[..., Any], *given: Any) -> Any:
        begin, marks = time.perf_counter(), self._spans.get(name)
        if marks is None:
            made = work(*given)
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            made = work(*given)
            end.record()
            marks.append((start, end))
        self._host[name] += time.perf_counter() - begin
        return made


@dataclass(slots=True)
class Tally:
    """Counts of what came out. Threads add to it under its lock; reading one field needs none."""

    utterances: int = 0
    frames: int = 0
    wrong: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def heard(self, frames: int, right: bool) -> None:
        with self.lock:
            self.utterances += 1
            self.frames += frames
            self.wrong += not right

    def failed(self, error: BaseException | None) -> None:
        if not (isinstance(error, SynthesisError) and error.code is ErrorCode.SYNTH_ABORTED):
            with self.lock:
                self.wrong += 1


@dataclass(frozen=True, slots=True)
class Mark:
    """The counts at one moment: frames that the language model made, frames that were heard."""

    at: float
    made: int
    heard: int
    utterances: int
    running: int


def rates(marks: Sequence[Mark], slots: int) -> dict[str, Any]:
    """The sustained rate over the windows between marks: the smaller one of frames made and frames heard."""
    first, last = marks[0], marks[-1]
    seconds = last.at - first.at
    made, heard = last.made - first.made, last.heard - first.heard
    sustained = min(made, heard) / seconds
    each = [(b.made - a.made) / (b.at - a.at) for a, b in itertools.pairwise(marks)]
    return {
        "audio_s_per_s": sustained / FRAMES_PER_SECOND,
        "frames_per_s": sustained,
        "made_per_s": made / seconds,
        "heard_per_s": heard / seconds,
        "ms_per_frame": 1000 * slots / sustained if sustained else None,
        "seconds": seconds,
        "utterances": last.utterances - first.utterances,
        "windows_made_per_s": each,
        "spread": (max(each) - min(each)) * len(each) / sum(each) if sum(each) else None,
        "running": sum(mark.running for mark in marks) / len(marks),
    }


class ClosedLoop:
    """Keeps every slot taken with requests of a pool, over and over, until it is drained or closed.

    The engine pauses while the codec is late, as in the real pipeline, and the number of requests in flight is bounded.
    """

    def __init__(self, executor: Watched, options: EngineOptions, pool: Pool, decoder: CodecDecoder) -> None:
        self.tally, self.slots = Tally(), options.slots
        self._places = 2 * options.slots + 1024
        self.room = threading.Semaphore(self._places)
        self._executor = executor
        self._stage = open_stage(decoder)
        # As many requests wait as in a pipeline on a GPU.
        self.engine = Engine(cast(FrameExecutor, executor), options, options.slots, self._stage)
        self._stop = threading.Event()
        self._feeder = threading.Thread(target=self._feed, args=(pool,), name="feeder")
        self._feeder.start()

    def _feed(self, pool: Pool) -> None:
        for number, (request, frames) in enumerate(itertools.cycle(pool)):
            self.room.acquire()
            if self._stop.is_set():
                self.room.release()
                return
            named = replace(request, request_id=str(number), seed=number)
            info = FrameRequestInfo("", SAMPLE_RATE, {}, keep_unfinished=True)
            listener = Listener(partial(self._heard, frames), lambda _done: None)
            try:
                self.engine.submit(named, cast(Any, Utterance(info, self._stage, listener)))
            except SynthesisError:  # closed
                return

    def _heard(self, wanted: int, event: Event) -> None:
        if isinstance(event, Failed):
            self.tally.failed(event.error)
        elif isinstance(event, Done):
            frames = int(event.speech.meta["frames"])
            whole = len(event.speech.samples) == frames * SAMPLE_RATE / FRAMES_PER_SECOND
            self.tally.heard(frames, whole and frames == wanted and event.speech.meta["finish"] == "eos")
        self.room.release()

    def mark(self) -> Mark:
        core = self.engine.core
        running = len(core.scheduler.running)
        return Mark(time.perf_counter(), core.frames_made, self.tally.frames, self.tally.utterances, running)

    def settle(self, utterances: int, most_seconds: float) -> bool:
        """Waits until that many utterances are out; whether they came in time and right."""
        until = time.perf_counter() + most_seconds
        while self.tally.utterances < utterances and self.tally.wrong == 0 and time.perf_counter() < until:
            time.sleep(0.02)
        return self.tally.utterances >= utterances and self.tally.wrong == 0

    def measure(self, seconds: float, windows: int) -> dict[str, Any]:
        """The figures of `windows` windows one after the other."""
        use, threads, began = Use(seconds=0.25), ThreadUse(), time.process_time()
        self._executor.start()
        marks = [self.mark()]
        for _ in range(windows):
            time.sleep(max(marks[0].at + seconds * len(marks) - time.perf_counter(), 0))
            marks.append(self.mark())
        watched = self._executor.stop()
        found, shares = rates(marks, self.slots), threads.shares()
        use.stop()
        return {
            **found,
            "wrong_lengths": self.tally.wrong,
            "process_cpu_share": (time.process_time() - began) / found["seconds"],
            "thread_cpu_share": shares,
            **use.of_gpu(self._executor.device, found["audio_s_per_s"]),
            **watched,
        }

    def drain(self, most_seconds: float) -> bool:
        """Sends no more requests and waits for those in flight; whether all of them ended."""
        self._stop.set()
        until = time.perf_counter() + most_seconds
        left = (max(until - time.perf_counter(), 0.001) for _ in range(self._places))
        return all(self.room.acquire(timeout=seconds) for seconds in left)

    def close(self) -> None:
        """Ends everything; requests in flight are dropped."""
        self._stop.set()
        self.engine.close()
        self._stage.close()
        self.room.release()
        self._feeder.join()


class Throughput:
    """One model and one decoder on one device, and the rows that they give."""

    def __init__(self, bench: Bench, size: str, load: Load) -> None:
        self.bench, self.size, self.load = bench, size, load
        self.config = TINY_CODEC if size == "tiny" else PUBLISHED_CODEC
        self.decoder = dummy_decoder(self.config, bench.device, bench.dtype)
        self.limits = device_named(bench.found["device"])
        self.model = dummy_model(size, bench.device, bench.dtype, MAX_CONTEXT, ends=True)
        #: Microseconds a frame of the codec alone, where it was measured.
        self.codec_us = 0.0

    def measure(self, slots: int, windows: int, reproducible: bool = False, more_text: int = 0) -> None:
        """The row of the whole with `slots` slots."""
        self.bench.clean()
        load = replace(self.load, more_text=more_text)
        executor, options, opened = self.open(slots, load, reproducible)
        most = min(MAX_TOKENS, options.pages * PAGE_SIZE - 64 - more_text)
        pool = requests(self.model, load, max(4 * slots, 64), most)
        # What a slot has on average over time.
        positions = sum(frames * (len(request.prompt) + frames / 2) for request, frames in pool)
        context = positions / sum(frames for _, frames in pool)
        decoder = self.fixed_decoder() if reproducible else self.decoder
        row: Row = {"size": self.size, "part": "all", "slots": slots, "precision": "exact"}
        row |= {"frames_per_turn": options.frames_per_turn, "admit_turns": options.admit_turns}
        row |= {"reproducible": reproducible, "more_text": more_text, "open_s": opened, "context": context}
        row["spare_slots"] = options.spare_slots
        loop = ClosedLoop(executor, options, pool, decoder)
        try:
            row["settled"] = loop.settle(2 * slots + 8, SETTLE_SECONDS)
            row |= loop.measure(load.seconds, windows) | memory(self.bench.device)
        finally:
            loop.close()
        self.bench.add(self.with_floor(row, slots, context) | {"split_ms": self.split_ms(row)})

    def open(
        self, slots: int, load: Load, reproducible: bool = False, wide: bool = True
    ) -> tuple[Watched, EngineOptions, float]:
        """The executor of `slots` slots with pages for this load, its sizes, and the seconds it took. `wide`: as a
        job has it, with spare slots."""
        each, model = -(-load.positions // PAGE_SIZE), self.model
        asked = NativeModelOptions(
            slots=slots, max_context=MAX_CONTEXT, pages=slots * each, page_size=PAGE_SIZE
        )
        wide &= not reproducible
        options = engine_options(model.config, model.device, model.dtype, asked, wide=wide)
        options = replace(options, pages=(slots + options.spare_slots) * each)
        began = time.perf_counter()
        executor = open_executor(model, options, reproducible=reproducible and self.bench.on_gpu)
        return Watched(executor), options, time.perf_counter() - began

    def fixed_decoder(self) -> CodecDecoder:
        """The decoder of reproducible mode."""
        device, dtype, rows = self.bench.device, self.decoder.dtype, self.bench.options.codec_rows
        front = fuses_front(device, dtype, True, rows)
        made = dummy_decoder(self.config, device, dtype, reproducible=True, fused_front=front)
        made.prepare_utterances(rows)
        return made

    def codec(self) -> None:
        """The row of the codec alone: whole utterances from codes on the host to samples on the host, through the
        engine's own stage, which always has more to do."""
        count, at_once = (16, 8) if self.size == "tiny" else (1024, 512)
        draw, decoder = np.random.default_rng(0), self.decoder
        size, books = self.config.codebook_size, self.config.num_quantizers
        codes = [draw.integers(0, size, (frames, books)) for frames in self.load.lengths(count)]
        stage, tally, room = open_stage(decoder), Tally(), threading.Semaphore(at_once)

        def order(one: NDArray[np.int64]) -> None:
            def done(samples: NDArray[np.float32] | NightjarError) -> None:
                failed = isinstance(samples, NightjarError)
                tally.heard(len(one), not failed and len(samples) == len(one) * decoder.samples_per_frame)
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
        while tally.frames == before or time.perf_counter() - began < self.load.seconds:
            order(next(feed))
        took, frames, shares = time.perf_counter() - began, tally.frames - before, threads.shares()
        stage.close()
        rate, self.codec_us = frames / took, 1e6 * took / frames
        row: Row = {"part": "codec", "size": "", "us_per_frame": self.codec_us, "frames_per_s": rate}
        row |= {"ms_per_frame": 1000 / rate, "audio_s_per_s": rate / FRAMES_PER_SECOND, "seconds": took}
        row |= {"wrong_lengths": tally.wrong, "thread_cpu_share": shares, **memory(self.bench.device)}
        self.bench.add(self.with_floor(row, 1, None))

    def with_floor(self, row: Row, rows: int, context: float | None) -> Row:
        """The row with its floor, where that is known: the least milliseconds of a frame of all rows, of the language
        model at this mean context (None: without it) and then of the codec; and its part of the time."""
        least, took = None, row["ms_per_frame"]
        if self.limits is not None and self.size != "tiny":
            lm = 0.0 if context is None else frame_floor(PUBLISHED[self.size], rows, context, self.limits)
            least = 1000 * (lm + rows * 2 * CODEC_MACS / self.limits.flops)
        return row | {"floor_ms": least, "floor_share": least / took if least and took else None}

    def split_ms(self, row: Row) -> dict[str, float]:
        """Milliseconds of a frame of all slots by what the device did; together they are `ms_per_frame`. Empty where
        no device was watched."""
        if "stream_frames" not in row or not row.get("ms_per_frame"):
            return {}
        whole, codec = row["ms_per_frame"], row["slots"] * self.codec_us / 1000
        found = {"prefill": whole * row["stream_prefill"], "idle": whole * row["stream_idle"], "codec": codec}
        return {"lm": whole - sum(found.values()), **found}


def main() -> int:
    options = read(
        parser(__doc__), sizes=["0b6", "1b7"], slots=[512, 128], sweep=int, reproducible=int, codec_rows=256,
        long_prompts=int, codec=False, seconds=3.0, windows=5, also=Path,
    )  # fmt: skip
    load = Load(0.3, 0.8, 0.5) if options.tiny else Load(3.0, 15.0, options.seconds)
    sizes, windows = (["tiny"], 2) if options.tiny else (options.sizes, options.windows)
    about = {"shortest_s": load.shortest, "longest_s": load.longest, "window_s": load.seconds}
    bench = Bench("qwen3_tts", options, load={**about, "windows": windows}, switch_ms=serves())
    for path in filter(Path.exists, options.also):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["size"] in sizes:
                bench.add(row)
    for size in sizes:
        work = Throughput(bench, size, load)
        if options.codec:
            bench.attempt(f"{size} codec", work.codec)
        kinds: dict[str, Row] = {"slots": {}, "reproducible": {"reproducible": True}, "sweep": {}}
        for name, how in (kinds | {"long_prompts": {"more_text": MORE_TEXT}}).items():
            for slots in getattr(options, name):
                bench.attempt(f"{size} {name} {slots}", work.measure, slots, windows, **how)
        del work
    return bench.end(
        "size", "part", "slots", "reproducible", "more_text", "context", "audio_s_per_s", "frames_per_s",
        "ms_per_frame", "joules_per_audio_s", "floor_ms", "floor_share", "spread", "split_ms.lm", "split_ms.codec", "peak_gib",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

"""SparkTTS and Fish Speech S2 on both engines in one run, at their published sizes with dummy weights.

    python -m benchmarks.speech spark [--parts frame,lm,speech,streams] [--requests 64,256,512] [--engines native,vllm]
        [--turns 0,4] [--streams 1,64] [--seconds 10] [--codec-dtype bfloat16]
    python -m benchmarks.speech fish --requests 64,256
    python -m benchmarks.speech fish --device cpu --tiny --engines native --requests 2 --seconds 0.2

`frame` is a frame of the native engine alone. Of each engine `lm` is its LM alone, and `speech` goes through the
pipeline: text and recording in, samples out, so all stages share the GPU. `streams` are first chunks of the native one. The prompts
of a voice share its KV. `python -m benchmarks.reference` has the loop of transformers. The engine vllm is left out where
vLLM is not installed.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch

from benchmarks.common import Bench, GpuUse, ThreadUse, numbers, parser, serves, words
from benchmarks.engine import Watched
from benchmarks.families import FAMILIES, VOICES, Family, Spark
from benchmarks.shapes import device_named, frame_floor
from kernels.registry import on_device
from kernels.sampler import DrawFlags
from pipelines.engine.engine import Engine
from pipelines.engine.executor import FrameExecutor, FrameSettings
from pipelines.engine.opening import open_executor
from pipelines.engine.state import Placement
from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import Done, Event, Failed, Pipeline, Speech, SynthesisRequest, submit
from pipelines.tokens import TokenRequest, Tokens

PROMPT_TOKENS = 120
#: Requests of a steady run for each slot; and for so many slots one more request is under way, to enter the LM or to
#: be decoded.
TURNS, BESIDE = 4, 4
#: Streams of a run for each one that is under way, and the least number of all: the first of each place are not
#: counted.
STREAM_TURNS, LEAST_STREAMS = 6, 60
#: Frames of a call of the part `frame`; calls that are timed, and those before them.
FRAMES, CALLS = 8, 7
#: A request of a pipeline by its number.
Make = Callable[[int], SynthesisRequest]


def prepare_all(executor: FrameExecutor, device: torch.device) -> None:
    """Captures every graph that the executor can have, so that no call meets one that is missing."""
    with on_device(device), torch.cuda.stream(executor.stream):
        while executor.prepare():
            pass


class Native:
    """A model's executor, over which pipelines are opened one after the other, and its parts alone: without
    scheduler, host and codec."""

    def __init__(self, family: Family, slots: int, streams: int = 0) -> None:
        self.family, self.bench = family, family.bench
        model, needs = family.model()
        self.sizes = family.sizes(needs, slots, streams)
        self.executor = open_executor(model, self.sizes, streams=streams)
        prepare_all(self.executor, self.bench.device)
        self.watched = Watched(self.executor)
        prefill = "packed" if self.executor.packed else "padded"
        #: What rows say of it.
        self.about = {"executor": self.executor.name, "prefill": prefill}

    def pipeline(self, turns: int = 0) -> Pipeline:
        """A pipeline with an engine of its own; `turns`: frames a scheduling turn, 0 for the engine's choice."""
        sizes = replace(self.sizes, frames_per_turn=turns or self.sizes.frames_per_turn)
        stage = self.family.stage()
        host = self.family.host(Engine(self.watched, sizes, sizes.slots, stage))
        return self.family.pipeline(host, stage)

    def frame_part(self, rows: Sequence[int], context: int) -> None:
        """A frame of so many rows at this context; the slots must be free."""
        with on_device(self.bench.device), torch.cuda.stream(self.executor.stream):
            for number in rows:
                self._frames(number, context)

    def _frames(self, rows: int, context: int) -> None:
        bench, executor, drawn = self.bench, self.executor, self.family.drawn
        count = FRAMES if bench.on_gpu else 1
        sampling = replace(drawn, min_new_tokens=1 << 30)
        state, kv = executor.state, executor.kv
        each = math.ceil((context + CALLS * count + 1) / kv.page_size)
        pages = kv.take(rows * each)
        if pages is None:
            raise ValueError(f"{rows} rows of {each} pages do not fit {kv.pages} pages")
        hidden, none = torch.zeros_like(state.inputs[0]), np.zeros(0, np.int64)
        held = [pages[row * each : (row + 1) * each] for row in range(rows)]
        state.place([Placement(row, held[row], row, sampling, none, hidden, context) for row in range(rows)])
        first = drawn.temperature, drawn.top_k, drawn.top_p
        behind = drawn.residual_temperature, drawn.residual_top_k, drawn.residual_top_p
        settings = FrameSettings(context + 1, DrawFlags.of([first]), DrawFlags.of([behind]))
        slots = list(range(rows))

        def frames() -> None:
            nonlocal settings
            executor.frames(slots, count, settings)()
            settings = settings.later(count)

        ms = bench.milliseconds(frames, CALLS - 2) / count
        kv.give_back(pages)
        device = None if bench.options.tiny else device_named(bench.found["device"])
        about: dict[str, Any] = {"context": context, "executor": executor.name}
        if device is not None:
            about["floor_ms"] = 1000 * frame_floor(self.family.shape, rows, context, device)
        audio = rows / self.family.rate
        bench.timed("frame alone", rows, ms, audio, engine="native", slots=rows, **about)


class Waiter:
    """A receiver of one sequence, whole."""

    streamed = False

    def __init__(self) -> None:
        self.future: Future[int] = Future()

    def tokens(self, ids: list[int], codes: Any) -> None:
        """Whole sequences are counted."""

    def finished(self, tokens: Tokens) -> None:
        self.future.set_result(len(tokens.ids))

    def failed(self, error: NightjarError) -> None:
        self.future.set_exception(error)


class Speaking:
    """What is measured of a pipeline on either engine."""

    def __init__(self, family: Family, pipeline: Any, engine: str, about: dict[str, Any]) -> None:
        self.family, self.bench, self.pipeline = family, family.bench, pipeline
        self.options, self.about, self.engine = family.bench.options, about, engine
        self._indexes = itertools.count()

    def measure(self, parts: set[str], watched: Watched | None = None) -> None:
        known = {"lm": self.lm, "speech": partial(self.speech, watched), "streams": self.streams}
        for name in known.keys() & parts:
            self.bench.attempt(f"{self.engine}: {name}", known[name])

    def lm(self) -> None:
        """The LM alone, all requests at once, each of the same number of tokens; the second turn counts. No prompt
        comes twice, so that a prefix cache has none of them."""
        family = self.family
        sampling = replace(family.sampling, max_tokens=max(2, int(self.options.seconds * family.rate)))
        for number in self.options.requests:
            took, made = 0.0, 0
            for turn in range(2):
                waiters = [Waiter() for _ in range(number)]
                asked = [
                    TokenRequest(
                        f"{number}.{turn}-{index}",
                        prompt_ids(next(self._indexes), family.text_ids),
                        replace(sampling, seed=index),
                        **family.fields,
                    )
                    for index in range(number)
                ]
                begin = time.perf_counter()
                for request, waiter in zip(asked, waiters, strict=True):
                    self.pipeline.host.submit(request, waiter)
                made = sum(waiter.future.result() for waiter in waiters)
                took = time.perf_counter() - begin
            more = {"tokens_per_s": made / took, "ms_a_step": 1000 * took * number / made, **self.about}
            audio = made / family.rate
            self.bench.timed("LM alone", number, 1000 * took, audio, engine=self.engine, slots=number, **more)

    def speech(self, watched: Watched | None = None) -> None:
        """Request to samples: all at once, then so many kept under way, of lengths from half to whole."""
        self.warm_up()
        whole = self.options.seconds
        lengths = [whole * (0.5 + 0.5 * step / 7) for step in range(8)]
        for number in self.options.requests:
            begin, request = time.perf_counter(), self.family.request
            under_way = [
                submit(self.pipeline, request(f"burst{number}", index, whole)) for index in range(number)
            ]
            burst = sum(map(heard_seconds, under_way)) / (time.perf_counter() - begin)
            make = lambda n, name=f"steady{number}": self.family.request(name, n, lengths[n % 8])  # noqa: E731
            found = self.steady(number, make, watched)
            ms, audio = found.pop("ms"), found.pop("audio_seconds")
            row = {"engine": self.engine, "slots": number, **self.about, "burst_audio_s_per_s": burst}
            self.bench.timed("speech, end to end", number, ms, audio, **row, **found)

    def warm_up(self) -> None:
        """Every voice once; and lengths and batches that the codec has not met, which cost the compilation of a
        kernel."""
        seconds, request = self.options.seconds, self.family.request
        warm = [request("warm", voice, min(1.0, seconds)) for voice in range(VOICES)]
        more = 12 * VOICES if self.bench.on_gpu else 0
        warm += [request("lengths", index, seconds * (1 + index % 64) / 64) for index in range(more)]
        for future in [submit(self.pipeline, one) for one in warm]:
            heard_seconds(future)
        first_chunks(self.pipeline, 1, 1, lambda index: request("first", index, min(2.0, seconds)))

    def steady(self, slots: int, make: Make, watched: Watched | None) -> dict[str, Any]:
        """`TURNS` requests a slot, with all slots taken: measured from the end of the first one of each slot until no
        new ones follow."""
        under_way, total = slots + slots // BESIDE, TURNS * slots
        free, ends = threading.Semaphore(under_way), list[tuple[float, float]]()
        gpu, threads = GpuUse(self.bench.device), ThreadUse()
        futures: list[Future[Speech]] = []

        def ended(future: Future[Speech]) -> None:
            audio = 0.0 if future.exception() else future.result().duration_ms / 1000
            ends.append((time.perf_counter(), audio))
            free.release()

        for number in range(total):
            free.acquire()
            future = submit(self.pipeline, make(number))
            future.add_done_callback(ended)
            futures.append(future)
            if watched is not None and number == total // 2:
                watched.start()
        found = {} if watched is None else watched.stop()
        for future in futures:
            heard_seconds(future)
        busy, shares = gpu.stop(), threads.shares()
        names = shares.keys() & {"vllm-host", "engine", "codec-stage", "MainThread"}
        found |= {f"{name}_cpu_percent": 100 * shares[name] for name in names}
        found |= {} if busy is None else {"gpu_percent": 100 * busy}
        # Callbacks run on the pipeline's threads, a moment after the results are there.
        while len(ends) < total:
            time.sleep(0.001)
        window = ends[slots : total - under_way]
        took, audio = window[-1][0] - ends[slots - 1][0], sum(heard for _, heard in window)
        return {"ms": 1000 * took, "audio_seconds": audio, "under_way": under_way, **found}

    def streams(self) -> None:
        """First chunks of so many streams back to back: median and 95th of 100, without the first stream of each
        place."""
        seconds, request = min(4.0, self.options.seconds), self.family.request
        for number in self.options.streams:
            begin = time.perf_counter()
            total = max(STREAM_TURNS * number, LEAST_STREAMS) if self.bench.on_gpu else 2 * number
            make = partial(request, f"stream{number}", seconds=seconds)
            waits = first_chunks(self.pipeline, number, total, make)[number:]
            took = 1000 * (time.perf_counter() - begin)
            p50, p95 = np.percentile(waits, (50, 95)).tolist()
            more = {"p50_ms": p50, "p95_ms": p95, "longest_ms": max(waits), **self.about}
            self.bench.timed(
                "first chunk", number, took, engine=self.engine, slots=number, streams=total, **more
            )


def prompt_ids(index: int, vocabulary: int) -> list[int]:
    """The LM's prompt of sequence `index`."""
    return [(index * 131 + n * 17) % vocabulary for n in range(PROMPT_TOKENS)]


def first_chunks(pipeline: Pipeline, at_once: int, total: int, make: Make) -> list[float]:
    """Milliseconds from each request to its first samples, with so many streams at once; those that random weights
    ended before it are left out. Raises the error of a stream that failed otherwise."""
    ended: Queue[NightjarError | None] = Queue()
    waits: dict[int, float] = {}

    def start(index: int) -> None:
        asked = make(index)
        begin = time.perf_counter()

        def heard(event: Event) -> None:
            if isinstance(event, Failed):
                ended.put(None if event.error.code is ErrorCode.SYNTH_NO_AUDIO else event.error)
            elif isinstance(event, Done):
                ended.put(None)
            elif len(event.samples):
                waits.setdefault(index, 1000 * (time.perf_counter() - begin))

        pipeline.start(asked, heard, stream=True)

    for index in range(min(at_once, total)):
        start(index)
    for over in range(total):
        if (error := ended.get()) is not None:
            raise error
        if at_once + over < total:
            start(at_once + over)
    return [waits[index] for index in sorted(waits)]


def heard_seconds(future: Future[Speech]) -> float:
    """Audio of a request; none where random weights ended it before its first frame. Any other failure is raised."""
    error = future.exception()
    if error is None:
        return future.result().duration_ms / 1000
    if isinstance(error, NightjarError) and error.code is ErrorCode.SYNTH_NO_AUDIO:
        return 0.0
    raise error


def native(family: Family, parts: set[str]) -> None:
    """The parts on our own engine: with few streams in mind for throughput, and prepared for streams for first
    chunks."""
    bench, options = family.bench, family.bench.options
    if parts - {"streams"}:
        opened = Native(family, max(options.requests))
        if "frame" in parts:
            context = family.prompt + int(options.seconds * family.rate) // 2
            rows = sorted({1, *options.requests})
            bench.attempt("frame", lambda: opened.frame_part(rows, context))
        for turns in options.turns if {"lm", "speech"} & parts else ():
            about = {"frames_per_turn": turns or opened.sizes.frames_per_turn, **opened.about}
            run(family, opened.pipeline(turns), "native", about, parts - {"streams"}, opened.watched)
        del opened
        bench.clean()
    if "streams" in parts:
        slots = max(family.stream_slots if bench.on_gpu else 0, 2 * max(options.streams))
        ready = Native(family, slots, max(options.streams))
        run(family, ready.pipeline(), "native", ready.about, {"streams"})


def vllm(family: Family, parts: set[str]) -> None:
    """The parts on vLLM."""
    from pipelines.vllm_engine.host import VllmHost

    spec, chosen = family.spec()
    slots, share = max(family.bench.options.requests), family.bench.options.memory_share
    begin = time.perf_counter()
    host = VllmHost(spec, replace(chosen, slots=slots, memory_share=share or family.memory_share))
    print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
    run(family, family.pipeline(host, family.stage()), "vllm", {}, parts)


def run(
    family: Family, pipeline: Pipeline, engine: str, about: dict[str, Any], parts: set[str],
    watched: Watched | None = None,
) -> None:  # fmt: skip
    try:
        Speaking(family, pipeline, engine, about).measure(parts, watched)
    finally:
        pipeline.close()


def codec_dtype(options: Any) -> torch.dtype:
    """The type of the codec: by default bfloat16, on a CPU float32."""
    return getattr(torch, options.codec_dtype or ("float32" if options.device == "cpu" else "bfloat16"))


def main(given: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("family", choices=FAMILIES)
    made.add_argument("--parts", type=words, default="frame,lm,speech,streams")
    made.add_argument("--engines", type=words, default="native,vllm", help="which engines, in this order")
    made.add_argument("--requests", type=numbers, default="64,256,512")
    made.add_argument(
        "--turns", type=numbers, default="0", help="frames a turn of the native engine; 0: its own"
    )
    made.add_argument("--streams", type=numbers, default="1,64", help="streams at once")
    made.add_argument("--seconds", type=float, default=10.0)
    made.add_argument("--codec-dtype", choices=("float32", "bfloat16", "float16"))
    made.add_argument("--memory-share", type=float, help="of vLLM")
    options = made.parse_args(given)
    options.codec_dtype = codec_dtype(options)
    kind, engines = (
        FAMILIES[options.family],
        [one for one in options.engines if one == "native" or find_spec("vllm")],
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind is Spark
    dtype = str(options.codec_dtype).removeprefix("torch.")
    facts: dict[str, Any] = {
        "codec_dtype": dtype,
        "seconds": options.seconds,
        "aim": kind.aim,
        "must": kind.must,
    }
    if "vllm" in engines:
        from pipelines.vllm_engine.library import load_vllm

        facts["vllm"] = load_vllm().__version__
    bench = Bench(options.family, options, **facts, switch_ms=serves())
    with tempfile.TemporaryDirectory() as folder:
        family = kind(bench, Path(folder) / "checkpoint")
        for engine in engines:
            parts = set(options.parts) - ({"frame", "streams"} if engine == "vllm" else set())
            work = native if engine == "native" else vllm
            bench.attempt(engine, lambda work=work, parts=parts: work(family, parts))
    return bench.end(
        "part", "engine", "slots", "frames_per_turn", "ms", "floor_ms", "audio_s_per_s", "tokens_per_s", "p50_ms", "p95_ms"
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

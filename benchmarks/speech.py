"""SparkTTS and Fish Speech S2 on both engines in one run, at their published sizes with dummy weights.

    python -m benchmarks.speech spark [--parts speech,streams] [--requests 64,256,512] [--engines native,vllm]
        [--turns 0,4] [--streams 1,64] [--seconds 10]
    python -m benchmarks.speech fish --requests 64,256
    python -m benchmarks.speech spark --parts speech --engines native --requests 512 --voices 20 3000
    python -m benchmarks.speech fish --device cpu --tiny --engines native --requests 2 --seconds 0.2

`speech` goes through the pipeline of each engine: text and recording in, samples out, so all stages share the GPU. `--voices` are numbers of recordings, none of
which an engine knows at the start, each used twice or more. `streams` are first chunks of the native one. `--turns` are frames a turn of the native engine; 0: its own.
The prompts of a voice share its KV. `python -m benchmarks.kernel --parts frame` has a frame alone. The engine vllm is left out where vLLM is not installed.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoint import (
    TINY_LM,
    AnyIdSpeaks,
    AnyText,
    DummyWeights,
    dummy_bicodec,
    dummy_fish_codec,
    fish_config,
    spark_config,
    wav2vec2,
    write_lm,
)
from benchmarks.common import Bench, ThreadUse, Use, parser, read, serves
from benchmarks.engine import Watched
from benchmarks.voices import recording
from kernels.registry import on_device
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, open_executor
from pipelines.errors import ErrorCode, NightjarError
from pipelines.fish_speech import model as fish_lm
from pipelines.fish_speech import pipeline as fish_pipeline
from pipelines.fish_speech.model import FishModel
from pipelines.fish_speech.model import take_weights as take_fish
from pipelines.options import TokenModelOptions
from pipelines.request import (
    Done,
    Event,
    Failed,
    Generation,
    Message,
    Pipeline,
    Speech,
    SynthesisRequest,
    submit,
)
from pipelines.spark_tts import pipeline as spark_pipeline
from pipelines.spark_tts.config import LLM
from pipelines.spark_tts.language_model import Drawable, SparkModel, sized
from pipelines.spark_tts.language_model import take_weights as take_spark
from pipelines.spark_tts.reference import ReferenceEncoder
from pipelines.tokens import TokenHost, TokenRequest
from pipelines.vllm_engine.library import ModelSpec

#: Positions of a sequence, and of a page.
CONTEXT, PAGE_SIZE = 1024, 64
PARTS = ("speech", "streams")
#: Recordings of the warm-up, seconds of a recording, and threads that start requests.
VOICES, REFERENCE_SECONDS, FEEDERS = 16, 6.0, 32
TEXT = "The rain falls on the quiet street, and nobody walks. "
#: Requests of a steady run for each slot; and the number of slots for which one more request is in flight, to enter the
#: LM or to be decoded.
TURNS, BESIDE = 4, 4
#: Streams of a run for each one that is under way, and the least number of all: the first of each place are not
#: counted.
STREAM_TURNS, LEAST_STREAMS = 6, 60
#: A request of a pipeline by its number.
Make = Callable[[int], SynthesisRequest]


class Endless(spark_pipeline.SparkPipeline):
    """Speech as long as its request allows: random weights draw an end by chance."""

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, spark_pipeline.SparkRequestInfo]:
        wanted, info = super()._prepare(request)
        return replace(wanted, sampling=replace(wanted.sampling, ignore_end=True)), info


class Family:
    """A model for a benchmark: all but the LM, which both engines share, and the LM on each of them.

    Each family has its `model` with what it takes of a GPU (its weights are there already, every slot has room for a whole
    context), the codec's `stage` of a pipeline, the LM's `host` over our own engine, a `pipeline`, and for vLLM the
    `spec` with dummy weights.
    """

    #: Frames of a second of speech, and a recording's samples a second; vLLM's share of the memory.
    rate: float
    sample_rate: int
    memory_share: float
    #: The text of the recording of a voice.
    reference_text: str | None = None
    #: Slots of an engine that streams are measured on, at least: some are free for whole utterances as well.
    stream_slots = 0
    #: The first recording that was not cloned yet, beside those of the warm-up.
    first_voice = VOICES

    def __init__(self, bench: Bench) -> None:
        self.bench, self.weights, self._texts = bench, DummyWeights(bench.device), itertools.count()

    def request(self, name: str, index: int, seconds: float, voice: int | None = None) -> SynthesisRequest:
        """One of the recordings of the warm-up in turn, or `voice`. No text comes twice, so that requests share a voice and
        nothing else."""
        audio = spoken(index % VOICES if voice is None else voice, self.sample_rate)
        text = f"{next(self._texts)} {TEXT}" * 3
        messages = (Message("user", "text", text), Message("user", "audio", audio))
        generation = Generation(reference_text=self.reference_text, max_seconds=seconds)
        return SynthesisRequest(f"{name}-{index}", messages, generation, seed=index)

    def sizes(self, needs: MemoryNeeds, slots: int, streams: int) -> EngineOptions:
        """Of the native engine. `streams`: how many it is prepared for; as many slots are then kept free of whole
        utterances."""
        pages = slots * CONTEXT // PAGE_SIZE
        asked = NativeModelOptions(slots=slots, streams=streams, pages=pages, page_size=PAGE_SIZE)
        return asked.plan(needs, self.bench.device, CONTEXT, CONTEXT, frame_seconds=1 / self.rate)


class Spark(Family):
    """SparkTTS; with `tiny` an LM that a CPU can run."""

    rate, sample_rate = 50, 16_000
    memory_share, stream_slots = 0.4, 128

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench)
        config = spark_config(folder)
        if bench.options.tiny:
            config = replace(config, lm=replace(config.lm, **TINY_LM))
        self.config, self.vocabulary = config, AnyIdSpeaks()
        tokenizer, codec = dummy_bicodec(config, bench.device, bench.dtype)
        references = ReferenceEncoder(config, tokenizer, wav2vec2(bench.device))
        self.parts = spark_pipeline.Parts(config, self.vocabulary, references, codec)
        self.drawable = Drawable.of(self.vocabulary, config.lm)
        write_lm(folder / LLM, config.lm)

    def model(self) -> tuple[SparkModel, MemoryNeeds]:
        lm, dtype, device = self.config.lm, self.bench.dtype, self.bench.device
        with torch.inference_mode():
            weights = take_spark(self.weights, lm, self.drawable, dtype, device)
            model = SparkModel(lm, weights, self.drawable, CONTEXT)
        page = 2 * lm.layers * lm.kv_heads * lm.head_dim * PAGE_SIZE * dtype.itemsize
        return model, MemoryNeeds(0, 12 * (self.drawable.rows + 2 * lm.intermediate), page, 250_000)

    def sizes(self, needs: MemoryNeeds, slots: int, streams: int) -> EngineOptions:
        return sized(super().sizes(needs, slots, streams), self.bench.device)

    def stage(self) -> Any:
        return spark_pipeline.open_stage(self.parts.codec)

    def host(self, engine: Engine) -> TokenHost:
        return spark_pipeline.open_host(engine, self.drawable)

    def pipeline(self, host: TokenHost, stage: Any) -> Pipeline:
        return Endless(self.parts, stage, host, keep_unfinished=True)

    def spec(self) -> tuple[ModelSpec, TokenModelOptions]:
        spec = ModelSpec(self.config.folder / LLM, engine={"load_format": "dummy"})
        return spec, TokenModelOptions(max_context=2 * CONTEXT)


class Fish(Family):
    """Fish Speech S2, of the published or of tiny sizes."""

    rate, sample_rate, reference_text = 44_100 / 2048, 44_100, TEXT
    memory_share = 0.6

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench)
        self.config = config = fish_config(folder, bench.options.tiny)
        self.vocabulary = AnyText(config)
        self.codec = dummy_fish_codec(config, bench.device, bench.dtype)

    def model(self) -> tuple[FishModel, MemoryNeeds]:
        config, slow, dtype = self.config, self.config.slow, self.bench.dtype
        with torch.inference_mode():
            weights = take_fish(self.weights, config, dtype, self.bench.device)
            model = FishModel(config, weights, CONTEXT)
        page = 2 * slow.layers * slow.kv_heads * slow.head_dim * PAGE_SIZE * dtype.itemsize
        slot = 12 * (config.codebooks * config.fast.vocab + 2 * slow.intermediate)
        return model, MemoryNeeds(0, slot, page, 1_600_000)

    def stage(self) -> Any:
        return fish_pipeline.open_stage(self.codec.decoder)

    def host(self, engine: Engine) -> TokenHost:
        return fish_lm.native_host(self.config, engine)

    def pipeline(self, host: TokenHost, stage: Any) -> Pipeline:
        given = self.config, self.vocabulary, self.codec, host, stage
        return fish_pipeline.FishPipeline(*given, keep_unfinished=True)

    def spec(self) -> tuple[ModelSpec, TokenModelOptions]:
        dtype = "bfloat16" if self.bench.on_gpu else "float32"
        spec = fish_lm.model_spec(self.config, True, load_format="dummy")
        return spec, TokenModelOptions(dtype=dtype, max_context=CONTEXT)


FAMILIES: dict[str, type[Spark] | type[Fish]] = {"spark": Spark, "fish": Fish}


@lru_cache(maxsize=4096)
def spoken(voice: int, sample_rate: int) -> bytes:
    """The recording of a voice."""
    return recording(voice, REFERENCE_SECONDS, sample_rate)[0]


class Native:
    """A model's executor, over which pipelines are opened one after the other."""

    def __init__(self, family: Family, slots: int, streams: int = 0) -> None:
        self.family = family
        model, needs = family.model()
        self.sizes = family.sizes(needs, slots, streams)
        executor = open_executor(model, self.sizes, streams=streams)
        # No call shall meet a graph that is missing.
        with on_device(family.bench.device), torch.cuda.stream(executor.stream):
            while executor.prepare():
                pass
        self.watched = Watched(executor)
        #: Facts of it in rows.
        self.about = {"executor": executor.name, "prefill": "packed" if executor.packed else "padded"}

    def pipeline(self, turns: int = 0) -> Pipeline:
        """A pipeline with an engine of its own; `turns`: frames a scheduling turn, 0 for the engine's choice."""
        sizes = replace(self.sizes, frames_per_turn=turns or self.sizes.frames_per_turn)
        stage = self.family.stage()
        host = self.family.host(Engine(self.watched, sizes, sizes.slots, stage))
        return self.family.pipeline(host, stage)


class Speaking:
    """What is measured of a pipeline on either engine."""

    def __init__(self, family: Family, pipeline: Any, engine: str, about: dict[str, Any]) -> None:
        self.family, self.bench, self.pipeline = family, family.bench, pipeline
        self.options, self.about, self.engine = family.bench.options, about, engine

    def measure(self, parts: set[str], watched: Watched | None = None) -> None:
        """Does the parts, and closes the pipeline."""
        for name in PARTS:
            if name in parts:
                given = [watched] if name == "speech" else []
                self.bench.attempt(f"{self.engine}: {name}", getattr(self, name), *given)
        self.pipeline.close()

    def speech(self, watched: Watched | None = None) -> None:
        """Request to samples: a constant number in flight, of lengths from half to whole."""
        self.warm_up()
        whole = self.options.seconds
        lengths = [whole * (0.5 + 0.5 * step / 7) for step in range(8)]
        for number, voices in itertools.product(self.options.requests, self.options.voices):
            new = range(self.family.first_voice, self.family.first_voice + voices)
            self.family.first_voice += voices
            with ThreadPoolExecutor(FEEDERS) as threads:
                list(threads.map(partial(spoken, sample_rate=self.family.sample_rate), new))

            def make(n: int, new: Sequence[int] = new, name: str = f"steady{number}") -> SynthesisRequest:
                return self.family.request(name, n, lengths[n % 8], new[n % len(new)])

            found = self.steady(number, max(TURNS * number, 2 * voices), make, watched)
            about = {"engine": self.engine, "slots": number, "voices": voices, **self.about}
            self.bench.add({"part": "speech, end to end", "batch": number, **about, **found})

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

    def steady(self, slots: int, total: int, make: Make, watched: Watched | None) -> dict[str, Any]:
        """`total` requests, with all slots taken: measured from the end of the first one of each slot until no new ones
        follow. Several threads start them, since a start encodes a recording that is new."""
        under_way = slots + slots // BESIDE
        free, ends = threading.Semaphore(under_way), list[tuple[float, float]]()
        gpu, threads = Use(seconds=0.25), ThreadUse()
        futures: list[Future[Speech]] = []

        def ended(future: Future[Speech]) -> None:
            audio = 0.0 if future.exception() else future.result().duration_ms / 1000
            ends.append((time.perf_counter(), audio))
            free.release()

        def start(number: int) -> None:
            try:
                future = submit(self.pipeline, make(number))
            except NightjarError:
                free.release()
                raise
            future.add_done_callback(ended)
            futures.append(future)

        with ThreadPoolExecutor(FEEDERS) as feeders:
            started: list[Future[None]] = []
            for number in range(total):
                free.acquire()
                started.append(feeders.submit(start, number))
                if watched is not None and number == total // 2:
                    watched.start()
        found = {} if watched is None else watched.stop()
        for one in started:
            one.result()
        for future in futures:
            heard_seconds(future)
        shares = threads.shares()
        gpu.stop()
        names = shares.keys() & {"vllm-host", "engine", "codec-stage", "MainThread"}
        found |= {f"{name}_cpu_percent": 100 * shares[name] for name in names}
        # Callbacks run on the pipeline's threads, a moment after the results are there.
        while len(ends) < total:
            time.sleep(0.001)
        window = ends[slots : total - under_way]
        took, audio = window[-1][0] - ends[slots - 1][0], sum(heard for _, heard in window)
        since = ends[slots - 1][0] + time.time() - time.perf_counter()
        if use := gpu.of_gpu(self.bench.device, audio / took, since, since + took):
            found |= {"gpu_percent": 100 * use.pop("gpu_busy_nvml"), **use}
        return {"ms": 1000 * took, "audio_s_per_s": audio / took, "under_way": under_way, **found}

    def streams(self) -> None:
        """First chunks of each number of streams back to back: median and 95th of 100, without the first stream of each
        place."""
        seconds, request = min(4.0, self.options.seconds), self.family.request
        for number in self.options.streams:
            begin = time.perf_counter()
            total = max(STREAM_TURNS * number, LEAST_STREAMS) if self.bench.on_gpu else 2 * number
            make = partial(request, f"stream{number}", seconds=seconds)
            waits = first_chunks(self.pipeline, number, total, make)[number:]
            took = 1000 * (time.perf_counter() - begin)
            p50, p95 = np.percentile(waits, (50, 95)).tolist()
            row = {"part": "first chunk", "batch": number, "ms": took, "engine": self.engine, "slots": number}
            row |= {"streams": total, "p50_ms": p50, "p95_ms": p95, "longest_ms": max(waits)}
            self.bench.add(row | self.about)


def first_chunks(pipeline: Pipeline, at_once: int, total: int, make: Make) -> list[float]:
    """Milliseconds from each request to its first samples, with `at_once` streams; those that random weights
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
        for turns in options.turns:
            about = {"frames_per_turn": turns or opened.sizes.frames_per_turn, **opened.about}
            speaking = Speaking(family, opened.pipeline(turns), "native", about)
            speaking.measure(parts - {"streams"}, opened.watched)
        del opened
        bench.clean()
    if "streams" in parts:
        slots = max(family.stream_slots if bench.on_gpu else 0, 2 * max(options.streams))
        ready = Native(family, slots, max(options.streams))
        Speaking(family, ready.pipeline(), "native", ready.about).measure({"streams"})


def vllm(family: Family, parts: set[str]) -> None:
    """The parts on vLLM."""
    from pipelines.vllm_engine.host import VllmHost

    spec, chosen = family.spec()
    slots = max(family.bench.options.requests)
    begin = time.perf_counter()
    host = VllmHost(spec, replace(chosen, slots=slots, memory_share=family.memory_share))
    print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
    Speaking(family, family.pipeline(host, family.stage()), "vllm", {}).measure(parts)


def main(given: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("family", choices=FAMILIES)
    options = read(
        made, given, parts=list(PARTS), engines=["native", "vllm"], requests=[64, 256, 512], turns=[0],
        streams=[1, 64], voices=[20], seconds=10.0, known={"parts": PARTS, "engines": ("native", "vllm")},
    )  # fmt: skip
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    kind = FAMILIES[options.family]
    engines = [one for one in options.engines if one == "native" or find_spec("vllm")]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind is Spark
    facts: dict[str, Any] = {"codec_dtype": dtype, "seconds": options.seconds}
    if "vllm" in engines:
        from pipelines.vllm_engine.library import load_vllm

        facts["vllm"] = load_vllm().__version__
    bench = Bench(options.family, options, **facts, switch_ms=serves())
    with tempfile.TemporaryDirectory() as folder:
        family = kind(bench, Path(folder) / "checkpoint")
        for engine in engines:
            parts = set(options.parts) - ({"streams"} if engine == "vllm" else set())
            bench.attempt(engine, native if engine == "native" else vllm, family, parts)
    return bench.end(
        "part", "engine", "slots", "voices", "frames_per_turn", "ms", "audio_s_per_s", "p50_ms", "p95_ms"
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

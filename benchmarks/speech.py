"""SparkTTS and Fish Speech S2 on both engines in one run, at their published sizes with dummy weights.

    python -m benchmarks.speech spark [--parts lm,speech,streams] [--requests 64,256,512] [--engines native,vllm]
        [--turns 0,4] [--streams 1,64] [--seconds 10] [--codec-dtype bfloat16]
    python -m benchmarks.speech fish --requests 64,256
    python -m benchmarks.speech fish --device cpu --tiny --engines native --requests 2 --seconds 0.2

Of each engine `lm` is its LM alone, and `speech` goes through the pipeline: text and recording in, samples out, so all stages
share the GPU. `streams` are first chunks of the native one. `--turns` are frames a turn of the native engine; 0: its own.
The prompts of a voice share its KV. `python -m benchmarks.kernel --parts frame` has a frame alone, `python -m benchmarks.reference`
the loop of transformers. The engine vllm is left out where vLLM is not installed.
"""

from __future__ import annotations

import io
import itertools
import tempfile
import threading
import time
import wave
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from types import MappingProxyType
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
from benchmarks.common import Bench, GpuUse, ThreadUse, parser, read, serves
from benchmarks.engine import Watched
from kernels.registry import on_device
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, open_executor
from pipelines.errors import ErrorCode, NightjarError
from pipelines.fish_speech import engines as fish_engines
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
from pipelines.tokens import TokenHost, TokenRequest, Tokens, TokenSampling
from pipelines.vllm_engine.library import ModelSpec

#: Positions of a sequence, and of a page.
CONTEXT, PAGE_SIZE = 1024, 64
PARTS = ("lm", "speech", "streams")
VOICES, REFERENCE_SECONDS = 16, 6.0
TEXT = "The rain falls on the quiet street, and nobody walks. "
PROMPT_TOKENS = 120
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
    sampling: TokenSampling
    text_ids: int
    #: The text of the recording of a voice.
    reference_text: str | None = None
    #: Slots of an engine that streams are measured on, at least: some are free for whole utterances as well.
    stream_slots = 0
    #: Further fields of a sequence of the LM alone.
    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, bench: Bench) -> None:
        self.bench, self.weights = bench, DummyWeights(bench.device)

    def request(self, name: str, index: int, seconds: float) -> SynthesisRequest:
        """One of `VOICES` recordings, a text of its own."""
        audio = recording(REFERENCE_SECONDS, self.sample_rate, index % VOICES)
        messages = (Message("user", "text", f"{index} {TEXT}" * 3), Message("user", "audio", audio))
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
    sampling = TokenSampling(0, 0.8, 50, 0.95, ignore_end=True)
    memory_share, stream_slots = 0.4, 128

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench)
        config = spark_config(folder)
        if bench.options.tiny:
            config = replace(config, lm=replace(config.lm, **TINY_LM))
        self.config, self.vocabulary = config, AnyIdSpeaks()
        tokenizer, codec = dummy_bicodec(config, bench.device, bench.options.codec_dtype)
        references = ReferenceEncoder(config, tokenizer, wav2vec2(bench.device))
        self.parts = spark_pipeline.Parts(config, self.vocabulary, references, codec)
        self.drawable = Drawable.of(self.vocabulary, config.lm)
        self.text_ids = min(150_000, config.lm.vocab // 2)
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
    sampling = TokenSampling(0, 0.8, 30, 0.8, ignore_end=True)
    memory_share = 0.6

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench)
        self.config = config = fish_config(folder, bench.options.tiny)
        self.vocabulary, self.text_ids = AnyText(config), config.end - 2
        self.codec = dummy_fish_codec(config, bench.device, bench.options.codec_dtype)
        self.fields = {"prompt_codes": np.zeros((0, config.codebooks), np.int64)}
        self._texts = itertools.count()

    def request(self, name: str, index: int, seconds: float) -> SynthesisRequest:
        """No text comes twice, so that requests share a voice and nothing else."""
        return super().request(name, next(self._texts), seconds)

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
        return fish_engines.native_host(self.config, engine)

    def pipeline(self, host: TokenHost, stage: Any) -> Pipeline:
        given = self.config, self.vocabulary, self.codec, host, stage
        return fish_pipeline.FishPipeline(*given, keep_unfinished=True)

    def spec(self) -> tuple[ModelSpec, TokenModelOptions]:
        dtype = "bfloat16" if self.bench.on_gpu else "float32"
        spec = fish_engines.model_spec(self.config, True, load_format="dummy")
        return spec, TokenModelOptions(dtype=dtype, max_context=CONTEXT)


FAMILIES: dict[str, type[Spark] | type[Fish]] = {"spark": Spark, "fish": Fish}


@lru_cache(maxsize=64)
def recording(seconds: float, sample_rate: int, seed: int) -> bytes:
    """A tone in noise as a WAV file."""
    dice = np.random.default_rng(seed)
    moments = np.arange(int(seconds * sample_rate)) / sample_rate
    samples = 0.3 * np.sin(2 * np.pi * (100 + seed) * moments) + 0.02 * dice.standard_normal(len(moments))
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(sample_rate)
        made.writeframes((32767 * samples).astype("<i2").tobytes())
    return file.getvalue()


def prepare_all(executor: FrameExecutor, device: torch.device) -> None:
    """Captures every graph that the executor can have, so that no call meets one that is missing."""
    with on_device(device), torch.cuda.stream(executor.stream):
        while executor.prepare():
            pass


class Native:
    """A model's executor, over which pipelines are opened one after the other."""

    def __init__(self, family: Family, slots: int, streams: int = 0) -> None:
        self.family = family
        model, needs = family.model()
        self.sizes = family.sizes(needs, slots, streams)
        executor = open_executor(model, self.sizes, streams=streams)
        prepare_all(executor, family.bench.device)
        self.watched = Watched(executor)
        #: Facts of it in rows.
        self.about = {"executor": executor.name, "prefill": "packed" if executor.packed else "padded"}

    def pipeline(self, turns: int = 0) -> Pipeline:
        """A pipeline with an engine of its own; `turns`: frames a scheduling turn, 0 for the engine's choice."""
        sizes = replace(self.sizes, frames_per_turn=turns or self.sizes.frames_per_turn)
        stage = self.family.stage()
        host = self.family.host(Engine(self.watched, sizes, sizes.slots, stage))
        return self.family.pipeline(host, stage)


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
        """Does the parts, and closes the pipeline."""
        for name in PARTS:
            if name in parts:
                given = [watched] if name == "speech" else []
                self.bench.attempt(f"{self.engine}: {name}", getattr(self, name), *given)
        self.pipeline.close()

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
                    self._sequence(f"{number}.{turn}-{seed}", replace(sampling, seed=seed))
                    for seed in range(number)
                ]
                begin = time.perf_counter()
                for request, waiter in zip(asked, waiters, strict=True):
                    self.pipeline.host.submit(request, waiter)
                made = sum(waiter.future.result() for waiter in waiters)
                took = time.perf_counter() - begin
            more = {"tokens_per_s": made / took, "ms_a_step": 1000 * took * number / made, **self.about}
            audio = made / family.rate
            self.bench.timed("LM alone", number, 1000 * took, audio, engine=self.engine, slots=number, **more)

    def _sequence(self, name: str, sampling: TokenSampling) -> TokenRequest:
        index, vocabulary = next(self._indexes), self.family.text_ids
        prompt = [(index * 131 + n * 17) % vocabulary for n in range(PROMPT_TOKENS)]
        return TokenRequest(name, prompt, sampling, **self.family.fields)

    def speech(self, watched: Watched | None = None) -> None:
        """Request to samples: a constant number in flight, of lengths from half to whole."""
        self.warm_up()
        whole = self.options.seconds
        lengths = [whole * (0.5 + 0.5 * step / 7) for step in range(8)]
        for number in self.options.requests:
            make = lambda n, name=f"steady{number}": self.family.request(name, n, lengths[n % 8])  # noqa: E731
            found = self.steady(number, make, watched)
            ms, audio = found.pop("ms"), found.pop("audio_seconds")
            row = {"engine": self.engine, "slots": number, **self.about, **found}
            self.bench.timed("speech, end to end", number, ms, audio, **row)

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
            more = {"slots": number, "streams": total, "p50_ms": p50, "p95_ms": p95, "longest_ms": max(waits)}
            self.bench.timed("first chunk", number, took, engine=self.engine, **more, **self.about)


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
        streams=[1, 64], seconds=10.0, codec_dtype="", known={"parts": PARTS, "engines": ("native", "vllm")},
    )  # fmt: skip
    dtype = options.codec_dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.codec_dtype = getattr(torch, dtype)
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
        "part", "engine", "slots", "frames_per_turn", "ms", "audio_s_per_s", "tokens_per_s", "p50_ms", "p95_ms"
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

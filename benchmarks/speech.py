"""SparkTTS and Fish Speech S2 on both engines, and SpeechLM on vLLM, each in one run at its published size with dummy weights.

    python -m benchmarks.speech spark [--parts speech,streams] [--requests 64,256,512] [--engines native,vllm]
        [--turns 0,4] [--streams 1,64] [--seconds 10]
    python -m benchmarks.speech fish --requests 64,256
    python -m benchmarks.speech spark --parts speech --engines native --requests 512 --voices 20 3000
    python -m benchmarks.speech fish --device cpu --tiny --engines native --requests 2 --seconds 0.2
    python -m benchmarks.speech speechlm [--requests 512] [--prompt 120] [--steps 300] [--parts text,streams,mixed,pairs]
    python -m tests.support.vllm_v2 python -m benchmarks.speech speechlm --tiny --device cpu --requests 64 --prompt 20 --steps 36

`speech` goes through the pipeline of each engine: text and recording in, samples out, so all stages share the GPU. `--voices` are numbers of recordings, none of
which an engine knows at the start, each used twice or more. `streams` are first chunks of the native one. `--turns` are frames a turn of the native engine; 0: its own.
The prompts of a voice share its KV. `python -m benchmarks.kernel --parts frame` has a frame alone. The engine vllm is left out where vLLM is not installed.

Of SpeechLM, which needs vLLM, the backbone alone runs. `text` is text alone; `streams` draws all eight streams in every step; `mixed` writes text for two thirds
of the steps and then audio, and `pairs` does so with guidance, each request with a null branch of its own. A token is a stream-0 step of a request; null branches
do not count. Broken pairs are counted: under asynchronous scheduling there must be none. The last command has vLLM's V2 runner in Triton's interpreter, whose
steps are those of a GPU.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from benchmarks import checkpoint
from benchmarks.common import Bench, Row, ThreadUse, Use, environment_with, parser, read, serves
from benchmarks.engine import Watched
from benchmarks.voices import recording
from kernels.registry import on_device
from pipelines.codec.decoder import gathering_stage
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine, NativeHost
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, open_executor
from pipelines.engine_process.client import MAX_PENDING
from pipelines.errors import ErrorCode, NightjarError
from pipelines.fish_speech import model as fish_lm
from pipelines.fish_speech import pipeline as fish_pipeline
from pipelines.fish_speech.model import FishModel
from pipelines.fish_speech.model import take_weights as take_fish
from pipelines.options import TokenModelOptions
from pipelines.request import Done, Event, Failed, Generation, Message, Pipeline, SynthesisRequest, submit
from pipelines.results import Receiver
from pipelines.spark_tts import language_model as spark_lm
from pipelines.spark_tts import pipeline as spark_pipeline
from pipelines.spark_tts.config import LLM
from pipelines.spark_tts.language_model import Drawable, SparkModel
from pipelines.spark_tts.language_model import take_weights as take_spark
from pipelines.spark_tts.reference import ReferenceEncoder
from pipelines.speechlm.lm import Script, StreamSampling, model_spec
from pipelines.tokens import TokenHost, TokenRequest, Tokens
from pipelines.vllm_engine.library import ModelSpec, load_vllm
from tests.support.packages import write_package

if TYPE_CHECKING:
    from pipelines.speechlm.config import SpeechLmConfig
    from pipelines.vllm_engine.host import VllmHost

#: Positions of a sequence, and of a page.
CONTEXT, PAGE_SIZE = 1024, 64
PARTS, SPEECHLM_PARTS = ("speech", "streams"), ("text", "streams", "mixed", "pairs")
#: Recordings of the warm-up, seconds of a recording, and requests that are started at once.
VOICES, REFERENCE_SECONDS, FEEDERS = 16, 6.0, MAX_PENDING
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


class Dummy:
    """A family: its `model` with what it takes of a GPU (its weights are there already, every slot has room
    for a whole context), the codec's `stage`, the LM's `host` over our own engine, a `pipeline`, and for vLLM
    the `spec` with dummy weights."""

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
        self.bench, self.weights = bench, checkpoint.DummyWeights(bench.device)
        self._texts = itertools.count()

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


class Spark(Dummy):
    """SparkTTS; with `tiny` an LM that a CPU can run."""

    rate, sample_rate = 50, 16_000
    memory_share, stream_slots = 0.4, 128

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench)
        config = checkpoint.spark_config(folder)
        if bench.options.tiny:
            config = replace(config, lm=replace(config.lm, **checkpoint.TINY_LM))
        self.config, self.vocabulary = config, checkpoint.AnyIdSpeaks()
        tokenizer, codec = checkpoint.dummy_bicodec(config, bench.device, bench.dtype)
        references = ReferenceEncoder(config, tokenizer, checkpoint.wav2vec2(bench.device))
        self.parts = spark_pipeline.Parts(config, self.vocabulary, references, codec)
        self.drawable = Drawable.of(self.vocabulary, config.lm)
        checkpoint.write_lm(folder / LLM, config.lm)

    def model(self) -> tuple[SparkModel, MemoryNeeds]:
        lm, dtype, device = self.config.lm, self.bench.dtype, self.bench.device
        with torch.inference_mode():
            weights = take_spark(self.weights, lm, self.drawable, dtype, device)
            model = SparkModel(lm, weights, self.drawable, CONTEXT)
        page = 2 * lm.layers * lm.kv_heads * lm.head_dim * PAGE_SIZE * dtype.itemsize
        return model, MemoryNeeds(0, 12 * (self.drawable.rows + 2 * lm.intermediate), page, 250_000)

    def sizes(self, needs: MemoryNeeds, slots: int, streams: int) -> EngineOptions:
        sizes = super().sizes(needs, slots, streams)
        turn = spark_lm._TOKENS_PER_TURN if self.bench.on_gpu else sizes.frames_per_turn
        return replace(
            sizes,
            chunk_frames=spark_lm.CHUNK_TOKENS,
            first_frames=spark_lm.FIRST_TOKENS,
            frames_per_turn=turn,
        )

    def stage(self) -> Any:
        return spark_pipeline.open_stage(self.parts.codec)

    def host(self, engine: Engine) -> TokenHost:
        return NativeHost(engine, self.drawable.ids)

    def pipeline(self, host: TokenHost, stage: Any) -> Pipeline:
        return Endless(self.parts, stage, host, keep_unfinished=True)

    def spec(self) -> tuple[ModelSpec, TokenModelOptions]:
        spec = ModelSpec(self.config.folder / LLM, engine={"load_format": "dummy"})
        return spec, TokenModelOptions(max_context=2 * CONTEXT)


class Fish(Dummy):
    """Fish Speech S2, of the published or of tiny sizes."""

    rate, sample_rate, reference_text = 44_100 / 2048, 44_100, TEXT
    memory_share = 0.6

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench)
        self.config = config = checkpoint.fish_config(folder, bench.options.tiny)
        self.vocabulary = checkpoint.AnyText(config)
        self.codec = checkpoint.dummy_fish_codec(config, bench.device, bench.dtype)

    def model(self) -> tuple[FishModel, MemoryNeeds]:
        config, slow, dtype = self.config, self.config.slow, self.bench.dtype
        with torch.inference_mode():
            weights = take_fish(self.weights, config, dtype, self.bench.device)
            model = FishModel(config, weights, CONTEXT)
        page = 2 * slow.layers * slow.kv_heads * slow.head_dim * PAGE_SIZE * dtype.itemsize
        slot = 12 * (config.codebooks * config.fast.vocab + 2 * slow.intermediate)
        return model, MemoryNeeds(0, slot, page, 1_600_000)

    def stage(self) -> Any:
        return gathering_stage(self.codec.decoder, *fish_pipeline.GATHER)

    def host(self, engine: Engine) -> TokenHost:
        return fish_lm.native_host(self.config, engine)

    def pipeline(self, host: TokenHost, stage: Any) -> Pipeline:
        given = self.config, self.vocabulary, self.codec, host, stage
        return fish_pipeline.FishPipeline(*given, keep_unfinished=True)

    def spec(self) -> tuple[ModelSpec, TokenModelOptions]:
        dtype = "bfloat16" if self.bench.on_gpu else "float32"
        spec = fish_lm.model_spec(self.config, True, load_format="dummy")
        return spec, TokenModelOptions(dtype=dtype, max_context=CONTEXT)


@lru_cache(maxsize=4096)
def spoken(voice: int, sample_rate: int) -> bytes:
    """The recording of a voice."""
    return recording(voice, REFERENCE_SECONDS, sample_rate)[0]


class Native:
    """A model's executor, over which pipelines are opened one after the other."""

    def __init__(self, family: Spark | Fish, slots: int, streams: int = 0) -> None:
        self.family = family
        model, needs = family.model()
        self.sizes = family.sizes(needs, slots, streams)
        executor = open_executor(model, self.sizes, streams=streams)
        # No call shall meet a graph that is missing.
        with on_device(family.bench.device), torch.cuda.stream(executor.stream):
            while executor.prepare():
                pass
        self.watched: Any = Watched(executor)
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

    def __init__(self, family: Spark | Fish, pipeline: Any, engine: str, about: Row) -> None:
        self.family, self.bench, self.pipeline = family, family.bench, pipeline
        self.options, self.engine, self.about = family.bench.options, engine, {"engine": engine, **about}

    def measure(self, part: str, *watched: Watched) -> None:
        """Does a part, and closes the pipeline."""
        self.bench.attempt(f"{self.engine}: {part}", getattr(self, part), *watched)
        self.pipeline.close()

    def speech(self, watched: Watched | None = None) -> None:
        """Request to samples: a constant number in flight, of lengths from half to whole."""
        self.warm_up()
        whole, family = self.options.seconds, self.family
        for number, voices in itertools.product(self.options.requests, self.options.voices):
            new = range(family.first_voice, family.first_voice + voices)
            family.first_voice += voices
            with ThreadPoolExecutor(FEEDERS) as threads:
                list(threads.map(partial(spoken, sample_rate=family.sample_rate), new))

            def make(n: int, new: Sequence[int] = new, name: str = f"steady{number}") -> SynthesisRequest:
                return family.request(name, n, whole * (0.5 + n % 8 / 14), new[n % len(new)])

            found = self.steady(number, max(TURNS * number, 2 * voices), make, watched)
            row: Row = {"part": "speech, end to end", "batch": number, "slots": number, "voices": voices}
            self.bench.add(row | self.about | found)

    def warm_up(self) -> None:
        """Every voice once; and lengths and batches that the codec has not met, which cost the compilation of a
        kernel."""
        seconds, request = self.options.seconds, self.family.request
        warm = [request("warm", voice, min(1.0, seconds)) for voice in range(VOICES)]
        more = 12 * VOICES if self.bench.on_gpu else 0
        warm += [request("lengths", index, seconds * (1 + index % 64) / 64) for index in range(more)]
        for future in [submit(self.pipeline, one) for one in warm]:
            with silence_allowed():
                future.result()
        first_chunks(self.pipeline, 1, 1, lambda index: request("first", index, min(2.0, seconds)))

    def steady(self, slots: int, total: int, make: Make, watched: Watched | None) -> Row:
        """`total` requests, with all slots taken: measured from the end of the first one of each slot until no new ones
        follow. Some are started at once, since a start encodes a recording that is new."""
        under_way, ends = slots + slots // BESIDE, list[tuple[float, float]]()
        starts, gpu, threads = threading.Semaphore(FEEDERS), Use(seconds=0.25), ThreadUse()

        def speak(number: int) -> None:
            if watched is not None and number == total // 2:
                watched.start()
            with starts:
                future = submit(self.pipeline, make(number))
            audio = 0.0
            with silence_allowed():
                audio = future.result().duration_ms / 1000
            ends.append((time.perf_counter(), audio))

        with ThreadPoolExecutor(under_way) as clients:
            list(clients.map(speak, range(total)))
        found = {} if watched is None else watched.stop()
        shares = threads.shares()
        gpu.stop()
        names = shares.keys() & {"vllm-host", "engine", "codec-stage", "MainThread"}
        found |= {f"{name}_cpu_percent": 100 * shares[name] for name in names}
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
            row = {"part": "first chunk", "batch": number, "ms": took, "slots": number, "streams": total}
            row |= {"p50_ms": p50, "p95_ms": p95, "longest_ms": max(waits)}
            self.bench.add(row | self.about)


def first_chunks(pipeline: Pipeline, at_once: int, total: int, make: Make) -> list[float]:
    """Milliseconds from each request to its first samples, with `at_once` streams; those that random weights
    ended before it are left out. Raises the error of a stream that failed otherwise."""

    def first_ms(index: int) -> float | None:
        asked, ended, waits = make(index), SimpleQueue[Done | Failed](), list[float]()
        begin = time.perf_counter()

        def heard(event: Event) -> None:  # before a waiting thread has the interpreter
            if isinstance(event, Done | Failed):
                ended.put(event)
            elif len(event.samples) and not waits:
                waits.append(1000 * (time.perf_counter() - begin))

        pipeline.start(asked, heard, stream=True)
        with silence_allowed():
            if isinstance(end := ended.get(), Failed):
                raise end.error
        return waits[0] if waits else None

    with ThreadPoolExecutor(at_once) as clients:
        return [ms for ms in clients.map(first_ms, range(total)) if ms is not None]


@contextmanager
def silence_allowed() -> Iterator[None]:
    """Random weights may end a request before its first frame. Any other failure is raised."""
    try:
        yield
    except NightjarError as error:
        if error.code is not ErrorCode.SYNTH_NO_AUDIO:
            raise


def native(family: Spark | Fish, parts: set[str]) -> None:
    """The parts on our own engine: with few streams in mind for throughput, and prepared for streams for first
    chunks."""
    bench, options = family.bench, family.bench.options
    if "speech" in parts:
        opened = Native(family, max(options.requests))
        for turns in options.turns:
            about = {"frames_per_turn": turns or opened.sizes.frames_per_turn, **opened.about}
            Speaking(family, opened.pipeline(turns), "native", about).measure("speech", opened.watched)
        del opened
        bench.clean()
    if "streams" in parts:
        slots = max(family.stream_slots if bench.on_gpu else 0, 2 * max(options.streams))
        ready = Native(family, slots, max(options.streams))
        Speaking(family, ready.pipeline(), "native", ready.about).measure("streams")


def vllm(family: Spark | Fish, parts: set[str]) -> None:
    """Whole speech on vLLM, which has no streams here."""
    from pipelines.vllm_engine.host import VllmHost

    if "speech" not in parts:
        return
    (spec, chosen), begin = family.spec(), time.perf_counter()
    slots = max(family.bench.options.requests)
    host = VllmHost(spec, replace(chosen, slots=slots, memory_share=family.memory_share))
    print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
    Speaking(family, family.pipeline(host, family.stage()), "vllm", {}).measure("speech")


def both_engines(bench: Bench, folder: Path) -> None:
    """SparkTTS or Fish."""
    kind = Spark if bench.options.family == "spark" else Fish
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind is Spark
    family = kind(bench, folder / "checkpoint")
    for engine, measure in (("native", native), ("vllm", vllm)):
        if engine in bench.options.engines and (engine == "native" or find_spec("vllm")):
            bench.attempt(engine, measure, family, set(bench.options.parts))


#: The entry point by which vLLM's processes find our models.
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "nightjar"


class Load(NamedTuple):
    """Requests of one kind: `text` steps, then `rows` of audio, guided where cfg is above 1."""

    load: str
    requests: int
    prompt: int
    text: int
    rows: int
    cfg: float = 1.0


class _Answer(Receiver):
    """The receiver of one request to the engine."""

    def __init__(self) -> None:
        self.tokens_made = Future[Tokens]()

    def finished(self, tokens: Tokens) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.tokens_made.set_result(tokens)

    def failed(self, error: NightjarError) -> None:
        self.tokens_made.set_exception(error)


def ask(host: VllmHost, request: TokenRequest, steps: int, stops: tuple[int, ...]) -> Tokens:
    """What the engine writes: exactly `steps` steps, unless one of `stops` comes before."""

    def cut(one: TokenRequest) -> TokenRequest:
        sampling = replace(one.sampling, max_tokens=steps, stop_ids=stops, ignore_end=True)
        shadow = None if one.shadow is None else cut(one.shadow)
        return replace(one, sampling=sampling, shadow=shadow, extra={**one.extra, "min_rows": 1 << 20})

    answer = _Answer()
    host.submit(cut(request), answer)
    return answer.tokens_made.result()


def talk(load: Load, config: SpeechLmConfig, host: VllmHost, script: Script) -> bool:
    """One request: text first, then audio, both of fixed lengths. Whether its pair broke."""
    written, special = list[int](), config.specials
    if load.text:
        written = list(ask(host, script.text_request(config), load.text, ()).ids)
    if not load.rows:
        return False
    before = [special.text, *written, special.assistant, special.audio]
    request = script.audio_request(config, before, script.request_id)
    return ask(host, request, load.rows, (special.pad,)).finish == "stop"


def run(load: Load, config: SpeechLmConfig, host: VllmHost) -> Row:
    """Runs a load to its end; tokens are stream-0 steps of the requests themselves, without null branches."""
    scripts = list[Script]()
    first, span = config.text_token_offset, config.text_token_end - config.text_token_offset
    for number in range(load.requests):
        body = (first + (number * 7919 + n * 104_729) % span for n in range(load.prompt - 1))
        name, prompt = f"{load.load}-{number}", [config.specials.bos, *body]
        draws = StreamSampling(0.6, 20), StreamSampling(0.8, 20)
        scripts.append(Script(name, prompt, 1 << 20, number, *draws, load.rows > 0, load.cfg))
    moment = host.moment
    steps, sequences, preempted = moment.steps, moment.sequence_steps, moment.preemptions
    begin = time.perf_counter()
    with ThreadPoolExecutor(load.requests) as clients:
        talks = [clients.submit(talk, load, config, host, script) for script in scripts]
    seconds, failures = time.perf_counter() - begin, [one.exception() for one in talks if one.exception()]
    return {
        **load._asdict(),
        "tokens_per_s": load.requests * (load.text + load.rows) / seconds,
        "seconds": seconds,
        "engine_steps": moment.steps - steps,
        "sequence_steps": moment.sequence_steps - sequences,
        "preemptions": moment.preemptions - preempted,
        "broken_pairs": sum(one.result() for one in talks if not one.exception()),
        "failures": [str(failure) for failure in failures[:5]],
    }


def speechlm(bench: Bench, folder: Path) -> None:
    """SpeechLM's backbone."""
    from pipelines.vllm_engine.host import VllmHost

    options, tiny = bench.options, bench.options.tiny
    if all(entry.name != PLUGIN for entry in entry_points(group=PLUGIN_GROUP)):
        # vLLM's own processes find our models where the package is not installed, as on a machine that has only a checkout.
        write_package(folder, PLUGIN, PLUGIN_GROUP, {PLUGIN: "pipelines.vllm_engine.plugin:register"})
        os.environ |= environment_with(folder)
        sys.path.insert(0, str(folder))
    config = checkpoint.speechlm_config(folder, tiny)
    spec = model_spec(config, share_prefixes=True)
    count, prompt, third = max(options.requests), options.prompt, options.steps // 3
    sizes: Row = (
        {"max_context": 256} if tiny else {"max_context": 2048, "memory_share": 0.9, "step_tokens": 16_384}
    )
    sizes |= {"slots": 2 * count, "waiting_room": count, "tensor_parallel": options.tensor_parallel}
    host = VllmHost(replace(spec, engine={**spec.engine, "load_format": "dummy"}), TokenModelOptions(**sizes))
    try:
        run(Load("warm", min(32, count), prompt, 8, 8, 2.0), config, host)
        for number, part in itertools.product(options.requests, options.parts):
            text = {"text": options.steps, "streams": 0}.get(part, options.steps - third)
            rows = {"text": 0, "streams": options.steps}.get(part, third)
            load = Load(part, number, prompt, text, rows, 3.0 if part == "pairs" else 1.0)
            bench.attempt(f"{part} {number}", lambda load=load: bench.add(run(load, config, host)))
    finally:
        host.close()


def main(given: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("family", choices=("spark", "fish", "speechlm"))
    options = read(
        made, given, parts=str, engines=["native", "vllm"], requests=int, turns=[0], streams=[1, 64], voices=[20], seconds=10.0,
        prompt=120, steps=300, tensor_parallel=1, known={"engines": ("native", "vllm")},
    )  # fmt: skip
    alone = options.family == "speechlm"
    parts = SPEECHLM_PARTS if alone else PARTS
    if unknown := set(options.parts) - set(parts):
        made.error(f"{options.family} has no part {', '.join(unknown)}: {', '.join(parts)}")
    options.parts = options.parts or list(parts)
    options.requests = options.requests or ([512] if alone else [64, 256, 512])
    facts: dict[str, Any] = {}
    if alone or ("vllm" in options.engines and find_spec("vllm")):
        facts["vllm"] = load_vllm().__version__
    facts |= {} if alone else {"seconds": options.seconds, "switch_ms": serves()}
    bench = Bench(options.family, options, **facts)
    shown = {name: value for name, value in vars(options).items() if name != "json"}
    bench.keep(options=shown, codec_dtype=str(bench.dtype).removeprefix("torch."))
    with tempfile.TemporaryDirectory() as folder:
        (speechlm if alone else both_engines)(bench, Path(folder))
    return bench.end(
        "part", "load", "engine", "slots", "requests", "voices", "frames_per_turn", "ms", "audio_s_per_s", "p50_ms", "p95_ms",
        "tokens_per_s", "seconds", "engine_steps", "sequence_steps", "broken_pairs",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

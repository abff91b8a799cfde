"""SparkTTS on both engines in one run, at its published size with dummy weights on a GPU; or a small
checkpoint on a CPU.

    python -m benchmarks.spark_tts [--part accuracy,codec,tokenizer,frame,lm,speech,streams,stock,loop] [--requests 64,256,512]
        [--engines native,vllm] [--turns 0,4] [--streams 1,64] [--loop-batches 1,8,32] [--seconds 10] [--codec-dtype bfloat16]
    python -m benchmarks.spark_tts --device cpu --checkpoint FOLDER --part lm,speech,streams,compare --requests 8 --seconds 1

`accuracy` compares waves with those of float32 without TF32, the plain wave generator's and in bfloat16
the fused one's. `frame` is one step of the native engine alone. Of each engine `lm` is its LM alone,
`speech` goes through the pipeline: text and recording in, samples out, so all stages share the GPU;
`streams` are first chunks. `stock` is the same sequences as of `lm` through vLLM's own `LLM`. `loop` is
transformers' `generate` at several batches, then BiCodec one utterance after the other: the published code
at its best batch. `compare` is an engine and that loop at equal lengths and at lengths from a fifth to the
whole (a loop runs each batch to its longest row); tiny weights say what a step costs beside the model.
`python -m tests.support.golden_checkpoint tests/golden/spark/checkpoint FOLDER` writes such a checkpoint.
The engine vllm is left out where vLLM is not installed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from benchmarks.gpu import Bench, numbers, parser, serves
from benchmarks.native_parts import frame_part, prefill_of
from benchmarks.random_models.spark_tts import dummy_codecs
from benchmarks.roofline import SPARK, spark_frame
from benchmarks.spark_engines import (
    TOKENS_PER_SECOND,
    NativeSpark,
    Parts,
    checkpoint_parts,
    dummy_parts,
    vllm_pipeline,
)
from benchmarks.speech_load import (
    PROMPT_TOKENS,
    REFERENCE_SECONDS,
    codec_part,
    lm_part,
    prompt_ids,
    recording,
    sequences,
    speech_part,
    spoken_request,
    stream_part,
)
from benchmarks.watched_executor import Watched
from pipelines.engine.state import SamplingParams
from pipelines.request import SynthesisRequest
from pipelines.spark_tts.bicodec import BiCodec, BiCodecDecoder, Voice
from pipelines.spark_tts.config import LLM, SparkConfig
from pipelines.spark_tts.pipeline import SparkPipeline
from pipelines.spark_tts.reference import ReferenceEncoder
from pipelines.tokens import TokenHost, TokenSampling

SAMPLE_RATE = 16_000
#: RTFx kept busy that was aimed at, and that must be reached; and milliseconds of a first chunk of 1 and of
#: 64 streams (95th of 100).
AIM, MUST = 2400, 1900
CHUNK_AIMS = {1: (25, 60), 64: (80, 150)}
SAMPLING = TokenSampling(0, 0.8, 50, 0.95, ignore_end=True)
DRAWN = SamplingParams(0.8, 50, 0.95, 1.0, 0.8, 50, 0.95)
#: Slots of an engine that streams are measured on: some are free for whole utterances as well.
STREAM_SLOTS = 128


def accuracy_part(bench: Bench, settings: SparkConfig) -> None:
    """BiCodec plain, and in bfloat16 fused too, against plain float32 without TF32: root mean square error
    of the waves."""
    dice, dtype = torch.Generator().manual_seed(0), bench.options.codec_dtype
    codes = [torch.randint(8192, (length, 1), generator=dice) for length in (200, 300, 400, 500)]
    voices = [Voice(torch.randint(4096, (32,), generator=dice)) for _ in codes]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    exact = torch.cat(
        BiCodecDecoder(dummy_codecs(settings, bench.device, torch.float32, fused=False)[1]).decode(
            codes, voices
        )
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for fused in (False, True) if dtype == torch.bfloat16 else (False,):
        decoder = BiCodecDecoder(dummy_codecs(settings, bench.device, dtype, fused)[1])
        waves = torch.cat(decoder.decode(codes, voices))
        error = float((waves - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        ms = bench.milliseconds(lambda decoder=decoder: decoder.decode(codes, voices))
        name, audio = "fused" if fused else "plain", len(exact) / settings.sample_rate
        bench.timed(f"accuracy, {name}", len(codes), ms, audio, relative_error_ppm=1e6 * error)


def codec_alone(bench: Bench, codec: BiCodec) -> None:
    decoder, voice, frames = (
        BiCodecDecoder(codec),
        Voice(torch.randint(4096, (32,))),
        int(bench.options.seconds * TOKENS_PER_SECOND),
    )

    def decode(codes: list[Tensor]) -> object:
        return decoder.decode(codes, [voice] * len(codes))

    codec_part(
        bench,
        (1, 2, 4, 8, 16, 32, 64),
        frames,
        TOKENS_PER_SECOND,
        lambda length: torch.randint(8192, (length, 1)),
        decode,
    )


def tokenizer_part(bench: Bench, encoder: ReferenceEncoder) -> None:
    """References of 6 s to semantic and global tokens."""
    for batch in (1, 2, 4, 8, 16, 32, 64):
        clips = [encoder.read(recording(REFERENCE_SECONDS, SAMPLE_RATE, seed)) for seed in range(batch)]
        ms = bench.milliseconds(lambda clips=clips: encoder.encode(clips))
        bench.timed("reference encoder", batch, ms, REFERENCE_SECONDS * batch)


def stock_part(bench: Bench, folder: Path, text_ids: int) -> None:
    """The same sequences as of `lm` through vLLM's own scheduler and `LLM`; the second turn counts."""
    from vllm import LLM, SamplingParams

    options, length = bench.options, int(bench.options.seconds * TOKENS_PER_SECOND)
    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=max(options.requests),
        max_model_len=2048, gpu_memory_utilization=options.memory_share, enable_prefix_caching=False,
    )  # fmt: skip
    common: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "ignore_eos": True,
        "detokenize": False,
    }
    for number in options.requests:
        took, made = 0.0, 0
        for _ in range(2):
            drawn = [SamplingParams(seed=index, max_tokens=length, **common) for index in range(number)]
            begin = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": prompt_ids(index, text_ids)} for index in range(number)],
                drawn,
                use_tqdm=False,
            )
            took, made = (
                time.perf_counter() - begin,
                sum(len(output.outputs[0].token_ids) for output in outputs),
            )
        bench.timed(
            "LM, stock vLLM",
            number,
            1000 * took,
            made / TOKENS_PER_SECOND,
            slots=number,
            tokens_per_s=made / took,
        )
    llm.llm_engine.engine_core.shutdown()


def generated(model: Any, prompts: Tensor, length: int, sample: bool = True) -> list[list[int]]:
    """`length` tokens for each row of prompts [rows, tokens], by transformers' own loop."""
    drawn: dict[str, Any] = (
        {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
        if sample
        else {"do_sample": False}
    )
    fixed = {"max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **fixed, **drawn)
    return out[:, prompts.shape[1] :].tolist()


def loop_part(bench: Bench, settings: SparkConfig, folder: Path) -> None:
    """transformers' `generate`, then BiCodec row by row, its wave generator unfused as published."""
    from transformers import Qwen2Config

    codec = dummy_codecs(settings, bench.device, bench.options.codec_dtype, fused=False)[1]
    with bench.device:
        model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder)).to(bench.dtype).eval()  # pyright: ignore[reportArgumentType]
    seconds = bench.options.seconds
    for batch in bench.options.loop_batches:
        ids = torch.randint(settings.lm.vocab, (batch, PROMPT_TOKENS), device=bench.device)
        bench.wait()
        begin = time.perf_counter()
        for row in generated(model, ids, int(seconds * TOKENS_PER_SECOND)):
            # Any id is a semantic token: random weights do not write speech.
            codec.decode([torch.tensor(row) % 8192], [torch.zeros(32, dtype=torch.long)])
        bench.wait()
        bench.timed("transformers loop", batch, 1000 * (time.perf_counter() - begin), batch * seconds)


def compare_part(bench: Bench, parts: Parts, host: TokenHost, engine: str) -> None:
    """An engine and transformers' loop on a real checkpoint: tokens a second of sequences of set lengths,
    the best of three runs each."""
    config, count = parts.config, max(bench.options.requests)
    tokens = int(bench.options.seconds * TOKENS_PER_SECOND)
    prompts = [prompt_ids(index, parts.text_ids)[:20] for index in range(count)]
    mixed = [tokens // 5 + (tokens - tokens // 5) * n // max(count - 1, 1) for n in range(count)]
    model = Qwen2ForCausalLM.from_pretrained(config.folder / LLM, dtype=torch.float32).eval()

    def ours(lengths: list[int], sample: bool) -> None:
        drawn = replace(SAMPLING, temperature=0.8 if sample else 0.0)
        sequences(
            host,
            prompts,
            [replace(drawn, max_tokens=length, seed=index) for index, length in enumerate(lengths)],
        )

    def theirs(lengths: list[int], sample: bool) -> None:
        generated(model, torch.tensor(prompts), max(lengths), sample)

    def best(side: Callable[[list[int], bool], None], lengths: list[int], sample: bool) -> float:
        return min(bench.milliseconds(lambda: side(lengths, sample), 1) for _ in range(3))

    for name, lengths in (("equal", [tokens] * count), ("mixed", mixed)):
        for sample in (False, True):
            fast, slow, made = best(ours, lengths, sample), best(theirs, lengths, sample), 1000 * sum(lengths)
            more = {
                "tokens_per_s": made / fast,
                "transformers_tokens_per_s": made / slow,
                "ratio": slow / fast,
            }
            audio, part = sum(lengths) / TOKENS_PER_SECOND, f"LM, {name}, {'sampled' if sample else 'greedy'}"
            bench.timed(part, count, fast, audio, engine=engine, slots=count, **more)


def make(name: str, index: int, seconds: float) -> SynthesisRequest:
    return spoken_request(name, index, seconds, SAMPLE_RATE)


def native_parts(bench: Bench, parts: Parts, wanted: set[str]) -> None:
    """The parts on our own engine: with few streams in mind for throughput, and prepared for streams for
    first chunks."""
    options = bench.options
    if {"frame", "lm", "speech", "compare"} & wanted:
        opened = NativeSpark(bench, parts, max(options.requests))
        if "frame" in wanted:
            sizes = None if options.checkpoint or options.tiny else spark_frame()
            context = SPARK.prompt + int(options.seconds * TOKENS_PER_SECOND) // 2
            rows = sorted({1, *options.requests})
            bench.attempt(
                "frame",
                lambda: frame_part(bench, opened.executor, DRAWN, rows, context, TOKENS_PER_SECOND, sizes),
            )
        for turns in options.turns:
            pipeline = opened.pipeline(turns)
            about = {"frames_per_turn": turns or opened.sizes.frames_per_turn, **prefill_of(opened.executor)}
            try:
                engine_parts(bench, parts, pipeline, "native", wanted - {"streams"}, opened.watched, about)
            finally:
                pipeline.close()
        del opened
        bench.clean()
    if "streams" in wanted:
        slots = max(STREAM_SLOTS if bench.on_gpu else 0, 2 * max(options.streams))
        ready = NativeSpark(bench, parts, slots, max(options.streams))
        pipeline = ready.pipeline()
        try:
            engine_parts(bench, parts, pipeline, "native", {"streams"}, about=prefill_of(ready.executor))
        finally:
            pipeline.close()


def vllm_parts(bench: Bench, parts: Parts, wanted: set[str]) -> None:
    """The parts on vLLM."""
    begin = time.perf_counter()
    pipeline = vllm_pipeline(bench, parts, bench.options.requests, bench.options.memory_share)
    print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
    try:
        engine_parts(bench, parts, pipeline, "vllm", wanted)
    finally:
        pipeline.close()


def engine_parts(
    bench: Bench, parts: Parts, pipeline: SparkPipeline, engine: str, wanted: set[str], watched: Watched | None = None,
    about: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """What is measured of either engine."""
    options = bench.options
    sampling = replace(SAMPLING, max_tokens=int(options.seconds * TOKENS_PER_SECOND))
    if "lm" in wanted:
        lm = partial(
            lm_part,
            bench,
            pipeline.host,
            engine,
            options.requests,
            parts.text_ids,
            TOKENS_PER_SECOND,
            sampling,
            about,
        )
        bench.attempt(f"{engine}: lm", lm)
    if "speech" in wanted:
        speech = partial(
            speech_part, bench, pipeline, engine, options.requests, options.seconds, make, watched, about
        )
        bench.attempt(f"{engine}: speech", speech)
    if "streams" in wanted:
        seconds = min(4.0, options.seconds)
        bench.attempt(
            f"{engine}: streams",
            lambda: stream_part(bench, pipeline, engine, options.streams, seconds, make, about),
        )
    if "compare" in wanted:
        bench.attempt(f"{engine}: compare", lambda: compare_part(bench, parts, pipeline.host, engine))


def arguments_of(given: list[str] | None) -> Any:
    made = parser(__doc__)
    made.add_argument("--part", default="accuracy,codec,tokenizer,frame,lm,speech,streams,stock,loop")
    made.add_argument("--engines", default="native,vllm", help="which engines, in this order")
    made.add_argument("--requests", type=numbers, default="64,256,512")
    made.add_argument(
        "--turns",
        type=numbers,
        default="0",
        help="frames a turn of the native engine, one run each; 0: its own choice",
    )
    made.add_argument("--streams", type=numbers, default="1,64", help="streams at once")
    made.add_argument("--stream-engines", default="native", help="engines of the part `streams`")
    made.add_argument("--loop-batches", type=numbers, default="1,8,32,64,128,256,512,1024")
    made.add_argument("--seconds", type=float, default=10.0)
    made.add_argument(
        "--codec-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16, on a CPU float32",
    )
    made.add_argument("--memory-share", type=float, default=0.4, help="of vLLM")
    made.add_argument("--checkpoint", type=Path, help="a checkpoint in float32 instead of dummy weights")
    return made.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments_of(given)
    wanted, engines = (
        set(options.part.split(",")),
        [one for one in options.engines.split(",") if one == "native" or find_spec("vllm")],
    )
    codec_dtype = options.codec_dtype or (
        "float32" if options.device == "cpu" or options.checkpoint else "bfloat16"
    )
    options.codec_dtype = getattr(torch, codec_dtype)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    facts: dict[str, Any] = {
        "codec_dtype": codec_dtype,
        "seconds": options.seconds,
        "aim": AIM,
        "must": MUST,
        "first_chunk_aims_ms": CHUNK_AIMS,
        "switch_ms": serves(),
    }
    if find_spec("vllm") and ("vllm" in engines or "stock" in wanted):
        from pipelines.vllm_engine.library import load_vllm

        facts["vllm"] = load_vllm().__version__
    bench = Bench("spark_tts", options, **facts)
    with tempfile.TemporaryDirectory() as temporary:
        parts = (
            checkpoint_parts(bench, options.checkpoint)
            if options.checkpoint
            else dummy_parts(bench, Path(temporary), options.tiny)
        )
        if "accuracy" in wanted:
            bench.attempt("accuracy", lambda: accuracy_part(bench, parts.config))
        if "codec" in wanted:
            bench.attempt("codec", lambda: codec_alone(bench, parts.codec))
        if "tokenizer" in wanted:
            bench.attempt("tokenizer", lambda: tokenizer_part(bench, parts.references))
        for engine in engines:
            run, of_it = (native_parts, wanted) if engine == "native" else (vllm_parts, wanted - {"frame"})
            of_it = of_it if engine in options.stream_engines.split(",") else of_it - {"streams"}
            if of_it & {"frame", "lm", "speech", "streams", "compare"}:
                bench.attempt(engine, lambda run=run, of_it=of_it: run(bench, parts, of_it))
        if "stock" in wanted and find_spec("vllm"):
            bench.attempt("stock", lambda: stock_part(bench, parts.spec.folder, parts.text_ids))
        if "loop" in wanted:
            bench.attempt("loop", lambda: loop_part(bench, parts.config, parts.spec.folder))
    return bench.end()


if __name__ == "__main__":
    raise SystemExit(main())

"""Fish Speech S2 on both engines in one run, at its published size with dummy weights on a GPU; or a small
checkpoint on a CPU.

    python -m benchmarks.fish_speech [--part frame,step,codec,lm,speech,streams,loop] [--requests 16,64,256] [--engines native,vllm]
        [--turns 0] [--kept-voices 1,0] [--seconds 10] [--codec-dtype bfloat16]
    python -m benchmarks.fish_speech --tiny --device cpu --engines native --part frame,step,codec,lm,speech,loop --requests 2 --seconds 0.5
    python -m benchmarks.fish_speech --device cpu --checkpoint FOLDER --engines native --part lm,speech --requests 2 --seconds 0.5

`frame` is a whole frame of the native engine alone; `step` is sampling and fast AR alone, as the graphs
that vLLM's step replays, and as calls of their kernels. Of each engine `lm` is its LM alone, `speech` goes
through the pipeline: text and recording in, samples out, so all stages share the GPU; `streams` are first
chunks. The prompts of a voice share its KV; `--kept-voices 1,0` measures vLLM with it and without. `loop`
is the same model as a plain loop: transformers' Qwen3 with a KV cache, the fast AR's kernels called one by
one, the codec one utterance after the other. A table comes last, and where a step of vLLM goes. The engine
vllm is left out where vLLM is not installed.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from benchmarks.fish_engines import (
    NativeFish,
    Parts,
    checkpoint_parts,
    dummy_parts,
    prompt_positions,
    vllm_pipeline,
)
from benchmarks.gpu import Bench, numbers, parser, serves
from benchmarks.native_parts import frame_part, prefill_of
from benchmarks.random_models.fish_speech import dummy_codec, dummy_frames
from benchmarks.roofline import FISH, fish_frame
from benchmarks.speech_load import (
    PROMPT_TOKENS,
    REFERENCE_SECONDS,
    TEXT,
    codec_part,
    lm_part,
    speech_part,
    spoken_request,
    stream_part,
)
from benchmarks.watched_executor import Watched
from pipelines.engine.state import SamplingParams
from pipelines.fish_speech.codec import Codec
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.pipeline import FishPipeline
from pipelines.request import SynthesisRequest
from pipelines.tokens import TokenSampling

#: RTFx kept busy that was aimed at, and that must be reached; on vLLM with kept voices.
AIM, MUST, ON_VLLM_AIM, ON_VLLM_MUST = 700, 520, 450, 400
DRAWN = SamplingParams(0.8, 30, 0.8, 1.0, 0.8, 30, 0.8)
LOOP_FRAMES = 40


@torch.inference_mode()
def step_part(bench: Bench, config: FishConfig) -> None:
    """Sampling and fast AR: as the graphs of vLLM's step, as calls of the kernels, and as graphs without
    the fast AR's layers."""
    bare = replace(config, fast=replace(config.fast, layers=0))
    for part, sizes, graphed in (
        ("frame, graph", config, True),
        ("frame, calls", config, False),
        ("frame, draws and heads", bare, True),
    ):
        frames = dummy_frames(sizes, max(bench.options.requests), bench.device, bench.dtype, graphed)
        for count in bench.options.requests:
            hidden = torch.randn(count, config.slow.hidden, device=bench.device, dtype=bench.dtype)
            rows = torch.arange(count, device=bench.device)
            ms = bench.milliseconds(lambda frames=frames, hidden=hidden, rows=rows: frames(hidden, rows))
            bench.timed(part, count, ms, None if sizes is bare else count / config.frames_per_second)


@torch.inference_mode()
def codec_parts(bench: Bench, config: FishConfig, codec: Codec) -> None:
    """Whole utterances, chunks of streams, and references."""
    requests, decoder, rate = bench.options.requests, codec.decoder, config.frames_per_second

    def draw(frames: int) -> Tensor:
        return torch.randint(config.codec.residual_codes, (frames, config.codebooks))

    frames = max(2, int(bench.options.seconds * rate))
    codec_part(
        bench, sorted({1, 8, *(min(number, 64) for number in requests)}), frames, rate, draw, decoder.decode
    )
    for batch in requests:
        states, chunk = [decoder.new_state() for _ in range(batch)], [draw(12) for _ in range(batch)]
        ms = bench.milliseconds(lambda states=states, chunk=chunk: decoder.decode_chunk(states, chunk))
        bench.timed("codec, chunks of 12", batch, ms, 12 * batch / rate)
    samples = torch.randn(int(REFERENCE_SECONDS * config.sample_rate), device=bench.device) * 0.1
    bench.timed(
        "reference encoder", 1, bench.milliseconds(lambda: codec.encoder.encode(samples)), REFERENCE_SECONDS
    )


#: No text comes twice, so that requests share a voice and nothing else.
_texts = itertools.count()


def make(name: str, index: int, seconds: float) -> SynthesisRequest:
    return spoken_request(name, next(_texts), seconds, 44_100, TEXT)


def native_parts(bench: Bench, parts: Parts, wanted: set[str]) -> None:
    """The parts on our own engine: with few streams in mind for throughput, and prepared for streams for
    first chunks."""
    options, rate = bench.options, parts.config.frames_per_second
    if {"frame", "lm", "speech"} & wanted:
        opened = NativeFish(bench, parts, max(options.requests))
        if "frame" in wanted:
            sizes, context = (
                None if options.tiny or options.checkpoint else fish_frame(),
                FISH.prompt + int(options.seconds * rate) // 2,
            )
            bench.attempt(
                "frame",
                lambda: frame_part(
                    bench, opened.executor, DRAWN, sorted({1, *options.requests}), context, rate, sizes
                ),
            )
        for turns in options.turns:
            pipeline = opened.pipeline(turns)
            about = {
                "frames_per_turn": turns or opened.sizes.frames_per_turn,
                **prefill_of(opened.executor),
                "kept_voices": True,
            }
            try:
                engine_parts(bench, parts, pipeline, "native", wanted - {"streams"}, about, opened.watched)
            finally:
                pipeline.close()
        del opened
        bench.clean()
    if "streams" in wanted:
        ready = NativeFish(bench, parts, 2 * max(options.streams), max(options.streams))
        pipeline = ready.pipeline()
        try:
            engine_parts(bench, parts, pipeline, "native", {"streams"}, prefill_of(ready.executor))
        finally:
            pipeline.close()


def vllm_parts(bench: Bench, parts: Parts, wanted: set[str]) -> None:
    """The parts on vLLM, once for each choice of keeping voices; the LM alone, whose prompts share
    nothing, in the first one."""
    for run, kept in enumerate(bench.options.kept_voices):
        begin = time.perf_counter()
        pipeline = vllm_pipeline(bench, parts, max(bench.options.requests), bool(kept))
        print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
        try:
            engine_parts(
                bench,
                parts,
                pipeline,
                "vllm",
                wanted if run == 0 else wanted & {"speech"},
                {"kept_voices": bool(kept)},
            )
            bench.keep(
                **{
                    f"{'kept' if kept else 'not_kept'}_{name}": value
                    for name, value in prompt_positions().items()
                }
            )
        finally:
            pipeline.close()


def engine_parts(
    bench: Bench, parts: Parts, pipeline: FishPipeline, engine: str, wanted: set[str], about: dict[str, Any],
    watched: Watched | None = None,
) -> None:  # fmt: skip
    """What is measured of either engine."""
    options, config = bench.options, parts.config
    rate = config.frames_per_second
    sampling = TokenSampling(max(2, int(options.seconds * rate)), 0.8, 30, 0.8, ignore_end=True)
    if "lm" in wanted:
        none = np.zeros((0, config.codebooks), np.int64)
        words = (pipeline.host, engine, options.requests, config.end - 2, rate, sampling, about)
        bench.attempt(f"{engine}: lm", lambda: lm_part(bench, *words, prompt_codes=none))
    if "speech" in wanted:
        speech = (pipeline, engine, options.requests, options.seconds, make, watched, about)
        bench.attempt(f"{engine}: speech", lambda: speech_part(bench, *speech))
    if "streams" in wanted:
        streams = (pipeline, engine, options.streams, min(4.0, options.seconds), make, about)
        bench.attempt(f"{engine}: streams", lambda: stream_part(bench, *streams))


@torch.inference_mode()
def loop_part(bench: Bench, config: FishConfig) -> None:
    """The same model as a plain loop, at batches of equal length: frames of a batch, then its audio one
    utterance after the other."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from pipelines.fish_speech.engines import qwen3_config

    device = bench.device
    with torch.device(device):
        slow = Qwen3ForCausalLM(Qwen3Config(**qwen3_config(config))).to(bench.dtype).eval()
        books = (torch.randn(config.fast.vocab * config.codebooks, config.slow.hidden) * 0.02).to(bench.dtype)
    drawer = dummy_frames(config, max(bench.options.requests), device, bench.dtype, graphed=False)
    decoder = dummy_codec(config, device, bench.options.codec_dtype).decoder
    offsets = torch.arange(config.codebooks, device=device) * config.fast.vocab
    ids = torch.tensor([*config.semantic, *[config.end] * config.fast.vocab], device=device)
    frames = min(LOOP_FRAMES, max(2, int(bench.options.seconds * config.frames_per_second)))

    def work(batch: int) -> None:
        """`frames` steps of every row, then the codec."""
        rows, kept, cache = torch.arange(batch, device=device), [], None
        x: Tensor = slow.get_input_embeddings()(
            torch.randint(config.end - 2, (batch, PROMPT_TOKENS), device=device)
        )
        for _ in range(frames):
            out = slow.model(inputs_embeds=x, past_key_values=cache, use_cache=True)
            cache, hidden = out.past_key_values, out.last_hidden_state[:, -1]
            codes = drawer(hidden, rows)
            kept.append(codes)
            spoken = embedding_bag(codes + offsets, books, mode="sum")
            x = ((slow.get_input_embeddings()(ids[codes[:, 0]]) + spoken) * (config.codebooks + 1) ** -0.5)[
                :, None
            ]
        for codes in torch.stack(kept, dim=1).cpu():
            decoder.decode([codes])

    for batch in bench.options.requests:
        ms = bench.milliseconds(lambda batch=batch: work(batch), runs=1)
        bench.timed(
            "plain loop, end to end",
            batch,
            ms,
            batch * frames / config.frames_per_second,
            ms_a_step=ms / frames,
        )


def where_a_step_goes(bench: Bench) -> list[str]:
    """A step of the engine, cut into the frame's graph, its draws and heads, and what is left: the slow AR
    and vLLM's host."""
    found = {(row["part"], row["batch"]): row for row in bench.rows if row.get("engine", "vllm") == "vllm"}
    lines = []
    for number in bench.options.requests:
        step, frame = found.get(("LM alone", number)), found.get(("frame, graph", number))
        draws = found.get(("frame, draws and heads", number))
        if step and frame and draws:
            whole = step["ms_a_step"]
            parts = {
                "fast AR's layers": frame["ms"] - draws["ms"],
                "draws and heads": draws["ms"],
                "slow AR and host": whole - frame["ms"],
            }
            shares = ", ".join(
                f"{name} {value:.2f} ms ({100 * value / whole:.0f} %)" for name, value in parts.items()
            )
            lines.append(f"step of {number}: {whole:.2f} ms = {shares}")
    return lines


def arguments_of(given: list[str] | None) -> Any:
    made = parser(__doc__)
    made.add_argument("--part", default="frame,step,codec,lm,speech,loop")
    made.add_argument("--engines", default="native,vllm", help="which engines, in this order")
    made.add_argument("--requests", type=numbers, default="16,64,256")
    made.add_argument(
        "--turns",
        type=numbers,
        default="0",
        help="frames a turn of the native engine, one run each; 0: its own choice",
    )
    made.add_argument("--streams", type=numbers, default="1,64", help="streams at once")
    made.add_argument(
        "--kept-voices",
        type=numbers,
        default="1",
        help="of vLLM, one run each: whether prompts of a voice share its KV",
    )
    made.add_argument("--seconds", type=float, default=10.0)
    made.add_argument(
        "--codec-dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: bfloat16, on a CPU float32",
    )
    made.add_argument("--memory-share", type=float, default=0.6, help="of vLLM")
    made.add_argument("--eager", action="store_true", help="vLLM without compilation and graphs")
    made.add_argument("--checkpoint", type=Path, help="a checkpoint instead of dummy weights")
    return made.parse_args(given)


def main(arguments: list[str] | None = None) -> int:
    options = arguments_of(arguments)
    codec_dtype = options.codec_dtype or (
        "float32" if options.device == "cpu" or options.checkpoint else "bfloat16"
    )
    options.codec_dtype, wanted = getattr(torch, codec_dtype), set(options.part.split(","))
    engines = [one for one in options.engines.split(",") if one == "native" or find_spec("vllm")]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    facts: dict[str, Any] = {"codec_dtype": codec_dtype, "seconds": options.seconds, "aim": AIM, "must": MUST}
    facts |= {"on_vllm_aim": ON_VLLM_AIM, "on_vllm_must": ON_VLLM_MUST, "switch_ms": serves()}
    if "vllm" in engines:
        from pipelines.vllm_engine.library import load_vllm

        facts["vllm"] = load_vllm().__version__
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench("fish_speech", options, **facts)
        chosen, made = options.checkpoint, Path(folder) / "checkpoint"
        parts = checkpoint_parts(bench, chosen) if chosen else dummy_parts(bench, made, options.tiny)
        if "step" in wanted and not chosen:
            bench.attempt("step", lambda: step_part(bench, parts.config))
        if "codec" in wanted:
            bench.attempt("codec", lambda: codec_parts(bench, parts.config, parts.codec))
        for engine in engines:
            run, of_it = (native_parts, wanted) if engine == "native" else (vllm_parts, wanted - {"frame"})
            if of_it & {"frame", "lm", "speech", "streams"}:
                bench.attempt(engine, lambda run=run, of_it=of_it: run(bench, parts, of_it))
        if "loop" in wanted:
            bench.attempt("loop", lambda: loop_part(bench, parts.config))
    print("\n".join(where_a_step_goes(bench)))
    return bench.end()


if __name__ == "__main__":
    raise SystemExit(main())

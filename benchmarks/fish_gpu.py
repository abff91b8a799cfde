"""Fish Speech S2 on a GPU at its published size, random weights: the step behind the slow AR, codec, LM, and prompts to audio.

    python -m benchmarks.fish_gpu [--part frame,codec,lm,speech,loop] [--requests 16,64,256] [--seconds 10] [--codec-dtype bfloat16]
    python -m benchmarks.fish_gpu --tiny --device cpu --part frame,codec,loop --requests 2 --seconds 0.5

`frame` times sampling and fast AR alone, as the graphs that the engine replays, and as plain calls. `lm` is our host alone; `speech`
goes through the pipeline: text and recording in, samples out, so all stages share the GPU. `loop` is the same model as a plain loop:
transformers' Qwen3 with a KV cache, the fast AR called plainly, the codec one utterance after the other. A table comes last, and where
a step's time goes; JSON goes to $OUT (or the working folder) as fish_gpu.json, after every part. Needs vLLM; written for 0.26 and 0.32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear

from benchmarks import fish_random
from benchmarks.steady import steady
from pipelines.errors import NightjarError
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.fast_ar import FastAr
from pipelines.fish_speech.frame import WINDOW, FrameGraphs, FrameMaker, Rows
from pipelines.nn.options import open_device
from pipelines.request import Generation, Message, SynthesisRequest

PROMPT_TOKENS = 120
VOICES = 16
REFERENCE_SECONDS = 6.0
TEXT = "The rain falls on the quiet street, and nobody walks. "
#: What the issue asks for in audio seconds a second, end to end.
AIM, MUST = 400, 200
#: A reference of six seconds, a text and ten seconds of speech.
CONTEXT = 1024
LOOP_FRAMES = 40

Row = dict[str, Any]


class Bench:
    """What the parts share, and what they have found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = open_device(options.device)
        self.requests = [int(number) for number in options.requests.split(",")]
        self.seconds: float = options.seconds
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.codec_dtype = getattr(torch, options.codec_dtype)
        self.folder = Path(tempfile.mkdtemp(prefix="fish-")) / "checkpoint"
        self.config: FishConfig = fish_random.write_checkpoint(self.folder, options.tiny)
        self.rows: list[Row] = []
        self.faults: dict[str, str] = {}

    @property
    def frames(self) -> int:
        """Of one utterance."""
        return max(2, int(self.seconds * self.config.frames_per_second))

    def add(self, part: str, batch: int, ms: float, frames: float | None, **more: float) -> None:
        """One line: milliseconds of a call, and the frames that it made."""
        row: Row = {"part": part, "batch": batch, "ms": ms, **more}
        if frames is not None:
            row |= {"frames_per_s": 1000 * frames / ms, "audio_s_per_s": 1000 * frames / ms / self.config.frames_per_second}
        self.rows.append(row)
        print(line(row), flush=True)

    def milliseconds(self, work: Callable[[], object], runs: int = 5) -> float:
        """Median time of a call that ends when the device is done, after two that do not count."""
        times = []
        for _ in range(runs + 2):
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            times.append(1000 * (time.perf_counter() - begin))
        return statistics.median(times[2:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def write(self) -> None:
        facts = {"device": "cpu", "torch": torch.__version__, "codec_dtype": self.options.codec_dtype, "seconds": self.seconds}
        if self.device.type == "cuda":
            facts["device"] = torch.cuda.get_device_name()
        content = {**facts, **fish_random.facts(self.config), "aim": AIM, "must": MUST, "faults": self.faults, "rows": self.rows}
        out = Path(os.environ.get("OUT", ".")) / "fish_gpu.json"
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def line(row: Row) -> str:
    rate = f"{row['frames_per_s']:12,.0f} frames/s{row['audio_s_per_s']:10,.1f} audio-s/s" if "audio_s_per_s" in row else " " * 41
    known = ("part", "batch", "ms", "frames_per_s", "audio_s_per_s")
    more = "".join(f"  {name} {value:,.1f}" for name, value in row.items() if name not in known)
    return f"{row['part']:28}{row['batch']:6d}{row['ms']:12,.2f} ms{rate}{more}"


def random_fast(bench: Bench) -> FastAr:
    with torch.device(bench.device):
        fast = FastAr(bench.config).to(bench.dtype).requires_grad_(False)
    dice = torch.Generator(device=bench.device).manual_seed(0)
    for tensor in fast.state_dict().values():
        tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=dice)
    return fast


def random_rows(bench: Bench, count: int) -> Rows:
    config, device = bench.config, bench.device
    numbers = [torch.full((count,), value, device=device) for value in (0.8, 0.8)]
    return Rows(
        torch.randn(count, config.slow.dim, device=device, dtype=bench.dtype),
        torch.randn(count, len(config.semantic) + 1, device=device, dtype=bench.dtype),
        torch.zeros(count, WINDOW, dtype=torch.int64, device=device),
        *numbers,
        torch.full((count,), 30, device=device),
        torch.arange(count, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
    )


@torch.inference_mode()
def frame_part(bench: Bench) -> None:
    """Sampling and fast AR: plainly, as the graphs of the engine, and as graphs without the products of the fast AR's layers."""
    fast, most = random_fast(bench), max(bench.requests)
    plain = FrameMaker(bench.config, fast, bench.device)
    for count in bench.requests:
        rows = random_rows(bench, count)
        bench.add("frame, plain calls", count, bench.milliseconds(lambda rows=rows: plain(rows)), count)
    on_gpu = bench.device.type == "cuda"
    maker = FrameMaker(bench.config, fast, bench.device, compiled=on_gpu and not bench.options.no_compile)
    graphs = FrameGraphs(maker, most)
    for count in bench.requests:
        rows = random_rows(bench, count)
        bench.add("frame, graph", count, bench.milliseconds(lambda rows=rows: graphs(rows, False)), count)
    layers, fast.layers = fast.layers, torch.nn.ModuleList()
    empty = FrameGraphs(maker, most)
    for count in bench.requests:
        rows = random_rows(bench, count)
        bench.add("frame, draws and heads", count, bench.milliseconds(lambda rows=rows: empty(rows, False)), None)
    fast.layers = layers


@torch.inference_mode()
def codec_part(bench: Bench) -> None:
    """Whole utterances at batches of equal length and of mixed ones, chunks of streams, and references."""
    codec, frames = fish_random.codec(bench.config, bench.device, bench.codec_dtype), bench.frames
    decoder, most = codec.decoder, bench.config.codec.residual_codes
    for batch in sorted({1, 8, *[min(number, 64) for number in bench.requests]}):
        for kind in ("equal", "mixed"):
            lengths = [frames if kind == "equal" else frames // 2 + frames // 2 * (n + 1) // batch for n in range(batch)]
            codes = [torch.randint(most, (max(length, 1), bench.config.codebooks)) for length in lengths]
            ms = bench.milliseconds(lambda codes=codes: decoder.decode(codes))
            bench.add(f"codec, {kind}", batch, ms, sum(map(len, codes)))
    for batch in bench.requests:
        states = [decoder.new_state() for _ in range(batch)]
        chunk = [torch.randint(most, (12, bench.config.codebooks)) for _ in range(batch)]
        ms = bench.milliseconds(lambda states=states, chunk=chunk: decoder.decode_chunk(states, chunk))
        bench.add("codec, chunks of 12", batch, ms, 12 * batch)
    samples = torch.randn(int(REFERENCE_SECONDS * bench.config.sample_rate), device=bench.device) * 0.1
    ms = bench.milliseconds(lambda: codec.encoder.encode(samples))
    bench.add("reference encoder, 6 s", 1, ms, REFERENCE_SECONDS * bench.config.frames_per_second)


class Count:
    """A receiver that counts down."""

    streamed = False

    def __init__(self) -> None:
        self.done = threading.Semaphore(0)
        self.frames = 0
        self.errors: list[Exception] = []

    def tokens(self, ids: list[int], codes: Any) -> None:
        """Whole sequences are counted."""

    def finished(self, tokens: Any) -> None:
        self.frames += len(tokens.ids)
        self.done.release()

    def failed(self, error: Exception) -> None:
        self.errors.append(error)
        self.done.release()


def lm_part(bench: Bench, host: Any) -> None:
    """The dual AR through our host, all requests at once, each of the same number of frames; the second turn counts."""
    from pipelines.vllm_engine.options import TokenRequest, TokenSampling

    for number in bench.requests:
        took, count = 0.0, Count()
        for turn in range(2):
            count, begin = Count(), time.perf_counter()
            for index in range(number):
                prompt = [(index * 131 + n * 17) % (bench.config.end - 2) for n in range(PROMPT_TOKENS)]
                sampling = TokenSampling(bench.frames, 0.8, 30, 0.8, seed=index, ignore_end=True)
                host.submit(TokenRequest(f"{turn}-{index}", prompt, sampling), count)
            for _ in range(number):
                count.done.acquire()
            took = time.perf_counter() - begin
            if count.errors:
                raise count.errors[0]
        bench.add("LM on vLLM", number, 1000 * took, count.frames, ms_a_step=1000 * took * number / count.frames)


def request(index: int, turn: str, seconds: float) -> SynthesisRequest:
    """One of `VOICES` recordings, a text of its own."""
    audio = fish_random.recording(REFERENCE_SECONDS, index % VOICES)
    messages = (Message("user", "text", f"{index} {TEXT}" * 3), Message("user", "audio", audio))
    return SynthesisRequest(f"{turn}-{index}", messages, Generation(reference_text=TEXT, max_seconds=seconds), seed=index)


def speech_part(bench: Bench, pipeline: Any) -> None:
    """Text and recording to samples: all requests at once, then so many kept under way, of lengths from half to whole."""
    for voice in range(VOICES):
        heard_seconds(pipeline.submit(request(voice, "warm", min(1.0, bench.seconds))))
    list(pipeline.stream(request(0, "warm", min(2.0, bench.seconds))))
    for number in bench.requests:
        begin = time.perf_counter()
        under_way = [pipeline.submit(request(index, f"s{number}", bench.seconds)) for index in range(number)]
        audio = sum(map(heard_seconds, under_way))
        burst = audio / (time.perf_counter() - begin)
        found = steady(
            pipeline,
            number,
            lambda index, number=number: request(index, f"t{number}", bench.seconds * (0.5 + 0.5 * (index % 8) / 7)),
            request(0, f"stream{number}", min(2.0, bench.seconds)),
            bench.device,
        )
        frames, more = found.audio_seconds * bench.config.frames_per_second, {"burst_audio_s_per_s": burst, **found.use}
        bench.add("speech, end to end", number, 1000 * found.seconds, frames, first_chunk_ms=found.first_chunk_ms, **more)


def heard_seconds(future: Any) -> float:
    """Audio of a request; none where random weights ended it before its first frame."""
    try:
        return future.result().duration_ms / 1000
    except NightjarError as error:
        if error.code != "synth.no_audio":
            raise
        return 0.0


def engine_parts(bench: Bench, parts: set[str]) -> None:
    """The parts that share one engine."""
    from pipelines.fish_speech.language_model import LanguageModel
    from pipelines.fish_speech.pipeline import FishPipeline
    from pipelines.nn.options import TokenModelOptions
    from pipelines.vllm_engine.host import VllmHost
    from pipelines.vllm_engine.library import load_vllm

    version = load_vllm().__version__
    codec = fish_random.codec(bench.config, bench.device, bench.codec_dtype)
    options = bench.options
    dtype = "float32" if bench.device.type == "cpu" else "bfloat16"
    chosen = TokenModelOptions(memory_share=options.memory_share, slots=max(bench.requests), dtype=dtype, eager=options.eager or None)
    begin = time.perf_counter()
    model = LanguageModel(bench.config, load_format="dummy")
    host = VllmHost(model.spec, chosen.vllm(options.memory_share, CONTEXT, CONTEXT))
    print(f"vLLM {version} started in {time.perf_counter() - begin:.0f} s", flush=True)
    pipeline = FishPipeline(bench.config, fish_random.AnyText(bench.config), codec, model, host, keep_unfinished=True)
    pipeline.references = fish_random.RawReferences(codec.encoder)
    try:
        if "lm" in parts:
            attempt(bench, "lm", lambda: lm_part(bench, host))
        if "speech" in parts:
            attempt(bench, "speech", lambda: speech_part(bench, pipeline))
    finally:
        pipeline.close()


@torch.inference_mode()
def loop_part(bench: Bench) -> None:
    """The same model as a plain loop, at batches of equal length: frames of a batch, then its audio one utterance after the other."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from pipelines.fish_speech.language_model import qwen3_config

    config, device = bench.config, bench.device
    table = qwen3_config(config, config.slow.head_dim)
    kept = {name: value for name, value in table.items() if name not in ("architectures", "torch_dtype", "use_sliding_window")}
    with torch.device(device):
        slow = Qwen3ForCausalLM(Qwen3Config(**kept)).to(bench.dtype).eval()
        books = (torch.randn(config.fast.vocab * config.codebooks, config.slow.dim) * 0.02).to(bench.dtype)
    maker = FrameMaker(config, random_fast(bench), device)
    decoder = fish_random.codec(config, device, bench.codec_dtype).decoder
    offsets = torch.arange(config.codebooks, device=device) * config.fast.vocab
    head = slow.get_input_embeddings().weight[[*config.semantic, config.end]]
    frames = min(LOOP_FRAMES, bench.frames)

    def work(batch: int) -> None:
        """`frames` steps of every row, then the codec."""
        rows, kept, cache = random_rows(bench, batch), [], None
        x: Tensor = slow.get_input_embeddings()(torch.randint(config.end - 2, (batch, PROMPT_TOKENS), device=device))
        for _ in range(frames):
            out = slow.model(inputs_embeds=x, past_key_values=cache, use_cache=True)
            cache, hidden = out.past_key_values, out.last_hidden_state[:, -1]
            tokens, codes = maker(Rows(hidden, linear(hidden, head), *rows.tensors()[2:]))
            kept.append(codes)
            spoken = embedding_bag(codes + offsets, books, mode="sum")
            x = ((slow.get_input_embeddings()(tokens) + spoken) * (config.codebooks + 1) ** -0.5)[:, None]
        for codes in torch.stack(kept, dim=1).cpu():
            decoder.decode([codes])

    for batch in bench.requests:
        ms = bench.milliseconds(lambda batch=batch: work(batch), runs=1)
        bench.add("plain loop, end to end", batch, ms, batch * frames, ms_a_step=ms / frames)


def attempt(bench: Bench, part: str, work: Callable[[], None]) -> None:
    """A part that fails is told of, and the others go on."""
    try:
        work()
    except Exception:  # noqa: BLE001 - one run on a borrowed machine must bring home whatever it can
        bench.faults[part] = traceback.format_exc()
        print(bench.faults[part], flush=True)
    bench.write()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def where_a_step_goes(bench: Bench) -> list[str]:
    """A step of the engine, cut into the frame's graph, its draws and heads, and what is left: the slow AR and vLLM's host."""
    found = {(row["part"], row["batch"]): row for row in bench.rows}
    lines = []
    for number in bench.requests:
        step, frame = found.get(("LM on vLLM", number)), found.get(("frame, graph", number))
        draws = found.get(("frame, draws and heads", number))
        if step and frame and draws:
            whole = step["ms_a_step"]
            parts = {"fast AR's layers": frame["ms"] - draws["ms"], "draws and heads": draws["ms"], "slow AR and host": whole - frame["ms"]}
            shares = ", ".join(f"{name} {value:.2f} ms ({100 * value / whole:.0f} %)" for name, value in parts.items())
            lines.append(f"step of {number}: {whole:.2f} ms = {shares}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="frame,codec,lm,speech,loop")
    parser.add_argument("--requests", default="16,64,256")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--codec-dtype", default=None, choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--memory-share", type=float, default=0.6)
    parser.add_argument("--tiny", action="store_true", help="sizes for trying this out, whose figures mean nothing")
    parser.add_argument("--eager", action="store_true", help="vLLM and the frames without compilation and graphs")
    parser.add_argument("--no-compile", action="store_true", help="the frame's graphs of plain functions")
    options = parser.parse_args(arguments)
    options.codec_dtype = options.codec_dtype or ("float32" if options.device == "cpu" else "bfloat16")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench, parts = Bench(options), set(options.part.split(","))
    if "frame" in parts:
        attempt(bench, "frame", lambda: frame_part(bench))
    if "codec" in parts:
        attempt(bench, "codec", lambda: codec_part(bench))
    if {"lm", "speech"} & parts:
        attempt(bench, "engine", lambda: engine_parts(bench, parts))
    if "loop" in parts:
        attempt(bench, "loop", lambda: loop_part(bench))
    print("\n" + "\n".join(map(line, bench.rows)))
    print("\n".join(where_a_step_goes(bench)))
    print(f"aim {AIM}, must {MUST} audio-s/s end to end; faults: {', '.join(bench.faults) or 'none'}")
    return 1 if bench.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

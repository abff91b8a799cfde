"""Fish Speech S2 on a GPU at its published size, dummy weights: the step behind the slow AR, codec, LM, and prompts to audio.

    python -m benchmarks.fish_speech [--part frame,codec,lm,speech,loop] [--requests 16,64,256] [--seconds 10] [--codec-dtype bfloat16]
    python -m benchmarks.fish_speech --tiny --device cpu --part frame,codec,loop --requests 2 --seconds 0.5

`frame` times sampling and fast AR alone, as the graphs that the engine replays, and as plain calls. `lm` is our host alone; `speech`
goes through the pipeline: text and recording in, samples out, so all stages share the GPU. `loop` is the same model as a plain loop:
transformers' Qwen3 with a KV cache, the fast AR called plainly, the codec one utterance after the other. A table comes last, and where
a step's time goes. Needs vLLM.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.functional import embedding_bag, linear

from benchmarks.gpu import Bench, numbers, parser
from benchmarks.speech_load import PROMPT_TOKENS, REFERENCE_SECONDS, TEXT, codec_part, lm_part, speech_part, spoken_request, token_letters
from pipelines.fish_speech.codec import ReferenceEncoder
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.dummy import CONTROLS, dummy_codec, dummy_fast_ar, dummy_rows, write_checkpoint
from pipelines.fish_speech.frame import FrameGraphs, FrameMaker, Rows
from pipelines.fish_speech.prompt import Vocabulary
from pipelines.vllm_engine.options import TokenSampling

#: RTFx end to end that was aimed at, and that must be reached.
AIM, MUST = 400, 200
#: A reference of six seconds, a text and ten seconds of speech.
CONTEXT = 1024
LOOP_FRAMES = 40


class AnyText(Vocabulary):
    """The published layout of ids over a text vocabulary of numbered words."""

    def __init__(self, config: FishConfig) -> None:
        self._words = config.end - 2
        tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(self._words)}, unk_token="w0"))
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *CONTROLS, *(f"<|semantic:{i}|>" for i in range(len(config.semantic)))]
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
        super().__init__(tokenizer, config, Path("dummy"))

    def encode(self, text: str) -> list[int]:
        """Control tokens are letters too."""
        return [number % self._words for number in token_letters(text)]

    def spoken(self, text: str) -> list[int]:
        return self.encode(text)


class RawReferences(ReferenceEncoder):
    """Reads recordings that are float32 samples already."""

    def read(self, recording: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(recording, np.float32).copy()).to(self._encoder.device)


@torch.inference_mode()
def frame_part(bench: Bench, config: FishConfig) -> None:
    """Sampling and fast AR: plainly, as the graphs of the engine, and as graphs without the fast AR's layers."""
    fast = dummy_fast_ar(config, bench.device, bench.dtype)
    plain = FrameMaker(config, fast, bench.device)
    maker = FrameMaker(config, fast, bench.device, compiled=bench.on_gpu and not bench.options.no_compile)
    layers = fast.layers
    for part in ("frame, plain calls", "frame, graph", "frame, draws and heads"):
        fast.layers = torch.nn.ModuleList() if part == "frame, draws and heads" else layers
        graphs = None if part == "frame, plain calls" else FrameGraphs(maker, max(bench.options.requests))
        for count in bench.options.requests:
            rows = dummy_rows(config, count, bench.device, bench.dtype)
            ms = bench.milliseconds(lambda rows=rows, graphs=graphs: plain(rows) if graphs is None else graphs(rows, False))
            bench.timed(part, count, ms, None if fast.layers is not layers else count / config.frames_per_second)
    fast.layers = layers


@torch.inference_mode()
def codec_parts(bench: Bench, config: FishConfig) -> None:
    """Whole utterances, chunks of streams, and references."""
    codec, requests = dummy_codec(config, bench.device, bench.options.codec_dtype), bench.options.requests
    decoder, rate = codec.decoder, config.frames_per_second

    def draw(frames: int) -> Tensor:
        return torch.randint(config.codec.residual_codes, (frames, config.codebooks))

    frames = max(2, int(bench.options.seconds * rate))
    codec_part(bench, sorted({1, 8, *(min(number, 64) for number in requests)}), frames, rate, draw, decoder.decode)
    for batch in requests:
        states, chunk = [decoder.new_state() for _ in range(batch)], [draw(12) for _ in range(batch)]
        ms = bench.milliseconds(lambda states=states, chunk=chunk: decoder.decode_chunk(states, chunk))
        bench.timed("codec, chunks of 12", batch, ms, 12 * batch / rate)
    samples = torch.randn(int(REFERENCE_SECONDS * config.sample_rate), device=bench.device) * 0.1
    bench.timed("reference encoder", 1, bench.milliseconds(lambda: codec.encoder.encode(samples)), REFERENCE_SECONDS)


def engine_parts(bench: Bench, config: FishConfig, parts: set[str]) -> None:
    """The parts that share one engine."""
    from pipelines.fish_speech.language_model import LanguageModel
    from pipelines.fish_speech.pipeline import FishPipeline
    from pipelines.nn.checkpoint import TokenModelOptions
    from pipelines.vllm_engine.host import VllmHost
    from pipelines.vllm_engine.library import load_vllm

    options, begin = bench.options, time.perf_counter()
    bench.keep(vllm=load_vllm().__version__)
    codec = dummy_codec(config, bench.device, options.codec_dtype)
    dtype = "bfloat16" if bench.on_gpu else "float32"
    chosen = TokenModelOptions(memory_share=options.memory_share, slots=max(options.requests), dtype=dtype, eager=options.eager or None)
    model = LanguageModel(config, load_format="dummy")
    host = VllmHost(model.spec, chosen.vllm(options.memory_share, CONTEXT, CONTEXT))
    print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
    pipeline = FishPipeline(config, AnyText(config), codec, model, host, keep_unfinished=True)
    pipeline.references = RawReferences(codec.encoder)
    rate = config.frames_per_second
    sampling = TokenSampling(max(2, int(options.seconds * rate)), 0.8, 30, 0.8, ignore_end=True)
    try:
        if "lm" in parts:
            bench.attempt("lm", lambda: lm_part(bench, host, options.requests, config.end - 2, rate, sampling))
        if "speech" in parts:

            def make(name: str, index: int, seconds: float):
                return spoken_request(name, index, seconds, 44_100, TEXT)

            bench.attempt("speech", lambda: speech_part(bench, pipeline, options.requests, options.seconds, make))
    finally:
        pipeline.close()


@torch.inference_mode()
def loop_part(bench: Bench, config: FishConfig) -> None:
    """The same model as a plain loop, at batches of equal length: frames of a batch, then its audio one utterance after the other."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from pipelines.fish_speech.language_model import qwen3_config

    device = bench.device
    sizes = qwen3_config(config, config.slow.head_dim)
    sizes = {name: value for name, value in sizes.items() if name not in ("architectures", "torch_dtype", "use_sliding_window")}
    with torch.device(device):
        slow = Qwen3ForCausalLM(Qwen3Config(**sizes)).to(bench.dtype).eval()
        books = (torch.randn(config.fast.vocab * config.codebooks, config.slow.dim) * 0.02).to(bench.dtype)
    maker = FrameMaker(config, dummy_fast_ar(config, device, bench.dtype), device)
    decoder = dummy_codec(config, device, bench.options.codec_dtype).decoder
    offsets = torch.arange(config.codebooks, device=device) * config.fast.vocab
    head = slow.get_input_embeddings().weight[[*config.semantic, config.end]]
    frames = min(LOOP_FRAMES, max(2, int(bench.options.seconds * config.frames_per_second)))

    def work(batch: int) -> None:
        """`frames` steps of every row, then the codec."""
        rows, kept, cache = dummy_rows(config, batch, device, bench.dtype), [], None
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

    for batch in bench.options.requests:
        ms = bench.milliseconds(lambda batch=batch: work(batch), runs=1)
        bench.timed("plain loop, end to end", batch, ms, batch * frames / config.frames_per_second, ms_a_step=ms / frames)


def where_a_step_goes(bench: Bench) -> list[str]:
    """A step of the engine, cut into the frame's graph, its draws and heads, and what is left: the slow AR and vLLM's host."""
    found = {(row["part"], row["batch"]): row for row in bench.rows}
    lines = []
    for number in bench.options.requests:
        step, frame = found.get(("LM on vLLM", number)), found.get(("frame, graph", number))
        draws = found.get(("frame, draws and heads", number))
        if step and frame and draws:
            whole = step["ms_a_step"]
            parts = {"fast AR's layers": frame["ms"] - draws["ms"], "draws and heads": draws["ms"], "slow AR and host": whole - frame["ms"]}
            shares = ", ".join(f"{name} {value:.2f} ms ({100 * value / whole:.0f} %)" for name, value in parts.items())
            lines.append(f"step of {number}: {whole:.2f} ms = {shares}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--part", default="frame,codec,lm,speech,loop")
    made.add_argument("--requests", type=numbers, default="16,64,256")
    made.add_argument("--seconds", type=float, default=10.0)
    made.add_argument("--codec-dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16, on a CPU float32")
    made.add_argument("--memory-share", type=float, default=0.6)
    made.add_argument("--eager", action="store_true", help="vLLM without compilation and graphs")
    made.add_argument("--no-compile", action="store_true", help="the frame's graphs of plain functions")
    options = made.parse_args(arguments)
    codec_dtype = options.codec_dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.codec_dtype, parts = getattr(torch, codec_dtype), set(options.part.split(","))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        config = write_checkpoint(Path(folder) / "checkpoint", options.tiny)
        bench = Bench("fish_speech", options, codec_dtype=codec_dtype, seconds=options.seconds, aim=AIM, must=MUST)
        if "frame" in parts:
            bench.attempt("frame", lambda: frame_part(bench, config))
        if "codec" in parts:
            bench.attempt("codec", lambda: codec_parts(bench, config))
        if {"lm", "speech"} & parts:
            bench.attempt("engine", lambda: engine_parts(bench, config, parts))
        if "loop" in parts:
            bench.attempt("loop", lambda: loop_part(bench, config))
    print("\n".join(where_a_step_goes(bench)))
    return bench.end()


if __name__ == "__main__":
    raise SystemExit(main())

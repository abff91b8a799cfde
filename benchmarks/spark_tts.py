"""SparkTTS at its published size, dummy weights, on a GPU; or a small checkpoint on a CPU: LM, BiCodec, references, prompts to audio.

    python -m benchmarks.spark_tts [--part accuracy,codec,tokenizer,lm,speech,stock,loop] [--requests 64,256,512]
        [--loop-batches 1,8,32] [--seconds 10] [--codec-dtype bfloat16]
    python -m benchmarks.spark_tts --device cpu --checkpoint FOLDER --part compare --requests 32 --seconds 4

`accuracy` compares waves with those of float32 without TF32, the plain wave generator's and in bfloat16 the fused one's. `lm` is our
host alone, `stock` the same sequences through vLLM's own `LLM`; `speech` goes through the pipeline: text and recording in, samples out,
so all stages share the GPU. `loop` is transformers' `generate` at several batches, then BiCodec one utterance after the other: the
published code at its best batch. `compare` is our host and that loop at equal lengths and at lengths from a fifth to the whole (a loop
runs each batch to its longest row); tiny weights say what a step costs beside the model. `python -m tests.support.golden_checkpoint
tests/golden/spark/checkpoint FOLDER` writes such a checkpoint. Needs vLLM.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import Qwen2ForCausalLM, Wav2Vec2Config, Wav2Vec2Model

from benchmarks.gpu import Bench, numbers, parser
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
    token_letters,
)
from pipelines.nn.checkpoint import TokenModelOptions
from pipelines.spark_tts.bicodec import BiCodec
from pipelines.spark_tts.bicodec import Tokenizer as AudioTokenizer
from pipelines.spark_tts.config import LLM, SparkConfig
from pipelines.spark_tts.dummy import LM, dummy_codecs, published_config
from pipelines.spark_tts.pipeline import SparkPipeline, model_spec, vllm_options
from pipelines.spark_tts.prompt import SparkCodes, Vocabulary
from pipelines.spark_tts.reference import KEPT_LAYERS, ReferenceEncoder, SemanticFeatures
from pipelines.spark_tts.streaming_decoder import BiCodecDecoder, Voice
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import ModelSpec, TokenSampling, VllmOptions

TOKENS_PER_SECOND = 50
SAMPLE_RATE = 16_000
#: RTFx end to end that was aimed at, and that must be reached.
AIM, MUST = 1200, 600
#: Ids of text that a prompt may hold.
TEXT_IDS = 150_000
SAMPLING = TokenSampling(0, 0.8, 50, 0.95, ignore_end=True)
_CONTROLS = (
    "task_tts", "task_controllable_tts", "start_content", "end_content", "start_style_label", "end_style_label",
    "start_global_token", "end_global_token", "start_semantic_token", "end_semantic_token",
)  # fmt: skip


def write_lm(folder: Path) -> Path:
    """A folder with the LM's config.json, for vLLM's `load_format="dummy"`."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": LM.hidden,
        "num_hidden_layers": LM.layers,
        "num_attention_heads": LM.heads,
        "num_key_value_heads": LM.kv_heads,
        "intermediate_size": LM.intermediate,
        "vocab_size": LM.vocab,
        "max_position_embeddings": LM.max_positions,
        "rope_theta": LM.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": 151_643,
        "eos_token_id": LM.eos,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class AnyIdSpeaks(Vocabulary):
    """The published layout of ids over a text vocabulary of numbered words.

    Random weights write any id, so each counts as a semantic token: as many tokens become audio as a trained model would write.
    """

    def __init__(self) -> None:
        tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(151_643)}, unk_token="w0"))
        names = ["endoftext", "im_start", "im_end", *(f"spare_{index}" for index in range(19))]
        names += [f"bicodec_global_{code}" for code in range(4096)] + [f"bicodec_semantic_{code}" for code in range(8192)]
        names += [*_CONTROLS, "gender_0", "gender_1", *(f"{kind}_label_{level}" for kind in ("pitch", "speed") for level in range(5))]
        tokenizer.add_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
        super().__init__(tokenizer, 8192, 4096, Path("dummy"))

    def spoken(self, text: str) -> list[int]:
        return [self.control("start_content"), *token_letters(text), self.control("end_content")]

    def parse(self, ids: object) -> SparkCodes:
        return SparkCodes(tuple(token % 8192 for token in ids), ())  # pyright: ignore[reportGeneralTypeIssues]


class RawReferences(ReferenceEncoder):
    """Reads recordings that are float32 samples already."""

    def read(self, recording: bytes) -> NDArray[np.float32]:
        return np.frombuffer(recording, np.float32)


def references(settings: SparkConfig, tokenizer: AudioTokenizer, device: torch.device) -> RawReferences:
    """wav2vec2 of the size of XLSR-53, cut as ours is."""
    features = SemanticFeatures.__new__(SemanticFeatures)
    sizes = Wav2Vec2Config(
        hidden_size=1024,
        num_hidden_layers=KEPT_LAYERS,
        num_attention_heads=16,
        intermediate_size=4096,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        conv_bias=True,
        apply_spec_augment=False,
    )
    with device:
        features.model = Wav2Vec2Model(sizes).requires_grad_(False).eval()
    features.device, features.normalize = device, True
    return RawReferences(settings, tokenizer, features)


def accuracy_part(bench: Bench, settings: SparkConfig) -> None:
    """BiCodec plain, and in bfloat16 fused too, against plain float32 without TF32: root mean square error of the waves."""
    dice, dtype = torch.Generator().manual_seed(0), bench.options.codec_dtype
    codes = [torch.randint(8192, (length, 1), generator=dice) for length in (200, 300, 400, 500)]
    voices = [Voice(torch.randint(4096, (32,), generator=dice)) for _ in codes]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    exact = torch.cat(BiCodecDecoder(dummy_codecs(settings, bench.device, torch.float32, fused=False)[1]).decode(codes, voices))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for fused in (False, True) if dtype == torch.bfloat16 else (False,):
        decoder = BiCodecDecoder(dummy_codecs(settings, bench.device, dtype, fused)[1])
        waves = torch.cat(decoder.decode(codes, voices))
        error = float((waves - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        ms = bench.milliseconds(lambda decoder=decoder: decoder.decode(codes, voices))
        name, audio = "fused" if fused else "plain", len(exact) / settings.sample_rate
        bench.timed(f"accuracy, {name}", len(codes), ms, audio, relative_error_ppm=1e6 * error)


def codec_alone(bench: Bench, codec: BiCodec) -> None:
    decoder, voice, frames = BiCodecDecoder(codec), Voice(torch.randint(4096, (32,))), int(bench.options.seconds * TOKENS_PER_SECOND)

    def decode(codes: list[Tensor]) -> object:
        return decoder.decode(codes, [voice] * len(codes))

    codec_part(bench, (1, 2, 4, 8, 16, 32, 64), frames, TOKENS_PER_SECOND, lambda length: torch.randint(8192, (length, 1)), decode)


def tokenizer_part(bench: Bench, encoder: RawReferences) -> None:
    """References of 6 s to semantic and global tokens."""
    for batch in (1, 2, 4, 8, 16, 32, 64):
        clips = [encoder.read(recording(REFERENCE_SECONDS, SAMPLE_RATE, seed)) for seed in range(batch)]
        ms = bench.milliseconds(lambda clips=clips: encoder.encode(clips))
        bench.timed("reference encoder", batch, ms, REFERENCE_SECONDS * batch)


def stock_part(bench: Bench, folder: Path) -> None:
    """The same sequences as of `lm` through vLLM's own scheduler and `LLM`; the second turn counts."""
    from vllm import LLM, SamplingParams

    options, length = bench.options, int(bench.options.seconds * TOKENS_PER_SECOND)
    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=max(options.requests),
        max_model_len=2048, gpu_memory_utilization=options.memory_share, enable_prefix_caching=False,
    )  # fmt: skip
    common: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "ignore_eos": True, "detokenize": False}
    for number in options.requests:
        took, made = 0.0, 0
        for _ in range(2):
            drawn = [SamplingParams(seed=index, max_tokens=length, **common) for index in range(number)]
            begin = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt_ids(index, TEXT_IDS)} for index in range(number)], drawn, use_tqdm=False)
            took, made = time.perf_counter() - begin, sum(len(output.outputs[0].token_ids) for output in outputs)
        bench.timed("LM, stock vLLM", number, 1000 * took, made / TOKENS_PER_SECOND, tokens_per_s=made / took)
    llm.llm_engine.engine_core.shutdown()


def generated(model: Any, prompts: Tensor, length: int, sample: bool = True) -> list[list[int]]:
    """`length` tokens for each row of prompts [rows, tokens], by transformers' own loop."""
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95} if sample else {"do_sample": False}
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
        ids = torch.randint(TEXT_IDS, (batch, PROMPT_TOKENS), device=bench.device)
        bench.wait()
        begin = time.perf_counter()
        for row in generated(model, ids, int(seconds * TOKENS_PER_SECOND)):
            # Any id is a semantic token: random weights do not write speech.
            codec.decode([torch.tensor(row) % 8192], [torch.zeros(32, dtype=torch.long)])
        bench.wait()
        bench.timed("transformers loop", batch, 1000 * (time.perf_counter() - begin), batch * seconds)


def compare_part(bench: Bench, folder: Path) -> None:
    """Our host and transformers' loop on a real checkpoint: tokens a second of sequences of set lengths, the best of three runs each."""
    torch.set_num_threads(1)
    config, count = SparkConfig.from_folder(folder), max(bench.options.requests)
    tokens, ids = int(bench.options.seconds * TOKENS_PER_SECOND), config.lm.vocab // 2
    prompts = [prompt_ids(index, ids)[:20] for index in range(count)]
    mixed = [tokens // 5 + (tokens - tokens // 5) * n // max(count - 1, 1) for n in range(count)]
    model = Qwen2ForCausalLM.from_pretrained(folder / LLM, dtype=torch.float32).eval()
    host = VllmHost(model_spec(config), VllmOptions(max_context=1024, max_sequences=count))

    def ours(lengths: list[int], sample: bool) -> None:
        drawn = replace(SAMPLING, temperature=0.8 if sample else 0.0)
        sequences(host, prompts, [replace(drawn, max_tokens=length, seed=index) for index, length in enumerate(lengths)])

    def theirs(lengths: list[int], sample: bool) -> None:
        generated(model, torch.tensor(prompts), max(lengths), sample)

    def best(side: Callable[[list[int], bool], None], lengths: list[int], sample: bool) -> float:
        return min(bench.milliseconds(lambda: side(lengths, sample), 1) for _ in range(3))

    try:
        for name, lengths in (("equal", [tokens] * count), ("mixed", mixed)):
            for sample in (False, True):
                fast, slow, made = best(ours, lengths, sample), best(theirs, lengths, sample), 1000 * sum(lengths)
                more = {"tokens_per_s": made / fast, "transformers_tokens_per_s": made / slow, "ratio": slow / fast}
                bench.timed(f"LM, {name}, {'sampled' if sample else 'greedy'}", count, fast, sum(lengths) / TOKENS_PER_SECOND, **more)
    finally:
        host.close()


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--part", default="accuracy,codec,tokenizer,lm,speech,stock,loop")
    made.add_argument("--requests", type=numbers, default="64,256,512")
    made.add_argument("--loop-batches", type=numbers, default="1,8,32,64,128,256,512,1024")
    made.add_argument("--seconds", type=float, default=10.0)
    made.add_argument("--codec-dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    made.add_argument("--memory-share", type=float, default=0.4)
    made.add_argument("--checkpoint", type=Path, help="of `compare`")
    options = made.parse_args()
    parts, codec_dtype = set(options.part.split(",")), options.codec_dtype
    options.codec_dtype = getattr(torch, codec_dtype)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    vllm = load_vllm().__version__ if {"lm", "speech", "stock", "compare"} & parts else ""
    bench = Bench("spark_tts", options, vllm=vllm, codec_dtype=codec_dtype, seconds=options.seconds, aim=AIM, must=MUST)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_lm(Path(temporary) / "LLM")
        settings = published_config(folder.parent)
        if "compare" in parts:
            bench.attempt("compare", lambda: compare_part(bench, options.checkpoint))
        if "accuracy" in parts:
            bench.attempt("accuracy", lambda: accuracy_part(bench, settings))
        if {"codec", "tokenizer", "lm", "speech"} & parts:
            tokenizer, codec = dummy_codecs(settings, bench.device, options.codec_dtype)
            if "codec" in parts:
                bench.attempt("codec", lambda: codec_alone(bench, codec))
            encoder = references(settings, tokenizer, bench.device)
            if "tokenizer" in parts:
                bench.attempt("tokenizer", lambda: tokenizer_part(bench, encoder))
            if {"lm", "speech"} & parts:
                bench.attempt("engine", lambda: engine_parts(bench, settings, folder, parts, codec, encoder))
        if "stock" in parts:
            bench.attempt("stock", lambda: stock_part(bench, folder))
        if "loop" in parts:
            bench.attempt("loop", lambda: loop_part(bench, settings, folder))
    return bench.end()


def engine_parts(bench: Bench, settings: SparkConfig, folder: Path, parts: set[str], codec: BiCodec, encoder: RawReferences) -> None:
    """The parts that share one engine."""
    options = bench.options
    chosen = TokenModelOptions(memory_share=options.memory_share, slots=max(options.requests), max_context=2048)
    begin = time.perf_counter()
    host = VllmHost(ModelSpec(folder, engine={"load_format": "dummy"}), vllm_options(chosen, settings))
    print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
    pipeline = SparkPipeline(settings, AnyIdSpeaks(), encoder, codec, host, keep_unfinished=True)
    sampling = replace(SAMPLING, max_tokens=int(options.seconds * TOKENS_PER_SECOND))
    try:
        if "lm" in parts:
            bench.attempt("lm", lambda: lm_part(bench, host, options.requests, TEXT_IDS, TOKENS_PER_SECOND, sampling))
        if "speech" in parts:

            def make(name: str, index: int, seconds: float):
                return spoken_request(name, index, seconds, SAMPLE_RATE)

            bench.attempt("speech", lambda: speech_part(bench, pipeline, options.requests, options.seconds, make))
    finally:
        pipeline.close()


if __name__ == "__main__":
    raise SystemExit(main())

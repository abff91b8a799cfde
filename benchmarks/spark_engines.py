"""SparkTTS on either engine for a benchmark: dummy weights of the published size, or a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import Wav2Vec2Config, Wav2Vec2Model

from benchmarks.gpu import Bench
from benchmarks.native_parts import prepare_all
from benchmarks.random_models.spark_tts import dummy_codecs, published_config
from benchmarks.random_models.weights import DummyWeights
from benchmarks.speech_load import token_letters
from benchmarks.watched_executor import Watched
from pipelines.engine.engine import Engine
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, open_executor
from pipelines.nn.checkpoint import Checkpoint, TensorSource
from pipelines.options import TokenModelOptions
from pipelines.request import SynthesisRequest
from pipelines.spark_tts import pipeline
from pipelines.spark_tts.bicodec import Tokenizer as AudioTokenizer
from pipelines.spark_tts.bicodec import load_bicodec
from pipelines.spark_tts.config import LLM, WAV2VEC2, LmConfig, SparkConfig
from pipelines.spark_tts.language_model import Drawable, SparkModel, sized, take_weights
from pipelines.spark_tts.pipeline import (
    SparkPipeline,
    SparkRequestInfo,
    model_spec,
    open_host,
    open_stage,
)
from pipelines.spark_tts.prompt import SparkCodes, Vocabulary
from pipelines.spark_tts.reference import KEPT_LAYERS, ReferenceEncoder, SemanticFeatures
from pipelines.tokens import TokenHost, TokenRequest
from pipelines.vllm_engine.library import ModelSpec

TOKENS_PER_SECOND = 50
#: Positions of a sequence, and of a page.
CONTEXT, PAGE_SIZE = 1024, 64
#: LM sizes that a CPU can run, with the published vocabulary and codec.
TINY_LM = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 96}
_CONTROLS = (
    "task_tts", "task_controllable_tts", "start_content", "end_content", "start_style_label", "end_style_label",
    "start_global_token", "end_global_token", "start_semantic_token", "end_semantic_token",
)  # fmt: skip


class AnyIdSpeaks(Vocabulary):
    """The published layout of ids over a text vocabulary of numbered words.

    Random weights write any id, so each counts as a semantic token: as many tokens become audio as a
    trained model would write.
    """

    def __init__(self) -> None:
        tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(151_643)}, unk_token="w0"))
        names = ["endoftext", "im_start", "im_end", *(f"spare_{index}" for index in range(19))]
        names += [f"bicodec_global_{code}" for code in range(4096)] + [
            f"bicodec_semantic_{code}" for code in range(8192)
        ]
        names += [
            *_CONTROLS,
            "gender_0",
            "gender_1",
            *(f"{kind}_label_{level}" for kind in ("pitch", "speed") for level in range(5)),
        ]
        tokenizer.add_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
        super().__init__(tokenizer, 8192, 4096, Path("dummy"))

    def spoken(self, text: str) -> list[int]:
        return [self.control("start_content"), *token_letters(text), self.control("end_content")]

    def parse(self, ids: object) -> SparkCodes:
        return SparkCodes(tuple(token % 8192 for token in ids), ())  # pyright: ignore[reportGeneralTypeIssues]


class Endless(SparkPipeline):
    """Speech as long as its request allows: random weights draw an end by chance."""

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, SparkRequestInfo]:
        wanted, info = super()._prepare(request)
        return replace(wanted, sampling=replace(wanted.sampling, ignore_end=True)), info


@dataclass(frozen=True, slots=True)
class Parts(pipeline.Parts):
    """What both engines share: everything but the LM."""

    #: The LM's folder for vLLM, and where the native engine takes its tensors from.
    spec: ModelSpec
    weights: TensorSource

    def pipeline(self, host: TokenHost, stage: Any = None) -> SparkPipeline:
        return Endless(self, stage or open_stage(self.codec), host, keep_unfinished=True)

    @property
    def text_ids(self) -> int:
        """Ids of text that a prompt may hold."""
        return min(150_000, self.config.lm.vocab // 2)


def dummy_parts(bench: Bench, folder: Path, tiny: bool = False) -> Parts:
    """Dummy weights of the published sizes, the LM's config.json in `folder`; `tiny`: of an LM that a CPU
    can run."""
    config = published_config(folder)
    if tiny:
        config = replace(config, lm=replace(config.lm, **TINY_LM))
    tokenizer, codec = dummy_codecs(config, bench.device, bench.options.codec_dtype)
    spec = ModelSpec(write_lm(folder / LLM, config.lm), engine={"load_format": "dummy"})
    return Parts(
        config,
        AnyIdSpeaks(),
        references(config, tokenizer, bench.device),
        codec,
        spec,
        DummyWeights(bench.device),
    )


def checkpoint_parts(bench: Bench, folder: Path) -> Parts:
    """A checkpoint in float32; call it after `load_vllm` where vLLM is to run it."""
    config, device = SparkConfig.from_folder(folder), bench.device
    tokenizer, codec = load_bicodec(config, device, torch.float32)
    encoder = ReferenceEncoder(config, tokenizer, SemanticFeatures(folder / WAV2VEC2, device))
    vocabulary = Vocabulary.from_folder(
        folder / LLM, config.bicodec.codebook_size, config.bicodec.global_codes
    )
    return Parts(config, vocabulary, encoder, codec, model_spec(config), Checkpoint.open(folder / LLM))


def write_lm(folder: Path, lm: LmConfig) -> Path:
    """A folder with the LM's config.json, for vLLM's `load_format="dummy"`."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": lm.hidden,
        "num_hidden_layers": lm.layers,
        "num_attention_heads": lm.heads,
        "num_key_value_heads": lm.kv_heads,
        "intermediate_size": lm.intermediate,
        "vocab_size": lm.vocab,
        "max_position_embeddings": lm.max_positions,
        "rope_theta": lm.rope_theta,
        "rms_norm_eps": lm.eps,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": 151_643,
        "eos_token_id": lm.eos,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def references(settings: SparkConfig, tokenizer: AudioTokenizer, device: torch.device) -> ReferenceEncoder:
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
    return ReferenceEncoder(settings, tokenizer, features)


class NativeSpark:
    """The LM on the native engine: its executor, over which pipelines are opened one after the other."""

    def __init__(self, bench: Bench, parts: Parts, slots: int, streams: int = 0) -> None:
        """`streams`: how many it is prepared for; as many slots are then kept free of whole utterances."""
        config, lm, dtype = parts.config, parts.config.lm, bench.dtype
        self.parts, self.drawable = parts, Drawable.of(parts.vocabulary, lm)
        with torch.inference_mode():
            weights = take_weights(parts.weights, lm, self.drawable, dtype, bench.device)
            model = SparkModel(lm, weights, self.drawable, CONTEXT)
        # The weights are on the device already; every slot has room for a whole context.
        needs = MemoryNeeds(
            0,
            12 * (self.drawable.rows + 2 * lm.intermediate),
            2 * lm.layers * lm.kv_heads * lm.head_dim * PAGE_SIZE * dtype.itemsize,
            250_000,
        )
        sizes = NativeModelOptions(
            slots=slots, streams=streams, pages=slots * CONTEXT // PAGE_SIZE, page_size=PAGE_SIZE
        ).plan(needs, bench.device, CONTEXT, CONTEXT, frame_seconds=1 / config.tokens_per_second)
        self.sizes = sized(sizes, bench.device)
        self.executor = open_executor(model, self.sizes, streams=streams)
        prepare_all(self.executor, bench.device)
        self.watched = Watched(self.executor)

    def pipeline(self, turns: int = 0) -> SparkPipeline:
        """A pipeline with an engine of its own; `turns`: frames a scheduling turn, 0 for the engine's
        choice."""
        sizes = replace(self.sizes, frames_per_turn=turns or self.sizes.frames_per_turn)
        stage = open_stage(self.parts.codec)
        engine = Engine(self.watched, sizes, sizes.slots, stage)
        host = open_host(engine, self.drawable)
        return self.parts.pipeline(host, stage)


def vllm_pipeline(bench: Bench, parts: Parts, slots: Sequence[int], memory_share: float) -> SparkPipeline:
    """A pipeline on vLLM for as many sequences as the most of `slots`."""
    from pipelines.vllm_engine.host import VllmHost

    chosen = TokenModelOptions(memory_share=memory_share, slots=max(slots), max_context=2 * CONTEXT)
    host = VllmHost(parts.spec, chosen)
    return parts.pipeline(host)

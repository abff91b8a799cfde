"""SparkTTS and Fish Speech S2 with dummy weights, for a benchmark on either engine: a model is a class here."""

from __future__ import annotations

import io
import itertools
import json
import wave
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from benchmarks.checkpoint import (
    FISH_CONTROLS,
    DummyWeights,
    dummy_bicodec,
    dummy_fish_codec,
    fish_config,
    spark_config,
)
from benchmarks.common import Bench
from benchmarks.shapes import FISH, SPARK, Shape
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions
from pipelines.engine.state import SamplingParams
from pipelines.fish_speech import engines as fish_engines
from pipelines.fish_speech import pipeline as fish_pipeline
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.model import FishModel
from pipelines.fish_speech.model import take_weights as take_fish
from pipelines.fish_speech.prompt import Vocabulary as FishVocabulary
from pipelines.options import TokenModelOptions
from pipelines.request import Generation, Message, Pipeline, SynthesisRequest
from pipelines.spark_tts import pipeline as spark_pipeline
from pipelines.spark_tts.config import LLM, LmConfig
from pipelines.spark_tts.language_model import Drawable, SparkModel, sized
from pipelines.spark_tts.language_model import take_weights as take_spark
from pipelines.spark_tts.prompt import SparkCodes
from pipelines.spark_tts.prompt import Vocabulary as SparkVocabulary
from pipelines.spark_tts.reference import KEPT_LAYERS, ReferenceEncoder, SemanticFeatures
from pipelines.tokens import TokenHost, TokenRequest, TokenSampling
from pipelines.vllm_engine.library import ModelSpec

#: Positions of a sequence, and of a page.
CONTEXT, PAGE_SIZE = 1024, 64
VOICES, REFERENCE_SECONDS = 16, 6.0
TEXT = "The rain falls on the quiet street, and nobody walks. "
#: Sizes of SparkTTS's LM that a CPU can run, with the published vocabulary and codec.
TINY_LM = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 96}
_SPARK_CONTROLS = (
    "task_tts", "task_controllable_tts", "start_content", "end_content", "start_style_label", "end_style_label",
    "start_global_token", "end_global_token", "start_semantic_token", "end_semantic_token",
)  # fmt: skip


def token_letters(text: str) -> list[int]:
    """A number for every four letters, as English has tokens."""
    return [sum(text[at : at + 4].encode()) for at in range(0, len(text), 4)]


def numbered_words(count: int, names: Sequence[str]) -> Tokenizer:
    """A vocabulary of so many words, and tokens behind them."""
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(count)}, unk_token="w0"))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer


class AnyIdSpeaks(SparkVocabulary):
    """The published layout of ids over a text vocabulary of numbered words.

    Random weights write any id, so each counts as a semantic token: as many tokens become audio as a trained model
    would write.
    """

    def __init__(self) -> None:
        names = ["endoftext", "im_start", "im_end", *(f"spare_{index}" for index in range(19))]
        names += [f"bicodec_global_{code}" for code in range(4096)]
        names += [f"bicodec_semantic_{code}" for code in range(8192)]
        levels = [f"{kind}_label_{level}" for kind in ("pitch", "speed") for level in range(5)]
        names += [*_SPARK_CONTROLS, "gender_0", "gender_1", *levels]
        super().__init__(
            numbered_words(151_643, [f"<|{name}|>" for name in names]), 8192, 4096, Path("dummy")
        )

    def spoken(self, text: str) -> list[int]:
        return [self.control("start_content"), *token_letters(text), self.control("end_content")]

    def parse(self, ids: object) -> SparkCodes:
        return SparkCodes(tuple(token % 8192 for token in ids), ())  # pyright: ignore[reportGeneralTypeIssues]


class AnyText(FishVocabulary):
    """The published layout of ids over a text vocabulary of numbered words."""

    def __init__(self, config: FishConfig) -> None:
        self._words = config.end - 2
        semantic = (f"<|semantic:{index}|>" for index in range(len(config.semantic)))
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *FISH_CONTROLS, *semantic]
        super().__init__(numbered_words(self._words, names), config, Path("dummy"))

    def encode(self, text: str) -> list[int]:
        """Control tokens are letters too."""
        return [number % self._words for number in token_letters(text)]

    def spoken(self, text: str) -> list[int]:
        return self.encode(text)


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

    #: Frames of a second of speech, positions before it, and a recording's samples a second.
    rate: float
    prompt: int
    sample_rate: int
    #: What is said in the recording of a voice.
    reference_text: str | None = None
    drawn: SamplingParams
    sampling: TokenSampling
    #: RTFx kept busy that was aimed at, and that must be reached.
    aim: int
    must: int
    shape: Shape
    #: Of vLLM.
    memory_share: float
    #: Slots of an engine that streams are measured on, at least: some are free for whole utterances as well.
    stream_slots = 0
    #: Further fields of a sequence of the LM alone.
    fields: Mapping[str, Any] = MappingProxyType({})
    text_ids: int

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
        asked = NativeModelOptions(
            slots=slots, streams=streams, pages=slots * CONTEXT // PAGE_SIZE, page_size=PAGE_SIZE
        )
        return asked.plan(needs, self.bench.device, CONTEXT, CONTEXT, frame_seconds=1 / self.rate)


class Spark(Family):
    """SparkTTS; with `tiny` an LM that a CPU can run."""

    rate, prompt, sample_rate = 50, 80, 16_000
    drawn = SamplingParams(0.8, 50, 0.95, 1.0, 0.8, 50, 0.95)
    sampling = TokenSampling(0, 0.8, 50, 0.95, ignore_end=True)
    aim, must, memory_share, stream_slots = 2400, 1900, 0.4, 128
    shape = SPARK

    def __init__(self, bench: Bench, folder: Path) -> None:
        super().__init__(bench)
        config = spark_config(folder)
        if bench.options.tiny:
            config = replace(config, lm=replace(config.lm, **TINY_LM))
        self.config, self.vocabulary = config, AnyIdSpeaks()
        tokenizer, codec = dummy_bicodec(config, bench.device, bench.options.codec_dtype)
        references = ReferenceEncoder(config, tokenizer, wav2vec2(bench.device))
        self.parts = spark_pipeline.Parts(config, self.vocabulary, references, codec)
        self.drawable, self.text_ids = (
            Drawable.of(self.vocabulary, config.lm),
            min(150_000, config.lm.vocab // 2),
        )
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

    rate, prompt, sample_rate, reference_text = 44_100 / 2048, 200, 44_100, TEXT
    drawn = SamplingParams(0.8, 30, 0.8, 1.0, 0.8, 30, 0.8)
    sampling = TokenSampling(0, 0.8, 30, 0.8, ignore_end=True)
    aim, must, memory_share = 700, 520, 0.6
    shape = FISH

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


def write_lm(folder: Path, lm: LmConfig) -> None:
    """A folder with the LM's config.json, for vLLM's `load_format="dummy"`."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": lm.hidden, "num_hidden_layers": lm.layers,
        "num_attention_heads": lm.heads, "num_key_value_heads": lm.kv_heads, "intermediate_size": lm.intermediate,
        "vocab_size": lm.vocab, "max_position_embeddings": lm.max_positions, "rope_theta": lm.rope_theta, "rms_norm_eps": lm.eps,
        "hidden_act": "silu", "tie_word_embeddings": True, "use_sliding_window": False, "bos_token_id": 151_643,
        "eos_token_id": lm.eos, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def wav2vec2(device: torch.device) -> SemanticFeatures:
    """wav2vec2 of the size of XLSR-53, cut as ours is."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    features = SemanticFeatures.__new__(SemanticFeatures)
    sizes = Wav2Vec2Config(
        hidden_size=1024, num_hidden_layers=KEPT_LAYERS, num_attention_heads=16, intermediate_size=4096,
        do_stable_layer_norm=True, feat_extract_norm="layer", conv_bias=True, apply_spec_augment=False,
    )  # fmt: skip
    with device:
        features.model = Wav2Vec2Model(sizes).requires_grad_(False).eval()
    features.device, features.normalize = device, True
    return features


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

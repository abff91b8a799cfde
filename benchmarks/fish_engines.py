"""Fish Speech S2 on either engine for a benchmark: dummy weights of the published size, or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from benchmarks.gpu import Bench
from benchmarks.native_parts import prepare_all
from benchmarks.random_models.fish_speech import CONTROLS, dummy_codec, write_checkpoint
from benchmarks.random_models.weights import DummyWeights
from benchmarks.speech_load import token_letters
from benchmarks.watched_executor import Watched
from pipelines.engine.engine import Engine
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, open_executor
from pipelines.fish_speech.codec import Codec, load_codec
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.engines import model_spec, native_host
from pipelines.fish_speech.model import FishModel, take_weights
from pipelines.fish_speech.pipeline import FishPipeline, open_stage
from pipelines.fish_speech.prompt import Vocabulary
from pipelines.nn.checkpoint import Checkpoint, TensorSource
from pipelines.options import TokenModelOptions

#: A reference of six seconds, a text and ten seconds of speech; and positions of a page.
CONTEXT, PAGE_SIZE = 1024, 64


class AnyText(Vocabulary):
    """The published layout of ids over a text vocabulary of numbered words."""

    def __init__(self, config: FishConfig) -> None:
        self._words = config.end - 2
        tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(self._words)}, unk_token="w0"))
        names = [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            *CONTROLS,
            *(f"<|semantic:{i}|>" for i in range(len(config.semantic))),
        ]
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
        super().__init__(tokenizer, config, Path("dummy"))

    def encode(self, text: str) -> list[int]:
        """Control tokens are letters too."""
        return [number % self._words for number in token_letters(text)]

    def spoken(self, text: str) -> list[int]:
        return self.encode(text)


@dataclass(frozen=True, slots=True)
class Parts:
    """What both engines share: everything but the LM, and where the native engine takes its tensors from."""

    config: FishConfig
    vocabulary: Vocabulary
    codec: Codec
    weights: TensorSource
    #: How vLLM loads its weights.
    load_format: dict[str, Any]


def dummy_parts(bench: Bench, folder: Path, tiny: bool = False) -> Parts:
    """Dummy weights of the published sizes, or of `tiny` ones; config.json in `folder`."""
    config = write_checkpoint(folder, tiny)
    codec = dummy_codec(config, bench.device, bench.options.codec_dtype)
    return Parts(config, AnyText(config), codec, DummyWeights(bench.device), {"load_format": "dummy"})


def checkpoint_parts(bench: Bench, folder: Path) -> Parts:
    """A checkpoint, the codec in float32."""
    config = FishConfig.from_folder(folder)
    codec = load_codec(config, bench.device, torch.float32)
    return Parts(config, Vocabulary.from_folder(config), codec, Checkpoint.open(folder), {})


class NativeFish:
    """The dual AR on the native engine: its executor, over which pipelines are opened one after the other."""

    def __init__(self, bench: Bench, parts: Parts, slots: int, streams: int = 0) -> None:
        """`streams`: how many it is prepared for; as many slots are then kept free of whole utterances."""
        config, slow, dtype = parts.config, parts.config.slow, bench.dtype
        self.parts = parts
        with torch.inference_mode():
            model = FishModel(config, take_weights(parts.weights, config, dtype, bench.device), CONTEXT)
        # The weights are on the device already; every slot has room for a whole context.
        needs = MemoryNeeds(
            0,
            12 * (config.codebooks * config.fast.vocab + 2 * slow.intermediate),
            2 * slow.layers * slow.kv_heads * slow.head_dim * PAGE_SIZE * dtype.itemsize,
            1_600_000,
        )
        self.sizes = NativeModelOptions(
            slots=slots, streams=streams, pages=slots * CONTEXT // PAGE_SIZE, page_size=PAGE_SIZE
        ).plan(needs, bench.device, CONTEXT, CONTEXT, frame_seconds=1 / config.frames_per_second)
        self.executor = open_executor(model, self.sizes, streams=streams)
        prepare_all(self.executor, bench.device)
        self.watched = Watched(self.executor)

    def pipeline(self, turns: int = 0) -> FishPipeline:
        """A pipeline with an engine of its own; `turns`: frames a scheduling turn, 0 for the engine's
        choice."""
        parts, config = self.parts, self.parts.config
        sizes = replace(self.sizes, frames_per_turn=turns or self.sizes.frames_per_turn)
        stage = open_stage(parts.codec.decoder)
        host = native_host(config, Engine(self.watched, sizes, sizes.slots, stage))
        return FishPipeline(config, parts.vocabulary, parts.codec, host, stage, keep_unfinished=True)


def prompt_positions() -> dict[str, float]:
    """Positions of prompts that vLLM has computed, and those that it found in its prefix cache."""
    from pipelines.vllm_engine.library import VllmMetrics

    samples = [sample for metric in VllmMetrics().collect() for sample in metric.samples]
    names = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"
    asked, found = (sum(sample.value for sample in samples if sample.name == name) for name in names)
    return {"prompt_positions_computed": asked - found, "prompt_positions_found": found}


def vllm_pipeline(bench: Bench, parts: Parts, slots: int, kept_voices: bool) -> FishPipeline:
    """A pipeline on vLLM; `kept_voices`: whether prompts share the KV of what they begin with."""
    from pipelines.vllm_engine.host import VllmHost

    options = bench.options
    dtype = "bfloat16" if bench.on_gpu else "float32"
    chosen = TokenModelOptions(
        memory_share=options.memory_share, slots=slots, dtype=dtype, eager=options.eager or None
    )
    spec = model_spec(parts.config, kept_voices, **parts.load_format)
    host = VllmHost(spec, replace(chosen, max_context=CONTEXT))
    stage = open_stage(parts.codec.decoder)
    return FishPipeline(parts.config, parts.vocabulary, parts.codec, host, stage, keep_unfinished=True)

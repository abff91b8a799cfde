"""The configuration of a Fish Speech S2 checkpoint folder: config.json, and the sizes of the codec. Imports
no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pipelines.nn.config_keys import (
    BaseSamplingDefaults,
    Keys,
    Positive,
    Size,
    Sizes,
    StackConfig,
    StackShape,
    Whole,
    codec_identity,
)
from pipelines.registry import ModelCard, checkpoint_card
from pipelines.request import Capabilities

MODEL_TYPE = "fish_qwen3_omni"
CODEC_WEIGHTS = "codec.pth"
#: File with the sizes of a codec other than the published one, whose folder has no such file.
CODEC_SIZES = "codec_config.json"
#: Steps that a query in the encoder's transformer sees, including its own; a constant of the published code.
ENCODER_WINDOW = 512


@dataclass(frozen=True, slots=True)
class DualArStack(StackConfig):
    """One of the two transformers: `text_config` (slow AR) or `audio_decoder_config` (fast AR)."""

    hidden: Annotated[Size, "dim"]
    layers: Annotated[Size, "n_layer"]
    heads: Annotated[Size, "n_head"]
    kv_heads: Annotated[Size, "n_local_heads"]
    eps: Annotated[Positive, "norm_eps"]
    rope_theta: Annotated[Positive, "rope_base"]
    max_positions: Annotated[Size, "max_seq_len"]
    #: Whether the queries and keys of each head are normalized.
    qk_norm: Annotated[bool, "attention_qk_norm"] = False


@dataclass(frozen=True, slots=True)
class CodecStackConfig(StackShape):
    """One of the codec's causal sliding-window transformers."""

    hidden: Annotated[Size, "config.dim"]
    intermediate: Annotated[Size, "config.intermediate_size"]
    layers: Annotated[Size, "config.n_layer"]
    heads: Annotated[Size, "config.n_head"]
    kv_heads: Annotated[Size, "config.n_head"]
    head_dim: Annotated[Size, "config.head_dim"]
    eps: Annotated[Positive, "config.norm_eps"] = 1e-5
    rope_theta: Annotated[Positive, "config.rope_base"] = 10_000.0
    #: Steps that a query sees, including its own.
    window: Annotated[Size, "window_size"] = field(kw_only=True)
    qk_norm = False


_PUBLISHED_STACK = CodecStackConfig(1024, 3072, 8, 16, 16, 64, window=128)


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """The sizes of the codec. The defaults are those of the published codec, whose folder does not contain
    them."""

    sample_rate: Size = 44_100
    encoder_dim: Size = 64
    encoder_rates: Sizes = (2, 4, 8, 8)
    #: The transformer at the end of each of the encoder's blocks; None: the block has none.
    encoder_stacks: tuple[CodecStackConfig | None, ...] = (
        None,
        None,
        None,
        CodecStackConfig(1024, 3072, 4, 16, 16, 64, window=ENCODER_WINDOW),
    )
    decoder_dim: Size = 1536
    decoder_rates: Sizes = (8, 8, 4, 2)
    #: Channels between encoder, quantizer and decoder.
    latent: Annotated[Size, "quantizer.input_dim"] = 1024
    residual_codebooks: Annotated[Size, "quantizer.n_codebooks"] = 9
    residual_codes: Annotated[Size, "quantizer.codebook_size"] = 1024
    semantic_codes: Annotated[Size, "quantizer.semantic_codebook_size"] = 4096
    codebook_dim: Annotated[Size, "quantizer.codebook_dim"] = 8
    downsample: Annotated[Sizes, "quantizer.downsample_factor"] = (2, 2)
    pre: Annotated[CodecStackConfig, "quantizer.pre_module"] = _PUBLISHED_STACK
    post: Annotated[CodecStackConfig, "quantizer.post_module"] = _PUBLISHED_STACK

    @property
    def codebooks(self) -> int:
        return 1 + self.residual_codebooks

    @property
    def codes(self) -> list[int]:
        """The number of codes of each codebook; the semantic codebook is the first one."""
        return [self.semantic_codes] + [self.residual_codes] * self.residual_codebooks

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.encoder_rates) * math.prod(self.downsample)


@dataclass(frozen=True, slots=True)
class SamplingDefaults(BaseSamplingDefaults):
    """The sampling settings of the published server, which are combined with repetition-aware sampling. That server
    accepts a repetition penalty but does not use it."""

    temperature: float = 0.8
    top_k: int = 30
    top_p: float = 0.8
    #: A long text is spoken in groups; their maximum UTF-8 bytes and speaker turns.
    chunk_bytes: int = 200
    chunk_turns: int = 5


@dataclass(frozen=True, slots=True)
class FishConfig:
    """One checkpoint folder."""

    folder: Path
    sample_rate: int
    slow: DualArStack
    fast: DualArStack
    #: Codes of a frame; the first one is semantic.
    codebooks: int
    #: Ids of the semantic tokens, and of the token that ends speech.
    semantic: range
    end: int
    codec: CodecConfig
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.codec.samples_per_frame

    @classmethod
    def from_folder(cls, folder: Path) -> FishConfig:
        """Reads the configs. Raises `ModelError` (`model.bad_checkpoint`) that names the file and the wrong
        key."""
        keys = Keys.read(folder / "config.json")
        keys.expect(model_type=MODEL_TYPE)
        text = keys.section("text_config")
        audio = keys.section("audio_decoder_config")
        text.expect(tie_word_embeddings=True, attention_qk_norm=True)
        slow = _stack(text)
        codec = _codec(folder / CODEC_SIZES)
        codebooks = audio.value("num_codebooks", Size)
        audio.expect(attention_qk_norm=False, text_dim=slow.hidden)
        # As in the published code, the fast AR has the base and the epsilon of the slow AR; its own section
        # is ignored.
        fast = _stack(audio, rope_theta=slow.rope_theta, eps=slow.eps, max_positions=codebooks)
        if codebooks != codec.codebooks:
            raise audio.error("num_codebooks", f"is {codebooks}, but the codec has {codec.codebooks}")
        first, last, end = (
            keys.value(f"{name}_token_id", Size) for name in ("semantic_start", "semantic_end", "eos")
        )
        semantic = range(first, last + 1)
        if not 0 < len(semantic) <= fast.vocab or last >= slow.vocab:
            raise keys.error(
                "semantic_end_token_id",
                f"and the start make {len(semantic)} tokens; the fast AR knows {fast.vocab}",
            )
        if end in semantic or end >= slow.vocab:
            raise keys.error("eos_token_id", "is no text token")
        return cls(folder, codec.sample_rate, slow, fast, codebooks, semantic, end, codec)


def _stack(keys: Keys, **known: float) -> DualArStack:
    keys.expect(attention_qkv_bias=False, attention_o_bias=False)
    config = keys.take(DualArStack, **known)
    keys.require(
        not config.heads % config.kv_heads and not config.head_dim % 2,
        "n_head must be a multiple of n_local_heads, and head_dim must be even",
    )
    return config


def _codec(path: Path) -> CodecConfig:
    if not path.is_file():
        return CodecConfig()
    keys = Keys.read(path)
    config = keys.take(CodecConfig, encoder_stacks=())
    depths = keys.value("encoder_transformer_layers", list[Whole])
    general = keys.section("transformer_general_config")
    head_dim = general.value("head_dim", Size)
    base, eps = (general.value(name, Positive) for name in ("rope_base", "norm_eps"))

    def stack(layers: int, dim: int) -> CodecStackConfig:
        heads = dim // head_dim
        return CodecStackConfig(
            dim, 3 * dim, layers, heads, heads, head_dim, eps, base, window=ENCODER_WINDOW
        )

    stacks = [
        stack(depth, config.encoder_dim << index) if depth else None for index, depth in enumerate(depths, 1)
    ]
    return replace(config, encoder_stacks=tuple(stacks))


#: Maximum recordings of a line: the maximum speaker turns that the published code joins in a prompt.
MAX_REFERENCES = 5
CAPABILITIES = Capabilities(
    cloning=True,
    needs_reference_text=True,
    references=MAX_REFERENCES,
    streaming=True,
    codes=True,
    max_text_characters=20_000,
)


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = FishConfig.from_folder(folder)
    return checkpoint_card(
        folder,
        "fish_speech",
        (".json", ".safetensors", ".pth"),
        sample_rate=config.sample_rate,
        capabilities=CAPABILITIES,
        executors=("eager", "graph"),
        engines=("native", "vllm"),
        codec=lambda: codec_identity(
            "fish-s2",
            [folder / CODEC_WEIGHTS],
            config.codec.samples_per_frame,
            config.sample_rate,
            config.codec.codes,
        ),
    )

"""A Fish Speech S2 checkpoint folder's own configuration: config.json, and the codec's sizes. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipelines.engine_choice import check_frames_on_vllm
from pipelines.nn.config_keys import Keys, revision
from pipelines.recording import check_encoded
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

MODEL_TYPE = "fish_qwen3_omni"
CODEC_WEIGHTS = "codec.pth"
#: Sizes of a codec that is not the published one; the published folder has no such file.
CODEC_SIZES = "codec_config.json"
#: Steps that the encoder's own transformer looks back, itself included; fixed in the published code.
ENCODER_WINDOW = 512
_ADVICE = "Check that the folder holds an unchanged Fish Speech S2 checkpoint."


@dataclass(frozen=True, slots=True)
class StackConfig:
    """One of the two transformers: `text_config` (slow AR) or `audio_decoder_config` (fast AR)."""

    vocab: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_base: float
    eps: float
    #: Whether queries and keys are normalized by head.
    qk_norm: bool

    @property
    def hidden(self) -> int:
        return self.dim

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class CodecStackConfig:
    """One of the codec's causal sliding-window transformers."""

    layers: int
    dim: int
    heads: int
    head_dim: int
    intermediate: int
    #: Steps that a query sees, itself included.
    window: int
    rope_base: float = 10_000.0
    eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """The sizes of the codec; the defaults are those of the published one, which its folder does not say."""

    sample_rate: int = 44_100
    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 8, 8)
    #: The transformer behind each of the encoder's blocks; None: it has none.
    encoder_stacks: tuple[CodecStackConfig | None, ...] = (None, None, None, CodecStackConfig(4, 1024, 16, 64, 3072, ENCODER_WINDOW))
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)
    #: Channels between encoder, quantizer and decoder.
    latent: int = 1024
    residual_codebooks: int = 9
    residual_codes: int = 1024
    semantic_codes: int = 4096
    codebook_dim: int = 8
    downsample: tuple[int, ...] = (2, 2)
    pre: CodecStackConfig = CodecStackConfig(8, 1024, 16, 64, 3072, 128)
    post: CodecStackConfig = CodecStackConfig(8, 1024, 16, 64, 3072, 128)

    @property
    def codebooks(self) -> int:
        return 1 + self.residual_codebooks

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.encoder_rates) * math.prod(self.downsample)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The published server's own sampling; repetition-aware sampling stands beside it, whatever is asked for."""

    temperature: float = 0.8
    top_k: int = 30
    top_p: float = 0.8
    #: Accepted by the published server and not used.
    repetition_penalty: float = 1.0
    #: Columns of one turn, the last of which is no speech.
    max_new_tokens: int = 2048
    #: UTF-8 bytes and speaker turns of the groups that a long text is spoken in.
    chunk_bytes: int = 200
    chunk_turns: int = 5


@dataclass(frozen=True, slots=True)
class FishConfig:
    """One checkpoint folder."""

    folder: Path
    sample_rate: int
    slow: StackConfig
    fast: StackConfig
    #: Codes of a frame, the semantic one first.
    codebooks: int
    #: Ids of the semantic tokens, and of the token that ends speech.
    semantic: range
    end: int
    max_positions: int
    codec: CodecConfig
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.codec.samples_per_frame

    @classmethod
    def from_folder(cls, folder: str | Path) -> FishConfig:
        """Reads the configs. Raises `ModelError` (`model.bad_checkpoint`) that names the file and the key at fault."""
        folder = Path(folder)
        keys = Keys.read(folder / "config.json", _ADVICE)
        if (kind := keys.get("model_type", None)) != MODEL_TYPE:
            raise keys.error("model_type", f"is {kind!r}, not {MODEL_TYPE!r}")
        text, audio = keys.section("text_config"), keys.section("audio_decoder_config")
        slow = _stack(text, qk_norm=True)
        if not text.get("tie_word_embeddings", True):
            raise text.error("tie_word_embeddings", "is false, which is not supported")
        # The published code gives the fast AR the base and the epsilon of the slow one, whatever its own section says.
        fast = _stack(audio, qk_norm=False, rope_base=slow.rope_base, eps=slow.eps)
        if audio.size("text_dim") != slow.dim:
            raise audio.error("text_dim", f"is {audio.size('text_dim')}, but the slow AR has {slow.dim}")
        first, last = keys.size("semantic_start_token_id"), keys.size("semantic_end_token_id")
        semantic = range(first, last + 1)
        if not 0 < len(semantic) <= fast.vocab or last >= slow.vocab:
            raise keys.error("semantic_end_token_id", f"and the start make {len(semantic)} tokens; the fast AR knows {fast.vocab}")
        codec = _codec(folder / CODEC_SIZES)
        codebooks = audio.size("num_codebooks")
        if codebooks != codec.codebooks:
            raise audio.error("num_codebooks", f"is {codebooks}, but the codec has {codec.codebooks}")
        end = keys.size("eos_token_id")
        if end in semantic or end >= slow.vocab:
            raise keys.error("eos_token_id", "is no text token")
        return cls(folder, codec.sample_rate, slow, fast, codebooks, semantic, end, text.size("max_seq_len"), codec)


def _stack(keys: Keys, *, qk_norm: bool, rope_base: float | None = None, eps: float | None = None) -> StackConfig:
    for name in ("attention_qkv_bias", "attention_o_bias"):
        if keys.get(name, False):
            raise keys.error(name, "is set, which is not supported")
    if bool(keys.get("attention_qk_norm", False)) is not qk_norm:
        raise keys.error("attention_qk_norm", f"must be {str(qk_norm).lower()}")
    config = StackConfig(
        vocab=keys.size("vocab_size"),
        layers=keys.size("n_layer"),
        dim=keys.size("dim"),
        heads=keys.size("n_head"),
        kv_heads=keys.size("n_local_heads"),
        head_dim=keys.size("head_dim"),
        intermediate=keys.size("intermediate_size"),
        rope_base=keys.number("rope_base") if rope_base is None else rope_base,
        eps=keys.number("norm_eps") if eps is None else eps,
        qk_norm=qk_norm,
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise keys.error("n_head", "and n_local_heads must divide, and head_dim must be even")
    return config


def _codec(path: Path) -> CodecConfig:
    if not path.is_file():
        return CodecConfig()
    keys = Keys.read(path, _ADVICE)
    quantizer = keys.section("quantizer")
    general = keys.section("transformer_general_config")
    latent, width = quantizer.size("input_dim"), keys.size("encoder_dim")
    rates = keys.wholes("encoder_rates")
    depths = _counts(keys, "encoder_transformer_layers")
    if len(depths) != len(rates):
        raise keys.error("encoder_transformer_layers", "must have one number a rate")
    if width << len(rates) != latent:
        raise keys.error("encoder_dim", f"grows to {width << len(rates)} channels, but the quantizer takes {latent}")
    head_dim, stacks = general.size("head_dim"), []
    for index, depth in enumerate(depths):
        dim = width << (index + 1)
        stack = CodecStackConfig(
            depth, dim, dim // head_dim, head_dim, 3 * dim, ENCODER_WINDOW, general.number("rope_base"), general.number("norm_eps")
        )
        stacks.append(stack if depth else None)
    config = CodecConfig(
        sample_rate=keys.size("sample_rate"),
        encoder_dim=width,
        encoder_rates=rates,
        encoder_stacks=tuple(stacks),
        decoder_dim=keys.size("decoder_dim"),
        decoder_rates=keys.wholes("decoder_rates"),
        latent=latent,
        residual_codebooks=quantizer.size("n_codebooks"),
        residual_codes=quantizer.size("codebook_size"),
        semantic_codes=quantizer.size("semantic_codebook_size"),
        codebook_dim=quantizer.size("codebook_dim"),
        downsample=quantizer.wholes("downsample_factor"),
        pre=_codec_stack(quantizer.section("pre_module"), latent),
        post=_codec_stack(quantizer.section("post_module"), latent),
    )
    if config.samples_per_frame != math.prod(config.decoder_rates) * math.prod(config.downsample):
        raise keys.error("decoder_rates", "do not make as many samples of a frame as the encoder takes")
    if config.decoder_dim % (1 << len(config.decoder_rates)):
        raise keys.error("decoder_dim", "cannot be halved once a rate")
    return config


def _codec_stack(keys: Keys, latent: int) -> CodecStackConfig:
    inner = keys.section("config")
    config = CodecStackConfig(
        inner.size("n_layer"),
        inner.size("dim"),
        inner.size("n_head"),
        inner.size("head_dim"),
        inner.size("intermediate_size"),
        keys.size("window_size"),
        inner.number("rope_base"),
        inner.number("norm_eps"),
    )
    if config.dim != latent or config.heads * config.head_dim != config.dim:
        raise inner.error("dim", f"must be {latent}, and n_head times head_dim")
    return config


def _counts(keys: Keys, key: str) -> tuple[int, ...]:
    """A list of whole numbers that may be 0."""
    values = keys.get(key, None)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise keys.error(key, "must be a list of whole numbers")
    return tuple(values)


#: Average of English read speech, for estimates.
SECONDS_PER_CHARACTER = 0.067
#: Recordings of one line: as many speakers as a prompt of the published code joins turns of.
MAX_REFERENCES = 5
CAPABILITIES = Capabilities(
    cloning=True,
    needs_reference_text=True,
    references=MAX_REFERENCES,
    streaming=True,
    max_text_characters=20_000,
)
_SUFFIXES = (".json", ".safetensors", ".pth")


def check_engine(engine: str) -> None:
    """Raises `ConfigError` (`config.invalid`) for the engine vllm on a machine where it cannot run this model."""
    if engine == "vllm":
        check_frames_on_vllm()


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = FishConfig.from_folder(folder)
    return ModelCard(
        name=str(folder),
        family="fish_speech",
        engine="native",
        sample_rate=config.sample_rate,
        capabilities=CAPABILITIES,
        revision=revision(folder, _SUFFIXES),
        executors=("eager", "graph"),
        engines=("native", "vllm"),
        seconds_per_character=SECONDS_PER_CHARACTER,
        check_reference=check_encoded,
        check_engine=check_engine,
    )

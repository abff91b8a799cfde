"""Models of random weights: the work of a checkpoint, and no speech.

Shapes are those of the published checkpoints, or `tiny` ones that a CPU can run. What is written has their layout too,
so a loader has all of its work; the tokenizer is small, but its special tokens have the published ids.
"""

from __future__ import annotations

import json
import math
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn

from benchmarks.common import FRAMES_PER_SECOND, ROOT
from pipelines.fish_speech.codec import Codec, codec_from
from pipelines.fish_speech.config import CodecConfig as FishCodecConfig
from pipelines.fish_speech.config import CodecStackConfig, FishConfig
from pipelines.fish_speech.prompt import Vocabulary as FishVocabulary
from pipelines.nn.checkpoint import TensorSource, fill_module, open_device
from pipelines.nn.config_keys import StackShape
from pipelines.qwen3_tts.codec import CodecDecoder, fuses_front
from pipelines.qwen3_tts.config import CodecConfig, CodecDecoderConfig, Qwen3TTSConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights
from pipelines.spark_tts import config as spark
from pipelines.spark_tts.bicodec import BiCodec, Encoder, Prenet, SemanticQuantizer
from pipelines.spark_tts.bicodec import Tokenizer as AudioTokenizer
from pipelines.spark_tts.prompt import CONTROLS, LABELS, SparkCodes
from pipelines.spark_tts.prompt import Vocabulary as SparkVocabulary
from pipelines.spark_tts.speaker import MelMagnitudes, SpeakerEncoder
from pipelines.spark_tts.wave_generator import WaveGenerator, prepared
from pipelines.speechlm.config import SpeechLmConfig

#: The value of a tensor from its name and standard normal noise of its shape.
Rule = Callable[[str, Tensor], Tensor]
Place = torch.device | str | None


def in_range(name: str, noise: Tensor) -> Tensor:
    """Scales of one, matrices that let a signal fade slowly, small vectors: what keeps the signals of most
    models in range."""
    if name.endswith(("running_var", "norm.weight", "bn.weight", "alpha")) or ".bns." in name:
        return torch.ones_like(noise)
    if name.endswith("gamma"):
        return torch.full_like(noise, 0.1)
    return noise * (0.6 * noise[0].numel() ** -0.5 if noise.dim() > 1 else 0.02)


class DummyWeights(TensorSource):
    """Takes the place of `pipelines.nn.checkpoint.Checkpoint`: draws each tensor on `device` when it is
    taken, from its name and shape alone, and keeps it on the host in `kept`, if that is given."""

    def __init__(
        self, device: torch.device | str, rule: Rule = in_range, kept: dict[str, Tensor] | None = None
    ) -> None:
        self._device, self._rule, self._kept = torch.device(device), rule, kept

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: Place = None
    ) -> Tensor:
        dice = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(tuple(shape), generator=dice, device=self._device)
        made = self._rule(name, noise).to(device=device, dtype=dtype)
        if self._kept is not None:
            self._kept[name] = made.to("cpu").contiguous()
        return made


@torch.no_grad()
def fill(module: nn.Module, rule: Rule, seed: int = 0) -> None:
    """Gives every float tensor of a module its dummy values, and every other tensor zeros."""
    dice: dict[torch.device, torch.Generator] = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            tensor.zero_()
            continue
        drawn = dice.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(seed))
        tensor.copy_(rule(name, torch.randn(tensor.shape, generator=drawn, device=tensor.device)))


_QWEN3_STACK = {
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
    "num_code_groups": 16, "hidden_act": "silu",
}  # fmt: skip
_WIDTHS = {"0b6": (1024, 3072), "1b7": (2048, 6144), "tiny": (64, 64)}
_CODEC_IDS = {"pad": 2148, "bos": 2149, "think": 2154, "nothink": 2155, "think_bos": 2156, "think_eos": 2157}


def qwen3_config(size: str, kind: str = "custom_voice") -> dict[str, Any]:
    """The keys of config.json that inference reads, of the CustomVoice or Base checkpoint of this size ("0b6" or
    "1b7").

    "tiny" has the layout and vocabularies of the published ones and next to no width, to try a benchmark
    on a CPU.
    """
    (hidden, intermediate), tiny = _WIDTHS[size], size == "tiny"
    predictor = {
        **_QWEN3_STACK, "hidden_size": hidden if tiny else 1024, "intermediate_size": 64 if tiny else 3072,
        "num_hidden_layers": 1 if tiny else 5, "vocab_size": 2048, "max_position_embeddings": 65536,
    }  # fmt: skip
    talker = {
        **_QWEN3_STACK, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 1 if tiny else 28,
        "vocab_size": 3072, "max_position_embeddings": 32768, "text_vocab_size": 151936, "text_hidden_size": 16 if tiny else 2048,
        "codec_eos_token_id": 2150, **{f"codec_{name}_id": value for name, value in _CODEC_IDS.items()},
        "codec_language_id": {"english": 2050}, "spk_id": {"ryan": 3061}, "spk_is_dialect": {"ryan": False},
        "code_predictor_config": predictor,
    }  # fmt: skip
    return {
        "model_type": "qwen3_tts", "tokenizer_type": "qwen3_tts_tokenizer_12hz", "tts_model_size": size,
        "tts_model_type": kind, "speaker_encoder_config": {"enc_dim": hidden}, "im_start_token_id": 151644, "im_end_token_id": 151645, "assistant_token_id": 77091,
        "tts_pad_token_id": 151671, "tts_bos_token_id": 151672, "tts_eos_token_id": 151673, "talker_config": talker,
    }  # fmt: skip


#: The published 12 Hz decoder.
PUBLISHED_CODEC = CodecDecoderConfig(
    codebook_size=2048, codebook_dim=512, num_quantizers=16, latent_dim=1024, stack=StackShape(512, 1024, 8, 16, 16, 64, 1e-5, 10_000.0),
    sliding_window=72, decoder_dim=1536, upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2),
)  # fmt: skip
#: The same with next to no width, to try things on a CPU.
TINY_CODEC = replace(PUBLISHED_CODEC, latent_dim=32, codebook_dim=16, decoder_dim=48,
                     stack=StackShape(32, 32, 1, 2, 2, 16, 1e-5, 10_000.0))  # fmt: skip


@torch.inference_mode()
def dummy_model(
    size: str, device: torch.device, dtype: torch.dtype, max_context: int = 4096, ends: bool = False
) -> Qwen3TTSModel:
    """A model of this size on the device; with `ends`, one that draws the end wherever `min_new_tokens`
    allows it."""
    with tempfile.TemporaryDirectory() as folder:
        _write_json(Path(folder, "config.json"), qwen3_config(size))
        config = Qwen3TTSConfig.from_folder(Path(folder))
    rule = ends_when_allowed(config.ids.codec_eos_token_id) if ends else as_published
    return Qwen3TTSModel(config, take_weights(DummyWeights(device, rule), config, dtype, device), max_context)


@torch.inference_mode()
def dummy_decoder(
    shape: CodecDecoderConfig, device: torch.device, dtype: torch.dtype, fused: bool | None = None, *,
    reproducible: bool = False, fused_front: bool | None = None,
) -> CodecDecoder:  # fmt: skip
    """A codec decoder of this shape."""
    front = fuses_front(device, dtype, reproducible, 0) if fused_front is None else fused_front
    return CodecDecoder(shape, DummyWeights(device, codec_values), device, dtype, fused, reproducible, front)


def as_published(name: str, noise: Tensor) -> Tensor:
    """Norms around 1, matrices scaled to keep the variance; rounded to bfloat16, so that models of both
    types hold the same values."""
    return (1 + 0.1 * noise if "norm" in name else noise * noise.shape[-1] ** -0.5).to(torch.bfloat16)


def codec_values(name: str, noise: Tensor) -> Tensor:
    """A spread that keeps the decoder's activations near one."""
    last = name.rsplit(".", 1)[1]
    if last == "cluster_usage":
        return noise.abs() + 0.5
    if last in ("alpha", "beta"):
        return 0.3 * noise
    if last in ("gamma", "scale"):
        return 0.5 * noise
    if last == "bias":
        return 0.02 * noise
    if noise.dim() == 1:
        return 1.0 + 0.1 * noise
    transposed = ".block.1.conv." in name or name.startswith(("decoder.upsample.0.0", "decoder.upsample.1.0"))
    fan = 2 * noise.shape[0] if transposed else math.prod(noise.shape[1:])
    return noise if last == "embedding_sum" else 0.8 / math.sqrt(fan) * noise


def ends_when_allowed(end: int, never: bool = False) -> Rule:
    """Values of a model that draws the id `end` wherever `min_new_tokens` allows it, or `never`.

    Channel 0 of the residual stream holds a constant that every code adds to and no layer changes; only
    the end's logit reads it.
    """

    def values(name: str, noise: Tensor) -> Tensor:
        made = as_published(name, noise)
        if ".codec_embedding." in name:
            made[:, 0] = 0.1
        elif name.startswith("talker.model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            made[0] = 0
        elif name == "talker.codec_head.weight":
            made[end] = 0
            made[end, 0] = -200 if never else 200
        return made

    return values


SPARK_LM = spark.LmConfig(
    hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, eps=1e-6, rope_theta=1e6, vocab=166_000,
    max_positions=32_768, tie_word_embeddings=True, eos_token_id=151_645,
)  # fmt: skip
_VOCOS = spark.VocosConfig(1024, 384, 2048, 12, 1024, (1, 1))
_MEL, _SPEAKER = (
    spark.MelConfig(16_000, 1024, 640, 320, 10.0, 128),
    spark.SpeakerConfig(128, 1024, 128, 32, (4,) * 6),
)
_WAVE = spark.WaveConfig(1024, 1536, (8, 5, 4, 2), (16, 11, 8, 4))
SPARK_CODEC = spark.BiCodecConfig(_MEL, _VOCOS, _VOCOS, _SPEAKER, _WAVE, 8192, 8)


def spark_config(folder: Path) -> spark.SparkConfig:
    """The config of a checkpoint that would lie in this folder."""
    return spark.SparkConfig(folder, 16_000, 96_000, SPARK_CODEC, SPARK_LM, volume_normalize=True)


def dummy_bicodec(
    settings: spark.SparkConfig, device: torch.device, dtype: torch.dtype, fused: bool | None = None
) -> tuple[AudioTokenizer, BiCodec]:
    """Both halves of BiCodec, the decoder in `dtype`; `fused` as for
    `pipelines.spark_tts.wave_generator.prepared`."""
    codec, weights = SPARK_CODEC, DummyWeights(device)
    with torch.device("meta"):
        encoder, speaker = Encoder(codec.encoder), SpeakerEncoder(codec.speaker)
        sizes = codec.encoder.out_channels, codec.codebook_size, codec.codebook_dim
        quantizer, wave = SemanticQuantizer(*sizes), WaveGenerator(codec.wave)
        prenet = Prenet(codec.prenet, codec.speaker.out_dim)
    for module in (encoder, speaker, quantizer, wave):
        fill_module(module, weights, "", device)
    fill_module(prenet, weights, "", device, dtype)
    mel = MelMagnitudes(codec.mel_params, settings.sample_rate, device)
    decoder = BiCodec(codec, quantizer, speaker, prenet, prepared(wave, dtype, fused))
    return AudioTokenizer(encoder, quantizer, speaker, mel), decoder


_TEXT_IDS = 151_643
FISH_CONTROLS = (
    "<|pad|>", "<|phoneme_start|>", "<|phoneme_end|>", "<|text|>", "<|voice|>", "<|interleave|>", "<|audio_start|>", "<|audio_end|>",
    "<|audio_pad|>",
)  # fmt: skip
_FISH_STACK = CodecStackConfig(32, 48, 1, 1, 1, 32, window=8)
TINY_FISH_CODEC = FishCodecConfig(
    encoder_dim=2, encoder_stacks=(None,) * 4, decoder_dim=16, latent=32, residual_codes=16, semantic_codes=64, pre=_FISH_STACK,
    post=_FISH_STACK,
)  # fmt: skip
_FISH_SIZES = ("dim", "n_layer", "n_head", "n_local_heads", "head_dim", "intermediate_size")


def fish_config(folder: Path, tiny: bool = False) -> FishConfig:
    """A folder with the published config.json and no weights, for vLLM's `load_format="dummy"`; `tiny` is for
    trying things out."""
    sizes = (64, 2, 2, 1, 32, 96) if tiny else (2560, 36, 32, 8, 128, 9728)
    codes, text = (64, 300) if tiny else (4096, _TEXT_IDS)
    slow = dict(zip(_FISH_SIZES, sizes, strict=True)) | {"rope_base": 1_000_000, "norm_eps": 1e-6}
    fast = slow | {
        "n_layer": 1 if tiny else 4,
        "vocab_size": codes,
        "num_codebooks": 10,
        "text_dim": slow["dim"],
    }
    first = text + 3 + len(FISH_CONTROLS)
    # The published vocabulary has two spare ids after the semantic tokens.
    slow |= {"vocab_size": first + codes + 2, "max_seq_len": 32_768, "attention_qk_norm": True}
    content = {
        "model_type": "fish_qwen3_omni", "eos_token_id": text + 2, "semantic_start_token_id": first,
        "semantic_end_token_id": first + codes - 1, "text_config": slow, "audio_decoder_config": fast,
    }  # fmt: skip
    _write_json(folder / "config.json", content)
    config = FishConfig.from_folder(folder)
    return replace(config, codec=TINY_FISH_CODEC) if tiny else config


def dummy_fish_codec(
    config: FishConfig, device: torch.device, dtype: torch.dtype, fused: bool | None = None
) -> Codec:
    return codec_from(config.codec, DummyWeights(device), device, dtype, fused)


_GOLDEN = ROOT / "tests/golden/speechlm/checkpoint"
#: `text_config` and offsets as published (speechlm-qwen3-8b).
_SPEECHLM_TEXT = {
    "vocab_size": 160_392, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
_SPEECHLM = {
    "vocab_size": 160_392, "hidden_size": 4096, "codec_base_offset": 152_192, "codec_layer_size": 1025, "text_token_offset": 256,
    "text_token_end": 152_192, "adaptor_input_dim": 2048,
}  # fmt: skip


def speechlm_config(folder: Path, tiny: bool = False) -> SpeechLmConfig:
    """A folder with the published config.json alone; `tiny`: the golden checkpoint's with heads that a CPU knows."""
    content: dict[str, Any] = json.loads((_GOLDEN / "config.json").read_text(encoding="utf-8"))
    content |= {} if tiny else _SPEECHLM
    content["text_config"] |= {"head_dim": 32} if tiny else _SPEECHLM_TEXT
    _write_json(folder / "config.json", content)
    return SpeechLmConfig.from_folder(folder)


#: Sizes of SparkTTS's LM that a CPU can run, with the published vocabulary and codec.
TINY_LM = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 96}


def token_letters(text: str) -> list[int]:
    """A number for every four letters, as English has tokens."""
    return [sum(text[at : at + 4].encode()) for at in range(0, len(text), 4)]


def numbered_words(count: int, names: Sequence[str]) -> Tokenizer:
    """A vocabulary of `count` words, followed by the tokens `names`."""
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
        names += [*(f"bicodec_semantic_{code}" for code in range(8192)), *CONTROLS, *LABELS]
        words = numbered_words(151_643, [f"<|{name}|>" for name in names])
        super().__init__(words, 8192, 4096, Path("dummy"))

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


def write_lm(folder: Path, lm: spark.LmConfig) -> None:
    """A folder with the LM's config.json, for vLLM's `load_format="dummy"`."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": lm.hidden, "num_hidden_layers": lm.layers,
        "num_attention_heads": lm.heads, "num_key_value_heads": lm.kv_heads, "intermediate_size": lm.intermediate,
        "vocab_size": lm.vocab, "max_position_embeddings": lm.max_positions, "rope_theta": lm.rope_theta, "rms_norm_eps": lm.eps,
        "hidden_act": "silu", "tie_word_embeddings": True, "use_sliding_window": False, "bos_token_id": 151_643,
        "eos_token_id": lm.eos_token_id, "torch_dtype": "bfloat16",
    }  # fmt: skip
    _write_json(folder / "config.json", config)


def wav2vec2(device: torch.device) -> Any:
    """wav2vec2 of the size of XLSR-53, cut as ours is."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model  # pyright: ignore[reportAttributeAccessIssue]

    from pipelines.spark_tts.reference import KEPT_LAYERS, SemanticFeatures

    features = SemanticFeatures.__new__(SemanticFeatures)
    sizes = Wav2Vec2Config(
        hidden_size=1024, num_hidden_layers=KEPT_LAYERS, num_attention_heads=16, intermediate_size=4096,
        do_stable_layer_norm=True, feat_extract_norm="layer", conv_bias=True, apply_spec_augment=False,
    )  # fmt: skip
    with device:
        features.model = Wav2Vec2Model(sizes).requires_grad_(False).eval()
    features.device, features.normalize = device, True
    return features


def write_ctc(folder: Path, tiny: bool = False) -> None:
    """A CTC model of letters, of the size of wav2vec2-large-960h-lv60-self (315 million parameters)."""
    import transformers

    # Its types depend on what is installed.
    library: Any = transformers
    names = ["<pad>", "<s>", "</s>", "<unk>", "|", "'", *map(chr, range(ord("A"), ord("Z") + 1))]
    _write_json(folder / "vocab.json", {name: number for number, name in enumerate(names)})
    library.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    library.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)
    width, layers = (32, 1) if tiny else (1024, 24)
    sizes = library.Wav2Vec2Config(
        vocab_size=len(names), hidden_size=width, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4 * width,
        do_stable_layer_norm=True, feat_extract_norm="layer", conv_bias=True, pad_token_id=0,
        conv_dim=[width // 2] * 7,
    )  # fmt: skip
    torch.manual_seed(0)
    library.Wav2Vec2ForCTC(sizes).save_pretrained(folder)


#: Ids of the published tokenizer.
_START, _END, _ASSISTANT = 151644, 151645, 77091
#: What a codec's encoder has next to nothing of, to try a benchmark on a CPU.
_TINY_ENCODER = {
    "hidden_size": 32, "num_filters": 4, "codebook_dim": 6, "vector_quantization_hidden_dimension": 6, "num_hidden_layers": 1,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@torch.inference_mode()
def write_checkpoint(
    folder: Path, size: str, kind: str, device_name: str, texts: Sequence[str], seconds: float | None
) -> None:
    """Writes a checkpoint of a size ("0b6", "1b7" or "tiny") whose tokenizer has learned its merges from
    `texts`; of the kind "base" it has an encoder of voices.

    Its speech is noise, and ends at the first frame that a request's `min_new_tokens` allows; with `seconds`
    never before a request's `max_seconds`, and at this length without one.
    """
    # transformers takes seconds to import.
    from pipelines.qwen3_tts.speaker import CodecEncoder, SpeakerEncoder

    device, codec_folder = open_device(device_name), folder / "speech_tokenizer"
    _write_json(folder / "config.json", qwen3_config(size, kind))
    # The encoder's defaults are the published sizes.
    _write_json(codec_folder / "config.json", {
        "model_type": "qwen3_tts_tokenizer_12hz", "encoder_valid_num_quantizers": 16, "input_sample_rate": 24_000,
        "output_sample_rate": 24_000, "decode_upsample_rate": 1920, "encode_downsample_rate": 1920,
        "decoder_config": decoder_keys(size) | {"hidden_act": "silu"}, "encoder_config": _TINY_ENCODER if size == "tiny" else {},
    })  # fmt: skip
    _write_tokenizer(folder / "tokenizer.json", texts)
    if seconds is not None:
        # One more than its frames: the last draw would be the end.
        most = {"max_new_tokens": round(seconds * FRAMES_PER_SECOND) + 1}
        _write_json(folder / "generation_config.json", most)
    config = Qwen3TTSConfig.from_folder(folder)
    tensors = dict[str, Tensor]()
    values = ends_when_allowed(config.ids.codec_eos_token_id, never=seconds is not None)
    take_weights(DummyWeights(device, values, tensors), config, torch.bfloat16, device)
    if config.clones:
        speaker = DummyWeights(device, in_range, tensors)
        SpeakerEncoder(config.speaker_encoder, speaker, device, torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")

    shape, tensors = CodecConfig.load(codec_folder), dict[str, Tensor]()
    codec = DummyWeights(device, codec_values, tensors)
    CodecDecoder(shape.decoder, codec, device, torch.float32, fused=False)
    CodecEncoder(shape, codec, device)
    save_file(tensors, codec_folder / "model.safetensors")


def decoder_keys(size: str) -> dict[str, Any]:
    """`decoder_config` of a codec of this size, as published."""
    config = asdict(TINY_CODEC if size == "tiny" else PUBLISHED_CODEC)
    stack: dict[str, Any] = config.pop("stack")
    published = {
        "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers",
        "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "eps": "rms_norm_eps",
    }  # fmt: skip
    return {published.get(name, name): value for name, value in (config | stack).items()}


def _write_tokenizer(path: Path, texts: Sequence[str]) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    made = json.loads(tokenizer.to_str())
    specials = {"<|im_start|>": _START, "<|im_end|>": _END, "assistant": _ASSISTANT}
    made["model"]["vocab"] |= specials
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(path))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

"""SparkTTS at its published size with random weights, no download: what its speed is measured on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2Model

from pipelines.spark_tts.bicodec import BiCodec, SemanticQuantizer
from pipelines.spark_tts.bicodec import Tokenizer as AudioTokenizer
from pipelines.spark_tts.blocks import Encoder, Prenet
from pipelines.spark_tts.config import BiCodecConfig, LmConfig, MelConfig, SparkConfig, SpeakerConfig, VocosConfig, WaveConfig
from pipelines.spark_tts.prompt import SparkCodes, Vocabulary
from pipelines.spark_tts.reference import KEPT_LAYERS, ReferenceEncoder, SemanticFeatures
from pipelines.spark_tts.speaker import MelMagnitudes, SpeakerEncoder
from pipelines.spark_tts.wave_generator import WaveGenerator, prepared

LM = LmConfig(896, 24, 14, 2, 64, 4864, 166_000, 32_768, 1e6, tied=True, eos=151_645)
CODEC = BiCodecConfig(
    MelConfig(1024, 640, 320, 10.0, 8000.0, 128),
    VocosConfig(1024, 384, 2048, 12, 1024, 2),
    VocosConfig(1024, 384, 2048, 12, 1024, 2),
    SpeakerConfig(128, 1024, 128, 32, (4,) * 6),
    WaveConfig(1024, 1536, (8, 5, 4, 2), (16, 11, 8, 4)),
    8192,
    8,
)
_TEXT_IDS = 151_643
_CONTROLS = (
    "task_tts", "task_controllable_tts", "start_content", "end_content", "start_style_label", "end_style_label",
    "start_global_token", "end_global_token", "start_semantic_token", "end_semantic_token",
)  # fmt: skip


def write_lm(folder: Path) -> Path:
    """A folder with the LM's config.json, for vLLM's `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
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


def config(folder: Path) -> SparkConfig:
    return SparkConfig(folder, 16_000, 96_000, volume_normalize=True, bicodec=CODEC, lm=LM)


class AnyIdSpeaks(Vocabulary):
    """The published layout of ids over a text vocabulary of single letters.

    Random weights write any id, so each counts as a semantic token: as many tokens become audio as a trained model would write.
    """

    def __init__(self) -> None:
        words = {f"w{index}": index for index in range(_TEXT_IDS)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
        names = ["endoftext", "im_start", "im_end", *(f"spare_{index}" for index in range(19))]
        names += [f"bicodec_global_{code}" for code in range(4096)] + [f"bicodec_semantic_{code}" for code in range(8192)]
        names += [*_CONTROLS, "gender_0", "gender_1", *(f"{kind}_label_{level}" for kind in ("pitch", "speed") for level in range(5))]
        tokenizer.add_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
        super().__init__(tokenizer, 8192, 4096, Path("random"))

    def spoken(self, text: str) -> list[int]:
        """A token for every four letters, as of English."""
        ids = [sum(text[at : at + 4].encode()) for at in range(0, len(text), 4)]
        return [self.control("start_content"), *ids, self.control("end_content")]

    def parse(self, ids: object) -> SparkCodes:
        return SparkCodes(tuple(token % 8192 for token in ids), ())  # pyright: ignore[reportGeneralTypeIssues]


class RawReferences(ReferenceEncoder):
    """Reads recordings that are float32 samples already, so that no audio library is needed."""

    def read(self, recording: bytes) -> NDArray[np.float32]:
        return np.frombuffer(recording, np.float32)


@lru_cache(maxsize=64)
def recording(seconds: float, seed: int) -> bytes:
    """Samples of a tone in noise, as `RawReferences` reads them."""
    dice = np.random.default_rng(seed)
    time = np.arange(int(seconds * 16_000)) / 16_000
    return (0.3 * np.sin(2 * np.pi * (100 + seed) * time) + 0.02 * dice.standard_normal(len(time))).astype(np.float32).tobytes()


def codecs(settings: SparkConfig, device: torch.device, dtype: torch.dtype, fused: bool | None = None) -> tuple[AudioTokenizer, BiCodec]:
    """Both halves of BiCodec, the decoder in `dtype`; `fused` as for `pipelines.spark_tts.wave_generator.prepared`."""
    quantizer = _filled(lambda: SemanticQuantizer(CODEC.encoder.output, CODEC.codebook_size, CODEC.codebook_dim), device)
    speaker = _filled(lambda: SpeakerEncoder(CODEC.speaker), device)
    encoder = _filled(lambda: Encoder(CODEC.encoder), device)
    prenet = _filled(lambda: Prenet(CODEC.prenet, CODEC.speaker.output), device).to(dtype)
    wave = _filled(lambda: WaveGenerator(CODEC.wave), device)
    tokenizer = AudioTokenizer(encoder, quantizer, speaker, MelMagnitudes(CODEC.mel, settings.sample_rate, device))
    return tokenizer, BiCodec(CODEC, quantizer, speaker, prenet, prepared(wave, dtype, fused))


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
    features.device = device
    features.normalize = True
    return RawReferences(settings, tokenizer, features)


def _filled(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """A module with random weights of a size that keeps signals in range."""
    with torch.device("meta"):
        module = make()
    module = module.to_empty(device=device).requires_grad_(False).eval()
    dice = torch.Generator(device=device).manual_seed(0)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            tensor.zero_()
        elif name.endswith(("running_var", "norm.weight", "bn.weight", "alpha")) or ".bns." in name:
            tensor.fill_(1.0)
        elif tensor.dim() > 1:
            tensor.normal_(0, 0.6 * tensor[0].numel() ** -0.5, generator=dice)
        else:
            tensor.normal_(0, 0.02, generator=dice)
    return module

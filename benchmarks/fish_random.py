"""Fish Speech S2 at its published size with random weights, no download: what its speed is measured on. Tiny sizes try it on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from pipelines.fish_speech.codec import Codec, codec_from
from pipelines.fish_speech.codec_encoder import ReferenceEncoder
from pipelines.fish_speech.config import CodecConfig, CodecStackConfig, FishConfig
from pipelines.fish_speech.prompt import Vocabulary

_TEXT_IDS = 151_643
_LISTED = (
    "<|pad|>", "<|phoneme_start|>", "<|phoneme_end|>", "<|text|>", "<|voice|>", "<|interleave|>", "<|audio_start|>", "<|audio_end|>",
    "<|audio_pad|>",
)  # fmt: skip
_STACK = CodecStackConfig(1, 32, 1, 32, 48, 8)
TINY_CODEC = CodecConfig(
    encoder_dim=2,
    encoder_stacks=(None, None, None, None),
    decoder_dim=16,
    latent=32,
    residual_codes=16,
    semantic_codes=64,
    pre=_STACK,
    post=_STACK,
)


def write_checkpoint(folder: Path, tiny: bool = False) -> FishConfig:
    """A folder with the published config.json and no weights, for vLLM's `load_format="dummy"`; `tiny` is for trying things out."""
    slow = {"dim": 2560, "n_layer": 36, "n_head": 32, "n_local_heads": 8, "head_dim": 128, "intermediate_size": 9728}
    fast, codes, text = {**slow, "n_layer": 4}, 4096, _TEXT_IDS
    if tiny:
        slow = {"dim": 64, "n_layer": 2, "n_head": 2, "n_local_heads": 1, "head_dim": 32, "intermediate_size": 96}
        fast, codes, text = {**slow, "n_layer": 1}, 64, 300
    first = text + 3 + len(_LISTED)
    shared = {"rope_base": 1_000_000, "norm_eps": 1e-6}
    content = {
        "model_type": "fish_qwen3_omni",
        "eos_token_id": text + 2,
        "semantic_start_token_id": first,
        "semantic_end_token_id": first + codes - 1,
        # The published vocabulary has two spare ids behind the semantic tokens.
        "text_config": {**slow, **shared, "vocab_size": first + codes + 2, "max_seq_len": 32_768, "attention_qk_norm": True},
        "audio_decoder_config": {**fast, **shared, "vocab_size": codes, "num_codebooks": 10, "text_dim": slow["dim"]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = FishConfig.from_folder(folder)
    return replace(config, codec=TINY_CODEC) if tiny else config


class AnyText(Vocabulary):
    """The published layout of ids over a text vocabulary of numbered words."""

    def __init__(self, config: FishConfig) -> None:
        text = config.end - 2
        tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(text)}, unk_token="w0"))
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_LISTED, *(f"<|semantic:{i}|>" for i in range(len(config.semantic)))]
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
        self._words = text
        super().__init__(tokenizer, config, Path("random"))

    def encode(self, text: str) -> list[int]:
        """A token for every four letters, as of English; control tokens are letters too."""
        return [sum(text[at : at + 4].encode()) % self._words for at in range(0, len(text), 4)]

    def spoken(self, text: str) -> list[int]:
        return self.encode(text)


class RandomWeights:
    """A source of tensors: seeded noise of a size that keeps signals in range."""

    def __init__(self, device: torch.device) -> None:
        self._dice = torch.Generator(device=device).manual_seed(0)
        self._device = device

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        tensor = torch.empty(tuple(shape), device=self._device)
        if name.endswith(("norm.weight", "alpha")):
            tensor.fill_(1.0)
        elif name.endswith("gamma"):
            tensor.fill_(0.1)
        elif tensor.dim() > 1:
            tensor.normal_(0, 0.6 * tensor[0].numel() ** -0.5, generator=self._dice)
        else:
            tensor.normal_(0, 0.02, generator=self._dice)
        return tensor.to(device=device, dtype=dtype)


def codec(config: FishConfig, device: torch.device, dtype: torch.dtype, fused: bool | None = None) -> Codec:
    return codec_from(config.codec, RandomWeights(device), device, dtype, fused)


class RawReferences(ReferenceEncoder):
    """Reads recordings that are float32 samples already, so that no audio library is needed."""

    def read(self, recording: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(recording, np.float32).copy()).to(self._encoder.device)


@lru_cache(maxsize=64)
def recording(seconds: float, seed: int) -> bytes:
    """Samples of a tone in noise, as `RawReferences` reads them."""
    dice = np.random.default_rng(seed)
    time = np.arange(int(seconds * 44_100)) / 44_100
    return (0.3 * np.sin(2 * np.pi * (100 + seed) * time) + 0.02 * dice.standard_normal(len(time))).astype(np.float32).tobytes()


def facts(config: FishConfig) -> dict[str, Any]:
    """Sizes worth a line of a report."""
    slow, fast = config.slow, config.fast
    return {"slow_layers": slow.layers, "fast_layers": fast.layers, "dim": slow.dim, "codec_latent": config.codec.latent}

"""`python -m benchmarks.random_checkpoint 0b6 FOLDER`: a Qwen3-TTS checkpoint of random weights in the
published layout.

Tensors, names and sizes are those of the CustomVoice checkpoints, so a loader has all of its work; the
speech is noise, and it ends at the first frame that a request's `min_new_tokens` allows, or with
`--seconds` never before a request's `max_seconds`, and at this length without one. The tokenizer is small,
but its special tokens have the published ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from benchmarks.random_models.qwen3_tts import (
    PUBLISHED_CODEC,
    TINY_CODEC,
    codec_values,
    ends_when_allowed,
    published_config,
)
from benchmarks.random_models.weights import DummyWeights, Rule
from pipelines.nn.checkpoint import open_device
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.config import CodecConfig, Qwen3TTSConfig
from pipelines.qwen3_tts.model import take_weights
from pipelines.qwen3_tts.speaker import CodecEncoder

#: Ids of the published tokenizer.
_START, _END, _ASSISTANT = 151644, 151645, 77091
FRAMES_PER_SECOND = 12.5
#: What a codec's encoder has next to nothing of, to try a benchmark on a CPU.
_TINY_ENCODER = {
    "hidden_size": 32, "num_filters": 4, "codebook_dim": 6, "vector_quantization_hidden_dimension": 6, "num_hidden_layers": 1,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


class _Noted(DummyWeights):
    """Dummy weights that are kept by name, on the host."""

    def __init__(self, device: torch.device, rule: Rule) -> None:
        super().__init__(device, rule)
        self.tensors: dict[str, Tensor] = {}

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        made = super().take(name, shape, dtype, device)
        self.tensors[name] = made.to("cpu").contiguous()
        return made


@torch.inference_mode()
def write_checkpoint(
    folder: Path, size: str, device: torch.device, texts: Sequence[str], seconds: float | None = None
) -> None:
    """Writes a checkpoint of a size ("0b6", "1b7" or "tiny") whose tokenizer has learned its merges from
    `texts`.

    With `seconds` it never draws the end; that is the length of every speech whose request asks for no
    shorter one.
    """
    codec_folder = folder / "speech_tokenizer"
    codec_folder.mkdir(parents=True)
    _write_json(folder / "config.json", published_config(size))
    _write_json(codec_folder / "config.json", _codec_config(size))
    _write_tokenizer(folder / "tokenizer.json", texts)
    if seconds is not None:
        # One more than its frames: the last draw would be the end.
        _write_json(
            folder / "generation_config.json", {"max_new_tokens": round(seconds * FRAMES_PER_SECOND) + 1}
        )

    config = Qwen3TTSConfig.from_folder(folder)
    main = _Noted(
        device, ends_when_allowed(config.ids.eos) if seconds is None else never_ends(config.ids.eos)
    )
    take_weights(main, config, torch.bfloat16, device)
    save_file(main.tensors, folder / "model.safetensors")

    shape = CodecConfig.load(codec_folder)
    codec = _Noted(device, codec_values)
    CodecDecoder(shape.decoder, codec, device, torch.float32, fused=False)
    CodecEncoder(shape, codec, device)
    save_file(codec.tensors, codec_folder / "model.safetensors")


def never_ends(end: int) -> Rule:
    """Values of a model that never draws the id `end`: the rule that always draws it, with its logit
    turned round."""
    ends = ends_when_allowed(end)

    def values(name: str, noise: Tensor) -> Tensor:
        made = ends(name, noise)
        if name == "talker.codec_head.weight":
            made[end] = -made[end]
        return made

    return values


def _codec_config(size: str) -> dict[str, Any]:
    """The keys of speech_tokenizer/config.json that inference reads; the encoder's defaults are the
    published sizes."""
    tiny = size == "tiny"
    return {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24_000,
        "output_sample_rate": 24_000,
        "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920,
        "decoder_config": {**asdict(TINY_CODEC if tiny else PUBLISHED_CODEC), "hidden_act": "silu"},
        "encoder_config": _TINY_ENCODER if tiny else {},
    }


def _write_tokenizer(path: Path, texts: Sequence[str]) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    )
    made = json.loads(tokenizer.to_str())
    specials = {"<|im_start|>": _START, "<|im_end|>": _END, "assistant": _ASSISTANT}
    made["model"]["vocab"] |= specials
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(path))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("size", choices=("0b6", "1b7", "tiny"))
    made.add_argument("folder", type=Path)
    made.add_argument("--device", default="cuda")
    made.add_argument("--texts", type=Path, help="lines that the tokenizer learns its merges from")
    made.add_argument(
        "--seconds",
        type=float,
        help="length of a speech whose request does not say it; without, speeches end at once",
    )
    options = made.parse_args()
    texts = (
        options.texts.read_text(encoding="utf-8").splitlines()
        if options.texts
        else ["The birch canoe slid on the smooth planks."]
    )
    write_checkpoint(options.folder, options.size, open_device(options.device), texts, options.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

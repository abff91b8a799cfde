"""The tensors of a SpeechLM checkpoint by their published names, and the official training checkpoint
(`.pt`) as such a folder."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from pipelines.errors import ErrorCode, InputError, ModelError
from pipelines.nn.checkpoint import Checkpoint
from pipelines.nn.stack import take_stack
from pipelines.speechlm.config import SpeechLmConfig

TOWER = "multimodal_io_dict.continuous_audio.model.audio_tower."
ADAPTOR = "adaptor.continuous_audio."
CODEC = "multimodal_io_dict.discrete_audio.codec_model."
STREAMS = "stream_emb.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: What the codec stores: decoding needs the first three, only encoding or training the others.
_CODEC_PARTS = (
    "acoustic_decoder",
    "fc2",
    "quantizer",
    "acoustic_encoder",
    "encoder_semantic",
    "decoder_semantic",
    "semantic_model",
)
_CODEC_PARTS += ("fc", "fc1")


def check_names(checkpoint: Checkpoint, config: SpeechLmConfig) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) naming a tensor of decoder or adaptor that is missing
    or misshapen, or one too many.

    Tower and codec take their own tensors strictly.
    """
    backbone, take = config.backbone, partial(checkpoint.take, device="meta")
    take_stack(checkpoint, "model.", backbone, torch.float32, "meta")
    for name, rows in ((EMBEDDING, backbone.vocab), (HEAD, backbone.vocab), (STREAMS, config.streams)):
        take(name, (rows, backbone.hidden))
    take(f"{ADAPTOR}weight", (backbone.hidden, config.tower_width))
    take(f"{ADAPTOR}bias", (backbone.hidden,))
    checkpoint.ignore(f"{TOWER}*", *(f"{CODEC}{part}.*" for part in _CODEC_PARTS))
    checkpoint.finish()


#: Weights of the training's loss; no model has them.
_DROPPED = ("vocab_weight",)
#: What stands beside the weights in a published folder.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_PICKLES = ("*.pt", "*.pth", "*.bin", "*.ckpt")


def refuse_pickle(folder: Path) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) for a folder of the official shape, and says how to
    convert it."""
    if any(folder.glob("*.safetensors")):
        return
    found = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if found:
        raise ModelError(
            ErrorCode.MODEL_BAD_CHECKPOINT,
            f"{folder} holds its weights as {found[0]}, which is not loaded.",
            f"Convert it once: nightjar models convert {folder / found[0]} --like FOLDER_WITH_CONFIG_AND_TOKENIZER --out NEW_FOLDER",
        )


def convert(source: Path, like: Path, out: Path, dtype: torch.dtype | None = torch.bfloat16) -> int:
    """Writes the tensors of `source` ({"module": state} or a bare state) and the files beside weights from
    `like` into `out`.

    Returns the number of tensors. `dtype` None keeps floating point as it is. `out` must not exist, and
    appears whole or not at all. Raises `ModelError` (`model.bad_checkpoint`) for what is no such
    checkpoint, `InputError` (`input.unreadable`) for places that cannot be read or written. Only tensors
    are unpickled.
    """
    if out.exists():
        raise InputError(ErrorCode.INPUT_UNREADABLE, f"{out} exists.", "Choose a new folder.")
    if not (like / "config.json").is_file():
        raise InputError(
            ErrorCode.INPUT_UNREADABLE,
            f"{like} has no config.json.",
            "Give a folder with config and tokenizer.",
        )
    tensors = _read(source)
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True)
    for name in _BESIDE:
        if (like / name).is_file():
            (partial / name).write_bytes((like / name).read_bytes())
    _write(tensors, partial, dtype)
    partial.rename(out)
    return len(tensors)


def _read(source: Path) -> dict[str, Tensor]:
    bad = "Give the official checkpoint file, and download it again if this is it."
    try:
        held: Any = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise InputError(
            ErrorCode.INPUT_UNREADABLE, f"{source} does not exist.", "Give the .pt file."
        ) from error
    except (
        Exception
    ) as error:  # the library raises many kinds for a file that is none, or that holds more than tensors
        raise ModelError(
            ErrorCode.MODEL_BAD_CHECKPOINT, f"{source} is not a checkpoint of tensors: {error}.", bad
        ) from error
    if isinstance(held, dict) and isinstance(held.get("module"), dict):
        held = held["module"]
    if (
        not isinstance(held, dict)
        or not held
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in held.items())
    ):
        raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{source} does not hold a table of tensors.", bad)
    return {name: tensor for name, tensor in held.items() if name not in _DROPPED}


def _write(tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    """Shards of at most 5 GB, made one at a time, and their index."""
    shapes: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shapes[name] = torch.empty(
            tensor.shape, dtype=(tensor.is_floating_point() and dtype) or tensor.dtype, device="meta"
        )
    split = split_torch_state_dict_into_shards(shapes)
    for file, names in split.filename_to_tensors.items():
        # Tensors of one file may share memory, which safetensors refuses: each is copied.
        stored = {
            name: tensors[name].detach().to(shapes[name].dtype, copy=True).contiguous() for name in names
        }
        save_file(stored, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")

"""The tensors of a SpeechLM checkpoint by their published names, and the official training checkpoint (`.pt`) as such a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipelines.errors import ErrorCode, InputError, ModelError
from pipelines.nn.checkpoint import Checkpoint, require_names
from pipelines.speechlm.config import SpeechLmConfig

TOWER = "multimodal_io_dict.continuous_audio.model.audio_tower."
ADAPTOR = "adaptor.continuous_audio."
CODEC = "multimodal_io_dict.discrete_audio.codec_model."
STREAMS = "stream_emb.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: What decoding needs of the codec, and what only encoding or training does.
CODEC_DECODER = ("acoustic_decoder.", "fc2.", "quantizer.")
CODEC_UNUSED = ("acoustic_encoder.", "encoder_semantic.", "decoder_semantic.", "semantic_model.", "fc.", "fc1.")


def backbone_names(layers: int) -> set[str]:
    """The tensors of the decoder, with its embedding and head."""
    parts = [f"self_attn.{part}_proj.weight" for part in "qkvo"] + [f"self_attn.{part}_norm.weight" for part in "qk"]
    parts += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts}
    return names | {EMBEDDING, HEAD, "model.norm.weight"}


def check_names(checkpoint: Checkpoint, config: SpeechLmConfig) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) naming the tensor when the decoder lacks one or the folder holds one that nobody knows.

    Tower, adaptor and codec take their own tensors strictly. vLLM reads the decoder's in a process of its own, where an error would
    only be a dead engine.
    """
    wanted = backbone_names(config.backbone.layers) | {STREAMS, f"{ADAPTOR}weight", f"{ADAPTOR}bias"}
    known = (TOWER, *(CODEC + part for part in (*CODEC_DECODER, *CODEC_UNUSED)))
    require_names(checkpoint.place, {name for name in checkpoint.names() if not name.startswith(known)}, wanted)


#: Weights of the training's loss; no model has them.
_DROPPED = ("vocab_weight",)
#: What stands beside the weights in a published folder.
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SHARD_BYTES = 5 << 30
_PICKLES = ("*.pt", "*.pth", "*.bin", "*.ckpt")


def refuse_pickle(folder: Path) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) for a folder of the official shape, and says how to convert it."""
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
    """Writes the tensors of `source` ({"module": state} or a bare state) and the files beside weights from `like` into `out`.

    Returns the number of tensors. `dtype` None keeps floating point as it is. `out` must not exist, and appears whole or not at all.
    Raises `ModelError` (`model.bad_checkpoint`) for what is no such checkpoint, `InputError` (`input.unreadable`) for places that
    cannot be read or written. Only tensors are unpickled.
    """
    if out.exists():
        raise InputError(ErrorCode.INPUT_UNREADABLE, f"{out} exists.", "Choose a new folder.")
    if not (like / "config.json").is_file():
        raise InputError(ErrorCode.INPUT_UNREADABLE, f"{like} has no config.json.", "Give a folder with config and tokenizer.")
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
        raise InputError(ErrorCode.INPUT_UNREADABLE, f"{source} does not exist.", "Give the .pt file.") from error
    except Exception as error:  # the library raises many kinds for a file that is none, or that holds more than tensors
        raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{source} is not a checkpoint of tensors: {error}.", bad) from error
    if isinstance(held, dict) and isinstance(held.get("module"), dict):
        held = held["module"]
    if not isinstance(held, dict) or not held or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in held.items()):
        raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{source} does not hold a table of tensors.", bad)
    return {name: tensor for name, tensor in held.items() if name not in _DROPPED}


def _write(tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    """Shards of at most 5 GiB, made one at a time, and their index."""
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name in sorted(tensors):
        tensor = tensors[name]
        size = tensor.numel() * (tensor.element_size() if dtype is None or not tensor.is_floating_point() else dtype.itemsize)
        if shards[-1] and sizes[-1] + size > _SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Tensors of one file may share memory, which safetensors refuses: each is copied.
        save_file({name: _stored(tensors[name], dtype) for name in names}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wanted, copy=True).contiguous()

"""The published names of the tensors of a SpeechLM checkpoint, and the conversion of the official training
checkpoint (`.pt`) to a checkpoint folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from pipelines.errors import ErrorCode, InputError
from pipelines.nn.checkpoint import Checkpoint, Loader, bad_checkpoint, read_pickle, take_stack
from pipelines.speechlm.config import SpeechLmConfig

TOWER = "multimodal_io_dict.continuous_audio.model.audio_tower."
ADAPTOR = "adaptor.continuous_audio."
CODEC = "multimodal_io_dict.discrete_audio.codec_model."
STREAMS = "stream_emb.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
#: The parts of the codec in a checkpoint: decoding needs the first three; only encoding or training needs the
#: others.
_CODEC_PARTS = (
    "acoustic_decoder",
    "fc2",
    "quantizer",
    "acoustic_encoder",
    "encoder_semantic",
    "decoder_semantic",
    "semantic_model",
    "fc",
    "fc1",
)


def check_names(checkpoint: Checkpoint, config: SpeechLmConfig) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) that names a tensor of the decoder or the adaptor that is
    missing or has another shape, or an unknown tensor.

    Tower and codec check their own tensors.
    """
    backbone = config.backbone
    take = partial(checkpoint.take, device="meta")
    take_stack(Loader(checkpoint, "model.", torch.float32, torch.device("meta")), backbone)
    for name, rows in ((EMBEDDING, backbone.vocab), (HEAD, backbone.vocab), (STREAMS, config.streams)):
        take(name, (rows, backbone.hidden))
    take(f"{ADAPTOR}weight", (backbone.hidden, config.adaptor_input_dim))
    take(f"{ADAPTOR}bias", (backbone.hidden,))
    checkpoint.ignore(f"{TOWER}*", *(f"{CODEC}{part}.*" for part in _CODEC_PARTS))
    checkpoint.finish()


#: Weights of the training loss, which no model needs.
_DROPPED = ("vocab_weight",)
#: Files of a published folder besides the weights.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_PICKLES = ("*.pt", "*.pth", "*.bin", "*.ckpt")


def refuse_pickle(folder: Path) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) for a folder with the official training checkpoint; the
    error says how to convert it."""
    if any(folder.glob("*.safetensors")):
        return
    found = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if found:
        raise bad_checkpoint(
            f"The weights of {folder} are in {found[0]}, which is not loaded.",
            f"Convert it once: nightjar models convert {folder / found[0]} --like FOLDER_WITH_CONFIG_AND_TOKENIZER --out NEW_FOLDER",
        )


def convert(source: Path, like: Path, out: Path, dtype: torch.dtype | None = torch.bfloat16) -> int:
    """Writes the tensors of `source` ({"module": state} or a bare state) and the other files of `like` to
    `out`.

    Returns the number of tensors, all of which are in memory at once. `dtype`: type of floating-point
    tensors; None: unchanged. `out` must not exist; a failed conversion leaves no `out`. Only tensors are
    unpickled.

    Raises `ModelError` (`model.bad_checkpoint`) for a file that is not such a checkpoint, `InputError`
    (`input.unreadable`) for paths that cannot be read or written.
    """
    if out.exists():
        raise InputError(ErrorCode.INPUT_UNREADABLE, f"{out} exists.", "Choose a new folder.")
    if not (like / "config.json").is_file():
        raise InputError(
            ErrorCode.INPUT_UNREADABLE,
            f"{like} has no config.json.",
            "Give a folder with config and tokenizer.",
        )
    held = read_pickle(source, ("module",), mmap=True)
    if not held:
        raise bad_checkpoint(f"{source} contains no tensors.", "Give the official checkpoint file.")
    # Tensors of one file may share memory, which safetensors refuses: each is copied.
    tensors = {
        name: tensor.to(dtype if tensor.is_floating_point() else None, copy=True).contiguous()
        for name, tensor in held.items()
        if name not in _DROPPED
    }
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True)
    for name in _BESIDE:
        if (like / name).is_file():
            (partial / name).write_bytes((like / name).read_bytes())
    save_torch_state_dict(tensors, partial)
    partial.rename(out)
    return len(tensors)

"""The golden checkpoint of SparkTTS made whole: the copy in the repository lacks the ECAPA, which is twelve of its megabytes."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.spark_tts.config import BICODEC, SparkConfig
from pipelines.spark_tts.speaker import Ecapa

ECAPA = "speaker_encoder.speaker_encoder."
#: What the repository's copy keeps of a golden folder: no long recording, no files of the tokenizer that nobody reads.
_LEFT_OUT = ("*long*", "added_tokens.json", "merges.txt", "vocab.json")


def lacks_ecapa(checkpoint: Path) -> bool:
    with safe_open(checkpoint / BICODEC / "model.safetensors", framework="pt") as file:
        return not any(name.startswith(ECAPA) for name in file.keys())  # noqa: SIM118 - not a dict


@cache
def whole(checkpoint: Path) -> Path:
    """The folder itself where it is whole, else a copy with an ECAPA of seeded random weights, which lives as long as the process.

    Voices of recordings are then none of the golden ones; everything else is.
    """
    if not lacks_ecapa(checkpoint):
        return checkpoint
    folder = Path(tempfile.mkdtemp(prefix="nightjar-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=shutil.copyfile)
    path = copy / BICODEC / "model.safetensors"
    save_file(load_file(path) | seeded_ecapa(SparkConfig.from_folder(checkpoint)), path)
    return copy


def seeded_ecapa(config: SparkConfig) -> dict[str, Tensor]:
    """Tensors of an ECAPA by their names in a checkpoint, the same ones each time."""
    dice = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Ecapa(config.bicodec.speaker.input).state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith("num_batches_tracked"):
            tensor = torch.zeros(shape, dtype=torch.long)
        elif name.endswith(("running_var", "bn.weight")) or (".bns." in name and name.endswith("weight")):
            tensor = 0.5 + torch.rand(shape, generator=dice)
        else:
            fan = shape[1:].numel() if len(shape) > 1 else 16
            tensor = torch.randn(shape, generator=dice) * (2 / fan) ** 0.5
        tensors[ECAPA + name] = tensor
    return tensors


def subset(source: Path, target: Path) -> None:
    """Copies of a golden folder what the repository keeps."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_LEFT_OUT), copy_function=shutil.copyfile)
    path = target / "checkpoint" / BICODEC / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(ECAPA)}
    path.unlink()
    save_file(kept, path)


if __name__ == "__main__":
    subset(Path(sys.argv[1]), Path(sys.argv[2]))

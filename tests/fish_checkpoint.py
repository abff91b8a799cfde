"""The golden checkpoint of Fish Speech S2 as a folder that opens, and what the repository keeps of a golden folder."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "fish"
#: Recordings and cases that the repository's copy does without, for their size: the others show the same.
_WAVS = ("ref_long.wav", "ref_stereo_44k.wav")
_CASES = ("downmix_stereo", "encode_long", "encode_stereo", "decode_len50", "stochastic_replay")
#: Cases whose arrays of states, logits or audio are left out; what is compared of them then is their ids and codes.
_THINNED = ("text_tags", "clone_one_ref", "end_to_end_text", "end_to_end_clone")


@cache
def whole(golden: Path = GOLDEN) -> Path:
    """A copy of the checkpoint with the codec's sizes in it where the folder has some; it lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-fish-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = shutil.copytree(golden / "checkpoint", folder / "checkpoint", copy_function=shutil.copyfile)
    if (golden / "codec_config.json").is_file():
        shutil.copyfile(golden / "codec_config.json", copy / "codec_config.json")
    return copy


def subset(source: Path, target: Path) -> None:
    """Copies of a golden folder what the repository keeps."""
    content = json.loads((source / "cases.json").read_text(encoding="utf-8"))
    left_out = {Path(case["file"]).name for case in content["cases"] if case["name"] in _CASES and "file" in case}
    names = {*_WAVS, *left_out, "codes_len50.npz"}
    shutil.copytree(source, target, ignore=lambda _, found: names & set(found), copy_function=shutil.copyfile)
    for name in _THINNED:
        path = target / "arrays" / f"{name}.npz"
        with np.load(path, allow_pickle=False) as data:
            kept = {key: data[key] for key in data.files if data[key].dtype.kind == "i"}
        np.savez_compressed(path, **kept)


if __name__ == "__main__":
    subset(Path(sys.argv[1]), Path(sys.argv[2]))

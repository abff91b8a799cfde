"""`python -m tests.support.golden_subset FAMILY FOLDER TARGET`: copies of a golden folder what the
repository keeps of it.

Everything in the copy is as it was, but for its size: large arrays are thinned, tensors or rows of them
that no case reads are left out, and weights that are exact in bfloat16 are stored so.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.spark_tts.config import BICODEC, LLM
from tests.support.golden_arrays import Array, read_arrays, thinned, write_arrays
from tests.support.golden_checkpoint import LEFT_OUT

#: Prime to every factor by which the codecs upsample, so that each phase of each layer is met, and to the
#: sizes of the heads.
STEP = 7
#: Arrays with fewer values than this are kept whole.
LARGE = 12_000
#: The same for families whose arrays are many and small.
SMALL = 2_000
#: Of SparkTTS: files of the tokenizer that nobody reads.
_SPARK_LEFT_OUT = ("added_tokens.json", "merges.txt", "vocab.json")
_FISH_THINNED = (
    "wav",
    "hidden",
    "slow_logits",
    "encoder_out",
    "downsample_out",
    "pre_module_out",
    "semantic_z",
    "upsample_out",
)
#: Of SpeechLM: the codec's weights, which the checkpoint's own files hold once more, and files of the
#: tokenizer that nobody reads.
_SPEECHLM_LEFT_OUT = (
    "model.safetensors",
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "vocab.json",
)
_SPEECHLM_THINNED = ("mel", "waveform", "pcm16", "text_logits", "prompt_embeds", "tower", "features")
#: Waves that tests of the conformance command change.
_QWEN3_WHOLE = ("clone_icl_nonstreaming.0.wave", "clone_xvector_streaming.0.wave")

_THINNED_SAYS = (
    "Large arrays that are only compared have every 7th of their values (`tests/support/golden_arrays.py`)."
)
#: What the README says of the repository's copy.
_COPIES = {
    "fish": f"All cases of the set. {_THINNED_SAYS}",
    "spark": (
        "All cases of the set, made anew by `python -m tests.support.golden_spark` with the same reference implementation, because the "
        "ECAPA of 12 MB does not pack: of each of its large tensors 15 % of the values are one size and the others 0. Everything that "
        "depends on a voice was computed with it; with the set's own ECAPA that command gives the set's own numbers. `.gz` files are "
        "packed ones "
        f"(`tests/support/golden_checkpoint.py`). {_THINNED_SAYS}"
    ),
    "speechlm": f"All cases of the set; `xcodec/` holds the codec's config alone, its weights are in the checkpoint. {_THINNED_SAYS}",
}

Gaps = dict[str, dict[str, Any]]


def spark(source: Path, target: Path) -> None:
    """Packs the checkpoint, whose ECAPA was made to pack well (`tests.support.golden_spark`), and thins
    what is only compared."""
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns(*_SPARK_LEFT_OUT), copy_function=shutil.copyfile
    )
    _pack(target / "checkpoint" / LLM / "tokenizer.json")
    _pack(target / "checkpoint" / BICODEC / "model.safetensors")
    cases = json.loads((source / "cases.json").read_text(encoding="utf-8"))["cases"]
    read = {case.get("logits_file") for case in cases}
    for path in (target / "arrays").iterdir():
        keys = {"mel", "ref_clip", "wav", "hidden"} | (set() if f"arrays/{path.name}" in read else {"logits"})
        _thin(path, lambda key, keys=keys: key in keys, SMALL)


def fish(source: Path, target: Path) -> None:
    """Every case; audio, states and logits of the whole vocabulary are thinned."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in (target / "arrays").iterdir():
        _thin(path, lambda key: key in _FISH_THINNED, SMALL)


def speechlm(source: Path, target: Path) -> None:
    """Every case; the codec's weights are in the checkpoint once more, and audio and what spans the
    vocabulary are thinned."""
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns(*_SPEECHLM_LEFT_OUT), copy_function=shutil.copyfile
    )
    _thin(target / "arrays.npz", lambda key: key.rpartition("/")[2] in _SPEECHLM_THINNED, SMALL)


def qwen3_tts(source: Path, target: Path) -> None:
    """Leaves out the codec's encoder where no voice is cloned, and rows of full-size codebooks that no
    case looks up."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    _drop_encoding(target, "checkpoint-custom")
    codes = _codes(target, "checkpoint-custom")
    _cut(
        target / "checkpoint-custom",
        {
            "model.safetensors": lambda tensors: _rows(
                tensors, "talker.code_predictor.model.codec_embedding.{}.weight", codes[1:]
            ),
            "speech_tokenizer/model.safetensors": lambda tensors: (
                _without(tensors, [name for name in sorted(tensors) if name.startswith("encoder.")])
                | _rows(
                    tensors, "decoder.quantizer.rvq_first.vq.layers.{}._codebook.cluster_usage", codes[:1]
                )
                | _rows(
                    tensors, "decoder.quantizer.rvq_first.vq.layers.{}._codebook.embedding_sum", codes[:1]
                )
                | _rows(tensors, "decoder.quantizer.rvq_rest.vq.layers.{}._codebook.cluster_usage", codes[1:])
                | _rows(tensors, "decoder.quantizer.rvq_rest.vq.layers.{}._codebook.embedding_sum", codes[1:])
            ),
        },
    )
    _cut(
        target / "checkpoint-design",
        {
            "speech_tokenizer/model.safetensors": lambda t: _without(
                t, [name for name in sorted(t) if name.startswith("encoder.")]
            )
        },
    )
    for path in target.glob("checkpoint-design/**/*.safetensors"):
        save_file(
            {name: _shortest(tensor) for name, tensor in load_file(path).items()}, path, {"format": "pt"}
        )
    for path in target.glob("arrays_*.npz"):
        _thin(path, _thin_of_qwen3)
    _without_known_audio(target)


def _thin_of_qwen3(key: str) -> bool:
    forced = key.startswith("teacher_forced") and "logits" in key
    return forced or key.startswith("mel.") or (key.endswith(".wave") and key not in _QWEN3_WHOLE)


def _drop_encoding(folder: Path, checkpoint: str) -> None:
    """Takes the cases out that encode with this checkpoint."""
    path = folder / "cases.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    items = content["codec"]["items"]
    dropped = [item for item in items if item["kind"] == "encode" and item["checkpoint"] == checkpoint]
    content["codec"]["items"] = [item for item in items if item not in dropped]
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _keep(folder / content["codec"]["arrays"], lambda key: key not in {item["keys"] for item in dropped})


def _without_known_audio(folder: Path) -> None:
    """Takes samples out that are those of a file in `refs/`."""
    content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    known = {
        item["keys"][0]
        for item in content["codec"]["items"]
        if item["kind"] == "speaker" and "24k_mono" in item["ref_audio"]
    }
    _keep(folder / content["codec"]["arrays"], lambda key: key not in known)


def _codes(folder: Path, checkpoint: str) -> list[NDArray[np.int64]]:
    """The codes of each codebook that any case of the checkpoint looks up, sorted."""
    content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    found: list[NDArray[Any]] = []
    for name in {case["arrays"] for case in content["cases"] if case["checkpoint"] == checkpoint}:
        found += [
            array
            for key, array in _plain(folder / name).items()
            if key.endswith((".codes", ".ref_codes", ".frames"))
        ]
    mine = {
        item["keys"].removesuffix("*")
        for item in content["codec"]["items"]
        if item["checkpoint"] == checkpoint
    }
    codec = _plain(folder / content["codec"]["arrays"])
    found += [
        array for key, array in codec.items() if key.endswith(".codes") and key.removesuffix("codes") in mine
    ]
    # Padding of a batch is code 0.
    frames = np.concatenate(
        [np.zeros((1, found[0].shape[1]), np.int64), *(array.astype(np.int64) for array in found)]
    )
    return [np.unique(column) for column in frames.T]


def _plain(path: Path) -> dict[str, NDArray[Any]]:
    return {key: array for key, array in read_arrays(path).items() if isinstance(array, np.ndarray)}


def _cut(checkpoint: Path, files: dict[str, Callable[[dict[str, Tensor]], Gaps]]) -> None:
    """Rewrites files without what a function took out of their tensors, and notes it."""
    gaps: dict[str, Gaps] = {}
    for file, take_out in files.items():
        tensors = load_file(checkpoint / file)
        gaps[file] = take_out(tensors)
        save_file(tensors, checkpoint / file, {"format": "pt"})
    (checkpoint / LEFT_OUT).write_text(json.dumps(gaps) + "\n", encoding="utf-8")


def _without(tensors: dict[str, Tensor], names: Iterable[str]) -> Gaps:
    return {name: {"shape": list(tensors.pop(name).shape)} for name in names}


def _rows(tensors: dict[str, Tensor], pattern: str, rows: list[NDArray[np.int64]]) -> Gaps:
    """Keeps rows of the tensors that a pattern names by number."""
    gaps: Gaps = defaultdict(dict)
    for number, kept in enumerate(rows):
        name = pattern.format(number)
        gaps[name] = {"shape": list(tensors[name].shape), "rows": kept.tolist()}
        tensors[name] = tensors[name][torch.from_numpy(kept)].contiguous()
    return dict(gaps)


def _shortest(tensor: Tensor) -> Tensor:
    short = tensor.bfloat16()
    return short if tensor.dtype is torch.float32 and torch.equal(short.float(), tensor) else tensor


def _pack(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()


def _thin(path: Path, chosen: Callable[[str], bool], large: int = LARGE) -> None:
    def shorter(key: str, array: Array) -> Array:
        return (
            thinned(array, STEP)
            if isinstance(array, np.ndarray) and array.size > large and chosen(key)
            else array
        )

    write_arrays(path, {key: shorter(key, array) for key, array in read_arrays(path).items()})


def _keep(path: Path, chosen: Callable[[str], bool]) -> None:
    write_arrays(path, {key: array for key, array in read_arrays(path).items() if chosen(key)})


def kinds(folder: Path) -> dict[str, list[str]]:
    """The names of a folder's cases by their kind."""
    content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = defaultdict(list)
    for case in content["cases"]:
        found[case["kind"] if "kind" in case else case["mode"]].append(case.get("name") or case["id"])
    for table in ("batches", "teacher_forced", "sampling", "delay"):
        for item in content.get(table, ()):
            found[table].append(item["id"])
    return dict(found)


def case_list(folder: Path) -> str:
    """The list of cases that the README of a folder ends with."""
    found = kinds(folder)
    rows = [f"| {kind} | {len(names)} | {', '.join(names)} |" for kind, names in found.items()]
    head = f"## Cases\n\n{sum(map(len, found.values()))} cases.\n\n| kind | number | names |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _describe(family: str, target: Path) -> None:
    path = target / "README.md"
    about = path.read_text(encoding="utf-8").strip()
    path.write_text(
        f"{about}\n\n## What this copy is\n\n{_COPIES[family]}\n\n{case_list(target)}", encoding="utf-8"
    )


if __name__ == "__main__":
    {"fish": fish, "qwen3_tts": qwen3_tts, "spark": spark, "speechlm": speechlm}[sys.argv[1]](
        Path(sys.argv[2]), Path(sys.argv[3])
    )
    if sys.argv[1] in _COPIES:
        _describe(sys.argv[1], Path(sys.argv[3]))

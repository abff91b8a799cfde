"""The strict safetensors loader: what is missing, extra, misshapen or damaged is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.errors import ErrorCode, ModelError
from pipelines.nn.checkpoint import Checkpoint


def write_single(folder: Path) -> Path:
    save_file(
        {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)},
        folder / "model.safetensors",
    )
    return folder


def write_shards(folder: Path, index: dict[str, str]) -> Path:
    save_file({"a": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


GOOD_INDEX = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def test_takes_tensors_and_casts(tmp_path: Path) -> None:
    with Checkpoint(write_single(tmp_path)) as weights:
        assert weights.left() == ["a.weight", "b.bias"]
        assert weights.take("a.weight", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert weights.take("b.bias", (4,), torch.float32).dtype == torch.float32
        weights.finish()


def test_reads_shards(tmp_path: Path) -> None:
    with Checkpoint(write_shards(tmp_path, GOOD_INDEX)) as weights:
        assert weights.take("b", [3]).sum() == 3
        with pytest.raises(ModelError, match=r"\ba\b"):
            weights.finish()
        weights.ignore("a*")
        weights.finish()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "words"),
    [("c", (1,), None, "c is missing"), ("a.weight", (3, 2), None, r"a.weight has shape \[2, 3\].*\[3, 2\]")],
)
def test_names_a_wrong_tensor(
    tmp_path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, words: str
) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        Checkpoint(write_single(tmp_path)).take(name, shape, dtype)
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT


def test_refuses_integers_as_weights(tmp_path: Path) -> None:
    save_file({"q": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="q is stored as"):
        Checkpoint(tmp_path).take("q", (2,), torch.float32)


def test_finish_names_what_is_left(tmp_path: Path) -> None:
    weights = Checkpoint(write_single(tmp_path))
    weights.take("a.weight", (2, 3))
    with pytest.raises(ModelError, match=r"b\.bias"):
        weights.finish()


def test_names_a_truncated_file(tmp_path: Path) -> None:
    path = write_single(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        Checkpoint(tmp_path)


def test_names_a_damaged_header(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or is not"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 3])
def test_index_must_stay_in_the_folder(tmp_path: Path, target: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(ModelError, match="not a safetensors file of the same folder"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({**GOOD_INDEX, "c": "model-00001-of-00002.safetensors"}, "c is missing"),
        ({**GOOD_INDEX, "b": "model-00003.safetensors"}, "model-00003.safetensors is missing"),
    ],
)
def test_index_must_fit_its_shards(tmp_path: Path, index: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words), Checkpoint(write_shards(tmp_path, index)) as weights:
        weights.take("c", (1,))


def test_unlisted_tensor_of_a_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, GOOD_INDEX)
    save_file({"b": torch.ones(3), "z": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with Checkpoint(tmp_path) as weights:
        weights.ignore("a", "b")
        with pytest.raises(ModelError, match="does not account for: z"):
            weights.finish()


def test_pickle_is_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ModelError, match=r"pickle.*never loaded"):
        Checkpoint(tmp_path)


def test_empty_folder_and_bad_index(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"index\.json cannot be read as JSON"):
        Checkpoint(tmp_path)


class Moves(TorchDispatchMode):
    """Keeps (device, type) of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.made.append((out.device.type, out.dtype))
        return out


def test_a_tensor_goes_to_its_device_as_it_is_stored_and_changes_its_type_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, dtype=torch.float32)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as weights, Moves() as moves:
        assert weights.take("a", (3,), torch.bfloat16, "meta").dtype == torch.bfloat16
    assert moves.made == [("meta", torch.float32), ("meta", torch.bfloat16)]

"""Checkpoints as a person opens them: device and precision; and strict reading of safetensors, never pickle."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipelines.engine_choice import VISIBLE, has_gpu
from pipelines.errors import ConfigError, EngineCrashError, ErrorCode, ModelError

log = logging.getLogger(__name__)

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ADVICE = "Download the checkpoint again, or check that it belongs to this model family."


def bad_checkpoint(message: str, advice: str = _ADVICE) -> ModelError:
    """The error for a checkpoint that cannot be used; `message` names the tensor or the file."""
    return ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, message, advice)


class Digest(Protocol):
    """An object of `hashlib`."""

    def update(self, data: Any, /) -> None: ...


class TensorSource(Protocol):
    """Where weights come from: a `Checkpoint`, or anything that makes tensors by name and shape."""

    def __contains__(self, name: str) -> bool: ...

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Loader:
    """Takes tensors under one name prefix, in one dtype, onto one device."""

    source: TensorSource
    prefix: str
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor `prefix + name`, of exactly this shape. Raises as the source does."""
        return self.source.take(self.prefix + name, shape, self.dtype, self.device)

    def at(self, prefix: str) -> Self:
        """The same loader one level down."""
        return replace(self, prefix=self.prefix + prefix)

    def float(self) -> Self:
        """The same loader in float32."""
        return replace(self, dtype=torch.float32)


class Checkpoint:
    """The tensors of one checkpoint folder, taken out one by one; `finish` refuses what nobody took.

    Opens `<stem>.safetensors`, or the shards that `<stem>.safetensors.index.json` lists. Tensors are read when taken.

        with Checkpoint.open(folder) as weights:
            norm = weights.take("model.norm.weight", (1024,), torch.float32)
            weights.ignore("*rotary_emb*")
            weights.finish()
    """

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder = folder
        self._files = files
        self._open: dict[str, Any] = {}
        self._contexts: list[AbstractContextManager[Any]] = []
        self._left = set(files)

    @classmethod
    def open(cls, folder: str | Path, stem: str = "model") -> Checkpoint:
        """Lists the tensors of a folder.

        Raises `ModelError` (`model.bad_checkpoint`) that names the file when one is missing, truncated or damaged, when the
        index does not fit its shards or leads out of the folder, and when there is nothing but pickle.
        """
        folder = Path(folder)
        index = folder / f"{stem}.safetensors.index.json"
        single = folder / f"{stem}.safetensors"
        if single.is_file():
            with _opened(single) as handle:
                return cls(folder, dict.fromkeys(handle.keys(), single.name))
        if index.is_file():
            return cls(folder, _read_index(index))
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise bad_checkpoint(
                f"{folder} holds its weights as pickle ({pickles[0]}), which is never loaded.", "Convert the weights to safetensors first."
            )
        raise bad_checkpoint(f"{folder} has neither {single.name} nor {index.name}.")

    @classmethod
    def held(cls, path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
        """The tensors of a file that has been read in another way."""
        made = cls(path, dict.fromkeys(tensors, path.name))
        made._open[path.name] = _Held(tensors)
        return made

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self, prefix: str = "") -> list[str]:
        """The names of all tensors that start with `prefix`, sorted, whether taken or not."""
        return sorted(name for name in self._files if name.startswith(prefix))

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        """Reads one tensor of exactly this shape; `dtype` None keeps the stored one.

        Raises `ModelError` (`model.bad_checkpoint`) naming the tensor when it is absent, has another shape, or is stored in a
        type that cannot be turned into `dtype` without scales.
        """
        if name not in self._files:
            raise bad_checkpoint(f"Tensor {name} is missing from {self.folder}.")
        file = self._files[name]
        try:
            tensor: Tensor = self._handle(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise bad_checkpoint(f"Tensor {name} cannot be read from {self.folder / file}: {error}.") from error
        if tuple(tensor.shape) != tuple(shape):
            raise bad_checkpoint(f"Tensor {name} has shape {list(tensor.shape)}, but the config asks for {list(shape)}.")
        if dtype is not None and dtype.is_floating_point and not (tensor.is_floating_point() and tensor.element_size() > 1):
            raise bad_checkpoint(f"Tensor {name} is stored as {tensor.dtype}, not as plain floating point.")
        self._left.discard(name)
        # The file's pages go to the device as they are, and change their type there.
        return tensor.to(device=device).to(dtype=dtype)

    def values(self) -> int:
        """Numbers in all tensors together; reads no tensor."""
        return sum(math.prod(self._handle(file).get_slice(name).get_shape()) for name, file in self._files.items())

    def update_digest(self, digest: Digest, prefix: str = "") -> None:
        """Adds all tensors under `prefix` to a digest: their names, types, shapes and contents."""
        for name in self.names(prefix):
            tensor: Tensor = self._handle(self._files[name]).get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())

    def ignore(self, pattern: str) -> None:
        """Marks tensors as not needed, by a shell pattern such as `*rotary_emb*`."""
        self._left = {name for name in self._left if not fnmatchcase(name, pattern)}

    def left(self, prefix: str = "") -> list[str]:
        """The tensors under `prefix` that were neither taken nor ignored, sorted."""
        return sorted(name for name in self._left if name.startswith(prefix))

    def finish(self, prefix: str = "") -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) naming the tensors that are `left`."""
        if extra := self.left(prefix):
            raise bad_checkpoint(f"{self.folder} holds tensors that the config does not account for: {shown(extra)}.")

    def close(self) -> None:
        """Closes the files; tensors already taken stay valid."""
        for context in self._contexts:
            context.__exit__(None, None, None)
        self._contexts.clear()
        self._open.clear()

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            context = _opened(self.folder / file)
            self._open[file] = context.__enter__()
            self._contexts.append(context)
        return self._open[file]


@dataclass(frozen=True, slots=True)
class _Held:
    """Tensors in the place of an open file."""

    tensors: dict[str, Tensor]

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def shown(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def require_names(folder: Path, held: set[str], wanted: set[str]) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) naming a tensor that a folder lacks, or those that it holds and nobody wants."""
    if missing := sorted(wanted - held):
        raise bad_checkpoint(f"Tensor {missing[0]} is missing from {folder}.")
    if extra := sorted(held - wanted):
        raise bad_checkpoint(f"{folder} holds tensors that the config does not account for: {', '.join(extra[:5])}.")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of a checkpoint. Raises `ModelError` (`model.bad_checkpoint`) naming the file when it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise bad_checkpoint(f"{path} is missing.") from error
    except (OSError, ValueError) as error:
        raise bad_checkpoint(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise bad_checkpoint(f"{path} does not hold a JSON object.")
    return content


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise bad_checkpoint(f"{path} is missing.") from error
    except (SafetensorError, OSError) as error:
        raise bad_checkpoint(f"{path} is truncated or is not a safetensors file: {error}.") from error


def _read_index(index: Path) -> dict[str, str]:
    """The tensor-to-file table of an index, checked against the shards themselves."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise bad_checkpoint(f"{index} has no weight_map.")
    files: dict[str, str] = {}
    for name, file in table.items():
        if not isinstance(file, str) or file != Path(file).name or "\\" in file or not file.endswith(".safetensors"):
            raise bad_checkpoint(f"{index} sends tensor {name} to {file!r}, which is not a safetensors file of the same folder.")
        files[name] = file
    for file in sorted(set(files.values())):
        with _opened(index.parent / file) as handle:
            _check_shard(index, file, handle.keys(), files)
    return files


def _check_shard(index: Path, file: str, stored: Iterable[str], files: dict[str, str]) -> None:
    held = set(stored)
    listed = {name for name, target in files.items() if target == file}
    if listed - held:
        raise bad_checkpoint(f"Tensor {min(listed - held)} is listed in {index} but is missing from {index.parent / file}.")
    if held - listed:
        raise bad_checkpoint(f"Tensor {min(held - listed)} is in {index.parent / file} but is not listed in {index}.")


Precision = Literal["float32", "bfloat16", "float16"]


def open_device(name: str | None, threads: int | None = None) -> torch.device:
    """The device asked for, or the best there is; sets the CPU threads: as asked for, and one where the CPU is the device.

    On a GPU attention does without cuDNN, in the whole process: cuDNN builds a plan for every new shape, for up to half a second, and
    batches of utterances have new shapes all the time.
    Raises `ConfigError` (`config.invalid`) for a device that is not there, and `EngineCrashError` as `_best_device`.
    """
    device = _known_device(name or _best_device())
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cpu" or threads:
        torch.set_num_threads(threads or 1)
    return device


def _best_device() -> str:
    """Raises `EngineCrashError` (`worker.crash`) where this process was given a GPU that is gone.

    A worker that went on with the CPU would take as many items as on its GPU, and finish hardly any of them. A process that was given
    none by name takes the CPU, with a warning where NVIDIA's driver is there.
    """
    if torch.cuda.is_available():
        return "cuda"
    if torch.version.cuda is None or not has_gpu():
        return "cpu"
    given = os.environ.get(VISIBLE)
    if given is None:
        log.warning("NVIDIA's driver is here, but PyTorch finds no GPU: the model runs on the CPU. `nightjar doctor` says why.")
        return "cpu"
    message = f"PyTorch does not find the GPU that this process was given ({VISIBLE}={given})."
    raise EngineCrashError(ErrorCode.WORKER_CRASH, message, f"See `nvidia-smi`. To work on the CPU, set {VISIBLE} to nothing.")


def _known_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"There is no device {name!r}.", "Name cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(ErrorCode.CONFIG_INVALID, "PyTorch finds no GPU here.", "Run `nightjar doctor`, or name the device cpu.")
    if device.type == "cuda" and device.index is not None and device.index >= (count := torch.cuda.device_count()):
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"There is no GPU {device.index}; this process sees {count}.", f"Name {known}.")
    return device


def precision(asked: Precision | None, device: torch.device) -> torch.dtype:
    """The type asked for, or the best for the device."""
    return getattr(torch, asked or ("float32" if device.type == "cpu" else "bfloat16"))


def device_name(device: torch.device) -> str:
    """The name of a GPU, such as `NVIDIA H200`; else the kind of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def type_name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")

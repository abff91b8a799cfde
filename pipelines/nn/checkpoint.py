"""Reads the tensors of checkpoints strictly, without running code from pickles, and chooses device and
precision."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kernels.frame import Layer, StackTensors
from kernels.layers import rope_table
from pipelines.errors import EngineCrashError, ErrorCode, invalid
from pipelines.nn.config_keys import StackShape, bad_checkpoint, read_table
from pipelines.options import VISIBLE, Precision, has_gpu

log = logging.getLogger(__name__)

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class TensorSource:
    """A source of weights by name and shape. This one makes tensors of any values; a `TensorTable` reads them."""

    def __contains__(self, name: str) -> bool:
        """Whether it has a tensor of this name; used for tensors that have different names in different
        checkpoints."""
        return False

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Loader:
    """Takes tensors under one name prefix, in one dtype, onto one device."""

    source: TensorSource
    prefix: str
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor `prefix + name`, of exactly this shape. Raises like the source."""
        return self.source.take(self.prefix + name, shape, self.dtype, self.device)

    def at(self, prefix: str) -> Self:
        """The same loader with a longer prefix."""
        return replace(self, prefix=self.prefix + prefix)

    def float(self) -> Self:
        """The same loader in float32."""
        return replace(self, dtype=torch.float32)


class TensorTable(TensorSource):
    """Tensors of a folder or a file by name; `finish` raises an error for those that were not taken."""

    def __init__(self, place: Path, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self.place = place
        self._names = frozenset(names)
        self._left = set(names)
        self._read = read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes open files; tensors already taken stay valid."""

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Reads one tensor of exactly this shape; `dtype` None keeps the stored one. Nothing is read if the
        device is "meta".

        Raises `ModelError` (`model.bad_checkpoint`) naming the tensor when it is absent, has another
        shape, or is stored in a type that cannot be turned into `dtype` without scales.
        """
        if name not in self._names:
            raise bad_checkpoint(f"Tensor {name} is missing from {self.place}.")
        tensor = self._read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise bad_checkpoint(
                f"Tensor {name} has shape {list(tensor.shape)}, but the config asks for {list(shape)}."
            )
        self._left.discard(name)
        plain = tensor.is_floating_point() and tensor.element_size() > 1
        if dtype is not None and dtype.is_floating_point and not plain:
            raise bad_checkpoint(f"Tensor {name} is stored as {tensor.dtype}, not as plain floating point.")
        # The tensor is sent to the device in its stored type, and converted there.
        return tensor.to(device=device).to(dtype=dtype)

    def ignore(self, *patterns: str) -> None:
        """Marks tensors as not needed, by shell patterns such as `*rotary_emb*`."""
        self._left = {
            name for name in self._left if not any(fnmatchcase(name, pattern) for pattern in patterns)
        }

    def left(self) -> list[str]:
        """The names that were neither taken nor ignored, sorted."""
        return sorted(self._left)

    def finish(self) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) naming the tensors that are left."""
        if extra := self.left():
            raise bad_checkpoint(
                f"{self.place} holds tensors that the config does not account for: {shown(extra)}."
            )


def shown(names: Sequence[str]) -> str:
    """The first five names, and the number of others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_pickle(path: Path, wrappers: Sequence[str] = (), mmap: bool = False) -> dict[str, Tensor]:
    """The tensors of a pickled state dictionary; reads only tensors, never code.

    `wrappers`: keys that can contain the dictionary; `mmap`: reads tensors when they are used, which old files
    do not support. Raises `ModelError` (`model.bad_checkpoint`) that names the file.
    """
    try:
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise bad_checkpoint(f"{path} is missing.") from error
    except Exception as error:  # of many kinds, if the file is not a pickle or holds more than tensors
        raise bad_checkpoint(f"{path} cannot be read as tensors: {str(error)[:200]}.") from error
    for wrapper in wrappers:
        if isinstance(held, dict) and isinstance(inner := held.get(wrapper), dict):
            held = inner
    if not isinstance(held, dict):
        raise bad_checkpoint(f"{path} does not hold tensors by name.")
    return {str(name): tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


class Checkpoint(TensorTable):
    """The tensors of one checkpoint folder, read when they are taken.

    Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

        with Checkpoint(folder) as weights:
            norm = weights.take("model.norm.weight", (1024,), torch.float32)
            weights.ignore("*rotary_emb*")
            weights.finish()
    """

    def __init__(self, folder: Path) -> None:
        """Lists the tensors of a folder.

        Raises `ModelError` (`model.bad_checkpoint`) that names the file, if one is missing, truncated or
        damaged, if the index points out of the folder, and if there are only pickles.
        """
        single = "model.safetensors"
        index = folder / "model.safetensors.index.json"
        if (folder / single).is_file():
            files = {single}
        elif index.is_file():
            files = _shards(index)
        elif pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
            raise bad_checkpoint(
                f"{folder} holds its weights as pickle ({pickles[0]}), which is never loaded.",
                "Convert the weights to safetensors first.",
            )
        else:
            raise bad_checkpoint(f"{folder} has neither {single} nor {index.name}.")
        self._contexts = ExitStack()
        self._handles = dict[str, Any]()
        for file in files:
            handle = self._contexts.enter_context(_opened(folder / file))
            self._handles |= dict.fromkeys(handle.keys(), handle)
        super().__init__(folder, self._handles, self._stored)

    def __exit__(self, *_: object) -> None:
        self._contexts.close()

    def values(self) -> int:
        """The number of values of all tensors; reads no tensor."""
        return sum(math.prod(handle.get_slice(name).get_shape()) for name, handle in self._handles.items())

    def update_digest(self, digest: hashlib._Hash, prefix: str) -> None:
        """Adds all tensors under `prefix` to a digest: their names, types, shapes and contents."""
        for name in sorted(name for name in self._handles if name.startswith(prefix)):
            tensor = self._stored(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def _stored(self, name: str) -> Tensor:
        try:
            return self._handles[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise bad_checkpoint(f"Tensor {name} cannot be read from {self.place}: {error}.") from error


#: Names of the gain and the direction of a convolution's weight norm; a plain `weight` has it folded in.
_NORMS = (
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ("weight_g", "weight_v"),
)


def take_normed(
    source: TensorSource, prefix: str, shape: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """A convolution's weight in float32 with its weight norm folded in: gain * v / |v|, the norm over all
    but the first dimension."""
    for gain, direction in _NORMS:
        if prefix + direction in source:
            v = source.take(prefix + direction, shape, torch.float32, device)
            g = source.take(prefix + gain, (shape[0], 1, 1), torch.float32, device)
            return v * (g / v.flatten(1).norm(dim=1)[:, None, None])
    return source.take(f"{prefix}weight", shape, torch.float32, device)


def fill_module(
    module: nn.Module,
    source: TensorSource,
    prefix: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    published: Mapping[str, str | Callable[[re.Match[str]], str]] = MappingProxyType({}),
) -> None:
    """Fills a module that was made on the meta device. The source has each tensor as `prefix` + its name.

    `published`: patterns in our names -> the replacements that make them the names of the source, applied in
    order by `re.sub`. Weight norms that the module does not have are folded. Raises like the source.
    """
    tensors = dict[str, Tensor]()
    for name, empty in module.state_dict().items():
        place = name
        for ours, theirs in published.items():
            place = re.sub(ours, theirs, place)
        place = prefix + place
        if not empty.is_floating_point():
            tensors[name] = source.take(place, empty.shape, None, device)
        elif place.endswith(".weight"):
            tensors[name] = take_normed(source, place.removesuffix("weight"), empty.shape, device).to(dtype)
        else:
            tensors[name] = source.take(place, empty.shape, torch.float32, device).to(dtype)
    module.load_state_dict(tensors, assign=True)
    module.requires_grad_(False).eval()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise bad_checkpoint(f"{path} is missing.") from error
    except (SafetensorError, OSError) as error:
        raise bad_checkpoint(f"{path} is truncated or is not a safetensors file: {error}.") from error


def _shards(index: Path) -> set[str]:
    """The files that an index lists. The names of their tensors are read from the files, not from the index."""
    table = read_table(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise bad_checkpoint(f"{index} has no weight_map.")
    for name, file in table.items():
        if not (isinstance(file, str) and re.fullmatch(r"[^/\\]+\.safetensors", file)):
            raise bad_checkpoint(
                f"{index} lists tensor {name} in {file!r}, which is not a safetensors file of the same folder."
            )
    return set(table.values())


class StackWeights(NamedTuple):
    """The tensors of a stack: its layers, and the final norm."""

    layers: tuple[Layer, ...]
    norm: Tensor

    def tensors(self, shape: StackShape, positions: int, wide_rope: bool = False) -> StackTensors:
        """The stack's tensors for a frame, with attention scaled by 1 / sqrt(head_dim), and with rotary tables for
        `positions` positions.

        `wide_rope`: tables are rounded to bfloat16 and rotary embedding is computed in float32, as in the training
        of Fish Speech; exact tables change its voice.
        """
        dtype = torch.bfloat16 if wide_rope else self.norm.dtype
        table = rope_table(positions, shape.head_dim, shape.rope_theta, dtype, self.norm.device)
        return StackTensors(
            self.layers,
            self.norm,
            table.to(self.norm.dtype),
            shape.heads,
            shape.kv_heads,
            shape.eps,
            shape.head_dim**-0.5,
            wide_rope,
        )


def take_stack(
    load: Loader, shape: StackShape, *, head_norm: bool = True, qkv_bias: bool = False
) -> StackWeights:
    """Reads `layers.*` and `norm.weight` with the names of Qwen3 (`head_norm`) or Qwen2
    (`qkv_bias`).

    Raises `ModelError` (`model.bad_checkpoint`) that names a missing or misshapen tensor.
    """
    widths = [shape.q_width, shape.kv_width, shape.kv_width]
    layers = []
    for index in range(shape.layers):
        take = load.at(f"layers.{index}.")
        qkv = [
            take(f"self_attn.{name}_proj.weight", width, shape.hidden) for name, width in zip("qkv", widths)
        ]
        bias = [take(f"self_attn.{name}_proj.bias", width) for name, width in zip("qkv", widths) if qkv_bias]
        gate_up = [
            take(f"mlp.{name}_proj.weight", shape.intermediate, shape.hidden) for name in ("gate", "up")
        ]
        q_norm, k_norm = (
            take(f"self_attn.{name}_norm.weight", shape.head_dim) if head_norm else None for name in "qk"
        )
        layers.append(
            Layer(
                input_norm=take("input_layernorm.weight", shape.hidden),
                qkv=torch.cat(qkv),
                o=take("self_attn.o_proj.weight", shape.hidden, widths[0]),
                post_norm=take("post_attention_layernorm.weight", shape.hidden),
                gate_up=torch.cat(gate_up),
                down=take("mlp.down_proj.weight", shape.hidden, shape.intermediate),
                q_norm=q_norm,
                k_norm=k_norm,
                qkv_bias=torch.cat(bias) if bias else None,
            )
        )
    return StackWeights(tuple(layers), load("norm.weight", shape.hidden))


def open_device(name: str | None, threads: int | None = None) -> torch.device:
    """The device with this name, or the best one. Also sets the number of CPU threads: to `threads`, or to
    one if the device is the CPU.

    On a GPU this disables cuDNN attention in the whole process: cuDNN builds a plan for every new shape, for up to
    half a second, and batches of utterances often have new shapes. Raises `ConfigError` (`config.invalid`) for
    a device that does not exist, and `EngineCrashError` like `_best_device`.
    """
    name = name or _best_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise invalid(f"There is no device {name!r}.", "Name cpu, cuda or cuda:N.") from error
    index = device.index or 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and index >= count:
        raise invalid(
            f"There is no GPU {index}; this process sees {count}.",
            "Name another device, such as cpu or cuda:0, or run `nightjar doctor`.",
        )
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        with suppress(ImportError):
            from triton.runtime.cache import triton_key

            # The first kernel needs this hash of Triton's files, which takes 0.7 s.
            Thread(target=triton_key, daemon=True).start()
    if device.type == "cpu" or threads:
        torch.set_num_threads(threads or 1)
    return device


def _best_device() -> str:
    """Raises `EngineCrashError` (`worker.crash`) if this process was given a GPU that is gone.

    A worker that continued on the CPU would take as many items as on its GPU, and finish almost none of them. A
    process without an assigned GPU uses the CPU, with a warning if NVIDIA's driver is installed.
    """
    if torch.cuda.is_available():
        return "cuda"
    if torch.version.cuda is None or not has_gpu():
        return "cpu"
    given = os.environ.get(VISIBLE)
    if given is None:
        log.warning(
            "NVIDIA's driver is installed, but PyTorch finds no GPU: the model runs on the CPU. `nightjar doctor` says why."
        )
        return "cpu"
    raise EngineCrashError(
        ErrorCode.WORKER_CRASH,
        f"PyTorch does not find the GPU that this process was given ({VISIBLE}={given}).",
        f"See `nvidia-smi`. To work on the CPU, set {VISIBLE} to nothing.",
    )


def precision(asked: Precision | None, device: torch.device) -> torch.dtype:
    """The type `asked` for, or the best type for the device."""
    return getattr(torch, asked or ("float32" if device.type == "cpu" else "bfloat16"))


def device_name(device: torch.device) -> str:
    """The name of a GPU, such as `NVIDIA H200`; else the kind of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def type_name(dtype: torch.dtype) -> str:
    """The name of a type, such as `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")

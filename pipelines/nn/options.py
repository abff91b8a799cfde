"""How a person opens a checkpoint: options by name, the device and the precision, and what all models on vLLM are asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import msgspec
import torch

from pipelines.errors import ConfigError, ErrorCode
from pipelines.vllm_engine.options import VllmOptions

T = TypeVar("T")

#: msgspec crashes where two threads use a class for the first time at once.
_converting = threading.Lock()
Precision = Literal["float32", "bfloat16", "float16"]


def read_options(kind: type[T], given: Mapping[str, Any]) -> T:
    """The dataclass `kind` of options by name.

    Raises `ConfigError` (`config.invalid`) for an option that it does not have, or a value that this one cannot have.
    """
    known = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(set(given) - known):
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"Unknown option {unknown[0]!r}.", f"Options are: {', '.join(sorted(known))}.")
    try:
        with _converting:
            return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"An option has a wrong value: {error}.", "Correct it, or leave it out.") from error


def open_device(name: str | None, threads: int | None = None) -> torch.device:
    """The device asked for, or the best there is; sets the CPU threads: as asked for, and one where the CPU is the device.

    On a GPU attention does without cuDNN, in the whole process: cuDNN builds a plan for every new shape, for up to half a second, and
    batches of utterances have new shapes all the time.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cpu" or threads:
        torch.set_num_threads(threads or 1)
    return device


def precision(asked: Precision | None, device: torch.device) -> torch.dtype:
    """The type asked for, or the best for the device."""
    return getattr(torch, asked or ("float32" if device.type == "cpu" else "bfloat16"))


def type_name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TokenModelOptions:
    """How a checkpoint whose LM runs on vLLM is opened; None means the best for the device. The LM's are those of `VllmOptions`."""

    #: Of the codec and the reference encoder; vLLM takes the device it was built for.
    device: str | None = None
    codec_dtype: Precision | None = None
    dtype: Precision | None = None
    memory_share: float | None = None
    cpu_kv_gib: int = 1
    slots: int | None = None
    waiting_room: int = 64
    max_context: int | None = None
    step_tokens: int | None = None
    tensor_parallel: int = 1
    eager: bool | None = None
    #: Whether speech that reaches its limit without an end is returned (meta finish "length") instead of failing.
    keep_unfinished: bool = False
    #: CPU threads of the codec and the reference encoder.
    threads: int | None = None

    def vllm(self, memory_share: float, context: int, max_positions: int) -> VllmOptions:
        """What vLLM is told, with a model's own memory share and context where nothing was asked for."""
        return VllmOptions(
            dtype=self.dtype,
            memory_share=memory_share if self.memory_share is None else self.memory_share,
            cpu_kv_gib=self.cpu_kv_gib,
            max_sequences=self.slots,
            waiting_room=self.waiting_room,
            max_context=min(self.max_context or context, max_positions),
            step_tokens=self.step_tokens,
            tensor_parallel=self.tensor_parallel,
            eager=self.eager,
        )

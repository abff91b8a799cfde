"""Options of pipelines, how they are read, and the choice of an engine and of a device. Imports no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from pipelines.errors import invalid, nearest

#: A whole number of 1 or more.
Count = Annotated[int, msgspec.Meta(ge=1)]

T = TypeVar("T")
U = TypeVar("U")

#: Held during a conversion: msgspec crashes if two threads use a class for the first time at once.
_converting = threading.Lock()


def read_options(kind: type[T], given: Mapping[str, Any], *others: str) -> T:
    """Converts options to the dataclass `kind`. `others`: further option names for the error message.

    Raises `ConfigError` (`config.invalid`) for an unknown option or a wrong value.
    """
    known = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(set(given) - known):
        names = sorted({*known, *others})
        raise invalid(
            f"Unknown option {unknown[0]!r}.", f"{nearest(unknown[0], names)}Options are: {', '.join(names)}."
        )
    try:
        with _converting:
            return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise invalid(f"An option has a wrong value: {error}.", "Correct it, or leave it out.") from error


#: The option that selects the engine.
ENGINE = "engine"
#: Values of `SPEECH_ENGINE__KIND` and of the option `engine` of a model that both engines can run; "auto" means
#: native.
EngineKind = Literal["auto", "native", "vllm"]
#: The environment variable that selects the GPUs of a process, and its values for no GPU; Slurm sets the last
#: one.
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = ("", "-1", "NoDevFiles")
#: Exists if NVIDIA's driver is loaded, and stays when a GPU is lost.
DRIVER = Path("/dev/nvidiactl")


def has_gpu() -> bool:
    """Whether CUDA should find a GPU. CUDA itself is not asked, because that takes seconds and device
    memory."""
    return os.environ.get(VISIBLE, "0") not in NO_GPU and DRIVER.exists()


#: Default maximum positions of a sequence: a minute of reference, a minute of speech, and their texts.
CONTEXT = 8192
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class _EngineOption:
    engine: EngineKind = "auto"


def read_model_options(options: Mapping[str, Any], native: type[T], vllm: type[U]) -> T | U:
    """Reads the options of a model that both engines can run; the option `engine` chooses the class. Raises
    like `read_options`."""
    rest = dict(options)
    given = {ENGINE: rest.pop(ENGINE)} if ENGINE in rest else {}
    kind = vllm if read_options(_EngineOption, given).engine == "vllm" else native
    return read_options(kind, rest, ENGINE)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of a checkpoint on either engine; None selects the best value for the device."""

    #: On vLLM this is only the device of the codec and the reference encoder: the LM runs on the kind of
    #: device that vLLM was built for.
    device: str | None = None
    dtype: Precision | None = None
    codec_dtype: Precision | None = None
    #: Whether the bits of a request's codes must not depend on its batch. This costs throughput, and vLLM
    #: does not support it.
    reproducible: bool = False
    #: Maximum sequences that run at once, and maximum sequences that wait before `submit` blocks.
    slots: Count | None = None
    waiting_room: Count | None = None
    #: Share of the GPU's memory that may be used: on the native engine by weights, KV cache, codec and
    #: graphs; on vLLM by the LM.
    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_context: Count | None = None
    #: Whether speech that reaches its limit unfinished is returned (with "length" as `finish` in its meta)
    #: instead of failing.
    keep_unfinished: bool = False
    #: Whether the codec's decoder is loaded. Without it, the pipeline only gives codes.
    decodes: bool = True
    #: Number of CPU threads; on vLLM, of the codec and the reference encoder. With one thread, results in
    #: float32 on a CPU have the same bits in any batch.
    threads: Count | None = None

    def context(self, default: int) -> int:
        """Maximum positions of a sequence; `default` if the option is not set."""
        return default if self.max_context is None else self.max_context


@dataclass(frozen=True, slots=True)
class TokenModelOptions(ModelOptions):
    """Options of a checkpoint whose LM runs on vLLM; None selects the best value for the device."""

    #: KV cache of the CPU build in GiB; VLLM_CPU_KVCACHE_SPACE takes precedence.
    cpu_kv_gib: Count = 1
    #: Maximum tokens of one engine step.
    step_tokens: Count | None = None
    tensor_parallel: int = 1
    #: Whether the LM runs without compilation and CUDA graphs.
    eager: bool | None = None

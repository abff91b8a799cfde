"""Options of checkpoints as a person names them, for models on either engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import torch

from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.frame_model import FrameModel
from pipelines.engine.opening import MemoryNeeds, context_of, open_executor, plan_engine
from pipelines.engine_choice import EngineKind
from pipelines.nn.checkpoint import Precision
from pipelines.options import Count, read_options

#: The option that chooses the engine of a model that both can run.
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class _EngineOption:
    engine: EngineKind = "auto"


def take_engine(options: Mapping[str, Any]) -> tuple[Literal["native", "vllm"], dict[str, Any]]:
    """The engine that the option `engine` chooses where both can run a model, and the other options.
    Raises as `read_options`."""
    rest = {name: value for name, value in options.items() if name != ENGINE}
    chosen = read_options(
        _EngineOption, {name: value for name, value in options.items() if name == ENGINE}
    ).engine
    return "native" if chosen == "auto" else chosen, rest


#: Requests that wait for a slot on a CPU.
_CPU_WAITING_ROOM = 64
#: Positions of a sequence where nobody chose: a minute of reference, a minute of speech, and their texts.
CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a checkpoint is opened, on either engine; None means the best for the device."""

    #: On vLLM of the codec and the reference encoder: vLLM takes the device it was built for.
    device: str | None = None
    dtype: Precision | None = None
    codec_dtype: Precision | None = None
    #: A request's codes are the same bits alone and in any company, for some throughput. Refused by vLLM.
    reproducible: bool = False
    #: Sequences that run at once, and that wait before `submit` blocks.
    slots: Count | None = None
    waiting_room: Count | None = None
    #: Share of the GPU's memory: on our own engine for all of it, weights, KV cache, codec and graphs; on
    #: vLLM for the LM.
    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_context: Count | None = None
    #: Whether speech that reaches its limit without an end is returned (meta finish "length") instead of
    #: failing.
    keep_unfinished: bool = False
    #: CPU threads, on vLLM of the codec and the reference encoder; results in float32 on CPU are the same
    #: bits in any batch with one.
    threads: Count | None = None

    def context(self, default: int) -> int:
        """Positions of a sequence at most; `default`: where nobody chose."""
        return default if self.max_context is None else self.max_context


@dataclass(frozen=True, slots=True)
class NativeModelOptions(ModelOptions):
    """How a checkpoint whose LM runs on our own engine is opened; None means the best for the device."""

    #: How frames are made: PyTorch ops one by one, or CUDA graphs of fused kernels. "megakernel": as graphs,
    #: with persistent kernels for one or two utterances of Qwen3-TTS. "auto": graphs on a CUDA device with
    #: Triton, and those kernels where they were measured.
    executor: Literal["auto", "eager", "graph", "megakernel"] = "auto"
    #: Streams that run at once: as many slots, but for one, are kept free of whole utterances. On a GPU
    #: everything that they, or any request, need is compiled and captured before the pipeline is open, which
    #: takes a while.
    streams: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: KV pages of `page_size` positions.
    pages: Count | None = None
    page_size: Count = 64

    def plan(
        self,
        needs: MemoryNeeds,
        device: torch.device,
        max_positions: int,
        context: int = CONTEXT,
        **more: Any,
    ) -> EngineOptions:
        """Sizes of the engine of a model that is not loaded yet, as for `plan_engine`; `context`:
        positions where nobody chose."""
        return plan_engine(
            needs, device, context_of(self.context(context), max_positions), slots=self.slots, streams=self.streams, pages=self.pages,
            page_size=self.page_size, memory_share=self.memory_share, **more,
        )  # fmt: skip

    def open_engine(self, model: FrameModel, sizes: EngineOptions, stage: CodecStage[Any]) -> Engine:
        """The engine of a loaded model, whose speech goes on to `stage`. Raises as `open_executor`."""
        executor = open_executor(model, sizes, self.executor, self.reproducible, self.streams)
        return Engine(executor, sizes, self.room(sizes.slots, model.device), stage)

    def room(self, slots: int, device: torch.device) -> int:
        """How many requests may wait for one of so many slots."""
        return self.waiting_room or (slots if device.type == "cuda" else _CPU_WAITING_ROOM)


@dataclass(frozen=True, slots=True)
class TokenModelOptions(ModelOptions):
    """How a checkpoint whose LM runs on vLLM is opened; None means the best for the device."""

    #: KV cache of the CPU build in GiB; VLLM_CPU_KVCACHE_SPACE goes before it.
    cpu_kv_gib: Count = 1
    #: Tokens of one engine step.
    step_tokens: Count | None = None
    tensor_parallel: int = 1
    #: Without compilation and CUDA graphs.
    eager: bool | None = None

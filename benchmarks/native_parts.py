"""Parts of the native engine alone, of any model: a frame and a prefill as its executor runs them, without
scheduler, host and codec."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu import Bench
from benchmarks.roofline import Frame, device_named, floor_of
from kernels.registry import on_device
from kernels.sampler import DrawFlags
from pipelines.engine.executor import FrameExecutor, FrameSettings, PrefillRun
from pipelines.engine.state import Placement, SamplingParams

#: Frames of a call, and prompts of a prefill.
FRAMES, PROMPTS = 8, 16
#: Calls that are timed, and those before them.
_CALLS = 7


def prepare_all(executor: FrameExecutor, device: torch.device) -> None:
    """Captures every graph that the executor can have, so that no call meets one that is missing."""
    with on_device(device), torch.cuda.stream(executor.stream):
        while executor.prepare():
            pass


def prefill_of(executor: FrameExecutor) -> dict[str, str]:
    """What rows say of an executor."""
    return {"executor": executor.name, "prefill": "packed" if executor.packed else "padded"}


def frame_part(
    bench: Bench,
    executor: FrameExecutor,
    sampling: SamplingParams,
    rows: list[int],
    context: int,
    rate: float,
    sizes: Frame | None,
) -> None:
    """A frame of so many rows at this context, and the prefill of one prompt and of many; the slots must
    be free.

    `rate`: frames of a second of speech; `sizes`: those of the floor.
    """
    with on_device(bench.device), torch.cuda.stream(executor.stream):
        for number in rows:
            _frames(bench, executor, sampling, number, context, rate, sizes)
        for prompts in sorted({1, min(PROMPTS, max(rows))}):
            for positions in (64, 128):
                _prefills(bench, executor, prompts, positions)


def _frames(
    bench: Bench,
    executor: FrameExecutor,
    sampling: SamplingParams,
    rows: int,
    context: int,
    rate: float,
    sizes: Frame | None,
) -> None:
    state, kv, count = executor.state, executor.kv, FRAMES if bench.on_gpu else 1
    each = math.ceil((context + _CALLS * count + 1) / kv.page_size)
    pages = kv.take(rows * each)
    if pages is None:
        raise ValueError(f"{rows} rows of {each} pages do not fit {kv.pages} pages")
    hidden = torch.zeros(state.inputs.shape[1], dtype=state.inputs.dtype, device=state.inputs.device)
    none = np.zeros(0, np.int64)
    placed = [
        Placement(
            row,
            pages[row * each : (row + 1) * each],
            row,
            replace(sampling, min_new_tokens=1 << 30),
            none,
            hidden,
            context,
        )
        for row in range(rows)
    ]
    state.place(placed)
    flags = [
        DrawFlags.of([drawn])
        for drawn in (
            (sampling.temperature, sampling.top_k, sampling.top_p),
            (sampling.residual_temperature, sampling.residual_top_k, sampling.residual_top_p),
        )
    ]
    settings, slots = FrameSettings(context + 1, *flags), list(range(rows))

    def frames() -> None:
        nonlocal settings
        executor.frames(slots, count, settings)()
        settings = settings.later(count)

    ms = bench.milliseconds(frames, _CALLS - 2) / count
    kv.give_back(pages)
    device = device_named(bench.found["device"])
    floor = (
        {}
        if sizes is None or device is None
        else {"floor_ms": 1000 * floor_of(sizes, rows, context, device).seconds}
    )
    bench.timed(
        "frame alone",
        rows,
        ms,
        rows / rate,
        engine="native",
        slots=rows,
        context=context,
        executor=executor.name,
        **floor,
    )


def _prefills(bench: Bench, executor: FrameExecutor, prompts: int, positions: int) -> None:
    state, kv = executor.state, executor.kv
    each = math.ceil(positions / kv.page_size)
    pages = kv.take(prompts * each)
    if pages is None:
        raise ValueError(f"{prompts} prompts of {each} pages do not fit {kv.pages} pages")
    embeddings = torch.zeros(
        positions, state.inputs.shape[1], dtype=state.inputs.dtype, device=state.inputs.device
    )
    none = np.zeros(0, np.int64)
    state.place(
        [
            Placement(
                row,
                pages[row * each : (row + 1) * each],
                row,
                SamplingParams(),
                none,
                embeddings[-1],
                positions - 1,
            )
            for row in range(prompts)
        ]
    )
    runs = [PrefillRun(row, 0, embeddings) for row in range(prompts)]
    ms = bench.milliseconds(lambda: executor.prefill(runs), runs=5 if bench.on_gpu else 1)
    kv.give_back(pages)
    bench.timed(f"prefill of {positions}", prompts, ms, engine="native", **prefill_of(executor))

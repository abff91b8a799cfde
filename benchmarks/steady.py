"""A pipeline under a steady load: so many requests under way at any time, and what comes out while all slots are taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.watched import GpuUse, ThreadUse
from pipelines.request import Pipeline, Speech, SynthesisRequest

#: Requests of a run for each slot; and for so many slots one more request is under way, to enter the LM or to be decoded.
TURNS, BESIDE = 4, 4


@dataclass(frozen=True, slots=True)
class Steady:
    """From the end of the first request of each slot to the moment when no new ones follow."""

    seconds: float
    audio_seconds: float
    #: From a stream's request to its first samples, under the same load.
    first_chunk_ms: float
    #: Shares of the device and of threads, in percent.
    use: dict[str, float]


def steady(
    pipeline: Pipeline, slots: int, make: Callable[[int], SynthesisRequest], stream: SynthesisRequest, device: torch.device
) -> Steady:
    """Runs `TURNS` requests a slot; `make` gives request n. A request without audio counts as none; any other failure is raised."""
    under_way, total = slots + slots // BESIDE, TURNS * slots
    free, ends = threading.Semaphore(under_way), list[tuple[float, float]]()
    gpu, threads = GpuUse(device), ThreadUse("vllm-host", "codec-stage", "MainThread")
    listener, chunk = ThreadPoolExecutor(1), Future[float]()
    futures: list[Future[Speech]] = []

    def ended(future: Future[Speech]) -> None:
        ends.append((time.perf_counter(), 0.0 if future.exception() else future.result().duration_ms / 1000))
        free.release()

    for number in range(total):
        free.acquire()
        future = pipeline.submit(make(number))
        future.add_done_callback(ended)
        futures.append(future)
        if number == total // 2:
            chunk = listener.submit(_first_chunk_ms, pipeline, stream)
    first_chunk_ms = chunk.result()
    listener.shutdown()
    for future in futures:
        error = future.exception()
        if error is not None and getattr(error, "code", None) != "synth.no_audio":
            raise error
    share = gpu.stop()
    use = threads.shares() | ({} if share is None else {"gpu_percent": 100 * share})
    # Callbacks run on the pipeline's threads, a moment after the results are there.
    while len(ends) < total:
        time.sleep(0.001)
    window = ends[slots : total - under_way]
    return Steady(window[-1][0] - ends[slots - 1][0], sum(heard for _, heard in window), first_chunk_ms, use)


def _first_chunk_ms(pipeline: Pipeline, request: SynthesisRequest) -> float:
    begin = time.perf_counter()
    stream = pipeline.stream(request)
    next(iter(stream))
    took = 1000 * (time.perf_counter() - begin)
    for _ in stream:
        pass
    return took

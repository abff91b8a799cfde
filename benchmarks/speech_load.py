"""Load on a model that runs on vLLM: its language model alone, its codec alone, and its pipeline from request to samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.gpu import Bench, GpuUse, ThreadUse
from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import Generation, Message, Pipeline, Speech, SynthesisRequest
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.options import TokenRequest, Tokens, TokenSampling

PROMPT_TOKENS = 120
VOICES = 16
REFERENCE_SECONDS = 6.0
TEXT = "The rain falls on the quiet street, and nobody walks. "
#: Requests of a steady run for each slot; and for so many slots one more request is under way, to enter the LM or to be decoded.
TURNS, BESIDE = 4, 4


@lru_cache(maxsize=64)
def recording(seconds: float, sample_rate: int, seed: int) -> bytes:
    """A tone in noise as float32 samples, which the encoders of the benchmarks read without an audio library."""
    dice = np.random.default_rng(seed)
    moments = np.arange(int(seconds * sample_rate)) / sample_rate
    return (0.3 * np.sin(2 * np.pi * (100 + seed) * moments) + 0.02 * dice.standard_normal(len(moments))).astype(np.float32).tobytes()


def spoken_request(name: str, index: int, seconds: float, sample_rate: int, reference_text: str | None = None) -> SynthesisRequest:
    """One of `VOICES` recordings, a text of its own."""
    audio = recording(REFERENCE_SECONDS, sample_rate, index % VOICES)
    messages = (Message("user", "text", f"{index} {TEXT}" * 3), Message("user", "audio", audio))
    return SynthesisRequest(f"{name}-{index}", messages, Generation(reference_text=reference_text, max_seconds=seconds), seed=index)


def token_letters(text: str) -> list[int]:
    """A number for every four letters, as English has tokens."""
    return [sum(text[at : at + 4].encode()) for at in range(0, len(text), 4)]


class Waiter:
    """A receiver of one sequence, whole."""

    streamed = False

    def __init__(self) -> None:
        self.future: Future[list[int]] = Future()

    def tokens(self, ids: list[int], codes: Any) -> None:
        """Whole sequences are counted."""

    def finished(self, tokens: Tokens) -> None:
        self.future.set_result(list(tokens.ids))

    def failed(self, error: NightjarError) -> None:
        self.future.set_exception(error)


def prompt_ids(index: int, vocabulary: int) -> list[int]:
    """The LM's prompt of sequence `index`."""
    return [(index * 131 + n * 17) % vocabulary for n in range(PROMPT_TOKENS)]


def sequences(host: VllmHost, prompts: Sequence[list[int]], samplings: Sequence[TokenSampling], turn: str = "") -> list[list[int]]:
    """All sequences through the host at once; their tokens."""
    waiters = [Waiter() for _ in prompts]
    for index, (prompt, sampling, waiter) in enumerate(zip(prompts, samplings, waiters, strict=True)):
        host.submit(TokenRequest(f"{turn}-{index}", prompt, sampling), waiter)
    return [waiter.future.result() for waiter in waiters]


def lm_part(bench: Bench, host: VllmHost, requests: list[int], vocabulary: int, tokens_per_second: float, sampling: TokenSampling) -> None:
    """The LM through our host, all requests at once, each of the same number of tokens; the second turn counts."""
    for number in requests:
        prompts = [prompt_ids(index, vocabulary) for index in range(number)]
        drawn = [replace(sampling, seed=index) for index in range(number)]
        took, made = 0.0, 0
        for turn in range(2):
            begin = time.perf_counter()
            made = sum(map(len, sequences(host, prompts, drawn, f"{number}.{turn}")))
            took = time.perf_counter() - begin
        more = {"tokens_per_s": made / took, "ms_a_step": 1000 * took * number / made}
        bench.timed("LM on vLLM", number, 1000 * took, made / tokens_per_second, **more)


def codec_part(
    bench: Bench, batches: Sequence[int], frames: int, rate: float, draw: Callable[[int], Tensor], decode: Callable[[list[Tensor]], object]
) -> None:
    """Whole utterances at batches of equal length, and of lengths from half to whole. `draw` gives codes of a length."""
    for batch in batches:
        for kind in ("equal", "mixed"):
            lengths = [frames if kind == "equal" else max(frames // 2 + frames // 2 * (n + 1) // batch, 1) for n in range(batch)]
            codes = [draw(length) for length in lengths]
            ms = bench.milliseconds(lambda codes=codes: decode(codes))
            bench.timed(f"codec, {kind}", batch, ms, sum(lengths) / rate)


def speech_part(
    bench: Bench, pipeline: Pipeline, requests: list[int], seconds: float, make: Callable[[str, int, float], SynthesisRequest]
) -> None:
    """Request to samples: all at once, then so many kept under way, of lengths from half to whole. `make`: name, index, seconds."""
    warm = [make("warm", voice, min(1.0, seconds)) for voice in range(VOICES)]
    # Lengths and batches that the codec has not met cost the compilation of a kernel.
    warm += [make("lengths", index, seconds * (1 + index % 64) / 64) for index in range(12 * VOICES if bench.on_gpu else 0)]
    for future in [pipeline.submit(request) for request in warm]:
        _heard_seconds(future)
    list(pipeline.stream(make("first", 0, min(2.0, seconds))))
    lengths = [seconds * (0.5 + 0.5 * step / 7) for step in range(8)]
    for number in requests:
        begin = time.perf_counter()
        under_way = [pipeline.submit(make(f"burst{number}", index, seconds)) for index in range(number)]
        burst = sum(map(_heard_seconds, under_way)) / (time.perf_counter() - begin)
        steady(bench, pipeline, number, burst, lambda index, number=number: make(f"steady{number}", index, lengths[index % 8]), make)


def steady(
    bench: Bench,
    pipeline: Pipeline,
    slots: int,
    burst: float,
    request: Callable[[int], SynthesisRequest],
    make: Callable[[str, int, float], SynthesisRequest],
) -> None:
    """`TURNS` requests a slot, with all slots taken: measured from the end of the first one of each slot until no new ones follow."""
    under_way, total = slots + slots // BESIDE, TURNS * slots
    free, ends = threading.Semaphore(under_way), list[tuple[float, float]]()
    gpu, threads = GpuUse(bench.device), ThreadUse()
    futures: list[Future[Speech]] = []

    def ended(future: Future[Speech]) -> None:
        ends.append((time.perf_counter(), 0.0 if future.exception() else future.result().duration_ms / 1000))
        free.release()

    with ThreadPoolExecutor(1) as listener:
        chunk = None
        for number in range(total):
            free.acquire()
            future = pipeline.submit(request(number))
            future.add_done_callback(ended)
            futures.append(future)
            if number == total // 2:
                chunk = listener.submit(_first_chunk_ms, pipeline, make(f"stream{slots}", 0, min(2.0, bench.options.seconds)))
        first_chunk_ms = 0.0 if chunk is None else chunk.result()
    for future in futures:
        _heard_seconds(future)
    busy, shares = gpu.stop(), threads.shares()
    use = {f"{name}_cpu_percent": 100 * shares.get(name, 0.0) for name in ("vllm-host", "codec-stage", "MainThread")}
    use |= {} if busy is None else {"gpu_percent": 100 * busy}
    # Callbacks run on the pipeline's threads, a moment after the results are there.
    while len(ends) < total:
        time.sleep(0.001)
    window = ends[slots : total - under_way]
    took, audio = window[-1][0] - ends[slots - 1][0], sum(heard for _, heard in window)
    bench.timed("speech, end to end", slots, 1000 * took, audio, burst_audio_s_per_s=burst, first_chunk_ms=first_chunk_ms, **use)


def _heard_seconds(future: Future[Speech]) -> float:
    """Audio of a request; none where random weights ended it before its first frame. Any other failure is raised."""
    error = future.exception()
    if error is None:
        return future.result().duration_ms / 1000
    if isinstance(error, NightjarError) and error.code is ErrorCode.SYNTH_NO_AUDIO:
        return 0.0
    raise error


def _first_chunk_ms(pipeline: Pipeline, request: SynthesisRequest) -> float:
    """From a stream's request to its first samples."""
    begin = time.perf_counter()
    stream = pipeline.stream(request)
    next(iter(stream))
    took = 1000 * (time.perf_counter() - begin)
    for _ in stream:
        pass
    return took

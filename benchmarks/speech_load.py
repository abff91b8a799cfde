"""Load on a model of either engine: its LM alone, its codec alone, its pipeline from request to samples,
and first chunks of streams.

Rows of both engines are alike: `engine` names it, `slots` the sequences that are kept busy.
"""

from __future__ import annotations

import io
import itertools
import threading
import time
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from queue import Queue
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.gpu import Bench, GpuUse, ThreadUse
from benchmarks.watched_executor import Watched
from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import (
    Done,
    Event,
    Failed,
    Generation,
    Message,
    Pipeline,
    Speech,
    SynthesisRequest,
    submit,
)
from pipelines.tokens import TokenHost, TokenRequest, Tokens, TokenSampling

PROMPT_TOKENS = 120
VOICES = 16
REFERENCE_SECONDS = 6.0
TEXT = "The rain falls on the quiet street, and nobody walks. "
#: Requests of a steady run for each slot; and for so many slots one more request is under way, to enter the
#: LM or to be decoded.
TURNS, BESIDE = 4, 4
#: Streams of a run for each one that is under way, and the least number of all: the first of each place are
#: not counted.
STREAM_TURNS, LEAST_STREAMS = 6, 60
_PEAK = 32767

#: A request of a pipeline: its name, its number, its seconds.
Make = Callable[[str, int, float], SynthesisRequest]


@lru_cache(maxsize=64)
def recording(seconds: float, sample_rate: int, seed: int) -> bytes:
    """A tone in noise as a WAV file."""
    dice = np.random.default_rng(seed)
    moments = np.arange(int(seconds * sample_rate)) / sample_rate
    samples = 0.3 * np.sin(2 * np.pi * (100 + seed) * moments) + 0.02 * dice.standard_normal(len(moments))
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(sample_rate)
        made.writeframes((_PEAK * samples).astype("<i2").tobytes())
    return file.getvalue()


def spoken_request(
    name: str, index: int, seconds: float, sample_rate: int, reference_text: str | None = None
) -> SynthesisRequest:
    """One of `VOICES` recordings, a text of its own."""
    audio = recording(REFERENCE_SECONDS, sample_rate, index % VOICES)
    messages = (Message("user", "text", f"{index} {TEXT}" * 3), Message("user", "audio", audio))
    return SynthesisRequest(
        f"{name}-{index}",
        messages,
        Generation(reference_text=reference_text, max_seconds=seconds),
        seed=index,
    )


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


def sequences(
    host: TokenHost,
    prompts: Sequence[list[int]],
    samplings: Sequence[TokenSampling],
    turn: str = "",
    **more: Any,
) -> list[list[int]]:
    """All sequences through the host at once; their tokens. `more`: other fields of each `TokenRequest`."""
    waiters = [Waiter() for _ in prompts]
    for index, (prompt, sampling, waiter) in enumerate(zip(prompts, samplings, waiters, strict=True)):
        host.submit(TokenRequest(f"{turn}-{index}", prompt, sampling, **more), waiter)
    return [waiter.future.result() for waiter in waiters]


def lm_part(
    bench: Bench, host: TokenHost, engine: str, requests: list[int], vocabulary: int, tokens_per_second: float, sampling: TokenSampling,
    about: dict[str, Any] | None = None, **fields: Any,
) -> None:  # fmt: skip
    """The LM through an engine, all requests at once, each of the same number of tokens; the second turn
    counts.

    No prompt comes twice, so that a prefix cache has none of them. `about`: what else rows say; `fields`:
    of each `TokenRequest`.
    """
    indexes = itertools.count()
    for number in requests:
        drawn = [replace(sampling, seed=index) for index in range(number)]
        took, made = 0.0, 0
        for turn in range(2):
            prompts = [prompt_ids(next(indexes), vocabulary) for _ in range(number)]
            begin = time.perf_counter()
            made = sum(map(len, sequences(host, prompts, drawn, f"{number}.{turn}", **fields)))
            took = time.perf_counter() - begin
        more = {**(about or {}), "tokens_per_s": made / took, "ms_a_step": 1000 * took * number / made}
        bench.timed(
            "LM alone", number, 1000 * took, made / tokens_per_second, engine=engine, slots=number, **more
        )


def codec_part(
    bench: Bench,
    batches: Sequence[int],
    frames: int,
    rate: float,
    draw: Callable[[int], Tensor],
    decode: Callable[[list[Tensor]], object],
) -> None:
    """Whole utterances at batches of equal length, and of lengths from half to whole. `draw` gives codes
    of a length."""
    for batch in batches:
        for kind in ("equal", "mixed"):
            lengths = [
                frames if kind == "equal" else max(frames // 2 + frames // 2 * (n + 1) // batch, 1)
                for n in range(batch)
            ]
            codes = [draw(length) for length in lengths]
            ms = bench.milliseconds(lambda codes=codes: decode(codes))
            bench.timed(f"codec, {kind}", batch, ms, sum(lengths) / rate)


def speech_part(
    bench: Bench, pipeline: Pipeline, engine: str, requests: list[int], seconds: float, make: Make, watched: Watched | None = None,
    about: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Request to samples: all at once, then so many kept under way, of lengths from half to whole.
    `about`: what else rows say."""
    warm_up(bench, pipeline, seconds, make)
    lengths = [seconds * (0.5 + 0.5 * step / 7) for step in range(8)]
    for number in requests:
        begin = time.perf_counter()
        under_way = [submit(pipeline, make(f"burst{number}", index, seconds)) for index in range(number)]
        burst = sum(map(_heard_seconds, under_way)) / (time.perf_counter() - begin)
        found = steady(
            bench,
            pipeline,
            number,
            lambda index, number=number: make(f"steady{number}", index, lengths[index % 8]),
            watched,
        )
        ms, audio = found.pop("ms"), found.pop("audio_seconds")
        row = {"engine": engine, "slots": number, **(about or {}), "burst_audio_s_per_s": burst, **found}
        bench.timed("speech, end to end", number, ms, audio, **row)


def warm_up(bench: Bench, pipeline: Pipeline, seconds: float, make: Make) -> None:
    """Every voice once; and lengths and batches that the codec has not met, which cost the compilation of
    a kernel."""
    warm = [make("warm", voice, min(1.0, seconds)) for voice in range(VOICES)]
    warm += [
        make("lengths", index, seconds * (1 + index % 64) / 64)
        for index in range(12 * VOICES if bench.on_gpu else 0)
    ]
    for future in [submit(pipeline, request) for request in warm]:
        _heard_seconds(future)
    first_chunks(pipeline, 1, 1, lambda index: make("first", index, min(2.0, seconds)))


def steady(
    bench: Bench,
    pipeline: Pipeline,
    slots: int,
    request: Callable[[int], SynthesisRequest],
    watched: Watched | None = None,
) -> dict[str, Any]:
    """`TURNS` requests a slot, with all slots taken: measured from the end of the first one of each slot
    until no new ones follow."""
    under_way, total = slots + slots // BESIDE, TURNS * slots
    free, ends = threading.Semaphore(under_way), list[tuple[float, float]]()
    gpu, threads = GpuUse(bench.device), ThreadUse()
    futures: list[Future[Speech]] = []

    def ended(future: Future[Speech]) -> None:
        ends.append((time.perf_counter(), 0.0 if future.exception() else future.result().duration_ms / 1000))
        free.release()

    for number in range(total):
        free.acquire()
        future = submit(pipeline, request(number))
        future.add_done_callback(ended)
        futures.append(future)
        if watched is not None and number == total // 2:
            watched.start()
    found = {} if watched is None else watched.stop()
    for future in futures:
        _heard_seconds(future)
    busy, shares = gpu.stop(), threads.shares()
    found |= {
        f"{name}_cpu_percent": 100 * shares[name]
        for name in ("vllm-host", "engine", "codec-stage", "MainThread")
        if name in shares
    }
    found |= {} if busy is None else {"gpu_percent": 100 * busy}
    # Callbacks run on the pipeline's threads, a moment after the results are there.
    while len(ends) < total:
        time.sleep(0.001)
    window = ends[slots : total - under_way]
    took, audio = window[-1][0] - ends[slots - 1][0], sum(heard for _, heard in window)
    return {"ms": 1000 * took, "audio_seconds": audio, "under_way": under_way, **found}


def stream_part(
    bench: Bench,
    pipeline: Pipeline,
    engine: str,
    counts: list[int],
    seconds: float,
    make: Make,
    about: dict[str, Any] | None = None,
) -> None:
    """First chunks of so many streams back to back: median and 95th of 100, without the first stream of
    each place. `about`: as of `speech_part`."""
    for number in counts:
        begin = time.perf_counter()
        total = max(STREAM_TURNS * number, LEAST_STREAMS) if bench.on_gpu else 2 * number
        waits = first_chunks(
            pipeline, number, total, lambda index, number=number: make(f"stream{number}", index, seconds)
        )
        took = 1000 * (time.perf_counter() - begin)
        p50, p95 = np.percentile(waits[number:], (50, 95)).tolist()
        more = {**(about or {}), "p50_ms": p50, "p95_ms": p95, "longest_ms": max(waits[number:])}
        bench.timed("first chunk", number, took, engine=engine, slots=number, streams=total, **more)


def first_chunks(
    pipeline: Pipeline, at_once: int, total: int, request: Callable[[int], SynthesisRequest]
) -> list[float]:
    """Milliseconds from each request to its first samples, with so many streams at once; those that random
    weights ended before it are left out. Raises the error of a stream that failed otherwise."""
    ended: Queue[NightjarError | None] = Queue()
    waits: dict[int, float] = {}

    def start(index: int) -> None:
        asked = request(index)
        begin = time.perf_counter()

        def heard(event: Event) -> None:
            if isinstance(event, Failed):
                ended.put(None if event.error.code is ErrorCode.SYNTH_NO_AUDIO else event.error)
            elif isinstance(event, Done):
                ended.put(None)
            elif len(event.samples):
                waits.setdefault(index, 1000 * (time.perf_counter() - begin))

        pipeline.start(asked, heard, stream=True)

    for index in range(min(at_once, total)):
        start(index)
    for over in range(total):
        if (error := ended.get()) is not None:
            raise error
        if at_once + over < total:
            start(at_once + over)
    return [waits[index] for index in sorted(waits)]


def _heard_seconds(future: Future[Speech]) -> float:
    """Audio of a request; none where random weights ended it before its first frame. Any other failure is
    raised."""
    error = future.exception()
    if error is None:
        return future.result().duration_ms / 1000
    if isinstance(error, NightjarError) and error.code is ErrorCode.SYNTH_NO_AUDIO:
        return 0.0
    raise error

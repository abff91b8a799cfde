"""A closed loop over the real Qwen3-TTS engine: utterances of known lengths, kept coming, and what is made
in equal windows of time.

Beside it a profile of its threads.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import GpuUse, ThreadUse
from benchmarks.watched_executor import Watched
from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineOptions, Finish
from pipelines.engine.engine import Engine
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.execution import open_stage
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.pipeline import FrameRequestInfo
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
from pipelines.request import Done, Event, Failed, Listener
from pipelines.results import Utterance

ROOT = Path(__file__).resolve().parents[1]
FRAMES_PER_SECOND = 12.5
SAMPLE_RATE = 24_000
#: Text tokens of a second of speech.
TOKENS_PER_SECOND = 3.3
MAX_TOKENS = 2048

Pool = Sequence[tuple[GenerationRequest, int]]


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for: seconds of the shortest and the longest utterance; windows that are measured, and
    seconds of each."""

    shortest: float
    longest: float
    seconds: float
    windows: int = 1
    #: Text tokens of every prompt beside those of its speech.
    more_text: int = 0

    @property
    def positions(self) -> int:
        """Positions of the longest utterance, its prompt included."""
        return round(self.longest * (FRAMES_PER_SECOND + TOKENS_PER_SECOND)) + 32 + self.more_text


def requests(
    model: Qwen3TTSModel, load: Load, count: int, most_tokens: int = MAX_TOKENS, seed: int = 0
) -> list[tuple[GenerationRequest, int]]:
    """Requests with the frames each will have; texts as long as the speech suggests."""
    draw = np.random.default_rng(seed)
    made: list[tuple[GenerationRequest, int]] = []
    for index in range(count):
        seconds = float(draw.uniform(load.shortest, load.longest))
        frames = max(round(seconds * FRAMES_PER_SECOND), 3)
        body = draw.integers(0, 150_000, max(round(seconds * TOKENS_PER_SECOND), 1) + load.more_text).tolist()
        prompt = build_prompt(
            model.config, TokenizedTask([151644, 77091, 198], body, language="english", speaker="ryan")
        )
        made.append(
            (
                GenerationRequest(
                    str(index), prompt, SamplingParams(min_new_tokens=frames), index, most_tokens
                ),
                frames,
            )
        )
    return made


@dataclass(slots=True)
class Tally:
    """What came out so far. Threads add to it under its lock; reading one field needs none."""

    utterances: int = 0
    frames: int = 0
    wrong: int = 0
    #: Checksums of the probes' codes, and how often each came.
    probes: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def heard(self, frames: int, right: bool) -> None:
        with self.lock:
            self.utterances += 1
            self.frames += frames
            self.wrong += not right

    def probed(self, codes: NDArray[np.int64]) -> None:
        found = zlib.crc32(np.ascontiguousarray(codes).tobytes())
        with self.lock:
            self.probes[found] = self.probes.get(found, 0) + 1

    def failed(self, error: BaseException | None) -> None:
        if not (isinstance(error, SynthesisError) and error.code is ErrorCode.SYNTH_ABORTED):
            with self.lock:
                self.wrong += 1


class Counter:
    """A receiver that only counts: the language model without the codec."""

    def __init__(self, loop: ClosedLoop, wanted: int) -> None:
        self._loop, self._wanted = loop, wanted

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Counted at the end."""

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        self._loop.tally.heard(len(codes), finish == "eos" and len(codes) == self._wanted)
        self._loop.room.release()

    def failed(self, error: NightjarError) -> None:
        self._loop.tally.failed(error)
        self._loop.room.release()


def uttered(
    loop: ClosedLoop, wanted: int, stage: CodecStage[CodecState], probe: bool = False
) -> Utterance[CodecState]:
    """The receiver of the real pipeline, whose speech is counted."""

    def heard(event: Event) -> None:
        if isinstance(event, Failed):
            loop.tally.failed(event.error)
        elif isinstance(event, Done):
            speech = event.speech
            frames = int(speech.meta["frames"])
            whole = len(speech.samples) == frames * SAMPLE_RATE / FRAMES_PER_SECOND
            loop.tally.heard(frames, whole and frames == wanted and speech.meta["finish"] == "eos")
        loop.room.release()

    kind = _Probe if probe else Utterance[CodecState]
    utterer = kind(
        FrameRequestInfo("", SAMPLE_RATE, {}, keep_unfinished=True),
        stage,
        Listener(heard, lambda _done: None),
    )
    if isinstance(utterer, _Probe):
        utterer.tally = loop.tally
    return utterer


class _Probe(Utterance[CodecState]):
    """An utterance that is asked for again and again; its codes must not depend on when."""

    tally: Tally

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        self.tally.probed(codes)
        super().finished(codes, finish)


@dataclass(frozen=True, slots=True)
class Mark:
    """The counts at one moment: frames that the language model made, frames that were heard."""

    at: float
    made: int
    heard: int
    utterances: int
    running: int


def rates(marks: Sequence[Mark], slots: int) -> dict[str, Any]:
    """What is sustained over the windows between marks: no more than was made, and no more than was heard."""
    first, last = marks[0], marks[-1]
    seconds = last.at - first.at
    made, heard = last.made - first.made, last.heard - first.heard
    sustained = min(made, heard) / seconds
    each = [(b.made - a.made) / (b.at - a.at) for a, b in itertools.pairwise(marks)]
    return {
        "audio_s_per_s": sustained / FRAMES_PER_SECOND,
        "frames_per_s": sustained,
        "made_per_s": made / seconds,
        "heard_per_s": heard / seconds,
        "ms_per_frame": 1000 * slots / sustained if sustained else None,
        "seconds": seconds,
        "utterances": last.utterances - first.utterances,
        "windows_made_per_s": each,
        "spread": (max(each) - min(each)) * len(each) / sum(each) if sum(each) else None,
        "running": sum(mark.running for mark in marks) / len(marks),
    }


class ClosedLoop:
    """Keeps every slot taken with requests of a pool, over and over, until it is drained or closed.

    The engine rests while the codec is behind, as in the real pipeline, and a bounded number is on its way
    at a time. With the codec, every `probe_every`-th request is the pool's first one with one seed.
    """

    def __init__(
        self,
        executor: Watched,
        options: EngineOptions,
        pool: Pool,
        decoder: CodecDecoder | None,
        probe_every: int = 0,
    ) -> None:
        self.tally = Tally()
        self._places = 2 * options.slots + 1024
        self.room = threading.Semaphore(self._places)
        self.slots = options.slots
        self._probe_every = probe_every
        self._executor = executor
        self._stage = None if decoder is None else open_stage(decoder)
        # As many requests wait as a pipeline lets wait on a GPU.
        self.engine = Engine(executor, options, options.slots, self._stage)
        self._stop = threading.Event()
        self._feeder = threading.Thread(target=self._feed, args=(pool,), name="feeder")
        self._feeder.start()

    def _feed(self, pool: Pool) -> None:
        for number, (request, frames) in enumerate(itertools.cycle(pool)):
            self.room.acquire()
            if self._stop.is_set():
                self.room.release()
                return
            probe = bool(self._probe_every) and number % self._probe_every == 0
            if probe:
                request, frames = pool[0]
            receiver = (
                Counter(self, frames) if self._stage is None else uttered(self, frames, self._stage, probe)
            )
            try:
                self.engine.submit(
                    replace(request, request_id=str(number), seed=0 if probe else number), receiver
                )
            except SynthesisError:  # closed
                return

    def mark(self) -> Mark:
        core = self.engine.core
        made = core.frames_made
        heard = made if self._stage is None else self.tally.frames
        return Mark(time.perf_counter(), made, heard, self.tally.utterances, len(core.scheduler.running))

    def settle(self, utterances: int, most_seconds: float) -> bool:
        """Waits until that many utterances are out; whether they came in time and right."""
        until = time.perf_counter() + most_seconds
        while self.tally.utterances < utterances and self.tally.wrong == 0 and time.perf_counter() < until:
            time.sleep(0.02)
        return self.tally.utterances >= utterances and self.tally.wrong == 0

    def measure(self, seconds: float, windows: int) -> dict[str, Any]:
        """The figures of so many windows one after the other."""
        use, threads, began = GpuUse(self._executor.device), ThreadUse(), time.process_time()
        self._executor.start()
        marks = [self.mark()]
        for _ in range(windows):
            time.sleep(max(marks[0].at + seconds * len(marks) - time.perf_counter(), 0))
            marks.append(self.mark())
        watched = self._executor.stop()
        found = rates(marks, self.slots)
        busy, shares = use.stop(), threads.shares()
        return {
            **found,
            "wrong_lengths": self.tally.wrong,
            "process_cpu_share": (time.process_time() - began) / found["seconds"],
            "thread_cpu_share": {name: share for name, share in shares.items() if share >= 0.01},
            "gpu_busy_nvml": busy,
            **({"clocks": clocks} if (clocks := use.clocks()) else {}),
            **watched,
        }

    def drain(self, most_seconds: float) -> bool:
        """Asks for nothing more and waits for what is on its way; whether all of it came."""
        self._stop.set()
        until = time.perf_counter() + most_seconds
        return all(
            self.room.acquire(timeout=max(until - time.perf_counter(), 0.001)) for _ in range(self._places)
        )

    def close(self) -> None:
        """Ends everything; what is on its way is dropped."""
        self._stop.set()
        self.engine.close()
        if self._stage is not None:
            self._stage.close()
        self.room.release()
        self._feeder.join()


def profile(names: Sequence[str], seconds: float, functions: int = 12) -> dict[str, Any]:
    """What threads do, by sampling: for each name, the functions of this project that were seen running,
    with their share of the samples.

    A function stands for all that it calls outside of the project, waiting included.
    """
    threads = {thread.ident: thread.name for thread in threading.enumerate() if thread.name in names}
    seen: dict[str, dict[str, int]] = {name: {} for name in names}
    samples, before, until = 0, sys.getswitchinterval(), time.perf_counter() + seconds
    sys.setswitchinterval(
        1e-4
    )  # so that a sample is taken where a thread is, not where it next lets go of the interpreter
    try:
        while not samples or time.perf_counter() < until:
            frames = sys._current_frames()
            for ident, name in threads.items():
                place = _place(frames.get(ident or 0))
                seen[name][place] = seen[name].get(place, 0) + 1
            samples += 1
            time.sleep(0.001)
    finally:
        sys.setswitchinterval(before)
    found: dict[str, Any] = {"samples": samples, "seconds": seconds}
    for name, places in seen.items():
        found[name] = {
            place: count / samples
            for place, count in sorted(places.items(), key=lambda item: -item[1])[:functions]
        }
    return found


def _place(frame: FrameType | None) -> str:
    """The innermost function of this project in a stack."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if ROOT in file.parents and "site-packages" not in file.parts:
            return f"{file.relative_to(ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"

"""Stand-ins with a knob for every kind of bad luck: a sine engine, a clock that is turned by hand, a store
in memory."""

from __future__ import annotations

import hashlib
import heapq
import io
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray

from jobs.store.base import ObjectInfo, ObjectStore
from pipelines.errors import ErrorCode, InputError, NightjarError, StoreError, SynthesisError
from pipelines.request import (
    AudioChunk,
    Capabilities,
    CodecIdentity,
    EngineInfo,
    EngineState,
    EngineStats,
    Speech,
    SynthesisRequest,
    Word,
)
from tests.support.called import CalledPipeline

SAMPLE_RATE = 16000
#: Samples of a frame of the fake codec; every fake speech has whole frames.
FRAME_SAMPLES = 160
CODEC = CodecIdentity("fake-codec", "0" * 64, SAMPLE_RATE / FRAME_SAMPLES, SAMPLE_RATE, (400, 1000))

#: `[[word]]` or `[[word:value]]` anywhere in a text asks the fake engine for bad luck.
MARKER = re.compile(r"\[\[(\w+)(?::([^\]]*))?\]\]")
#: Between two looks for the file of a request that waits for one.
LOOK_SECONDS = 0.02


def die_on_bad_gpu() -> None:
    """Ends this process by SIGABRT, as CUDA's libraries do, if its GPU is the one that NIGHTJAR_BAD_GPU
    names."""
    if os.environ.get("NIGHTJAR_BAD_GPU", "-") == os.environ.get("CUDA_VISIBLE_DEVICES"):
        os.abort()


def spoken_text(request: SynthesisRequest) -> str:
    """The user's text of a request."""
    return " ".join(
        m.content
        for m in request.messages
        if m.role == "user" and m.modality == "text" and isinstance(m.content, str)
    )


def _heard(request: SynthesisRequest) -> str:
    return " ".join(
        hashlib.sha256(m.content).hexdigest() for m in request.messages if isinstance(m.content, bytes)
    )


def sine(text: str, seed: int) -> NDArray[np.float32]:
    """The one right answer of the fake engine, float32 [samples]: pitch from the seed, length from the
    text."""
    return _tone(SAMPLE_RATE // 20 + SAMPLE_RATE // 100 * min(len(text), 500), seed)


def _tone(samples: int, seed: int) -> NDArray[np.float32]:
    pitch_hz = 200.0 + seed % 400
    return (0.3 * np.sin(2 * np.pi * pitch_hz / SAMPLE_RATE * np.arange(samples))).astype(np.float32)


def even_words(text: str, seconds: float) -> tuple[Word, ...]:
    """The words of a text, each of which takes an equal share of the time."""
    words = text.split()
    edges = [round(seconds * number / len(words), 4) for number in range(len(words) + 1)]
    return tuple(Word(word, *edges[number : number + 2]) for number, word in enumerate(words))


@dataclass(frozen=True, slots=True)
class Markers:
    """What a text asks for; see `FakePipeline`."""

    words: Mapping[str, str]

    @classmethod
    def of(cls, text: str) -> Markers:
        return cls({m[1]: m[2] or "" for m in MARKER.finditer(text)} if "[[" in text else {})


class FakePipeline(CalledPipeline):
    """A deterministic sine engine.

    Every request takes `seconds` of engine time plus `seconds_per_character` of its text, and `slots`
    requests run at once; with both zero a request is answered inside `submit`. `waiting_room` bounds what
    may wait for a slot. With `patient_until` nothing ends while a slot is empty, until so many requests
    were submitted: who does not keep the engine full waits for ever. Markers in a text: `[[slow:S]]` S
    seconds more; `[[until:PATH]]` ends when there is a file PATH, not before; `[[hang]]` never ends, not
    even by abort; `[[crash]]` kills the process; `[[crash_once:PATH]]` kills it unless PATH exists, and
    makes it; `[[fail:CODE]]` fails; `[[fail_once:CODE]]` fails the first time in this process;
    `[[refuse:CODE]]` is refused by `submit`; `[[nan]]`, `[[empty]]`, `[[silent]]` give such audio;
    `[[hears]]` writes the SHA-256 of its recordings beside its audio; `[[says:TEXT]]` writes a text beside
    its audio; from `[[executor:NAME]]` on its `info` names this executor.
    """

    sample_rate = SAMPLE_RATE

    def __init__(
        self,
        name: str = "fake",
        *,
        seconds: float = 0.0,
        seconds_per_character: float = 0.0,
        slots: int = 8,
        waiting_room: int = 64,
        patient_until: int = 0,
        on_crash: Callable[[], None] | None = None,
        decodes: bool = True,
        energy: bool = False,
    ) -> None:
        self.name = name
        self.decodes = decodes
        #: Whether `stats` has a counter of energy, which never rests.
        self.energy = energy
        self.capabilities = Capabilities(
            voices=("sine",), cloning=True, instruct=True, codes=True, word_times="exact"
        )
        self.seconds = seconds
        self.seconds_per_character = seconds_per_character
        self.slots = slots
        self.waiting_room = waiting_room
        self.patient_until = patient_until
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.closes = 0
        self.state: EngineState = "ready"
        self.info = EngineInfo(slots=slots, waiting_room=waiting_room)
        self._crash = on_crash or (lambda: os.kill(os.getpid(), signal.SIGKILL))
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[SynthesisRequest, Future[Speech]]] = {}
        self._running: dict[str, tuple[SynthesisRequest, Future[Speech]]] = {}
        self._ends: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._failed_once: set[str] = set()
        self._done = 0
        self._thread: threading.Thread | None = None

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        if self.closes:
            raise SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine is closed.")
        self.submitted.append(request.request_id)
        text = spoken_text(request)
        words = Markers.of(text).words
        if "refuse" in words:
            raise InputError(ErrorCode(words["refuse"]), "The fake engine refuses this text.")
        future: Future[Speech] = Future()
        if self._seconds(text, words) == 0:
            self._finish(request, future)
            return future
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self.waiting_room or self.closes)
            self._waiting[request.request_id] = (request, future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        yield AudioChunk(sine(spoken_text(request), request.seed), SAMPLE_RATE)

    def abort(self, request_id: str) -> None:
        with self._changed:
            self.aborted.append(request_id)
            entry = self._waiting.pop(request_id, None) or self._running.get(request_id)
            if entry is None or "hang" in Markers.of(spoken_text(entry[0])).words:
                return
            self._running.pop(request_id, None)
            self._changed.notify_all()
        entry[1].set_exception(SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            requests_done=self._done,
            joules=time.monotonic() if self.energy else None,
            state=self.state,
        )

    def close(self) -> None:
        with self._changed:
            self.closes += 1
            left = [*self._waiting.values(), *self._running.values()]
            self._waiting.clear()
            self._running.clear()
            self._changed.notify_all()
        for _, future in left:
            future.set_exception(SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine is closed."))

    def _seconds(self, text: str, words: Mapping[str, str]) -> float:
        if "hang" in words:
            return float("inf")
        held_seconds = LOOK_SECONDS if "until" in words else 0.0
        return (
            self.seconds + self.seconds_per_character * len(text) + float(words.get("slow", 0)) + held_seconds
        )

    def _run(self) -> None:
        while not self.closes:
            with self._changed:
                while self._waiting and len(self._running) < self.slots:
                    request_id = next(iter(self._waiting))
                    self._running[request_id] = self._waiting.pop(request_id)
                    text = spoken_text(self._running[request_id][0])
                    end = time.monotonic() + self._seconds(text, Markers.of(text).words)
                    heapq.heappush(self._ends, (end, next(self._order), request_id))
                    self._changed.notify_all()
                wait_seconds = self._ends[0][0] - time.monotonic() if self._ends else 1.0
                if wait_seconds > 0 or self._patient:
                    self._changed.wait(min(wait_seconds, 1.0) if wait_seconds > 0 else 1.0)
                    continue
                request_id = heapq.heappop(self._ends)[2]
                if self._held(request_id):
                    heapq.heappush(
                        self._ends, (time.monotonic() + LOOK_SECONDS, next(self._order), request_id)
                    )
                    continue
                entry = self._running.pop(request_id, None)
            if entry is not None:
                self._finish(*entry)

    @property
    def _patient(self) -> bool:
        """Whether the engine waits until it is full."""
        return (
            len(self.submitted) < self.patient_until and len(self._running) + len(self._waiting) < self.slots
        )

    def _held(self, request_id: str) -> bool:
        """Whether a running request waits for its file."""
        entry = self._running.get(request_id)
        path = "" if entry is None else Markers.of(spoken_text(entry[0])).words.get("until")
        return bool(path) and not os.path.exists(path)

    def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
        text = spoken_text(request)
        words = Markers.of(text).words
        if words:
            self._crash_if_asked(words)
            code = words.get("fail") or ("" if text in self._failed_once else words.get("fail_once"))
            if code:
                self._failed_once.add(text)
                future.set_exception(SynthesisError(ErrorCode(code), "The fake engine was asked to fail."))
                return
        if "executor" in words:
            self.info = replace(self.info, executor=words["executor"])
        said = _heard(request) if "hears" in words else words.get("says")
        samples = _spoil(sine(text, request.seed), words)
        times = even_words(text, len(samples) / SAMPLE_RATE) if request.timestamps else ()
        speech = Speech(samples, SAMPLE_RATE, text, said, words=times)
        future.set_result(_with_output(speech, request))
        # Counted when the answer is handed over: a test that waits for the count finds it there.
        self._done += 1

    def _crash_if_asked(self, words: Mapping[str, str]) -> None:
        if "crash" in words:
            self._crash()
        path = words.get("crash_once")
        if path and not os.path.exists(path):
            open(path, "w").close()
            self._crash()


def _with_output(speech: Speech, request: SynthesisRequest) -> Speech:
    """The speech with the codes [frames, 2] that `FakeDecoder` decodes to its samples, or these alone."""
    if request.output == "audio":
        return speech
    frames = np.arange(len(speech.samples) // FRAME_SAMPLES)
    codes = np.stack((np.full(len(frames), request.seed % 400), frames), axis=1).astype(np.int16)
    samples = speech.samples if request.output == "both" else speech.samples[:0]
    voice = np.full((1, 2), 7, np.int16)
    return replace(speech, samples=samples, codes=codes, voice_codes=voice, frame_samples=FRAME_SAMPLES)


class FakeDecoder:
    """The codec of the fake engine. `died_after`: the number of utterances after which it raises."""

    sample_rate = SAMPLE_RATE

    def __init__(self, died_after: int | None = None) -> None:
        self.decoded = 0
        self._left = died_after

    def decode(
        self,
        codes: NDArray[np.int16],
        voice_codes: NDArray[np.int16] | None,
        done: Callable[[NDArray[np.float32] | NightjarError], None],
    ) -> None:
        assert voice_codes is not None
        assert voice_codes.tolist() == [[7, 7]]
        if self.decoded == self._left:
            raise KeyboardInterrupt
        self.decoded += 1
        done(_tone(len(codes) * FRAME_SAMPLES, int(codes[0, 0])))

    def close(self) -> None:
        pass


def _spoil(samples: NDArray[np.float32], words: Mapping[str, str]) -> NDArray[np.float32]:
    if "nan" in words:
        samples[len(samples) // 2] = np.nan
    if "silent" in words:
        samples *= 1e-6
    return samples[:0] if "empty" in words else samples


class InstantPipeline(FakePipeline):
    """Costs nothing: the same speech for every request, to measure the path around an engine."""

    def __init__(self, seconds: float = 0.12, slots: int = 8) -> None:
        super().__init__("instant", slots=slots)
        self._speech = Speech(_tone(round(seconds * SAMPLE_RATE), 7), SAMPLE_RATE, text="instant")

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        future: Future[Speech] = Future()
        future.set_result(self._speech)
        return future


class FakeClock:
    """A monotonic clock that moves when told to; `sleep` moves it and yields to other threads."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        time.sleep(0.001)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


class MemoryStore(ObjectStore):
    """An `ObjectStore` in memory. `fail_next` errors are raised by the next calls of `put` or `get`, one
    each."""

    remote: ClassVar[bool] = False
    root: Path | None = None

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self.objects: dict[str, tuple[bytes, Mapping[str, str]]] = {}
        #: When each object was written; a test may age one.
        self.modified_at: dict[str, float] = {}
        self.fail_next: list[StoreError] = []
        self.puts = 0
        self.identity = "0" * 32
        #: Keys that a power cut would take away.
        self.unsynced: set[str] = set()
        self._lock = threading.Lock()

    def put(
        self,
        key: str,
        data: bytes | BinaryIO,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        self._maybe_fail()
        with self._lock:
            self.puts += 1
            created = key not in self.objects
            self.unsynced.add(key)
            if created:
                content = data if isinstance(data, bytes) else data.read()
                self.objects[key] = (bytes(content), dict(metadata or {}))
                self.modified_at[key] = time.time()
        return replace(self._info(key), created=created)

    def get(self, key: str) -> bytes:
        self._maybe_fail()
        return self._object(key)[0]

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self.get(key)[offset : offset + length]

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.get(key))

    def head(self, key: str) -> ObjectInfo | None:
        return self._info(key) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield self._info(key)

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def sync(self) -> None:
        with self._lock:
            self.unsynced.clear()

    def uri(self, key: str) -> str:
        return self.url + key

    def check(self) -> None:
        self._maybe_fail()

    def establish(self, identity: str | None = None) -> str:
        self.identity = identity or self.identity
        return self.identity

    def confirm(self, identity: str | None) -> None:
        self._compare(self.identity.encode(), identity)

    def _object(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        if key not in self.objects:
            raise StoreError(ErrorCode.STORE_MISSING, f"No object under {key}.")
        return self.objects[key]

    def _info(self, key: str) -> ObjectInfo:
        data, _ = self._object(key)
        return ObjectInfo(key, len(data), hashlib.sha256(data).hexdigest(), self.modified_at.get(key))

    def _maybe_fail(self) -> None:
        with self._lock:
            error = self.fail_next.pop(0) if self.fail_next else None
        if error is not None:
            raise error

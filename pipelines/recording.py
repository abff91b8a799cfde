"""Recordings of voices to clone: checks, decoding, batches, and caches of what a model computes from them, in
memory and in a folder.

Imports no model library, because submit checks every recording.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from pipelines.errors import ErrorCode, InputError, SynthesisError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[np.generic]]

log = logging.getLogger(__name__)

T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")

#: Minimum and maximum length of a recording of a voice to clone, in seconds.
MIN_SECONDS = 0.5
MAX_REFERENCE_SECONDS = 60.0
#: Root mean square below which a recording counts as silent (-60 dBFS).
SILENCE = 1e-3
#: Bytes of main memory for kept results.
KEPT_BYTES = 64 << 20
_SUFFIX = ".voice"
#: Prefix of files that are being written.
DRAFT = ".draft-"
_DIGEST_BYTES = 32
#: Part of a folder's maximum size that is written between two checks of its size, which look at each file.
_UNCHECKED_PART = 1 / 64
_BEST_LENGTH = "Three to fifteen seconds of clear speech work best."


class Reading(NamedTuple):
    """How a recording is decoded, see `pipelines.audio.decode`; `normalized`: see
    `pipelines.audio.normalize_volume`."""

    sample_rate: int | None = None
    channel: int | None = None
    quality: Literal["HQ", "VHQ"] = "HQ"
    normalized: bool = False


AS_IT_IS = Reading()


def read_recording(recording: bytes, reading: Reading = AS_IT_IS) -> tuple[NDArray[np.float32], int]:
    """Decodes an encoded audio file; returns its samples [n] and their rate.

    Raises `InputError` for a recording that cannot be read (`input.audio_unreadable`), is too short or too
    long (`input.reference_length`) or silent (`input.reference_silent`).
    """
    import numpy as np  # imported only if there is audio to read

    from pipelines.audio import decode, normalize_volume

    sample_rate, channel, quality, normalized = reading
    try:
        samples, rate = decode(
            recording, sample_rate, max_seconds=MAX_REFERENCE_SECONDS, channel=channel, quality=quality
        )
    except InputError as error:
        if error.code is not ErrorCode.INPUT_TOO_LONG:
            raise
        raise InputError(
            ErrorCode.INPUT_REFERENCE_LENGTH,
            error.message.replace("audio", "reference audio", 1),
            _BEST_LENGTH,
        ) from error
    seconds = len(samples) / rate
    if not MIN_SECONDS <= seconds <= MAX_REFERENCE_SECONDS:
        raise InputError(
            ErrorCode.INPUT_REFERENCE_LENGTH,
            f"The reference audio is {seconds:.2f} s long; it must be {MIN_SECONDS:g} to {MAX_REFERENCE_SECONDS:g} s long.",
            _BEST_LENGTH,
        )
    if np.mean(np.square(samples, dtype=np.float64)) < SILENCE**2:
        raise InputError(
            ErrorCode.INPUT_REFERENCE_SILENT,
            "The reference audio is silent.",
            "Give a recording with a clear voice.",
        )
    return normalize_volume(samples).astype(np.float32) if normalized else samples, rate


class Recording:
    """An encoded audio file (WAV, FLAC, OGG or MP3) as pipelines receive it. A pipeline that has kept what it
    computes from a recording reads only its `digest`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @classmethod
    def of(cls, content: bytes | Recording) -> Recording:
        """The recording of a file, or the recording itself."""
        return cls(content) if isinstance(content, bytes) else content

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the file."""
        return hashlib.sha256(self._data).hexdigest()

    @property
    def data(self) -> bytes:
        """The encoded file. Raises like `read` if it cannot be fetched."""
        return self._data

    def read(self, reading: Reading = AS_IT_IS) -> tuple[NDArray[np.float32], int]:
        """Decodes the recording; see `read_recording`. Raises `SynthesisError` (`synth.engine`) if it cannot
        be fetched from the process that has it."""
        return read_recording(self._data, reading)


class ReadsRecordings:
    """The base class of pipelines that take each recording as a `Recording`. Others get the bytes of its file."""


@dataclass(eq=False)
class Batcher(Generic[In, Out]):
    """Collects the calls of several threads into batches, and runs these on a thread of its own, which ends with
    the last call.

    A batch has the items of one bucket, in the order of the calls: of the call whose patience ended first, or
    before that of a bucket that is full.
    """

    #: Returns a result for each item.
    _run: Callable[[Sequence[In]], Sequence[Out]]
    #: Only items of equal buckets run together, up to `_rows` of the bucket.
    _bucket: Callable[[In], Hashable]
    _rows: Callable[[Any], int]
    #: Bucket, item, time until which it waits for others, and result, in the order of the calls.
    waiting: list[tuple[Hashable, In, float, Future[Out]]] = field(default_factory=list)
    running: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, item: In, patience: float = 0.0) -> Future[Out]:
        """The result of an item, whose exception is what `run` raised for its batch. `patience`: seconds that the
        item waits for others, unless its bucket is full before."""
        result = Future[Out]()
        with self._changed:
            if not self.running:
                threading.Thread(target=self._serve, name="recordings", daemon=True).start()
                self.running = True
            self.waiting.append((self._bucket(item), item, time.monotonic() + patience, result))
            self._changed.notify()
        return result

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self.waiting:
                    self.running = False
                    return
                bucket, _, until, _ = min(self.waiting, key=lambda one: one[2])
                if (seconds := until - time.monotonic()) > 0:
                    counts = Counter(one[0] for one in self.waiting)
                    full = [bucket for bucket, count in counts.items() if count >= self._rows(bucket)]
                    if not full:
                        self._changed.wait(seconds)
                        continue
                    bucket = full[0]
                rows = self._rows(bucket)
                batch = []
                rest = []
                for one in self.waiting:
                    (batch if one[0] == bucket and len(batch) < rows else rest).append(one)
                self.waiting = rest
            try:
                made = [*zip(batch, self._run([one[1] for one in batch]), strict=True)]
                for (*_, result), out in made:
                    result.set_result(out)
            except BaseException as error:  # noqa: BLE001  # all calls of the batch raise it
                for *_, result in batch:
                    result.set_exception(error)


@dataclass(eq=False)
class SizedCache(Generic[T]):
    """A cache of the most recently used results, up to `capacity_bytes`. A second call for a result that is being
    made waits for it."""

    capacity_bytes: int
    #: The bytes of a result, on any device.
    _size: Callable[[T], int]
    _bytes: int = 0
    #: Finished and pending results with their bytes (0 while pending), the least recently used first.
    _kept: OrderedDict[Hashable, tuple[Future[T], int]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, key: Hashable, make: Callable[[], T]) -> T:
        """The kept result for a key, or that of `make`. Raises what `make` raises, which is not kept."""
        with self._lock:
            mine = key not in self._kept
            made = self._kept.setdefault(key, (Future(), 0))[0]
            self._kept.move_to_end(key)
        if not mine:
            return made.result()
        try:
            result = make()
            size = self._size(result)
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            made.set_exception(error)  # all waiting calls raise it
            raise
        with self._lock:
            self._kept[key] = made, size
            self._bytes += size
            while self._bytes > self.capacity_bytes:
                oldest = next(key for key, (_, size) in self._kept.items() if size)
                self._bytes -= self._kept.pop(oldest)[1]
        made.set_result(result)
        return result


class RecordingCache(SizedCache[T]):
    """A cache of results for recordings, by their content."""

    def get(self, recording: Recording, variant: Hashable, make: Callable[[], T]) -> T:
        """The result of `make` for this recording and variant, computed at the first call.

        Raises `SynthesisError` (`synth.oom`) if the device runs out of memory, and what `make` raises. A
        failed result is not kept.
        """
        try:
            return self.find((recording.digest, variant), make)
        except RuntimeError as error:
            from kernels.cuda_graphs import lacks_memory  # `make` has already imported torch

            if not lacks_memory(error):
                raise
            raise SynthesisError(
                ErrorCode.SYNTH_OOM,
                f"The device ran out of memory while it encoded the reference audio: {error}.",
                "Use a shorter reference or a smaller engine.",
            ) from error


@dataclass(eq=False)
class RecordingFiles:
    """A cache of files in a folder, limited to `maximum_bytes`. Only their owner can read and write them.

    A file holds arrays in the format safetensors, after their SHA-256. Its name is computed from the
    recording's content, the model's identity and the variant. Damaged files, and files that others could have
    written, are not read. If the folder cannot be used, one warning is logged and nothing is stored.
    """

    _folder: Path
    _maximum_bytes: int
    #: Identifies everything that the arrays depend on besides recording and variant.
    _identity: str
    #: Bytes that were written since the last check; infinite before the first one.
    _unchecked: float = math.inf
    _warned: bool = False

    def get(self, recording: Recording, variant: str, make: Callable[[], Arrays]) -> Arrays:
        """The stored arrays of this recording and variant, or the result of `make`, which is then stored.
        If `make` raises, this raises the same and stores nothing."""
        from safetensors import SafetensorError

        model = hashlib.sha256(json.dumps([self._identity, variant]).encode()).hexdigest()
        path = self._folder / f"{recording.digest}-{model[:32]}{_SUFFIX}"
        try:
            if (found := self._read(path)) is not None:
                return found
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.info("a stored voice is damaged and is encoded again: %s", error)
        made = make()
        try:
            self._write(path, made)
        except OSError as error:
            if not self._warned:
                log.warning(
                    "encoded voices cannot be stored in %s (%s); set SPEECH_ENGINE__VOICE_CACHE",
                    self._folder,
                    error,
                )
            self._warned = True
        return made

    def _read(self, path: Path) -> Arrays | None:
        from safetensors.numpy import load

        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} may have been written by another user")
            data = opened.read()
        digest = data[:_DIGEST_BYTES]
        data = data[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError(f"{path} does not match its checksum")
        with suppress(OSError):
            os.utime(path)
        return dict(load(data))

    def _write(self, path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        import numpy as np
        from safetensors.numpy import save

        # The library writes arrays in the order of their memory.
        data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        # A file that a power failure damaged has another checksum.
        write_file(path, hashlib.sha256(data).digest() + data, durable=False)
        self._unchecked += len(data)
        if self._unchecked > self._maximum_bytes * _UNCHECKED_PART:
            self._unchecked = 0
            self.shrink()

    def shrink(self) -> None:
        """Deletes the least recently used files beyond the limit."""
        files = list[tuple[float, int, str]]()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX) or entry.name.startswith(DRAFT):
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime, status.st_size, entry.path))
        size = sum(file[1] for file in files)
        for _, file_bytes, path in sorted(files):
            if size <= self._maximum_bytes:
                return
            with suppress(OSError):
                os.unlink(path)
            size -= file_bytes


def write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Writes a private file atomically; a missing folder is created. `durable`: waits until it survives a power
    failure. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=DRAFT, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise

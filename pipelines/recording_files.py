"""What models made of recordings, kept in a folder for the processes that come later."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from pipelines.errors import NightjarError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[np.generic]]

log = logging.getLogger(__name__)

_SUFFIX = ".voice"
_DIGEST_BYTES = 32
#: Writes between two looks at how large the folder is.
_WRITES_PER_LOOK = 64


class RecordingFiles:
    """A folder of files of up to `maximum_bytes` together, those used last; the owner alone can read and
    write them.

    A file is the SHA-256 of what follows, and arrays in the format safetensors. Its name is made of the
    recording's content, the model's identity and the variant. Files that are damaged, or that others could
    have written, are not read. Where the folder cannot be used, one warning says so and nothing is kept.
    """

    def __init__(self, folder: Path, maximum_bytes: int, identity: Callable[[], str]) -> None:
        """`identity` names what the arrays depend on besides the recording; a thread begins to work it out
        now, since it may take long."""
        self._folder = folder
        self._maximum_bytes = maximum_bytes
        self._identity: Future[str] = Future()
        self._lock = threading.Lock()
        self._writes = 0
        self._warned = False
        threading.Thread(target=self._identify, args=(identity,), name="fingerprint", daemon=True).start()

    def get(self, recording: bytes, variant: str, make: Callable[[], Arrays]) -> Arrays:
        """The arrays that were made of this recording in this variant, or else what `make` makes of it
        now, which is kept. Raises what `make` raises; then nothing is kept."""
        try:
            path = self._path(recording, variant)
        except (NightjarError, OSError, SafetensorError) as error:
            self._warn(f"the model's weights cannot be read again: {error}")
            return make()
        try:
            if (found := self._read(path)) is not None:
                return found
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.info("a kept voice is damaged and is made again: %s", error)
        made = make()
        try:
            self._write(path, made)
        except OSError as error:
            self._warn(str(error))
        return made

    def _identify(self, identity: Callable[[], str]) -> None:
        try:
            self._identity.set_result(identity())
        except Exception as error:  # noqa: BLE001  # whoever asks for a voice hears of it
            self._identity.set_exception(error)

    def _path(self, recording: bytes, variant: str) -> Path:
        model = hashlib.sha256(json.dumps([self._identity.result(), variant]).encode()).hexdigest()
        return self._folder / f"{hashlib.sha256(recording).hexdigest()}-{model[:32]}{_SUFFIX}"

    def _read(self, path: Path) -> Arrays | None:
        from safetensors.numpy import load

        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} may be somebody else's")
            data = opened.read()
        digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError(f"{path} is not what was written")
        with contextlib.suppress(OSError):
            os.utime(path)
        return dict(load(data))

    def _write(self, path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        from safetensors.numpy import save

        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = save(dict(arrays))
        # mkstemp's file is the owner's alone.
        handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as opened:
                opened.write(hashlib.sha256(data).digest() + data)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        with self._lock:
            look = self._writes % _WRITES_PER_LOOK == 0
            self._writes += 1
        if look:
            self._shrink()

    def _shrink(self) -> None:
        """Deletes the files that were not used for the longest time, until the rest is within the bound."""
        files: list[tuple[float, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith((_SUFFIX, ".tmp")):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime, status.st_size, entry.path))
        size = sum(file[1] for file in files)
        for _, file_bytes, path in sorted(files):
            if size <= self._maximum_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            size -= file_bytes

    def _warn(self, why: str) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            log.warning(
                "prepared voices cannot be kept in %s (%s); set SPEECH_ENGINE__VOICE_CACHE", self._folder, why
            )

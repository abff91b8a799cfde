"""Reference audio: read only from allowed folders or the job's own store, and stored once per content."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from jobs.formatting import printable
from jobs.layout import is_reference_key, put_hashed, reference_key, references_prefix
from jobs.store.base import ObjectStore, sha256_of
from pipelines.errors import ErrorCode, InputError, StoreError

MAX_REFERENCE_BYTES = 32 << 20
#: Maximum length of audio in a line. To clone a voice, the maximum is a minute
#: (`pipelines.recording.MAX_REFERENCE_SECONDS`).
MAX_AUDIO_SECONDS = 600.0
#: Number of addresses in the cache, so that a recording of many lines is read once.
_KNOWN_PATHS = 10_000
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_EXTENSIONS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "OGG": "ogg", "MP3": "mp3"}


class ReferenceAudio(NamedTuple):
    """An encoded audio file."""

    data: bytes
    sha256: str
    #: `wav`, `flac`, `ogg` or `mp3`, according to the content.
    ext: str


@dataclass
class ReferenceReader:
    """Reads the audio of the messages of one input: a path below an allowed folder, or an address in the store.

    Without `roots` only the input's folder is allowed. Symbolic links are resolved before the check. URLs are
    never fetched.
    """

    folder: Path
    roots: Sequence[Path]
    store: ObjectStore
    #: Raises `InputError` for audio that the model cannot use.
    check: Callable[[bytes], object] | None = None

    def __post_init__(self) -> None:
        self.roots = [Path(os.path.realpath(root)) for root in (self.roots or [self.folder])]

    def locate(self, content: str) -> str:
        """The address of the audio: the real path of a file, or the address in the store.

        Raises `input.audio_forbidden`.
        """
        if content.startswith(f"{self.store.url}/"):
            return content
        if _URL.match(content):
            raise InputError(
                ErrorCode.INPUT_AUDIO_FORBIDDEN,
                f"The audio {printable(content, 200)!r} is a URL. URLs are not fetched.",
                "Use a path below the input's folder or below `audio_roots`.",
            )
        try:
            path = Path(os.path.realpath(self.folder / content))
        except (OSError, ValueError) as error:
            raise _missing(content) from error
        if not any(path.is_relative_to(root) for root in self.roots):
            raise InputError(
                ErrorCode.INPUT_AUDIO_FORBIDDEN,
                f"The audio {printable(content, 200)!r} is outside the allowed folders.",
                "Move it below the input's folder, or add its folder to the setting `audio_roots`.",
            )
        return str(path)

    def read(self, content: str) -> ReferenceAudio:
        """Reads the audio file that a line names, and checks that it is audio.

        Raises `input.audio_missing`, `input.audio_forbidden`, `input.audio_unreadable` or
        `input.too_long`; `StoreError` if the store fails.
        """
        address = self.locate(content)
        inside = f"{self.store.url}/"
        if address.startswith(inside):
            data = _read_object(self.store, address.removeprefix(inside), content)
        else:
            data = _read_file(address, content)
        return checked_audio(data, _named(content), self.check)

    def keys(self, keep: Callable[[ReferenceAudio], str]) -> Callable[[str], str]:
        """Returns a function that maps the content of an audio message to the result of `keep` for its audio,
        and reads each address once. It raises what `read` and `keep` raise."""
        known = lru_cache(_KNOWN_PATHS)(lambda _, content: keep(self.read(content)))
        return lambda content: known(self.locate(content), content)


def checked_audio(data: bytes, name: str, check: Callable[[bytes], object] | None = None) -> ReferenceAudio:
    """An audio file that can be read and passes `check`. `name`: the subject of error messages. Raises
    `InputError`."""
    from pipelines.audio import read_header  # imported only if there is audio

    if len(data) > MAX_REFERENCE_BYTES:
        raise _unreadable(name, f"it is larger than {MAX_REFERENCE_BYTES >> 20} MiB")
    try:
        found = read_header(data, MAX_AUDIO_SECONDS)
        if check is not None:
            check(data)
    except InputError as error:
        raise InputError(
            error.code, f"{name} cannot be used: {error.message.removeprefix('The audio ')}", error.advice
        ) from error
    if found.format not in _EXTENSIONS or found.frames <= 0:
        raise _unreadable(
            name, f"it is {found.format} with {found.frames} samples, not WAV, FLAC, OGG or MP3"
        )
    return ReferenceAudio(data, sha256_of(data), _EXTENSIONS[found.format])


def put_reference(store: ObjectStore, job_id: str, audio: ReferenceAudio) -> str:
    """Stores an audio file of a job, once per content; returns its key. Raises `StoreError`."""
    key = reference_key(job_id, audio.sha256, audio.ext)
    put_hashed(store, key, audio.data, audio.sha256)
    return key


def read_audio_file(path: Path) -> ReferenceAudio:
    """The audio file at a path given by the user. Raises `InputError` in the same cases as
    `ReferenceReader.read`."""
    return checked_audio(_read_file(os.path.realpath(path), str(path)), _named(str(path)))


def load_reference(store: ObjectStore, job_id: str, content: str) -> bytes:
    """The encoded audio of a `ShardLine`'s audio message, whose content is a key of the job's references.

    Raises `input.audio_forbidden` for another key, `input.audio_missing` for a missing object, `StoreError` if
    the store fails, and `store.conflict` if the content does not match its key.
    """
    if not content.startswith(references_prefix(job_id)):
        raise InputError(
            ErrorCode.INPUT_AUDIO_FORBIDDEN,
            f"{printable(content, 200)!r} is not a reference of job {job_id}.",
            "Submit it again.",
        )
    data = _read_object(store, content, content)
    if is_reference_key(content, job_id) and sha256_of(data) not in content:
        raise StoreError(
            ErrorCode.STORE_CONFLICT,
            f"The object {content} was changed after submit.",
            "Restore it, or submit the input again.",
        )
    return data


def _read_object(store: ObjectStore, key: str, content: str) -> bytes:
    try:
        with store.open(key) as stream:
            return stream.read(MAX_REFERENCE_BYTES + 1)
    except StoreError as error:
        if error.code in (ErrorCode.STORE_MISSING, ErrorCode.STORE_BAD_KEY):
            raise _missing(content) from error
        raise


def _read_file(path: str, content: str) -> bytes:
    # The path has no symbolic links; a link that was created since then is not followed.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise _unreadable(_named(content), "it is not a regular file")
            return stream.read(MAX_REFERENCE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(content) from error
    except OSError as error:
        raise _unreadable(_named(content), error.strerror or "it cannot be read") from error


def _missing(content: str) -> InputError:
    return InputError(
        ErrorCode.INPUT_AUDIO_MISSING,
        f"There is no audio file {printable(content, 200)!r}.",
        "Check the path in the line.",
    )


def _named(content: str) -> str:
    return f"The audio {printable(content, 200)!r}"


def _unreadable(name: str, reason: str) -> InputError:
    return InputError(
        ErrorCode.INPUT_AUDIO_UNREADABLE, f"{name} cannot be used: {reason}.", "Use WAV, FLAC, OGG or MP3."
    )

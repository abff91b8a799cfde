"""Stored voices: a recording and its text under a name, one private file for each."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelines.errors import ConfigError, ErrorCode, InputError, input_too_long, invalid
from pipelines.recording import DRAFT, read_recording, write_file
from pipelines.request import Generation, Message
from pipelines.validation import OPENAI_VOICES

#: Pattern of names: valid as file names on every file system, and never a path.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
#: Maximum number of voices of a folder, of bytes of a recording, and of characters of its text.
MAX_VOICES = 256
MAX_RECORDING_BYTES = 8 << 20
MAX_TEXT_CHARACTERS = 5000
#: Name that clients send to a model without voices, if their API requires one.
DEFAULT_VOICE = "default"
#: Names that have another meaning for a server.
RESERVED = frozenset((*OPENAI_VOICES, DEFAULT_VOICE))
_SUFFIX = ".voice"


class StoredVoice(msgspec.Struct, frozen=True):
    """A stored voice, as its file holds it."""

    name: str
    #: The encoded file of the recording (WAV, FLAC, OGG or MP3).
    recording: bytes
    #: The words of the recording; empty if unknown.
    text: str = ""
    #: Unix time.
    created_at: int = 0


class VoiceExistsError(Exception):
    """A voice of this name exists, and `replace` is not set."""


@dataclass(frozen=True, slots=True)
class VoiceFolder:
    """The voices of a folder, which several processes may use at once; files are written atomically."""

    path: Path
    max_voices: int = MAX_VOICES
    #: Maximum size of a recording.
    max_bytes: int = MAX_RECORDING_BYTES

    def names(self) -> list[str]:
        """All names, sorted."""
        try:
            found = [path.stem for path in self.path.iterdir() if path.suffix == _SUFFIX]
        except OSError:
            return []
        return sorted(name for name in found if NAME.fullmatch(name))

    def has(self, name: str) -> bool:
        """Whether there is a file for this name; it may be damaged."""
        return NAME.fullmatch(name) is not None and self._path(name).is_file()

    def get(self, name: str) -> StoredVoice | None:
        """The voice of this name; None if there is none. Raises `input.audio_unreadable` for a file that
        cannot be read."""
        if not NAME.fullmatch(name):
            return None
        try:
            return msgspec.msgpack.decode(self._path(name).read_bytes(), type=StoredVoice)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            reason = getattr(error, "strerror", None) or "its file is damaged"
            raise InputError(
                ErrorCode.INPUT_AUDIO_UNREADABLE,
                f"The stored voice {name!r} cannot be read: {reason}.",
                "Delete it, and add it again.",
            ) from error

    def add(self, name: str, recording: bytes, text: str, *, replace: bool = True) -> StoredVoice:
        """Stores a voice; `replace` overwrites one of this name.

        Raises `VoiceExistsError` without `replace`; `InputError` for an invalid or reserved name, a recording
        that is unusable or too large, a text that is too long, and a full folder; `ConfigError`
        (`config.invalid`) if the folder cannot be written.
        """
        message = "The name of a voice has 1 to 64 lowercase letters, digits, `-` and `_`, and begins with a letter or a digit."
        if name in RESERVED:
            message = f"The name {name!r} is reserved: clients of OpenAI send it."
        if name in RESERVED or not NAME.fullmatch(name):
            raise InputError(ErrorCode.INPUT_BAD_GENERATION, message, "Choose another name.")
        text = text.strip()
        if len(text) > MAX_TEXT_CHARACTERS:
            raise input_too_long(
                f"The text of the recording has {len(text):,} characters; {MAX_TEXT_CHARACTERS:,} are the maximum.",
                "Give only the words of the recording.",
            )
        if len(recording) > self.max_bytes:
            raise InputError(
                ErrorCode.INPUT_REFERENCE_LENGTH,
                f"The recording has {len(recording):,} bytes; {self.max_bytes:,} are the maximum.",
                "Give a shorter one, or FLAC.",
            )
        read_recording(recording)
        voice = StoredVoice(name, recording, text, int(time.time()))
        try:
            self._write(name, msgspec.msgpack.encode(voice), replace=replace)
        except OSError as error:
            raise _not_writable(error, "Free some space, or set another folder.") from error
        return voice

    def delete(self, name: str) -> bool:
        """Deletes a voice; False if there is none. Raises `ConfigError` (`config.invalid`) if the folder cannot
        be written."""
        try:
            if NAME.fullmatch(name):
                self._path(name).unlink()
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _not_writable(error, "Let this user write there.") from error
        return False

    def _path(self, name: str) -> Path:
        return self.path / f"{name}{_SUFFIX}"

    def _write(self, name: str, data: bytes, *, replace: bool) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            # On a file system without locks, unfinished files of writers that died are kept, and the maximum
            # number of voices may be exceeded.
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
                for draft in self.path.glob(f"{DRAFT}*"):
                    draft.unlink(missing_ok=True)
            names = self.names()
            if name in names and not replace:
                raise VoiceExistsError(name)
            if name not in names and len(names) >= self.max_voices:
                raise input_too_long(
                    f"There are {len(names)} voices; that is the maximum.",
                    "Delete one first.",
                )
            write_file(self._path(name), data)
        finally:
            os.close(folder)


def in_voice_of(
    messages: Sequence[Message], generation: Generation, recording: str | bytes, text: str
) -> tuple[list[Message], Generation]:
    """The messages and settings of a request that is spoken in the voice of a recording. The last message is
    the text to speak.

    `text`: the recording's text; a `reference_text` of the settings takes precedence.
    """
    reference_text = generation.reference_text or text or None
    cloned = [*messages[:-1], Message("user", "audio", recording), messages[-1]]
    return cloned, msgspec.structs.replace(generation, voice=None, reference_text=reference_text)


def _not_writable(error: OSError, advice: str) -> ConfigError:
    return invalid(f"The folder of voices cannot be written: {error.strerror}.", advice)

"""Audio that a request brings along: base64 or a data URL, checked by its header before any pipeline sees it."""

from __future__ import annotations

import base64
import binascii
import re

from pipelines.audio import read_header
from pipelines.errors import ErrorCode, InputError

#: What each name may be, in libsndfile's words.
_KINDS = {"wav": ("WAV", "WAVEX", "RF64"), "flac": ("FLAC",), "ogg": ("OGG",), "opus": ("OGG",), "mp3": ("MP3",)}
_KNOWN = frozenset(kind for kinds in _KINDS.values() for kind in kinds)
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.+-]+=[\w.+-]*)*;base64,", re.ASCII)
#: Of a data URL, up to its comma.
_HEAD_CHARACTERS = 256
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


def read_audio(text: str, max_seconds: float, declared: str | None = None) -> bytes:
    """The encoded file behind base64 or a data URL; nothing is ever fetched or opened by name.

    `declared` is the format that the client says it is. Raises `InputError`: `input.audio_forbidden` for another URL,
    `input.audio_unreadable` for what is not base64, not audio or not of that format; those of `pipelines.audio.read_header`.
    """
    if declared is not None and declared not in _KINDS:
        raise _unreadable(f"The audio format {declared[:20]!r} is not read", f"Formats are: {', '.join(_KINDS)}.")
    data = _decoded(text)
    header = read_header(data, max_seconds)
    kind = header.kind
    if kind not in _KNOWN or header.frames <= 0:
        raise _unreadable(f"The audio is {kind} with {header.frames} samples", "Give a WAV, FLAC, OGG or MP3 file with sound.")
    if declared is not None and kind not in _KINDS[declared]:
        raise _unreadable(f"The audio is {kind}, but its `format` says {declared!r}", "Correct the format.")
    return data


def _decoded(text: str) -> bytes:
    payload = text
    if _SCHEME.match(text[:64]):
        found = _DATA_URL.match(text[:_HEAD_CHARACTERS])
        if found is None:
            if text[:5].lower() == "data:":
                raise _unreadable("The data URL is not base64", "Write it as data:audio/wav;base64,...")
            raise InputError(
                ErrorCode.INPUT_AUDIO_FORBIDDEN,
                f"The audio is the address {text[:80]!r}; none is fetched.",
                "Send the file itself, as base64 or in a data URL.",
            )
        payload = text[found.end() :]
    try:
        data = base64.b64decode("".join(payload.split()) if "\n" in payload else payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _unreadable("The audio is not base64", "Send the bytes of the file as base64, with its padding.") from error
    if not data:
        raise _unreadable("The audio is empty", "Send the bytes of the file as base64.")
    return data


def _unreadable(message: str, advice: str) -> InputError:
    return InputError(ErrorCode.INPUT_AUDIO_UNREADABLE, f"{message}.", advice)

"""The settings of both services, and the frames for errors of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipecat.frames.frames import ErrorFrame
from pipecat.services.settings import TTSSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory, classify_http_status_code

#: Errors that every text causes until the settings change.
_OF_SETTINGS = frozenset(
    {"input.unknown_voice", "input.unknown_language", "input.unsupported", "model_not_found"}
)
#: Code of a language -> its name in models of Nightjar.
_LANGUAGES = {
    "ar": "Arabic",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "hi": "Hindi",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "tr": "Turkish",
    "zh": "Chinese",
}


@dataclass
class NightjarTTSSettings(TTSSettings):
    """Settings that can change while a pipeline runs.

    `model`: the name under which the server serves its model. `voice`: one of the model's voices, or a stored
    one; None: the model's default. `language`: a `Language`, or the model's name for a language; None: the
    model decides. `extra`: further fields of a request, such as `seed`.
    """


def complete(delta: NightjarTTSSettings | None) -> NightjarTTSSettings:
    """Complete settings; those that are not given are None."""
    settings = NightjarTTSSettings(model=None, voice=None, language=None)
    if delta is not None:
        settings.apply_update(delta)
    return settings


def language_name(language: Language) -> str:
    """The name of a language, without its region."""
    code = language.value.split("-")[0]
    return _LANGUAGES.get(code, code)


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def error_frame(message: str, code: str | None, status: int | None) -> ErrorFrame:
    """The frame for an error of the server. An error of a text leaves the service usable, because the next
    text may be valid."""
    if code in _OF_SETTINGS:
        category = ErrorCategory.INVALID_REQUEST
    elif status in (400, 413, 422):
        category = ErrorCategory.APPLICATION
    else:
        category = classify_http_status_code(status) if status is not None else ErrorCategory.SERVER
    return ErrorFrame(f"{message} ({code})" if code else message, category=category)

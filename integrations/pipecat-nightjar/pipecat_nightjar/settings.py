"""What both services send: the settings of a voice, and what an error of the server means to a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipecat.frames.frames import ErrorFrame
from pipecat.services.settings import TTSSettings
from pipecat.utils.errors import ErrorCategory, classify_http_status_code

#: Errors that every other text would meet too, until the settings change.
_OF_SETTINGS = frozenset({"input.unknown_voice", "input.unknown_language", "input.unsupported", "model_not_found"})


@dataclass
class NightjarTTSSettings(TTSSettings):
    """Settings that can change while a pipeline runs.

    `model`: the name under which the server serves its model. `voice`: one of the model's voices, or a stored one; None for the
    model's own. `language`: as the model names it; None leaves it to the model.
    """


def given(settings: TTSSettings, **names: str) -> dict[str, Any]:
    """Fields of a request, `names` maps each to its setting; those that are None are left out."""
    values = {field: getattr(settings, name) for field, name in names.items()}
    return {field: value for field, value in values.items() if value is not None} | settings.extra


def error_frame(message: str, code: str | None, status: int | None) -> ErrorFrame:
    """An error of the server. One that lies in a text leaves the service usable: the next text may be fine."""
    if code in _OF_SETTINGS:
        category = ErrorCategory.INVALID_REQUEST
    elif status in (400, 413, 422) or (code or "").startswith("input."):
        category = ErrorCategory.APPLICATION
    else:
        category = classify_http_status_code(status) if status is not None else ErrorCategory.SERVER
    return ErrorFrame(f"{message} ({code})" if code else message, category=category)

"""The voices that clients may ask for, by the model's names and by those that they bring along from other services."""

from __future__ import annotations

import msgspec

from pipelines.errors import ErrorCode
from pipelines.request import Generation, Message
from pipelines.serving.cartesia import SpeechFields, language_of
from pipelines.serving.errors import ApiError, bad_request
from pipelines.serving.model import ServedModel
from pipelines.serving.options import ServeOptions
from pipelines.validation import check_generation


class Voices:
    """What is known of voices; shared by all routes."""

    def __init__(self, model: ServedModel, options: ServeOptions) -> None:
        self._model = model
        self._options = options

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` (404) for a model that is not served here; a client that names none means the one that is."""
        if name is not None and name not in self._options.names:
            message = f"The model {name[:100]!r} is not served here. Served is: {', '.join(self._options.names)}."
            raise ApiError(404, message, "model_not_found", "model")

    def settings(self, fields: SpeechFields) -> tuple[tuple[Message, ...], Generation]:
        """The messages before the text, and the settings, of a request in Cartesia's words. Raises `ApiError` (400)."""
        able = self._model.card.capabilities
        if able.multi_turn:
            raise bad_request("This model answers dialogues. Use /v1/chat/completions.", ErrorCode.INPUT_UNSUPPORTED.value, "model_id")
        asked = None if fields.voice is None else fields.voice.id
        given = {name: value for name, value in msgspec.structs.asdict(fields.generation_config).items() if name != "seed"}
        generation = Generation(voice=self._model.voice(asked), language=language_of(fields.language, able.languages), **given)
        check_generation(generation)
        return (), generation

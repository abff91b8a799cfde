"""The voices that clients may ask for, by the model's names and by those that they bring along from other services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from pydantic import Field

from pipelines.errors import ErrorCode, InputError
from pipelines.request import MAX_REFERENCE_SECONDS, Generation, Message, SynthesisRequest
from pipelines.serving.cartesia import SpeechFields, language_of
from pipelines.serving.encoding import read_audio
from pipelines.serving.errors import ApiError, Body, bad_request
from pipelines.serving.model import DEFAULT_VOICE, ServedModel
from pipelines.serving.options import ServeOptions
from pipelines.stored_voices import StoredVoice, VoiceFolder
from pipelines.validation import check_generation

OPENAI_VOICES = ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
#: Of a stored voice's text.
MAX_TEXT_CHARACTERS = 5000


class VoiceBody(Body):
    """What a client sends to keep a voice."""

    name: str
    #: Base64 or a data URL of a WAV, FLAC, OGG or MP3 file.
    recording: str
    text: Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)] = ""
    replace: bool = False


class Voices:
    """What is known of voices; shared by all routes."""

    def __init__(self, model: ServedModel, options: ServeOptions) -> None:
        self._model = model
        self._options = options
        folder = options.voices_folder
        self._folder = None if folder is None else VoiceFolder(folder, options.stored_voices, options.voice_bytes)

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` (404) for a model that is not served here; a client that names none means the one that is."""
        if name is not None and name not in self._options.names:
            message = f"The model {name[:100]!r} is not served here. Served is: {', '.join(self._options.names)}."
            raise ApiError(404, message, "model_not_found", "model")

    def named(self, asked: str | None) -> str | StoredVoice | None:
        """What is behind a name: a voice of the model, a stored one, or None for the model's own.

        OpenAI's names stand for voices of the model, each for the same one at all times. A name that nobody knows stays as it is; the
        model refuses it.
        """
        voices = self._model.card.capabilities.voices
        if asked is None or asked in voices:
            return asked
        stored = self._folder.get(asked) if self._folder is not None else None
        if stored is not None:
            return stored
        if asked in OPENAI_VOICES:
            return voices[OPENAI_VOICES.index(asked) % len(voices)] if voices else None
        return self._model.voice(asked)

    def spoken_by(
        self, asked: str | None, generation: Generation, before: Sequence[Message], text: str
    ) -> tuple[list[Message], Generation]:
        """The messages and the settings of a text in the voice of this name. `before`: recordings that the request brought along.

        Raises `InputError` where there are such recordings and the name is that of another one.
        """
        voice = self.named(asked)
        messages = [*before, Message("user", "text", text)]
        if not isinstance(voice, StoredVoice):
            return messages, msgspec.structs.replace(generation, voice=voice)
        if before:
            raise InputError(
                ErrorCode.INPUT_UNSUPPORTED, f"The voice {asked!r} has a recording, and the request another one.", "Leave one of them out."
            )
        said = generation.reference_text or voice.text or None
        return [Message("user", "audio", voice.recording), *messages], msgspec.structs.replace(generation, reference_text=said)

    def request(self, fields: SpeechFields, request_id: str) -> SynthesisRequest:
        """A request in Cartesia's words, with its whole transcript. Raises `ApiError` (400), and `InputError` for a bad setting."""
        able = self._model.card.capabilities
        if able.multi_turn:
            raise bad_request("This model answers dialogues. Use /v1/chat/completions.", ErrorCode.INPUT_UNSUPPORTED.value, "model_id")
        given = {name: value for name, value in msgspec.structs.asdict(fields.generation_config).items() if name != "seed"}
        generation = Generation(language=language_of(fields.language, able.languages), **given)
        check_generation(generation)
        messages, generation = self.spoken_by(None if fields.voice is None else fields.voice.id, generation, (), fields.transcript)
        return SynthesisRequest(request_id, tuple(messages), generation, fields.seed)

    def cards(self) -> list[dict[str, str]]:
        """All voices that may be asked for by their own names."""
        cards = [{"id": name, "object": "voice", "kind": "model"} for name in self._model.card.capabilities.voices]
        stored = self._folder.names() if self._folder is not None else []
        return cards + [{"id": name, "object": "voice", "kind": "stored"} for name in stored]

    def add(self, body: VoiceBody) -> dict[str, object]:
        """Keeps a voice. Raises `ApiError` where the model cannot clone or has the name itself, and `InputError` as `VoiceFolder.add`."""
        able = self._model.card.capabilities
        if not able.cloning or self._folder is None:
            raise bad_request("This model clones no voices.", ErrorCode.INPUT_UNSUPPORTED.value, "name")
        if body.name in (*able.voices, *OPENAI_VOICES, DEFAULT_VOICE):
            raise ApiError(409, f"The name {body.name!r} is taken. Choose another name.", "voice_exists", "name")
        if not body.replace and body.name in self._folder.names():
            raise ApiError(409, f"There is a voice {body.name!r}. Delete it, or send `replace`.", "voice_exists", "name")
        if able.needs_reference_text and not body.text.strip():
            raise InputError(ErrorCode.INPUT_REFERENCE_TEXT, "This model needs the text of a recording.", "Send it as `text`.")
        recording = read_audio(body.recording, MAX_REFERENCE_SECONDS)
        voice = self._folder.add(body.name, recording, body.text.strip())
        return {"id": voice.name, "object": "voice", "kind": "stored", "created_at": voice.created_at}

    def delete(self, name: str) -> dict[str, object]:
        """Forgets a stored voice. Raises `ApiError` (404)."""
        if self._folder is None or not self._folder.delete(name):
            raise ApiError(404, f"There is no stored voice {name[:100]!r}.", "voice_not_found", "name")
        return {"id": name, "object": "voice", "deleted": True}

"""The voices of a server: the model's voices, stored voices, and other services' names for voices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated

import msgspec
from pydantic import Field

from pipelines.errors import ErrorCode, InputError, unsupported
from pipelines.recording import MAX_REFERENCE_SECONDS
from pipelines.request import Generation, Message, SynthesisRequest
from pipelines.serving.encoding import read_audio
from pipelines.serving.errors import ApiError, JsonObject, bad_request
from pipelines.serving.model import ServedModel
from pipelines.serving.request_body import Body
from pipelines.stored_voices import (
    MAX_TEXT_CHARACTERS,
    RESERVED,
    StoredVoice,
    VoiceExistsError,
    VoiceFolder,
    in_voice_of,
)
from pipelines.validation import check_generation, own_voice

#: Maximum voices in an error message.
_SHOWN = 8


class VoiceBody(Body):
    """The request to store a voice."""

    name: str
    #: Base64 or a data URL of a WAV, FLAC, OGG or MP3 file.
    recording: str
    text: Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)] = ""
    replace: bool = False


class Voices:
    """All voices of a server; shared by all routes."""

    def __init__(self, model: ServedModel) -> None:
        self._capabilities = model.card.capabilities
        self._options = model.options
        folder = model.options.voices_folder
        self._folder = folder and VoiceFolder(folder)

    def check_speaks(self, param: str) -> None:
        """Raises `ApiError` (400) if the model answers dialogues. `param`: the field that names the model in a
        request for speech."""
        if self._capabilities.multi_turn:
            raise bad_request(
                "This model answers dialogues. Use /v1/chat/completions.", ErrorCode.INPUT_UNSUPPORTED, param
            )

    async def request(
        self,
        request_id: str,
        seed: int,
        voice_name: str | None,
        generation: Generation,
        text: str,
        recordings: Sequence[str] = (),
        timestamps: bool = False,
    ) -> SynthesisRequest:
        """A request for a text in the named voice, or in the voices of its recordings.

        Raises `InputError` for a bad setting or recording, for recordings together with a stored voice, and
        for an unknown voice of a model that clones.
        """
        check_generation(generation)

        def build() -> SynthesisRequest:
            seconds = min(self._options.max_audio_seconds, MAX_REFERENCE_SECONDS)
            messages = [Message("user", "audio", read_audio(audio, seconds)) for audio in recordings]
            messages.append(Message("user", "text", text))
            voice = self.named(voice_name)
            if isinstance(voice, StoredVoice):
                if recordings:
                    raise unsupported(
                        f"The voice {voice_name!r} has a recording, and the request has another one.",
                        "Leave one of them out.",
                    )
                messages, spoken = in_voice_of(messages, generation, voice.recording, voice.text)
            elif not (voice is None or recordings or self._is_own(voice)) and self._capabilities.cloning:
                names = list(self._names())
                near = names if len(names) <= _SHOWN else get_close_matches(voice, names, _SHOWN, 0.0)
                raise InputError(
                    ErrorCode.INPUT_UNKNOWN_VOICE,
                    f"There is no voice {voice[:80]!r}.",
                    f"Choose one of: {', '.join(near)}."
                    if near
                    else "No voice is stored here: add one, or send a recording.",
                )
            else:
                spoken = msgspec.structs.replace(generation, voice=voice)
            return SynthesisRequest(request_id, tuple(messages), spoken, seed, timestamps=timestamps)

        # Recordings are read in a thread. Other requests are built here, which is faster than a thread.
        name, folder = voice_name or "", self._folder
        if recordings or (folder is not None and not self._is_own(name) and folder.has(name)):
            return await asyncio.to_thread(build)
        return build()

    def named(self, voice_name: str | None) -> str | StoredVoice | None:
        """The voice of a name: a voice of the model, a stored one, or None for the model's default.

        Each of OpenAI's names always selects the same voice of the model. An unknown name is returned as it
        is.
        """
        if voice_name is None:
            return None
        if (own := own_voice(voice_name, self._capabilities.voices)) is not None:
            return own
        if self._folder is not None and (stored := self._folder.get(voice_name)) is not None:
            return stored
        return None if voice_name in RESERVED else voice_name

    def _names(self) -> dict[str, str]:
        """The names of all voices, each with its kind: `model` or `stored`."""
        stored = self._folder.names() if self._folder is not None else []
        return dict.fromkeys(self._capabilities.voices, "model") | dict.fromkeys(stored, "stored")

    def listed(self) -> JsonObject:
        """All voices in OpenAI's format."""
        names = self._names()
        cards = [{"id": name, "object": "voice", "kind": kind} for name, kind in names.items()]
        return {"object": "list", "data": cards, "voices": list(names)}

    def page(self, starting_after: str | None = None) -> JsonObject:
        """All voices in Cartesia's format, on one page; a page after any voice is empty."""
        cards = [] if starting_after else [_card(name, kind) for name, kind in self._names().items()]
        return {"data": cards, "has_more": False}

    def card(self, name: str) -> JsonObject:
        """One voice in Cartesia's format. Raises `ApiError` (404)."""
        if (kind := self._names().get(name)) is None:
            raise _no_voice(name)
        return _card(name, kind)

    def add(self, body: VoiceBody) -> dict[str, object]:
        """Stores a voice. Raises `ApiError` if the model cannot clone or the name is taken, `InputError` and
        `ConfigError` as `VoiceFolder.add`."""
        if not self._capabilities.cloning or self._folder is None:
            raise bad_request("This model clones no voices.", ErrorCode.INPUT_UNSUPPORTED, "name")
        if body.name in RESERVED or self._is_own(body.name):
            raise ApiError(
                409, f"The name {body.name!r} is taken. Choose another name.", "voice_exists", "name"
            )
        if self._capabilities.needs_reference_text and not body.text.strip():
            raise InputError(
                ErrorCode.INPUT_REFERENCE_TEXT,
                "This model needs the text of a recording.",
                "Send it as `text`.",
            )
        recording = read_audio(body.recording, MAX_REFERENCE_SECONDS)
        try:
            voice = self._folder.add(body.name, recording, body.text, replace=body.replace)
        except VoiceExistsError:
            raise ApiError(
                409, f"There is a voice {body.name!r}. Delete it, or send `replace`.", "voice_exists", "name"
            ) from None
        return {"id": voice.name, "object": "voice", "kind": "stored", "created_at": voice.created_at}

    def delete(self, name: str) -> dict[str, object]:
        """Deletes a stored voice. Raises `ApiError` (404) if there is none, and `ConfigError` if the folder
        cannot be written."""
        if self._folder is None or not self._folder.delete(name):
            raise _no_voice(name, "stored voice")
        return {"id": name, "object": "voice", "deleted": True}

    def _is_own(self, name: str) -> bool:
        """Whether the model has a voice of this name."""
        return own_voice(name, self._capabilities.voices) is not None


def _card(name: str, kind: str) -> JsonObject:
    own = kind == "stored"
    access = "private" if own else "public"
    return {"id": name, "name": name, "description": "", "is_owner": own, "access": access}


def _no_voice(name: str, what: str = "voice") -> ApiError:
    return ApiError(404, f"There is no {what} {name[:100]!r}.", "voice_not_found", "name")

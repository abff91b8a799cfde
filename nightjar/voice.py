"""An open model that speaks single texts, whole or as a stream. A notebook shows the speech with a player."""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from jobs.job_options import plain_numbers
from jobs.settings import load_settings
from jobs.voices import JobVoices, voice_folder
from pipelines.audio import encode
from pipelines.audio_format import AudioFormat
from pipelines.errors import ErrorCode, InputError, StoreError, SynthesisError, invalid, nearest, unsupported
from pipelines.registry import ModelCard, describe, open_pipeline
from pipelines.request import Generation, Message, Pipeline, SynthesisRequest, stream, submit
from pipelines.stored_voices import in_voice_of
from pipelines.validation import OPENAI_VOICES, check_generation, own_voice

#: The types of an argument that is a path.
PATH = (str, os.PathLike)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], words: str) -> None:
    """Raises `config.invalid` for an argument of another type. True and False do not count as numbers."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise invalid(
            f"The argument `{name}` is {value!r:.100}.", f"Give {words}; docs/python.md lists the arguments."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """Speech. A notebook shows it with a player."""

    #: float32 [samples], mono, within [-1, 1].
    samples: NDArray[np.float32]
    sample_rate: int
    text: str = ""

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate

    def save(self, path: str | Path) -> Path:
        """Writes an audio file in the format of its extension: `.wav`, `.flac`, `.mp3` or `.opus`. Returns the
        path.

        Raises `config.invalid` for another extension, and `StoreError` (`store.forbidden`) for a file that
        cannot be written.
        """
        check_type("path", path, PATH, "the path of a file")
        path = Path(path)
        data = encode(self.samples, self.sample_rate, cast("AudioFormat", path.suffix[1:].lower()))
        try:
            path.write_bytes(data)
        except OSError as error:
            raise StoreError(
                ErrorCode.STORE_FORBIDDEN,
                f"The file {str(path)!r:.200} cannot be written: {error.strerror}.",
                "Give a writable path.",
            ) from error
        return path

    def __repr__(self) -> str:
        return f"Sound({self.seconds:.2f} s, {self.sample_rate} Hz, {self.text[:60]!r})"

    def _repr_html_(self) -> str:
        data = base64.b64encode(encode(self.samples, self.sample_rate, "wav")).decode()
        return f'<figure><figcaption>{escape(self.text)}</figcaption><audio controls src="data:audio/wav;base64,{data}"></audio></figure>'


class Voice:
    """An open model, which `open_model` returns. As a context manager it closes the model at the end."""

    def __init__(self, card: ModelCard, pipeline: Pipeline) -> None:
        self.card = card
        self._pipeline = pipeline
        self._closed = False

    def speak(self, text: str, **asked: Any) -> Sound:
        """The speech of a text.

        `voice`, `language`, `instruct`, `seed` and the other keys of `generation` mean the same as in a line of
        an input; `voice` may be the name of a stored voice. `reference` is a recording of the voice to clone:
        the path or the bytes of an audio file. Raises `InputError` for a request that the model cannot fulfil,
        and `SynthesisError` (`synth.aborted`) after `close`.
        """
        speech = submit(self._pipeline, self._request(text, asked)).result()
        return Sound(speech.samples, speech.sample_rate, text)

    def stream(self, text: str, **asked: Any) -> Iterator[Sound]:
        """Yields the speech of a text in chunks as they are synthesized. Takes the arguments of `speak`."""
        for chunk in stream(self._pipeline, self._request(text, asked)):
            if len(chunk.samples):
                yield Sound(chunk.samples, chunk.sample_rate)

    def close(self) -> None:
        """Closes the model and frees its memory."""
        self._closed = True
        self._pipeline.close()

    def __enter__(self) -> Voice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Voice({self.card.name!r}, {self.card.sample_rate} Hz)"

    def _request(self, text: str, asked: dict[str, Any]) -> SynthesisRequest:
        if self._closed:
            raise SynthesisError(
                ErrorCode.SYNTH_ABORTED,
                f"The model {self.card.name} was closed.",
                "Open it again with `nightjar.open_model`, or speak within its `with` block.",
            )
        check_type("text", text, str, 'one text, such as "Good evening."; for many use `nightjar.run`')
        reference = asked.pop("reference", None)
        unknown = sorted(asked.keys() - set(Generation.__struct_fields__))
        if unknown:
            known = ("reference", *Generation.__struct_fields__)
            raise InputError(
                ErrorCode.INPUT_BAD_GENERATION,
                f"There is no setting {unknown[0]!r}.",
                f"{nearest(unknown[0], known)}The settings are: {', '.join(known)}.",
            )
        messages = [Message("user", "text", text)]
        if reference is not None:
            words = "the path of a recording, or the bytes of its file"
            check_type("reference", reference, (*PATH, bytes), words)
            try:
                recording = reference if isinstance(reference, bytes) else Path(reference).read_bytes()
            except OSError as error:
                raise InputError(
                    ErrorCode.INPUT_AUDIO_MISSING,
                    f"The recording {str(reference)!r} cannot be read: {error.strerror}.",
                    "Check the path.",
                ) from None
            messages.insert(0, Message("user", "audio", recording))
        try:
            wanted = msgspec.convert(plain_numbers(asked), Generation)
        except msgspec.ValidationError as error:
            raise InputError(
                ErrorCode.INPUT_BAD_GENERATION,
                f"The settings cannot be used: {error}.",
                "Give numbers and texts as docs/submit.md says.",
            ) from None
        check_generation(wanted)
        messages, generation = self._in_voice(messages, msgspec.structs.replace(wanted, seed=None))
        return SynthesisRequest(uuid.uuid4().hex, tuple(messages), generation, wanted.seed or 0)

    def _in_voice(self, messages: list[Message], generation: Generation) -> tuple[list[Message], Generation]:
        """The messages and settings with the stored voice that they name, if any. Raises `InputError`."""
        asked = generation.voice
        if (
            asked is None
            or own_voice(asked, self.card.capabilities.voices) is not None
            or asked in OPENAI_VOICES
        ):
            return messages, generation
        # Read now, because a voice may have been added after the model was opened.
        voice = JobVoices(self.card, voice_folder(load_settings())).get(asked)
        if len(messages) > 1:
            raise unsupported(
                f"The voice {asked!r} has its own recording, and `reference` is another one.",
                "Leave one of them out.",
            )
        return in_voice_of(messages, generation, voice.recording, voice.text)


def open_model(model: str | Path = "hibari", **options: Any) -> Voice:
    """Opens a model by its name or the folder of its checkpoint. `options`: the options of its family, such as
    `device="cuda"`; docs/models.md lists them.

    Raises `ModelError`, and `ConfigError` for an option that the model does not have or that cannot be used on
    this machine.
    """
    check_type("model", model, PATH, "the name of a model, or the folder of a checkpoint")
    return Voice(describe(str(model)), open_pipeline(str(model), **options))

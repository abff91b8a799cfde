"""From a dialogue to the body of a request: one chat message a triple, in the fields of the published SpeechLM server."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jobs.dialogue import Dialogue, speech_position
from jobs.references import ReferenceReader
from jobs.seeds import item_seed
from pipelines.errors import ErrorCode, InputError
from pipelines.request import Generation, Mode
from pipelines.task import check_generation, either

#: Where a text ends for the published server, which has to be told; ours knows.
_END_OF_TURN = 3
#: What the published clients send where nobody says otherwise (specification of the API, one set a mode).
_DEFAULTS: dict[Mode, Generation] = {
    "text_only": Generation(max_tokens=4096, temperature=0.6, top_k=20),
    "text_audio": Generation(max_tokens=12_000, temperature=0.8, top_k=20, text_temperature=0.6, audio_temperature=0.8, audio_top_k=20),
}
_XARGS = {"text_temperature": "text_temperature", "audio_temperature": "audio_temperature", "audio_top_k": "audio_topk", "cfg": "cfg"}
_FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "max_seconds")


@dataclass(frozen=True, slots=True)
class Manner:
    """How all dialogues of a file are asked; what a line's `generation` says goes before it."""

    model: str
    mode: Mode
    generation: Generation = field(default_factory=Generation)
    seed: int = 0

    def facts(self) -> dict[str, Any]:
        """What two runs must share to continue one another."""
        said = msgspec.to_builtins(self.generation)
        return {"model": self.model, "mode": self.mode, "seed": self.seed, "generation": said}


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and the answer that the file expects."""

    body: dict[str, Any]
    seed: int
    reference: str | None


def question(dialogue: Dialogue, manner: Manner, reader: ReferenceReader) -> Question:
    """The request of a dialogue.

    Speech is asked for without the assistant's messages, as the published clients do. For text the assistant's earlier turns
    are part of the dialogue, and what it says after the last user message is the answer to compare with, never part of the
    question. Raises `InputError` for what cannot be asked.
    """
    generation = (dialogue.generation or Generation()).over(manner.generation)
    mode: Mode = generation.mode or manner.mode
    generation = _one_by_one(generation, mode).over(_DEFAULTS[mode])
    check_generation(generation)
    _refuse_unsendable(generation)
    last = max((place for place, message in enumerate(dialogue.messages) if message[0] == "user"), default=-1)
    asked = [
        message
        for place, message in enumerate(dialogue.messages)
        if message[0] != "assistant" or (mode == "text_only" and place < last and message[1] == "text")
    ]
    if last < 0:
        raise InputError(ErrorCode.INPUT_EMPTY_TEXT, "The dialogue has no user message to answer.", "Give the line a user message.")
    expected = [content for role, modality, content in dialogue.messages[last + 1 :] if (role, modality) == ("assistant", "text")]
    position = speech_position(dialogue.messages)
    seed = item_seed(manner.seed, dialogue.example_id, position, line_seed=generation.seed)
    body: dict[str, Any] = {"model": manner.model, "messages": [_message(*message, reader) for message in asked], "seed": seed}
    body |= {name: value for name in _FIELDS if (value := getattr(generation, name)) is not None}
    if mode == "text_only":
        body["stop_token_ids"] = [_END_OF_TURN]
    else:
        xargs = {theirs: value for ours, theirs in _XARGS.items() if (value := getattr(generation, ours)) is not None}
        body["vllm_xargs"] = {"mode": mode, "phase": "text", **xargs}
    return Question(body, seed, "\n".join(expected) or None)


def _one_by_one(generation: Generation, mode: Mode) -> Generation:
    """Settings of one modality said by those of both, so that no default goes before what was asked for.

    The published server draws stream 0 of the audio by `temperature`, which has to be `audio_temperature`.
    """
    text = either(generation.text_temperature, generation.temperature)
    if mode == "text_only":
        return msgspec.structs.replace(generation, temperature=text)
    audio = either(generation.audio_temperature, generation.temperature)
    top_k = either(generation.audio_top_k, generation.top_k)
    return msgspec.structs.replace(generation, temperature=audio, text_temperature=text, audio_temperature=audio, audio_top_k=top_k)


def _refuse_unsendable(generation: Generation) -> None:
    for name in ("voice", "language", "instruct", "reference_text", "roles"):
        if getattr(generation, name) is not None:
            message = f"A dialogue that is asked of a server has no `{name}`."
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, message, f"Remove `{name}` from the line.")


def _message(role: str, modality: str, content: str, reader: ReferenceReader) -> dict[str, Any]:
    if modality == "text":
        return {"role": role, "content": content}
    if modality != "audio" or role != "user":
        message = f"A {role} message of modality {modality!r} cannot be asked of a server."
        raise InputError(ErrorCode.INPUT_BAD_MODALITY, message, "Remove the message.")
    audio = reader.read(content)
    data = audio.data
    if audio.ext != "wav":
        # The published server reads nothing else.
        from pipelines.audio import decode, encode

        data = encode(*decode(data), "wav")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    return {"role": role, "content": [part]}

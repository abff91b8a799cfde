"""Chat messages as dialogues: lines of JSON whose messages are objects with `role` and `content`.

    {"id": "a1", "messages": [{"role": "user", "content": "Good evening."}, {"role": "assistant", "content": "Hello."}]}

Source: https://platform.openai.com/docs/api-reference/chat/create (`messages`) and
https://huggingface.co/docs/transformers/chat_templating.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jobs.dialogue import chosen_id, clean
from pipelines.errors import ErrorCode, InputError

_SHAPE = "A line is one JSON object with `messages`, a list of objects with `role` and `content`."


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part]


class _Line(msgspec.Struct, frozen=True):
    messages: list[_Message]
    example_id: str | int | None = None
    id: str | int | None = None
    generation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode


def chat_dialogue(line: bytes, number: int) -> bytes:
    """The dialogue of a line of chat messages, as JSON; `example_id` or `id` is its id, else its number. Raises `InputError`."""
    try:
        found = _decode(line)
        line.decode()
    except msgspec.ValidationError as error:
        raise InputError(ErrorCode.INPUT_BAD_LINE, f"{clean(str(error))}.", _SHAPE) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InputError(ErrorCode.INPUT_BAD_JSON, f"The line is not JSON: {clean(reason)}.", "Write one JSON object a line.") from None
    named = chosen_id(found.example_id, found.id)
    messages = [(message.role, "text", _text(message.content, place)) for place, message in enumerate(found.messages)]
    dialogue: dict[str, Any] = {"example_id": f"line-{number}" if named is None else named, "messages": messages}
    if found.generation is not msgspec.UNSET:
        dialogue["generation"] = found.generation
    return _encode(dialogue)


def _text(content: str | list[_Part], place: int) -> str:
    if isinstance(content, str):
        return content
    other = next((part.type for part in content if part.type != "text"), None)
    if other is not None:
        message = f"Message {place} has a part of type {clean(other, 40)!r}."
        raise InputError(ErrorCode.INPUT_BAD_MODALITY, message, "Parts of chat messages are texts; write audio as a dialogue.")
    return "\n".join(part.text for part in content)

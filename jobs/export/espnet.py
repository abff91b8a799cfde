"""The format `espnet`: ESPnet SpeechLM dialogue JSONL in which generated speech and text take the place of the assistant's.

Source: espnet2/speechlm/dataloader/multimodal_loader/dialogue_loader.py, which reads `example_id` and `messages`, a list of
`[role, modality, content]` whose audio content is a path.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jobs.dialogue import speech_position
from jobs.export.made import MadeItem
from jobs.ledger.records import Job

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_messages = msgspec.json.Decoder(list[list[Any]]).decode


def espnet_line(job: Job, item: MadeItem, where: str) -> bytes:
    """The line as it was submitted, with the audio in its first assistant audio message, or in a new one at the end.

    Text that the model wrote stands before its audio, in the place of assistant texts that stood just there.
    """
    line = _decode(item.dialogue)
    messages = _decode_messages(line["messages"])
    first = position = speech_position(messages)
    answer = [["assistant", "audio", where]]
    if item.text_out is not None:
        answer.insert(0, ["assistant", "text", item.text_out])
        while first and messages[first - 1][:2] == ["assistant", "text"]:
            first -= 1
    messages[first : position + 1] = answer
    line["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    return msgspec.json.encode(line) + b"\n"


def espnet_text_line(dialogue: msgspec.Raw, text: str) -> bytes:
    """The line of an item whose answer is text alone, with that answer at its end: all messages of the line were asked."""
    line = _decode(dialogue)
    messages = [*_decode_messages(line["messages"]), ["assistant", "text", text]]
    line["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    return msgspec.json.encode(line) + b"\n"

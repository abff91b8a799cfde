"""The format `espnet`: ESPnet SpeechLM dialogue JSONL with the generated speech in it.

The audio of a spoken turn stands right behind its text, in its role; that of a dialogue's only text, a user's, is the
assistant's. Where a model answered the whole dialogue, its speech and text take the place of the assistant's.

Source: espnet2/speechlm/dataloader/multimodal_loader/dialogue_loader.py, which reads `example_id` and `messages`, a list of
`[role, modality, content]` whose audio content is a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from jobs.dialogue import speech_position
from jobs.export.made import MadeItem, spoken_place
from jobs.ledger.records import Job
from jobs.turns import with_audio

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_messages = msgspec.json.Decoder(list[list[Any]]).decode


def together(items: Iterable[tuple[MadeItem, str]]) -> Iterator[list[tuple[MadeItem, str]]]:
    """The items of each dialogue, of items in index order."""
    found: list[tuple[MadeItem, str]] = []
    for item, where in items:
        if found and found[0][0].example_id != item.example_id:
            yield found
            found = []
        found.append((item, where))
    if found:
        yield found


def espnet_line(job: Job, items: Sequence[tuple[MadeItem, str]]) -> bytes:
    """The line of a dialogue as it was submitted, with the audio of its items, each given with where it is.

    An answer stands in the first assistant audio message, or in a new one at the end; text that the model wrote stands before
    it, in the place of assistant texts that stood just there.
    """
    first, where = items[0]
    line = _decode(first.dialogue)
    messages = _decode_messages(line["messages"])
    triples = [(*message,) for message in messages]
    places = [spoken_place(job, item, triples) for item, _ in items]
    if places[0] is None:
        messages = _answered(messages, first.text_out, where)
    else:
        messages = list(with_audio(messages, {place: where for place, (_, where) in zip(places, items, strict=True) if place is not None}))
    line["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    return msgspec.json.encode(line) + b"\n"


def _answered(messages: list[list[Any]], text_out: str | None, where: str) -> list[list[Any]]:
    first = position = speech_position(messages)
    answer = [["assistant", "audio", where]]
    if text_out is not None:
        answer.insert(0, ["assistant", "text", text_out])
        while first and messages[first - 1][:2] == ["assistant", "text"]:
            first -= 1
    return [*messages[:first], *answer, *messages[position + 1 :]]


def espnet_text_line(dialogue: msgspec.Raw, text: str) -> bytes:
    """The line of an item whose answer is text alone, with that answer at its end: all messages of the line were asked."""
    line = _decode(dialogue)
    messages = [*_decode_messages(line["messages"]), ["assistant", "text", text]]
    line["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    return msgspec.json.encode(line) + b"\n"

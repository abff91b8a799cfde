"""The format `espnet`: ESPnet SpeechLM dialogue JSONL with the generated speech in it.

The audio of a spoken turn stands right behind its text, in its role; that of a dialogue's only text, a user's, is the
assistant's. Where a model answered the whole dialogue, its speech and text replace the assistant's.

Source: espnet2/speechlm/dataloader/multimodal_loader/dialogue_loader.py, which reads `example_id` and `messages`, a list of
`[role, modality, content]` whose audio content is a path.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO, Any

import msgspec

from jobs.dialogue import speech_position
from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, item_metadata
from jobs.export.lhotse import write_lhotse
from jobs.export.plan import Part
from jobs.ledger.records import Job
from jobs.turns import with_audio

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_messages = msgspec.json.Decoder(list[list[Any]]).decode


def espnet_line(job: Job, items: Sequence[tuple[AudioItem, str]]) -> bytes:
    """The line of a dialogue as it was submitted, with the audio of its items, each given with where it is.

    The answer to a whole dialogue replaces the first assistant audio message, or is added at the end. Text that the model wrote
    comes before it and replaces assistant texts just before it.
    """
    first, where = items[0]
    line = _decode(first.dialogue)
    messages = _decode_messages(line["messages"])
    spoken = [item.message_index for item, _ in items]
    if spoken[0] is None:
        messages = _answered(messages, first.text_out, where)
    else:
        audio = {index: where for index, (_, where) in zip(spoken, items, strict=True) if index is not None}
        messages = list(with_audio(messages, audio))
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


_encode = msgspec.json.Encoder().encode


def write_espnet_dataset(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, str]]) -> None:
    """The dataset of one split, in one pass over its items."""
    turns, examples = files.sorted_lines("turns"), files.sorted_lines("dialogues")
    texts, dialogues = files.open(f"{part.split}/text.jsonl"), files.open(f"{part.split}/dialogue.jsonl")

    def noted() -> Generator[tuple[AudioItem, str], None, None]:
        for _, group in groupby(items, key=lambda pair: pair[0].example_id):
            dialogue = list(group)
            dialogues.write(espnet_line(job, [(item, files.audio_name(f"{part.split}/dialogue.jsonl", where)) for item, where in dialogue]))
            examples.add(_sample(dialogue[0][0].example_id))
            for item, where in dialogue:
                texts.write(_encode({"id": item.id, "text": item_metadata(job, item).text}) + b"\n")
                turns.add(_sample(item.id))
                yield item, where

    write_lhotse(msgspec.structs.replace(part, split=f"{part.split}/audio"), files, job, noted())
    audio = {"name": "audio1", "path": files.sibling_name(f"{part.split}/audio"), "reader": "lhotse_audio"}
    text = {"name": "text1", "path": files.sibling_name(f"{part.split}/text.jsonl"), "reader": "text"}
    dialogue = {"name": "dialogue1", "path": files.sibling_name(f"{part.split}/dialogue.jsonl"), "reader": "dialogue"}
    _write_dataset(files.open(f"{part.split}/audio_text.json"), [audio, text], turns)
    _write_dataset(files.open(f"{part.split}/dialogue.json"), [dialogue], examples)


def _sample(id: str) -> bytes:
    """The line of an id that is sorted: without its closing quote, which would sort after a space."""
    return _encode(id)[:-1] + b"\n"


def _write_dataset(file: IO[bytes], entries: list[dict[str, str]], samples: Iterable[bytes]) -> None:
    file.write(b'{"data_entry":%b,"samples":[' % _encode(entries))
    for number, sample in enumerate(samples):
        file.write(b'%b\n%b"' % (b"," if number else b"", sample[:-1]))
    file.write(b"\n]}\n")


ESPNET = ExportFormat(
    name="espnet", summary="dialogues as JSONL", dialogue_line=espnet_line, text_line=espnet_text_line, whole_dialogues=True
)
ESPNET_DATASET = ExportFormat(
    name="espnet-dataset",
    summary="a dataset of ESPnet SpeechLM",
    write_part=write_espnet_dataset,
    local_audio=True,
    local_folder=True,
    whole_dialogues=True,
)

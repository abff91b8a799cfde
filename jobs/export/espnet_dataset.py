"""The format `espnet-dataset`: the dataset JSON of ESPnet SpeechLM for each split, with what its readers read.

    train/audio_text.json  audio1 and text1, for text to speech and the like
    train/dialogue.json    dialogue1, for whole dialogues
    train/audio/{recordings,supervisions,cuts}.jsonl.gz  train/text.jsonl  train/dialogue.jsonl

Source: espnet2/speechlm, `prepare_dataset_json.py`, `dataloader/dataset.py` and its readers `lhotse_audio`, `text` (JSONL by its
ending, which keeps ids with spaces whole) and `dialogue`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import IO

import msgspec

from jobs.export.espnet import espnet_line, together
from jobs.export.files import PartFiles
from jobs.export.lhotse import write_lhotse
from jobs.export.made import MadeItem, facts
from jobs.export.plan import Part
from jobs.export.sorting import SortedLines
from jobs.ledger.records import Job

_encode = msgspec.json.Encoder().encode


def write_espnet_dataset(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[MadeItem, str]]) -> None:
    """The dataset of one split, in one pass over its items."""
    turns, examples = SortedLines(files.scratch("sort")), SortedLines(files.scratch("sort-dialogues"))
    texts, dialogues = files.open(f"{part.split}/text.jsonl"), files.open(f"{part.split}/dialogue.jsonl")

    def noted() -> Generator[tuple[MadeItem, str], None, None]:
        for dialogue in together(items):
            dialogues.write(espnet_line(job, [(item, files.named(f"{part.split}/dialogue.jsonl", where)) for item, where in dialogue]))
            examples.add(_sample(dialogue[0][0].example_id))
            for item, where in dialogue:
                texts.write(_encode({"id": item.id, "text": facts(job, item).text}) + b"\n")
                turns.add(_sample(item.id))
                yield item, where

    write_lhotse(msgspec.structs.replace(part, split=f"{part.split}/audio"), files, job, noted())
    audio = {"name": "audio1", "path": files.named_file(f"{part.split}/audio"), "reader": "lhotse_audio"}
    text = {"name": "text1", "path": files.named_file(f"{part.split}/text.jsonl"), "reader": "text"}
    dialogue = {"name": "dialogue1", "path": files.named_file(f"{part.split}/dialogue.jsonl"), "reader": "dialogue"}
    _write_dataset(files.open(f"{part.split}/audio_text.json"), [audio, text], turns)
    _write_dataset(files.open(f"{part.split}/dialogue.json"), [dialogue], examples)


def _sample(id: str) -> bytes:
    """The line of an id that is sorted: without its closing quote, which would sort after a space."""
    return _encode(id)[:-1] + b"\n"


def _write_dataset(file: IO[bytes], entries: list[dict[str, str]], samples: Iterable[bytes]) -> None:
    file.write(b'{"data_entry":%b,"samples":[' % _encode(entries))
    for place, sample in enumerate(samples):
        file.write(b'%b\n%b"' % (b"," if place else b"", sample[:-1]))
    file.write(b"\n]}\n")

"""The format `ljspeech`: a folder as that of the LJ Speech dataset.

    train/metadata.csv             000000000-utt1|Good morning.|Good morning.
    train/wavs/000000000-utt1.wav

Its readers take the line apart at `|` and know no quotes, so a text is one line without `|`: these, line breaks and other control
characters become a space. The third field is for a text without figures and abbreviations; nothing here spells them out, so it is the
second one again.

Source: https://keithito.com/LJ-Speech-Dataset, and `torchaudio.datasets.LJSPEECH`, which reads
`csv.reader(metadata, delimiter="|", quoting=csv.QUOTE_NONE)` and then `wavs/<first field>.wav`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, item_metadata
from jobs.export.plan import Part
from jobs.ledger.records import Job

#: Unicode's control characters, and its separators of lines and paragraphs.
_BREAKS = {"Cc", "Zl", "Zp"}


def write_ljspeech(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
    """The audio of a part."""
    for item, audio in items:
        files.add(f"{part.split}/wavs/{item.name}.wav", audio)


def ljspeech_line(job: Job, item: AudioItem) -> bytes:
    """The row of an item: its name, and its text twice."""
    text = field(item_metadata(job, item).text)
    return f"{item.name}|{text}|{text}\n".encode()


def field(text: str) -> str:
    """A text that is one field of a row."""
    return " ".join("".join(" " if character == "|" or _breaks(character) else character for character in text).split())


def _breaks(character: str) -> bool:
    return unicodedata.category(character) in _BREAKS


LJSPEECH = ExportFormat(
    name="ljspeech",
    summary="WAV files and metadata.csv, as LJ Speech",
    write_part=write_ljspeech,
    index=("metadata.csv", ljspeech_line),
    embeds_audio=True,
    audio_formats=("wav",),
)

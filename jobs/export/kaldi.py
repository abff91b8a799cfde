"""The format `kaldi`: a data directory for each split.

    train/wav.scp   heart-utt1 /store/jobs/ID/audio/00000/000000000-utt1.wav
    train/text      heart-utt1 Good morning.
    train/utt2spk   heart-utt1 heart
    train/spk2utt   heart heart-utt1 heart-utt2
    train/utt2dur   heart-utt1 1.25
    train/reco2dur  heart-utt1 1.25

Source: https://kaldi-asr.org/doc/data_prep.html and `utils/validate_data_dir.sh`: all files sorted in the C locale by their
first field, and the same whether they are sorted by utterance or by speaker.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from typing import IO

import msgspec

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, item_metadata
from jobs.export.plan import Part
from jobs.ledger.records import Job
from pipelines.errors import ConfigError, ErrorCode

# An id is followed by a space or, where it begins an utterance's, by `-`: both sort before everything that is kept here.
_ESCAPED_IN_SPEAKERS = re.compile(rb"[^A-Za-z0-9._]")
_ESCAPED = re.compile(rb"[^A-Za-z0-9._-]")


def write_kaldi(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, str]]) -> None:
    """One data directory. Raises `config.invalid` for audio whose path Kaldi cannot read."""
    lines = files.sorted_lines("utterances")
    for item, where in items:
        known = item_metadata(job, item)
        speaker = _escaped(_ESCAPED_IN_SPEAKERS, known.speaker)
        utterance = f"{speaker}-{_escaped(_ESCAPED, item.id)}"
        audio = _readable(files.audio_name(f"{part.split}/wav.scp", where), item.extension)
        rest = (speaker, audio, _one_line(known.text), f"{item.seconds:.6f}")
        lines.add(utterance.encode() + b"\t" + msgspec.json.encode(rest) + b"\n")
    directory = _Directory(files, part.split)
    for line in lines:
        utterance, _, rest = line.partition(b"\t")
        directory.add(utterance.decode(), *msgspec.json.decode(rest, type=tuple[str, str, str, str]))
    directory.end()


class _Directory:
    """Writes the files of a data directory from utterances in order."""

    def __init__(self, files: PartFiles, split: str) -> None:
        self._files = {name: files.open(f"{split}/{name}") for name in ("wav.scp", "text", "utt2spk", "spk2utt", "utt2dur", "reco2dur")}
        self._utterance = self._speaker = ""

    def add(self, utterance: str, speaker: str, audio: str, text: str, seconds: str) -> None:
        if utterance <= self._utterance or speaker < self._speaker:
            raise RuntimeError(f"The utterance {utterance!r} of {speaker!r} comes after {self._utterance!r} of {self._speaker!r}.")
        for name, value in (("wav.scp", audio), ("text", text), ("utt2spk", speaker), ("utt2dur", seconds), ("reco2dur", seconds)):
            _write(self._files[name], f"{utterance} {value}".rstrip() + "\n")
        if speaker != self._speaker:
            _write(self._files["spk2utt"], ("\n" if self._speaker else "") + speaker)
        _write(self._files["spk2utt"], f" {utterance}")
        self._utterance, self._speaker = utterance, speaker

    def end(self) -> None:
        _write(self._files["spk2utt"], "\n")


def _one_line(text: str) -> str:
    """Text without control characters, which break the lines of Kaldi's files or a terminal that shows them."""
    return " ".join("".join(" " if unicodedata.category(character) == "Cc" else character for character in text).split())


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode())


def _escaped(pattern: re.Pattern[bytes], text: str) -> str:
    """Text without white space, other for other texts: what the pattern finds becomes `~` and its code in hexadecimal."""
    return pattern.sub(lambda found: b"~%02X" % found[0][0], text.encode()).decode()


def _readable(where: str, extension: str) -> str:
    """What Kaldi opens: a file, or for FLAC, which it does not read, the output of a command."""
    if "\n" in where or "\r" in where or where != where.strip():
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"Kaldi cannot read the path {where[:200]!r}.", "Name another --audio-root.")
    return f"flac -c -d -s {shlex.quote(where)} |" if extension == "flac" else where


KALDI = ExportFormat(
    name="kaldi", summary="a Kaldi data directory", write_part=write_kaldi, audio_formats=("wav", "flac"), local_audio=True
)

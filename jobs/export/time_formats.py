"""Formats with the times of words: `ctm` of NeMo, and folders of Praat TextGrids and of subtitles.

    ctm        000000000-utt1 1 0.2125 0.3500 Hello
    textgrid   train/000000000-utt1.TextGrid
    srt, vtt   train/000000000-utt1.srt

Utterances and files have the names of the audio. Sources: NeMo's forced aligner, whose lines have the name of
the audio file, the channel, the beginning and the length in seconds, and the word;
https://www.fon.hum.uva.nl/praat/manual/TextGrid_file_formats.html; https://www.w3.org/TR/webvtt1.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, Part
from jobs.ledger.records import Job
from pipelines.request import Word

#: Limits of a subtitle: seconds, characters of its two lines, and seconds of the pause at which it ends.
_CUE_SECONDS, _CUE_CHARACTERS, _CUE_PAUSE_SECONDS = 7.0, 80, 0.8
_LINE_CHARACTERS = 42
_SENTENCE_ENDS = (".", "!", "?", "…")


def ctm_lines(job: Job, item: AudioItem, where: str) -> bytes:
    """The lines of an item, one for each word."""
    return b"".join(
        f"{item.name} 1 {word.start_s:.4f} {word.end_s - word.start_s:.4f} {word.text}\n".encode()
        for word in item.words
    )


def textgrid(item: AudioItem) -> str:
    """A TextGrid with the tier `words`, and the tier `phones` if the phonemes are known. The intervals of a tier
    cover the whole audio."""
    tiers = {"words": item.words} | ({"phones": item.phonemes} if item.phonemes else {})
    head = f'File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = {item.seconds:.6f}\n'
    lines = [f"{head}tiers? <exists>\nsize = {len(tiers)}\nitem []:"]
    for number, (name, words) in enumerate(tiers.items(), 1):
        spans = list(_covering(words, item.seconds))
        lines.append(
            f'    item [{number}]:\n        class = "IntervalTier"\n        name = "{name}"\n        xmin = 0\n'
            f"        xmax = {item.seconds:.6f}\n        intervals: size = {len(spans)}"
        )
        for place, word in enumerate(spans, 1):
            text = word.text.replace('"', '""')
            lines.append(
                f"        intervals [{place}]:\n            xmin = {word.start_s:.6f}\n"
                f'            xmax = {word.end_s:.6f}\n            text = "{text}"'
            )
    return "\n".join(lines) + "\n"


def _covering(words: tuple[Word, ...], seconds: float) -> Iterator[Word]:
    """The words with intervals without text between them; each has a length."""
    end = 0.0
    for word in (*words, Word("", seconds, seconds)):
        if word.start_s > end:
            yield Word("", end, word.start_s)
        begin, end = max(end, word.start_s), max(end, min(word.end_s, seconds))
        if end > begin:
            yield Word(word.text, begin, end)


def cues(words: tuple[Word, ...]) -> Iterator[Word]:
    """Subtitles: a cue ends at the end of a sentence, at a long pause, and before it is too long."""
    cue: Word | None = None
    for word in words:
        if cue is not None and (
            cue.text.endswith(_SENTENCE_ENDS)
            or word.start_s - cue.end_s > _CUE_PAUSE_SECONDS
            or word.end_s - cue.start_s > _CUE_SECONDS
            or len(cue.text) + 1 + len(word.text) > _CUE_CHARACTERS
        ):
            yield cue
            cue = None
        cue = word if cue is None else Word(f"{cue.text} {word.text}", cue.start_s, word.end_s)
    if cue is not None:
        yield cue


def srt(item: AudioItem) -> str:
    """SubRip subtitles."""
    return "\n".join(
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{_lines(cue.text)}\n"
        for number, cue in enumerate(cues(item.words), 1)
    )


def vtt(item: AudioItem) -> str:
    """WebVTT subtitles."""
    return "WEBVTT\n" + "".join(
        f"\n{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{escape(_lines(cue.text), quote=False)}\n"
        for cue in cues(item.words)
    )


def _lines(text: str) -> str:
    return textwrap.fill(text, _LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)


def _clock(seconds: float, point: str) -> str:
    """A time such as `00:01:02,345`."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return (
        f"{minutes // 60:02d}:{minutes % 60:02d}:{milliseconds // 1000:02d}{point}{milliseconds % 1000:03d}"
    )


def _file_format(name: str, summary: str, make: Callable[[AudioItem], str], extension: str) -> ExportFormat:
    """A format with a file for each item."""

    def write(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, Any]]) -> None:
        for item, _ in items:
            files.add(f"{part.split}/{item.name}.{extension}", make(item).encode())

    return ExportFormat(name=name, summary=summary, write_part=write, names_audio=False, needs_words=True)


CTM = ExportFormat(
    name="ctm", summary="NeMo's times of words", item_line=ctm_lines, names_audio=False, needs_words=True
)
TEXTGRID = _file_format("textgrid", "Praat's TextGrids", textgrid, "TextGrid")
SRT = _file_format("srt", "SubRip subtitles", srt, "srt")
VTT = _file_format("vtt", "WebVTT subtitles", vtt, "vtt")

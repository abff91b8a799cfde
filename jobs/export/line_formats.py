"""Formats of lines, and of the times of words. Formats of one file are `espnet`, `nemo`, `openai-batch`,
`openai-batch-errors` and `ctm`; `manifest` is in `jobs.export.manifest`.

`espnet` is ESPnet SpeechLM's dialogue JSONL with the generated speech. The audio of a spoken turn follows its
text, in the same role; if a dialogue has only one text, and it is the user's, its audio becomes the
assistant's. If a model answered the whole dialogue, its speech and text replace the assistant's. The batch
formats are the two files of an OpenAI batch: the output file has the requests that succeeded, the error file
those that failed. Their `custom_id` is the item's id. The body contains the path or address of the audio.

Formats with the times of words are `ctm` of NeMo, and folders of Praat TextGrids and of subtitles. Utterances and
files have the names of the audio.

    ctm        000000000-utt1 1 0.2125 0.3500 Hello
    textgrid   train/000000000-utt1.TextGrid
    srt, vtt   train/000000000-utt1.srt

Sources: espnet2/speechlm/dataloader/multimodal_loader/dialogue_loader.py, which reads `example_id` and
`messages`, a list of `[role, modality, content]` whose audio content is a path; NVIDIA NeMo,
`nemo.collections.common.parts.preprocessing.manifest`: `audio_filepath`, `duration` in seconds, `text`;
https://platform.openai.com/docs/guides/batch. NeMo's forced aligner, whose lines have the name of the audio file,
the channel, the beginning and the length in seconds, and the word;
https://www.fon.hum.uva.nl/praat/manual/TextGrid_file_formats.html; https://www.w3.org/TR/webvtt1.
"""

from __future__ import annotations

import hashlib
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any

import msgspec

from jobs.dialogue import decode_object, speech_position, with_audio
from jobs.export.dataset import PartFiles
from jobs.export.files import json_line
from jobs.export.formats import ExportFormat
from jobs.export.items import ORIGIN, AudioItem, Located, Part, facts, picked
from jobs.ledger.records import ItemRow, Job, RejectedLine
from pipelines.request import Word
from pipelines.words import are_spaced

#: Limits of a subtitle: seconds, characters of its two lines, and seconds of the pause at which it ends.
_CUE_SECONDS, _CUE_CHARACTERS, _CUE_PAUSE_SECONDS = 7.0, 80, 0.8
_LINE_CHARACTERS = 42
_SENTENCE_ENDS = tuple(".!?…。！？")
#: Unicode's categories of control characters and of line and paragraph separators.
_BREAKS = {"Cc", "Zl", "Zp"}
_decode_messages = msgspec.json.Decoder(list[list[Any]]).decode


def one_line(text: str, separator: str = "") -> str:
    """Makes a text fit into one field of a line: control characters, line breaks and the field separator
    become spaces."""
    return " ".join(
        "".join(
            " " if one == separator or unicodedata.category(one) in _BREAKS else one for one in text
        ).split()
    )


def said(words: Iterable[Word]) -> tuple[Word, ...]:
    """The words on one line each, without those of control characters alone, which readers of files of words refuse."""
    return tuple([Word(text, one.start_s, one.end_s) for one in words if (text := one_line(one.text))])


def espnet_line(job: Job, items: Sequence[Located]) -> bytes:
    """The line of a dialogue as it was submitted, with the audio of its items. `items`: each with the path or
    address of its audio.

    The answer to a whole dialogue replaces the first assistant audio message, or is appended. Text that the
    model wrote precedes it and replaces assistant texts directly before it.
    """
    first, where = items[0]
    line = decode_object(first.dialogue)
    messages = _decode_messages(line["messages"])
    if first.message_index is not None:
        audio = {item.message_index: where for item, where in items if item.message_index is not None}
        return json_line(line | {"messages": list(with_audio(messages, audio))})
    start = position = speech_position(messages)
    answer = [["assistant", "audio", where]]
    if first.text_out is not None:
        answer.insert(0, ["assistant", "text", first.text_out])
        while start and messages[start - 1][:2] == ["assistant", "text"]:
            start -= 1
    return json_line(line | {"messages": [*messages[:start], *answer, *messages[position + 1 :]]})


def espnet_text_line(dialogue: msgspec.Raw, text: str) -> bytes:
    """The line of an item whose answer is text without audio, with the answer appended."""
    line = decode_object(dialogue)
    return json_line(line | {"messages": [*_decode_messages(line["messages"]), ["assistant", "text", text]]})


def nemo_line(job: Job, item: AudioItem, where: str) -> bytes:
    """A line of the manifest, with `lang` if the item has a language."""
    about = facts(item)
    line = {"audio_filepath": where, **picked(about, "duration", "text")}
    if about["language"] is not None:
        line["lang"] = about["language"]
    return json_line(line | picked(about, "speaker", "example_id", "role", "message_index", *ORIGIN))


def openai_batch_line(job: Job, item: AudioItem, where: str) -> bytes:
    """The line of a request that succeeded."""
    about = facts(item)
    audio = {
        "url": where,
        "format": item.extension,
        "bytes": item.artifact.bytes,
        **picked(about, "sha256", "sample_rate", "duration"),
    }
    body = {
        "object": "audio.speech",
        "model": job.spec.model,
        "audio": audio,
        "metadata": picked(about, *ORIGIN),
    }
    return _batch_line(job, item.id, body, None)


def openai_error_line(job: Job, failed: ItemRow | RejectedLine) -> bytes:
    """The line of a failed item or of a refused input line."""
    if isinstance(failed, ItemRow):
        code = failed.error_code
        message = failed.error_message
        custom_id = failed.id
    else:
        code = failed.code
        message = failed.message
        custom_id = failed.example_id or f"line-{failed.line}"
    error = {"code": code.value if code else "not_done", "message": message or "The item has no audio."}
    return _batch_line(job, custom_id, None, error)


def _batch_line(job: Job, custom_id: str, body: object, error: object) -> bytes:
    # A fixed id, so that an export has the same bytes each time.
    request = "batch_req_" + hashlib.blake2b(f"{job.id} {custom_id}".encode(), digest_size=12).hexdigest()
    response = None if body is None else {"status_code": 200, "request_id": request, "body": body}
    return json_line({"id": request, "custom_id": custom_id, "response": response, "error": error})


def ctm_lines(job: Job, item: AudioItem, where: str) -> bytes:
    """The lines of an item, one for each word."""
    return b"".join(
        f"{item.name} 1 {word.start_s:.4f} {word.end_s - word.start_s:.4f} {word.text.replace(' ', '_')}\n".encode()
        for word in said(item.words)
    )


def textgrid(item: AudioItem) -> str:
    """A TextGrid with the tier `words`, and the tier `phones` if the phonemes are known. The intervals of a tier
    cover the whole audio."""
    tiers = {"words": item.words} | ({"phones": item.phonemes} if item.phonemes else {})
    head = f'File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = {item.seconds:.6f}\n'
    lines = [f"{head}tiers? <exists>\nsize = {len(tiers)}\nitem []:"]
    for number, (name, words) in enumerate(tiers.items(), 1):
        spans = list(_covering(said(words), item.seconds))
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
        begin = max(end, word.start_s)
        end = max(end, min(word.end_s, seconds))
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
        cue = (
            word
            if cue is None
            else Word(
                f"{cue.text}{' ' * are_spaced(cue.text, word.text)}{word.text}", cue.start_s, word.end_s
            )
        )
    if cue is not None:
        yield cue


def srt(item: AudioItem) -> str:
    """SubRip subtitles."""
    return "\n".join(
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{_lines(cue.text)}\n"
        for number, cue in enumerate(cues(said(item.words)), 1)
    )


def vtt(item: AudioItem) -> str:
    """WebVTT subtitles."""
    return "WEBVTT\n" + "".join(
        f"\n{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{escape(_lines(cue.text), quote=False)}\n"
        for cue in cues(said(item.words))
    )


def _lines(text: str) -> str:
    return textwrap.fill(
        text, _LINE_CHARACTERS, break_long_words=not are_spaced(text, ""), break_on_hyphens=False
    )


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


ESPNET = ExportFormat(
    name="espnet",
    summary="dialogues as JSONL",
    dialogue_line=espnet_line,
    text_line=espnet_text_line,
    whole_dialogues=True,
)
NEMO = ExportFormat(name="nemo", summary="NeMo's manifest", item_line=nemo_line)
OPENAI_BATCH = ExportFormat(
    name="openai-batch", summary="the output file of an OpenAI batch", item_line=openai_batch_line
)
OPENAI_BATCH_ERRORS = ExportFormat(
    name="openai-batch-errors", summary="the error file of an OpenAI batch", failure_line=openai_error_line
)
CTM = ExportFormat(
    name="ctm", summary="NeMo's times of words", item_line=ctm_lines, names_audio=False, needs_words=True
)
TEXTGRID = _file_format("textgrid", "Praat's TextGrids", textgrid, "TextGrid")
SRT = _file_format("srt", "SubRip subtitles", srt, "srt")
VTT = _file_format("vtt", "WebVTT subtitles", vtt, "vtt")

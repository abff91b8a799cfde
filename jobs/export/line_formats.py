"""Formats of one file: `espnet`, `nemo`, `openai-batch` and `openai-batch-errors`; `manifest` is in
`jobs.export.manifest`.

`espnet` is ESPnet SpeechLM's dialogue JSONL with the generated speech. The audio of a spoken turn follows its
text, in the same role; if a dialogue has only one text, and it is the user's, its audio becomes the
assistant's. If a model answered the whole dialogue, its speech and text replace the assistant's. The batch
formats are the two files of an OpenAI batch: the output file has the requests that succeeded, the error file
those that failed. Their `custom_id` is the item's id. The body contains the path or address of the audio.

Sources: espnet2/speechlm/dataloader/multimodal_loader/dialogue_loader.py, which reads `example_id` and
`messages`, a list of `[role, modality, content]` whose audio content is a path; NVIDIA NeMo,
`nemo.collections.common.parts.preprocessing.manifest`: `audio_filepath`, `duration` in seconds, `text`;
https://platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.dialogue import speech_position, with_audio
from jobs.export.files import json_line
from jobs.export.formats import ExportFormat
from jobs.export.items import ORIGIN, AudioItem, Located, facts, picked
from jobs.ledger.records import ItemRow, Job, RejectedLine

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_messages = msgspec.json.Decoder(list[list[Any]]).decode


def espnet_line(job: Job, items: Sequence[Located]) -> bytes:
    """The line of a dialogue as it was submitted, with the audio of its items. `items`: each with the path or
    address of its audio.

    The answer to a whole dialogue replaces the first assistant audio message, or is appended. Text that the
    model wrote precedes it and replaces assistant texts directly before it.
    """
    first, where = items[0]
    line = _decode(first.dialogue)
    messages = _decode_messages(line["messages"])
    if first.message_index is None:
        messages = _answered(messages, first.text_out, where)
    else:
        audio = {item.message_index: where for item, where in items if item.message_index is not None}
        messages = list(with_audio(messages, audio))
    return _with_messages(line, messages)


def espnet_text_line(dialogue: msgspec.Raw, text: str) -> bytes:
    """The line of an item whose answer is text without audio, with the answer appended."""
    line = _decode(dialogue)
    return _with_messages(line, [*_decode_messages(line["messages"]), ["assistant", "text", text]])


def _answered(messages: list[list[Any]], text_out: str | None, where: str) -> list[list[Any]]:
    first = position = speech_position(messages)
    answer = [["assistant", "audio", where]]
    if text_out is not None:
        answer.insert(0, ["assistant", "text", text_out])
        while first and messages[first - 1][:2] == ["assistant", "text"]:
            first -= 1
    return [*messages[:first], *answer, *messages[position + 1 :]]


def _with_messages(line: dict[str, msgspec.Raw], messages: Sequence[Any]) -> bytes:
    return json_line(line | {"messages": messages})


def nemo_line(job: Job, item: AudioItem, where: str) -> bytes:
    """A line of the manifest, with `lang` if the item has a language."""
    about = facts(item)
    line = {"audio_filepath": where, **picked(about, "duration", "text")}
    if about["language"] is not None:
        line["lang"] = about["language"]
    return json_line(line | picked(about, "speaker", "example_id", "role", "message_index", *ORIGIN))


def openai_batch_line(job: Job, item: AudioItem, where: str) -> bytes:
    """The line of a request that succeeded."""
    artifact, about = item.artifact, facts(item)
    audio = {
        "url": where,
        "format": item.extension,
        "bytes": artifact.bytes,
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
        code, message, custom_id = failed.error_code, failed.error_message, failed.id
    else:
        code, message, custom_id = failed.code, failed.message, failed.example_id or f"line-{failed.line}"
    error = {"code": code.value if code else "not_done", "message": message or "The item has no audio."}
    return _batch_line(job, custom_id, None, error)


def _batch_line(job: Job, custom_id: str, body: object, error: object) -> bytes:
    # A fixed id, so that an export has the same bytes each time.
    request = "batch_req_" + hashlib.blake2b(f"{job.id} {custom_id}".encode(), digest_size=12).hexdigest()
    response = None if body is None else {"status_code": 200, "request_id": request, "body": body}
    return json_line({"id": request, "custom_id": custom_id, "response": response, "error": error})


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

"""The formats `openai-batch` and `openai-batch-errors`: the output file and the error file of a batch.

Source: https://platform.openai.com/docs/guides/batch: requests that succeeded stand in the output file, the others in the
error file, both by their `custom_id`, which is the item's id. Speech is no JSON, so the body says where its file is.
"""

from __future__ import annotations

import hashlib

import msgspec

from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, item_metadata, origin
from jobs.ledger.records import ItemRow, Job, RejectedLine


def openai_batch_line(job: Job, item: AudioItem, where: str) -> bytes:
    """The line of a request that succeeded."""
    artifact = item.artifact
    audio = {
        "url": where,
        "format": item.extension,
        "bytes": artifact.bytes,
        "sha256": artifact.sha256,
        "sample_rate": artifact.sample_rate,
        "duration": round(item.seconds, 6),
    }
    request = _request_id(job, item.id)
    metadata = origin(job, item, item_metadata(job, item))
    body = {"object": "audio.speech", "model": job.spec.model, "audio": audio, "metadata": metadata}
    response = {"status_code": 200, "request_id": request, "body": body}
    return _line(request, item.id, response, None)


def openai_error_line(job: Job, failed: ItemRow | RejectedLine) -> bytes:
    """The line of an item that failed, or of a line of the input that was refused."""
    if isinstance(failed, ItemRow):
        code, message, custom_id = failed.error_code, failed.error_message, failed.id
    else:
        code, message, custom_id = failed.code, failed.message, failed.example_id or f"line-{failed.line}"
    error = {"code": code.value if code else "not_done", "message": message or "The item has no audio."}
    return _line(_request_id(job, custom_id), custom_id, None, error)


def _line(request: str, custom_id: str, response: object, error: object) -> bytes:
    return msgspec.json.encode({"id": request, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


def _request_id(job: Job, custom_id: str) -> str:
    """The same each time, so that an export has the same bytes."""
    return "batch_req_" + hashlib.blake2b(f"{job.id} {custom_id}".encode(), digest_size=12).hexdigest()


OPENAI_BATCH = ExportFormat(name="openai-batch", summary="the output file of an OpenAI batch", item_line=openai_batch_line)
OPENAI_BATCH_ERRORS = ExportFormat(name="openai-batch-errors", summary="the error file of an OpenAI batch", failure_line=openai_error_line)

"""The format `nemo`: NeMo's manifest, one JSON object a line.

Source: NVIDIA NeMo, `nemo.collections.common.parts.preprocessing.manifest`: `audio_filepath`, `duration` in seconds, `text`.
"""

from __future__ import annotations

import msgspec

from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, item_metadata, origin
from jobs.ledger.records import Job


def nemo_line(job: Job, item: AudioItem, where: str) -> bytes:
    """A line of the manifest; `lang` only where the item has a language."""
    known = item_metadata(job, item)
    line: dict[str, object] = {"audio_filepath": where, "duration": round(item.seconds, 6), "text": known.text}
    if known.language is not None:
        line["lang"] = known.language
    spoken = {"role": known.role, "message_index": known.message_index}
    line |= {"speaker": known.speaker, "example_id": item.example_id, **spoken, **origin(job, item, known)}
    return msgspec.json.encode(line) + b"\n"


NEMO = ExportFormat(name="nemo", summary="NeMo's manifest", item_line=nemo_line)

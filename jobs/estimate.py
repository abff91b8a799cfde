"""A dry run: checks every line as a submit does, writes nothing, and estimates the cost."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.input_format import InputFormat
from jobs.job_options import SubmitOptions
from jobs.ledger.records import JobSpec, RejectedLine
from jobs.line_check import GoodLine, aborted_by, duplicate_lines
from jobs.references import ReferenceReader
from jobs.source import open_source
from jobs.spec import ResolvedSpec, resolve
from jobs.store.base import ObjectStore
from jobs.voices import voice_folder
from pipelines.errors import ErrorCode
from pipelines.registry import ModelCard

if TYPE_CHECKING:
    from jobs.settings import Settings

#: Maximum number of rejected lines that are kept as examples.
MAX_EXAMPLES = 100
_PCM_BITS = 16
#: Size of FLAC as a share of 16-bit PCM, for speech.
_FLAC_SHARE = 0.55
#: Size of a file's headers in bytes, by format.
_HEADER_BYTES = {"opus": 900, "mp3": 400}
_WAV_HEADER_BYTES = 44


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a job. The length of speech is the number of characters times the model's average
    seconds per character."""

    items: int
    input_format: InputFormat
    #: Number of rejected lines by code.
    rejected: dict[ErrorCode, int]
    #: The first rejected lines.
    rejected_lines: tuple[RejectedLine, ...]
    audio_seconds: float
    #: Size of the audio in the store.
    bytes: int
    #: Time that one worker needs; None if the model's speed was not measured.
    engine_seconds: float | None


def dry_run(
    settings: Settings,
    store: ObjectStore,
    source: str,
    spec: JobSpec | ResolvedSpec,
    options: SubmitOptions | None = None,
) -> Estimate:
    """Checks an input as `submit` does and estimates its job, without writing to ledger or store.

    Raises `InputError` for an input that cannot be read, for settings that the model refuses and, with
    `on_error="abort"`, for the first bad line. Also raises `ModelError` and `StoreError`.
    """
    options = options or SubmitOptions()
    resolved = resolve(spec, options.input_format, voice_folder(settings))
    card = resolved.card
    rejected: Counter[ErrorCode] = Counter()
    examples: list[RejectedLine] = []
    items = milliseconds = 0
    # A database without a name is a temporary file: memory stays bounded for any number of lines.
    with open_source(source, settings.s3) as opened, closing(sqlite3.connect("")) as seen:
        seen.execute("CREATE TABLE seen (id TEXT PRIMARY KEY) WITHOUT ROWID")
        reader = ReferenceReader(opened.folder, settings.audio_roots, store, card.check_reference)
        reference_key = reader.keys(lambda audio: audio.sha256)
        resolved = resolved.of_input(opened)
        checker = resolved.checker
        records = resolved.records(opened)
        for _, good, bad in checker.checked(records, reference_key):
            good, repeated = _new_ids(seen, good, checker.id_key)
            bad = sorted([*bad, *repeated], key=lambda line: line.line)
            if bad and options.on_error == "abort":
                raise aborted_by(bad[0], "Nothing would be submitted")
            items += sum(line.items for line in good)
            milliseconds += sum(line.estimated_ms for line in good)
            rejected.update(line.code for line in bad)
            examples += bad[: MAX_EXAMPLES - len(examples)]
    seconds = milliseconds / 1000
    engine_seconds = None if card.rtf is None else seconds * card.rtf
    size = _audio_bytes(items, seconds, card, resolved.spec)
    return Estimate(items, records.format, dict(rejected), tuple(examples), seconds, size, engine_seconds)


def _audio_bytes(items: int, seconds: float, card: ModelCard, spec: JobSpec) -> int:
    """The size of the audio files. That of lossy formats is fitted to measurements of libsndfile's encoders on the
    voice `hibari`."""
    rate = spec.sample_rate or card.sample_rate
    bits_per_second = {
        "opus": 12e3 + 0.9 * rate,
        "mp3": min(10e3 + 2 * rate, 46e3 + rate / 2),
        "flac": rate * _PCM_BITS * _FLAC_SHARE,
    }.get(spec.format, rate * _PCM_BITS)
    return round(seconds * bits_per_second / 8) + items * _HEADER_BYTES.get(spec.format, _WAV_HEADER_BYTES)


def _new_ids(
    seen: sqlite3.Connection, good: Sequence[GoodLine], key: str
) -> tuple[list[GoodLine], list[RejectedLine]]:
    """The lines with new ids, and the others as rejected lines; `key`: the name of the id in the input."""
    new: list[GoodLine] = []
    repeated: list[GoodLine] = []
    for line in good:
        added = seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (line.example_id,)).rowcount
        (new if added else repeated).append(line)
    return new, duplicate_lines(repeated, key)

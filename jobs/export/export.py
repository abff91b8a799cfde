"""From the items of a job to a file or a dataset: streamed in index order, complete or absent, the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.export.audio import AudioReader, Conversion
from jobs.export.dataset import DatasetExport
from jobs.export.files import output, own_output
from jobs.export.formats import find_format
from jobs.export.items import AudioItems, AudioNames, text_answers
from jobs.export.plan import WHOLE, LeftOut, Part, Splits, left_out
from jobs.ledger.records import ItemState, Job
from jobs.recent_jobs import out_words
from jobs.store import ObjectStore, S3Settings, is_remote
from jobs.verify import Fault, expected_objects, listed_faults
from jobs.where import Where
from pipelines.audio_format import check_rate
from pipelines.errors import ConfigError, ErrorCode, StoreError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

#: Objects that are named where some are lost.
SHOWN_LOST = 5
#: Audio in one file of a dataset: few files, and little to repeat after a stop.
PART_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written."""

    format: str
    #: Absolute path, `s3://` address, or `-`.
    to: str
    items: int
    #: Items of the job that were not written.
    left_out: int
    #: Why not.
    reasons: LeftOut


def export(
    ledger: Ledger,
    store: ObjectStore,
    job_id: str,
    format: str,
    to: str,
    audio_root: Path | None = None,
    *,
    splits: Splits | None = None,
    part_bytes: int = PART_BYTES,
    s3: S3Settings | None = None,
    on_part: Callable[[Part], None] = lambda _: None,
    replaces: Collection[str] | None = None,
    absolute: bool = False,
    audio_format: str | None = None,
    sample_rate: int | None = None,
    where: Where | None = None,
) -> ExportReport:
    """Writes the items of a job that have audio, and match `where`, to `to`: a file or `-` for formats of one file, else a folder or
    `s3://` prefix.

    Audio in a folder store is named by its path relative to the file that names it (absolute on standard output, in a bucket,
    or with `absolute`), and by its `s3://` address in a bucket. With `audio_root` it is named by the absolute local path
    `audio_root/<key>`, and fetched from the store where that file is not there yet; audio in packs can be named in no other way.
    Formats that hold the audio end a file before its audio, as it is in the store, passes `part_bytes`. With `audio_format` (`wav`,
    `flac`, `mp3`, `opus`) or `sample_rate` (Hz) the audio is converted where the export holds or copies it. With `splits` every format
    is a folder. The same call goes on with an export that was stopped. A format of dialogues writes
    a dialogue if one of its items matches. Of a job that runs the items that are done are written; the same call later replaces that
    export.

    An existing file at `to` is overwritten; a folder that holds another export, or anything else, is refused. With `replaces`, ids
    of jobs, an export of one of these jobs in this format is replaced, and everything else is refused, also a file.

    Raises `config.invalid` for an unknown format, a filter or a destination that cannot be used, `config.missing_library` for a library
    that is not installed, `NotFoundError`, `StoreError`, `ServiceError`.
    """
    chosen = find_format(format)
    job = ledger.job(job_id)
    conversion = Conversion.of(audio_format, sample_rate, job.spec.format)
    packed = job.spec.pack is True
    chosen.check(to, store.url, splits, audio_root, packed=packed, stored=job.spec.format, conversion=conversion)
    chosen.check_library()
    _check_stored_rate(ledger, job, conversion)
    if where is not None and chosen.failure_line is not None:
        message = f"The format {format} lists what failed, and a filter compares what was made."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Leave the filter out.")
    if chosen.failure_line is None and audio_root is None:
        _refuse_lost(ledger, store, job, where, dialogues=chosen.whole_dialogues)
    if not chosen.one_file(splits):
        if chosen.text_line is not None and next(text_answers(ledger, store, job_id, where), None) is not None:
            message = "Some answers of this job are text without audio, which an export with splits cannot hold."
            raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Leave the splits out.")
        shares, own = splits or WHOLE, replaces or ()
        dataset = DatasetExport(ledger, store, job, chosen, shares, part_bytes, audio_root, own, absolute, conversion, where)
        plan = dataset.run(to, s3, on_part)
        return ExportReport(format, to if is_remote(to) else str(Path(to).absolute()), plan.items, plan.left_out, plan.reasons)
    written = texts = 0
    items = AudioItems(ledger, store, job_id, whole=chosen.whole_dialogues, where=where, dialogues=chosen.whole_dialogues)
    names = AudioNames(store, None if absolute or audio_root is not None or to == "-" else Path(to).absolute().parent)
    opened = output(to) if replaces is None else own_output(to, job_id, replaces)
    with opened as file, AudioReader(store, audio_root, conversion) as audio:
        if chosen.failure_line is not None:
            failed = (ledger.items(job_id, state=state) for state in (ItemState.FAILED, ItemState.DEAD))
            for failure in chain(ledger.rejected_lines(job_id), *failed):
                file.write(chosen.failure_line(job, failure))
                written += 1
        else:
            for count, line in chosen.lines(job, ((item, names.of("", where)) for item, where in audio.located(items))):
                file.write(line)
                written += count
        if chosen.text_line is not None:
            for dialogue, text in text_answers(ledger, store, job_id, where):
                file.write(chosen.text_line(dialogue, text))
                texts += 1
    reasons = left_out(ledger, job, where, items.left_out - texts, written + texts, dialogues=chosen.whole_dialogues)
    return ExportReport(format, to if to == "-" else str(Path(to).absolute()), written + texts, reasons.items, reasons)


def _check_stored_rate(ledger: Ledger, job: Job, conversion: Conversion) -> None:
    """Raises `config.invalid` where the audio keeps a sample rate that its new format cannot hold, before anything is written."""
    if conversion.format is not None and conversion.sample_rate is None:
        # All audio of a job has one rate: that of its model, or of its spec.
        for row in ledger.items(job.id, ItemState.DONE, limit=1):
            if row.artifact is not None:
                check_rate(conversion.format, row.artifact.sample_rate)


def _refuse_lost(ledger: Ledger, store: ObjectStore, job: Job, where: Where | None, *, dialogues: bool) -> None:
    """Raises `store.missing` with the names of objects that are gone or have another size; `store.conflict` where none is gone."""
    lost = [*listed_faults(store, expected_objects(ledger, job.id, ("audio", "text"), where, dialogues=dialogues))]
    if not lost:
        return
    shown = [f"{fault.value} {expected.key}" for expected, fault in lost[:SHOWN_LOST]]
    more = f" and {len(lost) - len(shown)} more" if len(lost) > len(shown) else ""
    missing = any(fault is Fault.MISSING for _, fault in lost)
    raise StoreError(
        ErrorCode.STORE_MISSING if missing else ErrorCode.STORE_CONFLICT,
        f"{len(lost)} of the job's objects cannot be exported: {', '.join(shown)}{more}.",
        f"Make them again with: nightjar verify {job.id} --repair{out_words(job.id, ledger.database.path)}",
    )

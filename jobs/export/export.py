"""From the items of a job to a dataset: streamed in index order, complete or absent, the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.export.audio import AudioPlace
from jobs.export.destination import output, own_output
from jobs.export.espnet import espnet_line, espnet_text_line, together, write_espnet_dataset
from jobs.export.files import PartFiles
from jobs.export.folder import FolderExport, FolderFormat
from jobs.export.items import AudioNames, MadeItem, MadeItems, written_items
from jobs.export.kaldi import write_kaldi
from jobs.export.lhotse import write_lhotse, write_shar
from jobs.export.manifest import manifest_line
from jobs.export.nemo import nemo_line
from jobs.export.openai_batch import openai_batch_line, openai_error_line
from jobs.export.parquet import dataset_card, write_parquet
from jobs.export.plan import WHOLE, Part, Splits
from jobs.export.webdataset import write_webdataset
from jobs.ledger.records import ItemState, Job
from jobs.recent_jobs import out_words
from jobs.store.base import ObjectStore
from jobs.store.s3 import S3Settings
from jobs.verify import Fault, expected_objects, glance_at
from pipelines.errors import ConfigError, ErrorCode, StoreError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

#: What an item becomes in a format that is one file of lines, given where its audio is.
LINE_FORMATS: dict[str, Callable[[Job, MadeItem, str], bytes]] = {
    "manifest": manifest_line,
    "nemo": nemo_line,
    "openai-batch": openai_batch_line,
}
#: The format that is one file of dialogues.
DIALOGUES = "espnet"
#: One file of lines about what is not there.
ERRORS = "openai-batch-errors"
FOLDER_FORMATS: dict[str, FolderFormat] = {
    "espnet-dataset": FolderFormat(write_espnet_dataset, "named", local_audio=True, local_place=True, dialogues=True),
    "kaldi": FolderFormat(write_kaldi, "named", local_audio=True),
    "lhotse": FolderFormat(write_lhotse, "named"),
    "shar": FolderFormat(write_shar, "inside"),
    "webdataset": FolderFormat(write_webdataset, "inside"),
    "parquet": FolderFormat(write_parquet, "inside", card=dataset_card),
}
FORMATS = (DIALOGUES, *LINE_FORMATS, ERRORS, *FOLDER_FORMATS)
#: Objects that are named where some are lost.
SHOWN_LOST = 5
#: Audio in one file of a dataset: few files, and little to redo after a stop.
PART_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written."""

    format: str
    #: Absolute path, `s3://` address, or `-`.
    to: str
    items: int
    #: Items of the job that have no audio (failed, skipped or still pending); of a format of dialogues also the others of theirs.
    left_out: int


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
) -> ExportReport:
    """Writes the items of a job that have audio to `to`: a file or `-` for formats of one file, else a folder or `s3://` prefix.

    Audio in a folder store is named by its path as seen from the file that names it (absolute on standard output, in a bucket,
    or with `absolute`), and by its `s3://` address in a bucket. With `audio_root` it is named by the absolute local path
    `audio_root/<key>`, and fetched from the store where that file is not there yet. Formats that hold the audio end a file before
    its audio passes `part_bytes`. With `splits` every format is a folder. The same call goes on with an export that was stopped.

    What stands at `to` already: a file is written over, and a folder that holds another export, or anything else, is refused.
    With `replaces`, ids of jobs, an export of this format that is theirs makes room for this one, and everything else is
    refused, also a file.

    Raises `config.invalid` for an unknown format or a place that cannot be used, `model.missing_extra` for a library that
    is missing, `NotFoundError`, `StoreError`, `ServiceError`.
    """
    if format not in FORMATS:
        raise _invalid(f"The format {format[:40]!r} is unknown.", f"Use one of: {', '.join(FORMATS)}.")
    job = ledger.job(job_id)
    check_place(format, to, store.url, splits, audio_root)
    if format != ERRORS and audio_root is None:
        _refuse_lost(ledger, store, job)
    if is_one_file(format, splits):
        lines = _ErrorLines(ledger, job) if format == ERRORS else _Lines(ledger, store, job, format, audio_root, to, absolute)
        with output(to) if replaces is None else own_output(to, job_id, replaces) as file:
            for line in lines:
                file.write(line)
        return ExportReport(format, to if to == "-" else str(Path(to).absolute()), lines.count, lines.left_out)
    if format == DIALOGUES and next(written_items(ledger, store, job_id), None) is not None:
        raise _invalid("Answers of this job are text alone, which splits have no place for.", "Leave the splits out.")
    folder = FolderExport(
        ledger, store, job, format, _folder_format(format), splits or WHOLE, part_bytes, audio_root, replaces or (), absolute
    )
    plan = folder.run(to, s3, on_part)
    return ExportReport(format, to if to.startswith("s3://") else str(Path(to).absolute()), plan.items, plan.left_out)


def _refuse_lost(ledger: Ledger, store: ObjectStore, job: Job) -> None:
    """Raises `store.missing` with the names of objects that are gone or have another size; `store.conflict` where none is gone."""
    lost = [*glance_at(store, expected_objects(ledger, job.id, ("audio", "text")))]
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


def is_one_file(format: str, splits: object) -> bool:
    """Whether a format is one file rather than a folder, with these splits or None."""
    return format == ERRORS or ((format == DIALOGUES or format in LINE_FORMATS) and splits is None)


def check_place(format: str, to: str, store_url: str, splits: Splits | None = None, audio_root: Path | None = None) -> None:
    """Raises `config.invalid` for a place to which a known format is never written, whatever the job."""
    if is_one_file(format, splits):
        if splits is not None or to.startswith("s3://"):
            raise _invalid(f"The format {format} is one file.", "Name a local file, and no splits.")
    elif to in ("", "-"):
        raise _invalid(f"The format {format} is a folder.", "Name a folder with --to.")
    else:
        _folder_format(format).check(format, to, store_url, audio_root)


def _folder_format(format: str) -> FolderFormat:
    return FOLDER_FORMATS.get(format) or FolderFormat(partial(_write_lines, format), "named", dialogues=format == DIALOGUES)


def _lines(format: str, job: Job, items: Iterable[tuple[MadeItem, str]]) -> Iterator[tuple[int, bytes]]:
    """The lines of a format, each with the number of its items."""
    if format == DIALOGUES:
        yield from ((len(dialogue), espnet_line(job, dialogue)) for dialogue in together(items))
    else:
        yield from ((1, LINE_FORMATS[format](job, item, where)) for item, where in items)


class _Lines:
    """The lines of the items that have audio."""

    def __init__(
        self,
        ledger: Ledger,
        store: ObjectStore,
        job: Job,
        format: str,
        audio_root: Path | None,
        to: str,
        absolute: bool,
    ) -> None:
        self._names = AudioNames(store, None if absolute or audio_root is not None or to == "-" else Path(to).absolute().parent)
        self._items = MadeItems(ledger, store, job.id, whole=format == DIALOGUES)
        #: Answers that are text alone, for the format that holds them.
        self._texts = written_items(ledger, store, job.id) if format == DIALOGUES else ()
        self._written = 0
        self._store = store
        self._job = job
        self._format = format
        self._audio_root = audio_root
        self.count = 0

    @property
    def left_out(self) -> int:
        return self._items.left_out - self._written

    def __iter__(self) -> Iterator[bytes]:
        with AudioPlace(self._store, self._audio_root) as place:
            named = ((item, self._names.of("", where)) for item, where in place.located(self._items))
            for items, line in _lines(self._format, self._job, named):
                self.count += items
                yield line
        for dialogue, text in self._texts:
            self.count += 1
            self._written += 1
            yield espnet_text_line(dialogue, text)


class _ErrorLines:
    """The lines of what failed: lines of the input that became no item, then items."""

    left_out = 0

    def __init__(self, ledger: Ledger, job: Job) -> None:
        broken = (ledger.items(job.id, state=state) for state in (ItemState.FAILED, ItemState.DEAD))
        self._failed = chain(ledger.rejected_lines(job.id), *broken)
        self._job = job
        self.count = 0

    def __iter__(self) -> Iterator[bytes]:
        for failed in self._failed:
            self.count += 1
            yield openai_error_line(self._job, failed)


def _write_lines(format: str, part: Part, files: PartFiles, job: Job, items: Iterator[tuple[MadeItem, str]]) -> None:
    name = f"{part.split}.jsonl"
    file = files.open(name)
    for _, line in _lines(format, job, ((item, files.named(name, where)) for item, where in items)):
        file.write(line)


def _invalid(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)

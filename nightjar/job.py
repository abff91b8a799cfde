"""A job: its progress, its items as they finish, with their audio and text, its data as datasets, cuts and a report,
and the thread of this program that runs it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import cached_property
from html import escape
from importlib import import_module
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Unpack

from jobs.console import Output
from jobs.delete import Deleted, delete_job, measure_job
from jobs.dialogue import metadata_of
from jobs.export.items import ItemMetadata, item_metadata, pages, read_words
from jobs.job_options import unknown_name, user_name
from jobs.ledger import Ledger
from jobs.ledger.queries import ShardEnds
from jobs.ledger.records import WORDS, Decision, ItemRow, ItemState, RejectedLine
from jobs.ledger.status import JobStatus
from jobs.packs import ArtifactReader
from jobs.progress import Progress
from jobs.recent_jobs import FoundJob
from jobs.settings import Settings, load_settings
from jobs.shard_file import RawLine, ShardLines
from jobs.status import status_lines
from jobs.store import ObjectStore, open_store
from jobs.where import Where, parse_where
from nightjar.local_thread import LocalThread
from nightjar.voice import PATH, Sound, check_type
from pipelines import audio as sounds
from pipelines.errors import ConfigError, ErrorCode, NightjarError, NotFoundError, ServiceError, invalid

if TYPE_CHECKING:
    import datasets
    import lhotse

    from jobs.job_options import CheckOptions
    from pipelines.request import Word
    from worker.check import Checked

POLL_SECONDS = 0.25
#: Maximum length of the audio of an item that is read.
MAX_SECONDS = 24 * 3600.0
_ENDED = {*ItemState} - {ItemState.PENDING}


@dataclass(frozen=True)
class Item:
    """One item that has ended. Its text and its audio are read on demand, also after unpickling in another
    process."""

    #: Unique in the job: the example id, followed by the turn if several turns are synthesized.
    id: str
    example_id: str
    #: Position in the job, from 0.
    index: int
    #: `done`, `failed`, `dead` or `skipped`.
    state: str
    #: Length of the audio; 0 without audio.
    seconds: float
    seed: int | None
    #: Number of the draw (the attempt) that was kept; 0 is the first. None in a job without checks.
    draw: int | None
    #: Name of a score, such as `wer` -> its value; None: not measured.
    scores: Mapping[str, float | None]
    #: The error code of a failed item, and its message.
    error_code: str | None
    error: str | None
    #: Path or `s3://` address of the audio; None if there is none or if it is in a pack.
    path: str | None
    source: InitVar[tuple[Job, ItemRow]]
    #: Where audio and text are read from. Not a field, so it is neither shown nor compared.
    _source: ClassVar[tuple[Job, ItemRow]]

    def __post_init__(self, source: tuple[Job, ItemRow]) -> None:
        object.__setattr__(self, "_source", source)

    @property
    def audio(self) -> Sound:
        """The item's speech. Raises `store.missing` for an item without audio, `StoreError`, and `InputError` for codes
        of audio."""
        job, row = self._source
        if row.artifact is None:
            raise NotFoundError(
                ErrorCode.STORE_MISSING,
                f"The item {self.id[:100]!r} has no audio: it is {self.state}.",
                self.error or "",
            )
        return Sound(*sounds.decode(job._reader.read(row.artifact), max_seconds=MAX_SECONDS), self.text)

    @property
    def text(self) -> str:
        """The requested text."""
        return self._metadata.text

    @property
    def spoken_text(self) -> str:
        """The text as it was spoken, which `normalize` and `lexicon` change."""
        return self._metadata.spoken_text

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with their times, in a job with `timestamps`."""
        job, row = self._source
        found = job._ledger.artifacts_of(job.id, WORDS, [row.index]).get(row.index)
        return () if found is None else read_words(job._reader.read(found))[0]

    @property
    def decision(self) -> Decision | None:
        """What a person decided about its audio: `accepted`, `person`, `decided_at` and `reason`."""
        return self._source[1].decision

    @property
    def speaker(self) -> str:
        """The name of the voice; for a cloned voice `ref-` and the beginning of the recording's hash; without a
        voice the name of the model."""
        return self._metadata.speaker

    @property
    def metadata(self) -> dict[str, Any]:
        """The other columns or keys of its record, with JSON's types."""
        job, row = self._source
        return metadata_of(job._line_of(row).dialogue)

    @property
    def _metadata(self) -> ItemMetadata:
        job, row = self._source
        return item_metadata(job._ledger.job(job.id), job._line_of(row))

    def _repr_html_(self) -> str:
        scores = ", ".join(f"{name} {value:.3g}" for name, value in self.scores.items() if value is not None)
        _, row = self._source
        shown = self.audio._repr_html_() if row.artifact else f"<p>{escape(self.error or self.state)}</p>"
        return f"<div><code>{escape(self.id)}</code> {self.seconds:.2f} s {escape(scores)}{shown}</div>"


class Report(NamedTuple):
    """The report of a job: one HTML file, which a notebook shows."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text())
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width: 100%; height: 40em; border: 0"></iframe>'


class Job:
    """A job on this machine or on workers. Iteration yields its items as they end; as a context manager it waits
    for a local run, or stops it after an error.

    `nightjar.run`, `nightjar.submit` and `nightjar.find_job` return it. The same call resumes an interrupted
    job. It can be pickled: in another process it is a handle of the same job, which reads the ledger and the
    store of its settings.
    """

    def __init__(
        self,
        id: str,
        settings: Settings,
        thread: LocalThread | None = None,
        *,
        quiet: bool = True,
    ) -> None:
        self.id = id
        # Another process may have another working directory.
        self._settings = settings.model_copy(update={"home": settings.home.absolute()})
        self._thread = thread
        self._quiet = quiet
        self._ledger = Ledger.of(settings)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Job], tuple[str, Settings]]:
        return Job, (self.id, self._settings)

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self._ledger.job(self.id).store_url, self._settings.s3)

    @cached_property
    def _reader(self) -> ArtifactReader:
        return ArtifactReader(self._store)

    @property
    def status(self) -> JobStatus:
        """The current state, and counts of items, shards and audio, from the ledger."""
        return self._ledger.status(self.id)

    @property
    def state(self) -> str:
        """`ready`, `running`, `paused`, `completed`, `completed_with_errors`, `failed` or `cancelled`."""
        return self.status.job.state.value

    @property
    def done(self) -> bool:
        """Whether the job has ended, and its local run has cleaned up."""
        return self.status.job.state.final and (self._thread is None or not self._thread.is_alive())

    def wait(self, timeout_seconds: float | None = None) -> Job:
        """Waits until the job ends or the timeout is over, and shows the progress. Ctrl-C stops a local run.

        Raises the error of a failed local run.
        """
        if timeout_seconds is not None:
            check_type("timeout_seconds", timeout_seconds, Real, "seconds")
        deadline = time.monotonic() + (math.inf if timeout_seconds is None else timeout_seconds)
        with self._stopped_by_interrupts(), Progress(quiet=self._quiet) as progress:
            while not self.done and time.monotonic() < deadline:
                self._check()
                progress.update(self.status)
                time.sleep(POLL_SECONDS)
        self._check()
        return self

    def stop(self) -> None:
        """Stops a local run. Running items have some seconds to finish; `nightjar.run` resumes the job."""
        if self._thread is not None:
            self._thread.stop()

    def __iter__(self) -> Iterator[Item]:
        """Yields every item once, as it ends. Ctrl-C during the wait stops a local run.

        Needs one byte of memory per item, and holds some items of the current shard.
        """
        given = bytearray()
        ended: dict[int, int] = {}

        def new_rows(shard: ShardEnds) -> Iterator[ItemRow]:
            first = shard.first_index
            last = shard.last_index
            for row in self._ledger.items(self.id, after=first - 1, limit=last - first + 1):
                if row.index <= last and row.state in _ENDED and not given[row.index]:
                    given[row.index] = True
                    yield row

        with self._stopped_by_interrupts():
            while True:
                final = self.done
                for shard in self._ledger.shard_ends(self.id):
                    if ended.get(shard.no) != shard.ended:
                        ended[shard.no] = shard.ended
                        given.extend(bytes(max(0, shard.last_index + 1 - len(given))))
                        yield from self._items(new_rows(shard))
                self._check()
                if final:
                    return
                time.sleep(POLL_SECONDS)

    def __len__(self) -> int:
        return self.status.items.total

    def items(
        self, *, state: str | None = None, where: str | None = None, limit: int | None = None
    ) -> Iterator[Item]:
        """The items that have ended so far, in the order of the input; `state`: only those with this state, such
        as `done` or `failed`.

        `where`: only those that match a filter of `nightjar items --where`, such as
        `wer < 0.1 and distillmos > 3.5`. Raises `config.invalid` for a wrong filter.
        """
        if state is not None and str(state) not in _ENDED:
            raise unknown_name("state", str(state), sorted(one.value for one in _ENDED))
        if limit is not None:
            check_type("limit", limit, Integral, "a number of items")
        wanted = None if state is None else ItemState(state)
        found = self._ledger.items(self.id, state=wanted, where=_filter(where))
        rows = (row for row in found if row.state in _ENDED)
        return islice(self._items(rows), limit if limit is None else max(limit, 0))

    def refused(self) -> Iterator[RejectedLine]:
        """The first 10,000 rejected lines of the input: `line`, `code`, `message` and `example_id` of each."""
        return self._ledger.rejected_lines(self.id)

    def export(self, format: str, to: str | Path, **options: Any) -> Path:
        """Exports the items that have audio so far, see `nightjar.export`."""
        return export([self], format, to, **options)

    def to_datasets(self, to: str | Path | None = None, *, where: str | None = None) -> datasets.Dataset:
        """The items as a Hugging Face dataset with audio, text and metadata. Writes a Parquet export to `to` and
        reads the dataset from it.

        `where`: a filter as in `items`. Waits for the end of the job. Raises `config.invalid` if no item
        matches.
        """
        library, files = self._exported_for("datasets", "parquet", to, "data/*.parquet", where=where)
        return library.Dataset.from_parquet(files)

    def to_lhotse(self, to: str | Path | None = None, **options: Any) -> lhotse.CutSet:
        """The items as cuts of Lhotse with recordings and supervisions. Writes a Lhotse export to `to` and reads
        the cuts from it.

        `options`: those of `nightjar.export`, such as `dialogues="stereo"`. Waits for the end of the job. Raises `config.invalid` if no item matches.
        """
        library, (file,) = self._exported_for(
            "lhotse", "lhotse", to, "*/*cuts.jsonl.gz", absolute=True, **options
        )
        return library.CutSet.from_file(file)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool | None = None,
        to: str | Path | None = None,
        **options: Any,
    ) -> str:
        """Writes a Parquet export to `to`, pushes it to a dataset of the Hugging Face hub, and returns the address
        of the dataset. Waits for the end of the job.

        Uses the token of `huggingface_hub`. `private`: visibility of a new dataset. `options`: those
        of `nightjar.export`. Raises `NightjarError`; if the token is missing
        or the hub cannot be reached, it does so before the export.
        """
        from jobs.export.hub import check_push, push

        check_push("parquet", str(to or ""), repository)
        return push(self._exported("parquet", to, **options), repository, private=private)

    def report(self, to: str | Path | None = None) -> Report:
        """Writes the report of the job so far, which a notebook shows."""
        from jobs.report import default_place, write_report

        if to is not None:
            check_type("to", to, PATH, "a path")
        place = default_place(self._settings, self.id) if to is None else Path(to).absolute()
        price = self._settings.price_per_gpu_hour
        written = write_report(
            self._ledger, self._found.store, self.id, place, embed=True, price_per_gpu_hour=price
        )
        return Report(Path(written.path))

    def accept(self, ids: Iterable[str]) -> int:
        """Accepts items by their ids, as `nightjar accept` does; returns their number. Raises `NightjarError`."""
        return self._decide(ids, Decision(True, user_name()))

    def refuse(self, ids: Iterable[str], reason: str = "") -> int:
        """Refuses items by their ids, as `nightjar refuse` does; returns their number. Raises `NightjarError`."""
        check_type("reason", reason, str, "a text")
        return self._decide(ids, Decision(False, user_name(), reason))

    def check(self, **options: Unpack[CheckOptions]) -> Checked:
        """Measures the stored audio of a completed job with meters, as `nightjar check` does. Without options, the checks
        of the job measure the items that they have not measured. Raises `NightjarError`."""
        from worker.check import run_check

        return run_check(self._found, options, Output(quiet=self._quiet).note)

    def _decide(self, ids: Iterable[str], decision: Decision) -> int:
        chosen = [ids] if isinstance(ids, str) else list(ids)
        for one in chosen:
            check_type("ids", one, str, "the ids of items")
        count = self._ledger.decide(self.id, chosen, decision)
        self._found.renew_manifest()
        return count

    def delete(self, *, yes: bool = False) -> Deleted:
        """Deletes an ended job, that is, its objects in the store and its rows in the ledger, as
        `nightjar delete` does. Without `yes` nothing is deleted, and the result shows what would be deleted.

        Raises `ServiceError` with `ledger.state` for a job that has not ended.
        """
        check_type("yes", yes, bool, "True or False")
        if not yes:
            return measure_job(self._ledger, self._found.store, self.id)
        if self._thread is not None and self._thread.is_alive():
            raise ServiceError(
                ErrorCode.LEDGER_STATE,
                "The run of this job has not ended.",
                "Use `job.wait()` or `job.stop()` first.",
            )
        return delete_job(self._ledger, self._found.store, self.id)

    @property
    def _found(self) -> FoundJob:
        """The job as it is now. Its store raises `store.unreachable` if it does not exist."""
        return FoundJob(self._settings, self._ledger, self._ledger.job(self.id))

    def close(self) -> None:
        """Stops a local run, and closes the ledger."""
        self.stop()
        self._ledger.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.stop()

    def __repr__(self) -> str:
        items = self.status.items
        return (
            f"Job({self.id!r}, {self.state}, {items.done} of {items.total} items done, {items.failed} failed)"
        )

    def _repr_html_(self) -> str:
        lines = status_lines(self.status, self._settings.price_per_gpu_hour)
        return f"<pre>{escape(chr(10).join(lines))}</pre>"

    def _line_of(self, row: ItemRow) -> RawLine:
        """The line of an item."""
        # The lines of the latest shard are cached.
        with self._lock:
            return self._lines.of(row)

    @cached_property
    def _lines(self) -> ShardLines:
        return ShardLines(self._ledger, self._store, self.id)

    def _items(self, rows: Iterator[ItemRow]) -> Iterator[Item]:
        for page in pages(rows):
            kept = self._ledger.kept_draws(self.id, [row.index for row in page])
            for row in page:
                audio = row.artifact
                draw = kept.get(row.index)
                yield Item(
                    id=row.id,
                    example_id=row.example_id,
                    index=row.index,
                    state=row.state.value,
                    seconds=0.0 if audio is None else audio.samples / audio.sample_rate,
                    seed=None if audio is None else audio.seed,
                    draw=None if draw is None else draw.draw,
                    scores={} if draw is None else {name: score.value for name, score in draw.scores.items()},
                    error_code=None if row.error_code is None else row.error_code.value,
                    error=row.error_message,
                    path=None if audio is None or audio.pack is not None else self._store.uri(audio.key),
                    source=(self, row),
                )

    def _exported(self, format: str, to: str | Path | None, **options: Any) -> Path:
        self.wait()
        if to is None:
            where = _filter(options.get("where"))
            to = self._settings.export_folder(self.id, format, where and str(where))
            # Nightjar chose the folder, so an earlier export in it may be replaced.
            options = {"replaces": [self.id], **options}
        return self.export(format, to, **options)

    def _exported_for(
        self, library: str, format: str, to: str | Path | None, files: str, **options: Any
    ) -> tuple[Any, list[str]]:
        """Imports a library that Nightjar does not install, and exports; returns the library and the exported
        files.

        Raises `config.missing_library`, and `config.invalid` if there are no items, which the libraries do
        not report.
        """
        try:
            reader = import_module(library)
        except ModuleNotFoundError as error:
            raise ConfigError(
                ErrorCode.CONFIG_MISSING_LIBRARY,
                f"This needs the library {error.name}.",
                f"Install it: pip install {error.name}.",
            ) from None
        found = sorted(str(path) for path in self._exported(format, to, **options).glob(files))
        if not found:
            where = _filter(options.get("where"))
            filtered = f" that match {str(where)!r}" if where else ""
            raise invalid(
                f"Job {self.id} has no items with audio{filtered}.",
                f"See them with: nightjar items {self.id}.",
            )
        return reader, found

    def _check(self) -> None:
        """Raises the error of a failed or stopped local run."""
        thread = self._thread
        if thread is not None and thread.error is not None:
            thread.error_raised = True
            raise thread.error
        if thread is not None and thread.stopped:
            raise NightjarError(
                ErrorCode.LEDGER_STATE,
                "The run of this job was stopped.",
                "Make the same call again to continue.",
            )

    @contextmanager
    def _stopped_by_interrupts(self) -> Iterator[None]:
        """Stops a local run if the block is interrupted."""
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            raise


def export(jobs: Iterable[Job], format: str, to: str | Path, **options: Any) -> Path:
    """Exports the items of jobs that have audio so far to one dataset, as `nightjar export` does, and returns
    its path. `options`: those of the command by their Python names, with `where` as in `Job.items`."""
    from jobs.export import export_jobs, parsed_options

    check_type("format", format, str, "the name of a format")
    check_type("to", to, PATH, "a path")
    options = parsed_options(options, "s3", "replaces", "part_bytes", "on_part")
    chosen = list(jobs)
    if not chosen:
        raise invalid("There are no jobs to export.", "Give at least one job.")
    for job in chosen:
        check_type("jobs", job, Job, "a list of jobs")
    options = {"s3": chosen[0]._settings.s3, **options}
    return Path(export_jobs([job._found.stored for job in chosen], format, str(to), **options).to)


def decode(source: Job | str | Path, to: str | Path, *, model: str | None = None) -> Path:
    """Makes the audio of a job, or of an export to a folder, from its codes, as `nightjar decode` does, in the new
    folder `to`. `model`: whose codec decodes. Raises `NightjarError`."""
    from jobs.decode import decode_source

    check_type("source", source, (Job, *PATH), "a job, or the folder of an export")
    check_type("to", to, PATH, "a path")
    check_type("model", model or "", str, "the name or the folder of a model")
    if isinstance(source, Job):
        decode_source(source._settings, source._found.stored, Path(to), model)
    else:
        decode_source(load_settings(), Path(source), Path(to), model)
    return Path(to).absolute()


def augment(source: str | Path, to: str | Path, **effects: Any) -> Path:
    """Writes a second dataset from an export, as `nightjar augment` does. `effects`: `seed`, `speed`, `room`, `noise`,
    `snr`, `band` and `codecs`, with ranges as numbers or pairs such as `snr=(5, 20)`. Raises `NightjarError`."""
    from jobs.export.augment import augment as write

    check_type("source", source, PATH, "a path")
    check_type("to", to, PATH, "a path")
    for name in ("room", "noise"):
        if isinstance(effects.get(name), str):
            effects[name] = Path(effects[name])
    write(Path(source), str(to), s3=load_settings().s3, **effects)
    return Path(to)


def _filter(text: str | None) -> Where | None:
    if text is None:
        return None
    check_type("where", text, str, 'the text of a filter, such as "wer < 0.1"')
    return parse_where(text)

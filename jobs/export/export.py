"""Writes the items of jobs to a file or a dataset: streamed in index order, complete or absent, the same
bytes each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET

from jobs.export.audio import AudioNames, AudioReader, Conversion
from jobs.export.card import CardFacts, dataset_card
from jobs.export.code_formats import interleaved
from jobs.export.conversation import of_dialogues
from jobs.export.dataset import Dataset, Identity, PartFiles, open_destination
from jobs.export.files import output, own_output
from jobs.export.formats import ExportFormat, ExportOptions, find_format
from jobs.export.items import WHOLE, AudioItem, LeftOut, Part, Plan, Splits, make_plan, parse_splits
from jobs.export.job_set import JobSet
from jobs.export.manifest import manifest_line, renew_manifest
from jobs.formatting import json_bytes
from jobs.job_options import plain_numbers, unknown_name
from jobs.ledger.records import WORDS, ItemRow, ItemState, JobSpec
from jobs.provenance import exporter_record, read_records
from jobs.recent_jobs import out_option
from jobs.settings import S3Settings
from jobs.store import StoredJob, is_remote
from jobs.verify import expected_objects, listed_faults
from jobs.where import Where, parse_where
from pipelines.errors import ErrorCode, NightjarError, StoreError, invalid

#: Incremented when a format's files change for the same items.
VERSION = 3
#: Number of lost objects that an error names.
SHOWN_LOST = 5
#: The options of an export for users, by their names in Python and in schedules, with the type of their values.
OPTIONS = {
    **dict.fromkeys(("audio_format", "splits", "audio_root", "where", "license"), str),
    **dict.fromkeys(("dialogues", "gaps", "interleave", "tokenizer"), str),
    "sample_rate": int,
    "part_mb": int,
    "absolute": bool,
    "unique": bool,
}
_PARSERS = {"splits": parse_splits, "audio_root": Path, "where": parse_where}


class ExportReport(NamedTuple):
    """A finished export."""

    format: str
    #: Absolute path, `s3://` address, or `-`.
    to: str
    items: int
    #: Items of the jobs that were not written, by reason.
    reasons: LeftOut
    #: Number of items whose text and voice an earlier item has, written or not; None: not counted, because
    #: the export was complete already, or lists failures.
    duplicates: int | None

    @property
    def left_out(self) -> int:
        """Number of items of the jobs that were not written."""
        return self.reasons.items


def parsed_options(given: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The arguments of `export_jobs` for options, of which texts are read as the command does. `others`: further
    arguments that may be given. Raises `config.invalid`."""
    options = plain_numbers(given)
    for name, value in options.items():
        if name not in (*OPTIONS, *others):
            raise unknown_name("option", name, OPTIONS)
        kind = OPTIONS.get(name)
        if kind and type(value) is kind and (name != "part_mb" or value > 0):
            options[name] = _PARSERS.get(name, kind)(value)
        elif kind and not (value is None or isinstance(value, Path | Splits)):
            raise invalid(
                f"The option {name} of the export is {value!r:.80}.",
                f"Its type is {kind.__name__}{', above 0' * (kind is int)}.",
            )
    if (part_mb := options.pop("part_mb", None)) is not None:
        options["part_bytes"] = part_mb * 10**6
    return options


def checked_format(
    chosen: ExportFormat, to: str, store_url: str, spec: JobSpec, options: ExportOptions
) -> ExportFormat:
    """The format with its options for jobs with this spec. Raises `config.invalid`, and the errors of
    `ExportFormat.check`."""
    options.conversion.check(spec.format)
    chosen = of_dialogues(chosen, options, spec.speak)
    # Also before a tokenizer is looked for, which may be on the hub.
    chosen.check(to, store_url, spec, options)
    chosen = interleaved(chosen, options, spec)
    chosen.check(to, store_url, spec, options)
    return chosen


def export_jobs(
    jobs: Iterable[StoredJob],
    format: str,
    to: str,
    *,
    s3: S3Settings | None = None,
    on_part: Callable[[Part], None] = lambda _: None,
    replaces: Collection[str] | None = None,
    **options: Any,
) -> ExportReport:
    """Writes the items of jobs that have audio to `to`: a file or `-` for formats of one file, else a folder or
    `s3://` prefix. `options`: the fields of `ExportOptions`. The jobs are written in the order in which they were
    submitted.

    Audio in a folder store is named by its path relative to the file that contains the name (absolute on
    standard output, in a bucket, or with `absolute`), and audio in a bucket by its `s3://` address. The same call
    continues an export that was stopped. If a job is running, the items that are done are written, and the same
    call later replaces that export.

    An existing file at `to` is overwritten; a folder that contains another export, or other files, is
    refused. With `replaces` (ids of jobs), an export of one of these jobs in this format is replaced, and
    everything else is refused, including an existing file.

    Raises `config.invalid` for an unknown format, a filter or a destination that cannot be used, and for jobs
    that the format cannot hold together, `config.missing_library` for a library that is not installed,
    `NotFoundError`, `StoreError`, `ServiceError`.
    """
    chosen = find_format(format)
    asked = ExportOptions(**options)
    found = {one.job.id: one for one in jobs}
    jobs = sorted(found.values(), key=lambda one: (one.job.created_at, one.job.id))
    _check_audio(chosen, jobs, asked)
    for one in jobs:
        chosen = checked_format(chosen, to, one.store.url, one.job.spec, asked)
        if chosen.failure_line is None and asked.audio_root is None:
            _refuse_lost(one, asked.where, chosen)
        # A killed process may have left an old one. The ledger and the store may be read-only.
        with suppress(NightjarError):
            renew_manifest(one.ledger, one.store, one.job.id)
    job_set = JobSet(jobs, asked.where, chosen, unique=asked.unique)
    one_file = chosen.one_file(asked.splits)
    path = None if to == "-" or is_remote(to) else Path(to).absolute()
    # Other names of audio are absolute.
    folder = None if path is None or asked.absolute or asked.audio_root else path.parent if one_file else path
    planned = _Export(
        job_set, chosen, asked, asked.splits or WHOLE, AudioNames((one.store for one in jobs), folder)
    )
    if one_file:
        items, reasons = planned.to_file(to, replaces)
    else:
        if chosen.text_line is not None and any(job_set.text_answers()):
            raise invalid(
                "Some answers of this job are text without audio, which splits cannot contain.",
                "Leave the splits out.",
            )
        plan = planned.to_folder(to, replaces or (), s3, on_part)
        items = plan.items
        reasons = plan.reasons
    return ExportReport(format, str(path or to), items, reasons, job_set.duplicates)


def _check_audio(format: ExportFormat, jobs: Sequence[StoredJob], options: ExportOptions) -> None:
    """Checks the conversion for each job, and what the format needs equal in all jobs."""
    outputs = {one.job.spec.output or "audio" for one in jobs}
    if format.codes and len(outputs) > 1:
        raise invalid(
            f"The outputs of these jobs differ: {', '.join(sorted(outputs))}.",
            "Export them to several datasets.",
        )
    made = {"audio format": {}, "sample rate": {}}
    for ledger, _, job in jobs:
        # All audio of a job has the same rate: that of its model, or of its spec.
        rates = [
            row.artifact.sample_rate for row in ledger.items(job.id, ItemState.DONE, limit=1) if row.artifact
        ]
        options.conversion.check(job.spec.format, *rates)
        made["audio format"].setdefault(options.audio_format or job.spec.format, job.id)
        for rate in rates:
            made["sample rate"].setdefault(options.sample_rate or rate, job.id)
    for name in format.equal if outputs != {"codes"} else ():
        if len(made[name]) > 1:
            found = ", ".join(f"{value} in {job_id}" for value, job_id in made[name].items())
            option = f"--{name.replace(' ', '-')} {min(made[name])}"
            root = "" if format.embeds_audio else " and --audio-root"
            raise invalid(
                f"The format {format.name} needs one {name}, and these jobs have several: {found}.",
                f"Add {option}{root}, or export the jobs to several datasets.",
            )


def _refuse_lost(one: StoredJob, where: Where | None, format: ExportFormat) -> None:
    """Raises `store.missing` with the names of objects that are missing or have another size;
    `store.conflict` if none is missing."""
    ledger, store, job = one
    kinds = ("audio", "text", WORDS, *["codes"] * format.codes)
    objects = expected_objects(ledger, job.id, kinds, where, dialogues=format.whole_dialogues)
    lost = [*listed_faults(store, objects)]
    if not lost:
        return
    shown = [f"{fault} {expected.key}" for expected, fault in lost[:SHOWN_LOST]]
    more = f" and {len(lost) - len(shown)} more" if len(lost) > len(shown) else ""
    missing = any(fault == "missing" for _, fault in lost)
    raise StoreError(
        ErrorCode.STORE_MISSING if missing else ErrorCode.STORE_CONFLICT,
        f"{len(lost)} of the job's objects cannot be exported: {', '.join(shown)}{more}.",
        f"Make them again with: nightjar verify {job.id} --repair{out_option(job.id, ledger.path)}",
    )


class _Export(NamedTuple):
    """An export in progress."""

    jobs: JobSet
    format: ExportFormat
    options: ExportOptions
    splits: Splits
    names: AudioNames

    def to_file(self, to: str, replaces: Collection[str] | None) -> tuple[int, LeftOut]:
        """Writes the file of a format of lines; returns the number of its items, and the items left out."""
        opened = output(to) if replaces is None else own_output(to, self.jobs.name, replaces)
        items = 0
        with opened as file:
            for count, line in self._lines():
                file.write(line)
                items += count
        failures = self.format.failure_line is not None
        return items, LeftOut(running=self.jobs.running) if failures else self.jobs.left_out(items)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of the file, each with the number of its items."""
        chosen = self.format
        jobs = self.jobs
        if chosen.failure_line is not None:
            for ledger, _, job in jobs.jobs:
                for failure in chain(ledger.rejected_lines(job.id), ledger.broken_items(job.id)):
                    yield 1, chosen.failure_line(job, failure)
            return
        if jobs.several or jobs.unique:
            jobs.choose()
        located = self._read(jobs.rows(), note=True)
        yield from chosen.lines((item, self.names.of("", where)) for item, where in located)
        jobs.count()
        if chosen.text_line is not None:
            for dialogue, text in jobs.text_answers():
                yield 1, chosen.text_line(dialogue, text)

    def to_folder(
        self, to: str, replaces: Collection[str], s3: S3Settings | None, on_part: Callable[[Part], None]
    ) -> Plan:
        """Writes the missing parts of a dataset. `on_part` is called with each part that is completed.

        Raises `config.invalid` for a destination that contains another export or other files.
        """
        with open_destination(to, s3) as destination:
            plan = self._plan()
            dataset = Dataset(destination, self._identity(plan), self.names)
            if dataset.begin(replaces):
                return plan
            counts = dict.fromkeys(self.splits.bounds, 0)
            for part in plan.parts:
                counts[part.split] += part.items
                if dataset.add(f"{part.split}-{part.number:05d}", partial(self._write_part, part)):
                    on_part(part)
            dataset.add("common", partial(self._write_common, plan), again=True)
            dataset.finish(counts, plan.reasons)
            return plan

    def _read(self, rows: Iterator[ItemRow], *, note: bool = False) -> Iterator[tuple[AudioItem, Any]]:
        """Yields each item with its audio, if the format contains it, else with its path or address. `note`: as
        `JobSet.noting` does."""
        chosen = self.format
        for one, items in self.jobs.by_job(rows):
            # Sounds are converted as a whole.
            conversion = Conversion() if chosen.sounds else self.options.conversion
            holds = chosen.embeds_audio or chosen.names_audio or chosen.needs_codes
            codes = chosen.codes and holds and bool(one.job.spec.output)
            audio = AudioReader(one.store, self.options.audio_root, conversion, codes)
            items = self.jobs.noting(items) if note else items
            yield from audio.loaded(items) if chosen.embeds_audio else audio.located(items)

    def _write_part(self, part: Part, files: PartFiles) -> None:
        """Writes the files of a part. Raises `config.invalid` if its items have changed since the export was
        planned."""

        def rows() -> Iterator[ItemRow]:
            count = audio_bytes = 0
            for row in takewhile(lambda row: row.index <= part.last, self.jobs.rows(part.first - 1)):
                if self.splits.of(row.example_id) == part.split:
                    count += 1
                    audio_bytes += row.artifact.bytes if row.artifact else 0
                    yield row
            if (count, audio_bytes) != (part.items, part.audio_bytes):
                raise invalid(
                    "The job changed while it was exported.",
                    "Wait until it has ended, then export it to an empty folder or prefix.",
                )

        items = self._read(rows())
        sounds = self.format.sounds
        whole = items if sounds is None else sounds.dialogues(items)
        self.format.write(part, files, self.jobs.jobs[0].job, whole)

    def _plan(self) -> Plan:
        if self.jobs.several or self.jobs.running or self.jobs.unique:
            self.jobs.choose()
        part_bytes = (
            self.options.part_bytes if self.format.embeds_audio and not self.format.one_part else None
        )
        plan = make_plan(self.jobs.rows(), self.splits, part_bytes, whole=self.format.whole_dialogues)
        return plan._replace(reasons=self.jobs.left_out(plan.items))

    def _identity(self, plan: Plan) -> Identity:
        jobs = self.jobs.jobs
        sounds = self.format.sounds
        options = self.options
        places = dict.fromkeys(self.names.base(one.store) for one in jobs)
        place = ",".join(places) if options.audio_root is None else str(options.audio_root.absolute())
        return Identity(
            self.jobs.name,
            self.format.name,
            VERSION,
            plan.digest,
            tuple(self.splits.bounds.items()),
            options.part_bytes,
            "" if self.format.embeds_audio else place,
            options.conversion.name,
            sounds=UNSET if sounds is None else (sounds.mode, sounds.gaps),
            where=None if options.where is None else str(options.where),
            running=plan.reasons.running,
            jobs=tuple(one.job.id for one in jobs) if self.jobs.several else UNSET,
            unique=options.unique or UNSET,
            license=options.license or UNSET,
            variant=self.format.variant or UNSET,
        )

    def _write_common(self, plan: Plan, files: PartFiles) -> None:
        """Writes the manifest of all items that match the filter (of sounds: of all turns in them), the
        provenance and the card."""
        jobs = self.jobs
        sounds = self.format.sounds
        facts = CardFacts()
        noted = facts.noting(jobs.noting(jobs.items(jobs.rows())))
        partly = self.format.whole_dialogues and sounds is None
        listed = jobs.items(jobs.rows(whole=False)) if partly else noted
        if sounds is not None:
            listed = sounds.placed(listed)
        with files.gzip("manifest.jsonl.gz") as manifest:
            manifest.writelines(manifest_line(item.job, item, "") for item in listed)
        # What the card says is known at the end.
        deque(noted, maxlen=0)
        jobs.count()
        records = [read_records(store, job) or [exporter_record(job)] for _, store, job in jobs.jobs]
        files.add("provenance.json", json_bytes([*chain.from_iterable(records)]))
        if self.format.card is not None:
            card = self.format.card(jobs.jobs[0].job, plan)
        else:
            card = dataset_card(jobs, plan, facts, self.format, self.options)
        files.add("README.md", card)

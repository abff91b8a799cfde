"""Writes the items of jobs to a file or a dataset: streamed in index order, complete or absent, the same
bytes each time.

A dataset is written part by part, so that a stopped export continues with its current part. While an export
runs, `_export/plan.json` at its destination identifies it, and `_export/train-00000.json` lists the files of
a part. The list is written when the files are finished and before the first of them is moved to its name, so
every file at the destination is known to belong to the export. `export.json` is written last, with the hash
of every file. An export that replaces another first turns that one into a stopped export, then removes the
files in its lists. So the replacement can also be stopped and continued at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.export.audio import AudioNames, AudioReader, Conversion
from jobs.export.card import CardFacts, dataset_card
from jobs.export.code_formats import interleaved
from jobs.export.conversation import Gaps, of_dialogues
from jobs.export.files import (
    AGAIN,
    END,
    PLAN,
    RECORDS,
    Destination,
    PartFiles,
    WrittenFile,
    foreign_file,
    json_bytes,
    open_destination,
    output,
    own_output,
)
from jobs.export.formats import ExportFormat, find_format
from jobs.export.items import (
    WHOLE,
    AudioItem,
    LeftOut,
    Part,
    Plan,
    Splits,
    make_plan,
)
from jobs.export.job_set import JobSet, Repeats, StoredJob, in_order
from jobs.export.manifest import manifest_line
from jobs.ledger.records import WORDS, ItemRow, ItemState, Job
from jobs.provenance import exporter_record, read_records
from jobs.recent_jobs import out_option
from jobs.store import ObjectStore, is_remote
from jobs.verify import Fault, expected_objects, listed_faults
from jobs.where import Where
from pipelines.errors import ConfigError, ErrorCode, StoreError, invalid

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import S3Settings

#: Incremented when a format's files change for the same items.
VERSION = 3
#: Number of lost objects that an error names.
SHOWN_LOST = 5
#: Maximum size of the audio in one file of a dataset: a compromise between few files and little repeated work
#: after a stop.
PART_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A finished export."""

    format: str
    #: Absolute path, `s3://` address, or `-`.
    to: str
    items: int
    #: Items of the jobs that were not written, by reason.
    reasons: LeftOut
    #: Number of items whose text and voice an earlier item has, written or not; None: not counted, because
    #: the export was complete already, or lists failures.
    duplicates: int | None = None

    @property
    def left_out(self) -> int:
        """Number of items of the jobs that were not written."""
        return self.reasons.items


def export(
    ledger: Ledger,
    store: ObjectStore,
    job_id: str,
    format: str,
    to: str,
    audio_root: Path | None = None,
    **options: Any,
) -> ExportReport:
    """Writes one job, see `export_jobs`."""
    return export_jobs(
        [StoredJob(ledger, store, ledger.job(job_id))], format, to, audio_root=audio_root, **options
    )


def export_jobs(
    jobs: Iterable[StoredJob],
    format: str,
    to: str,
    *,
    audio_root: Path | None = None,
    splits: Splits | None = None,
    part_bytes: int = PART_BYTES,
    s3: S3Settings | None = None,
    on_part: Callable[[Part], None] = lambda _: None,
    replaces: Collection[str] | None = None,
    absolute: bool = False,
    audio_format: str | None = None,
    sample_rate: int | None = None,
    where: Where | None = None,
    unique: bool = False,
    license: str | None = None,
    dialogues: str | None = None,
    gaps: str | None = None,
    interleave: str | None = None,
    tokenizer: str | None = None,
) -> ExportReport:
    """Writes the items of jobs that have audio, and match `where`, to `to`: a file or `-` for formats of
    one file, else a folder or `s3://` prefix. The jobs are written in the order in which they were submitted.

    Audio in a folder store is named by its path relative to the file that contains the name (absolute on
    standard output, in a bucket, or with `absolute`), and audio in a bucket by its `s3://` address. With
    `audio_root`, audio is named by the absolute local path `audio_root/<key>`, and copied there from the
    store if the file is missing; audio in packs requires `audio_root`. Formats that contain the audio begin a
    new file before the stored size of its audio exceeds `part_bytes`. With `audio_format` (`wav`, `flac`,
    `mp3`, `opus`) or `sample_rate` (Hz), audio that the export contains or copies is converted. With
    `splits`, every format is a folder. With `dialogues` (`mono`, `stereo`) the export contains one sound for
    each dialogue, whose pauses are drawn from `gaps` (see `jobs.export.conversation`). The same call continues an export that was stopped. A format of
    dialogues writes a dialogue if one of its items matches. If a job is running, the items that are done
    are written, and the same call later replaces that export. With `unique`, of the items with the same text
    and voice (in a format of dialogues: of equal dialogues) the first one is written. `license`: the license
    of the dataset in its card, such as `apache-2.0`.

    An existing file at `to` is overwritten; a folder that contains another export, or other files, is
    refused. With `replaces` (ids of jobs), an export of one of these jobs in this format is replaced, and
    everything else is refused, including an existing file.

    Raises `config.invalid` for an unknown format, a filter or a destination that cannot be used, and for jobs
    that the format cannot hold together, `config.missing_library` for a library that is not installed,
    `NotFoundError`, `StoreError`, `ServiceError`.
    """
    chosen, jobs = find_format(format), in_order(jobs)
    conversion = _conversion(chosen, jobs, audio_format, sample_rate)
    for ledger, store, job in jobs:
        chosen = of_dialogues(chosen, dialogues, gaps, conversion, job.spec.speak)
        chosen = interleaved(chosen, interleave, tokenizer, job.spec)
        chosen.check(
            to, store.url, job.spec, splits, audio_root, conversion, where, unique=unique, license=license
        )
        if chosen.failure_line is None and audio_root is None:
            _refuse_lost(ledger, store, job, where, dialogues=chosen.whole_dialogues, codes=chosen.codes)
    job_set = JobSet(jobs, where, chosen)
    planned = _Export(
        job_set, chosen, splits or WHOLE, part_bytes, audio_root, absolute, conversion, unique, license
    )
    if chosen.one_file(splits):
        items, reasons = planned.to_file(to, replaces)
    else:
        if chosen.text_line is not None and any(job_set.text_answers()):
            message = "Some answers of this job are text without audio, which splits cannot contain."
            raise invalid(message, "Leave the splits out.")
        plan = planned.to_folder(to, replaces or (), s3, on_part)
        items, reasons = plan.items, plan.reasons
    place = to if to == "-" or is_remote(to) else str(Path(to).absolute())
    return ExportReport(format, place, items, reasons, job_set.duplicates)


def _conversion(
    format: ExportFormat, jobs: Sequence[StoredJob], audio_format: str | None, sample_rate: int | None
) -> Conversion:
    """Checks the conversion for each job, and what the format needs equal in all jobs."""
    conversion = Conversion()
    if format.codes and len({one.job.spec.output for one in jobs}) > 1:
        raise invalid("Some of these jobs have codes, and others not.", "Export them to several datasets.")
    made: dict[str, dict[Any, str]] = {"audio format": {}, "sample rate": {}}
    for ledger, _, job in jobs:
        # All audio of a job has the same rate: that of its model, or of its spec.
        rates = [
            row.artifact.sample_rate for row in ledger.items(job.id, ItemState.DONE, limit=1) if row.artifact
        ]
        conversion = Conversion.of(audio_format, sample_rate, job.spec.format, *rates)
        made["audio format"].setdefault(audio_format or job.spec.format, job.id)
        for rate in rates:
            made["sample rate"].setdefault(sample_rate or rate, job.id)
    for name in format.equal:
        if len(made[name]) > 1:
            found = ", ".join(f"{value} in {job_id}" for value, job_id in made[name].items())
            option = f"--{name.replace(' ', '-')} {min(made[name])}"
            root = "" if format.embeds_audio else " and --audio-root"
            raise invalid(
                f"The format {format.name} needs one {name}, and these jobs have several: {found}.",
                f"Add {option}{root}, or export the jobs to several datasets.",
            )
    return conversion


def _refuse_lost(
    ledger: Ledger, store: ObjectStore, job: Job, where: Where | None, *, dialogues: bool, codes: bool
) -> None:
    """Raises `store.missing` with the names of objects that are missing or have another size;
    `store.conflict` if none is missing."""
    kinds = ("audio", "text", WORDS, *["codes"] * codes)
    lost = [*listed_faults(store, expected_objects(ledger, job.id, kinds, where, dialogues=dialogues))]
    if not lost:
        return
    shown = [f"{fault.value} {expected.key}" for expected, fault in lost[:SHOWN_LOST]]
    more = f" and {len(lost) - len(shown)} more" if len(lost) > len(shown) else ""
    missing = any(fault is Fault.MISSING for _, fault in lost)
    raise StoreError(
        ErrorCode.STORE_MISSING if missing else ErrorCode.STORE_CONFLICT,
        f"{len(lost)} of the job's objects cannot be exported: {', '.join(shown)}{more}.",
        f"Make them again with: nightjar verify {job.id} --repair{out_option(job.id, ledger.path)}",
    )


class Identity(msgspec.Struct, frozen=True):
    """The content of `_export/plan.json`. Only an export with an equal identity continues a stopped one."""

    job: str
    format: str
    version: int
    #: `Plan.digest`
    digest: str
    splits: tuple[tuple[str, int], ...]
    part_bytes: int
    audio: str
    #: `Conversion.name`
    converted: str = ""
    #: The sounds of dialogues, if the export contains them.
    sounds: tuple[str, Gaps] | msgspec.UnsetType = msgspec.UNSET
    #: The filter in its normal form, if there is one.
    where: str | None = None
    #: Whether the job was still running; a later export of the job then replaces this one.
    running: bool = False
    #: The jobs, if there are several; `job` is then the name of the set.
    jobs: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    unique: bool | msgspec.UnsetType = msgspec.UNSET
    license: str | msgspec.UnsetType = msgspec.UNSET
    #: `ExportFormat.variant`
    variant: str | msgspec.UnsetType = msgspec.UNSET


class Finished(msgspec.Struct, frozen=True):
    """The content of `export.json`, the summary of a complete export."""

    identity: Identity
    items: dict[str, int]
    left_out: int
    files: list[WrittenFile]
    reasons: LeftOut = LeftOut()
    schema: str = "nightjar.dataset/1"


@dataclass(frozen=True, slots=True)
class _Export:
    """An export in progress."""

    jobs: JobSet
    format: ExportFormat
    splits: Splits
    part_bytes: int
    audio_root: Path | None
    #: Whether audio is named by absolute paths.
    absolute: bool
    conversion: Conversion
    unique: bool
    license: str | None

    def to_file(self, to: str, replaces: Collection[str] | None) -> tuple[int, LeftOut]:
        """Writes the file of a format of lines; returns the number of its items, and the items left out."""
        names = self._names(None if to == "-" else Path(to).absolute().parent)
        opened = output(to) if replaces is None else own_output(to, self.jobs.name, replaces)
        items = 0
        with opened as file:
            for count, line in self._lines(names):
                file.write(line)
                items += count
        failures = self.format.failure_line is not None
        return items, LeftOut(running=self.jobs.running) if failures else self.jobs.left_out(items)

    def _lines(self, names: AudioNames) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of the file, each with the number of its items."""
        chosen = self.format
        if chosen.failure_line is not None:
            for ledger, _, job in self.jobs.jobs:
                failed = (ledger.items(job.id, state=state) for state in (ItemState.FAILED, ItemState.DEAD))
                for failure in chain(ledger.rejected_lines(job.id), *failed):
                    yield 1, chosen.failure_line(job, failure)
            return
        if self.jobs.several or self.unique:
            self.jobs.choose(unique=self.unique)
        texts = Repeats()
        located = self._read(self.jobs.rows(), texts)
        yield from chosen.lines((item, names.of("", where)) for item, where in located)
        self.jobs.count(texts)
        if chosen.text_line is not None:
            for dialogue, text in self.jobs.text_answers():
                yield 1, chosen.text_line(dialogue, text)

    def to_folder(
        self, to: str, replaces: Collection[str], s3: S3Settings | None, on_part: Callable[[Part], None]
    ) -> Plan:
        """Writes the missing parts of a dataset. `on_part` is called with each part that is completed.

        Raises `config.invalid` for a destination that contains another export or other files.
        """
        with open_destination(to, s3) as destination:
            plan = self._plan()
            names = self._names(None if is_remote(to) else Path(to).absolute())
            identity = self._identity(plan, names)
            if begin(destination, identity, replaces):
                return plan
            found, sounds = destination.sizes(), self.format.sounds
            files: list[WrittenFile] = []
            for part in plan.parts:
                record = f"{RECORDS}/{part.split}-{part.number:05d}.json"
                written = written_part(destination, found, record)
                if written is None:
                    first, items = self.jobs.jobs[0].job, self._read(self._rows_of(part))
                    whole = items if sounds is None else sounds.dialogues(items)
                    with PartFiles(destination, names) as part_files:
                        self.format.write(part, part_files, first, whole)
                        written = part_files.publish(record)
                    on_part(part)
                files += written
            with PartFiles(destination, names) as common:
                self._write_common(common, plan)
                files += common.publish(f"{RECORDS}/common.json")
            counts = dict.fromkeys(self.splits.bounds, 0)
            for part in plan.parts:
                counts[part.split] += part.items
            finish(destination, Finished(identity, counts, plan.reasons.items, files, plan.reasons))
            return plan

    def _read(self, rows: Iterator[ItemRow], texts: Repeats | None = None) -> Iterator[tuple[AudioItem, Any]]:
        """Yields each item with its audio, if the format contains it, else with its path or address. Adds the
        texts to `texts`."""
        for one, items in self.jobs.by_job(rows):
            if texts is not None:
                items = self.jobs.noting(items, texts)
            # Sounds are converted as a whole.
            conversion = Conversion() if self.format.sounds else self.conversion
            holds = self.format.embeds_audio or self.format.names_audio or self.format.needs_codes
            codes = self.format.codes and holds and bool(one.job.spec.output)
            with AudioReader(one.store, self.audio_root, conversion, codes) as audio:
                yield from (audio.loaded if self.format.embeds_audio else audio.located)(items)

    def _rows_of(self, part: Part) -> Iterator[ItemRow]:
        """The items of a part. Raises `config.invalid` if they have changed since the export was planned."""
        count = audio_bytes = 0
        for row in takewhile(lambda row: row.index <= part.last, self.jobs.rows(part.first - 1)):
            if self.splits.of(row.example_id) == part.split:
                count, audio_bytes = count + 1, audio_bytes + (row.artifact.bytes if row.artifact else 0)
                yield row
        if (count, audio_bytes) != (part.items, part.audio_bytes):
            advice = "Wait until it has ended, then export it to an empty folder or prefix."
            raise invalid("The job changed while it was exported.", advice)

    def _plan(self) -> Plan:
        if self.jobs.several or self.jobs.running or self.unique:
            self.jobs.choose(unique=self.unique)
        part_bytes = self.part_bytes if self.format.embeds_audio and not self.format.one_part else None
        plan = make_plan(self.jobs.rows(), self.splits, part_bytes, whole=self.format.whole_dialogues)
        return msgspec.structs.replace(plan, reasons=self.jobs.left_out(plan.items))

    def _names(self, folder: Path | None) -> AudioNames:
        stores = [one.store for one in self.jobs.jobs]
        return AudioNames(stores, None if self.absolute or self.audio_root is not None else folder)

    def _identity(self, plan: Plan, names: AudioNames) -> Identity:
        jobs, sounds = self.jobs.jobs, self.format.sounds
        places = dict.fromkeys(names.base(one.store) or one.store.url for one in jobs)
        place = ",".join(places) if self.audio_root is None else str(self.audio_root.absolute())
        return Identity(
            self.jobs.name,
            self.format.name,
            VERSION,
            plan.digest,
            tuple(self.splits.bounds.items()),
            self.part_bytes,
            "" if self.format.embeds_audio else place,
            self.conversion.name,
            sounds=msgspec.UNSET if sounds is None else (sounds.mode, sounds.gaps),
            where=None if self.jobs.where is None else str(self.jobs.where),
            running=plan.reasons.running,
            jobs=tuple(one.job.id for one in jobs) if self.jobs.several else msgspec.UNSET,
            unique=self.unique or msgspec.UNSET,
            license=self.license or msgspec.UNSET,
            variant=self.format.variant or msgspec.UNSET,
        )

    def _write_common(self, files: PartFiles, plan: Plan) -> None:
        """Writes the manifest of all items that match the filter (of sounds: of all turns in them), the
        provenance and the card."""
        jobs, sounds = self.jobs, self.format.sounds
        partly = self.format.whole_dialogues and sounds is None
        facts, texts = CardFacts(), Repeats()
        items = jobs.items(jobs.rows(whole=sounds is not None))
        if not partly:
            items = facts.noting(jobs.noting(items, texts))
        if sounds is not None:
            items = sounds.placed(items)
        with files.gzip("manifest.jsonl.gz") as manifest:
            manifest.writelines(manifest_line(item.job, item, "") for item in items)
        if partly:
            for _ in facts.noting(jobs.noting(jobs.items(jobs.rows()), texts)):
                pass
        jobs.count(texts)
        records = [read_records(store, job) or [exporter_record(job)] for _, store, job in jobs.jobs]
        files.add("provenance.json", json_bytes([*chain.from_iterable(records)]))
        if self.format.card is not None:
            card = self.format.card(jobs.jobs[0].job, plan)
        else:
            card = dataset_card(jobs, plan, facts, self.format, self.conversion, self.license)
        files.add("README.md", card)


def begin(destination: Destination, identity: Identity, replaces: Collection[str]) -> bool:
    """Claims the destination for this export. True: the export is complete already."""
    done = destination.record(END, Finished)
    old = destination.record(PLAN, Identity) if done is None else done.identity
    if old is None:
        if destination.exclusive and any(not _is_record(name) for name in destination.sizes()):
            message = f"{destination.address!r} contains files that no export wrote."
            raise invalid(message, "Export to an empty folder.")
    elif done is not None and old == identity and _incomplete(destination.sizes(), done.files) is None:
        destination.remove_records()
        return True
    elif done is not None or old != identity:
        _replace(destination, old, [] if done is None else done.files, identity, replaces)
    destination.write_record(PLAN, identity)
    return False


def finish(destination: Destination, done: Finished) -> None:
    """Writes the summary. Raises `config.invalid` if a file is missing or has another size."""
    if (gone := _incomplete(destination.sizes(), done.files)) is not None:
        message = f"{gone!r} in {destination.address!r} was removed or changed during the export."
        raise invalid(message, "Export again.")
    done.files.sort(key=lambda file: file.name)
    destination.write_record(END, done)
    destination.remove_records()


def _replace(
    destination: Destination,
    old: Identity,
    listed: list[WrittenFile],
    new: Identity,
    replaces: Collection[str],
) -> None:
    """Removes an export that this one replaces, or this one itself if files are missing. `replaces`: jobs
    whose exports in this format are replaced. An earlier export of the same job, made while it was running,
    is also replaced.

    Raises `config.invalid` for any other export, and removes nothing if a file was changed.
    """
    continued = msgspec.structs.replace(old, digest=new.digest, version=new.version, running=new.running)
    own = old == new or (old.running and continued == new)
    if not own and not (old.job in replaces and old.format == new.format):
        filtered = f" with the filter {old.where!r}" if old.where else ""
        message = f"{destination.address!r} contains another export: of job {old.job} in the format {old.format}{filtered}, with other items or options."
        raise invalid(message, "Export to an empty folder or prefix, or remove the other export.")
    lists = [destination.record(name, list[WrittenFile]) or [] for name in destination.lists()]
    files = {file.name: file for file in chain(listed, *lists)}
    if destination.exclusive:
        for name in destination.sizes():
            if name not in files and name != END and not _is_record(name):
                raise foreign_file(destination.address, name)
    for file in files.values():
        if destination.sha256(file.name) not in (None, file.sha256):
            raise _changed_file(destination, file)
    if listed:
        # Turns it into a stopped export, because `export.json` must not list missing files.
        destination.write_record(PLAN, old)
        destination.write_record(f"{RECORDS}/replaced.json", listed)
    for name in (END, *files):
        destination.remove(name)
    destination.remove_records()


def written_part(destination: Destination, found: Mapping[str, int], record: str) -> list[WrittenFile] | None:
    """The files of a complete part; None: it must be written. Raises `config.invalid` for a changed file."""
    listed = destination.record(record, list[WrittenFile])
    for file in listed or ():
        if found.get(file.name, file.bytes) != file.bytes:
            raise _changed_file(destination, file)
    return listed if listed is not None and _incomplete(found, listed) is None else None


def _changed_file(destination: Destination, file: WrittenFile) -> ConfigError:
    return invalid(f"{file.name!r} in {destination.address!r} was changed after it was exported.", AGAIN)


def _is_record(name: str) -> bool:
    return name.startswith(f"{RECORDS}/")


def _incomplete(sizes: Mapping[str, int], files: Iterable[WrittenFile]) -> str | None:
    """The name of a file that is missing or has another size, or None."""
    return next((file.name for file in files if sizes.get(file.name) != file.bytes), None)

"""An export of several files: written part by part, so that a stopped export goes on with the part it was in.

While an export runs, `_export/plan.json` at its destination says what it is, and `_export/train-00000.json` which files a part has.
This list is written when the files of the part are finished and before the first of them gets its name, so every file at the
destination is known to belong to the export. `export.json` comes last, with the hash of every file. An export that replaces
another turns it back into one that was stopped, and then removes the files of its lists: stopped anywhere, it goes on.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from jobs.export.audio import UNCHANGED, AudioReader, Conversion
from jobs.export.destination import END, PLAN, RECORD, RECORDS, Destination, open_destination
from jobs.export.files import PartFiles, WrittenFile, output_error
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, AudioItems, AudioNames, score_names
from jobs.export.manifest import manifest_line
from jobs.export.plan import LeftOut, Part, Plan, Splits, left_out, make_plan
from jobs.ledger.records import Job
from jobs.provenance import exporters_record, records
from jobs.store import ObjectStore, S3Settings, is_remote
from jobs.where import Where
from pipelines.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from jobs.ledger import Ledger

Decoded = TypeVar("Decoded")
#: Raised when a format's files change for the same items.
VERSION = 3
_AGAIN = "Move it away; the next export writes the dataset again."


class _Identity(msgspec.Struct, frozen=True):
    """`_export/plan.json`: what must be equal for a stopped export to go on."""

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
    #: The filter in its one form; None: there is none.
    where: str | None = None
    #: Whether the job was still running: a later export of the job then replaces this one.
    running: bool = False


class _Finished(msgspec.Struct, frozen=True):
    """`export.json`."""

    identity: _Identity
    items: dict[str, int]
    left_out: int
    files: list[WrittenFile]
    reasons: LeftOut = LeftOut()
    schema: str = "nightjar.dataset/1"


@dataclass(slots=True)
class DatasetExport:
    """One export to a folder or bucket."""

    ledger: Ledger
    store: ObjectStore
    job: Job
    format: ExportFormat
    splits: Splits
    part_bytes: int
    audio_root: Path | None
    #: Jobs whose export in this format is replaced by this one.
    replaces: Collection[str] = ()
    #: Names audio by absolute paths.
    absolute: bool = False
    #: What becomes of the audio that it holds or copies.
    conversion: Conversion = UNCHANGED
    where: Where | None = None

    def run(self, to: str, s3: S3Settings | None, on_part: Callable[[Part], None]) -> Plan:
        """Writes what is not there yet. `on_part` is called with each part that became complete.

        Raises `config.invalid` for a destination that holds another export or other files.
        """
        with open_destination(to, s3) as destination, AudioReader(self.store, self.audio_root, self.conversion) as audio:
            limit = self.part_bytes if self.format.embeds_audio else None
            plan = self._plan(limit)
            scores, names = score_names(self.ledger, self.job), self._names(to)
            identity = self._identity(plan, names)
            if self._begin(destination, identity):
                return plan
            found = destination.sizes()
            files = [file for part in plan.parts for file in self._part(destination, found, audio, names, scores, plan, part, on_part)]
            files += self._common_files(destination, plan, scores)
            if (gone := _incomplete(destination.sizes(), files)) is not None:
                message = f"{gone!r} in {destination.address!r} was removed or changed during the export."
                raise _invalid(message, "Export again.")
            counts = {name: sum(part.items for part in plan.parts if part.split == name) for name in self.splits.names}
            done = _Finished(identity, counts, plan.left_out, sorted(files, key=lambda file: file.name), plan.reasons)
            _write(destination, END, done)
            _remove_records(destination)
            return plan

    def _plan(self, part_bytes: int | None) -> Plan:
        whole = self.format.whole_dialogues

        def count(without_audio: int, items: int) -> LeftOut:
            return left_out(self.ledger, self.job, self.where, without_audio, items, dialogues=whole)

        rows = self.ledger.items(self.job.id, where=self.where, dialogues=whole)
        return make_plan(rows, self.splits, part_bytes, whole=whole, running=not self.job.state.final, count=count)

    def _names(self, to: str) -> AudioNames:
        absolute = self.absolute or self.audio_root is not None or is_remote(to)
        return AudioNames(self.store, None if absolute else Path(to).absolute())

    def _identity(self, plan: Plan, names: AudioNames) -> _Identity:
        place = str(self.audio_root.absolute()) if self.audio_root is not None else names.base or self.store.url
        splits = tuple(zip(self.splits.names, self.splits.bounds, strict=True))
        audio = "" if self.format.embeds_audio else place
        return _Identity(
            self.job.id,
            self.format.name,
            VERSION,
            plan.digest,
            splits,
            self.part_bytes,
            audio,
            self.conversion.name,
            where=None if self.where is None else str(self.where),
            running=plan.reasons.running,
        )

    def _begin(self, destination: Destination, identity: _Identity) -> bool:
        """Makes the destination this export's. True: the export is complete already."""
        ended, begun = destination.read(END), destination.read(PLAN)
        if ended is not None:
            done = _decode(ended, _Finished)
            if done is not None and done.identity == identity and _incomplete(destination.sizes(), done.files) is None:
                _remove_records(destination)
                return True
            self._replace(destination, done and done.identity, done.files if done else [], identity)
        elif begun is not None:
            old = _decode(begun, _Identity)
            if old == identity:
                return False
            self._replace(destination, old, [], identity)
        elif destination.exclusive and any(not _is_record(name) for name in destination.sizes()):
            raise _invalid(f"{destination.address!r} holds files that no export wrote.", "Export to an empty folder.")
        _write(destination, PLAN, identity)
        return False

    def _replace(self, destination: Destination, old: _Identity | None, listed: list[WrittenFile], new: _Identity) -> None:
        """Removes an export that this one replaces, or this one itself where files of it are gone.

        Raises `config.invalid` for any other export, and removes nothing where a file is not as an export left it.
        """
        known = old is not None and (old == new or _is_earlier(old, new) or (old.job in self.replaces and old.format == new.format))
        if old is None or not known:
            advice = "Export to an empty place, or remove what is there."
            raise _invalid(f"{destination.address!r} holds another export{_difference(old, new)}.", advice)
        recorded = [file for name in _lists(destination) for file in _listed(destination, name) or ()]
        files = {file.name: file for file in (*listed, *recorded)}
        if destination.exclusive:
            for name in destination.sizes():
                if name not in files and name != END and not _is_record(name):
                    raise _invalid(f"{destination.address!r} holds {name!r}, which no export wrote.", _AGAIN)
        for file in files.values():
            if destination.sha256(file.name) not in (None, file.sha256):
                raise _invalid(f"{file.name!r} in {destination.address!r} was changed after it was exported.", _AGAIN)
        if listed:
            # As an export that was stopped: `export.json` must not stand beside files that are gone.
            _write(destination, PLAN, old)
            _write(destination, f"{RECORDS}/replaced.json", listed)
        for name in (END, *files):
            destination.remove(name)
        _remove_records(destination)

    def _part(
        self,
        destination: Destination,
        found: Mapping[str, int],
        audio: AudioReader,
        names: AudioNames,
        scores: tuple[str, ...],
        plan: Plan,
        part: Part,
        on_part: Callable[[Part], None],
    ) -> list[WrittenFile]:
        record = f"{RECORDS}/{part.split}-{part.number:05d}.json"
        if (listed := _listed(destination, record)) is not None:
            for file in listed:
                if found.get(file.name, file.bytes) != file.bytes:
                    raise _invalid(f"{file.name!r} in {destination.address!r} was changed after it was exported.", _AGAIN)
            if _incomplete(found, listed) is None:
                return listed
        items = AudioItems(
            self.ledger,
            self.store,
            self.job.id,
            after=part.first - 1,
            last=part.last,
            wanted=lambda example_id: self.splits.of(example_id) == part.split,
            whole=self.format.whole_dialogues,
            names=scores,
            where=self.where,
            dialogues=self.format.whole_dialogues,
            members=plan.members,
        )
        with PartFiles(destination, names) as files:
            read = audio.loaded if self.format.embeds_audio else audio.located
            self.format.write(part, files, self.job, read(_checked(items, part)))
            written = _publish(destination, record, files)
        on_part(part)
        return written

    def _common_files(self, destination: Destination, plan: Plan, scores: tuple[str, ...]) -> list[WrittenFile]:
        """The manifest of all items (with a filter: of those that match), the files of each split that list its items, the provenance
        and the format's card."""
        dialogues = self.format.whole_dialogues
        items = AudioItems(self.ledger, self.store, self.job.id, names=scores, where=self.where, dialogues=dialogues, members=plan.members)
        planned = Counter[str]()
        for part in plan.parts:
            planned[part.split] += part.items
        listed = Counter[str]()
        with PartFiles(destination) as files:
            name, line = self.format.index or ("", None)
            indexes = {split: files.open(f"{split}/{name}") for split in planned} if line is not None else {}
            with files.gzip("manifest.jsonl.gz") as manifest:
                for item in items:
                    manifest.write(manifest_line(self.job, item, ""))
                    split = self.splits.of(item.example_id)
                    if line is not None and split in indexes:
                        listed[split] += 1
                        indexes[split].write(line(self.job, item))
            if line is not None and listed != planned:
                raise _changed_job()
            files.open("provenance.json").write(_json(records(self.store, self.job) or [exporters_record(self.job)]))
            if self.format.card is not None:
                files.open("README.md").write(self.format.card(self.job, plan))
            return _publish(destination, f"{RECORDS}/common.json", files)


def _checked(items: Iterable[AudioItem], part: Part) -> Iterator[AudioItem]:
    """The items of a part. Raises `config.invalid` when the job has others than when the export was planned."""
    count = audio_bytes = 0
    for item in items:
        count, audio_bytes = count + 1, audio_bytes + item.artifact.bytes
        yield item
    if (count, audio_bytes) != (part.items, part.audio_bytes):
        raise _changed_job()


def _changed_job() -> ConfigError:
    return _invalid("The job changed while it was exported.", "Wait until it has ended, then export it to an empty place.")


def _is_earlier(old: _Identity, new: _Identity) -> bool:
    """Whether an export is the same one, made while the job was running: what was done since is in the new one."""
    return old.running and msgspec.structs.replace(old, digest=new.digest, version=new.version, running=new.running) == new


def _difference(old: _Identity | None, new: _Identity) -> str:
    """What of an export of the same job is not as in the new one, for a person."""
    if old is None or (old.job, old.format) != (new.job, new.format):
        return ""
    if old.where != new.where:
        return f" of this job, with the filter {old.where!r}" if old.where else " of this job, without a filter"
    return " of this job, with other items: it has been continued since" if old.digest != new.digest else " of this job, with other options"


def _publish(destination: Destination, record: str, files: PartFiles) -> list[WrittenFile]:
    written = files.finish()
    _write(destination, record, written)
    files.publish(written)
    return written


def _write(destination: Destination, name: str, value: object) -> None:
    """Writes a small JSON file."""
    path, data = destination.scratch / RECORD, _json(value)
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise output_error(path, error) from error
    destination.publish(name, path, hashlib.sha256(data).hexdigest())


def _is_record(name: str) -> bool:
    return name.startswith(f"{RECORDS}/")


def _lists(destination: Destination) -> list[str]:
    """The records that list files."""
    return [name for name in destination.sizes(f"{RECORDS}/") if name.endswith(".json") and name != PLAN]


def _listed(destination: Destination, record: str) -> list[WrittenFile] | None:
    """The files that a record lists. Raises `config.invalid` for a file that is no record of an export."""
    data = destination.read(record)
    files = None if data is None else _decode(data, list[WrittenFile])
    if data is not None and files is None:
        raise _invalid(f"{destination.address!r} holds {record!r}, which no export wrote.", _AGAIN)
    return files


def _incomplete(sizes: Mapping[str, int], files: Iterable[WrittenFile]) -> str | None:
    """The name of a file that is not there in the size in which it was written, or None."""
    return next((file.name for file in files if sizes.get(file.name) != file.bytes), None)


def _remove_records(destination: Destination) -> None:
    for name in (*_lists(destination), PLAN):
        destination.remove(name)


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _decode(data: bytes, type: type[Decoded]) -> Decoded | None:
    try:
        return msgspec.json.decode(data, type=type)
    except ValueError:
        return None


def _invalid(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)

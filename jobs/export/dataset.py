"""The files of a dataset in a folder or a bucket.

A dataset is written part by part, so that a stopped export continues with its current part. While an export
runs, `_export/plan.json` at its destination identifies it, and `_export/train-00000.json` lists the files of a
part. The list is written when the files are finished and before the first of them is moved to its name, so every
file at the destination is known to belong to the export. `export.json` is written last, with the hash of every file. An export that replaces another first turns that one
into a stopped export, then removes the files in its lists. So the replacement can also be stopped and continued
at any time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from gzip import GzipFile
from io import BufferedWriter, FileIO
from itertools import chain, count
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from jobs.export.audio import AudioNames
from jobs.export.files import SortedLines, file_sha256, json_line, path_errors
from jobs.export.items import LeftOut
from jobs.formatting import json_bytes
from jobs.settings import S3Settings
from jobs.store import FolderStore, ObjectStore, is_remote, open_store
from jobs.store.base import missing_allowed, split_key
from jobs.store.folder import sync_file_system
from pipelines.errors import ConfigError, ErrorCode, StoreError, invalid

Record = TypeVar("Record")
_BUFFER_BYTES = 1 << 20
#: Higher levels make manifests only a little smaller, but the export much slower.
_GZIP_LEVEL = 3
#: Number of small files that are published together.
BATCH_FILES = 2_000
AGAIN = "Move it away; the next export writes the dataset again."
#: Subfolder for the records of an incomplete export.
RECORDS = "_export"
#: The identity of the export: the first record written, and the last removed.
PLAN = f"{RECORDS}/plan.json"
#: The summary of a complete export, written last.
END = "export.json"
#: Name of a record in the scratch folder while it is written. Before the plan is written, the folder contains
#: no other file.
RECORD = "record"


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of a dataset."""

    name: str
    bytes: int
    sha256: str


_decode_file = msgspec.json.Decoder(WrittenFile).decode


@dataclass(eq=False)
class PartFiles:
    """The files of one part of a dataset, written to the scratch folder and moved to the destination together,
    small ones also before that; a context manager.

    Unpublished files stay in the scratch folder until it is removed. `OSError` becomes `store.full` or
    `config.invalid`.
    """

    destination: Destination
    names: AudioNames
    #: The beginning of the names of the lists of the files.
    record: str
    #: Is called with each published file.
    note: Callable[[WrittenFile], None]

    def __post_init__(self) -> None:
        #: Number of files, and of published lists of small ones.
        self._made = self._lists = 0
        #: Name -> path in the scratch folder, for the small files that are not published; name -> file, for the
        #: open ones.
        self._added: dict[str, str] = {}
        self._open: dict[str, BufferedWriter[FileIO]] = {}

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for file in self._open.values():
            # Not flushed: unpublished files are not needed, and a full disk would raise again.
            file.raw.close()
        if isinstance(error, OSError):
            with path_errors(Path(error.filename or self.destination.scratch)):
                raise error

    def audio_name(self, file: str, where: str) -> str:
        """The name by which the file `file` of the dataset refers to the audio at `where`."""
        return self.names.of(file, where)

    def sibling_name(self, name: str) -> str:
        """The name by which a file of the dataset refers to the file or folder `name` beside it."""
        return name.rpartition("/")[2] if self.names.relative else f"{self.destination.address}/{name}"

    def open(self, name: str) -> IO[bytes]:
        """Opens a new file; its name is relative to the destination. Raises `OSError`, also when the file is
        written."""
        file = self._open[name] = BufferedWriter(FileIO(self._new_path(), "w"), _BUFFER_BYTES)
        return file

    def add(self, name: str, data: bytes) -> None:
        """Writes a small file and closes it: a part can have more files than a process can open. Many of them are
        published, so that their names need little memory. Raises `OSError`."""
        path = self._added[name] = self._new_path()
        with open(path, "wb") as file:
            file.write(data)
        if len(self._added) == BATCH_FILES:
            self._lists += 1
            self._publish(f"{self.record}-{self._lists}.json", self._added)

    def _new_path(self) -> str:
        self._made += 1
        return f"{self.destination.scratch}/{self._made:06d}"

    def gzip(self, name: str) -> GzipFile:
        """Opens a new gzip file; equal content gives equal bytes."""
        return GzipFile("", "wb", _GZIP_LEVEL, self.open(name), mtime=0)

    def sorted_lines(self) -> SortedLines:
        """Makes a `SortedLines` in the scratch folder."""
        return SortedLines(self.destination.scratch)

    def publish(self) -> None:
        """Publishes all files. Raises `OSError` and the errors of `Destination.publish`."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._publish(
            f"{self.record}.json", self._added | {name: file.name for name, file in self._open.items()}
        )

    def _publish(self, record: str, paths: Mapping[str, str]) -> None:
        """Syncs the small files to the disk, writes a list of files, and moves these to the destination."""
        if self._added:
            # One call for all of them.
            folder = os.open(self.destination.scratch, os.O_RDONLY | os.O_DIRECTORY)
            try:
                sync_file_system(folder)
            finally:
                os.close(folder)
        written = [
            WrittenFile(name, os.stat(path).st_size, file_sha256(path)) for name, path in paths.items()
        ]
        self.destination.write_record(record, written)
        for file in written:
            self.destination.publish(file.name, paths[file.name], file.sha256)
            self.note(file)
        self._added.clear()


@dataclass(frozen=True)
class Destination:
    """The files of a dataset, by their relative names, under a prefix of a bucket. Its objects are written
    once, so another export needs another prefix. All files in a folder must belong to the export, because they
    can be overwritten. Methods raise `config.invalid` or `store.*`."""

    store: ObjectStore
    #: Absolute path, or `s3://` address.
    address: str
    #: Local folder for unfinished files.
    scratch: Path

    def sizes(self, below: str = "") -> dict[str, int]:
        """Name of each file, including records -> its size in bytes. `below`: only files in that subfolder,
        such as `_export/`."""
        return {info.key: info.bytes for info in self.store.list(below)}

    def lost(self, files: Iterable[WrittenFile]) -> str | None:
        """The name of one of these files, which are sorted, that is missing or has another size, or None."""
        found = self.store.list("")
        for file in files:
            info = next((one for one in found if one.key >= file.name), None)
            if info is None or (info.key, info.bytes) != (file.name, file.bytes):
                return file.name
        return None

    def publish(self, name: str, path: str, sha256: str) -> None:
        """Moves a finished local file to the destination."""
        with open(path, "rb") as file:
            result = self.store.put(name, file)
        if not result.created and result.sha256 != sha256:
            raise StoreError(
                ErrorCode.STORE_CONFLICT,
                f"{self.store.uri(name)} exists with other content.",
                "Export to an empty prefix.",
            )
        os.unlink(path)

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        self.store.delete(name)

    def write_record(self, name: str, value: object, files: Iterable[bytes] = ()) -> None:
        """Writes a JSON file. `files`: the elements of its list `files`, which is empty in `value`."""
        path = f"{self.scratch}/{RECORD}"
        before, found, after = json_bytes(value).partition(b'"files": []')
        with path_errors(path):
            with open(path, "wb") as file:
                file.write(before)
                separator = b'"files": [\n  '
                for one in files:
                    file.write(separator + msgspec.json.format(one, indent=1).replace(b"\n", b"\n  "))
                    separator = b",\n  "
                file.write(b"\n ]" + after if found else b"")
                file.flush()
                os.fsync(file.fileno())
            self.publish(name, path, file_sha256(path))

    def record(self, name: str, kind: type[Record]) -> Record | None:
        """Reads a record, or returns None. Raises `config.invalid` for a file that is no record of an
        export."""
        with missing_allowed():
            try:
                return msgspec.json.decode(self.store.get(name), type=kind)
            except ValueError:
                raise self.foreign_file(name) from None
        return None

    def foreign_file(self, name: str) -> ConfigError:
        """The error for a file that does not belong to an export."""
        return invalid(f"{self.address!r} contains {name!r}, which no export wrote.", AGAIN)

    def lists(self) -> list[str]:
        """The names of the records that list files."""
        return [name for name in self.sizes(f"{RECORDS}/") if name.endswith(".json") and name != PLAN]

    def remove_records(self) -> None:
        """Removes the records of an export, the plan last."""
        for name in (*self.lists(), PLAN):
            self.remove(name)


class FolderDestination(Destination):
    """A local folder. Unfinished files are in its subfolder `_export/scratch`, so that they are published by
    a rename."""

    def __init__(self, folder: Path) -> None:
        # The store's paths have no `..`, which means another folder behind a link.
        self._folder = Path(os.path.realpath(folder))
        super().__init__(FolderStore(self._folder), str(folder), self._folder / RECORDS / "scratch")

    def empty_scratch(self) -> None:
        """Empties the scratch folder. Raises `config.invalid` if it has files that are not from a stopped
        export."""
        left = [path for path in self.scratch.glob("*") if not path.name.startswith(RECORD)]
        if left and not any((self._folder / name).exists() for name in (PLAN, END)):
            raise invalid(
                f"{str(self.scratch)!r} contains files that no export wrote.", "Export to an empty folder."
            )
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)

    def sizes(self, below: str = "") -> dict[str, int]:
        """As `Destination.sizes`. A symbolic link counts as a file, even if it points to a folder."""
        found: dict[str, int] = {}
        with path_errors(self._folder):
            for folder, folders, files in os.walk(self._folder / below, onerror=_raise):
                for name in (*files, *folders):
                    path = f"{folder}/{name}"
                    status = os.lstat(path)
                    if path == str(self.scratch):
                        folders.remove(name)
                    elif not stat.S_ISDIR(status.st_mode):
                        found[os.path.relpath(path, self._folder)] = status.st_size
        return found

    def lost(self, files: Iterable[WrittenFile]) -> str | None:
        # The store's list would hold all names of a folder in memory.
        for file in files:
            with suppress(OSError):
                if os.lstat(self.store.uri(file.name)).st_size == file.bytes:
                    continue
            return file.name
        return None

    def publish(self, name: str, path: str, sha256: str) -> None:
        with self._at(name) as target:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.chmod(path, 0o644)
            os.replace(path, target)

    def remove(self, name: str) -> None:
        with self._at(name) as path, suppress(FileNotFoundError):
            os.unlink(path)
        with suppress(OSError):
            # Empty folders are removed too; the folder of the records is not empty.
            os.removedirs(os.path.dirname(path))

    @contextmanager
    def _at(self, name: str) -> Generator[str]:
        """The path of a file. Raises `store.bad_key` for a name outside the folder, which a record could
        contain."""
        # Of each name in a `Path`, Python 3.12 keeps a copy until the process ends.
        path = self.store.uri(name)
        with path_errors(path):
            yield path


@contextmanager
def open_destination(to: str, s3: S3Settings | None) -> Generator[Destination]:
    """Opens the destination at a path or an `s3://` address. A folder is locked, so that one export at a time
    writes to it."""
    if is_remote(to):
        store = open_store(to, s3)
        with tempfile.TemporaryDirectory(prefix="nightjar-export-") as scratch:
            yield Destination(store, store.url, Path(scratch))
        return
    folder = Path(to).absolute()
    destination = FolderDestination(folder)
    with ExitStack() as ended:
        with path_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            ended.callback(os.close, handle)
            try:
                # A file system without locks fails here too.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise invalid(
                    f"Another export is writing to {str(folder)!r}.",
                    "Wait until it ends, or export to another folder.",
                ) from None
            destination.empty_scratch()
        try:
            yield destination
        finally:
            shutil.rmtree(destination.scratch, ignore_errors=True)
            with suppress(OSError):
                # Not empty if the export was stopped.
                destination.scratch.parent.rmdir()


def _raise(error: OSError) -> None:
    raise error


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
    #: The mode and the gaps of the sounds of dialogues, if the export contains them.
    sounds: tuple[str, tuple[str, float, float]] | UnsetType = UNSET
    #: The filter in its normal form, if there is one.
    where: str | None = None
    #: Whether the job was still running; a later export of the job then replaces this one.
    running: bool = False
    #: The jobs, if there are several; `job` is then the name of the set.
    jobs: tuple[str, ...] | UnsetType = UNSET
    unique: bool | UnsetType = UNSET
    license: str | UnsetType = UNSET
    #: `ExportFormat.variant`
    variant: str | UnsetType = UNSET


class Finished(msgspec.Struct, frozen=True):
    """The content of `export.json`, the summary of a complete export."""

    identity: Identity
    items: dict[str, int]
    left_out: int
    files: list[WrittenFile]
    reasons: LeftOut = LeftOut()
    schema: str = "nightjar.dataset/1"


def read_export(folder: Path, *patterns: str) -> tuple[Finished, list[Path]]:
    """The summary of a finished export, and its files that match one of these patterns, sorted. Raises
    `config.invalid` for another folder, and if one of these files is missing or has another size."""
    try:
        finished = msgspec.json.decode((folder / END).read_bytes(), type=Finished)
        found = {folder.joinpath(*split_key(file.name)): file.bytes for file in finished.files}
        paths = sorted(path for path in found if any(map(path.match, patterns)))
        for path in paths:
            if path.stat().st_size != found[path]:
                raise ValueError(f"{path.name!r} was changed")
    except (OSError, ValueError, StoreError) as error:
        raise invalid(
            f"{str(folder)!r} is no finished export: {error}.", "Give the folder of one, or export again."
        ) from error
    return finished, paths


@dataclass
class Dataset:
    """The parts of a dataset at its destination: `begin`, then `add` for each part, then `finish`."""

    destination: Destination
    identity: Identity
    names: AudioNames

    def begin(self, replaces: Collection[str] = ()) -> bool:
        """Claims the destination for this export. True: the export is complete already. `replaces`: jobs whose
        exports in this format are replaced. An earlier export of the same job, made while it was running, is also
        replaced.

        Raises `config.invalid` for a destination with any other export or other files.
        """
        there = self.destination
        identity = self.identity
        done = there.record(END, Finished)
        old = there.record(PLAN, Identity) if done is None else done.identity
        if old is None:
            if not there.store.remote and any(not name.startswith(f"{RECORDS}/") for name in there.sizes()):
                raise invalid(
                    f"{there.address!r} contains files that no export wrote.", "Export to an empty folder."
                )
        elif done is not None and old == identity and there.lost(done.files) is None:
            there.remove_records()
            return True
        elif done is not None or old != identity:
            self._replace(old, [] if done is None else done.files, replaces)
        there.write_record(PLAN, identity)
        return False

    @cached_property
    def _files(self) -> SortedLines:
        """The files as lines of JSON, which are sorted by their names."""
        return SortedLines(self.destination.scratch)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """The files of a stopped export."""
        return self.destination.sizes()

    def _recorded(self, record: str) -> list[WrittenFile] | None:
        """The files of a finished part; None: it is not finished."""
        files = self.destination.record(f"{record}.json", list[WrittenFile])
        if files is not None:
            for number in count(1):
                if (more := self.destination.record(f"{record}-{number}.json", list[WrittenFile])) is None:
                    break
                files += more
        return files

    def add(self, name: str, write: Callable[[PartFiles], None], *, again: bool = False) -> bool:
        """Writes the files of a part, unless they are there and it is not written `again`. Returns whether it
        wrote them. Raises `config.invalid` for a changed file."""
        record = f"{RECORDS}/{name}"
        files = None if again else self._recorded(record)
        for file in files or ():
            if self._sizes.get(file.name, file.bytes) != file.bytes:
                raise self._changed(file)
        if files is not None and all(file.name in self._sizes for file in files):
            for file in files:
                self._note(file)
            return False
        with PartFiles(self.destination, self.names, record, self._note) as part:
            write(part)
            part.publish()
        return True

    def _note(self, file: WrittenFile) -> None:
        self._files.add(json_line(file))

    def finish(self, items: dict[str, int], reasons: LeftOut) -> None:
        """Writes the summary. `items`: those of each split. Raises `config.invalid` if a file is missing or has
        another size."""
        there = self.destination
        if (gone := there.lost(map(_decode_file, self._files))) is not None:
            raise invalid(
                f"{gone!r} in {there.address!r} was removed or changed during the export.", "Export again."
            )
        there.write_record(END, Finished(self.identity, items, reasons.items, [], reasons), self._files)
        there.remove_records()

    def _replace(self, old: Identity, listed: list[WrittenFile], replaces: Collection[str]) -> None:
        """Removes an export that this one replaces, or this one itself if files are missing. Raises
        `config.invalid` for any other export, and removes nothing if a file was changed."""
        there = self.destination
        new = self.identity
        continued = msgspec.structs.replace(old, digest=new.digest, version=new.version, running=new.running)
        own = old == new or (old.running and continued == new)
        lists = [there.record(name, list[WrittenFile]) or [] for name in there.lists()]
        files = {file.name: file for file in chain(listed, *lists)}
        # An export that was stopped before its first file, for example by a wrong option, is no obstacle.
        if files and not own and not (old.job in replaces and old.format == new.format):
            filtered = f" with the filter {old.where!r}" if old.where else ""
            raise invalid(
                f"{there.address!r} contains another export: of job {old.job} in the format {old.format}{filtered}, with other items or options.",
                "Export to an empty folder or prefix, or remove the other export.",
            )
        if not there.store.remote:
            for name in there.sizes():
                if not (name in files or name == END or name.startswith(f"{RECORDS}/")):
                    raise there.foreign_file(name)
        for file in files.values():
            info = there.store.head(file.name)
            if info is not None and info.sha256 != file.sha256:
                raise self._changed(file)
        if listed:
            # Turns it into a stopped export, because `export.json` must not list missing files.
            there.write_record(PLAN, old)
            there.write_record(f"{RECORDS}/replaced.json", listed)
        for name in (END, *files):
            there.remove(name)
        there.remove_records()

    def _changed(self, file: WrittenFile) -> ConfigError:
        place = self.destination.address
        return invalid(f"{file.name!r} in {place!r} was changed after it was exported.", AGAIN)

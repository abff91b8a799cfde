"""The audio of an export: named by its path, copied to a local folder, or read into the dataset; converted if
requested."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from jobs.codes import read_codes
from jobs.export.files import file_sha256, output, path_errors
from jobs.export.items import AudioItem, Loaded, Located
from jobs.ledger.records import Artifact
from jobs.packs import ArtifactReader, map_ahead
from jobs.store.base import ObjectStore, sha256_of, split_key
from pipelines.audio_format import AUDIO_FORMATS, check_rate
from pipelines.errors import ErrorCode, StoreError, invalid

if TYPE_CHECKING:
    from pipelines.audio import Samples

_THREADS = 16
#: Maximum number, and total size, of items whose audio is read before it is needed.
_AHEAD_ITEMS = 64
_AHEAD_BYTES = 64 << 20

Result = TypeVar("Result")

#: Sample rates of exports, in Hz.
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 8_000, 48_000
#: The quantization of `pipelines.audio.encode`, so that unchanged samples are written as they were.
_FULL_SCALE = 32_767


@dataclass(frozen=True, slots=True)
class Conversion:
    """The format and the sample rate in Hz that an export converts its audio to; None: as stored."""

    format: str | None = None
    sample_rate: int | None = None

    def check(self, stored: str, stored_rate: int | None = None) -> None:
        """Checks the format and the rate. `stored`, `stored_rate`: format and rate of the audio in the store.
        Raises `config.invalid`."""
        if self.format is not None and self.format not in AUDIO_FORMATS:
            raise invalid(
                f"The audio format {self.format[:40]!r} is unknown.",
                f"Use one of: {', '.join(AUDIO_FORMATS)}.",
            )
        if self.sample_rate is not None and not MIN_SAMPLE_RATE <= self.sample_rate <= MAX_SAMPLE_RATE:
            raise invalid(
                f"An export cannot have a sample rate of {self.sample_rate} Hz.",
                f"Use {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz.",
            )
        if self and (rate := self.sample_rate or stored_rate):
            check_rate(self.format or stored, rate)

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def name(self) -> str:
        """The name of the folder for its copies, such as `mp3-16000`."""
        return "-".join(str(part) for part in (self.format, self.sample_rate) if part)

    def applied(self, item: AudioItem, data: bytes) -> Loaded:
        """Converts the audio of an item; audio that has the format and the rate already is unchanged.

        Raises `config.invalid` if the format does not support the rate of the stored audio.
        """
        if self.format in (None, item.extension) and self.sample_rate in (None, item.artifact.sample_rate):
            return item, data
        return self.encoded(item, decoded(data))

    def encoded(self, item: AudioItem, samples: Samples) -> Loaded:
        """Encodes samples, [samples] or [samples, channels], at the rate of the stored audio as the audio of an
        item."""
        from jobs.encoded_audio import encoded_audio

        artifact = item.artifact
        audio_format = self.format or item.extension
        made = encoded_audio(samples, artifact.sample_rate, audio_format, self.sample_rate)
        written = replace(
            artifact,
            key=f"{artifact.key.rpartition('.')[0]}.{audio_format}",
            sha256=sha256_of(made.data),
            bytes=len(made.data),
            pack=None,
            pack_offset=None,
            **made.facts,
        )
        return replace(item, artifact=written), made.data


def decoded(data: bytes) -> Samples:
    """The samples of a stored file, [samples]."""
    # These take half a second to import.
    import numpy as np
    import soundfile

    pcm, _ = soundfile.read(io.BytesIO(data), dtype="int16")
    return pcm.astype(np.float32) * np.float32(1 / _FULL_SCALE)


@dataclass(frozen=True)
class AudioReader:
    """Reads the audio of items, in order. Threads read ahead if the store is a bucket or audio is converted.
    Otherwise files are read one by one, which is faster than on threads."""

    store: ObjectStore
    #: Local folder that the audio is copied to, or None; converted copies go to a subfolder.
    root: Path | None = None
    conversion: Conversion = Conversion()
    #: Whether items get their codes.
    codes: bool = False

    @cached_property
    def _artifacts(self) -> ArtifactReader:
        return ArtifactReader(self.store)

    def located(self, items: Iterable[AudioItem]) -> Iterator[Located]:
        """Yields each item with the path or address of its audio; empty if it has only codes. With a root, the
        audio is copied there first."""
        return self._ahead(items, self._locate) if self.codes or self.root else map(self._locate, items)

    def loaded(self, items: Iterable[AudioItem]) -> Iterator[Loaded]:
        """Yields each item with the content of its audio file; empty if it has only codes. The hash of the stored
        file is compared with the ledger's."""
        return self._ahead(items, self._load)

    def _ahead(self, items: Iterable[AudioItem], get: Callable[[AudioItem], Result]) -> Iterator[Result]:
        if not self.store.remote and not self.conversion:
            yield from map(get, items)
            return
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")
        try:
            found = map_ahead(
                partial(threads.submit, get),
                items,
                _AHEAD_ITEMS,
                lambda item: item.artifact.bytes,
                _AHEAD_BYTES,
            )
            yield from (made for _, made in found)
        finally:
            threads.shutdown(cancel_futures=True)

    def _coded(self, item: AudioItem) -> AudioItem:
        """The item with its codes, if they are wanted and it has some."""
        artifact = item.codes_artifact
        if not self.codes or artifact is None:
            return item
        return replace(item, codes=read_codes(self.read(artifact)))

    def _load(self, item: AudioItem) -> Loaded:
        item = self._coded(item)
        return (item, b"") if item.is_codes else self.conversion.applied(item, self.read(item.artifact))

    def read(self, artifact: Artifact) -> bytes:
        """The bytes of an artifact. Raises `store.missing`, and `store.conflict` if its hash is not the ledger's."""
        data = self._artifacts.read(artifact)
        if sha256_of(data) != artifact.sha256:
            raise StoreError(
                ErrorCode.STORE_CONFLICT,
                f"The object {artifact.key} has changed: its SHA-256 differs from the ledger's.",
                "Make it again with: nightjar verify JOB --repair",
            )
        return data

    def _locate(self, item: AudioItem) -> Located:
        """The item with the place of its audio, which is copied to the root. Equal audio is converted to equal bytes,
        so an existing copy is kept."""
        item, data = self._load(item) if self.root and self.conversion else (self._coded(item), None)
        artifact = item.artifact
        if item.is_codes or self.root is None:
            return item, "" if item.is_codes else self.store.uri(artifact.key)
        path = self.root.absolute().joinpath(self.conversion.name, *split_key(artifact.key))
        with path_errors(path):
            if (
                path.is_file()
                and path.stat().st_size == artifact.bytes
                and file_sha256(path) == artifact.sha256
            ):
                return item, str(path)
            # The copy must not be written through a link.
            path.unlink(missing_ok=True)
        # Read before the file is created, so that lost audio leaves no file.
        data = self.read(artifact) if data is None else data
        with output(str(path)) as copy:
            copy.write(data)
        return item, str(path)


class AudioNames:
    """Makes the names by which the files of one export refer to audio in these stores. `folder`: that of the
    export; None (standard output, a bucket): the names are absolute paths."""

    def __init__(self, stores: Iterable[ObjectStore], folder: Path | None) -> None:
        self._roots = {str(one.root) for one in stores if folder and one.root}
        self._folder = folder or ""
        self._prefix = cache(self._relative)

    @property
    def relative(self) -> bool:
        """Whether names are relative paths."""
        return bool(self._roots)

    def base(self, store: ObjectStore) -> str:
        """The path of a store relative to the export's folder, or its address if paths are absolute."""
        return self.of("", f"{store.root}/") if str(store.root) in self._roots else store.url

    def of(self, file: str, where: str) -> str:
        """The name by which `file` of the export refers to the audio at `where`, a path or an address."""
        for root in self._roots:
            if where.startswith(f"{root}/"):
                below = self._prefix(os.path.dirname(file), root)
                return os.path.normpath(f"{below}/{where[len(root) + 1 :]}")
        return where

    def _relative(self, below: str, root: str) -> str:
        """The path of a store relative to a folder of the export."""
        # Links are resolved, because `..` is relative to the target of a link.
        folder = os.path.realpath(os.path.join(self._folder, below))
        return os.path.relpath(os.path.realpath(root), folder)

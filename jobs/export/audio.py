"""The audio of an export: named where it is, fetched to a local folder, or read to be written into the dataset."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from jobs.export.files import output, output_error, sha256_of
from jobs.export.items import AudioItem
from jobs.ledger.records import Artifact
from jobs.packs import ArtifactReader
from jobs.store.base import ObjectStore, split_key
from pipelines.errors import ErrorCode, StoreError

_THREADS = 16
#: Maximum that is read ahead of the item that is written.
_AHEAD_ITEMS = 64
_AHEAD_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20

Result = TypeVar("Result")


class AudioReader:
    """The audio of items, in order; a context manager. From a bucket some are fetched ahead, on threads. Files of a folder are read
    one by one, because threads would spend more time on taking turns than on reading.
    """

    def __init__(self, store: ObjectStore, root: Path | None) -> None:
        """`root`: local folder that the audio is fetched to, or None."""
        self._store = store
        self._artifacts = ArtifactReader(store)
        self._root = root.absolute() if root is not None else None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")

    def __enter__(self) -> AudioReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def located(self, items: Iterable[AudioItem]) -> Iterator[tuple[AudioItem, str]]:
        """Each item with the path or address of its audio. With a root the file is there and has the right content."""
        root = self._root
        if root is None:
            yield from ((item, self._store.uri(item.artifact.key)) for item in items)
            return
        yield from self._ahead(items, lambda artifact: self._fetch(root, artifact))

    def loaded(self, items: Iterable[AudioItem]) -> Iterator[tuple[AudioItem, bytes]]:
        """Each item with the content of its audio file, which has the hash that the ledger knows."""
        yield from self._ahead(items, self._load)

    def _ahead(self, items: Iterable[AudioItem], get: Callable[[Artifact], Result]) -> Iterator[tuple[AudioItem, Result]]:
        if not self._store.remote:
            yield from ((item, get(item.artifact)) for item in items)
            return
        waiting: deque[tuple[AudioItem, Future[Result]]] = deque()
        size = 0
        for item in items:
            while waiting and (len(waiting) >= _AHEAD_ITEMS or size + item.artifact.bytes > _AHEAD_BYTES):
                first, future = waiting.popleft()
                size -= first.artifact.bytes
                yield first, future.result()
            waiting.append((item, self._threads.submit(get, item.artifact)))
            size += item.artifact.bytes
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()

    def _load(self, artifact: Artifact) -> bytes:
        data = self._artifacts.read(artifact)
        if hashlib.sha256(data).hexdigest() != artifact.sha256:
            raise _changed(artifact)
        return data

    def _fetch(self, root: Path, artifact: Artifact) -> str:
        path = root.joinpath(*split_key(artifact.key))
        try:
            if path.is_file() and path.stat().st_size == artifact.bytes and sha256_of(path) == artifact.sha256:
                return str(path)
            # A link there must not lead the new content to another file.
            path.unlink(missing_ok=True)
        except OSError as error:
            raise output_error(path, error) from error
        if artifact.pack is not None:
            # Read before the file is made, so that a lost pack leaves none.
            data = self._load(artifact)
            with output(str(path)) as copy:
                copy.write(data)
            return str(path)
        digest = hashlib.sha256()
        with output(str(path)) as copy, self._store.open(artifact.key) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
            if digest.hexdigest() != artifact.sha256:
                raise _changed(artifact)
        return str(path)


def _changed(artifact: Artifact) -> StoreError:
    return StoreError(
        ErrorCode.STORE_CONFLICT,
        f"The object {artifact.key} has changed: its SHA-256 differs from the ledger's.",
        "Make it again with: nightjar verify JOB --repair",
    )

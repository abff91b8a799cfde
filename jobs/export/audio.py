"""The audio of an export: named where it is, fetched to a local folder, or loaded to be written into the dataset."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from jobs.export.destination import output_error
from jobs.export.items import MadeItem
from jobs.ledger.records import Artifact
from jobs.store.base import ObjectStore, split_key
from pipelines.errors import ErrorCode, StoreError

_FETCHERS = 16
#: Most that is loaded or fetched ahead of the item that is written.
_AHEAD_ITEMS = 64
_AHEAD_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20

Result = TypeVar("Result")


class AudioPlace:
    """The audio of items, in order. From a bucket some are fetched ahead, on threads; files of a folder are read as they come,
    because threads would spend more on taking turns than reading takes.
    """

    def __init__(self, store: ObjectStore, root: Path | None) -> None:
        self._store = store
        self._root = root.absolute() if root is not None else None
        self._remote = store.url.startswith("s3://")
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="fetch")

    def __enter__(self) -> AudioPlace:
        return self

    def __exit__(self, *_: object) -> None:
        self._fetchers.shutdown(cancel_futures=True)

    def located(self, items: Iterable[MadeItem]) -> Iterator[tuple[MadeItem, str]]:
        """Each item with the address of its audio; with a root the file is there and has the right bytes."""
        root = self._root
        if root is None:
            yield from ((item, self._store.uri(item.artifact.key)) for item in items)
            return
        yield from self._ahead(items, lambda artifact: self._fetch(root, artifact))

    def loaded(self, items: Iterable[MadeItem]) -> Iterator[tuple[MadeItem, bytes]]:
        """Each item with the bytes of its audio file, which have the hash that the ledger knows."""
        yield from self._ahead(items, self._load)

    def _ahead(self, items: Iterable[MadeItem], get: Callable[[Artifact], Result]) -> Iterator[tuple[MadeItem, Result]]:
        if not self._remote:
            yield from ((item, get(item.artifact)) for item in items)
            return
        waiting: deque[tuple[MadeItem, Future[Result]]] = deque()
        size = 0
        for item in items:
            while waiting and (len(waiting) >= _AHEAD_ITEMS or size + item.artifact.bytes > _AHEAD_BYTES):
                first, future = waiting.popleft()
                size -= first.artifact.bytes
                yield first, future.result()
            waiting.append((item, self._fetchers.submit(get, item.artifact)))
            size += item.artifact.bytes
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()

    def _load(self, artifact: Artifact) -> bytes:
        data = self._store.get(artifact.key)
        if hashlib.sha256(data).hexdigest() != artifact.sha256:
            raise _changed(artifact)
        return data

    def _fetch(self, root: Path, artifact: Artifact) -> str:
        path = root.joinpath(*split_key(artifact.key))
        try:
            if path.is_file() and path.stat().st_size == artifact.bytes and _sha256(path) == artifact.sha256:
                return str(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._download(artifact, path)
        except OSError as error:
            raise output_error(path, error) from error
        return str(path)

    def _download(self, artifact: Artifact, path: Path) -> None:
        digest = hashlib.sha256()
        with self._store.open(artifact.key) as stream, tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as copy:
            try:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    copy.write(chunk)
                if digest.hexdigest() != artifact.sha256:
                    raise _changed(artifact)
                copy.flush()
                os.fsync(copy.fileno())
                os.chmod(copy.name, 0o644)
                os.replace(copy.name, path)
            except BaseException:
                os.unlink(copy.name)
                raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(artifact: Artifact) -> StoreError:
    return StoreError(
        ErrorCode.STORE_CONFLICT,
        f"The object {artifact.key} is not the one that was made.",
        "Its SHA-256 differs from the ledger's. Make it again with: nightjar verify JOB --repair",
    )

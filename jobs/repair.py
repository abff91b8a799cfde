"""Objects of a job that are lost or damaged are made again: from their line, with the seed that the ledger knows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from jobs.artifacts import CONTENT_TYPES, object_metadata
from jobs.ledger.records import Artifact, ItemRow, Job
from jobs.manifest import put_shard_manifest, spoken_by
from jobs.payload import ShardLine, read_shard
from jobs.redraw import made_again, request_of
from jobs.store.base import ObjectStore
from jobs.verify import Expected
from pipelines.audio import encode
from pipelines.errors import ErrorCode, NightjarError, StoreError, SynthesisError
from pipelines.request import Pipeline, Speech

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from pipelines.audio import AudioFormat

#: Items that are in the engine at once.
_AT_ONCE = 64


class Mended(StrEnum):
    """What became of an object that was lost or damaged."""

    #: The same bytes as before.
    SAME = "same"
    #: Other bytes of the same seed; the ledger knows their hash now.
    OTHER = "other"
    #: It could not be made again.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Repaired:
    """One object that was to be made again."""

    key: str
    example_id: str
    outcome: Mended
    #: Why it failed.
    reason: str = ""


@dataclass(slots=True)
class Repair:
    """Makes objects of one job again. Each is written before the ledger is told, and told only where its bytes are others, so that
    a repair that was stopped is done again by the next one."""

    ledger: Ledger
    store: ObjectStore
    job: Job
    pipeline: Pipeline

    def run(self, lost: Iterable[Expected]) -> Generator[Repaired, None, None]:
        """Makes what is lost; inputs cannot be made of anything else. Raises `StoreError` when the store fails."""
        inputs = self.ledger.shard_inputs(self.job.id)
        loaded: tuple[str, str] | None = None
        lines: dict[int, ShardLine] = {}
        renewed: set[int] = set()
        left = iter(lost)
        try:
            while some := list(islice(left, _AT_ONCE)):
                begun: list[tuple[ItemRow, Artifact, Future[Speech] | NightjarError]] = []
                for expected in some:
                    row, artifact = self._known(expected)
                    if row is None or artifact is None:
                        reason = (
                            "It is no item's: the same `nightjar run INPUT` writes it again, or submit it under another --idempotency-key."
                        )
                        yield Repaired(expected.key, expected.example_id or "", Mended.FAILED, reason)
                        continue
                    try:
                        if inputs[row.shard_no] != loaded:
                            lines = {line.index: line for line in read_shard(self.store, *inputs[row.shard_no])}
                            loaded = inputs[row.shard_no]
                        future = self.pipeline.submit(request_of(self.store, self.job, lines[row.index], artifact.seed, artifact.kind))
                        begun.append((row, artifact, future))
                    except NightjarError as error:
                        begun.append((row, artifact, error))
                for row, artifact, making in begun:
                    repaired = self._repaired(row, artifact, making)
                    if repaired.outcome is Mended.OTHER and artifact.kind == "audio":
                        renewed.add(row.shard_no)
                    yield repaired
                # A repair that is stopped leaves no ended shard with the manifest of before.
                self._renew_manifests(renewed, inputs, but=begun[-1][0].shard_no if begun else None)
        finally:
            self._renew_manifests(renewed, inputs)

    def _known(self, expected: Expected) -> tuple[ItemRow | None, Artifact | None]:
        if expected.index is None:
            return None, None
        row = next(self.ledger.items(self.job.id, after=expected.index - 1, limit=1))
        return row, self.ledger.artifacts_of(self.job.id, expected.kind, [expected.index]).get(expected.index)

    def _repaired(self, row: ItemRow, artifact: Artifact, making: Future[Speech] | NightjarError) -> Repaired:
        try:
            if isinstance(making, NightjarError):
                raise making
            speech = made_again(making, self.job)
            data = self._encoded(artifact, speech)
        except NightjarError as error:
            return Repaired(artifact.key, row.example_id, Mended.FAILED, str(error))
        sha256 = hashlib.sha256(data).hexdigest()
        extension = artifact.key.rpartition(".")[2]
        metadata = object_metadata(self.job.spec_sha, artifact.seed)
        try:
            self.store.delete(artifact.key)
        except StoreError as error:
            if error.code is not ErrorCode.STORE_BAD_KEY:
                raise
            # A folder is in its place; a symbolic link is removed.
            return Repaired(artifact.key, row.example_id, Mended.FAILED, str(error))
        self.store.put(artifact.key, data, content_type=CONTENT_TYPES[extension], metadata=metadata)
        self.store.sync()
        if sha256 == artifact.sha256:
            return Repaired(artifact.key, row.example_id, Mended.SAME)
        made = msgspec.structs.replace(artifact, sha256=sha256, bytes=len(data))
        if artifact.kind != "text":
            samples, rate = len(speech.samples), speech.sample_rate
            duration_ms = round(samples * 1000 / rate)
            made = msgspec.structs.replace(made, duration_ms=duration_ms, sample_rate=rate, samples=samples, meta=dict(speech.meta))
        if not self.ledger.replace_artifact(self.job.id, made, artifact.sha256):
            raise StoreError(ErrorCode.STORE_CONFLICT, f"Another process made {artifact.key} meanwhile.", "Verify the job again.")
        return Repaired(artifact.key, row.example_id, Mended.OTHER)

    def _encoded(self, artifact: Artifact, speech: Speech) -> bytes:
        """The object of an artifact. Raises `SynthesisError` where the speech has none."""
        if artifact.kind == "text":
            if speech.text_out is None:
                raise SynthesisError(ErrorCode.SYNTH_ENGINE, "The model wrote no text this time.")
            return speech.text_out.encode()
        if not len(speech.samples) or not np.isfinite(speech.samples).all():
            raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio this time.")
        return encode(speech.samples, speech.sample_rate, cast("AudioFormat", self.job.spec.format))

    def _renew_manifests(self, renewed: set[int], inputs: Mapping[int, tuple[str, str]], but: int | None = None) -> None:
        for shard_no in sorted(renewed - {but}):
            self._renew_manifest(shard_no, inputs[shard_no])
            renewed.discard(shard_no)

    def _renew_manifest(self, shard_no: int, where: tuple[str, str]) -> None:
        spoken = {line.index: spoken_by(self.job, line) for line in read_shard(self.store, *where)}
        made = self.ledger.shard_audio(self.job.id, shard_no)
        key, sha256 = put_shard_manifest(self.store, self.job, shard_no, made, spoken)
        self.store.sync()
        self.ledger.set_shard_manifest(self.job.id, shard_no, key, sha256)


def mend(
    ledger: Ledger,
    store: ObjectStore,
    job: Job,
    pipeline: Pipeline,
    lost: Iterable[Expected],
    on_repaired: Callable[[Repaired], None] = lambda _: None,
) -> Counter[str]:
    """Makes lost objects of a job again, and its manifest anew where bytes are others; counts by `Mended`. Raises as `Repair.run`."""
    from jobs.export.manifest import put_manifest

    counts: Counter[str] = Counter()
    with closing(Repair(ledger, store, job, pipeline).run(lost)) as repairing:
        for repaired in repairing:
            counts[repaired.outcome.value] += 1
            on_repaired(repaired)
    if counts[Mended.OTHER] and job.state.final:
        put_manifest(ledger, store, job.id)
    return counts

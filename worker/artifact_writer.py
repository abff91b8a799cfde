"""Writes the artifacts of an item: encodes, puts under write-once keys, adopts what an earlier attempt left there."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from jobs.layout import CONTENT_TYPES, audio_key, object_metadata, quarantine_key, text_key
from jobs.ledger.records import QUARANTINE, Artifact
from jobs.store.base import ObjectStore, PutResult
from pipelines.errors import ErrorCode, NightjarError, StoreError
from pipelines.request import Speech
from worker.leases import HeldLease, RetryNote

if TYPE_CHECKING:
    from pipelines.audio import AudioFormat


@dataclass(frozen=True, slots=True)
class ArtifactWriter:
    """Writes the artifacts of one item. Waits for a store that is away for as long as the item's lease lives.

    Its methods raise `StoreError`, and `LeaseGoneError` when the lease has ended.
    """

    held: HeldLease
    store: ObjectStore
    index: int
    example_id: str
    on_retry: RetryNote

    def write(self, speech: Speech, seed: int, draw: int) -> tuple[Artifact, ...]:
        """Writes the audio of a draw, and its text where the model wrote one. Writes the text alone where no audio was asked for."""
        job = self.held.lease.job
        if speech.text_out is not None and text_only(speech):
            return (self._write_text(speech.text_out, seed, draw),)
        key = audio_key(job.id, self.index, self.example_id, job.spec.format, draw)
        audio = self._write_audio("audio", key, speech, seed)
        return (audio,) if speech.text_out is None else (audio, self._write_text(speech.text_out, seed, draw))

    def quarantine(self, speech: Speech, seed: int, draw: int) -> Artifact:
        """Writes the audio of a draw that did not pass its checks, where no export looks."""
        job = self.held.lease.job
        key = quarantine_key(job.id, self.index, self.example_id, job.spec.format, draw)
        return self._write_audio(QUARANTINE, key, speech, seed)

    def _write_audio(self, kind: str, key: str, speech: Speech, seed: int) -> Artifact:
        # Costs half a second at the first item; a worker that waits for work need not pay it.
        from pipelines.audio import encode

        audio_format = self.held.lease.job.spec.format
        data = encode(speech.samples, speech.sample_rate, cast("AudioFormat", audio_format))
        result = self._put(key, data, CONTENT_TYPES[audio_format], seed)
        samples, sample_rate = len(speech.samples), speech.sample_rate
        if not result.created and result.info.sha256 != hashlib.sha256(data).hexdigest():
            if (measured := self.held.retrying(lambda: _measure(self.store, key), self.on_retry)) is not None:
                samples, sample_rate = measured
            else:
                # The item is open, so no artifact names this object: a power cut damaged what an earlier worker wrote.
                result = self._replace(key, data, CONTENT_TYPES[audio_format], seed)
        return Artifact(
            index=self.index,
            kind=kind,
            key=key,
            sha256=result.info.sha256,
            bytes=result.info.bytes,
            duration_ms=round(samples * 1000 / sample_rate),
            sample_rate=sample_rate,
            samples=samples,
            seed=seed,
            meta=dict(speech.meta),
        )

    def _write_text(self, text: str, seed: int, draw: int) -> Artifact:
        """The text that a model wrote beside its speech."""
        key = text_key(self.held.lease.job.id, self.index, self.example_id, draw)
        data = text.encode()
        info = self._put(key, data, CONTENT_TYPES["txt"], seed).info
        if data and not info.bytes:
            info = self._replace(key, data, CONTENT_TYPES["txt"], seed).info
        return Artifact(self.index, "text", key, info.sha256, info.bytes, duration_ms=0, sample_rate=0, samples=0, seed=seed)

    def _replace(self, key: str, data: bytes, content_type: str, seed: int) -> PutResult:
        self.held.retrying(lambda: self.store.delete(key), self.on_retry)
        return self._put(key, data, content_type, seed)

    def _put(self, key: str, data: bytes, content_type: str, seed: int) -> PutResult:
        """Writes once; what an earlier worker of this shard wrote there is adopted. Raises `store.conflict` for another spec's."""
        metadata = object_metadata(self.held.lease.job.spec_sha, seed)
        spec_sha = metadata["spec_sha"]
        result = self.held.retrying(lambda: self.store.put(key, data, content_type=content_type, metadata=metadata), self.on_retry)
        if result.info.metadata.get("spec_sha", spec_sha) != spec_sha:
            raise StoreError(
                ErrorCode.STORE_CONFLICT, f"Another job's object stands under {key}.", "Use another store or prefix for this job."
            )
        return result


def text_only(made: Speech | NightjarError) -> bool:
    """Whether the model was asked for text without audio."""
    return isinstance(made, Speech) and made.text_out is not None and made.meta.get("mode") == "text_only"


def _measure(store: ObjectStore, key: str) -> tuple[int, int] | None:
    """(samples, sample rate) of an audio object; None for a damaged file."""
    import soundfile

    data = store.get(key)
    # A WAV file says its own length; one that was cut would be read as a shorter one.
    if data[:4] == b"RIFF" and int.from_bytes(data[4:8], "little") + 8 != len(data):
        return None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            frames = len(file.read())
            return (frames, file.samplerate) if frames == file.frames else None
    except soundfile.SoundFileError:
        return None

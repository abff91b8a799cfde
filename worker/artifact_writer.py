"""Writes the artifacts of an item: encodes, puts under write-once keys, adopts what an earlier attempt left there if it is the same.

In a job with packs they are only encoded here; `worker.pack_writer` stores them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from jobs.layout import CONTENT_TYPES, audio_key, object_metadata, put_numbered, quarantine_key, text_key
from jobs.ledger.records import QUARANTINE, Artifact
from jobs.store.base import ObjectStore
from pipelines.errors import NightjarError
from pipelines.request import Speech
from worker.leases import HeldLease, RetryNote
from worker.pack_writer import EncodedArtifact


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
        return tuple([self._write(one) for one in self._encoded(speech, seed, draw)])

    def encode(self, speech: Speech, seed: int, draw: int) -> tuple[EncodedArtifact, ...]:
        """As `write`, without writing anything."""
        return tuple([one.hashed() for one in self._encoded(speech, seed, draw)])

    def _encoded(self, speech: Speech, seed: int, draw: int) -> tuple[EncodedArtifact, ...]:
        job = self.held.lease.job
        if speech.text_out is not None and text_only(speech):
            return (self._encoded_text(speech.text_out, seed, draw),)
        key = audio_key(job.id, self.index, self.example_id, job.spec.format, draw)
        audio = self._encoded_audio("audio", key, speech, seed)
        return (audio,) if speech.text_out is None else (audio, self._encoded_text(speech.text_out, seed, draw))

    def quarantine(self, speech: Speech, seed: int, draw: int) -> Artifact:
        """Writes the audio of a draw that did not pass its checks, where no export looks; never into a pack."""
        job = self.held.lease.job
        key = quarantine_key(job.id, self.index, self.example_id, job.spec.format, draw)
        return self._write(self._encoded_audio(QUARANTINE, key, speech, seed))

    def _encoded_audio(self, kind: str, key: str, speech: Speech, seed: int) -> EncodedArtifact:
        # Costs half a second at the first item; a worker that waits for work need not pay it.
        from jobs.encoded_audio import encoded_audio

        encoded = encoded_audio(speech, self.held.lease.job.spec)
        made = Artifact(
            index=self.index,
            kind=kind,
            key=key,
            sha256="",
            bytes=len(encoded.data),
            duration_ms=encoded.duration_ms,
            sample_rate=encoded.sample_rate,
            samples=encoded.samples,
            seed=seed,
            meta=dict(speech.meta),
        )
        return EncodedArtifact(made, encoded.data)

    def _encoded_text(self, text: str, seed: int, draw: int) -> EncodedArtifact:
        """The text that a model wrote beside its speech."""
        key, data = text_key(self.held.lease.job.id, self.index, self.example_id, draw), text.encode()
        made = Artifact(self.index, "text", key, "", len(data), duration_ms=0, sample_rate=0, samples=0, seed=seed)
        return EncodedArtifact(made, data)

    def _write(self, one: EncodedArtifact) -> Artifact:
        """Puts an artifact under its key, or under the next number where something else stands: a power cut may have damaged it, or the
        engine may have rounded otherwise."""
        made, data = one.artifact, one.data
        content_type = CONTENT_TYPES[made.key.rpartition(".")[2]]
        metadata = object_metadata(self.held.lease.job.spec_sha, made.seed)
        put = self.held.retrying(lambda: put_numbered(self.store, made.key, data, content_type, metadata), self.on_retry)
        return msgspec.structs.replace(made, key=put.info.key, sha256=put.info.sha256)


def text_only(made: Speech | NightjarError) -> bool:
    """Whether the model was asked for text without audio."""
    return isinstance(made, Speech) and made.text_out is not None and made.meta.get("mode") == "text_only"

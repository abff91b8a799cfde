"""Objects of a job that are lost or damaged are made again: from their line, with the seed that the ledger
knows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from jobs.dialogue import Dialogue, OpenAiBatchForm, parse_line
from jobs.encoded_audio import EncodedAudio, encoded_audio
from jobs.export.manifest import put_manifest, put_shard_manifest
from jobs.input_format import InputFormat
from jobs.input_records import Records
from jobs.layout import CONTENT_TYPES, job_manifest_key, object_metadata, shard_of_input
from jobs.ledger.records import INPUT_FORMAT, Artifact, ItemRow, Job, JobSpec
from jobs.references import ReferenceReader, ReferenceUploader
from jobs.shard_file import CONTENT_TYPE, ShardLine, ShardLines, compress, encode_lines, read_shard
from jobs.source import LineBatch, open_source
from jobs.spec import job_records, resolve
from jobs.store.base import ObjectStore
from jobs.turns import Speak, reference_places, spoken_turns
from jobs.verify import Expected, ObjectCheck, made_again, request_of
from jobs.voices import voice_folder
from pipelines.errors import ErrorCode, InputError, NightjarError, StoreError, SynthesisError
from pipelines.registry import describe
from pipelines.request import Pipeline, Speech, submit

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings


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
    #: Whether the ledger and the manifests say something else of it now.
    relisted: bool = False


@dataclass(slots=True)
class Repair:
    """Makes objects of one job again. Each is written before the ledger is told, and told only where its
    bytes are others, so that a repair that was stopped is done again by the next one. What was in a pack
    becomes an object of its own: a pack is written once."""

    ledger: Ledger
    store: ObjectStore
    job: Job
    pipeline: Pipeline

    def run(self, lost: Iterable[Expected]) -> Generator[Repaired, None, None]:
        """Makes what is lost; inputs cannot be made of anything else. Raises `StoreError` when the store
        fails."""
        lines = ShardLines(self.ledger, self.store, self.job.id, read_shard)
        renewed: set[int] = set()
        left = iter(lost)
        shard_no: int | None = None
        try:
            while some := list(islice(left, _AT_ONCE)):
                begun = [(expected, *self._begun(expected, lines)) for expected in some]
                for expected, row, artifact, making in begun:
                    if row is None or artifact is None or making is None:
                        again = "the same `nightjar run INPUT` writes it again, or submit the input under another --idempotency-key."
                        reason = f"It does not belong to an item: {again}"
                        yield Repaired(expected.key, expected.example_id or "", Mended.FAILED, reason)
                        continue
                    repaired, shard_no = self._repaired(row, artifact, making), row.shard_no
                    if repaired.relisted and artifact.kind == "audio":
                        renewed.add(shard_no)
                    yield repaired
                # A repair that is stopped leaves no ended shard with the manifest of before.
                self._renew_manifests(renewed, but=shard_no)
        finally:
            self._renew_manifests(renewed)

    def _begun(
        self, expected: Expected, lines: ShardLines[ShardLine]
    ) -> tuple[ItemRow | None, Artifact | None, Future[Speech] | NightjarError | None]:
        """The item of an object, its artifact, and its speech in the making; None: it does not belong to
        an item."""
        if expected.index is None:
            return None, None, None
        row = next(self.ledger.items(self.job.id, after=expected.index - 1, limit=1))
        artifact = self.ledger.artifacts_of(self.job.id, expected.kind, [expected.index]).get(expected.index)
        if artifact is None:
            return row, None, None
        try:
            request = request_of(self.store, self.job, lines.of(row), artifact.seed, artifact.kind)
            return row, artifact, submit(self.pipeline, request)
        except NightjarError as error:
            return row, artifact, error

    def _repaired(self, row: ItemRow, artifact: Artifact, making: Future[Speech] | NightjarError) -> Repaired:
        try:
            if isinstance(making, NightjarError):
                raise making
            speech = made_again(making, self.job)
            audio = None if artifact.kind == "text" else _audio(speech, self.job.spec)
            data = _text(speech) if audio is None else audio.data
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
        outcome = Mended.SAME if sha256 == artifact.sha256 else Mended.OTHER
        if outcome is Mended.SAME and artifact.pack is None:
            return Repaired(artifact.key, row.example_id, outcome)
        made = msgspec.structs.replace(artifact, sha256=sha256, bytes=len(data), pack=None, pack_offset=None)
        if outcome is Mended.OTHER and audio is not None:
            facts = {
                "duration_ms": audio.duration_ms,
                "sample_rate": audio.sample_rate,
                "samples": audio.samples,
            }
            made = msgspec.structs.replace(made, **facts, meta=dict(speech.meta))
        if not self.ledger.replace_artifact(self.job.id, made, artifact.sha256):
            raise StoreError(
                ErrorCode.STORE_CONFLICT,
                f"Another process made {artifact.key} meanwhile.",
                "Verify the job again.",
            )
        return Repaired(artifact.key, row.example_id, outcome, relisted=True)

    def _renew_manifests(self, renewed: set[int], but: int | None = None) -> None:
        due = sorted(renewed - {but})
        inputs = self.ledger.shard_inputs(self.job.id) if due else {}
        for shard_no in due:
            made = self.ledger.shard_audio(self.job.id, shard_no)
            key, sha256 = put_shard_manifest(
                self.store, self.job, shard_no, made, read_shard(self.store, *inputs[shard_no])
            )
            self.ledger.set_shard_manifest(self.job.id, shard_no, key, sha256)
            renewed.discard(shard_no)


def _text(speech: Speech) -> bytes:
    if speech.text_out is None:
        raise SynthesisError(ErrorCode.SYNTH_ENGINE, "The model wrote no text this time.")
    return speech.text_out.encode()


def _audio(speech: Speech, spec: JobSpec) -> EncodedAudio:
    if not len(speech.samples) or not np.isfinite(speech.samples).all():
        raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio this time.")
    return encoded_audio(speech, spec)


def mend(
    ledger: Ledger,
    store: ObjectStore,
    job: Job,
    pipeline: Pipeline,
    lost: Iterable[Expected],
    on_repaired: Callable[[Repaired], None] = lambda _: None,
) -> Counter[str]:
    """Makes lost objects of a job again, and its manifest where that says something else of them now;
    counts by `Mended`. Raises as `Repair.run`."""
    counts: Counter[str] = Counter()
    relisted = inputs_lost = False
    with closing(Repair(ledger, store, job, pipeline).run(lost)) as repairing:
        for repaired in repairing:
            counts[repaired.outcome.value] += 1
            relisted |= repaired.relisted
            # Nothing makes an input again here, and the manifest says its texts.
            inputs_lost |= shard_of_input(repaired.key, job.id) is not None
            on_repaired(repaired)
    if job.state.final and not inputs_lost:
        lacking = store.head(job_manifest_key(job.id)) is None and ledger.status(job.id).items.done > 0
        if relisted or lacking:
            put_manifest(ledger, store, job.id)
    return counts


def lost_inputs(ledger: Ledger, store: ObjectStore, job: Job) -> list[str]:
    """Keys of the inputs that are gone or damaged. They are few and small, so their content is compared.
    Raises `StoreError`."""
    return [expected.key for expected, _ in ObjectCheck(ledger, store, job, kinds=("input",))]


def restore_inputs(
    settings: Settings, ledger: Ledger, store: ObjectStore, job: Job, source: str, lost: Collection[str]
) -> None:
    """Writes the inputs under the keys `lost` again, with the reference audio of their lines.

    A line that the ledger has is not judged again: what is refused today may have been accepted then.
    Raises `store.missing` where the lines do not come out as they were staged, `InputError` where the file
    or its reference audio cannot be read.
    """
    shards = {no: key for no, (key, _) in ledger.shard_inputs(job.id).items() if key in lost}
    hashes = dict(ledger.shard_inputs(job.id).values())
    wanted = {
        row.example_id: (row.index, shards[row.shard_no])
        for row in ledger.items(job.id)
        if row.shard_no in shards and not row.turn
    }
    lines: dict[str, dict[int, bytes]] = {key: {} for key in lost}
    card = describe(job.spec.model)
    with open_source(source, settings.s3) as opened:
        uploader = ReferenceUploader(
            ReferenceReader(opened.folder, settings.audio_roots, store), store, job.id
        )
        written_as = cast("InputFormat", job.labels.get(INPUT_FORMAT, "dialogues"))
        form = OpenAiBatchForm(card, job.spec.format) if written_as == "openai-batch" else None
        refused = {line.line for line in ledger.rejected_lines(job.id)}
        # Behind the last refused line that the ledger kept, a line may have been refused whose id a later one
        # has.
        doubted = max(refused, default=0) if job.rejected_lines > len(refused) else None
        checker = None if doubted is None else resolve(job.spec, written_as, voice_folder(settings)).checker
        unchanged = opened.sha256 == job.input_sha256

        def restore(number: int, raw: bytes, dialogue: Dialogue) -> None:
            index, key = wanted.pop(dialogue.example_id)
            turns, heard = _spoken(dialogue, job.spec.speak)
            references = {place: uploader.key(dialogue.messages[place][2]) for place in heard}
            lines[key][index] = b"".join(encode_lines(index, number, raw, references, turns))

        doubtful: dict[str, tuple[int, bytes, Dialogue]] = {}
        for number, line, raw, dialogue in _dialogues(
            job_records(opened, job.spec, written_as), form, refused
        ):
            # Of lines with one id the first that was not refused became items; all of a dialogue's are in one
            # shard.
            if dialogue.example_id not in wanted:
                continue
            if (
                checker is not None
                and number > cast("int", doubted)
                and checker.check(LineBatch(number, [line]), uploader.key)[1]
            ):
                doubtful.setdefault(dialogue.example_id, (number, raw, dialogue))
            else:
                restore(number, raw, dialogue)
        for example_id, one in doubtful.items():
            if example_id in wanted:
                restore(*one)
    for key, found in lines.items():
        data = compress([line for _, line in sorted(found.items())])
        if hashlib.sha256(data).hexdigest() != hashes[key]:
            changed = (
                "its reference audio or the programs that write it are others by now"
                if unchanged
                else "the file has changed"
            )
            message = f"The input {key} of job {job.id} is lost and does not come out as it was: {changed}."
            raise StoreError(
                ErrorCode.STORE_MISSING,
                message,
                "Submit the file again under an --idempotency-key of its own.",
            )
        store.delete(key)
        store.put(key, data, content_type=CONTENT_TYPE)
    store.sync()


def _dialogues(
    records: Records, form: OpenAiBatchForm | None, refused: Collection[int]
) -> Iterator[tuple[int, bytes, bytes, Dialogue]]:
    """Number, text, JSON and dialogue of the lines that were not refused and can be read."""
    for batch in records.batches():
        for number, line in enumerate(batch.lines, batch.first):
            if not isinstance(line, bytes) or number in refused or not (line := line.strip()):
                continue
            try:
                dialogue, raw = parse_line(line if form is None else form.dialogue(line))
            except InputError:
                continue
            yield number, line, raw, dialogue


def _spoken(dialogue: Dialogue, speak: Speak) -> tuple[tuple[int, ...] | None, Sequence[int]]:
    """Places of the messages that are spoken, None for the whole dialogue, and of the audio that they
    need."""
    messages = dialogue.messages
    if speak == "answer":
        return None, [
            place
            for place, (role, modality, _) in enumerate(messages)
            if modality == "audio" and role != "assistant"
        ]
    turns = spoken_turns(messages, speak)
    return turns, sorted({place for turn in turns for place in reference_places(messages, turn)})

"""The inputs of a job's shards, written anew from the file that the job was made of."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from jobs.dialogue import Dialogue, parse_dialogue
from jobs.ingest import BATCH_BYTES, BATCH_LINES
from jobs.ledger.records import INPUT_FORMAT, Job
from jobs.openai_batch import LineForm, line_form
from jobs.payload import CONTENT_TYPE, compress, encode_lines
from jobs.references import ReferenceReader, ReferenceShelf
from jobs.source import Source, open_source
from jobs.spec import speak_of
from jobs.store.base import ObjectStore
from jobs.turns import Speak, reference_places, spoken_turns
from jobs.verify import ObjectCheck
from pipelines.errors import ErrorCode, InputError, StoreError
from pipelines.registry import describe

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings


def lost_inputs(ledger: Ledger, store: ObjectStore, job: Job) -> list[str]:
    """Keys of the inputs that are gone or damaged. They are few and small, so their content is compared. Raises `StoreError`."""
    return [expected.key for expected, _ in ObjectCheck(ledger, store, job, kinds=("input",))]


def restore_inputs(settings: Settings, ledger: Ledger, store: ObjectStore, job: Job, source: str, lost: Collection[str]) -> None:
    """Writes the inputs under the keys `lost` again, with the reference audio of their lines.

    A line that the ledger has is not judged again: what is refused today may have been accepted then. Raises `store.missing`
    where the lines do not come out as they were staged, `InputError` where the file or its reference audio cannot be read.
    """
    shards = {no: key for no, (key, _) in ledger.shard_inputs(job.id).items() if key in lost}
    hashes = dict(ledger.shard_inputs(job.id).values())
    wanted = {row.example_id: (row.index, shards[row.shard_no]) for row in ledger.items(job.id) if row.shard_no in shards and not row.turn}
    lines: dict[str, dict[int, bytes]] = {key: {} for key in lost}
    card = describe(job.spec.model)
    with open_source(source, settings.s3) as opened:
        shelf = ReferenceShelf(ReferenceReader(opened.folder, settings.audio_roots, store), store, job.id)
        form = line_form(job.labels.get(INPUT_FORMAT, "dialogues"), card, job.spec.format)  # pyright: ignore[reportArgumentType]
        refused = {line.line for line in ledger.rejected_lines(job.id)}
        unchanged = opened.sha256 == job.input_sha256
        for number, raw, dialogue in _dialogues(opened, form, refused):
            # Of lines with one id the first became items; all of a dialogue's are in one shard.
            if (item := wanted.pop(dialogue.example_id, None)) is not None:
                index, key = item
                turns, heard = _spoken(dialogue, speak_of(job.spec))
                references = {place: shelf.key(dialogue.messages[place][2]) for place in heard}
                lines[key][index] = b"".join(encode_lines(index, number, raw, references, turns))
    for key, found in lines.items():
        data = compress([line for _, line in sorted(found.items())])
        if hashlib.sha256(data).hexdigest() != hashes[key]:
            changed = "its reference audio or the programs that write it are others by now" if unchanged else "the file has changed"
            message = f"The input {key} of job {job.id} is lost and does not come out as it was: {changed}."
            raise StoreError(ErrorCode.STORE_MISSING, message, "Submit the file again under an --idempotency-key of its own.")
        store.delete(key)
        store.put(key, data, content_type=CONTENT_TYPE)
    store.sync()


def _dialogues(source: Source, form: LineForm | None, refused: Collection[int]) -> Iterator[tuple[int, bytes, Dialogue]]:
    """Number, JSON and dialogue of the lines that were not refused and can be read."""
    for batch in source.batches(BATCH_LINES, BATCH_BYTES, 0):
        for number, line in enumerate(batch.lines, batch.first):
            if line is None or number in refused or not (line := line.strip()):
                continue
            try:
                raw = line if form is None else form.dialogue(line)
                dialogue = parse_dialogue(raw)
            except InputError:
                continue
            yield number, raw, dialogue


def _spoken(dialogue: Dialogue, speak: Speak | None) -> tuple[tuple[int, ...] | None, Sequence[int]]:
    """Places of the messages that are spoken, None for the whole dialogue, and of the audio that they need."""
    messages = dialogue.messages
    if speak is None or speak == "answer":
        return None, [place for place, (role, modality, _) in enumerate(messages) if modality == "audio" and role != "assistant"]
    turns = spoken_turns(messages, speak)
    return turns, sorted({place for turn in turns for place in reference_places(messages, turn)})

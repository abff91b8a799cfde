"""Shards: how a job is cut into them, of even engine time, and their lines as they travel from ingest to a
worker, as zstd-compressed JSONL in the store."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import zstandard

from jobs.dialogue import Dialogue, speech_position
from jobs.ledger.records import ItemRow
from jobs.store.base import ObjectStore
from jobs.turns import turn_messages
from pipelines.errors import ErrorCode, StoreError
from pipelines.request import Generation, Message, SpokenRole

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.line_check import GoodLine
    from pipelines.registry import ModelCard


#: Engine time of a shard: long enough that handing it out costs nothing, short enough that losing it costs
#: little.
ENGINE_SECONDS = 60.0
#: At the start of a job shards are smaller, so that a small job has some for every worker: so much engine
#: time and so many items.
LEAST_ENGINE_SECONDS = 1.0
LEAST_ITEMS = 64
#: They grow with the job: by one item for so many items that were cut before.
ITEMS_PER_GROWTH = 128
#: RTF of a model whose speed was not measured, by its engine. At submit nobody knows the workers' devices:
#: `native` and `vllm` models run on GPUs as a rule.
USUAL_RTF = {"native": 1 / 2000, "vllm": 1 / 700, "cpu": 0.1}
#: The fastest that is believed: an engine that costs nothing measures as 0.
_LEAST_RTF = 1e-6
#: Most bytes of lines in a shard; a worker holds a shard's lines in memory.
MAX_SHARD_BYTES = 16 << 20
CONTENT_TYPE = "application/zstd"
_COMPRESSION_LEVEL = 1


@dataclass(frozen=True, slots=True)
class ShardSize:
    """When a shard is full."""

    audio_ms: int
    max_items: int
    #: A shard with less is not full because it is early in its job.
    least_audio_ms: int = 0

    @classmethod
    def of(
        cls, card: ModelCard, target_seconds: float, max_items: int, measured_rtf: float | None = None
    ) -> ShardSize:
        """`ENGINE_SECONDS` of work, and never more than `target_seconds` of audio.

        The speed is `measured_rtf`, the RTF of the model's earlier jobs; else the card's; else the usual
        one of its engine, which may be far from the truth, so that the first shards are then no larger
        than their number of items says.
        """
        known = card.rtf if measured_rtf is None else max(measured_rtf, _LEAST_RTF)
        seconds = min(target_seconds, ENGINE_SECONDS / (known or USUAL_RTF[card.engine]))
        least_seconds = min(seconds, LEAST_ENGINE_SECONDS / known) if known else 0.0
        return cls(max(1, int(seconds * 1000)), max_items, int(least_seconds * 1000))


def cut(lines: Sequence[GoodLine], size: ShardSize, items_before: int = 0) -> Iterator[Sequence[GoodLine]]:
    """Consecutive runs of `lines`; a line that alone is more than a shard's worth is a shard of its own.

    The items of a line are in one shard. `items_before`: items of the job that were cut before these lines.
    """
    start = audio_ms = total_bytes = items = 0
    for end, line in enumerate(lines):
        more = line.items
        audio_ms += line.estimated_ms
        total_bytes += len(line.raw) * more
        items += more
        early = audio_ms > size.least_audio_ms and items > LEAST_ITEMS + items_before // ITEMS_PER_GROWTH
        if end > start and (
            early or audio_ms > size.audio_ms or total_bytes > MAX_SHARD_BYTES or items > size.max_items
        ):
            yield lines[start:end]
            items_before += items - more
            start, audio_ms, total_bytes, items = end, line.estimated_ms, len(line.raw) * more, more
    if start < len(lines):
        yield lines[start:]


class ShardLine(msgspec.Struct, frozen=True):
    """One item as a worker gets it."""

    index: int
    #: Line of the input file.
    line: int
    example_id: str
    #: What the pipeline is given: of a turn that which speaks it, else the whole dialogue. Audio content is a
    #: key of the store.
    messages: tuple[Message, ...]
    #: The line's own settings, of a turn those of its role; the job's defaults are not in it.
    generation: Generation
    #: Place of the spoken message, or of the answer, among the dialogue's; part of the seed.
    message_index: int
    #: Whose turn it is; None: the item is the whole dialogue.
    role: SpokenRole | None = None

    def generation_over(self, defaults: Generation) -> Generation:
        """The line's settings before the job's, which are those of its role."""
        return self.generation.over(defaults if self.role is None else defaults.of(self.role))


Line = TypeVar("Line", "ShardLine", "RawLine")


class RawLine(msgspec.Struct, frozen=True):
    """One item with its dialogue as it was submitted, for exports."""

    index: int
    line: int
    dialogue: msgspec.Raw
    #: Place of the spoken message; None: the item is the whole dialogue.
    message_index: int | None = msgspec.field(default=None, name="message")
    #: Place of a message -> key of its reference audio.
    references: dict[int, str] = {}


#: Of every line without settings of its own.
NO_GENERATION = Generation()
_decode_dialogue = msgspec.json.Decoder(Dialogue).decode
_decode_raw = msgspec.json.Decoder(RawLine).decode


def encode_lines(
    first: int, line: int, raw: bytes, references: Mapping[int, str], turns: Sequence[int] | None = None
) -> list[bytes]:
    """The items of a dialogue as lines of a shard, with their newlines: one a turn, the first at the index
    `first`; without `turns` the dialogue is one item. `raw` is a valid JSON object without a newline.
    """
    keys = b',"references":%b' % msgspec.json.encode(references) if references else b""
    if turns is None:
        return [b'{"index":%d,"line":%d,"dialogue":%b%b}\n' % (first, line, raw, keys)]
    encoded = b'{"index":%d,"line":%d,"dialogue":%b,"message":%d%b}\n'
    return [encoded % (index, line, raw, turn, keys) for index, turn in enumerate(turns, first)]


_compressors = threading.local()


def compress(lines: Iterable[bytes]) -> bytes:
    """The object of a shard. Equal lines give equal bytes."""
    compressor: zstandard.ZstdCompressor | None = getattr(_compressors, "own", None)
    if compressor is None:
        # Making one takes longer than compressing a shard, and threads must not share one.
        compressor = _compressors.own = zstandard.ZstdCompressor(
            level=_COMPRESSION_LEVEL, write_checksum=True
        )
    return compressor.compress(b"".join(lines))


def read_shard(store: ObjectStore, key: str, sha256: str) -> list[ShardLine]:
    """The lines of a shard in index order. Raises `StoreError`; `store.conflict` when the bytes are not
    those that were staged."""
    lines: list[ShardLine] = []
    for stored in read_raw_shard(store, key, sha256):
        dialogue, turn, references = (
            _decode_dialogue(stored.dialogue),
            stored.message_index,
            stored.references,
        )
        generation = dialogue.generation or NO_GENERATION
        role: SpokenRole | None = None
        if turn is None:
            turn = speech_position(dialogue.messages)
            messages = dialogue.typed_messages(references)
        else:
            role = "assistant" if dialogue.messages[turn][0] == "assistant" else "user"
            messages = turn_messages(dialogue.messages, turn, references)
            if generation is not NO_GENERATION:
                generation = generation.of(role)
        place = stored.index, stored.line, dialogue.example_id
        lines.append(ShardLine(*place, messages, generation, turn, role))
    return lines


def read_raw_shard(store: ObjectStore, key: str, sha256: str) -> list[RawLine]:
    """As `read_shard`, with each dialogue as the undecoded JSON that was submitted."""
    data = store.get(key)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreError(
            ErrorCode.STORE_CONFLICT,
            f"The object {key} was changed after submit.",
            "Restore it, or submit the input again.",
        )
    return [_decode_raw(line) for line in zstandard.ZstdDecompressor().decompress(data).split(b"\n")[:-1]]


def read_references(store: ObjectStore, key: str, sha256: str) -> set[str]:
    """The keys of the reference audio that the lines of a shard name. Raises as `read_shard` does."""
    return {
        reference for line in read_raw_shard(store, key, sha256) for reference in line.references.values()
    }


class ShardLines(Generic[Line]):
    """Lines of items, which are asked for in order: one shard is in memory at a time. `read` is
    `read_shard` or `read_raw_shard`."""

    def __init__(
        self,
        ledger: Ledger,
        store: ObjectStore,
        job_id: str,
        read: Callable[[ObjectStore, str, str], list[Line]],
    ) -> None:
        self._store = store
        self._read = read
        self.inputs = ledger.shard_inputs(job_id)
        self._loaded = ("", "")
        self._lines: dict[int, Line] = {}
        #: Why numbers are not known, once one is not.
        self.failure: StoreError | None = None

    def of(self, item: ItemRow) -> Line:
        """The line of an item. Raises `StoreError`."""
        if self.inputs[item.shard_no] != self._loaded:
            self._lines = {line.index: line for line in self._read(self._store, *self.inputs[item.shard_no])}
            self._loaded = self.inputs[item.shard_no]
        return self._lines[item.index]

    def number_of(self, item: ItemRow) -> int | None:
        """The number of the item's line; None once the store has lost one or cannot be reached."""
        if self.failure is None:
            try:
                return self.of(item).line
            except StoreError as error:
                self.failure = error
        return None

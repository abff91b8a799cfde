"""Shards: how a job is divided into parts of similar engine time, and their lines as zstd-compressed JSONL in the
store."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import zstandard

from jobs.dialogue import NO_GENERATION, decode_dialogue, metadata_json, speech_position, turn_messages
from jobs.ledger import Ledger
from jobs.ledger.records import ItemRow
from jobs.spec import GoodLine, item_seed
from jobs.store.base import ObjectStore, sha256_of
from pipelines.errors import ErrorCode, StoreError
from pipelines.registry import ModelCard
from pipelines.request import Generation, Message, SpokenRole

#: Engine time of a shard: long compared with the time of its dispatch, and short enough that little work is
#: lost with it.
ENGINE_SECONDS = 60.0
#: Minimum engine time and number of items of the first shards of a job. They are smaller than later shards,
#: so that a small job has shards for all workers.
MIN_ENGINE_SECONDS = 1.0
MIN_ITEMS = 64
#: The first shards grow by one item for every `ITEMS_PER_GROWTH` earlier items of the job.
ITEMS_PER_GROWTH = 128
#: Assumed RTF of a model without measurements, by engine; `native` and `vllm` usually run on GPUs.
USUAL_RTF = {"native": 1 / 2000, "vllm": 1 / 700, "cpu": 0.1}
#: Minimum measured RTF. The measured RTF of a test engine may be 0.
_MIN_RTF = 1e-6
#: Maximum bytes of lines in a shard, which a worker holds in memory.
MAX_SHARD_BYTES = 16 << 20
_COMPRESSION_LEVEL = 1


class ShardSize(NamedTuple):
    """The maximum size of shards."""

    audio_ms: int
    max_items: int
    #: Minimum size of the first shards of a job.
    min_audio_ms: int = 0

    @classmethod
    def of(
        cls, card: ModelCard, target_seconds: float, max_items: int, measured_rtf: float | None = None
    ) -> ShardSize:
        """The size for `ENGINE_SECONDS` of work, with a maximum of `target_seconds` of audio.

        The RTF is `measured_rtf` from earlier jobs of the model, else the RTF of the card, else the usual RTF
        of the engine. The usual RTF may be wrong, so the first shards are then limited by their number of
        items.
        """
        known = card.rtf if measured_rtf is None else max(measured_rtf, _MIN_RTF)
        seconds = min(target_seconds, ENGINE_SECONDS / (known or USUAL_RTF[card.engine]))
        min_seconds = min(seconds, MIN_ENGINE_SECONDS / known) if known else 0.0
        return cls(max(1, int(seconds * 1000)), max_items, int(min_seconds * 1000))


def cut(lines: Sequence[GoodLine], size: ShardSize, items_before: int = 0) -> Iterator[Sequence[GoodLine]]:
    """Splits `lines` into consecutive parts, one per shard; a line that is too large gets a shard of its own.

    The items of a line are in one shard. `items_before`: items of the job before these lines.
    """
    start = audio_ms = total_bytes = items = 0
    for end, line in enumerate(lines):
        more = line.items
        audio_ms += line.estimated_ms
        total_bytes += len(line.raw) * more
        items += more
        early = audio_ms > size.min_audio_ms and items > MIN_ITEMS + items_before // ITEMS_PER_GROWTH
        if end > start and (
            early or audio_ms > size.audio_ms or total_bytes > MAX_SHARD_BYTES or items > size.max_items
        ):
            yield lines[start:end]
            items_before += items - more
            start = end
            audio_ms = line.estimated_ms
            total_bytes = len(line.raw) * more
            items = more
    if start < len(lines):
        yield lines[start:]


class ShardLine(msgspec.Struct, frozen=True):
    """One item for a worker."""

    index: int
    #: Line of the input file.
    line: int
    example_id: str
    #: The messages for the pipeline: those of the spoken turn, or the whole dialogue. Audio content is a key in the
    #: store.
    messages: tuple[Message, ...]
    #: The settings of the line without the job's defaults; for a turn, the line's settings for its role.
    generation: Generation
    #: Index of the spoken message or the answer in the dialogue; part of the seed.
    message_index: int
    #: Role of the spoken turn; None: the item is the whole dialogue.
    role: SpokenRole | None = None
    #: See `metadata_json`.
    metadata: dict[str, msgspec.Raw] = {}
    #: The text of the turn as it is written, if it is spoken otherwise.
    written: str | None = None

    def seed(self, job_seed: int, draw: int) -> int:
        """The seed of a draw."""
        return item_seed(job_seed, self.example_id, self.message_index, draw, self.generation.seed)

    def generation_over(self, defaults: Generation) -> Generation:
        """The line's settings, completed by the job's defaults for its role."""
        return self.generation.over(defaults if self.role is None else defaults.of(self.role))


class RawLine(msgspec.Struct, frozen=True):
    """One item with its submitted dialogue, for exports."""

    index: int
    line: int
    dialogue: msgspec.Raw
    #: Index of the spoken message; None: the item is the whole dialogue.
    message_index: int | None = msgspec.field(default=None, name="message")
    #: Index of a message -> key of its reference audio.
    references: dict[int, str] = {}
    #: The text as it is spoken, if it is written otherwise.
    spoken: str | None = None


_decode_raw = msgspec.json.Decoder(RawLine).decode


def encode_lines(first: int, line: GoodLine) -> list[bytes]:
    """The items of a dialogue as lines of a shard, with newlines: one per turn, or one for the whole
    dialogue. Their indexes begin with `first`."""
    number = line.line
    raw = line.raw
    keys = b',"references":%b' % msgspec.json.encode(line.references) if line.references else b""
    if line.turns is None:
        return [b'{"index":%d,"line":%d,"dialogue":%b%b}\n' % (first, number, raw, keys)]
    encoded = b'{"index":%d,"line":%d,"dialogue":%b,"message":%d%b}\n'
    said = {turn: b',"spoken":%b' % msgspec.json.encode(text) for turn, text in line.spoken.items()}
    return [
        encoded % (index, number, raw, turn, keys + said.get(turn, b""))
        for index, turn in enumerate(line.turns, first)
    ]


_compressors = threading.local()


def compress(lines: Iterable[bytes]) -> bytes:
    """The compressed lines of a shard, as stored. Equal lines give equal bytes."""
    compressor = getattr(_compressors, "own", None)
    if compressor is None:
        # Creating a compressor takes longer than compressing a shard, and threads must not share one.
        compressor = _compressors.own = zstandard.ZstdCompressor(
            level=_COMPRESSION_LEVEL, write_checksum=True
        )
    return compressor.compress(b"".join(lines))


def read_shard(store: ObjectStore, key: str, sha256: str) -> list[ShardLine]:
    """The lines of a shard in index order. Raises `StoreError`, with `store.conflict` if the object was changed."""
    return [shard_line(stored) for stored in read_raw_shard(store, key, sha256)]


def shard_line(stored: RawLine) -> ShardLine:
    """The item of a line for a worker."""
    dialogue = decode_dialogue(stored.dialogue)
    turn = stored.message_index
    generation = dialogue.generation or NO_GENERATION
    role: SpokenRole | None = None
    written = None if turn is None or stored.spoken is None else dialogue.messages[turn][2].strip()
    if turn is None:
        turn = speech_position(dialogue.messages)
        messages = dialogue.typed_messages(stored.references)
    else:
        role = "assistant" if dialogue.messages[turn][0] == "assistant" else "user"
        messages = turn_messages(dialogue.messages, turn, stored.references, stored.spoken)
        if generation is not NO_GENERATION:
            generation = generation.of(role)
    where = (stored.index, stored.line, dialogue.example_id)
    return ShardLine(*where, messages, generation, turn, role, metadata_json(stored.dialogue), written)


def read_raw_shard(store: ObjectStore, key: str, sha256: str) -> list[RawLine]:
    """Like `read_shard`, but each dialogue is the submitted JSON, not decoded."""
    data = store.get(key)
    if sha256_of(data) != sha256:
        raise StoreError(
            ErrorCode.STORE_CONFLICT,
            f"The object {key} was changed after submit.",
            "Restore it, or submit the input again.",
        )
    return [_decode_raw(line) for line in zstandard.ZstdDecompressor().decompress(data).split(b"\n")[:-1]]


class ShardLines:
    """Reads the lines of items, which are given in order of their shards. One shard is in memory."""

    def __init__(self, ledger: Ledger, store: ObjectStore, job_id: str) -> None:
        self._store = store
        self.inputs = ledger.shard_inputs(job_id)
        self._loaded = ("", "")
        self._lines: dict[int, RawLine] = {}
        #: The error of the first line number that could not be read. No numbers are read after it.
        self.failure: StoreError | None = None

    def of(self, item: ItemRow) -> RawLine:
        """The line of an item. Raises `StoreError`."""
        place = self.inputs[item.shard_no]
        if place != self._loaded:
            self._lines = {line.index: line for line in read_raw_shard(self._store, *place)}
            self._loaded = place
        return self._lines[item.index]

    def number_of(self, item: ItemRow) -> int | None:
        """The number of the item's line; None after a failure of the store."""
        if self.failure is None:
            try:
                return self.of(item).line
            except StoreError as error:
                self.failure = error
        return None

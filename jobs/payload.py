"""The lines of a shard as they travel from ingest to a worker: zstd-compressed JSONL in the store.

One line: `{"index": 7, "line": 9, "dialogue": {the line as it was submitted}, "references": {"0": "jobs/ID/references/SHA.wav"}}`,
where `references` gives the store's key for the audio of the message at that place, and is left out where there is none.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping

import msgspec
import zstandard

from jobs.dialogue import Dialogue, speech_position
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, StoreError
from pipelines.request import Generation, Message

CONTENT_TYPE = "application/zstd"
_COMPRESSION_LEVEL = 1


class ShardLine(msgspec.Struct, frozen=True):
    """One item as a worker gets it."""

    index: int
    #: Line of the input file.
    line: int
    example_id: str
    #: Audio content is a key of the store.
    messages: tuple[Message, ...]
    #: The line's own settings; the job's defaults are not in it.
    generation: Generation
    #: Place of the speech among the messages; part of the seed.
    speech_position: int


class _StoredLine(msgspec.Struct, frozen=True):
    index: int
    line: int
    dialogue: Dialogue
    references: dict[int, str] = {}


class RawLine(msgspec.Struct, frozen=True):
    """One item with its dialogue as it was submitted, for exports."""

    index: int
    line: int
    dialogue: msgspec.Raw
    #: Place of a message -> key of its reference audio.
    references: dict[int, str] = {}


class _References(msgspec.Struct, frozen=True):
    references: dict[int, str] = {}


_NO_GENERATION = Generation()
_decode = msgspec.json.Decoder(_StoredLine).decode
_decode_references = msgspec.json.Decoder(_References).decode
_decode_raw = msgspec.json.Decoder(RawLine).decode


def encode_line(index: int, line: int, raw: bytes, references: Mapping[int, str]) -> bytes:
    """One line of a shard, with its newline. `raw` is a valid JSON object without a newline."""
    if references:
        keys = msgspec.json.encode(references)
        return b'{"index":%d,"line":%d,"dialogue":%b,"references":%b}\n' % (index, line, raw, keys)
    return b'{"index":%d,"line":%d,"dialogue":%b}\n' % (index, line, raw)


_compressors = threading.local()


def compress(lines: Iterable[bytes]) -> bytes:
    """The object of a shard. Equal lines give equal bytes."""
    compressor: zstandard.ZstdCompressor | None = getattr(_compressors, "own", None)
    if compressor is None:
        # Making one takes longer than compressing a shard, and threads must not share one.
        compressor = _compressors.own = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True)
    return compressor.compress(b"".join(lines))


def read_shard(store: ObjectStore, key: str, sha256: str) -> list[ShardLine]:
    """The lines of a shard in index order. Raises `StoreError`; `store.conflict` when the bytes are not those that were staged."""
    return [_shard_line(_decode(line)) for line in _read_lines(store, key, sha256)]


def read_raw_shard(store: ObjectStore, key: str, sha256: str) -> list[RawLine]:
    """As `read_shard`, with each dialogue as the undecoded JSON that was submitted."""
    return [_decode_raw(line) for line in _read_lines(store, key, sha256)]


def read_references(store: ObjectStore, key: str, sha256: str) -> set[str]:
    """The keys of the reference audio that the lines of a shard name. Raises as `read_shard` does."""
    return {reference for line in _read_lines(store, key, sha256) for reference in _decode_references(line).references.values()}


def _read_lines(store: ObjectStore, key: str, sha256: str) -> list[bytes]:
    data = store.get(key)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreError(
            ErrorCode.STORE_CONFLICT, f"The object {key} is not the one that was staged.", "Restore it, or submit the input again."
        )
    return zstandard.ZstdDecompressor().decompress(data).split(b"\n")[:-1]


def _shard_line(stored: _StoredLine) -> ShardLine:
    dialogue, references = stored.dialogue, stored.references
    return ShardLine(
        stored.index,
        stored.line,
        dialogue.example_id,
        tuple([Message(role, modality, references.get(place, text)) for place, (role, modality, text) in enumerate(dialogue.messages)]),
        dialogue.generation or _NO_GENERATION,
        speech_position(dialogue.messages),
    )

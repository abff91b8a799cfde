"""Cutting a job into shards of even engine time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jobs.line_check import GoodLine
from pipelines.registry import ModelCard

#: Engine time of a shard: long enough that handing it out costs nothing, short enough that losing it costs little.
ENGINE_SECONDS = 60.0
#: RTF of a model whose speed was not measured.
_USUAL_RTF = 0.1
#: Most bytes of lines in a shard; a worker holds a shard's lines in memory.
MAX_SHARD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ShardSize:
    """When a shard is full."""

    audio_ms: int
    max_items: int

    @classmethod
    def of(cls, card: ModelCard, target_seconds: float, max_items: int) -> ShardSize:
        """`ENGINE_SECONDS` of work, and never more than `target_seconds` of audio."""
        seconds = min(target_seconds, ENGINE_SECONDS / (card.rtf or _USUAL_RTF))
        return cls(max(1, int(seconds * 1000)), max_items)


def cut(lines: Sequence[GoodLine], size: ShardSize) -> Iterator[Sequence[GoodLine]]:
    """Consecutive runs of `lines`; a line that alone is more than a shard's worth is a shard of its own.

    The items of a line are in one shard.
    """
    start = audio_ms = total_bytes = items = 0
    for end, line in enumerate(lines):
        more = line.items
        audio_ms += line.estimated_ms
        total_bytes += len(line.raw) * more
        items += more
        if end > start and (audio_ms > size.audio_ms or total_bytes > MAX_SHARD_BYTES or items > size.max_items):
            yield lines[start:end]
            start, audio_ms, total_bytes, items = end, line.estimated_ms, len(line.raw) * more, more
    if start < len(lines):
        yield lines[start:]

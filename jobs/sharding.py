"""Cutting a job into shards of even engine time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jobs.line_check import GoodLine
from pipelines.registry import ModelCard

#: Engine time of a shard: long enough that handing it out costs nothing, short enough that losing it costs little.
ENGINE_SECONDS = 60.0
#: At the start of a job shards are smaller, so that a small job has some for every worker: so much engine time and so many items.
LEAST_ENGINE_SECONDS = 1.0
LEAST_ITEMS = 64
#: They grow with the job: by one item for so many items that were cut before.
ITEMS_PER_GROWTH = 128
#: RTF of a model whose speed was not measured, by its engine. At submit nobody knows the workers' devices: `native` and `vllm` models
#: run on GPUs as a rule.
USUAL_RTF = {"native": 1 / 2000, "vllm": 1 / 700, "cpu": 0.1}
#: The fastest that is believed: an engine that costs nothing measures as 0.
_LEAST_RTF = 1e-6
#: Most bytes of lines in a shard; a worker holds a shard's lines in memory.
MAX_SHARD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ShardSize:
    """When a shard is full."""

    audio_ms: int
    max_items: int
    #: A shard with less is not full because it is early in its job.
    least_audio_ms: int = 0

    @classmethod
    def of(cls, card: ModelCard, target_seconds: float, max_items: int, measured_rtf: float | None = None) -> ShardSize:
        """`ENGINE_SECONDS` of work, and never more than `target_seconds` of audio.

        The speed is `measured_rtf`, the RTF of the model's earlier jobs; else the card's; else the usual one of its engine, which
        may be far from the truth, so that the first shards are then no larger than their number of items says.
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
        if end > start and (early or audio_ms > size.audio_ms or total_bytes > MAX_SHARD_BYTES or items > size.max_items):
            yield lines[start:end]
            items_before += items - more
            start, audio_ms, total_bytes, items = end, line.estimated_ms, len(line.raw) * more, more
    if start < len(lines):
        yield lines[start:]

"""A text unit by unit: one request for each, in the same voice."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from pipelines.request import AudioChunk, Done, Handle, Message, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.model import ServedModel

Chunks = AsyncGenerator[AudioChunk | Done, None]


def unit_seed(seed: int, number: int) -> int:
    """The seed of a unit: the first one has the seed of all, so that a text of one unit sounds as it does
    everywhere."""
    if not number:
        return seed
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def unit_request(request: SynthesisRequest, text: str, number: int) -> SynthesisRequest:
    """The request for one unit of a text. The last message of `request` is replaced by it."""
    messages = (*request.messages[:-1], Message("user", "text", text))
    return replace(
        request,
        request_id=f"{request.request_id}-{number}",
        messages=messages,
        seed=unit_seed(request.seed, number),
    )


async def chunks_of(
    model: ServedModel,
    request: SynthesisRequest,
    permit: Permit,
    opened: Callable[[Handle], None] | None = None,
) -> Chunks:
    """The speech as it is made, then `Done`, which has all of its samples where the model makes them at once.

    `opened`: takes the stream where more of the request's text follows.
    """
    if not model.card.capabilities.streaming:
        yield Done(await model.speech(request, permit))
        return
    async with aclosing(model.chunks(request, permit, opened)) as chunks:
        async for chunk in chunks:
            yield chunk


async def unit_chunks(
    model: ServedModel, request: SynthesisRequest, units: Sequence[str], permit: Permit
) -> Chunks:
    """The speech of all units in order; `Done` follows each. The slot is held until the last unit."""
    permit.hold()
    try:
        for number, text in enumerate(units):
            async with aclosing(chunks_of(model, unit_request(request, text, number), permit)) as chunks:
                async for chunk in chunks:
                    yield chunk
    finally:
        permit.release()

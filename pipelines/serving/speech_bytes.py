"""`POST /tts/bytes` and `/tts/sse`: a whole text in Cartesia's words, and its speech while it is made, as
bytes or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import msgspec

from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import Done, SynthesisRequest
from pipelines.serving import cartesia
from pipelines.serving.admission import Permit
from pipelines.serving.context import Serving
from pipelines.serving.encoding import Resampler, encoded, stream_header
from pipelines.serving.errors import ApiError, as_api_error, bad_request, check_text, empty_text
from pipelines.serving.long_text import unit_chunks
from pipelines.serving.streaming import EVENT_STREAM, Head, Parts, event
from pipelines.serving.text_units import units_of
from pipelines.serving.voices import Voices

ROUTE, EVENTS = "/tts/bytes", "/tts/sse"
Fields = TypeVar("Fields", bound=cartesia.SpeechFields)


class BytesRoute:
    """Answers one request at a time for each call; holds what they share."""

    def __init__(self, serving: Serving, voices: Voices) -> None:
        self._serving = serving
        self._voices = voices

    def read(self, given: object, kind: type[Fields]) -> Fields:
        """The request of a body. Raises `ApiError` (400, 404)."""
        fields = cartesia.typed(given, kind, strict=self._serving.options.strict)
        self._voices.check_model(fields.model_id)
        whole = fields.output_format is not None and fields.output_format.container != "raw"
        if isinstance(fields, cartesia.EventsRequest) and whole:
            raise bad_request(
                "Events have the container `raw`; /tts/bytes sends WAV.",
                "invalid_value",
                "output_format.container",
            )
        check_text(fields.transcript, self._serving.options.context_characters, "transcript")
        return fields

    async def answer(
        self, fields: cartesia.SpeechFields, permit: Permit, request_id: str, route: str = ROUTE
    ) -> Parts:
        """The parts of the answer. Raises `ApiError` before the first one, and `NightjarError`."""
        output = fields.output_format or cartesia.OutputFormat()
        try:
            request = await asyncio.to_thread(self._voices.request, fields, request_id)
            head = Head(
                "audio/wav" if output.container == "wav" else "application/octet-stream",
                {"x-seed": str(request.seed)},
            )
            started = False
            async with aclosing(self._audio(request, fields.transcript, output, permit)) as pieces:
                async for piece in pieces:
                    if started:
                        yield piece
                        continue
                    started = True
                    yield head
                    yield (
                        stream_header(output.sample_rate, output.encoding) + piece
                        if output.container == "wav"
                        else piece
                    )
                    # It is sent.
                    self._serving.metrics.began(route, time.monotonic() - permit.since)
        except NightjarError as error:
            raise as_api_error(error) from error
        if not started:
            error = SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio.", "Try another seed.")
            raise as_api_error(error)

    async def events(self, fields: cartesia.EventsRequest, permit: Permit, request_id: str) -> Parts:
        """The same as server-sent events: `chunk` with base64 of bare samples, then `done`. Raises as
        `answer`."""
        started, step = False, permit.since
        parts = self.answer(fields, permit, request_id, EVENTS)
        try:
            async with aclosing(parts):
                async for part in parts:
                    if isinstance(part, Head):
                        started = True
                        yield Head(EVENT_STREAM, {**part.headers, "cache-control": "no-cache"})
                        continue
                    now = time.monotonic()
                    yield event(
                        msgspec.to_builtins(cartesia.chunk(fields.context_id, part, 1000 * (now - step)))
                    )
                    step = now
            yield event(cartesia.done(fields.context_id))
        except ApiError as error:
            if not started:
                raise
            yield event(cartesia.failure(error, fields.context_id) | {"request_id": request_id})

    async def _audio(
        self, request: SynthesisRequest, text: str, output: cartesia.OutputFormat, permit: Permit
    ) -> AsyncGenerator[bytes, None]:
        units = units_of(text)
        if not units:
            raise empty_text()
        resampler: Resampler | None = None
        async with aclosing(unit_chunks(self._serving.model, request, units, permit)) as chunks:
            async for chunk in chunks:
                self._serving.metrics.spoke(len(chunk.samples) / chunk.sample_rate)
                resampler = resampler or Resampler(chunk.sample_rate, output.sample_rate)
                samples = resampler.add(chunk.samples, last=isinstance(chunk, Done))
                if isinstance(chunk, Done):
                    resampler = None
                if len(samples):
                    yield encoded(samples, output.encoding)

"""Streamed answers: speech as bytes, unit by unit, and the response that sends them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import Done, Handle, SynthesisRequest, Word
from pipelines.serving import ServeOptions
from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.encoding import PcmStream
from pipelines.serving.errors import ApiError, JsonObject
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.model import ServedModel
from pipelines.serving.request_body import finishes_before_disconnect
from pipelines.serving.voices import Voices
from pipelines.serving.word_estimates import WordEstimates
from pipelines.tasks import cancel

log = logging.getLogger(__name__)

#: Samples up to this value are silence. Of the silence before the first sound this much stays, since a sound begins
#: softly.
_SILENCE = 0.01
_KEPT_SECONDS = 0.02


class Serving(NamedTuple):
    """One model of a server, and the objects that its requests share."""

    model: ServedModel
    options: ServeOptions
    admission: AdmissionQueue
    metrics: ServerMetrics
    voices: Voices
    #: All models of the server by the names that clients use, the first one first.
    models: Mapping[str, Serving]

    def of(self, name: str | None, param: str = "model") -> Serving:
        """The model of this name; None means the first one. Raises `ApiError` (404) for a model that is not
        served here. `param`: the field that names it."""
        if name is None:
            return next(iter(self.models.values()))
        if (found := self.models.get(name)) is None:
            raise ApiError(
                404,
                f"The model {name[:100]!r} is not served here. The server has: {', '.join(self.models)}.",
                "model_not_found",
                param,
            )
        return found


class SpeechPiece(NamedTuple):
    """Encoded speech, and the words and phonemes that end in it, by the time since the answer's beginning."""

    data: bytes
    #: The time of its end, or a little later where an encoder has audio that it has not returned.
    end_seconds: float
    words: Sequence[Word] = ()
    phonemes: Sequence[Word] = ()
    #: Whether the times are estimates, because the model does not know them.
    estimated: bool = False


async def speech_pieces(
    serving: Serving,
    requests: Sequence[SynthesisRequest],
    permit: Permit,
    encoder: PcmStream,
    on_handle: Callable[[Handle], None] | None = None,
    begin_seconds: float = 0.0,
    text_so_far: Callable[[], str] | None = None,
    trim_ms: float = 0.0,
) -> AsyncGenerator[SpeechPiece, None]:
    """Yields the encoded speech of all requests in order, as it is made; no piece is empty. Several requests
    hold the slot until the last one is done.

    `on_handle`: as in `ServedModel.chunks`; `begin_seconds`: the time of the first piece, for those of words, which are those of the encoded speech;
    `text_so_far`: the text of a request whose text is still open; `trim_ms`: maximum length of leading silence
    that is left out, up to `_KEPT_SECONDS` before the first sound. Raises as `ServedModel.chunks`, and
    `synth.no_audio` if the model made no audio.
    """

    async def run(call: Callable[..., bytes], *given: object) -> bytes:
        # On the event loop compression would delay other clients; PCM takes less time than a change of
        # thread.
        return await asyncio.to_thread(call, *given) if encoder.compresses else call(*given)

    seconds = begin_seconds
    estimated = requests[0].timestamps and not serving.model.card.capabilities.word_times
    rate = serving.model.card.sample_rate
    #: Samples that may still be left out.
    room = round(trim_ms * rate / 1000)
    is_several = len(requests) > 1
    if is_several:
        permit.hold()
    try:
        for request in requests:
            begin = seconds + encoder.delay_seconds
            estimates = WordEstimates(rate) if estimated else None
            async with aclosing(serving.model.chunks(request, permit, on_handle)) as chunks:
                async for chunk in chunks:
                    audio = chunk.speech if isinstance(chunk, Done) else chunk
                    samples = audio.samples
                    if room:
                        sounding = np.flatnonzero(np.abs(samples) > _SILENCE)
                        silent = sounding[0] - _KEPT_SECONDS * rate if len(sounding) else len(samples)
                        cut = min(max(int(silent), 0), room)
                        room = room - cut if cut == len(samples) else 0
                        samples = samples[cut:]
                        begin -= cut / rate
                    seconds += len(samples) / rate
                    serving.metrics.audio_sent(len(samples) / rate)
                    data = await run(encoder.add, samples, isinstance(chunk, Done))
                    words: Iterable[Word] = audio.words
                    if estimates is not None:
                        text = text_so_far() if text_so_far else str(request.messages[-1].content)
                        words = estimates.add(audio.samples, text, isinstance(chunk, Done))
                    words, phonemes = ([one.moved(begin) for one in said] for said in (words, audio.phonemes))
                    if data or words or phonemes:
                        yield SpeechPiece(data, seconds, words, phonemes, estimated)
    finally:
        if is_several:
            permit.release()
    if seconds == begin_seconds:
        raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio.", "Try another seed.")
    if data := await run(encoder.end):
        seconds = begin_seconds + encoder.length(seconds - begin_seconds)
        yield SpeechPiece(data, seconds, estimated=estimated)


def event(view: object) -> bytes:
    """One server-sent event; bytes in it become base64."""
    return b"data: " + msgspec.json.encode(view) + b"\n\n"


class Head(NamedTuple):
    """The head of an answer, sent with its first bytes."""

    media_type: str
    headers: Mapping[str, str]
    #: Makes the event that reports an error after the first event. None: the answer is cut off instead.
    failed: Callable[[ApiError], JsonObject] | None = None


def event_head(headers: Mapping[str, str], failed: Callable[[ApiError], JsonObject]) -> Head:
    """The head of server-sent events."""
    return Head("text/event-stream", {**headers, "cache-control": "no-cache"}, failed)


Parts = AsyncGenerator[Head | bytes, None]
#: Makes the parts of an answer to a body. Raises `ApiError` and `NightjarError`.
Answer = Callable[[Serving, Any, Permit, str], Parts]
#: Makes the answer to an error of the pipeline.
ErrorAnswer = Callable[[NightjarError], ApiError]


@dataclass(eq=False)
class Reply(Response):
    """Sends a `Head` and then bytes as they are made, until the client disconnects or the time limit is
    reached. Then it closes the generator, which cancels the work. An error before the first bytes is answered
    with its own status."""

    _serving: Serving
    _permit: Permit
    _parts: Parts
    _api_error: ErrorAnswer
    _started: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = self._serving.options.request_seconds
        sending = asyncio.create_task(self._send(scope["path"], send))
        try:
            async with asyncio.timeout(seconds):
                if await finishes_before_disconnect(receive, sending):
                    sending.result()
        except (TimeoutError, ApiError) as error:
            if isinstance(error, TimeoutError):
                error = ApiError(
                    504, f"The request took longer than {seconds:g} s and was ended.", "synth.timeout"
                )
            if not self._started:
                raise error from None
            # The status is already sent: the answer can only be cut off.
            log.warning("an answer was cut off: %s", error)
        finally:
            await cancel(sending)
            await self._parts.aclose()

    async def _send(self, path: str, send: Send) -> None:
        head: Head | None = None
        try:
            async for part in self._parts:
                if isinstance(part, Head):
                    head = part
                    continue
                assert head is not None
                first = not self._started
                self._started = True
                if first:
                    headers = Headers({"content-type": head.media_type, **head.headers}).raw
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if first and "content-length" not in head.headers:
                    self._serving.metrics.first_audio(path, time.monotonic() - self._permit.since)
        except (NightjarError, ApiError) as error:
            api_error = self._api_error(error) if isinstance(error, NightjarError) else error
            if not self._started or head is None or head.failed is None:
                raise api_error from error
            last = event(head.failed(api_error))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

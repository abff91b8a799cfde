"""ElevenLabs' WebSockets: `multi-stream-input`, whose contexts share a connection, and `stream-input` with one
context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated
from urllib.parse import parse_qsl

from pydantic import ConfigDict, Field
from starlette.types import Scope

from pipelines.serving.cartesia import ContextMessage, Name
from pipelines.serving.contexts import CLOSED, ContextSocket
from pipelines.serving.encoding import PcmStream, stream_encoder
from pipelines.serving.errors import JsonObject, bad_request
from pipelines.serving.metrics import MULTI_STREAM_INPUT, STREAM_INPUT
from pipelines.serving.request_body import Body
from pipelines.serving.streaming import Serving
from pipelines.words import are_spaced

_CONTEXT = "default"
#: ElevenLabs' names of files, and of encodings.
_FILES = ("mp3", "opus")
_ENCODINGS = {"pcm": "pcm_s16le", "ulaw": "pcm_mulaw", "alaw": "pcm_alaw"}


class TextMessage(Body):
    """One message of a client. Settings of its voice have no effect."""

    model_config = ConfigDict(extra="ignore")

    text: str = ""
    context_id: Annotated[Name, Field(min_length=1)] = _CONTEXT
    flush: bool = False
    close_context: bool = False
    close_socket: bool = False


class Handshake(Body):
    """The query of a handshake. Clients write booleans as FastAPI reads them."""

    model_config = ConfigDict(extra="ignore", strict=False)

    output_format: str = "mp3"
    #: Each text is spoken when it arrives.
    auto_mode: bool = False
    #: Times are since the beginning of the context, and not since the end of those before.
    sync_alignment: bool = False


class MultiStreamSocket(ContextSocket):
    """A WebSocket with ElevenLabs' protocol: contexts receive texts in pieces, and send their speech with the times
    of its characters."""

    route = MULTI_STREAM_INPUT
    default_context = _CONTEXT

    async def open(self, scope: Scope) -> None:
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        handshake = Handshake.model_validate(query)
        self._kind, rate = f"{handshake.output_format}_".split("_")[:2]
        if self._kind not in (*_FILES, *_ENCODINGS):
            kinds = ", ".join((*_FILES, *_ENCODINGS))
            message = f"Begin `output_format` with one of {kinds}, such as pcm_24000."
            raise bad_request(message, "invalid_value", "output_format")
        self._absolute = handshake.sync_alignment
        #: The end of the times that were sent of each context, in seconds.
        self._ends = dict[str | None, float]()
        given = {
            "context_id": _CONTEXT,
            "transcript": "a",
            "continue": "true",
            "voice": scope["path_params"]["voice_id"],
            "model_id": query.get("model_id"),
            "language": query.get("language_code"),
            "generation_config": query,
            "output_format": None
            if self._kind in _FILES
            else {"encoding": _ENCODINGS[self._kind], "sample_rate": rate},
            "add_timestamps": "true",
            "max_buffer_delay_ms": "0" if handshake.auto_mode else None,
        }
        self._template = ContextMessage.model_validate_strings(given, strict=False)
        # Clients report an error of the handshake, and not every one of a context.
        await self.check(self._template)

    async def handle(self, given: JsonObject) -> None:
        message = TextMessage.model_validate(given)
        name = message.context_id
        # Without text, a message keeps an open context alive.
        if message.text or name in self.contexts:
            await self.say(self._template, context_id=name, transcript=message.text, flush=message.flush)
        if message.close_socket:
            self.closing = CLOSED
        for context in list(self.contexts.values()):
            if message.close_socket or (message.close_context and context.name == name):
                # Text that is flushed is still spoken, unless the client ends the context twice.
                await self.say(
                    self._template,
                    context_id=context.name,
                    transcript="",
                    cancel=not context.flushed,
                    more=False,
                )

    def encoder(self, serving: Serving, first: ContextMessage) -> PcmStream:
        if self._kind in _FILES:
            return stream_encoder(serving.model.card.sample_rate, self._kind)
        return super().encoder(serving, first)

    def translated(self, view: JsonObject) -> Iterator[JsonObject]:
        name = view["context_id"]
        if view["type"] == "chunk":
            yield {"audio": view["data"], "contextId": name}
        elif view["type"] == "timestamps":
            begin = 0.0 if self._absolute else self._ends.get(name, 0.0)
            times = alignment(**view["word_timestamps"], begin_seconds=begin)
            self._ends[name] = begin + (times["charStartTimesMs"][-1] + times["charDurationsMs"][-1]) / 1000
            yield {"audio": "", "alignment": times, "normalizedAlignment": times, "contextId": name}
        elif view["done"]:
            self._ends.pop(name, None)
            error = {**view, "error": view["error_code"]} if view["type"] == "error" else {}
            yield {**error, "isFinal": name is not None, "contextId": name}


class StreamInputSocket(MultiStreamSocket):
    """A WebSocket with ElevenLabs' protocol for one text: an empty text ends it, and the connection after its
    speech."""

    route = STREAM_INPUT

    async def handle(self, given: JsonObject) -> None:
        ends = given.get("text") == ""
        flush = ends or given.get("flush")
        await super().handle({**given, "context_id": _CONTEXT, "flush": flush, "close_socket": ends})


def alignment(words: list[str], start: list[float], end: list[float], begin_seconds: float) -> JsonObject:
    """When each character of words, and of the spaces after them, begins, and how long it takes, in whole
    milliseconds since `begin_seconds`. The time of a word is divided equally."""
    chars = list[str]()
    starts = list[int]()
    for word, since, until, after in zip(words, start, end, [*words[1:], ""]):
        letters = [*word, *" " * are_spaced(word, after)]
        chars += letters
        step = (until - since) / len(word)
        starts += [round(1000 * (since - begin_seconds + number * step)) for number in range(len(letters))]
    ends = [*starts[1:], round(1000 * (end[-1] - begin_seconds))]
    durations = [until - at for at, until in zip(starts, ends)]
    return {"chars": chars, "charStartTimesMs": starts, "charDurationsMs": durations}

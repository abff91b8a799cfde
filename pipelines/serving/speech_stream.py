"""vLLM-Omni's WebSocket, `/v1/audio/speech/stream`: utterances of text in pieces, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from pipelines.errors import ErrorCode
from pipelines.request import SynthesisRequest
from pipelines.serving import speech
from pipelines.serving.cartesia import ContextMessage, GenerationConfig, done, failure
from pipelines.serving.contexts import CLOSED, ContextSocket, Reply
from pipelines.serving.errors import JsonObject, as_api_error, bad_request
from pipelines.serving.metrics import SPEECH_STREAM
from pipelines.serving.speech import SpeechBody
from pipelines.serving.streaming import Serving

#: Clients of this protocol play this rate.
_RATE = 24_000


class SessionMessage(ContextMessage):
    """A message of a context with the settings of a session."""

    body: SpeechBody
    #: Whether audio is sent as base64 in objects.
    in_objects: bool


@dataclass(slots=True)
class _Utterance:
    """The text between two `input.done`, and what was sent of its speech."""

    index: int
    session: SessionMessage
    text: str = ""
    sent_bytes: int = 0
    alignment: dict[str, list[Any]] = field(
        default_factory=lambda: {"words": [], "word_start_times_seconds": [], "word_end_times_seconds": []}
    )
    #: Whether it has text, whether the client has ended the text, and whether its context has ended.
    opened: bool = False
    complete: bool = False
    ended: bool = False

    def message(self, kind: str, **facts: object) -> JsonObject:
        return {"type": kind, "utterance_index": self.index, "sentence_index": 0, **facts}

    def audio(self, data: bytes) -> Iterator[Reply]:
        """The messages with a part of the audio."""
        if not self.sent_bytes:
            yield self.message("audio.start", sentence_text=self.text, format="pcm", sample_rate=_RATE)
        self.sent_bytes += len(data)
        yield self._chunk(data, None) if self.session.in_objects else data

    def _chunk(self, data: bytes, timestamps: object) -> JsonObject:
        return self.message("audio.chunk", audio_b64=data, sample_rate=_RATE, timestamps=timestamps)

    def end(self, failed: bool) -> Iterator[JsonObject]:
        """The messages after the audio."""
        sent = self.sent_bytes
        self.sent_bytes = 0
        if sent:
            if self.session.in_objects:
                in_ms = [
                    {"word": word, "start_ms": round(1000 * begin), "end_ms": round(1000 * end)}
                    for word, begin, end in zip(*self.alignment.values())
                ]
                yield self._chunk(b"", in_ms)
            info = {"word_alignment": self.alignment}
            yield self.message("audio.done", total_bytes=sent, error=failed, timestamp_info=info)
        if self.complete:
            yield self.message("session.done", total_sentences=int(sent > 0))


class SpeechStreamSocket(ContextSocket):
    """A WebSocket with vLLM-Omni's protocol, of which Baseten has a form: it receives utterances in pieces of text,
    and sends their speech while it is made."""

    route = SPEECH_STREAM
    _said: _Utterance | None = None

    async def open(self, scope: Scope) -> None:
        #: Utterances are spoken one after the other.
        self.turn = asyncio.Lock()
        #: Utterances by the names of their contexts.
        self._spoken = dict[str, _Utterance]()

    async def handle(self, given: JsonObject) -> None:
        kind = given.get("type")
        text = given.get("text", "")
        said = self._said
        if kind == "session.close":
            self.closing = CLOSED
            if said is not None and (name := str(said.index)) in self.contexts:
                await self.say(said.session, context_id=name, cancel=True)
        elif kind == "session.config" and not (said and said.opened):
            session = self._session(given)
            await self.check(session)
            self._said = _Utterance(said.index if said else 0, session)
        elif said is None or kind not in ("input.text", "input.done") or not isinstance(text, str):
            raise bad_request(
                "Send `session.config` first or between utterances, then `input.text` with a `text`, and `input.done`.",
                "invalid_value",
            )
        else:
            await self._add(said, text, kind == "input.done")

    async def _add(self, said: _Utterance, text: str, complete: bool) -> None:
        name = str(said.index)
        said.complete = complete
        self._spoken[name] = said
        if complete:
            self._said = _Utterance(said.index + 1, said.session)
        if said.ended:
            # Its context has failed, or no text came for too long.
            if complete:
                await self.send(done(name))
            return
        said.opened = True
        try:
            await self.say(said.session, context_id=name, transcript=text, more=not complete)
            said.text += text
        except Exception as error:
            if not complete:
                raise
            # The end of an utterance is always answered.
            await self.send(failure(as_api_error(error), name))

    def _session(self, given: JsonObject) -> SessionMessage:
        """The settings of the next utterances. Raises as `handle`."""
        if given.get("stream_audio") is not True or given.get("response_format") != "pcm":
            raise bad_request(
                "Set `stream_audio` to true and `response_format` to pcm. /v1/audio/speech sends files.",
                ErrorCode.INPUT_UNSUPPORTED,
            )
        in_objects = given.get("word_timestamps", False)
        kind = given.get("timestamp_type")
        if kind not in (None, "word") or not isinstance(in_objects, bool | None):
            raise bad_request(
                "Set `timestamp_type` to word, and `word_timestamps` to true or false, or remove them.",
                "invalid_value",
            )
        body = SpeechBody.model_validate(
            {
                "voice": given.get("speaker"),
                **given,
                "model": given.get("model") or self.serving.options.names[0],
                "language": None if given.get("language") == "Auto" else given.get("language"),
                "input": "a",
                "stream_format": "sse",
                "timestamps": bool(in_objects or kind),
            }
        )
        return SessionMessage(
            context_id="a",
            model_id=body.model,
            add_timestamps=body.timestamps,
            generation_config=GenerationConfig(trim_leading_silence_ms=body.trim_leading_silence_ms),
            body=body,
            in_objects=bool(in_objects),
        )

    async def request(self, serving: Serving, first: ContextMessage) -> SynthesisRequest:
        assert isinstance(first, SessionMessage)
        speech.check(serving, first.body)
        return await speech.request_of(serving, first.body, "")

    def translated(self, view: JsonObject) -> Iterator[Reply]:
        kind = view["type"]
        said = self._spoken.get(view["context_id"])
        if kind == "error":
            yield view
        if said is None:
            return
        if kind == "chunk":
            yield from said.audio(view["data"])
        elif kind == "timestamps":
            for known, new in zip(said.alignment.values(), view["word_timestamps"].values()):
                known += new
        elif view["done"]:
            said.ended = True
            del self._spoken[view["context_id"]]
            yield from said.end(kind == "error")

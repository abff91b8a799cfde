"""`NightjarTTSService`: speech over one WebSocket, `/tts/websocket`. Each reply is a context, which has a
slot while it is spoken."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pipecat.frames.frames import (
    AggregatedTextFrame,
    AggregatedTextProgressFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessorSetup
from pipecat.services.tts_service import TextAggregationMode, WebsocketTTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory, classify_http_exception
from pipecat.utils.tracing.service_decorators import traced_tts
from websockets.exceptions import WebSocketException
from websockets.protocol import State

from pipecat_nightjar.settings import NightjarTTSSettings, complete, error_frame, language_name, without_none

_PATH = "/tts/websocket"
#: Maximum size of a message from the server: half a minute of speech at 48 kHz is 4 MB.
_MAX_MESSAGE_BYTES = 16 << 20
#: Maximum length of an audio frame. A voice on a CPU sends a whole sentence at once, and Pipecat's metrics
#: read a whole frame before it is passed on.
_FRAME_SECONDS = 0.2
_NOT_READY = 503
_RETRY_SECONDS = 0.25
#: The end of a sentence in Chinese or Japanese, which no space follows.
_UNSPACED_END = re.compile("[\u3001-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff9f][^\\w\\s]*\\Z")
#: Time without audio after which a reply counts as ended. Normally a message ends it, so this must only be
#: longer than the wait for a slot.
_SILENCE_SECONDS = 10.0


@dataclass
class _Reply:
    """An open context of the server. Its words become text of the conversation when they are said."""

    #: Texts whose end the server has not reported yet; empty if the server finds the sentences.
    texts: deque[str] = field(default_factory=deque)
    #: Audio received, in seconds.
    seconds: float = 0.0
    #: Whether the model knows when it says a word.
    is_timed: bool = False
    #: Whether the server has the whole text.
    is_whole: bool = False


class NightjarTTSService(WebsocketTTSService):
    """Speech of Nightjar over a WebSocket.

    An interruption cancels the reply in the server, which frees its slot; the connection stays open. A lost
    connection is opened again for the next text. A word becomes text of the conversation when it is said; if
    the model does not know when that is, a sentence does so when its audio is complete.
    """

    Settings = NightjarTTSSettings
    _settings: NightjarTTSSettings

    def __init__(
        self,
        *,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        sample_rate: int | None = None,
        text_aggregation_mode: TextAggregationMode | None = None,
        connect_seconds: float = 10.0,
        settings: NightjarTTSSettings | None = None,
        **kwargs,
    ) -> None:
        """`base_url`: address of the server. `api_key`: one of its keys. `sample_rate`: that of the frames,
        8,000 to 48,000; None: the pipeline's `audio_out_sample_rate`. `text_aggregation_mode`: SENTENCE
        (default), or TOKEN to let the server find the sentences. `connect_seconds`: maximum time that a text
        waits for a server that cannot be reached. `settings`: model, voice, language.
        """
        kwargs.setdefault("stop_frame_timeout_s", _SILENCE_SECONDS)
        super().__init__(
            reconnect_on_error=False,
            sample_rate=sample_rate,
            text_aggregation_mode=text_aggregation_mode,
            push_start_frame=True,
            push_stop_frames=True,
            push_text_frames=False,
            append_trailing_space=True,
            settings=complete(settings),
            **kwargs,
        )
        self._url = "ws" + base_url.rstrip("/").removeprefix("http") + _PATH
        self._health = base_url.rstrip("/") + "/health"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connect_seconds = connect_seconds
        self._receive_task: asyncio.Task[None] | None = None
        self._replies: dict[str, _Reply] = {}
        #: When the audio of a context began to be played, and when all that has arrived will have been played, by the
        #: pipeline's clock in seconds.
        self._played: dict[str, tuple[float, float]] = {}
        #: When all audio that was pushed will have been played, by the same clock.
        self._played_until = 0.0
        #: Contexts that failed: their unspoken text does not become part of the conversation.
        self._failed: set[str] = set()
        #: Text that is not said yet, by the segment that Pipecat announced, and the last segment.
        self._rests: dict[int | None, str] = {}
        self._announced: AggregatedTextFrame | None = None

    def can_generate_metrics(self) -> bool:
        return True

    def language_to_service_language(self, language: Language) -> str:
        return language_name(language)

    async def setup(self, setup: FrameProcessorSetup) -> None:
        await super().setup(setup)
        try:
            await self._connect()
        except (OSError, WebSocketException) as error:
            await self._report_error(self._unreachable(error))

    async def on_turn_context_created(self, context_id: str) -> None:
        """Opens a lost connection again when the LLM begins a reply, before there is any text to speak."""
        await super().on_turn_context_created(context_id)
        with suppress(OSError, WebSocketException):
            await self._connect()

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Sends a text of a reply. Yields None, because the audio arrives over the connection; or one
        `ErrorFrame`, which ends the reply."""
        try:
            await self._deliver(context_id, text)
            await self.start_tts_usage_metrics(text)
            yield None
        except (OSError, WebSocketException) as error:
            yield self._unreachable(error)
            self._failed.add(context_id)
            await self._end(context_id)

    async def flush_audio(self, context_id: str | None = None) -> None:
        """Notifies the server that the text of the reply is complete. Closes a reply that the server no
        longer has."""
        if context_id is None:
            return
        reply = self._replies.get(context_id)
        if reply is None:
            await self._close(context_id)
        else:
            reply.is_whole = True
            await self._send({"context_id": context_id, "transcript": "", "continue": False})

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Cancels the reply in the server, which frees its slot."""
        await self.stop_all_metrics()
        self._played.pop(context_id, None)
        self._failed.discard(context_id)
        if self._replies.pop(context_id, None) is not None:
            await self._send({"context_id": context_id, "cancel": True})
        await super().on_audio_context_interrupted(context_id)

    async def on_audio_context_completed(self, context_id: str) -> None:
        self._played.pop(context_id, None)
        await super().on_audio_context_completed(context_id)

    async def push_frame(self, frame: Frame, direction: FrameDirection = FrameDirection.DOWNSTREAM) -> None:
        if isinstance(frame, TTSAudioRawFrame):
            self._played_until = max(self._played_until, self._now()) + frame.num_frames / frame.sample_rate
        elif isinstance(frame, InterruptionFrame):
            self._played_until = 0.0
            self._rests.clear()
        elif isinstance(frame, TTSTextFrame):
            self._add_spaces(frame)
        elif isinstance(frame, AggregatedTextProgressFrame):
            self._rests[frame.segment_id] = frame.remaining_text
            if not frame.remaining_text:
                del self._rests[frame.segment_id]
        elif isinstance(frame, AggregatedTextFrame) and frame.will_be_spoken:
            self._rests[frame.id] = self._space_before(frame) + frame.text
            self._announced = frame
        await super().push_frame(frame, direction)

    def _add_spaces(self, word: TTSTextFrame) -> None:
        """Gives a word the spaces before it in its text. Pipecat removes them, and would add one before each word, or
        before none."""
        rest = self._rests.get(word.segment_id, " ")
        space = rest[: len(rest) - len(rest.lstrip())]
        word.text = space + word.text
        word.raw_text = word.raw_text and space + word.raw_text
        word.includes_inter_frame_spaces = True

    def _space_before(self, segment: AggregatedTextFrame) -> str:
        """The spaces between a segment and the one before, which Pipecat removes from sentences."""
        if (before := self._announced) is None:
            return ""
        space = before.text[len(before.text.rstrip()) :]
        is_exact = self._is_streaming_tokens and segment.context_id == before.context_id
        if space or is_exact or segment.text[:1].isspace() or _UNSPACED_END.search(before.text):
            return space
        return " "

    async def start_word_timestamps(self) -> None:
        """Counts the times of a context from the end of the audio before it, where Pipecat counts them from its
        last word."""
        tracker = self._word_timestamp_tracker
        tracker.last_pts = max(tracker.last_pts, int(self._played_until * 1e9))
        await super().start_word_timestamps()

    def _now(self) -> float:
        return self.get_clock().get_time() / 1e9

    async def _update_settings(self, delta: NightjarTTSSettings) -> dict[str, Any]:
        """Continues the rest of a reply in a new context, because a context has one voice."""
        changed = await super()._update_settings(delta)
        if changed and self._turn_context_id is not None:
            await self.flush_audio(self._turn_context_id)
            await self._new_turn_context(self._turn_context_id)
        return changed

    async def _new_turn_context(self, before: str) -> None:
        """Continues the reply in a new context; the words of the one before keep their place."""
        await self._push_sequencer_frames(await self._aggregated_frame_sequencer.finalize(before), before)
        self._turn_context_id = None
        self._turn_context_id = self.create_context_id()

    async def _apply_force_complete(self, context_id: str) -> None:
        """At the end of a context, completes its text with words that had no time, which are said by the end of
        its audio. After a failure they were not spoken, and are no part of the conversation."""
        said_at = max(self._word_timestamp_tracker.last_pts, int(self._played_until * 1e9))
        frames = self._aggregated_frame_sequencer.force_complete(context_id, said_at)
        for frame in frames:
            if isinstance(frame, TTSTextFrame) and context_id in self._failed:
                frame.append_to_context = False
        self._failed.discard(context_id)
        await self._push_word_frames(frames)

    async def _deliver(self, context_id: str, text: str) -> None:
        """Sends a text, over a new connection if the old one is lost. Raises `OSError` and
        `WebSocketException`."""
        deadline = time.monotonic() + self._connect_seconds
        while True:
            try:
                await self._connect()
                reply = self._replies.setdefault(context_id, _Reply())
                if not self._is_streaming_tokens:
                    reply.texts.append(text)
                await self._socket().send(json.dumps(self._message(context_id, text)))
                return
            except (OSError, WebSocketException) as error:
                if classify_http_exception(error).is_permanent or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    def _message(self, context_id: str, text: str) -> dict[str, Any]:
        settings = self._settings
        fields = {
            "add_timestamps": True,
            **settings.extra,
            "context_id": context_id,
            "transcript": text,
            "continue": True,
            "model_id": settings.model,
            "voice": None if settings.voice is None else {"mode": "id", "id": settings.voice},
            "language": settings.language,
            "output_format": {"container": "raw", "encoding": "pcm_s16le", "sample_rate": self.sample_rate},
        }
        if not self._is_streaming_tokens:
            # Each text is a sentence. It is spoken at once, and the server reports when that is done.
            fields["flush"] = True
        return without_none(fields)

    async def _send(self, message: dict[str, Any]) -> None:
        """Sends a message that is not needed if the connection is lost."""
        with suppress(OSError, WebSocketException):
            await self._socket().send(json.dumps(message))

    async def _connect(self) -> None:
        """Opens the connection if there is none. Raises `OSError` and `WebSocketException`."""
        if self._websocket is None or self._websocket.state is not State.OPEN:
            if self._receive_task is not None:
                await asyncio.wait({self._receive_task})
                self._receive_task = None
            await super()._connect()
            await self._connect_websocket()
        if self._receive_task is None:
            self._receive_task = self.create_task(self._receive_task_handler(self._report_error))

    async def _disconnect(self) -> None:
        await super()._disconnect()
        if self._receive_task is not None:
            await self.cancel_task(self._receive_task)
            self._receive_task = None
        await self._disconnect_websocket()

    async def _connect_websocket(self) -> None:
        """Opens the connection. Raises `ConnectionError` while the server loads its model, because it would
        refuse texts."""
        try:
            async with aiohttp.ClientSession() as session, session.get(self._health) as answer:
                if answer.status == _NOT_READY:
                    raise ConnectionError(f"it is not ready ({(await answer.text())[:200].strip()})")
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from error
        self._websocket = await self._websocket_connect(
            self._url, additional_headers=self._headers, compression=None, max_size=_MAX_MESSAGE_BYTES
        )
        await self._call_event_handler("on_connected")

    async def _disconnect_websocket(self) -> None:
        await self.stop_all_metrics()
        websocket, self._websocket = self._websocket, None
        if websocket is not None:
            await websocket.close()
            await self._call_event_handler("on_disconnected")

    def _socket(self) -> Any:
        if self._websocket is None:
            raise ConnectionError("There is no connection to the speech server.")
        return self._websocket

    async def _receive_messages(self) -> None:
        """Reads messages until the connection ends, then ends its replies. Raises `ConnectionClosed` or
        another error."""
        websocket = self._socket()
        try:
            while True:
                await self._on_message(json.loads(await websocket.recv()))
        except Exception:
            await websocket.close()
            for context_id in list(self._replies):
                await self._fail(context_id)
            await self._call_event_handler("on_disconnected")
            raise

    async def _on_message(self, message: dict[str, Any]) -> None:
        """Handles a message of the server. Messages of an interrupted reply are ignored."""
        context_id = message.get("context_id")
        kind = message["type"]
        if kind == "error" and context_id is None:
            await self.push_error_frame(_failure(message))
        elif (reply := self._replies.get(context_id)) is None:
            return
        elif kind == "chunk":
            audio = base64.b64decode(message["data"])
            seconds, now = len(audio) / 2 / self.sample_rate, self._now()
            begin, end = self._played.get(context_id, (max(now, self._played_until),) * 2)
            self._played[context_id] = begin, max(end, now) + seconds
            reply.seconds += seconds
            step = 2 * int(_FRAME_SECONDS * self.sample_rate)
            for place in range(0, len(audio), step):
                frame = TTSAudioRawFrame(
                    audio[place : place + step], self.sample_rate, 1, context_id=context_id
                )
                await self.append_to_audio_context(context_id, frame)
        elif kind == "timestamps":
            reply.is_timed = True
            times = message["word_timestamps"]
            begin, end = self._played[context_id]
            # The server counts the audio alone; the listener has also waited for it.
            waited = end - begin - reply.seconds
            starts = [start + waited for start in times["start"]]
            await self.add_word_timestamps(list(zip(times["words"], starts, strict=True)), context_id)
        elif kind == "flush_done":
            words = reply.texts.popleft().split() if reply.texts else []
            if words and not reply.is_timed:
                begin, end = self._played.get(context_id, (0.0, 0.0))
                await self.add_word_timestamps([(word, end - begin) for word in words], context_id)
        elif kind == "error":
            await self.append_to_audio_context(context_id, _failure(message))
            await self._fail(context_id)
        elif kind == "done":
            await self._end(context_id)

    async def _end(self, context_id: str) -> None:
        """Removes a reply whose context the server has ended. A reply that still gets text remains open: its
        next text opens a new context."""
        reply = self._replies.pop(context_id, None)
        if context_id != self._turn_context_id or (reply is not None and reply.is_whole):
            await self._close(context_id)

    async def _fail(self, context_id: str) -> None:
        """Ends a context that the server does not have any more; the rest of its reply gets a new one, whose
        audio and times begin anew."""
        self._failed.add(context_id)
        if context_id == self._turn_context_id:
            await self._new_turn_context(context_id)
        await self._end(context_id)

    async def _close(self, context_id: str) -> None:
        if self.audio_context_available(context_id):
            await self.remove_audio_context(context_id)

    def _unreachable(self, error: Exception) -> ErrorFrame:
        category = classify_http_exception(error)
        if category is ErrorCategory.UNKNOWN:
            category = ErrorCategory.CONNECTIVITY
        return ErrorFrame(
            f"The speech server {self._url} cannot be reached: {error}", exception=error, category=category
        )


def _failure(message: dict[str, Any]) -> ErrorFrame:
    return error_frame(
        message.get("message") or message.get("title") or "Error",
        message.get("error_code"),
        message.get("status_code"),
    )

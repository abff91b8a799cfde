"""`NightjarHttpTTSService`: one request of `POST /v1/audio/speech` for each sentence, played while it is
made."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import aiohttp
from pipecat.audio.utils import create_stream_resampler
from pipecat.frames.frames import ErrorFrame, Frame, TTSAudioRawFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import require_given

from pipecat_nightjar.settings import NightjarTTSSettings, complete, error_frame, language_name, without_none

_SPEECH = "/v1/audio/speech"


class NightjarHttpTTSService(TTSService):
    """Speech of Nightjar over HTTP. An interruption closes the request, which frees its slot in the server.

    `NightjarTTSService` starts the later sentences of a reply sooner; this service is for networks that allow
    only HTTP.
    """

    Settings = NightjarTTSSettings
    _settings: NightjarTTSSettings

    def __init__(
        self,
        *,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        aiohttp_session: aiohttp.ClientSession | None = None,
        sample_rate: int | None = None,
        settings: NightjarTTSSettings | None = None,
        **kwargs,
    ) -> None:
        """`base_url`: address of the server. `api_key`: one of its keys. `aiohttp_session`: used but not
        closed; None: the service opens its own. `sample_rate`: that of the frames; None: the pipeline's
        `audio_out_sample_rate`. `settings`: model, voice, language.
        """
        super().__init__(
            sample_rate=sample_rate,
            push_start_frame=True,
            push_stop_frames=True,
            settings=complete(settings),
            **kwargs,
        )
        require_given(self._settings.model, "The model that the speech server serves")
        # Pipecat's default resampler drops its buffered audio if the next chunk is late.
        self._resampler = create_stream_resampler(clear_after_secs=None)
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp_session
        self._owns_session = aiohttp_session is None

    def can_generate_metrics(self) -> bool:
        return True

    def language_to_service_language(self, language: Language) -> str:
        return language_name(language)

    async def setup(self, setup: FrameProcessorSetup) -> None:
        await super().setup(setup)
        if self._session is None:
            self._session = aiohttp.ClientSession()

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Yields the audio of `text` as it arrives. If the request fails, the last frame is an
        `ErrorFrame`."""
        if self._session is None:
            raise RuntimeError("The service has no session before `setup`.")
        settings = self._settings
        body = {
            "model": settings.model,
            "voice": settings.voice,
            "language": settings.language,
            **settings.extra,
        }
        body |= {"input": text, "response_format": "pcm"}
        try:
            async with self._session.post(
                self._base_url + _SPEECH, json=without_none(body), headers=self._headers
            ) as response:
                if response.status != 200:
                    yield _refusal(await response.text(), response.status)
                    return
                await self.start_tts_usage_metrics(text)
                rate = int(response.headers["x-sample-rate"])
                # Drops audio of a text that was interrupted.
                await self._resampler.reset()
                pieces = response.content.iter_any()
                async for frame in self._stream_audio_frames_from_iterator(
                    pieces, in_sample_rate=rate, context_id=context_id
                ):
                    yield frame
                if rest := await self._resampler.flush():
                    yield TTSAudioRawFrame(rest, self.sample_rate, 1, context_id=context_id)
        except (aiohttp.ClientError, TimeoutError) as error:
            message = f"The request to the speech server {self._base_url} failed: {error}"
            yield ErrorFrame(message, exception=error, category=ErrorCategory.CONNECTIVITY)


def _refusal(answer: str, status: int) -> ErrorFrame:
    """The frame for an error in OpenAI's format, or for any other error, such as one of a proxy."""
    try:
        error = json.loads(answer)["error"]
        return error_frame(error["message"], error["code"], status)
    except (ValueError, KeyError, TypeError):
        return error_frame(f"The speech server answered with status {status}.", None, status)

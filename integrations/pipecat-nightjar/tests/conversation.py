"""A real pipeline of Pipecat with one service, and the frames that leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.observers.base_observer import BaseObserver
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.tts_service import TTSService
from pipecat.workers.runner import WorkerRunner

PATIENCE_SECONDS = 120.0
Some = TypeVar("Some", bound=Frame)


class Listener(FrameProcessor):
    """Keeps every frame that passes, and notifies waiting tests."""

    def __init__(self) -> None:
        super().__init__(enable_direct_mode=True)
        self.frames: list[Frame] = []
        self._more = asyncio.Condition()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if not isinstance(frame, StartFrame):
            async with self._more:
                self.frames.append(frame)
                self._more.notify_all()
        await self.push_frame(frame, direction)

    def of(self, kind: type[Some]) -> list[Some]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    async def until(self, true: Callable[[], bool]) -> None:
        async with self._more, asyncio.timeout(PATIENCE_SECONDS):
            await self._more.wait_for(true)


class Conversation:
    """A service in a running pipeline: `say` is a reply of an LLM, `interrupt` a user who begins to speak."""

    def __init__(self, worker: PipelineWorker, below: Listener, above: Listener) -> None:
        self._worker = worker
        self.below = below
        self.above = above

    async def say(self, *pieces: str) -> None:
        frames = [LLMFullResponseStartFrame(), *map(LLMTextFrame, pieces), LLMFullResponseEndFrame()]
        await self._worker.queue_frames(frames)

    async def send(self, frame: Frame) -> None:
        await self._worker.queue_frame(frame)

    async def interrupt(self) -> None:
        await self._worker.queue_frame(InterruptionFrame())

    async def until_replies(self, count: int) -> None:
        """Waits until `count` replies are spoken."""
        await self.below.until(lambda: len(self.below.of(TTSStoppedFrame)) >= count)

    async def until_audio(self) -> None:
        await self.below.until(lambda: bool(self.below.of(TTSAudioRawFrame)))

    def audio(self) -> bytes:
        return b"".join(frame.audio for frame in self.below.of(TTSAudioRawFrame))

    def rates(self) -> set[int]:
        return {frame.sample_rate for frame in self.below.of(TTSAudioRawFrame)}

    def errors(self) -> list[str]:
        return [frame.error for frame in self.above.of(ErrorFrame)]


Script = Callable[[Conversation], Awaitable[None]]


async def converse(
    service: TTSService,
    script: Script,
    *,
    rate: int = 24_000,
    observers: list[BaseObserver] | None = None,
    behind: list[FrameProcessor] | None = None,
) -> Conversation:
    """Runs `script` with the service in a pipeline, and what is `behind` it, then ends the pipeline properly."""
    above, below = Listener(), Listener()
    params = PipelineParams(audio_out_sample_rate=rate, enable_metrics=True, enable_usage_metrics=True)
    worker = PipelineWorker(
        Pipeline([above, service, below, *(behind or [])]),
        params=params,
        observers=observers or [],
        cancel_on_idle_timeout=False,
        enable_rtvi=False,
    )
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def begin(_worker: PipelineWorker, _frame: Frame) -> None:
        started.set()

    conversation = Conversation(worker, below, above)

    async def follow() -> None:
        try:
            await asyncio.wait_for(started.wait(), PATIENCE_SECONDS)
            await script(conversation)
        except BaseException:
            # The end would wait for a reply that does not end.
            await worker.cancel()
            raise
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    # A pipeline that does not end fails its test.
    async with asyncio.timeout(3 * PATIENCE_SECONDS):
        results = await asyncio.gather(runner.run(), follow(), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return conversation

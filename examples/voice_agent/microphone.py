"""This machine's microphone and loudspeaker as a transport, over PortAudio."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipecat.frames.frames import InputAudioRawFrame, OutputAudioRawFrame, StartFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.transports.base_input import BaseInputTransport
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import BaseTransport, TransportParams


class _Microphone(BaseInputTransport):
    def __init__(self, sound: Any, params: TransportParams) -> None:
        super().__init__(params)
        self._sound = sound
        self._stream: Any = None

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        loop = asyncio.get_running_loop()

        def captured(data: Any, _frames: int, _time: Any, _status: Any) -> None:
            asyncio.run_coroutine_threadsafe(
                self.push_audio_frame(InputAudioRawFrame(bytes(data), self.sample_rate, 1)), loop
            )

        await self.set_transport_ready(frame)
        block = self.sample_rate // 50
        self._stream = self._sound.RawInputStream(
            self.sample_rate, block, channels=1, dtype="int16", callback=captured
        )
        self._stream.start()

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _Loudspeaker(BaseOutputTransport):
    def __init__(self, sound: Any, params: TransportParams) -> None:
        super().__init__(params)
        self._sound = sound
        self._stream: Any = None
        # A write waits until the device has room.
        self._writer = ThreadPoolExecutor(1)

    async def setup(self, setup: FrameProcessorSetup) -> None:
        await super().setup(setup)
        self._stream = self._sound.RawOutputStream(self.sample_rate, channels=1, dtype="int16")
        self._stream.start()

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        await asyncio.get_running_loop().run_in_executor(self._writer, self._stream.write, frame.audio)
        return True

    async def cleanup(self) -> None:
        await super().cleanup()
        self._writer.shutdown()
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _SoundDevices(BaseTransport):
    def __init__(self, sound: Any) -> None:
        super().__init__()
        params = TransportParams(audio_in_enabled=True, audio_out_enabled=True)
        self._microphone, self._loudspeaker = _Microphone(sound, params), _Loudspeaker(sound, params)

    def input(self) -> _Microphone:
        return self._microphone

    def output(self) -> _Loudspeaker:
        return self._loudspeaker


def microphone_transport() -> BaseTransport:
    """The default sound devices. Raises `RuntimeError` where there are none, or nothing that opens them."""
    try:
        import sounddevice
    except ModuleNotFoundError:
        raise RuntimeError(
            "The microphone needs sounddevice. In a clone: pip install './integrations/pipecat-nightjar[microphone]'."
        ) from None
    except OSError:
        raise RuntimeError(
            "The microphone needs PortAudio. Install it, on Debian with: apt install libportaudio2."
        ) from None
    for kind in ("input", "output"):
        try:
            sounddevice.query_devices(kind=kind)
        except (sounddevice.PortAudioError, ValueError):
            raise RuntimeError(
                f"This machine has no sound device for {kind}. Use --browser, or give a WAV file."
            ) from None
    return _SoundDevices(sounddevice)

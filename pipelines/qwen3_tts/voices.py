"""Voices to clone: reference recordings turned into what the prompt and the codec need of them, and kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.codec.decoder import CodecState
from pipelines.nn.recordings import RecordingCache, decode_recording, read_recording
from pipelines.qwen3_tts.codec import Codec
from pipelines.qwen3_tts.speaker import SpeakerEncoder


@dataclass(frozen=True, slots=True)
class PreparedVoice:
    """A recording as the model hears it. `codes` and `codec_state` (the decoder after those codes) only for cloning in context."""

    #: float32 [talker hidden].
    vector: NDArray[np.float32]
    #: int64 [frames, codebooks].
    codes: NDArray[np.int64] | None = None
    codec_state: CodecState | None = None


class VoiceCache:
    """Prepares reference recordings, and keeps the last ones by their content."""

    def __init__(self, speaker: SpeakerEncoder, codec: Codec, capacity: int = 256) -> None:
        self._speaker = speaker
        self._codec = codec
        self._kept: RecordingCache[PreparedVoice] = RecordingCache(capacity)

    def prepare(self, recording: bytes, in_context: bool) -> PreparedVoice:
        """The voice of an encoded audio file within the bounds of `pipelines.audio`; `in_context` also makes its codes.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) when the device has no room for it.
        """
        return self._kept.get(recording, in_context, lambda: self._make(recording, in_context))

    @torch.inference_mode()
    def _make(self, recording: bytes, in_context: bool) -> PreparedVoice:
        samples = read_recording(recording, self._speaker.sample_rate)
        vector = self._speaker.embed(torch.from_numpy(samples)).float().cpu().numpy()
        if not in_context:
            return PreparedVoice(vector)
        if self._codec.encoder.sample_rate != self._speaker.sample_rate:
            samples, _ = decode_recording(recording, self._codec.encoder.sample_rate)
        codes = self._codec.encoder.encode(torch.from_numpy(samples))
        state = self._codec.decoder.new_state()
        self._codec.decoder.decode_chunk([state], [codes])
        return PreparedVoice(vector, codes.cpu().numpy(), state)

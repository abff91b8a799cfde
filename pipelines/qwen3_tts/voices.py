"""Voices to clone: reference recordings turned into what the prompt and the codec need of them, and kept."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.qwen3_tts.codec import Codec, CodecState
from pipelines.qwen3_tts.speaker import SpeakerEncoder

LEAST_SECONDS = 0.5
MOST_SECONDS = 60.0
#: Root mean square below which a recording holds no voice (-60 dBFS).
SILENCE = 1e-3


@dataclass(frozen=True, slots=True)
class PreparedVoice:
    """A recording as the model hears it. `codes` and `codec_state` (the decoder after those codes) only for cloning in context."""

    #: float32 [talker hidden].
    vector: NDArray[np.float32]
    #: int64 [frames, codebooks].
    codes: NDArray[np.int64] | None = None
    codec_state: CodecState | None = None


class VoiceCabinet:
    """Prepares reference recordings, and keeps the last ones by their content."""

    def __init__(self, speaker: SpeakerEncoder, codec: Codec, capacity: int = 256) -> None:
        self._speaker = speaker
        self._codec = codec
        self._capacity = capacity
        self._kept: OrderedDict[tuple[str, bool], PreparedVoice] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, recording: bytes, in_context: bool) -> PreparedVoice:
        """The voice of an encoded audio file, any rate and channel count; `in_context` also makes its codes.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) when the device has no room for it.
        """
        key = hashlib.sha256(recording).hexdigest(), in_context
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            try:
                voice = self._make(recording, in_context)
            except torch.OutOfMemoryError as error:
                message = f"The device ran out of memory over the reference audio: {error}."
                raise SynthesisError(ErrorCode.SYNTH_OOM, message, "Use a shorter reference or a smaller engine.") from error
            self._kept[key] = voice
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
            return voice

    @torch.inference_mode()
    def _make(self, recording: bytes, in_context: bool) -> PreparedVoice:
        from pipelines.audio import decode  # only where there is audio to read

        samples, _ = decode(recording, self._speaker.sample_rate)
        check_reference(samples, self._speaker.sample_rate)
        vector = self._speaker.embed(torch.from_numpy(samples)).float().cpu().numpy()
        if not in_context:
            return PreparedVoice(vector)
        if self._codec.encoder.sample_rate != self._speaker.sample_rate:
            samples, _ = decode(recording, self._codec.encoder.sample_rate)
        codes = self._codec.encoder.encode(torch.from_numpy(samples))
        state = self._codec.decoder.new_state()
        self._codec.decoder.decode_chunk([state], [codes])
        return PreparedVoice(vector, codes.cpu().numpy(), state)


def check_reference(samples: NDArray[np.float32], sample_rate: int) -> None:
    """Raises `InputError` for a recording [samples] that is too short, too long or silent."""
    seconds = len(samples) / sample_rate
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise InputError(
            ErrorCode.INPUT_REFERENCE_LENGTH,
            f"The reference audio is {seconds:.2f} s long; it must have {LEAST_SECONDS:g} to {MOST_SECONDS:g} s.",
            "Three to fifteen seconds of clear speech work best.",
        )
    if float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) < SILENCE:
        raise InputError(ErrorCode.INPUT_REFERENCE_SILENT, "The reference audio is silent.", "Give a recording with a clear voice.")

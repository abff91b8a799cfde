"""The meter `asr`: a Whisper model hears the speech; scores `wer` and `cer`, with what it heard as their detail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import soxr

from pipelines.errors import ErrorCode, ModelError
from worker.quality.meters import Readings, Sample
from worker.quality.words import error_rates, normalizer_of

SAMPLE_RATE = 16_000
MAX_HEARD_CHARACTERS = 500
#: A line's names of languages -> Whisper's.
_CODES = {
    "chinese": "zh", "english": "en", "german": "de", "italian": "it", "portuguese": "pt", "spanish": "es", "japanese": "ja",
    "korean": "ko", "french": "fr", "russian": "ru", "dutch": "nl", "polish": "pl", "arabic": "ar", "cantonese": "yue",
}  # fmt: skip


class AsrMeter:
    """Greedy decoding without fallback to sampling, one thread, int8: equal audio gives equal words."""

    def __init__(self, model: str = "base", compute_type: str = "int8", threads: int = 1, language: str = "en") -> None:
        from faster_whisper import WhisperModel

        normalizer_of("")
        self._language = language
        try:
            self._model: Any = WhisperModel(
                str(Path(model).expanduser()) if "/" in model else model, device="cpu", compute_type=compute_type, cpu_threads=threads
            )
        except Exception as error:
            raise ModelError(
                ErrorCode.MODEL_BAD_CHECKPOINT,
                f"The ASR model {model[:200]!r} of the meter asr cannot be opened: {error}.",
                "Set `meters.asr.model` to the folder of a faster-whisper model, or let the worker reach the model hub.",
            ) from error

    def measure(self, sample: Sample) -> Readings:
        asked_language = sample.language if sample.language.casefold() not in ("", "auto") else self._language
        audio = soxr.resample(sample.samples, sample.sample_rate, SAMPLE_RATE) if sample.sample_rate != SAMPLE_RATE else sample.samples
        segments, _ = self._model.transcribe(
            audio,
            language=_code(asked_language),
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=len(audio) <= 30 * SAMPLE_RATE,
        )
        heard = " ".join(segment.text.strip() for segment in segments)
        rates = error_rates(sample.text, heard, asked_language)
        return {name: (rate, heard[:MAX_HEARD_CHARACTERS]) for name, rate in rates.items()}


def _code(language: str) -> str:
    """Whisper's code of a language by its name or its tag (`zh-CN`)."""
    name = language.casefold().replace("_", "-").partition("-")[0]
    return _CODES.get(name, name)


open_meter = AsrMeter

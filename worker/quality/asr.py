"""The meter `asr`: a Whisper model hears the speech; scores `wer` and `cer`, with what it heard as their detail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.errors import ErrorCode, ModelError
from pipelines.languages import language_code
from worker.quality.metrics import Reading, Readings, Utterance
from worker.quality.wer import error_rates, normalizer_of

SAMPLE_RATE = 16_000
MAX_HEARD_CHARACTERS = 500


class AsrMeter:
    """Greedy decoding without fallback to sampling, one thread, int8: equal audio gives equal words."""

    def __init__(self, model: str = "base", compute_type: str = "int8", threads: int = 1, language: str = "") -> None:
        from faster_whisper import WhisperModel

        normalizer_of("")
        self._language = language
        folder = _folder_of(model)
        try:
            self._model: Any = WhisperModel(folder, device="cpu", compute_type=compute_type, cpu_threads=threads)
        except Exception as error:
            raise _unusable(model, error) from error
        self._languages = frozenset(self._model.supported_languages)

    def measure(self, utterance: Utterance) -> Readings:
        language = self._language_of(utterance.language) or self._language_of(self._language)
        audio = utterance.resampled(SAMPLE_RATE)
        segments, info = self._model.transcribe(
            audio,
            language=language,
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=len(audio) <= 30 * SAMPLE_RATE,
        )
        heard = " ".join(segment.text.strip() for segment in segments)
        rates = error_rates(utterance.text, heard, language or info.language)
        return {name: Reading(rate.value, heard[:MAX_HEARD_CHARACTERS], rate.telling) for name, rate in rates.items()}

    def _language_of(self, name: str) -> str | None:
        """Whisper's code of a language; None where it is to find out itself."""
        code = language_code(name)
        return code if code in self._languages else None


def prepare(model: str = "base", *, fetch: bool, **_: object) -> None:
    """Makes sure of the weights without opening them. Raises as `_folder_of` does."""
    _folder_of(model, fetch=fetch)


def _folder_of(model: str, *, fetch: bool = True) -> str:
    """The folder of a faster-whisper model; one that is not on this machine comes from the hub, unless `fetch` is false, or its cache.

    Raises `ModelError`: `model.bad_checkpoint` for a name that the hub does not know, `model.unreachable` where the hub cannot be
    asked, or is not to be asked, and the cache does not hold the whole model.
    """
    from faster_whisper.utils import download_model
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    named = str(Path(model).expanduser()) if "/" in model else model
    if Path(named).is_dir():
        return named
    try:
        folder = download_model(named, local_files_only=not fetch)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _unusable(model, error) from error
    except Exception as error:
        # Some of the hub's own errors of a missing file are both.
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            raise _unusable(model, error) from error
        raise _unreachable(model, type(error).__name__) from error
    if not (Path(folder) / "model.bin").exists():
        raise _unreachable(model, "the cache holds a part of it")
    return folder


def _unusable(model: str, error: Exception) -> ModelError:
    return ModelError(
        ErrorCode.MODEL_BAD_CHECKPOINT,
        f"The ASR model {model[:200]!r} of the meter asr cannot be opened: {error}.",
        "Set `meters.asr.model` to the folder or the name of a faster-whisper model.",
    )


def _unreachable(model: str, reason: str) -> ModelError:
    return ModelError(
        ErrorCode.MODEL_UNREACHABLE,
        f"The ASR model {model[:200]!r} of the meter asr is not in the hub's cache and could not be fetched ({reason}).",
        "Let the worker reach the model hub, or set `meters.asr.model` to the folder of a faster-whisper model.",
    )


open_meter = AsrMeter

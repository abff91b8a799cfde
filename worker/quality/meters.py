"""Meters, which measure a draw with a model: built-in ones (`BUILT_IN`), and meters of other packages."""

# resemblyzer is in no extra, so the type checker may not find it.
# pyright: reportMissingImports=false
from __future__ import annotations

import re
import sys
import types
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.metadata import distribution, entry_points
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import structlog
from numpy.typing import NDArray

from jobs.checks import ALIGNER, ENTRY_POINT_GROUP, METERS, Bound, Option, known_meters
from pipelines.audio import decode, longest_pause
from pipelines.errors import ErrorCode, ModelError
from pipelines.languages import language_code
from pipelines.registry import speaker_encoder
from pipelines.request import SpeakerVector, Word
from pipelines.text_units import has_words

log = structlog.get_logger(__name__)

#: Sample rate of all built-in meters.
SAMPLE_RATE = 16_000
#: Memory of a GPU that a process of meters allocates at most, besides CUDA's own, and what must be free.
GPU_BYTES, GPU_ROOM = 3 << 30, 7 << 28
#: In the error of a GPU without room.
NO_ROOM = "out of memory"


@dataclass(frozen=True, eq=False)
class Utterance:
    """The speech of one draw, for a meter."""

    #: float32 [samples], mono, within [-1, 1].
    samples: NDArray[np.float32]
    sample_rate: int
    #: The requested text.
    text: str
    #: Language of the request; empty if unknown.
    language: str = ""
    #: The encoded recording of a cloned voice.
    reference: bytes | None = None

    def resampled(self) -> NDArray[np.float32]:
        """The samples [samples] at the rate of built-in meters, which all meters share, so they cannot be changed."""
        return self._resampled

    @cached_property
    def _resampled(self) -> NDArray[np.float32]:
        import soxr

        made = self.samples
        if self.sample_rate != SAMPLE_RATE:
            made = soxr.resample(made, self.sample_rate, SAMPLE_RATE)
        made.flags.writeable = False
        return made


class Reading(NamedTuple):
    """One score of a draw."""

    value: float
    detail: str = ""
    #: Whether the score is compared with its bound; False: the text is too short, so the score is only recorded.
    judged: bool = True
    #: When each word is said, by the aligner.
    words: tuple[Word, ...] = ()

    def passes(self, bound: Bound | None) -> bool | None:
        """Whether the value is within a bound; None: there is none, or the score is only recorded."""
        return bound.allows(self.value) if bound is not None and self.judged else None


#: Name of a score -> its reading, or only (value, detail). A score that cannot be measured is omitted.
Readings = Mapping[str, tuple[float, str] | Reading]


class Meter(Protocol):
    """A loaded meter, called from one thread. Equal samples must give equal readings, because verdicts are part of a
    job's result. A meter that also has `measure_batch` gets several utterances at once."""

    def measure(self, utterance: Utterance) -> Readings: ...


def torch_device(device: str, threads: int) -> str:
    """The device of a meter that runs in torch: `auto` is the GPU if there is one. A process of meters allocates at most
    `GPU_BYTES` of it. Raises `MemoryError` if less than `GPU_ROOM` of it is free."""
    import torch

    torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and torch.cuda.mem_get_info()[0] < GPU_ROOM:
            raise MemoryError(NO_ROOM)
    if device != "cpu":
        try:
            # `cuda` alone has no number.
            torch.cuda.set_device(torch.device(device).index or 0)
        except Exception as error:
            raise ModelError(
                ErrorCode.MODEL_BAD_CHECKPOINT,
                f"The device {device[:80]!r} of a meter cannot be used: {error}.",
                "Leave `device` out, or set it to cpu.",
            ) from error
        # Of the device that was set.
        torch.cuda.set_per_process_memory_fraction(min(1.0, GPU_BYTES / torch.cuda.mem_get_info()[1]))
        torch.set_float32_matmul_precision("high")
    return device


#: Languages without spaces between words, for which a word error rate is meaningless.
UNSPACED = frozenset(["zh", "yue", "ja", "th", "lo", "lao", "km", "khmer", "my", "burmese"])
#: Minimum length of a text whose error rates are judged: words, characters, and characters in languages without spaces.
#: In a shorter text a single misheard word exceeds any bound, and homophones and names are misheard even in good speech.
MIN_WORDS, MIN_CHARACTERS, MIN_UNSPACED = 4, 12, 6
MAX_TRANSCRIPT_CHARACTERS = 500

#: Symbols and the words that replace them, because an ASR model may write either.
_ENGLISH_SIGNS = (
    (r"&", " and "),
    (r"(?<=\d)\s*%", " percent"),
    (r"#(?=\d)|\b[Nn]o\.\s*(?=\d)", " number "),
    (r"\+", " plus "),
    (r"=", " equals "),
    (r"@", " at "),
    (r"°\s*C\b", " degrees celsius "),
    (r"°\s*F\b", " degrees fahrenheit "),
    (r"°", " degrees "),
)
#: `3:16`, `3.16` and `3 16` are equal, as are `5th` and `5`.
_BETWEEN_DIGITS, _ORDINAL = re.compile(r"(?<=\d)[ .,:](?=\d)"), re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")


@lru_cache(maxsize=8)
def normalizer_of(language: str) -> Callable[[str], str]:
    """A function that normalizes text by Whisper's English rules (numbers, spellings, contractions), or by its basic
    rules for other languages (Radford et al., 2022, appendix C)."""
    if language.casefold() in ("", "en", "english"):
        from whisper_normalizer.english import EnglishTextNormalizer

        whisper = EnglishTextNormalizer()

        def normalized(text: str) -> str:
            for sign, spoken in _ENGLISH_SIGNS:
                text = re.sub(sign, spoken, text)
            return _BETWEEN_DIGITS.sub("", _ORDINAL.sub("", whisper(text)))

        return normalized
    from whisper_normalizer.basic import BasicTextNormalizer

    return BasicTextNormalizer()


def error_rates(asked: str, transcript: str, language: str = "") -> dict[str, Reading]:
    """`wer` and `cer`: the number of edits divided by the length of the requested text; they may exceed 1. Languages
    without spaces between words have no `wer`.

    Only texts of the minimum length are judged. Empty if the normalized text of `asked` is empty. Spaces do not count
    as characters.
    """
    from rapidfuzz.distance import Levenshtein

    normal = normalizer_of(language)
    wanted, found = (
        [word for word in unicodedata.normalize("NFKC", normal(text)).split() if has_words(word)]
        for text in (asked, transcript)
    )
    if not wanted:
        return {}
    compared: dict[str, tuple[Sequence[str], Sequence[str], int]] = {
        "cer": ("".join(wanted), "".join(found), MIN_CHARACTERS),
        "wer": (wanted, found, MIN_WORDS),
    }
    if language_code(language) in UNSPACED:
        compared = {"cer": (*compared["cer"][:2], MIN_UNSPACED)}
    detail = transcript[:MAX_TRANSCRIPT_CHARACTERS]
    return {
        name: Reading(Levenshtein.distance(asked, heard) / len(asked), detail, len(asked) >= minimum)
        for name, (asked, heard, minimum) in compared.items()
    }


class AsrMeter:
    """Scores `wer` and `cer` by the transcript of a Whisper model, which becomes their detail.

    Decoding is greedy, without fallback to sampling, in one thread and int8, so that equal audio gives equal words.
    """

    def __init__(
        self,
        model: str = "base",
        compute_type: str = "int8",
        threads: int = 1,
        language: str = "",
        device: str = "cpu",
    ) -> None:
        from faster_whisper import WhisperModel

        normalizer_of("")
        self._language = language
        folder = asr_folder(model)
        try:
            self._model: Any = WhisperModel(
                folder, device=device, compute_type=compute_type, cpu_threads=threads
            )
        except Exception as error:
            raise unusable("asr", model, error) from error
        self._languages = frozenset(self._model.supported_languages)

    def measure(self, utterance: Utterance) -> Readings:
        language = self._language_of(utterance.language) or self._language_of(self._language)
        audio = utterance.resampled()
        segments, info = self._model.transcribe(
            audio,
            language=language,
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=len(audio) <= 30 * SAMPLE_RATE,
        )
        transcript = " ".join(segment.text.strip() for segment in segments)
        return error_rates(utterance.text, transcript, language or info.language)

    def _language_of(self, name: str) -> str | None:
        """Whisper's code of a language; None if Whisper must detect it."""
        code = language_code(name)
        return code if code in self._languages else None


def asr_folder(model: str = "base", *, fetch: bool = True, **_: object) -> str:
    """The folder of a faster-whisper model: a local folder, or the folder in the hub's cache. Without `fetch` nothing
    is downloaded.

    Raises `ModelError`: `model.bad_checkpoint` for a name unknown to the hub, `model.unreachable` if the model is not
    completely in the cache and cannot or must not be downloaded.
    """
    named = str(_path("asr", model))
    if Path(named).is_dir():
        return named
    if model.startswith((".", "/", "~")):
        raise unusable("asr", model, "there is no such folder")
    from faster_whisper.utils import download_model
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        folder = download_model(named, local_files_only=not fetch)
    except Exception as error:
        # Some errors of the hub for a missing file are both ValueError and OSError.
        unknown = isinstance(error, ValueError) and not isinstance(error, OSError)
        if unknown or isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
            raise unusable("asr", model, error) from error
        raise _unreachable(model, type(error).__name__) from error
    if not (Path(folder) / "model.bin").exists():
        raise _unreachable(model, "the cache has only a part of it")
    return folder


def ctc_folder(model: str = "", **_: object) -> Path:
    """The folder of a CTC model. Raises `ModelError` (`model.bad_checkpoint`) if it holds none."""
    folder = _path(ALIGNER, model)
    if not (folder / "config.json").is_file():
        raise unusable(ALIGNER, model, "there is no folder with a config.json")
    return folder


def _path(meter: str, model: str) -> Path:
    try:
        return Path(model).expanduser()
    except (TypeError, RuntimeError) as error:
        raise unusable(meter, model, error) from error


def unusable(meter: str, model: str, error: object) -> ModelError:
    other = "" if meter == ALIGNER else "the folder or the name of a faster-whisper model, or "
    return ModelError(
        ErrorCode.MODEL_BAD_CHECKPOINT,
        f"The model {str(model)[:200]!r} of the meter {meter} cannot be opened: {error}.",
        f"Set it with `--qa-set meters.{meter}.model=MODEL`: {other}the folder of a CTC model in Hugging Face's layout.",
    )


def _unreachable(model: str, reason: str) -> ModelError:
    return ModelError(
        ErrorCode.MODEL_UNREACHABLE,
        f"The ASR model {model[:200]!r} of the meter asr is not in the hub's cache and could not be downloaded ({reason}).",
        "Give the worker access to the model hub, or a faster-whisper model: `--qa-set meters.asr.model=FOLDER`.",
    )


class SileroMeter:
    """Scores `silence` (share of 32 ms chunks without speech) and `pause` (seconds) by the voice activity detector of
    Silero, which is part of faster-whisper. It runs on one core."""

    #: Samples of a chunk.
    SPEECH_PROBABILITY, CHUNK = 0.5, 512

    def __init__(self) -> None:
        from faster_whisper.vad import get_vad_model

        self._probabilities: Any = get_vad_model()

    def measure(self, utterance: Utterance) -> Readings:
        audio, chunk = utterance.resampled(), self.CHUNK
        # Whole chunks, and a copy, because the detector writes into its input.
        audio = np.pad(audio, (0, max(0, chunk - len(audio))))[: max(len(audio) // chunk, 1) * chunk]
        speech = self._probabilities(audio) >= self.SPEECH_PROBABILITY
        return {
            "silence": (1.0 - float(speech.mean()), "silero"),
            "pause": (longest_pause(speech) * chunk / SAMPLE_RATE, "silero"),
        }


class DistillMosMeter:
    """Score `distillmos`: naturalness from 1 to 5 by DistillMOS (Stahl and Gamper, 2025), a small model distilled from
    XLS-R: the mean over segments; on a GPU in float16."""

    #: Samples of a segment, the most between the starts of two, and the segments that are scored at once on a CPU and on
    #: a GPU.
    SEGMENT, HOP, AT_ONCE, GPU_AT_ONCE = 122_880, 16_000, 8, 16

    def __init__(self, device: str = "auto", threads: int = 1) -> None:
        import torch

        self._torch, self._device = torch, torch_device(device, threads)
        # Only the command line of distillmos uses torchaudio, which is not available for every torch, so an empty module
        # replaces torchaudio during the import.
        is_replaced = "torchaudio" not in sys.modules
        if is_replaced:
            sys.modules["torchaudio"] = types.ModuleType("torchaudio")
        try:
            from distillmos import ConvTransformerSQAModel
        finally:
            if is_replaced:
                del sys.modules["torchaudio"]
        self._model: Any = ConvTransformerSQAModel(segmenting_in_forward=False).eval().to(self._device)

    def measure(self, utterance: Utterance) -> Readings:
        return self.measure_batch([utterance])[0]

    def measure_batch(self, utterances: Sequence[Utterance]) -> Sequence[Readings]:
        counts = list[int]()

        def segments() -> Iterator[NDArray[np.float32]]:
            for audio in (one.resampled() for one in utterances):
                beyond = max(0, len(audio) - self.SEGMENT)
                padded = np.pad(audio, (0, self.SEGMENT + beyond - len(audio)))
                starts = (np.linspace(0, 1, -(-beyond // self.HOP) + 1) * beyond).astype(int)
                counts.append(len(starts))
                yield from (padded[at : at + self.SEGMENT] for at in starts)

        left, scores, on_gpu = segments(), list[Any](), self._device != "cpu"
        float16 = self._torch.autocast("cuda", self._torch.float16, on_gpu)
        with self._torch.inference_mode(), float16:
            while some := [*islice(left, self.GPU_AT_ONCE if on_gpu else self.AT_ONCE)]:
                scores.append(self._model(self._torch.from_numpy(np.stack(some)).to(self._device)))
        found = self._torch.cat(scores).float().cpu().split(counts)
        return [{"distillmos": (own.mean().item(), "")} for own in found]


class DnsMosMeter:
    """Score `dnsmos`: overall quality from 1 to 5 by DNSMOS P.835 (Reddy et al., 2022), with the model of the package
    speechmos."""

    #: Input length of the model; shorter speech is repeated, longer speech is scored every second.
    WINDOW_SAMPLES = int(9.01 * SAMPLE_RATE)
    #: Maps the model's overall output to the MOS scale; from speechmos.dnsmos.DNSMOS.get_polyfit_val.
    OVERALL = np.poly1d([-0.06766283, 1.11546468, 0.04602535])

    def __init__(self, threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        # Found without an import of the package, whose other libraries are not needed.
        model = distribution("speechmos").locate_file("speechmos/dnsmos_models/sig_bak_ovr.onnx")
        self._session: Any = onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"]
        )

    def measure(self, utterance: Utterance) -> Readings:
        audio, window = utterance.resampled(), self.WINDOW_SAMPLES
        audio = np.tile(audio, -(-window // len(audio)))
        starts = range(0, len(audio) - window + 1, SAMPLE_RATE)
        overall = [
            self._session.run(None, {"input_1": audio[None, at : at + window]})[0][0][2] for at in starts
        ]
        return {"dnsmos": (float(np.mean(self.OVERALL(np.array(overall)))), "")}


@dataclass
class SpeakerMeter:
    """The cosine of the voice vectors of the speech and of the cloned reference. Items without a reference have no
    score."""

    score: str
    vector: SpeakerVector

    def __post_init__(self) -> None:
        # Consecutive draws often clone the same voice.
        self._voice_of = lru_cache(maxsize=1)(lambda reference: self.vector(*decode(reference)))

    def measure(self, utterance: Utterance) -> Readings:
        if utterance.reference is None:
            return {}
        voice = self.vector(utterance.samples, utterance.sample_rate)
        return {self.score: (float(np.dot(voice, self._voice_of(utterance.reference))), "")}


def _open_speaker(device: str = "auto", threads: int = 1) -> Meter:
    """Score `similarity`, by resemblyzer (Wan et al., 2018): about 0.85 for the same voice, and 0.45 to 0.78 for
    different ones."""
    from resemblyzer import VoiceEncoder, preprocess_wav

    encoder: Any = VoiceEncoder(torch_device(device, threads), verbose=False)
    return SpeakerMeter(
        "similarity", lambda samples, rate: encoder.embed_utterance(preprocess_wav(samples, source_sr=rate))
    )


def _open_asr(model: str = "base", **options: Any) -> Meter:
    """The meter `asr`: by a CTC model if `model` is the folder of one, else by a Whisper model."""
    config = _path("asr", model) / "config.json"
    if config.is_file() and "ForCTC" in config.read_text(errors="replace"):
        return import_module("worker.quality.aligner").CtcMeter(model, hears=True, **options)
    return AsrMeter(model, **options)


#: The meters of `jobs.checks.METERS`, by name. Each imports its libraries when it is opened.
BUILT_IN: dict[str, Callable[..., Meter]] = {
    "asr": _open_asr,
    "silero": SileroMeter,
    "distillmos": DistillMosMeter,
    "dnsmos": DnsMosMeter,
    "speaker": _open_speaker,
    "voice": lambda model, device="auto", threads=1: SpeakerMeter(
        "voice_similarity", speaker_encoder(model)(torch_device(device, threads))
    ),
    ALIGNER: lambda **options: import_module("worker.quality.aligner").CtcMeter(hears=False, **options),
}


def open_meter(name: str, options: Mapping[str, Option]) -> Meter:
    """Opens the meter with this name and these options.

    Without an option `device`, a meter for which the GPU has no room runs on the CPU.

    Raises `ModelError`: `model.unknown` for an unknown name, `config.missing_library` for missing libraries,
    `model.bad_checkpoint` for invalid weights or options, `model.unreachable` for weights that cannot be downloaded
    now.
    """
    factory: Callable[..., Meter] | None = None
    try:
        factory = BUILT_IN.get(name)
        if factory is None:
            found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
            if not found:
                raise ModelError(
                    ErrorCode.MODEL_UNKNOWN,
                    f"There is no meter {name[:80]!r} on this worker.",
                    f"It has: {', '.join(known_meters())}.",
                )
            factory = cast(Callable[..., Meter], found[0].load())
        return factory(**options)
    except ImportError as error:
        raise _missing_library(name, error) from error
    except (MemoryError, RuntimeError) as error:
        if NO_ROOM not in str(error) or factory is None:
            raise
        if options.get("device", "auto") == "auto":
            log.warning("a meter runs on the CPU, the GPU has no room", meter=name)
            return factory(**{**options, "device": "cpu"})
        raise ModelError(
            ErrorCode.MODEL_BAD_CHECKPOINT,
            f"The GPU has no room for the meter {name}.",
            "Leave `device` out, or lower SPEECH_ENGINE__MEMORY_SHARE.",
        ) from error
    except TypeError as error:
        raise ModelError(
            ErrorCode.MODEL_BAD_CHECKPOINT,
            f"The meter {name} does not accept its options: {str(error).rpartition('() ')[2]}.",
            f"Correct them with `--qa-set meters.{name}.OPTION=VALUE`, or in the file of `--qa-config`.",
        ) from error


def _missing_library(name: str, error: ImportError) -> ModelError:
    what = METERS[name].install if name in METERS else "the requirements of this meter's package"
    return ModelError(
        ErrorCode.CONFIG_MISSING_LIBRARY,
        f"The meter {name} needs the library {error.name or error}.",
        f"Install {what}.",
    )


def check_weights(meters: Mapping[str, Mapping[str, Option]], *, fetch: bool) -> None:
    """Raises the error of a meter whose weights are missing. Those of other meters than `asr` and the aligner are in
    their libraries."""
    if ALIGNER in meters:
        ctc_folder(**meters[ALIGNER])  # pyright: ignore[reportArgumentType]
    if "asr" in meters:
        try:
            asr_folder(fetch=fetch, **meters["asr"])  # pyright: ignore[reportArgumentType]
        except ImportError as error:
            raise _missing_library("asr", error) from error
    if "voice" in meters:
        speaker_encoder(str(meters["voice"].get("model", "FOLDER")))

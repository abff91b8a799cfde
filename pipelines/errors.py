"""Nightjar's errors: a closed set of codes, a message, and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum


class ErrorCode(StrEnum):
    """The codes with which a line, an item, a shard or a command can end. The set is closed: ledgers and
    scripts rely on it."""

    # Faults of a line or a request: never retried.
    INPUT_BAD_JSON = "input.bad_json"
    INPUT_BAD_LINE = "input.bad_line"
    INPUT_BAD_ROLE = "input.bad_role"
    INPUT_BAD_MODALITY = "input.bad_modality"
    INPUT_BAD_GENERATION = "input.bad_generation"
    INPUT_DUPLICATE_ID = "input.duplicate_id"
    INPUT_EMPTY_TEXT = "input.empty_text"
    INPUT_UNPRONOUNCEABLE = "input.unpronounceable"
    INPUT_TOO_LONG = "input.too_long"
    INPUT_MULTI_TURN = "input.multi_turn"
    INPUT_AUDIO_MISSING = "input.audio_missing"
    INPUT_AUDIO_FORBIDDEN = "input.audio_forbidden"
    INPUT_AUDIO_UNREADABLE = "input.audio_unreadable"
    INPUT_REFERENCE_LENGTH = "input.reference_length"
    INPUT_REFERENCE_SILENT = "input.reference_silent"
    INPUT_REFERENCE_TEXT = "input.reference_text"
    INPUT_UNKNOWN_VOICE = "input.unknown_voice"
    INPUT_UNKNOWN_LANGUAGE = "input.unknown_language"
    INPUT_UNSUPPORTED = "input.unsupported"
    INPUT_NO_ITEMS = "input.no_items"
    INPUT_UNREADABLE = "input.unreadable"
    INPUT_WRONG_FORMAT = "input.wrong_format"
    # The engine could not make this speech.
    SYNTH_OOM = "synth.oom"
    SYNTH_TIMEOUT = "synth.timeout"
    SYNTH_NO_EOS = "synth.no_eos"
    SYNTH_RUNAWAY = "synth.runaway"
    SYNTH_NO_AUDIO = "synth.no_audio"
    SYNTH_NAN = "synth.nan"
    SYNTH_SILENT = "synth.silent"
    SYNTH_ABORTED = "synth.aborted"
    SYNTH_ENGINE = "synth.engine"
    # Every draw failed a quality check.
    QA_WER = "qa.wer"
    QA_DURATION = "qa.duration"
    QA_CLIPPED = "qa.clipped"
    QA_SILENCE = "qa.silence"
    QA_LOUDNESS = "qa.loudness"
    QA_MOS = "qa.mos"
    QA_SPEAKER = "qa.speaker"
    QA_SCORE = "qa.score"
    QA_METER = "qa.meter"
    # The store.
    STORE_UNREACHABLE = "store.unreachable"
    STORE_FORBIDDEN = "store.forbidden"
    STORE_FULL = "store.full"
    STORE_MISSING = "store.missing"
    STORE_CONFLICT = "store.conflict"
    STORE_BAD_KEY = "store.bad_key"
    # The ledger and the broker.
    LEDGER_UNREACHABLE = "ledger.unreachable"
    LEDGER_SCHEMA = "ledger.schema"
    LEDGER_SHARED_SQLITE = "ledger.shared_sqlite"
    LEDGER_NOT_FOUND = "ledger.not_found"
    LEDGER_STATE = "ledger.state"
    LEDGER_CANCELLED = "ledger.cancelled"
    BROKER_UNREACHABLE = "broker.unreachable"
    # A remote server.
    SERVER_UNREACHABLE = "server.unreachable"
    # Workers.
    WORKER_LOST = "worker.lost"
    WORKER_CRASH = "worker.crash"
    POISON_WORKER_CRASH = "poison.worker_crash"
    # Models and configuration.
    MODEL_UNKNOWN = "model.unknown"
    MODEL_UNREACHABLE = "model.unreachable"
    MODEL_BAD_CHECKPOINT = "model.bad_checkpoint"
    MODEL_MISSING_EXTRA = "model.missing_extra"
    CONFIG_INVALID = "config.invalid"
    CONFIG_MISSING_LIBRARY = "config.missing_library"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when it is repeated unchanged."""
        return self in _RETRYABLE

    @property
    def permanent(self) -> bool:
        """Whether the line is at fault and can never succeed unchanged."""
        return self.value.startswith("input.") or self is ErrorCode.STORE_BAD_KEY


_RETRYABLE = frozenset(
    {
        ErrorCode.SYNTH_OOM,
        ErrorCode.SYNTH_TIMEOUT,
        ErrorCode.SYNTH_ABORTED,
        ErrorCode.SYNTH_ENGINE,
        ErrorCode.QA_METER,
        ErrorCode.STORE_UNREACHABLE,
        ErrorCode.STORE_FULL,
        ErrorCode.STORE_FORBIDDEN,
        ErrorCode.LEDGER_UNREACHABLE,
        ErrorCode.BROKER_UNREACHABLE,
        ErrorCode.SERVER_UNREACHABLE,
        ErrorCode.WORKER_LOST,
        ErrorCode.WORKER_CRASH,
        ErrorCode.MODEL_UNREACHABLE,
    }
)


def nearest(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """The hint `Did you mean 'heart'? ` with the most similar known name; empty if none is similar."""
    close = get_close_matches(name[:100].casefold(), list(known), n=1)
    return f"Did you mean {shown(close[0])}? " if close else ""


class NightjarError(Exception):
    """A failure: its `code`, a `message` that says what happened, and `advice` that says what to do."""

    def __init__(self, code: ErrorCode, message: str, advice: str = "") -> None:
        super().__init__(code, message, advice)
        # Messages between processes carry it as text.
        self.code = ErrorCode(code)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".rstrip()


class InputError(NightjarError):
    """A line or a request that cannot be synthesized as it is (`input.*`); never retried."""


class SynthesisError(NightjarError):
    """The engine could not make this speech (`synth.*`)."""


class NoAudioError(SynthesisError):
    """The model wrote text but no audio (`synth.no_audio`); `text_out` is the text, and `meta` is like that
    of a `Speech`."""

    def __init__(
        self,
        message: str,
        advice: str,
        text_out: str,
        meta: Mapping[str, str | int | float | bool],
    ) -> None:
        super().__init__(ErrorCode.SYNTH_NO_AUDIO, message, advice)
        self.text_out = text_out
        self.meta = dict(meta)
        # Copies of the error, in this process or in another one, are made from these arguments.
        self.args = (message, advice, text_out, self.meta)


class EngineCrashError(NightjarError):
    """The engine's process ended with open requests, or its GPU failed (`worker.crash`). No request is known to
    be the cause."""


class StoreError(NightjarError):
    """The object store refused a request or could not be reached (`store.*`)."""


class ServiceError(NightjarError):
    """A ledger, a broker or a server that cannot be reached or used (`ledger.*`, `broker.*`, `server.*`)."""


class NotFoundError(NightjarError):
    """A named job or object does not exist (`ledger.not_found`)."""


class ModelError(NightjarError):
    """A model that is unknown, broken or needs an extra (`model.*`), or a meter whose library is missing
    (`config.missing_library`)."""


class ConfigError(NightjarError):
    """A setting that cannot be used, or a library that is not installed (`config.*`)."""


def bad_line(message: str, advice: str) -> InputError:
    """The error of a line that is not a record (`input.bad_line`)."""
    return InputError(ErrorCode.INPUT_BAD_LINE, message, advice)


def unsupported(message: str, advice: str) -> InputError:
    """The error of a request for what a model cannot do (`input.unsupported`)."""
    return InputError(ErrorCode.INPUT_UNSUPPORTED, message, advice)


def input_too_long(message: str, advice: str) -> InputError:
    """The error of a text, a recording or a dialogue that is too long (`input.too_long`)."""
    return InputError(ErrorCode.INPUT_TOO_LONG, message, advice)


def engine_error(message: str, advice: str = "") -> SynthesisError:
    """The error of a request that failed because of the engine (`synth.engine`)."""
    return SynthesisError(ErrorCode.SYNTH_ENGINE, message, advice)


def engine_closed() -> SynthesisError:
    """The error of a request to an engine that was closed (`synth.aborted`)."""
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed.")


def invalid(message: str, advice: str) -> ConfigError:
    """The error of a setting that cannot be used (`config.invalid`)."""
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)


def missing_library(what: str, library: str, extra: str) -> ConfigError:
    """The error of a library that is not installed (`config.missing_library`)."""
    return ConfigError(
        ErrorCode.CONFIG_MISSING_LIBRARY,
        f"{what} needs the library {library}.",
        f"Install Nightjar with its extra `{extra}` (docs/install.md).",
    )

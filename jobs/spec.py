"""The spec of a job: checked against its model and frozen at submit, and known by its hash."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from jobs.ledger.records import JobSpec
from jobs.line_check import LineChecker
from jobs.openai_batch import InputFormat, line_form
from jobs.quality import Quality, checked
from jobs.turns import ASKED, Speak
from pipelines.errors import ConfigError, ErrorCode, InputError
from pipelines.registry import ModelCard, describe

FORMATS = ("wav", "flac")


@dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """A frozen spec with its model and the check of its lines. Made by `resolve`, once for a submit or a dry run."""

    spec: JobSpec
    card: ModelCard
    input_format: InputFormat
    checker: LineChecker
    #: Whether it was said whose turns are spoken.
    says_speak: bool

    def before(self) -> ResolvedSpec:
        """The spec as it was frozen before it could say whose turns are spoken."""
        spec = of_before(self.spec)
        return ResolvedSpec(spec, self.card, self.input_format, _checker(spec, self.card, self.input_format), self.says_speak)


def resolve(spec: JobSpec | ResolvedSpec, input_format: InputFormat = "dialogues") -> ResolvedSpec:
    """Checks a spec against its model; one that was resolved before is returned as it is.

    Raises `ModelError`, `config.invalid`, and `InputError` for settings that the model refuses.
    """
    if isinstance(spec, ResolvedSpec):
        return spec
    card = describe(spec.model)
    for generation in (spec.generation, *(spec.generation.roles or {}).values()):
        _check_name(generation.voice, card.capabilities.voices, ErrorCode.INPUT_UNKNOWN_VOICE, "voice", card.name)
    _check_name(spec.generation.language, card.capabilities.languages, ErrorCode.INPUT_UNKNOWN_LANGUAGE, "language", card.name)
    frozen = frozen_spec(spec, card)
    if input_format == "openai-batch" and frozen.speak == "assistant":
        message = "A line of an OpenAI batch is the user's; there is no assistant's turn to speak."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Leave `speak` out: the `input` is spoken.")
    return ResolvedSpec(frozen, card, input_format, _checker(frozen, card, input_format), spec.speak is not msgspec.UNSET)


def _check_name(wanted: str | None, known: tuple[str, ...], code: ErrorCode, what: str, model: str) -> None:
    if wanted is not None and known and wanted.casefold() not in {name.casefold() for name in known}:
        raise InputError(code, f"The model {model} has no {what} {wanted!r}.", f"It has: {', '.join(known)}.")


def _checker(spec: JobSpec, card: ModelCard, input_format: InputFormat) -> LineChecker:
    return LineChecker(card, spec.generation, line_form(input_format, card, spec.format), speak_of(spec))


def frozen_spec(spec: JobSpec, card: ModelCard) -> JobSpec:
    """The spec with the model's full name and, unless it names them, its revision, its pace, its language and whose turns are spoken.

    Raises `config.invalid`.
    """
    if spec.format not in FORMATS:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"The format {spec.format[:40]!r} is unknown.", f"Use one of: {', '.join(FORMATS)}.")
    if not 0 <= spec.seed < 2**63:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"The job's seed is {spec.seed}.", "Use a whole number from 0 to 2**63 - 1.")
    quality = spec.quality
    if quality is not None:
        quality = checked(quality)
        if not quality.paces and card.pace is not None:
            # What was learned by now stays this job's measure.
            quality = msgspec.structs.replace(quality, paces=(card.pace,))
        quality = _heard_in(quality, card.capabilities.languages)
    revision, speak = spec.model_revision or card.revision, _speak(spec, card)
    return msgspec.structs.replace(spec, model=card.name, model_revision=revision, quality=quality, speak=speak)


def of_before(spec: JobSpec) -> JobSpec:
    """The spec as it was frozen before it could say whose turns are spoken."""
    return msgspec.structs.replace(spec, speak=msgspec.UNSET)


def speak_of(spec: JobSpec) -> Speak | None:
    """Whose turns a job speaks; None: it is of before this could be said."""
    return None if spec.speak is msgspec.UNSET else spec.speak


def _speak(spec: JobSpec, card: ModelCard) -> Speak:
    asked = "auto" if spec.speak is msgspec.UNSET else spec.speak
    if card.capabilities.multi_turn:
        if asked not in ("auto", "answer"):
            message = f"The model {card.name} answers a whole dialogue; it does not speak its turns."
            raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Leave `speak` out, or use a model that speaks one text.")
        return "answer"
    if asked not in ASKED:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"`speak` is {asked[:40]!r}.", f"Use one of: {', '.join(ASKED)}.")
    return asked


def _heard_in(quality: Quality, languages: tuple[str, ...]) -> Quality:
    """A model of one language is heard in it, also where a line names none; elsewhere the meter finds out the language."""
    options = quality.meters.get("asr")
    if options is None or "language" in options or len(languages) != 1:
        return quality
    return msgspec.structs.replace(quality, meters={**quality.meters, "asr": {**options, "language": languages[0]}})


def spec_sha(spec: JobSpec) -> str:
    """Hex SHA-256 of the spec as JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()


def item_seed(job_seed: int, example_id: str, message_index: int, draw: int = 0, line_seed: int | None = None) -> int:
    """The seed of all noise of one message, 0 <= seed < 2**63.

    `line_seed` is the line's own `generation.seed`: used as it is at draw 0, and in the job's place at later draws. The
    others are the first 63 bits of BLAKE2b over the fields, each after its length, so that no two rows of fields collide.
    """
    if line_seed is not None and draw == 0:
        return line_seed
    digest = hashlib.blake2b(digest_size=8, person=b"nightjar.seed")
    for field in (str(job_seed if line_seed is None else line_seed), example_id, str(message_index), str(draw)):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(digest.digest(), "big") >> 1

"""The spec of a job: frozen at submit, and known by its hash."""

from __future__ import annotations

import hashlib

import msgspec

from jobs.ledger.records import JobSpec
from jobs.openai_batch import InputFormat
from jobs.quality import Quality, checked
from jobs.turns import ASKED, Speak
from pipelines.errors import ConfigError, ErrorCode
from pipelines.registry import ModelCard

FORMATS = ("wav", "flac")


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


def check_speak(spec: JobSpec, input_format: InputFormat) -> None:
    """Raises `config.invalid` for an input in which nobody speaks whose turns the spec asks for."""
    if input_format == "openai-batch" and spec.speak == "assistant":
        message = "A line of an OpenAI batch is the user's; there is no assistant's turn to speak."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Leave `speak` out: the `input` is spoken.")


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

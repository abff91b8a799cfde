"""The spec of a job: frozen at submit, and known by its hash."""

from __future__ import annotations

import hashlib

import msgspec

from jobs.ledger.records import JobSpec
from jobs.quality import Quality, checked
from pipelines.errors import ConfigError, ErrorCode
from pipelines.registry import ModelCard

FORMATS = ("wav", "flac")


def frozen_spec(spec: JobSpec, card: ModelCard) -> JobSpec:
    """The spec with the model's full name and, unless it names them, its revision, its pace and its language. Raises `config.invalid`."""
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
    return msgspec.structs.replace(spec, model=card.name, model_revision=spec.model_revision or card.revision, quality=quality)


def _heard_in(quality: Quality, languages: tuple[str, ...]) -> Quality:
    """A model of one language is heard in it, also where a line names none; elsewhere the meter finds out the language."""
    options = quality.meters.get("asr")
    if options is None or "language" in options or len(languages) != 1:
        return quality
    return msgspec.structs.replace(quality, meters={**quality.meters, "asr": {**options, "language": languages[0]}})


def spec_sha(spec: JobSpec) -> str:
    """Hex SHA-256 of the spec as JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()

"""The spec of a job: frozen at submit, and known by its hash."""

from __future__ import annotations

import hashlib

import msgspec

from jobs.ledger.records import JobSpec
from jobs.quality import checked
from pipelines.errors import ConfigError, ErrorCode
from pipelines.registry import ModelCard

FORMATS = ("wav", "flac")


def frozen_spec(spec: JobSpec, card: ModelCard) -> JobSpec:
    """The spec with the model's full name and, unless it names them, its revision and its pace. Raises `config.invalid`."""
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
    return msgspec.structs.replace(spec, model=card.name, model_revision=spec.model_revision or card.revision, quality=quality)


def spec_sha(spec: JobSpec) -> str:
    """Hex SHA-256 of the spec as JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()

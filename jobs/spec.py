"""The spec of a job: frozen at submit, and known by its hash."""

from __future__ import annotations

import hashlib

import msgspec

from jobs.ledger.records import JobSpec
from pipelines.errors import ConfigError, ErrorCode
from pipelines.registry import ModelCard

FORMATS = ("wav", "flac")


def frozen_spec(spec: JobSpec, card: ModelCard) -> JobSpec:
    """The spec with the model's full name and, unless it names one, its revision. Raises `config.invalid`."""
    if spec.format not in FORMATS:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"The format {spec.format[:40]!r} is unknown.", f"Use one of: {', '.join(FORMATS)}.")
    if not 0 <= spec.seed < 2**63:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"The job's seed is {spec.seed}.", "Use a whole number from 0 to 2**63 - 1.")
    return msgspec.structs.replace(spec, model=card.name, model_revision=spec.model_revision or card.revision)


def spec_sha(spec: JobSpec) -> str:
    """Hex SHA-256 of the spec as JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()

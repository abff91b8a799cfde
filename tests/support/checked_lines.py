"""The checker of lines for a model without stored voices."""

from __future__ import annotations

from jobs.dialogue import Speak
from jobs.ledger.records import JobSpec
from jobs.spec import LineChecker
from jobs.voices import JobVoices
from pipelines.registry import ModelCard
from pipelines.request import Generation


def line_checker(card: ModelCard, defaults: Generation, speak: Speak) -> LineChecker:
    return LineChecker(JobVoices(card), JobSpec(card.name, generation=defaults, speak=speak))

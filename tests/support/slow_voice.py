"""A voice that takes a known time on any machine: twenty items a second. `nightjar` finds it as it finds
any package's pipeline."""

from __future__ import annotations

from pathlib import Path

from pipelines.registry import ENTRY_POINT_GROUP, ModelCard
from pipelines.request import Pipeline
from tests.support.fakes import SAMPLE_RATE, FakePipeline
from tests.support.packages import write_package

ITEMS_PER_SECOND = 20


def describe() -> ModelCard:
    return ModelCard(
        "slow",
        "fake",
        "cpu",
        SAMPLE_RATE,
        FakePipeline().capabilities,
        "1",
        seconds_per_character=0.01,
        rtf=0.01,
    )


def load(**_: object) -> Pipeline:
    return FakePipeline("slow", seconds=2 / ITEMS_PER_SECOND, slots=2)


def install(folder: Path) -> dict[str, str]:
    """Writes what pip would write of a package with this pipeline; the variables under which a process has
    it installed."""
    write_package(folder, "slow-voice", ENTRY_POINT_GROUP, {"slow": __name__})
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}

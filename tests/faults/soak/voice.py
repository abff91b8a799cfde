"""The voice of the soak: the fake engine as a plug-in of the engine `native`, which workers open in a
process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipelines.registry import ENTRY_POINT_GROUP, ModelCard
from tests.faults.cluster import ENGINE, REPOSITORY
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.packages import write_package

NAME = "tormented"
_VARIABLE = "NIGHTJAR_SOAK_VOICE"


class PacedPipeline(FakePipeline):
    """Takes `seconds` for each request until there is a file `gate`, so that faults find work to disturb;
    from then on as little as a quick engine."""

    def __init__(self, seconds: float, gate: str) -> None:
        super().__init__(NAME, seconds=seconds, slots=int(ENGINE["slots"]))
        self._gate = Path(gate)

    def _seconds(self, text: str, words: Mapping[str, str]) -> float:
        seconds = super()._seconds(text, words)
        return seconds - self.seconds + ENGINE["seconds"] if self._gate.exists() else seconds


def describe() -> ModelCard:
    return replace(fake_card(NAME), engine="native")


def load(**_: object) -> PacedPipeline:
    return PacedPipeline(**json.loads(os.environ[_VARIABLE]))


def paced(seconds: float, gate: Path) -> dict[str, str]:
    """The variable under which a process has the voice with this pace."""
    return {_VARIABLE: json.dumps({"seconds": max(seconds, ENGINE["seconds"]), "gate": str(gate)})}


def installed(folder: Path) -> dict[str, str]:
    """Writes what pip would of a package with the voice; the variables under which a process finds it."""
    write_package(folder, "tormented-voice", ENTRY_POINT_GROUP, {NAME: __name__})
    return {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}

"""A voice that costs nothing: the same short sound for every request, to measure the path around an
engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.registry import ENTRY_POINT_GROUP, ModelCard
from pipelines.request import (
    Capabilities,
    Done,
    EngineInfo,
    EngineStats,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    Speech,
    SynthesisRequest,
    check_start,
)

NAME, SAMPLE_RATE = "instant", 16_000
#: Seconds of the sound, where the environment says so.
SECONDS = "INSTANT_SECONDS"


def samples() -> NDArray[np.float32]:
    """The sound, float32 [samples]."""
    count = round(float(os.environ.get(SECONDS, "0.12")) * SAMPLE_RATE)
    return (0.3 * np.sin(2 * np.pi * 207 / SAMPLE_RATE * np.arange(count))).astype(np.float32)


class InstantPipeline:
    """Answers inside `start`."""

    name, sample_rate, capabilities, starts_at_once = NAME, SAMPLE_RATE, Capabilities(), False

    def __init__(self) -> None:
        self.info = EngineInfo(slots=64)
        self._speech = Speech(samples(), SAMPLE_RATE, "instant")

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        """Tells the speech at once."""
        check_start(self, request, stream)
        listener = Listener(on_event, lambda _done: None)
        listener(Done(self._speech))
        return listener

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        """Nothing to free."""


def describe() -> ModelCard:
    return ModelCard(
        NAME,
        NAME,
        "cpu",
        SAMPLE_RATE,
        InstantPipeline.capabilities,
        "1",
        seconds_per_character=0.01,
        rtf=0.01,
    )


def load(**_: Any) -> InstantPipeline:
    return InstantPipeline()


def install(folder: Path) -> dict[str, str]:
    """Writes what pip would write of a package with this voice; the variables under which a process has it
    installed."""
    info = folder / "instant_voice-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: instant-voice\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{NAME} = {__name__}\n")
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parents[1]}"}

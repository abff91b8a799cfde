"""Voices for jobs whose every length is known, as what pip would install: a plug-in that imports nothing of the
benchmarks, so it works with any version of the packages below.

`planted`: of a random checkpoint of Qwen3-TTS. A text's first word is the number of its frames, which the engine does not
know: as in `benchmarks.engine`, the weights draw the end at the first frame that `min_new_tokens` allows. Everything
else is the family's own pipeline. `instant`: the same short sound for every request at no cost, to measure the path around
an engine.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines import registry
from pipelines.registry import ENTRY_POINT_GROUP, ModelCard
from pipelines.request import (
    Capabilities,
    Done,
    EngineInfo,
    EngineStats,
    Handle,
    Listener,
    OnEvent,
    Pipeline,
    PreparedRequest,
    Speech,
    SynthesisRequest,
    check_start,
)

#: The voice that costs nothing.
INSTANT, RATE = "instant", 16_000


def install(
    folder: Path,
    name: str = INSTANT,
    checkpoint: Path | None = None,
    *,
    seconds: float = 0.12,
    device: str = "",
) -> dict[str, str]:
    """Writes a package with a voice of this name; the variables under which a process has it. `seconds`: of the instant
    sound; `device`: on which a checkpoint is opened, empty: as any model."""
    module = name.replace("-", "_")
    info = folder / f"{module}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {module}\n")
    shutil.copyfile(__file__, folder / f"{module}.py")
    path = None if checkpoint is None else str(checkpoint.absolute())
    (folder / f"{module}.json").write_text(
        json.dumps({"checkpoint": path, "seconds": seconds, "device": device})
    )
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parents[1]}"}


def _installed() -> dict[str, Any]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def sound(seconds: float) -> np.ndarray:
    """The instant sound, float32 [samples]."""
    moments = np.arange(round(seconds * RATE)) / RATE
    return (0.3 * np.sin(2 * np.pi * 207 * moments)).astype(np.float32)


class InstantPipeline:
    """Answers inside `start`."""

    name, sample_rate, capabilities, starts_at_once = INSTANT, RATE, Capabilities(), False

    def __init__(self, seconds: float) -> None:
        self.info = EngineInfo(slots=64)
        self._speech = Speech(sound(seconds), RATE, INSTANT)

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        check_start(self, request, stream)
        listener = Listener(on_event, lambda _done: None)
        listener(Done(self._speech))
        return listener

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        """Nothing to free."""


def describe() -> ModelCard:
    if (checkpoint := _installed()["checkpoint"]) is not None:
        return registry.describe(checkpoint)
    cost = {"seconds_per_character": 0.01, "rtf": 0.01}
    return ModelCard(INSTANT, INSTANT, "cpu", RATE, InstantPipeline.capabilities, "1", **cost)


def load(**options: Any) -> Pipeline:
    found = _installed()
    if found["checkpoint"] is None:
        return InstantPipeline(found["seconds"])
    from pipelines.options import read_options
    from pipelines.qwen3_tts.pipeline import PipelineOptions, Qwen3TTSPipeline

    class PlantedPipeline(Qwen3TTSPipeline):
        """Made when a model is opened, since it imports torch."""

        def _begin(self, wanted: Any, info: Any, on_event: OnEvent, stream: bool) -> Any:
            if info.text:
                frames = int(info.text.split(maxsplit=1)[0])
                wanted = replace(wanted, sampling=replace(wanted.sampling, min_new_tokens=frames))
            return super()._begin(wanted, info, on_event, stream)

    options |= {"device": found["device"]} if found["device"] else {}
    return PlantedPipeline(Path(found["checkpoint"]), read_options(PipelineOptions, options))

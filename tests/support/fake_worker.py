"""A worker process with the fake engine: `python -m tests.support.fake_worker run` is
`python -m worker run` that also knows `fake`.

`NIGHTJAR_FAKE` holds the engine's options as JSON, as in `{"seconds": 0.05, "slots": 4}`.
`NIGHTJAR_CLOCK_SKEW` sets the wall clock of the process wrong by that many seconds.
"""

from __future__ import annotations

import json
import os
import time

from pipelines.registry import ModelCard, register_pipeline
from pipelines.request import Pipeline
from tests.support.fakes import CODEC, SAMPLE_RATE, FakePipeline, InstantPipeline, die_on_bad_gpu
from worker.cli import main


def fake_card(name: str = "fake") -> ModelCard:
    """What ingest may know of the fake engine."""
    return ModelCard(
        name,
        "fake",
        "cpu",
        SAMPLE_RATE,
        FakePipeline().capabilities,
        "1",
        seconds_per_character=0.01,
        rtf=0.01,
        codec=lambda: CODEC,
    )


def make_pipeline(**_: object) -> Pipeline:
    """The fake engine as this process's environment wants it."""
    die_on_bad_gpu()
    return FakePipeline(**json.loads(os.environ.get("NIGHTJAR_FAKE", "{}")))


def skew_clock(seconds: float) -> None:
    """Sets this process's wall clock wrong."""
    right = time.time
    time.time = lambda: right() + seconds


def register() -> None:
    """Makes `fake`, `fake-two` and `instant` models of this process."""
    register_pipeline("fake", fake_card(), make_pipeline)
    register_pipeline("fake-two", fake_card("fake-two"), make_pipeline)
    register_pipeline("instant", fake_card("instant"), lambda **_: InstantPipeline())


if __name__ == "__main__":
    skew_clock(float(os.environ.get("NIGHTJAR_CLOCK_SKEW", "0")))
    register()
    main()

"""The fake engine as a plug-in of the engine `native`, which a worker opens in an engine process.

`installed(folder)` gives the variables with which a process and its children find it under the name
`fake-native`, the one that streams (`tests.support.streaming_fake`) under the name `fake-streaming`, and the
one that reads recordings (`tests.support.reading_fake`) under the name `fake-reading`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.registry import ENTRY_POINT_GROUP, ModelCard
from tests.support import reading_fake, streaming_fake
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline, die_on_bad_gpu
from tests.support.packages import write_package

NAME = "fake-native"
REPOSITORY = Path(__file__).parents[2]


def installed(folder: Path) -> dict[str, str]:
    """Puts the plug-in's entry point into a folder; the environment in which it is found."""
    others = {fake.NAME: fake.__name__ for fake in (streaming_fake, reading_fake)}
    write_package(folder, NAME, ENTRY_POINT_GROUP, {NAME: __name__, **others})
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}


def describe() -> ModelCard:
    return replace(fake_card(NAME), engine="native")


def load(**options: Any) -> FakePipeline:
    """The fake engine with the options of `NIGHTJAR_FAKE`. `broken` as an option raises, `exit` ends the
    process."""
    die_on_bad_gpu()
    options = {**json.loads(os.environ.get("NIGHTJAR_FAKE", "{}")), **options}
    if "broken" in options:
        raise RuntimeError("no memory for the weights")
    if "exit" in options:
        os._exit(int(options["exit"]))
    return FakePipeline(NAME, **options)

"""What is made again is made on the engine that made it; where a job has parts of both, whoever makes it
again is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.provenance import put_provenance, reopened_model
from pipelines.registry import register_pipeline
from pipelines.request import EngineInfo
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.worker_rig import Build


@pytest.mark.parametrize(
    ("made_on", "options", "notes"),
    [((), {}, 0), (("vllm",), {"engine": "vllm"}, 0), (("vllm", "native"), {}, 1)],
)
def test_what_is_made_again_says_where_nobody_knows_its_engine(
    build: Build,
    made_on: tuple[str, ...],
    options: dict[str, str],
    notes: int,
) -> None:
    rig = build()
    job = rig.submit(["One sentence."])
    for engine in made_on:
        put_provenance(rig.store, job, EngineInfo(executor=engine, engine=engine))
    opened: list[dict[str, Any]] = []

    def open_fake(**given: Any) -> FakePipeline:
        opened.append(given)
        return FakePipeline()

    register_pipeline("fake", replace(fake_card(), engines=("native", "vllm")), open_fake)
    said: list[str] = []
    with reopened_model(rig.store, job, said.append):
        assert opened == [options]
    about = [text for text in said if "native and vllm" in text]
    assert len(about) == notes

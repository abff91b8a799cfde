"""What is made again is made on the engine that made it; where a job has parts of both, whoever makes it
again is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.provenance import put_provenance, reopened_model
from pipelines import registry
from pipelines.request import EngineInfo
from tests.support.fakes import FakePipeline
from tests.support.worker_rig import Build


@pytest.mark.parametrize(
    ("made_on", "options", "notes"),
    [((), {}, 0), (("vllm",), {"engine": "vllm"}, 0), (("vllm", "native"), {}, 1)],
)
def test_what_is_made_again_says_where_nobody_knows_its_engine(
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    made_on: tuple[str, ...],
    options: dict[str, str],
    notes: int,
) -> None:
    rig = build()
    job = rig.submit(["One sentence."])
    card = replace(registry.describe(job.spec.model), engines=("native", "vllm"))
    monkeypatch.setattr("jobs.provenance.describe", lambda _: card)
    for engine in made_on:
        put_provenance(rig.store, job, EngineInfo(executor=engine, engine=engine))
    opened: list[dict[str, Any]] = []

    def open_pipeline(model: str, **given: Any) -> FakePipeline:
        opened.append(given)
        return FakePipeline()

    monkeypatch.setattr(registry, "open_pipeline", open_pipeline)
    said: list[str] = []
    with reopened_model(rig.store, job, said.append):
        assert opened == [options]
    about = [text for text in said if "native and vllm" in text]
    assert len(about) == notes

"""An item in Python says what exports say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from jobs.export.items import AudioItems, item_metadata
from jobs.ledger.records import JobSpec
from jobs.settings import Settings
from jobs.store import FolderStore
from nightjar.job import Job
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities, Generation
from tests.support.export_kit import finished_job
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.serving_kit import wav

LINES = [
    {"example_id": "own", "messages": [["user", "audio", "own.wav"], ["user", "text", "By its own recording."]]},
    {"example_id": "named", "messages": [["user", "text", "By name."]], "generation": {"voice": "heart"}},
    {"example_id": "talk", "messages": [["user", "text", "Who is it?"], ["assistant", "text", "It is me."]]},
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    forget = register_pipeline(
        "clones", replace(fake_card("clones"), capabilities=Capabilities(voices=("heart", "ben"), cloning=True)), lambda **_: FakePipeline()
    )
    (tmp_path / "own.wav").write_bytes(wav(1.0))
    spec = JobSpec("clones", speak="all", generation=Generation(roles={"assistant": Generation(voice="ben")}))
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES, spec)
    job = Job(made.ledger.job(made.job_id), Settings(home=tmp_path, database_url=SecretStr(f"sqlite:///{tmp_path}/ledger.sqlite")))
    yield job
    job.close()
    made.ledger.close()
    forget()


def test_text_and_speaker_are_those_of_exports(job: Job) -> None:
    known = {item.id: item_metadata(job.status.job, item) for item in AudioItems(job._ledger, job._store, job.id)}
    items = {item.id: item for item in job.items()}
    assert {name: (item.text, item.speaker) for name, item in items.items()} == {
        name: (metadata.text, metadata.speaker) for name, metadata in known.items()
    }
    assert items["own"].speaker.startswith("ref-")
    assert [items[name].speaker for name in ("named", "talk:turn0", "talk:turn1")] == ["heart", "clones", "ben"]
    assert items["talk:turn1"].text == "It is me."

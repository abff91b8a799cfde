"""Every field of a schedule becomes the part of its night's job that it is named after, and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from jobs import installed_version
from jobs.checks import Quality, quality_of
from jobs.job_options import hints
from jobs.ledger import Ledger
from jobs.ledger.records import INPUT_FORMAT, VoicePool
from jobs.settings import Schedule, Settings
from jobs.spoken_text import LIBRARY
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities, Generation
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.field_tables import changed, fields_of
from worker.nightly import Night

NIGHT = date(2026, 11, 20)
#: Of a job, apart from what two jobs of one schedule differ in.
OWN = {
    "id",
    "name",
    "spec_sha",
    "created_at",
    "spec.model_revision",
    "input_uri",
    "input_sha256",
    "store_identity",
    "idempotency_key",
}
#: What the exports read, what a refused line does, the file and what is read of it: other tests have them.
#: The last two are the night's; how a pool draws needs a pool, and a sample of the checks a meter.
ELSEWHERE = {
    "input",
    "on_error",
    "exports",
    "export_to",
    "splits",
    "export_options",
    "options",
    "columns",
    "keep",
    "drop",
    "voice_for",
    "voices_by",
    "balance",
    "qa_sample",
    "qa_max_failure_rate",
    "limit",
    "sample",
    "name",
    "idempotency_key",
}


def table(folder: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Field -> its value in a schedule, and the fields of the job that differ then from those of a
    schedule with an input alone."""
    qa = folder / "qa.toml"
    qa.write_text("bounds.pause.high = 2")
    words = folder / "words.csv"
    words.write_text("SQL,sequel")
    return {
        "input_format": ("text", {"labels": {INPUT_FORMAT: "text"}}),
        "model": ("second", {"spec.model": "second"}),
        "speak": ("user", {"spec.speak": "user"}),
        "voice": ("sine", {"spec.generation.voice": "sine"}),
        "voice_of": (
            {"assistant": "sine"},
            {"spec.generation.roles": {"assistant": Generation(voice="sine")}},
        ),
        "voices": ("sine", {"spec.pool": VoicePool({"sine": 1.0})}),
        "language": ("german", {"spec.generation.language": "german"}),
        "instruct": ("softly", {"spec.generation.instruct": "softly"}),
        "seed": (5, {"spec.seed": 5}),
        "format": ("flac", {"spec.format": "flac"}),
        "sample_rate": (24_000, {"spec.sample_rate": 24_000}),
        "output": ("both", {"spec.output": "both"}),
        "pack": (True, {"spec.pack": True}),
        "timestamps": (True, {"spec.timestamps": True}),
        "qa": ("off", {"spec.quality": None}),
        "qa_config": (qa, {"spec.quality": quality_of("basic", qa)}),
        "qa_set": (["bounds.pause.high=2"], {"spec.quality": quality_of("basic", qa)}),
        "generation": ({"temperature": "0.5"}, {"spec.generation.temperature": 0.5}),
        "labels": ({"corpus": "news"}, {"labels": {"corpus": "news"}}),
        "max_attempts": (4, {"max_attempts": 4}),
        "max_in_flight": (2, {"max_in_flight": 2}),
        "error_budget": (0.5, {"error_budget": 0.5}),
        "normalize": (
            "en",
            {"spec.normalize": "en", "spec.normalizer": f"{LIBRARY} {installed_version(LIBRARY)}"},
        ),
        "lexicon": (words, {"spec.lexicon": {"SQL": "sequel"}}),
        "priority": (3, {"priority": 3}),
        "weight": (5, {"weight": 5}),
        "store_url": (str(folder / "other"), {"store_url": f"file://{folder}/other"}),
    }


@pytest.fixture(scope="module")
def _models() -> Iterator[None]:
    able = Capabilities(
        voices=("sine",),
        languages=("english", "german"),
        cloning=True,
        instruct=True,
        codes=True,
        word_times="exact",
    )
    forget = [
        register_pipeline(name, replace(fake_card(name), capabilities=able), FakePipeline)
        for name in ("fake", "second")
    ]
    yield
    for one in forget:
        one()


@pytest.fixture(scope="module")
def home(_models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, Ledger]]:
    """A schedule for each field, and one called `plain`."""
    folder = tmp_path_factory.mktemp("schedules")
    source = folder / "in.jsonl"
    source.write_text(json.dumps({"example_id": "one", "messages": [["user", "text", "good night"]]}) + "\n")
    (folder / "in.txt").write_text("good night\n")
    said: dict[str, Any] = {
        "plain": {},
        **{name: {name: value} for name, (value, _) in table(folder).items()},
    }
    said["input_format"]["input"] = str(folder / "in.txt")
    schedules = {
        name: Schedule.model_validate({"input": str(source), "model": "fake", **fields})
        for name, fields in said.items()
    }
    settings = Settings(home=folder / "home", schedules=schedules)
    with closing(Ledger(settings.ledger_url)) as ledger:
        ledger.migrate()
        yield settings, ledger


def job_of(settings: Settings, ledger: Ledger, name: str) -> dict[str, Any]:
    """The fields of the job of a schedule's night."""
    night = Night(settings, ledger, name, NIGHT)
    night.run()
    assert night.job_id, night
    job = ledger.job(night.job_id)
    assert (job.name, job.labels["schedule"], job.labels["night"]) == (
        f"{name} 2026-11-20",
        name,
        "2026-11-20",
    )
    labels = {key: value for key, value in job.labels.items() if key not in ("schedule", "night")}
    return {
        path: value
        for path, value in fields_of(replace(job, labels=labels), Quality, VoicePool).items()
        if path not in OWN
    }


@pytest.mark.parametrize("name", sorted({*Schedule.model_fields, *hints()} - ELSEWHERE))
def test_a_field_of_a_schedule_is_that_of_its_nights(home: tuple[Settings, Ledger], name: str) -> None:
    expected = table(home[0].home.parent)[name][1]
    assert changed(job_of(*home, "plain"), job_of(*home, name)) == expected

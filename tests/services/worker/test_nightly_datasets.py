"""Nights end to end: a schedule whose clock is moved, real workers and a real broker, and a dataset for
every night."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.ledger.records import ItemState, JobState
from pipelines.errors import ConfigError
from tests.support.ledger_kit import expire_leases_of_the_dead
from tests.support.worker_process import REPOSITORY, Site
from worker.nightly import run_nights

FIRST = datetime(2026, 11, 20, 2, 0, tzinfo=UTC)
SECOND = FIRST + timedelta(days=1)
ITEMS = 24


@pytest.fixture
def site(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    schedule = {
        "INPUT": str(tmp_path / "in-{date}.jsonl"),
        "MODEL": "fake",
        "QA": "off",
        "EXPORTS": "parquet, espnet, report",
        "EXPORT_TO": str(tmp_path / "datasets" / "{date}" / "{format}"),
    }
    environment = {f"SPEECH_SCHEDULES__NEWS__{name}": value for name, value in schedule.items()}
    with Site(tmp_path, valkey_url, **environment) as site:
        yield site


def write_night(site: Site, night: datetime, *, held: bool = False) -> None:
    """A night's file; with `held`, its last item lasts until the site lets it go."""
    texts = [f"night {night:%d} text {n} {'a' * n}" for n in range(ITEMS)]
    if held:
        texts[-1] = site.held(texts[-1])
    lines = [
        {"example_id": f"{night:%d}-{n}", "messages": [["user", "text", text]]}
        for n, text in enumerate(texts)
    ]
    path = site.folder / f"in-{night:%Y-%m-%d}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ids_of(site: Site, night: datetime) -> list[list[str]]:
    """The example ids of a night's two datasets."""
    folder = site.folder / "datasets" / f"{night:%Y-%m-%d}"
    (part,) = (folder / "parquet" / "data").glob("*.parquet")
    lines = [json.loads(line) for line in (folder / "espnet.jsonl").read_text().splitlines()]
    return [pq.read_table(part).column("example_id").to_pylist(), [line["example_id"] for line in lines]]


def contents(site: Site) -> dict[str, bytes]:
    root = site.folder / "datasets"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_two_nights_are_two_dated_datasets(site: Site) -> None:
    site.worker()
    for night in (FIRST, SECOND):
        write_night(site, night)
        (ran,) = run_nights(site.settings, None, 0, wait_seconds=300, now=night)
        assert (ran.end, ran.night, [dataset.reason for dataset in ran.datasets]) == (
            "submitted",
            night.date(),
            [None, None, None],
        )
    assert len(site.ledger.jobs()) == 2
    for night in (FIRST, SECOND):
        assert ids_of(site, night) == [[f"{night:%d}-{n}" for n in range(ITEMS)]] * 2
        assert "<h1" in (site.folder / "datasets" / f"{night:%Y-%m-%d}" / "report.html").read_text()
    before = contents(site)
    again = run_nights(site.settings, None, 1, now=SECOND)
    assert [(one.end, len(one.datasets)) for one in again] == [("ran", 3)] * 2
    assert not any(one.bad for one in again)
    assert contents(site) == before


def test_a_killed_night_resumes(site: Site) -> None:
    write_night(site, FIRST, held=True)
    worker = site.worker(engine={"seconds": 0.25, "slots": 2})
    environment = os.environ | site.environment | {"OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.support.fake_worker",
        "nightly",
        "--night",
        f"{FIRST:%Y-%m-%d}",
        "--wait",
        "1",
    ]
    nightly = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    site.wait_for(lambda: site.ledger.jobs())
    (job,) = site.ledger.jobs()
    site.wait_for(lambda: site.status(job).items.done and site.ledger.schedule_history("news"))
    for process in (nightly, worker):
        process.send_signal(signal.SIGKILL)
        process.wait()
    expire_leases_of_the_dead(site.ledger)
    site.let_go()
    made = {row.index: row.artifact for row in site.ledger.items(job.id, state=ItemState.DONE)}
    assert 0 < len(made) < ITEMS
    assert not (site.folder / "datasets").exists()

    waiting = run_nights(site.settings, None, 0, now=FIRST)
    assert [(one.end, one.datasets, "run this again" in one.reason) for one in waiting] == [("ran", (), True)]
    write_night(site, SECOND)
    site.worker()
    report = run_nights(site.settings, None, 1, wait_seconds=300, now=SECOND)
    assert [(one.end, len(one.datasets)) for one in report] == [
        ("ran", 3),
        ("submitted", 3),
    ]
    assert not any(one.bad for one in report)
    assert report[0].job_id == job.id
    assert site.status(job).job.state is JobState.COMPLETED
    after = {row.index: row.artifact for row in site.ledger.items(job.id)}
    assert {index: after[index] for index in made} == made, "what was done before the kill was made again"
    for night in (FIRST, SECOND):
        assert ids_of(site, night) == [[f"{night:%d}-{n}" for n in range(ITEMS)]] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"exports": ("mp3",)},
        {"splits": "train=2"},
        {"export_to": "s3://bucket/{date}/x", "exports": ("espnet", "nemo")},
    ],
)
def test_exports_that_cannot_be_are_refused_before_the_night(site: Site, wrong: dict[str, object]) -> None:
    write_night(site, FIRST)
    schedule = site.settings.schedules["news"].model_copy(update=wrong)
    settings = site.settings.model_copy(update={"schedules": {"news": schedule}})
    with pytest.raises(ConfigError):
        run_nights(settings, None, 0, now=FIRST)
    assert site.ledger.jobs() == []


def test_an_export_that_fails_is_told_and_keeps_no_other_back(site: Site) -> None:
    write_night(site, FIRST)
    site.worker()
    (site.folder / "datasets" / "2026-11-20" / "espnet.jsonl").mkdir(parents=True)
    environment = os.environ | site.environment
    command = [
        sys.executable,
        "-m",
        "tests.support.fake_worker",
        "nightly",
        "--night",
        "2026-11-20",
        "--wait",
        "0.08",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 1, done.stderr
    view = json.loads(done.stdout)
    assert (view["schema"], view["end"]) == ("nightjar.night/1", "submitted")
    assert [(one["format"], one["items"], bool(one["reason"])) for one in view["datasets"]] == [
        ("parquet", ITEMS, False),
        ("espnet", 0, True),
        ("report", ITEMS, False),
    ]

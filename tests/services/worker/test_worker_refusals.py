"""Workers of a fleet of which one cannot open the job's model with its settings: it loses no item, and
says why it does nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.ledger.records import Job, JobState
from pipelines.errors import ErrorCode
from tests.support.golden_checkpoint import whole
from tests.support.ledger_kit import rows
from tests.support.worker_process import REPOSITORY, Site, Started, stop

CHECKPOINT = str(whole(REPOSITORY / "tests" / "golden" / "qwen3_tts" / "checkpoint-design"))
LINES = 6


@pytest.fixture
def site(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    with Site(
        tmp_path, valkey_url, NIGHTJAR_TIMES__SHARD_ITEMS="2", SPEECH_ENGINE__MAX_CONTEXT="256"
    ) as site:
        yield site


def submitted(site: Site) -> Job:
    return site.submit([f"line {n}" for n in range(LINES)], model=CHECKPOINT)


def misfit(site: Site) -> Started:
    """A worker whose settings ask for a GPU that its host lacks."""
    return site.worker(
        SPEECH_ENGINE__EXECUTOR="graph", NIGHTJAR_TIMES__SHARDS_IN_FLIGHT="1", CUDA_VISIBLE_DEVICES=""
    )


def until_up(site: Site, workers: int) -> None:
    site.wait_for(lambda: site.log_text().count('"worker up"') == workers)


def test_one_worker_with_wrong_settings_fails_no_item_of_the_others(site: Site) -> None:
    good = site.worker()
    until_up(site, 1)
    (known,) = site.ledger.worker_statuses()
    # The other one has all messages for itself.
    os.kill(known.pid, signal.SIGSTOP)
    bad = misfit(site)
    until_up(site, 2)
    job = submitted(site)

    def refused() -> bool:
        site.ledger.worker_heartbeat(known.id)
        return rows(site.ledger, "SELECT count(*) FROM attempts WHERE outcome = 'refused'") == [(1,)]

    site.wait_for(refused)
    assert site.status(job).workers == 1
    os.kill(known.pid, signal.SIGCONT)
    status = site.wait_until_final(job)
    assert (status.job.state, status.items.done, status.items.failed) == (JobState.COMPLETED, LINES, 0)
    assert rows(site.ledger, "SELECT max(attempts) FROM items") == [(1,)], (
        "a shard that was given back counts as no attempt"
    )
    reasons = [one.state_reason for one in site.ledger.worker_statuses() if one.id != known.id]
    why = "The graph executor needs a CUDA device. Set SPEECH_ENGINE__EXECUTOR to eager, or unset it."
    assert reasons == [f"It cannot run job {job.id} (config.invalid): {why}"]
    assert "this worker cannot run the job; its shard is given back for another worker" in site.log_text()
    assert bad.poll() is None, "it runs the jobs of other models"
    assert (stop(bad), stop(good)) == (0, 0)


def test_workers_of_which_none_can_open_the_model_end_the_job(site: Site) -> None:
    misfit(site), misfit(site)
    until_up(site, 2)
    job = submitted(site)
    status = site.wait_until_final(job)
    assert (status.items.done, status.items.failed) == (0, LINES)
    assert site.ledger.error_counts(job.id) == {ErrorCode.CONFIG_INVALID: LINES}

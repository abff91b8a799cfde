"""A job that has ended gets its manifest, also where the worker that ended it died before it wrote one."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.ledger.records import Job
from pipelines.errors import ErrorCode, StoreError
from tests.support.fakes import FakeClock
from tests.support.ledger_kit import execute
from tests.support.manifests import newest_job_manifest, read_manifest
from tests.support.worker_rig import Rig
from worker.maintenance import RETRY_SECONDS


class Keeper:
    """The upkeep of another worker than the one that ended the job."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.clock = rig, FakeClock()
        self.maintenance = rig.upkeep(lambda _: rig.store, self.clock)

    def reconcile(self) -> int:
        """One pass; how many jobs it ended or wrote the manifest of."""
        before = self.maintenance.asked
        self.clock.advance(self.rig.settings.times.reconcile_seconds)
        self.maintenance.dispatch()
        return self.maintenance.asked - before


def ended(rig: Rig, texts: Sequence[str] = ("a", "b"), seconds_ago: float = 61) -> Job:
    """A job whose last worker died as soon as the ledger had its end."""
    job = rig.submit(texts)
    rig.run_next()
    execute(
        rig.ledger,
        "UPDATE jobs SET finished_at = finished_at - :seconds WHERE id = :job",
        seconds=seconds_ago,
        job=job.id,
    )
    assert newest_job_manifest(rig.store, job.id) is None
    return job


def test_another_worker_writes_the_manifest_once(rig: Rig) -> None:
    job, keeper = ended(rig), Keeper(rig)
    assert keeper.reconcile() == 1
    key = newest_job_manifest(rig.store, job.id)
    assert key is not None
    assert [entry.example_id for entry in read_manifest(rig.store, key)] == ["item-0", "item-1"]
    assert keeper.reconcile() == 0


def test_who_ended_the_job_is_given_time_to_write_it(rig: Rig) -> None:
    job, keeper = ended(rig, seconds_ago=0), Keeper(rig)
    assert keeper.reconcile() == 0
    keeper.maintenance.end_job(job.id)
    execute(
        rig.ledger,
        "UPDATE jobs SET finished_at = finished_at - 61, manifest_finished_at = manifest_finished_at - 61",
    )
    assert keeper.reconcile() == 0


def test_a_store_that_is_away_is_tried_again(rig: Rig) -> None:
    job, keeper = ended(rig), Keeper(rig)
    rig.store.fail_next = [StoreError(ErrorCode.STORE_UNREACHABLE, "away")]
    assert keeper.reconcile() == 1
    assert newest_job_manifest(rig.store, job.id) is None
    assert keeper.reconcile() == 1
    assert newest_job_manifest(rig.store, job.id) is not None


def test_a_manifest_whose_input_is_lost_is_written_when_that_is_there_again(rig: Rig) -> None:
    job, keeper = ended(rig), Keeper(rig)
    key = f"jobs/{job.id}/input/000000.jsonl.zst"
    lost = rig.store.get(key)
    rig.store.delete(key)
    assert keeper.reconcile() == 1
    rig.store.put(key, lost)
    keeper.reconcile()
    assert newest_job_manifest(rig.store, job.id) is None, "it was tried again without a pause"
    keeper.clock.advance(RETRY_SECONDS)
    keeper.reconcile()
    assert newest_job_manifest(rig.store, job.id) is not None


def test_a_manifest_is_not_written_into_another_store(rig: Rig) -> None:
    job, keeper = ended(rig), Keeper(rig)
    rig.store.identity = "f" * 32
    keeper.reconcile()
    assert newest_job_manifest(rig.store, job.id) is None


def test_a_retried_job_gets_a_manifest_of_its_new_end(rig: Rig) -> None:
    job, keeper = ended(rig, ["a", "[[fail_once:synth.no_eos]] b"]), Keeper(rig)
    assert keeper.reconcile() == 1
    rig.ledger.retry(job.id, None)
    rig.run_next()
    execute(rig.ledger, "UPDATE jobs SET finished_at = finished_at - 61")
    assert keeper.reconcile() == 1
    assert newest_job_manifest(rig.store, job.id) == f"jobs/{job.id}/manifest.2.jsonl"


def test_a_job_that_made_nothing_has_none_to_write(rig: Rig) -> None:
    job = rig.submit(["[[fail:synth.no_eos]] a"])
    rig.run_next()
    execute(rig.ledger, "UPDATE jobs SET finished_at = finished_at - 61")
    keeper = Keeper(rig)
    assert [keeper.reconcile(), keeper.reconcile()] == [1, 0]
    assert newest_job_manifest(rig.store, job.id) is None

"""A store that is away is an outage: the worker waits for it, and writes nothing in its place."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.ledger.records import Job, JobState
from jobs.store import FolderStore
from jobs.store.base import IDENTITY_KEY
from jobs.verify import ObjectCheck
from pipelines.errors import ErrorCode
from pipelines.request import Speech, SynthesisRequest
from tests.support.fakes import FakeClock, FakePipeline, MemoryStore
from tests.support.manifests import newest_job_manifest
from tests.support.worker_rig import Build, Rig, wait_for
from worker.leases import MAX_REREADS

ITEMS = 20


class Interrupted(FakePipeline):
    """Calls `work` when it has made so many items."""

    def __init__(self, items: int, work: Callable[[], object]) -> None:
        super().__init__()
        self._left, self._work = items, work

    def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
        self._left -= 1
        if self._left == 0:
            self._work()
        super()._finish(request, future)


def leave_nothing(root: Path) -> None:
    assert not root.exists()


def leave_an_empty_folder(root: Path) -> None:
    root.mkdir()


def leave_another_store(root: Path) -> None:
    FolderStore(root).establish()


def in_folder(build: Build, pipeline: FakePipeline | None = None) -> Rig:
    rig = build(pipeline=pipeline, clock=FakeClock(), lease_seconds=20_000, commit_items=2)
    rig.store = FolderStore(rig.folder / "store")  # type: ignore[assignment]
    return rig


def waits(rig: Rig) -> float:
    """How often a call waited for a store that was away."""
    return (
        rig.metrics.registry.get_sample_value(
            "speech_service_retries_total", {"code": ErrorCode.STORE_UNREACHABLE.value}
        )
        or 0.0
    )


@contextmanager
def running(rig: Rig) -> Generator[Callable[[Callable[[], object]], None]]:
    """Runs the next shard beside the test, which waits for its end. Yields a wait for a condition while the shard runs."""

    def until(condition: Callable[[], object]) -> None:
        wait_for(lambda: condition() or not thread.is_alive())
        assert condition(), "the shard ended before"

    thread = threading.Thread(target=rig.run_next)
    thread.start()
    try:
        yield until
    except BaseException:
        rig.leases.drain()
        raise
    finally:
        thread.join()


def assert_complete(rig: Rig, job: Job) -> None:
    status = rig.status(job)
    assert [row for row in rig.items(job) if row.error_code] == []
    assert (status.job.state, status.items.done, status.items.failed) == (JobState.COMPLETED, ITEMS, 0)
    assert list(ObjectCheck(rig.ledger, rig.store, job)) == []


@pytest.mark.parametrize("leave", [leave_nothing, leave_an_empty_folder, leave_another_store])
@pytest.mark.parametrize("pack", [False, True])
def test_a_store_that_goes_away_in_a_shard_is_waited_for(
    build: Build, leave: Callable[[Path], None], pack: bool
) -> None:
    def take_away() -> None:
        root.rename(elsewhere)
        leave(root)
        taken.set()

    taken = threading.Event()
    rig = in_folder(build, Interrupted(ITEMS // 2, take_away))
    root, elsewhere = rig.folder / "store", rig.folder / "elsewhere"
    job = rig.submit([f"text {n}" for n in range(ITEMS)], pack=pack)
    with running(rig) as until:
        until(lambda: taken.is_set() and waits(rig) > 3)
        left = [path.name for path in root.rglob("*")] if root.exists() else []
        shutil.rmtree(root, ignore_errors=True)
        elsewhere.rename(root)
    assert set(left) <= {IDENTITY_KEY}
    assert_complete(rig, job)


def test_a_store_of_another_identity_gets_nothing(build: Build) -> None:
    rig = in_folder(build)
    job = rig.submit([f"text {n}" for n in range(ITEMS)])
    file = rig.folder / "store" / IDENTITY_KEY
    own = file.read_text()
    # As a copy of the store would be: its inputs can be read.
    file.write_text("f" * 32)
    with running(rig) as until:
        until(lambda: waits(rig) > 3)
        assert not (rig.folder / "store" / "jobs" / job.id / "audio").exists()
        file.write_text(f"{own}\n")
    assert_complete(rig, job)


@pytest.mark.parametrize(
    "plant", [lambda path: path.mkdir(), lambda path: path.symlink_to("nothing"), os.mkfifo]
)
def test_a_store_whose_identity_is_no_file_is_away(build: Build, plant: Callable[[Path], object]) -> None:
    rig = in_folder(build)
    job = rig.submit([f"text {n}" for n in range(ITEMS)])
    file, aside = (rig.folder / "store" / name for name in (IDENTITY_KEY, "aside"))
    file.rename(aside)
    plant(file)
    with running(rig) as until:
        until(lambda: waits(rig) > 3)
        file.rename(rig.folder / "planted")
        aside.rename(file)
    assert_complete(rig, job)


def test_a_manifest_waits_for_the_store(build: Build) -> None:
    rig = in_folder(build)
    job = rig.submit([f"text {n}" for n in range(ITEMS)])
    rig.run_next()
    upkeep = rig.upkeep(lambda _: FolderStore(rig.folder / "store"), FakeClock())
    (rig.folder / "store").rename(rig.folder / "elsewhere")
    (rig.folder / "store").mkdir()
    upkeep.end_job(job.id)
    assert list((rig.folder / "store").iterdir()) == []
    (rig.folder / "store").rmdir()
    (rig.folder / "elsewhere").rename(rig.folder / "store")
    upkeep.end_job(job.id)
    assert newest_job_manifest(rig.store, job.id) is not None


class Flips(MemoryStore):
    """A bit of the first reads of an input is another one."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.left = reads

    def get(self, key: str) -> bytes:
        data = super().get(key)
        if "/input/" not in key or not self.left:
            return data
        self.left -= 1
        return bytes([data[0] ^ 1]) + data[1:]


def test_an_input_with_a_flipped_bit_is_read_again(build: Build) -> None:
    rig = build(clock=FakeClock(), lease_seconds=20_000)
    rig.store = Flips(reads=MAX_REREADS)
    job = rig.submit([f"text {n}" for n in range(ITEMS)])
    rig.run_next()
    assert_complete(rig, job)


def test_an_input_that_stays_changed_is_a_fault(build: Build) -> None:
    rig = build(clock=FakeClock(), lease_seconds=20_000)
    rig.store = Flips(reads=MAX_REREADS + 1)
    job = rig.submit(["a"])
    rig.run_next()
    assert rig.ledger.error_counts(job.id) == {ErrorCode.STORE_CONFLICT: 1}

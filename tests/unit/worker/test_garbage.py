"""The sweep on a real ledger, with the fake engine and a store in memory: it deletes orphans, and nothing
else."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.delete import delete_job
from jobs.ingest import submit
from jobs.layout import pack_key
from jobs.ledger import Ledger
from jobs.ledger.records import Job, JobSpec, JobState
from jobs.store import open_store
from jobs.store.base import ObjectInfo
from pipelines.audio import encode
from tests.support.fakes import SAMPLE_RATE, MemoryStore, sine
from tests.support.ledger_kit import execute
from tests.support.worker_rig import Rig
from worker.cli import cli
from worker.garbage import SweepReport, sweep

DAY = 24 * 3600.0


def age(rig: Rig, seconds: float = 2 * DAY) -> None:
    """Makes every ended job and every object that old."""
    execute(rig.ledger, "UPDATE jobs SET finished_at = finished_at - :seconds", seconds=seconds)
    for key in rig.store.modified_at:
        rig.store.modified_at[key] -= seconds


def swept(rig: Rig, store: MemoryStore | None = None, *, delete: bool = True) -> SweepReport:
    return sweep(rig.ledger, lambda _: store or rig.store, delete=delete)


def audio_key(job: Job, index: int, name: str = "") -> str:
    return f"jobs/{job.id}/audio/00000/{index:09d}-{name or f'item-{index}'}.wav"


def cancelled(rig: Rig, texts: list[str]) -> Job:
    job = rig.submit(texts)
    rig.ledger.cancel(job.id)
    return job


def test_orphans_of_jobs_that_ended_long_ago_are_counted_and_deleted_if_told(rig: Rig) -> None:
    ended, done, running = cancelled(rig, ["a", "b"]), rig.submit(["c", "d"]), rig.submit(["e"])
    rig.run_next()
    stray = audio_key(ended, 1)
    rig.store.put(stray, b"stored, then the worker was killed")
    rig.store.put(audio_key(running, 0), b"not committed yet")
    assert swept(rig).orphans == 0
    age(rig)
    assert rig.status(done).job.state is JobState.COMPLETED
    before = set(rig.store.objects)
    assert swept(rig, delete=False) == SweepReport(1, 34)
    assert set(rig.store.objects) == before
    assert swept(rig) == SweepReport(1, 34)
    assert before - set(rig.store.objects) == {stray}
    assert swept(rig).orphans == 0


def test_what_a_power_cut_damaged_is_an_orphan_when_its_item_is_done(rig: Rig) -> None:
    """The sound object beside it has a number, and so may what two power cuts damaged."""
    job = rig.submit(["a", "b"])
    damaged = [audio_key(job, 0), audio_key(job, 0).replace(".wav", ".2.wav"), audio_key(job, 1)]
    for key in damaged:
        rig.store.put(key, bytes(99))
    rig.run_next()
    assert {item.artifact.key for item in rig.items(job) if item.artifact is not None} == {
        audio_key(job, 0).replace(".wav", ".3.wav"),
        audio_key(job, 1).replace(".wav", ".2.wav"),
    }
    # No number of ours.
    foreign = [audio_key(job, 0).replace(".wav", f".{number}.wav") for number in ("1", "02", "2.2")]
    for key in foreign:
        rig.store.put(key, b"of somebody else")
    age(rig)
    before = set(rig.store.objects)
    assert swept(rig) == SweepReport(3, 3 * 99)
    assert before - set(rig.store.objects) == set(damaged)


def test_texts_inputs_and_references_are_looked_at_too(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "voice.wav").write_bytes(encode(sine("voice", 1), SAMPLE_RATE, "wav"))
    line = {
        "example_id": "one",
        "messages": [["user", "audio", "voice.wav"], ["user", "text", "[[says:Hello.]] a"]],
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    job = submit(rig.settings, rig.ledger, rig.store, str(tmp_path / "in.jsonl"), JobSpec(model="fake")).job
    rig.run_next()
    kept = {key for key in rig.store.objects if not key.startswith(f"jobs/{job.id}/manifest")}
    assert {key.split("/")[2] for key in kept} == {"audio", "text", "input", "references"}
    strays = {"text/00000/000000000-one-draw2.txt", "audio/00000/000000000-one-draw1.wav"}
    strays |= {"input/000000.2.jsonl.zst", f"references/{'ab' * 32}.wav"}
    for stray in strays:
        rig.store.put(f"jobs/{job.id}/{stray}", b"stray")
    age(rig)
    assert swept(rig).orphans == len(strays)
    assert kept <= rig.store.objects.keys()
    assert not {key for key in rig.store.objects if key.removeprefix(f"jobs/{job.id}/") in strays}


def test_a_job_that_is_retried_during_the_sweep_keeps_what_it_makes(rig: Rig) -> None:
    job = rig.submit([f"[[fail_once:synth.no_eos]] {n}" for n in range(6)])
    rig.run_next()
    assert rig.status(job).items.failed == 6
    age(rig)

    class RetriedMeanwhile(MemoryStore):
        """Lists what is there; in between a person retries the job and a worker makes all of it."""

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            if prefix.endswith("/audio/") and rig.ledger.retry(job.id, None):
                rig.run_next()
                age(rig)
            yield from rig.store.list(prefix)

        def delete(self, key: str) -> None:
            rig.store.delete(key)

    assert swept(rig, RetriedMeanwhile()).orphans == 0
    assert rig.status(job).items.done == 6
    assert set(rig.audio()) == {one.key for one in rig.ledger.artifacts(job.id, "audio")}


def test_an_object_committed_between_the_look_and_the_delete_stays(rig: Rig) -> None:
    job = cancelled(rig, ["a"])
    rig.store.put(audio_key(job, 0), b"stray")
    age(rig)
    ask = rig.ledger.is_orphan

    def reopened_after(*arguments: object) -> bool:
        found = ask(*arguments)  # type: ignore[arg-type]
        execute(rig.ledger, "UPDATE jobs SET state = 'running', finished_at = NULL")
        return found

    rig.ledger.is_orphan = reopened_after  # type: ignore[method-assign]
    assert swept(rig).orphans == 0
    assert audio_key(job, 0) in rig.store.objects


def test_a_store_that_lists_in_another_order_is_refused(rig: Rig) -> None:
    job = rig.submit([f"text {n}" for n in range(16)])
    rig.run_next()
    other = cancelled(rig, ["a"])
    rig.store.put(audio_key(other, 0), b"stray")
    age(rig)

    class Shuffled(MemoryStore):
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            found = list(rig.store.list(prefix))
            return iter(found[::-1] if job.id in prefix else found)

        def delete(self, key: str) -> None:
            rig.store.delete(key)

    assert swept(rig, Shuffled()) == SweepReport(1, 5, failed_jobs=1)
    assert len(rig.audio()) == 16


def test_a_ledger_older_than_a_retry_deletes_nothing_of_it(rig: Rig, tmp_path: Path) -> None:
    job = rig.submit([f"[[fail_once:synth.no_eos]] {n}" for n in range(4)] + ["fine"])
    rig.run_next()
    path = rig.settings.ledger_url.removeprefix("sqlite:///")
    with (
        closing(sqlite3.connect(path)) as source,
        closing(sqlite3.connect(tmp_path / "backup.sqlite")) as target,
    ):
        source.backup(target)
    assert rig.ledger.retry(job.id, None) == 4
    rig.run_next()
    assert rig.status(job).items.done == 5
    age(rig)
    with closing(Ledger(f"sqlite:///{tmp_path}/backup.sqlite")) as backup:
        execute(backup, "UPDATE jobs SET finished_at = finished_at - 200000")
        assert sweep(backup, lambda _: rig.store, delete=True).orphans == 0
    assert len(rig.audio()) == 5


def orphan_pack(rig: Rig, job: Job, epoch: int = 1) -> str:
    """A pack that a worker put and did not commit before it was killed."""
    key = pack_key(job.id, 0, epoch, 0, "ab" * 32)
    rig.store.put(key, b"pack")
    return key


def test_packs_that_no_artifact_names_are_orphans(rig: Rig) -> None:
    job = rig.submit([f"text {n}" for n in range(4)], pack=True)
    rig.run_next()
    orphan = orphan_pack(rig, job)
    assert swept(rig).orphans == 0
    age(rig)
    (named,) = rig.ledger.packs(job.id)
    assert swept(rig, delete=False) == swept(rig) == SweepReport(1, 4)
    assert orphan not in rig.store.objects
    assert named in rig.store.objects


def test_one_item_keeps_a_whole_pack(rig: Rig) -> None:
    job = rig.submit([f"text {n}" for n in range(4)], pack=True)
    rig.run_next()
    age(rig)
    (pack,) = rig.ledger.packs(job.id)
    execute(rig.ledger, "UPDATE artifacts SET pack = NULL, pack_offset = NULL WHERE idx > 0")
    assert swept(rig).orphans == 0
    assert not rig.ledger.delete_orphan(job.id, pack, rig.ledger.now(), lambda: rig.store.delete(pack))
    assert pack in rig.store.objects
    execute(rig.ledger, "UPDATE artifacts SET pack = NULL, pack_offset = NULL")
    assert swept(rig).orphans == 1


def test_a_ledger_older_than_a_retry_deletes_no_pack_of_it(rig: Rig, tmp_path: Path) -> None:
    job = rig.submit([f"[[fail_once:synth.no_eos]] {n}" for n in range(4)] + ["fine"], pack=True)
    rig.run_next()
    path = rig.settings.ledger_url.removeprefix("sqlite:///")
    with (
        closing(sqlite3.connect(path)) as source,
        closing(sqlite3.connect(tmp_path / "backup.sqlite")) as target,
    ):
        source.backup(target)
    assert rig.ledger.retry(job.id, None) == 4
    rig.run_next()
    assert len(rig.ledger.packs(job.id)) == 2
    age(rig)
    with closing(Ledger(f"sqlite:///{tmp_path}/backup.sqlite")) as backup:
        execute(backup, "UPDATE jobs SET finished_at = finished_at - 200000")
        assert sweep(backup, lambda _: rig.store, delete=True).orphans == 0
    assert rig.ledger.packs(job.id) <= rig.store.objects.keys()


@pytest.mark.parametrize(
    "name",
    [
        "packs/notes.tar",
        "packs/000000-1-0.tar",
        "packs/000000-9-0-0123456789abcdef.tar",
        "packs/000007-1-0-0123456789abcdef.tar",
        "packs/old/000000-1-0-0123456789abcdef.tar",
        "audio/00000/000000000-mine.wav",
        "audio/00000/000000000-item-0.flac",
        "audio/00000/000000000-item-0-draw01.wav",
        "audio/00000/000000007-item-7.wav",
        "audio/000000000-item-0.wav",
        "audio/notes.txt",
        "text/00000/000000000-item-0.wav",
        "quarantine/00000/000000001-item-0.wav",
        "input/000007.jsonl.zst",
        "input/notes.jsonl.zst",
        "input/000000.1.jsonl.zst",
        "references/voice.wav",
        "mine/000000000-item-0.wav",
        "notes.md",
    ],
)
def test_files_of_people_below_a_job_stay(rig: Rig, name: str) -> None:
    job = cancelled(rig, ["a", "b"])
    rig.store.put(f"jobs/{job.id}/{name}", b"a person's")
    age(rig)
    assert swept(rig).orphans == 0
    assert f"jobs/{job.id}/{name}" in rig.store.objects


def test_an_object_younger_than_the_grace_stays(rig: Rig) -> None:
    job = cancelled(rig, ["a", "b"])
    rig.store.put(audio_key(job, 0), b"old")
    age(rig)
    rig.store.put(audio_key(job, 1), b"a worker that hung for two days put it just now")
    assert swept(rig) == SweepReport(1, 3)
    rig.store.modified_at.pop(audio_key(job, 1))
    assert swept(rig).orphans == 0


def test_a_folder_knows_when_objects_were_written(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), None)
    for name, at in (("a/0", 1000), ("a/1", 2000)):
        store.put(name, b"x")
        os.utime(tmp_path / name, (at, at))
    assert [info.modified_at for info in store.list("a/")] == [1000, 2000]


def test_the_command_counts_and_says_what_it_could_not_look_at(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cancelled(rig, ["a"])
    execute(rig.ledger, "UPDATE jobs SET store_url = :url", url=str(rig.folder / "store"))
    store = open_store(str(rig.folder / "store"), None)
    store.establish(rig.store.identity)
    store.put(audio_key(job, 0), b"stray")
    monkeypatch.setenv("SPEECH_HOME", str(rig.settings.home))
    assert CliRunner().invoke(cli, ["sweep"]).stdout == "0 orphans, 0 bytes\n"
    assert CliRunner().invoke(cli, ["sweep", "--grace-hours", "0"]).stdout == "1 orphans, 5 bytes\n"
    assert (
        CliRunner().invoke(cli, ["sweep", "--grace-hours", "0", "--delete"]).stdout
        == "1 orphans, 5 bytes, deleted\n"
    )
    assert list(store.list("jobs/")) == []
    execute(rig.ledger, "UPDATE jobs SET store_url = 'ftp://nowhere'")
    failed = CliRunner().invoke(cli, ["sweep", "--grace-hours", "0"])
    assert failed.exit_code == 1
    assert failed.stdout == "0 orphans, 0 bytes; 1 jobs could not be checked\n"


def test_a_store_of_another_identity_is_not_swept(rig: Rig) -> None:
    kept, gone = cancelled(rig, ["a"]), cancelled(rig, ["b"])
    delete_job(rig.ledger, rig.store, gone.id)
    for job in (kept, gone):
        rig.store.put(audio_key(job, 0), b"stray")
    age(rig)
    own, rig.store.identity = rig.store.identity, "f" * 32
    assert swept(rig) == SweepReport(failed_jobs=2)
    assert all(audio_key(job, 0) in rig.store.objects for job in (kept, gone))
    rig.store.identity = own
    assert swept(rig).orphans == 2


def test_what_is_stored_of_a_job_after_it_was_deleted_is_swept(rig: Rig) -> None:
    gone, kept = cancelled(rig, ["a"]), rig.submit(["b"])
    rig.run_next()
    delete_job(rig.ledger, rig.store, gone.id)
    before = set(rig.store.objects)
    # A worker that lost its lease long ago still had it in its hands.
    rig.store.put(audio_key(gone, 0), b"late")
    assert swept(rig, delete=False) == SweepReport(1, 4)
    assert swept(rig) == SweepReport(1, 4)
    assert set(rig.store.objects) == before
    assert kept.id in {key.split("/")[1] for key in before}
    assert len(rig.ledger.deleted_jobs()) == 1
    execute(rig.ledger, "UPDATE deleted_jobs SET deleted_at = deleted_at - :seconds", seconds=31 * DAY)
    assert swept(rig).orphans == 0
    assert rig.ledger.deleted_jobs() == []

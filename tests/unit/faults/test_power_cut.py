"""What the ledger names is on the disk before it is named, and what a power cut left of an object is
replaced."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jobs.ledger import Ledger
from jobs.ledger.records import CommitResult, Done, NewShard, Outcome, RejectedLine, Ticket
from jobs.references import ReferenceReader, put_reference
from jobs.spec import item_seed
from jobs.store import FolderStore
from jobs.store import folder as folder_module
from jobs.verify import ObjectCheck
from pipelines.audio import encode
from pipelines.errors import ErrorCode
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import SAMPLE_RATE, FakePipeline, MemoryStore, sine
from tests.support.worker_rig import Rig

Build = Callable[..., Rig]


class Watching:
    """A ledger that looks at the store before it writes down what is there."""

    def __init__(self, ledger: Ledger, store: MemoryStore) -> None:
        self._ledger = ledger
        self._store = store
        #: What was named: stage, commit or finish.
        self.named: list[str] = []

    def stage(
        self, job_id: str, shards: Sequence[NewShard], rejected: Sequence[RejectedLine], lines_read: int
    ) -> bool:
        self._name("stage", {shard.input_key for shard in shards})
        return self._ledger.stage(job_id, shards, rejected, lines_read)

    def commit(self, ticket: Ticket, outcomes: Sequence[Outcome]) -> CommitResult:
        self._name(
            "commit",
            {
                artifact.key
                for outcome in outcomes
                if isinstance(outcome, Done)
                for artifact in outcome.artifacts
            },
        )
        return self._ledger.commit(ticket, outcomes)

    def finish_shard(
        self, ticket: Ticket, manifest_key: str | None = None, manifest_sha256: str | None = None
    ) -> bool:
        self._name("finish", {manifest_key} if manifest_key else set())
        return self._ledger.finish_shard(ticket, manifest_key, manifest_sha256)

    def _name(self, what: str, keys: set[str]) -> None:
        assert keys
        assert not keys & self._store.unsynced, f"{what} before sync"
        self.named.append(what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    one = Rig(tmp_path, commit_items=2)
    yield one
    one.close()
    forget()


def test_objects_are_synced_before_the_ledger_names_them(rig: Rig) -> None:
    real = rig.ledger
    watching = Watching(real, rig.store)
    rig.ledger = watching  # type: ignore[assignment]
    job = rig.submit(["one", "two", "three", "four", "five"])
    assert watching.named == ["stage"]
    assert rig.runner_on(watching).run(rig.claim_next()) == "finished"  # type: ignore[arg-type]
    rig.ledger = real
    assert watching.named.count("commit") >= 2
    assert watching.named[-1] == "finish"
    assert rig.status(job).items.done == 5


def wav(text: str, seed: int) -> bytes:
    return encode(sine(text, seed), SAMPLE_RATE, "wav")


def zeroed(data: bytes) -> bytes:
    """A file of the right length, one of whose blocks never got to the disk."""
    return data[:64] + bytes(len(data) - 128) + data[-64:]


@pytest.mark.parametrize("left", ["", "RIFF", "cut", "zeros", "zeroed"])
@pytest.mark.parametrize("format", ["wav", "flac"])
def test_what_a_power_cut_left_is_not_adopted(rig: Rig, left: str, format: str) -> None:
    job = rig.submit(["text"], format=format, seed=1)
    key = f"jobs/{job.id}/audio/00000/000000000-item-0.{format}"
    whole = encode(sine("text", item_seed(1, "item-0", 0)), SAMPLE_RATE, format)  # type: ignore[arg-type]
    remains = {
        "": b"",
        "RIFF": b"RIFF",
        "cut": whole[: len(whole) // 2],
        "zeros": bytes(4096),
        "zeroed": zeroed(whole),
    }[left]
    rig.store.put(key, remains)
    assert rig.run_next() == "finished"
    (item,) = rig.items(job)
    assert item.artifact is not None
    assert item.artifact.key == key.replace(f".{format}", f".2.{format}")
    assert rig.store.get(item.artifact.key) == whole
    assert (item.artifact.bytes, item.artifact.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert rig.store.get(key) == remains
    assert list(ObjectCheck(rig.ledger, rig.store, job)) == []


def test_a_damaged_text_is_not_adopted(rig: Rig) -> None:
    job = rig.submit(["[[says:Hello]] text"])
    key = f"jobs/{job.id}/text/00000/000000000-item-0.txt"
    rig.store.put(key, bytes(5))
    assert rig.run_next() == "finished"
    (text,) = rig.ledger.artifacts(job.id, "text")
    assert text.key == key.replace(".txt", ".2.txt")
    assert rig.store.get(text.key) == b"Hello"


def test_a_damaged_reference_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = FolderStore(tmp_path / "store")
    soundfile.write(tmp_path / "voice.wav", np.full(800, 0.1), 16_000)
    audio = ReferenceReader(tmp_path, [], store).read("voice.wav")
    key = put_reference(store, "job", audio)
    whole = store.get(key)
    os.truncate(store.uri(key), 0)
    assert put_reference(store, "job", audio) == key
    assert store.get(key) == whole


def test_sync_brings_each_file_system_to_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(folder_module, "sync_file_system", lambda fd: synced.append(os.fstat(fd).st_dev))
    (tmp_path / "store").mkdir()
    store = FolderStore(tmp_path / "store")
    store.sync()
    assert synced == []
    store.put("jobs/a/x", b"1")
    FolderStore(tmp_path / "store").put("jobs/b/y", b"2")
    store.sync()
    assert synced == [tmp_path.stat().st_dev]
    # What an earlier process put and did not sync is found by a put.
    adopting = FolderStore(tmp_path / "store")
    assert not adopting.put("jobs/b/y", b"2").created
    adopting.sync()
    assert len(synced) == 2


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "sync_file_system", fail)
    (tmp_path / "store").mkdir()
    store = FolderStore(tmp_path / "store")
    store.put("a", b"1")
    with pytest.raises(Exception, match="No space left") as caught:
        store.sync()
    assert caught.value.code is ErrorCode.STORE_FULL  # type: ignore[attr-defined]

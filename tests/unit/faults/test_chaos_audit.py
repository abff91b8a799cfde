"""The audit of the soak finds each thing that can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.layout import job_manifest_key
from pipelines.registry import register_pipeline
from tests.faults.soak.audit import audit
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.ledger_kit import execute
from tests.support.worker_rig import Rig

FAULT = '{"schema": "nightjar.fault/1", "key": "jobs/1.wav", "fault": "missing"}'
TEXTS = {f"item-{number}": f"Sentence {number}." for number in range(3)}


class Finished:
    """A job that is done, as the audit sees an installation."""

    def __init__(self, rig: Rig) -> None:
        self.ledger, self.store = rig.ledger, rig.store
        self.job = rig.submit(list(TEXTS.values())).id
        rig.run_next()
        self.store.put(job_manifest_key(self.job), b"manifest")
        self.left: list[str] = []
        self.strays: list[str] = []
        self.untold: list[str] = []
        self.verified: tuple[int, str] = (0, "")
        self.repaired_by_hand = False
        self.ended: dict[str, dict[str, str]] = {}

    def left_behind(self) -> list[str]:
        return self.left

    def outside(self) -> list[str]:
        return self.strays

    def verify(self, job: str) -> tuple[int, str]:
        return self.verified

    @property
    def audio(self) -> str:
        """The key of the first item's audio."""
        return next(row.artifact.key for row in self.ledger.items(self.job) if row.artifact is not None)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Finished]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path)
    yield Finished(rig)
    rig.close()
    forget()


def other_bytes(site: Finished) -> None:
    data, info = site.store.objects[site.audio]
    site.store.objects[site.audio] = (data[:-2] + b"\x7f\x7f", info)


def second_object(site: Finished) -> None:
    site.store.put(site.audio.replace(".wav", "-draw1.wav"), b"again")


HARM: dict[str, tuple[Callable[[Finished], object], dict[str, int]]] = {
    "lost item": (
        lambda site: execute(
            site.ledger, "UPDATE items SET state = 2, error_code = 'synth.nan' WHERE idx = 0"
        ),
        {"lost": 1, "orphans": 1},
    ),
    "lost object": (lambda site: site.store.delete(site.audio), {"lost": 1}),
    "other bytes": (other_bytes, {"wrong": 1}),
    "another hash": (
        lambda site: execute(site.ledger, "UPDATE artifacts SET sha256 = 'x' WHERE idx = 0"),
        {"wrong": 1},
    ),
    "a second object": (second_object, {"doubled": 1, "orphans": 1}),
    "an input that nothing names": (
        lambda site: site.store.put(f"jobs/{site.job}/input/000000.2.jsonl.zst", b"x"),
        {"orphans": 1},
    ),
    "an open job": (lambda site: execute(site.ledger, "UPDATE jobs SET state = 'running'"), {"stuck": 1}),
    "no manifest": (lambda site: site.store.delete(job_manifest_key(site.job)), {"stuck": 1}),
    "a file below a mount point": (lambda site: site.strays.append("stub/jobs/1.wav"), {"outside": 1}),
    "a run that went on": (lambda site: site.untold.append("It did not end."), {"untold": 1}),
    "an object that verify misses": (lambda site: setattr(site, "verified", (0, FAULT)), {"lost": 1}),
    "an object that is not made again": (lambda site: setattr(site, "verified", (1, "")), {"lost": 1}),
    "a process": (lambda site: site.left.append("process 1"), {"left_behind": 1}),
}


def test_a_job_that_is_right_has_nothing_to_find(site: Finished) -> None:
    found = audit(site, TEXTS)  # type: ignore[arg-type]
    assert found.right, found.details


@pytest.mark.parametrize("harm", HARM)
def test_what_is_wrong_is_found(site: Finished, harm: str) -> None:
    do, wanted = HARM[harm]
    do(site)
    found = audit(site, TEXTS)  # type: ignore[arg-type]
    assert {kind: count for kind, count in found.view.items() if count} == wanted, found.details
    assert not found.right


def test_what_a_backup_of_the_store_lacked_is_repaired_and_no_fault(site: Finished) -> None:
    site.repaired_by_hand, site.verified = True, (0, f"{FAULT}\n{FAULT}\n")
    found = audit(site, TEXTS)  # type: ignore[arg-type]
    assert found.right, found.details
    assert found.repaired == 2


def test_a_job_that_had_ended_before_is_looked_at_too(site: Finished) -> None:
    site.ended = {site.job: {**TEXTS, "more": "Another."}}
    assert audit(site, TEXTS).view["lost"] == 1  # type: ignore[arg-type]


def test_an_item_that_the_ledger_does_not_have_is_lost(site: Finished) -> None:
    assert audit(site, {**TEXTS, "more": "Another."}).view["lost"] == 1  # type: ignore[arg-type]

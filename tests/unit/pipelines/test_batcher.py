"""Calls of several threads that run in batches on one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from pipelines.recording import Batcher
from tests.unit.pipelines.test_engine_process import wait_for


class Runs:
    """The batches that were run, each once `go` is set, and their threads."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.batcher: Batcher[str, str] = Batcher(self._run, lambda word: word[0], lambda _: 3)

    def _run(self, words: Sequence[str]) -> list[str]:
        self.threads.add(threading.current_thread().name)
        self.batches.append([*words])
        assert self.go.wait(60)
        if "bad" in words:
            raise ValueError(f"batch {len(self.batches)}")
        return [word.upper() for word in words][: 1 if "short" in words else None]

    def call(self, word: str, patience: float = 0.0) -> Future[str]:
        """A call that waits behind the earlier ones."""
        waiting = len(self.batcher.waiting)
        first = not self.batches
        future = self.batcher(word, patience)
        wait_for(lambda: len(self.batches) == 1 if first else len(self.batcher.waiting) == waiting + 1)
        return future


@pytest.fixture
def runs() -> Runs:
    return Runs()


def test_a_batch_has_the_bucket_of_the_oldest_call_up_to_its_rows(runs: Runs) -> None:
    words = ["first", "b1", "a1", "b2", "a2", "b3", "b4", "a3"]
    futures = [runs.call(word) for word in words]
    runs.go.set()
    assert [future.result(60) for future in futures] == [word.upper() for word in words]
    assert runs.batches == [["first"], ["b1", "b2", "b3"], ["a1", "a2", "a3"], ["b4"]]
    assert runs.threads == {"recordings"}
    # Nothing holds the encoder when its pipeline is closed.
    wait_for(lambda: not runs.batcher.running)
    assert runs.batcher("again").result(60) == "AGAIN"


def test_patient_calls_wait_until_their_bucket_is_full(runs: Runs) -> None:
    runs.go.set()
    patient = [runs.batcher(word, 600) for word in ["a1", "b1", "a2", "b2"]]
    assert runs.batcher("c1").result(60) == "C1"
    assert not any(future.done() for future in patient)
    assert runs.batcher("b3", 600).result(60) == "B3"
    # A call without patience takes the others of its bucket along.
    assert runs.batcher("a3").result(60) == "A3"
    assert [future.result(60) for future in patient] == ["A1", "B1", "A2", "B2"]
    assert runs.batches == [["c1"], ["b1", "b2", "b3"], ["a1", "a2", "a3"]]


def test_patience_ends(runs: Runs) -> None:
    runs.go.set()
    late, soon = runs.batcher("a1", 600), runs.batcher("b1", 0.2)
    assert soon.result(60) == "B1"
    assert not late.done()
    # Full buckets pass only those whose patience has not ended.
    runs.go.clear()
    first, ended = runs.batcher("c1"), runs.batcher("d1")
    wait_for(lambda: runs.batches[-1] == ["c1"])
    full = [runs.batcher(word, 600) for word in ["a2", "a3"]]
    runs.go.set()
    assert [future.result(60) for future in [first, ended, late, *full]] == ["C1", "D1", "A1", "A2", "A3"]
    assert runs.batches[1:] == [["c1"], ["d1"], ["a1", "a2", "a3"]]


def test_an_error_is_that_of_all_calls_of_its_batch_and_of_no_other(runs: Runs) -> None:
    futures = [runs.call(word) for word in ["first", "b1", "bad", "a1", "short", "s2"]]
    runs.go.set()
    assert futures[0].result(60) == "FIRST"
    errors = [future.exception(60) for future in futures[1:3]]
    assert [str(error) for error in errors] == ["batch 2"] * 2
    assert futures[3].result(60) == "A1"
    # A batch with too few results has none.
    assert all(isinstance(future.exception(60), ValueError) for future in futures[4:])


def test_a_call_whose_thread_cannot_start_fails_and_the_next_one_runs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            runs.batcher("first")
    runs.go.set()
    assert runs.batcher("next").result(60) == "NEXT"
    assert runs.batches == [["next"]]

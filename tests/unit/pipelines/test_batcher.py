"""Calls of several threads that run in batches on one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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
        self.pool = ThreadPoolExecutor(16)

    def _run(self, words: Sequence[str]) -> list[str]:
        self.threads.add(threading.current_thread().name)
        self.batches.append([*words])
        assert self.go.wait(60)
        if "bad" in words:
            raise ValueError(f"batch {len(self.batches)}")
        return [word.upper() for word in words][: 1 if "short" in words else None]

    def call(self, word: str) -> Future[str]:
        """A call that waits behind the earlier ones."""
        waiting = len(self.batcher.waiting)
        first = not self.batches
        future = self.pool.submit(self.batcher, word)
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
    assert runs.batcher("again") == "AGAIN"


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
    assert runs.pool.submit(runs.batcher, "next").result(60) == "NEXT"
    assert runs.batches == [["next"]]

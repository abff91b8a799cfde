"""Ingest into a real ledger and a folder store: what becomes of good lines, bad lines, crashes and second
submits."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from jobs.ingest import SubmitOptions, SubmitResult, dry_run, submit
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec, JobState, NewShard, Reading, RejectedLine
from jobs.settings import Settings
from jobs.shard_file import ShardLine, read_shard
from jobs.store import FolderStore
from jobs.store.base import IDENTITY_KEY
from pipelines.errors import (
    ConfigError,
    ErrorCode,
    InputError,
    ModelError,
    NotFoundError,
    ServiceError,
    StoreError,
)
from pipelines.registry import ModelCard, register_pipeline
from pipelines.request import Capabilities, Generation, Message
from tests.support.times import with_times

SPEC = JobSpec("cloner")


@pytest.fixture(autouse=True)
def cloner() -> Iterator[None]:
    """A model that can clone, takes instructions and is never opened."""
    capabilities = Capabilities(voices=("v",), cloning=True, instruct=True, max_text_characters=200)
    card = ModelCard("cloner", "fake", "cpu", 16_000, capabilities, "r1", seconds_per_character=0.1, rtf=0.5)
    forget = register_pipeline("cloner", card, lambda **_: pytest.fail("ingest opened a pipeline"))
    yield
    forget()


@dataclass
class Place:
    """A home of a test."""

    folder: Path
    ledger: Ledger
    store: FolderStore
    settings: Settings

    def write(self, lines: Sequence[bytes], name: str = "in.jsonl") -> str:
        path = self.folder / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    def submit(self, source: str, spec: JobSpec = SPEC, **options: object) -> SubmitResult:
        return submit(self.settings, self.ledger, self.store, source, spec, options=SubmitOptions(**options))  # type: ignore[arg-type]

    def payload(self, job_id: str) -> list[ShardLine]:
        inputs = sorted(self.ledger.shard_inputs(job_id).items())
        return [line for _, (key, sha256) in inputs for line in read_shard(self.store, key, sha256)]


@pytest.fixture(params=["sqlite", "postgres"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A home on each kind of ledger."""
    url = (
        f"sqlite:///{tmp_path}/ledger.sqlite"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_url")
    )
    ledger = Ledger(url)
    ledger.migrate()
    settings = with_times(Settings(), shard_items=4)
    yield Place(tmp_path, ledger, FolderStore(tmp_path / "store"), settings)
    ledger.close()


@pytest.fixture
def soon_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input is refused after 20 lines of which hardly any is good."""
    monkeypatch.setattr("jobs.spec.MAX_REFUSED_LINES", 20)


#: Of each format: the end of a file's name, what a file begins with, and a line that is refused.
BAD = {
    "dialogues": (".jsonl", [], b"[1]"),
    "messages": (".jsonl", [], b"[1]"),
    "openai-batch": (".jsonl", [], b"[1]"),
    "csv": (".csv", [b"id,text"], b"x"),
    "tsv": (".tsv", [b"id\ttext"], b"x"),
    "text": (".txt", [], b"long " * 100),
    "kaldi": ("", [], b"utterance"),
}


def bad_input(place: Place, input_format: str, count: int) -> str:
    """A small archive with so many bad lines; of Parquet, rows."""
    if input_format == "parquet":
        path = place.folder / "in.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": [""] * count}), path)
        return str(path)
    ending, begin, bad = BAD[input_format]
    return place.write([*begin, *[bad] * count], f"in{ending}")


@pytest.mark.parametrize("input_format", [*BAD, "parquet"])
def test_of_many_bad_lines_some_are_kept_and_all_are_counted(
    place: Place, short_batches: None, input_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.ledger.control.KEPT_REJECTED_LINES", 12)
    source = bad_input(place, input_format, 35)
    result = place.submit(source, input_format=input_format)
    assert (result.job.total_items, result.job.rejected_lines) == (0, 35)
    kept = [one.line for one in place.ledger.rejected_lines(result.job.id)]
    assert (len(kept), kept) == (12, list(range(kept[0], kept[0] + 12)))
    assert sum(place.ledger.error_counts(result.job.id).values()) == 12
    estimate = dry_run(place.settings, place.store, source, SPEC, SubmitOptions(input_format=input_format))  # type: ignore[arg-type]
    assert sum(estimate.rejected.values()) == 35


@pytest.mark.parametrize("input_format", [*BAD, "parquet"])
def test_an_input_of_which_hardly_any_line_is_good_is_refused(
    place: Place, short_batches: None, soon_refused: None, input_format: str
) -> None:
    """Before it is read to its end: a small archive can hold billions of lines."""
    source = bad_input(place, input_format, 35)
    with pytest.raises(InputError, match="few are good") as caught:
        place.submit(source, input_format=input_format)
    assert caught.value.code is ErrorCode.INPUT_WRONG_FORMAT
    assert place.ledger.jobs() == []
    assert [info.key for info in place.store.list("jobs/")] == []
    with pytest.raises(InputError, match="few are good"):
        dry_run(place.settings, place.store, source, SPEC, SubmitOptions(input_format=input_format))  # type: ignore[arg-type]


def test_bad_lines_between_good_ones_are_no_fault(
    place: Place, short_batches: None, soon_refused: None
) -> None:
    source = place.write([b"{" if n % 8 else line(f"a{n}") for n in range(80)])
    assert place.submit(source).job.rejected_lines == 70


def line(example_id: object, text: str = "hello", **rest: object) -> bytes:
    return json.dumps({"example_id": example_id, "messages": [["user", "text", text]], **rest}).encode()


def test_a_file_becomes_a_job(place: Place) -> None:
    lines = [line(f"utt {n}", seed_note=n) for n in range(10)]
    source = place.write(lines)
    result = place.submit(source, name="nightly", priority=3, labels={"team": "a"})
    job = result.job
    assert (result.created, result.resumed, result.job.total_items, result.job.rejected_lines) == (
        True,
        False,
        10,
        0,
    )
    assert (job.state, job.total_items, job.total_shards, job.lines_read) == (JobState.READY, 10, 3, 10)
    assert (job.name, job.priority, job.labels, job.input_uri) == ("nightly", 3, {"team": "a"}, source)
    assert job.spec.model_revision == "r1"
    assert job.input_sha256 == hashlib.sha256(Path(source).read_bytes()).hexdigest()
    assert [info.key for info in place.store.list(f"jobs/{job.id}/")] == [
        f"jobs/{job.id}/input/{n:06d}.jsonl.zst" for n in range(3)
    ]
    assert [(item.index, item.example_id) for item in place.ledger.items(job.id)] == [
        (n, f"utt {n}") for n in range(10)
    ]
    payload = place.payload(job.id)
    assert [(one.index, one.line, one.example_id) for one in payload] == [
        (n, n + 1, f"utt {n}") for n in range(10)
    ]
    assert payload[0].messages == (Message("user", "text", "hello"),)


def test_the_same_file_with_the_same_spec_is_the_same_job(place: Place) -> None:
    source = place.write([line("a")])
    first = place.submit(source)
    again = place.submit(source)
    assert (again.job.id, again.created, again.resumed, again.job.total_items) == (
        first.job.id,
        False,
        False,
        1,
    )
    compressed = place.folder / "in.jsonl.gz"
    compressed.write_bytes(gzip.compress(line("a")))
    others = [
        place.submit(source, JobSpec("cloner", seed=1)),
        place.submit(source, idempotency_key="mine"),
        place.submit(str(compressed)),
        place.submit(place.write([line("b")])),
    ]
    assert len({first.job.id, *(other.job.id for other in others)}) == 5


def test_a_key_of_ones_own_never_names_two_inputs(place: Place) -> None:
    source = place.write([line("a")])
    first = place.submit(source, idempotency_key="mine")
    assert place.submit(source, idempotency_key="mine").job.id == first.job.id
    with pytest.raises(ServiceError) as other_input:
        place.submit(place.write([line("b")]), idempotency_key="mine")
    with pytest.raises(ServiceError) as other_spec:
        place.submit(place.write([line("a")]), JobSpec("cloner", seed=1), idempotency_key="mine")
    assert {other_input.value.code, other_spec.value.code} == {ErrorCode.LEDGER_STATE}
    assert place.submit(source, idempotency_key="mine").job.total_items == 1


def test_bad_lines_are_listed_and_left_out(place: Place, short_batches: None) -> None:
    lines = [
        line("a"),
        b"{",
        line("b", ""),
        line("a"),
        b"",
        line("c", "x" * 300),
        b"\xff",
        line("d", generation={"voice": "w"}),
    ]
    lines += [line("b"), *[line(f"more {n}") for n in range(20)], line("more 3"), line("d"), line("a")]
    result = place.submit(place.write(lines))
    assert (result.job.total_items, result.job.rejected_lines) == (23, 8)
    assert [(one.line, one.code, one.example_id) for one in place.ledger.rejected_lines(result.job.id)] == [
        (2, ErrorCode.INPUT_BAD_JSON, None),
        (3, ErrorCode.INPUT_EMPTY_TEXT, "b"),
        (4, ErrorCode.INPUT_DUPLICATE_ID, "a"),
        (6, ErrorCode.INPUT_TOO_LONG, "c"),
        (7, ErrorCode.INPUT_BAD_JSON, None),
        (8, ErrorCode.INPUT_UNKNOWN_VOICE, "d"),
        (30, ErrorCode.INPUT_DUPLICATE_ID, "more 3"),
        (32, ErrorCode.INPUT_DUPLICATE_ID, "a"),
    ]
    payload = place.payload(result.job.id)
    assert [one.index for one in payload] == list(range(23))
    assert payload[-1].example_id == "d"
    assert [item.example_id for item in place.ledger.items(result.job.id)] == [
        one.example_id for one in payload
    ]


def test_abort_leaves_nothing(place: Place, short_batches: None) -> None:
    source = place.write([*[line(n_id) for n_id in map(str, range(25))], line("24"), b"{"])
    with pytest.raises(InputError) as caught:
        place.submit(source, on_error="abort")
    assert caught.value.code is ErrorCode.INPUT_DUPLICATE_ID
    assert caught.value.message.startswith("Line 26: ")
    assert place.ledger.jobs() == []
    assert [info.key for info in place.store.list("")] == [IDENTITY_KEY]
    assert place.submit(source).job.total_items == 25


def test_a_file_without_a_good_line_is_a_failed_job(place: Place) -> None:
    for content in ([], [b"", b"  "], [b"{"]):
        job = place.submit(place.write(content)).job
        assert (job.state, job.state_reason) == (JobState.FAILED, ErrorCode.INPUT_NO_ITEMS)


def test_a_damaged_archive_leaves_nothing(place: Place, short_batches: None) -> None:
    path = place.folder / "in.gz"
    path.write_bytes(gzip.compress(b"\n".join(line(str(n)) for n in range(5000)))[:-20])
    with pytest.raises(InputError) as caught:
        place.submit(str(path))
    assert caught.value.code is ErrorCode.INPUT_UNREADABLE
    assert place.ledger.jobs() == []
    assert [info.key for info in place.store.list("")] == [IDENTITY_KEY]


@dataclass
class FailingLedger:
    """A ledger whose `stage` runs into trouble once, before or after it has committed."""

    ledger: Ledger
    at_call: int
    after_commit: bool
    calls: int = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        return getattr(self.ledger, name)

    def stage(
        self, job_id: str, shards: Sequence[NewShard], rejected: Sequence[RejectedLine], lines_read: int
    ) -> bool:
        self.calls += 1
        if self.calls == self.at_call and not self.after_commit:
            raise ServiceError(ErrorCode.LEDGER_UNREACHABLE, "The connection was lost.")
        staged = self.ledger.stage(job_id, shards, rejected, lines_read)
        if self.calls == self.at_call:
            raise ServiceError(ErrorCode.LEDGER_UNREACHABLE, "The connection was lost.")
        return staged


@pytest.mark.parametrize("after_commit", [False, True])
@pytest.mark.parametrize("at_call", [1, 2, 4])
def test_an_ingest_that_died_goes_on(
    place: Place, short_batches: None, at_call: int, after_commit: bool
) -> None:
    lines = [line(str(n)) if n % 7 else b"{" for n in range(33)]
    source = place.write(lines)
    broken = FailingLedger(place.ledger, at_call, after_commit)
    with pytest.raises(ServiceError):
        submit(place.settings, broken, place.store, source, SPEC)  # type: ignore[arg-type]
    (stopped,) = place.ledger.jobs()
    assert stopped.state is JobState.INGESTING

    result = place.submit(source)
    assert (result.job.id, result.job.state) == (stopped.id, JobState.READY)
    assert result.resumed == (stopped.lines_read > 0)
    assert (result.job.total_items, result.job.rejected_lines) == (28, 5)
    payload = place.payload(stopped.id)
    assert [(one.index, one.line) for one in payload] == list(enumerate([n + 1 for n in range(33) if n % 7]))
    assert [one.line for one in place.ledger.rejected_lines(stopped.id)] == [1, 8, 15, 22, 29]


def test_two_processes_may_submit_the_same_file_at_once(place: Place, short_batches: None) -> None:
    source = place.write([line(str(n % 90)) for n in range(100)])
    start, results = threading.Barrier(4), []

    def run() -> None:
        start.wait()
        results.append(place.submit(source))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert {
        (result.job.id, result.job.state, result.job.total_items, result.job.rejected_lines)
        for result in results
    } == {(results[0].job.id, JobState.READY, 90, 10)}
    assert [one.example_id for one in place.payload(results[0].job.id)] == [str(n) for n in range(90)]


def test_objects_of_a_dead_ingest_with_other_content_are_stepped_over(place: Place) -> None:
    source = place.write([line("a")])
    broken = FailingLedger(place.ledger, 1, after_commit=False)
    with pytest.raises(ServiceError):
        submit(place.settings, broken, place.store, source, SPEC)  # type: ignore[arg-type]
    (job,) = place.ledger.jobs()
    key = f"jobs/{job.id}/input/000000.jsonl.zst"
    place.store.delete(key)
    place.store.put(key, b"of an older version")
    place.submit(source)
    assert place.ledger.shard_inputs(job.id)[0][0] == f"jobs/{job.id}/input/000000.2.jsonl.zst"
    assert [one.example_id for one in place.payload(job.id)] == ["a"]


def test_reference_audio_goes_into_the_store_once(place: Place) -> None:
    voice = place.folder / "voices" / "a.wav"
    voice.parent.mkdir()
    soundfile.write(voice, np.zeros(1600, np.float32), 16_000)
    cloned = [
        ["user", "audio", "voices/a.wav"],
        ["user", "text", "hi"],
        ["assistant", "audio", "/not/read.wav"],
    ]
    lines = [json.dumps({"example_id": str(n), "messages": cloned}).encode() for n in range(6)]
    lines += [
        json.dumps(
            {"example_id": "x", "messages": [["user", "audio", "../../etc/passwd"], ["user", "text", "hi"]]}
        ).encode()
    ]
    result = place.submit(place.write(lines))
    assert (result.job.total_items, result.job.rejected_lines) == (6, 1)
    assert next(iter(place.ledger.rejected_lines(result.job.id))).code is ErrorCode.INPUT_AUDIO_FORBIDDEN
    (reference,) = place.store.list(f"jobs/{result.job.id}/references/")
    assert reference.key.endswith(f"/{hashlib.sha256(voice.read_bytes()).hexdigest()}.wav")
    for one in place.payload(result.job.id):
        assert [message.content for message in one.messages] == [reference.key, "hi"]


def test_what_stops_a_submit_before_it_begins(place: Place) -> None:
    source = place.write([line("a")])
    with pytest.raises(ModelError):
        place.submit(source, JobSpec("no-such-model"))
    with pytest.raises(InputError):
        place.submit(source, JobSpec("cloner", generation=Generation(voice="w")))
    with pytest.raises(ConfigError):
        place.submit(source, JobSpec("cloner", reading=Reading(limit=1, sample=1)))
    with pytest.raises(InputError):
        place.submit(str(place.folder / "missing.jsonl"))
    (place.folder / "file").touch()
    with pytest.raises(StoreError):
        submit(place.settings, place.ledger, FolderStore(place.folder / "file"), source, SPEC)
    assert place.ledger.jobs() == []
    with pytest.raises(NotFoundError):
        place.ledger.job("none")


def test_a_dry_run_says_what_a_submit_would_do(place: Place, short_batches: None) -> None:
    lines = [line(str(n), "x" * 100) for n in range(25)] + [line("3"), b"{", line("4", "")]
    source = place.write(lines)
    estimate = dry_run(place.settings, place.store, source, SPEC)
    assert estimate.items == 25
    assert estimate.rejected == {
        ErrorCode.INPUT_DUPLICATE_ID: 1,
        ErrorCode.INPUT_BAD_JSON: 1,
        ErrorCode.INPUT_EMPTY_TEXT: 1,
    }
    assert [one.line for one in estimate.rejected_lines] == [26, 27, 28]
    assert (estimate.audio_seconds, estimate.engine_seconds) == (250.0, 125.0)
    assert estimate.bytes == 250 * 16_000 * 2 + 25 * 44
    assert place.ledger.jobs() == []
    assert not place.store.root.exists()
    assert place.submit(source).job.total_items == estimate.items

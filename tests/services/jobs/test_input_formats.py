"""Jobs of inputs in every format, in whole or in part: frozen in the spec, gone on with after an
interruption, read again for a repair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import feather, parquet

from jobs.ingest import SubmitOptions, dry_run, submit
from jobs.ledger.records import JobSpec, JobState, NewShard, Reading, RejectedLine
from jobs.shard_file import read_shard
from jobs.spec import resolve
from pipelines.errors import ConfigError, ErrorCode, InputError, ServiceError
from tests.support.cli_kit import call, error_code
from tests.support.worker_rig import Rig

AUTO = SubmitOptions(input_format="auto")
SENTENCES = [f"sentence number {number}" for number in range(60)]


def write_as(folder: Path, name: str) -> Path:
    """The sentences as a file of the format that its name says."""
    path = folder / name
    lines: dict[str, list[str]] = {
        "in.txt": SENTENCES,
        "in.csv": ["id,text", *[f'u{n:02},"{text}"' for n, text in enumerate(SENTENCES)]],
        "in.tsv": ["id\ttext", *[f"u{n:02}\t{text}" for n, text in enumerate(SENTENCES)]],
        "in.jsonl": [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in SENTENCES],
        "batch.jsonl": [
            json.dumps(
                {
                    "custom_id": f"u{n}",
                    "method": "POST",
                    "url": "/v1/audio/speech",
                    "body": {"model": "fake", "input": text},
                }
            )
            for n, text in enumerate(SENTENCES)
        ],
        "text": [f"u{n:02} {text}" for n, text in enumerate(SENTENCES)],
        "rows.jsonl": [json.dumps({"id": n, "text": text, "n": n}) for n, text in enumerate(SENTENCES)],
        "cuts.jsonl": [
            json.dumps(
                {
                    "id": f"c{n}",
                    "supervisions": [{"id": f"u{n + m}", "text": SENTENCES[n + m]} for m in range(2)],
                }
            )
            for n in range(0, len(SENTENCES), 2)
        ],
    }
    table = pyarrow.table({"text": SENTENCES, "n": range(len(SENTENCES))})
    if name == "in.parquet":
        parquet.write_table(table, path)
    elif name == "in.arrow":
        feather.write_feather(table, path, chunksize=7)
    elif name == "dataset":
        datasets.Dataset(table).save_to_disk(path, num_shards=3)
    else:
        path.write_text("".join(line + "\n" for line in lines[name]))
    return path


def spoken(rig: Rig, job_id: str) -> dict[int, str]:
    """Line -> text of the items of a job."""
    inputs = sorted(rig.ledger.shard_inputs(job_id).values())
    return {
        line.line: line.messages[-1].content
        for key, sha256 in inputs
        for line in read_shard(rig.store, key, sha256)
    }  # type: ignore[misc]


@pytest.mark.parametrize(
    "name",
    [
        "in.txt",
        "in.csv",
        "in.tsv",
        "in.jsonl",
        "batch.jsonl",
        "text",
        "rows.jsonl",
        "cuts.jsonl",
        "in.parquet",
        "in.arrow",
        "dataset",
    ],
)
def test_every_format_becomes_the_same_speech(rig: Rig, name: str) -> None:
    path = write_as(rig.folder, name)
    options = SubmitOptions(input_format="kaldi") if name == "text" else AUTO
    estimate = dry_run(rig.settings, rig.store, str(path), JobSpec("fake"), options)
    result = submit(rig.settings, rig.ledger, rig.store, str(path), JobSpec("fake"), options=options)
    assert (result.job.total_items, result.job.rejected_lines, estimate.items) == (60, 0, 60)
    assert result.job.labels == {"input_format": estimate.input_format}
    assert list(spoken(rig, result.job.id).values()) == SENTENCES
    while not rig.ledger.job(result.job.id).state.final:
        rig.run_next()
    assert rig.ledger.job(result.job.id).state is JobState.COMPLETED
    # The same file is the same job, whether its format is said or recognized.
    said = SubmitOptions(input_format=estimate.input_format)
    assert not submit(rig.settings, rig.ledger, rig.store, str(path), JobSpec("fake"), options=said).created


def test_what_was_chosen_is_part_of_the_job(rig: Rig) -> None:
    path = str(write_as(rig.folder, "in.csv"))
    asked = [Reading(), Reading(limit=7), Reading(limit=8), Reading(sample=7)]
    specs = [JobSpec("fake", reading=reading) for reading in asked] + [
        JobSpec("fake", reading=Reading(sample=7), seed=1)
    ]
    made = [submit(rig.settings, rig.ledger, rig.store, path, spec, options=AUTO) for spec in specs]
    assert len({result.job.id for result in made}) == 5
    assert [result.job.total_items for result in made] == [60, 7, 8, 7, 7]
    again = [submit(rig.settings, rig.ledger, rig.store, path, spec, options=AUTO) for spec in specs]
    assert [(result.job.id, result.created) for result in again] == [
        (result.job.id, False) for result in made
    ]
    assert spoken(rig, made[3].job.id).keys() != spoken(rig, made[4].job.id).keys()
    assert len({result.job.spec_sha for result in made}) == 5
    # A spec that chooses nothing has the hash that it had before one could choose.
    assert (
        made[0].job.spec_sha
        == submit(rig.settings, rig.ledger, rig.store, path, JobSpec("fake"), options=AUTO).job.spec_sha
    )


def test_other_speakers_are_another_job(rig: Rig) -> None:
    path = write_as(rig.folder, "text")
    spec = JobSpec("fake", reading=Reading(voices={"*": "sine"}))
    options = SubmitOptions(input_format="kaldi")
    with pytest.raises(InputError, match="utt2spk"):
        submit(rig.settings, rig.ledger, rig.store, str(path), spec, options=options)
    (rig.folder / "utt2spk").write_text("".join(f"u{n:02} anna\n" for n in range(60)))
    first = submit(rig.settings, rig.ledger, rig.store, str(path), spec, options=options)
    assert (first.job.total_items, first.job.rejected_lines) == (60, 0)
    (rig.folder / "utt2spk").write_text("".join(f"u{n:02} ben\n" for n in range(60)))
    assert (
        submit(rig.settings, rig.ledger, rig.store, str(path), spec, options=options).job.id != first.job.id
    )


class _Broken:
    """A ledger that is lost once, at the second batch."""

    def __init__(self, rig: Rig) -> None:
        self._ledger = rig.ledger
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def stage(
        self, job_id: str, shards: Sequence[NewShard], rejected: Sequence[RejectedLine], lines_read: int
    ) -> bool:
        self._calls += 1
        if self._calls == 2:
            raise ServiceError(ErrorCode.LEDGER_UNREACHABLE, "The connection was lost.")
        return self._ledger.stage(job_id, shards, rejected, lines_read)


@pytest.mark.parametrize("name", ["in.txt", "in.csv", "in.parquet", "cuts.jsonl", "dataset"])
def test_a_sample_that_was_interrupted_goes_on(rig: Rig, name: str, short_batches: None) -> None:
    path = str(write_as(rig.folder, name))
    spec = JobSpec("fake", reading=Reading(sample=40), seed=3)
    whole = submit(
        rig.settings,
        rig.ledger,
        rig.store,
        path,
        spec,
        options=SubmitOptions(input_format="auto", idempotency_key="whole"),
    )
    with pytest.raises(ServiceError):
        submit(rig.settings, _Broken(rig), rig.store, path, spec, options=AUTO)  # type: ignore[arg-type]
    result = submit(rig.settings, rig.ledger, rig.store, path, spec, options=AUTO)
    assert (result.resumed, result.job.total_items) == (True, 40)
    assert spoken(rig, result.job.id) == spoken(rig, whole.job.id)


@pytest.mark.parametrize("name", ["in.csv", "in.parquet", "in.jsonl", "cuts.jsonl", "dataset"])
def test_lost_inputs_are_written_again_from_a_table(rig: Rig, name: str) -> None:
    path = write_as(rig.folder, name)
    spec = JobSpec("fake", reading=Reading(sample=20))
    job = submit(rig.settings, rig.ledger, rig.store, str(path), spec, options=AUTO).job
    before = spoken(rig, job.id)
    keys = [key for key, _ in rig.ledger.shard_inputs(job.id).values()]
    for key in keys:
        rig.store.delete(key)
    rig.submit_file(path, options=AUTO, lost=keys, reading=Reading(sample=20))
    assert spoken(rig, job.id) == before


@pytest.mark.parametrize(
    ("reading", "format", "words"),
    [
        (Reading(limit=1, sample=1), "csv", "both given"),
        (Reading(keep=["a"], drop=["b"]), "csv", "both given"),
        (Reading(columns={"words": "x"}), "csv", "no field 'words'"),
        (Reading(columns={"text": "x"}), "text", "not a table"),
        (Reading(voices={"anna": "sine"}), "dialogues", "no speakers"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_anything_is_read(
    rig: Rig, reading: Reading, format: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(JobSpec("fake", reading=reading), format)


def test_the_voice_of_a_speaker_is_one_of_the_models(rig: Rig) -> None:
    with pytest.raises(InputError, match="nobody"):
        resolve(JobSpec("fake", reading=Reading(voices={"anna": "nobody"})), "csv")


def test_the_command_reads_a_table(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("clip,sentence\na,Good evening.\nb,Good night.\nc\nd,Bye.\n")
    options = ("in.csv", "--column", "text=sentence", "--column", "id=clip", "--qa", "off")
    checked = call(tmp_path, "run", *options, "--dry-run", "--json")
    view = json.loads(checked.stdout)
    assert (checked.returncode, view["items"], view["input_format"]) == (1, 3, "csv")
    assert [line["line"] for line in view["rejected_lines"]] == [4]
    assert not (tmp_path / "out").exists()
    made = call(tmp_path, "run", *options, "--limit", "2", "--json")
    assert (made.returncode, json.loads(made.stdout)["items"]["done"]) == (0, 2)
    assert "The input is read as CSV." in made.stderr
    listed = call(tmp_path, "items", json.loads(made.stdout)["job"], "--out", "out", "--json")
    assert [json.loads(line)["example_id"] for line in listed.stdout.splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "code"),
    [(("--column", "text"), 2), (("--voice-for", "=heart"), 2), (("--format", "openai-batch"), 2)],
)
def test_words_that_are_no_pair(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    (tmp_path / "in.csv").write_text("text\nHi\n")
    assert call(tmp_path, "submit", "in.csv", "--dry-run", *options).returncode == code


def test_a_wrong_file_says_what_it_looks_like(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("Good evening.\n")
    done = call(tmp_path, "run", "in.jsonl", "--json")
    assert (done.returncode, error_code(done)) == (4, "input.wrong_format")
    assert "plain text" in done.stderr
    assert not (tmp_path / "out" / "jobs").exists()

"""What Python has instead of a file becomes the same file each time; the package costs no model library."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from lhotse import CutSet, MonoCut, SupervisionSegment, SupervisionSet

import nightjar
from jobs.job_options import SubmitOptions, checked_generation, checked_options, job_of
from jobs.ledger.records import JobSpec, Reading
from nightjar.inputs import written_input
from nightjar.job import Job
from pipelines.errors import ConfigError, ErrorCode, InputError, NightjarError, NotFoundError
from pipelines.request import Generation

COSTLY = ("torch", "vllm", "celery", "transformers", "sqlalchemy", "numpy", "datasets", "lhotse")


def job_asked(options: Any) -> tuple[JobSpec, SubmitOptions]:
    return job_of(checked_options(options))


@pytest.mark.parametrize(
    ("code", "costly"),
    [
        ("import nightjar; dir(nightjar)", COSTLY),
        (
            "import nightjar; nightjar.run, nightjar.submit, nightjar.open_model",
            ("torch", "vllm", "celery", "datasets", "lhotse"),
        ),
    ],
)
def test_importing_nightjar_imports_no_model_library(code: str, costly: tuple[str, ...]) -> None:
    code += f"; import sys; print([name for name in {costly!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_has_what_it_says() -> None:
    assert [name for name in nightjar.__all__ if getattr(nightjar, name) is None] == []
    with pytest.raises(AttributeError, match="nothing"):
        _ = nightjar.nothing  # type: ignore[attr-defined]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(line: dict[str, Any]) -> tuple[str, str]:
    return line["example_id"], line["messages"][-1][2]


def test_records_of_every_kind(tmp_path: Path) -> None:
    dialogue = {
        "example_id": "d",
        "messages": [["user", "audio", "voices/anna.wav"], ["user", "text", "four"]],
        "generation": {"seed": 3},
    }
    records = [
        "one",
        {"id": 7, "text": "two"},
        {"messages": [{"role": "user", "content": "three"}]},
        dialogue,
    ]
    supervision = SupervisionSegment("sup", "rec", 0.0, 1.0, text="five", speaker="anna")
    path = written_input([*records, supervision], JobSpec("m"), tmp_path)
    lines = read(path)
    assert [text_of(line) for line in lines] == [
        ("line-1", "one"),
        ("7", "two"),
        ("line-3", "three"),
        ("d", "four"),
        ("sup", "five"),
    ]
    assert lines[3]["messages"][0][2] == str(Path.cwd() / "voices/anna.wav")
    assert lines[3]["generation"] == {"seed": 3}
    assert written_input(iter([*records, supervision]), JobSpec("m"), tmp_path) == path
    assert written_input(records, JobSpec("m"), tmp_path) != path
    assert len(list(path.parent.iterdir())) == 2


def test_an_id_is_an_example_id(tmp_path: Path) -> None:
    messages = [["user", "text", "one"]]
    chat = [{"role": "user", "content": "two"}]
    records = [
        {"id": "a", "messages": messages},
        {"id": 5, "messages": messages},
        {"id": "b", "example_id": "b", "messages": chat},
    ]
    assert [line["example_id"] for line in read(written_input(records, JobSpec("m"), tmp_path))] == [
        "a",
        "5",
        "b",
    ]
    for kind in (messages, chat):
        with pytest.raises(InputError, match="Record 1: `example_id` and `id` differ: 'b' and 'a'"):
            written_input([{"id": "a", "example_id": "b", "messages": kind}], JobSpec("m"), tmp_path)


def test_supervisions_and_cuts_of_lhotse(tmp_path: Path) -> None:
    segments = [
        SupervisionSegment(f"s{n}", "rec", 0.0, 1.0, text=f"text {n}", speaker=("anna", "ben")[n % 2])
        for n in range(4)
    ]
    voices = JobSpec("m", reading=Reading(voices={"anna": "heart", "*": "sky"}))
    path = written_input(SupervisionSet.from_segments(segments), voices, tmp_path)
    assert [line["generation"]["voice"] for line in read(path)] == ["heart", "sky"] * 2
    cuts = CutSet.from_cuts([MonoCut("c", 0.0, 2.0, 0, supervisions=segments)])
    own = [{key: value for key, value in line.items() if key != "cut"} for line in read(path)]
    of_cuts = read(written_input(cuts, voices, tmp_path))
    assert [line.pop("cut")["id"] for line in of_cuts] == ["c"] * 4
    assert of_cuts == own
    assert own[1]["supervision"] == {"recording_id": "rec", "start": 0.0, "duration": 1.0, "channel": 0}
    assert [line["speaker"] for line in own] == ["anna", "ben"] * 2


def test_a_dataset_of_hugging_face_whose_audio_is_left_alone(tmp_path: Path) -> None:
    table = {"sentence": ["one", "two"], "audio": [{"bytes": b"no audio", "path": None}] * 2}
    dataset = datasets.Dataset.from_dict(table).cast_column("audio", datasets.Audio())
    assert [text_of(line) for line in read(written_input(dataset, JobSpec("m"), tmp_path))] == [
        ("line-1", "one"),
        ("line-2", "two"),
    ]
    chats = datasets.Dataset.from_dict({"messages": [[{"role": "user", "content": "hi"}]]})
    assert [text_of(line) for line in read(written_input(chats, JobSpec("m"), tmp_path))] == [
        ("line-1", "hi")
    ]
    with pytest.raises(InputError, match="no column 'words'"):
        written_input(dataset, JobSpec("m", reading=Reading(columns={"text": "words"})), tmp_path)


def test_a_limit_takes_no_more_of_an_endless_iterable(tmp_path: Path) -> None:
    path = written_input(
        (f"text {number}" for number in itertools.count()), JobSpec("m", reading=Reading(limit=3)), tmp_path
    )
    assert len(read(path)) == 3


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (7, "Record 2: A value of type int is not a text"),
        ({"words": "x"}, "Record 2: The input has no column `text`"),
        ({"text": 1.5}, "Record 2: The column 'text' contains float, not text"),
        ({"messages": [{"role": "user"}]}, "Record 2: "),
        ({"messages": [["user", "text", object()]]}, "cannot be written"),
        ({"messages": [{"role": "user", "content": "x"}], "more": object()}, "Record 2 cannot be written"),
        ({"messages": 5}, "Record 2: `messages` is not a list of messages"),
        ({"messages": "hello"}, "Record 2: `messages` is not a list of messages"),
        ({"messages": [1, 2]}, "Record 2: `messages` is not a list of messages"),
        ("\ud800", "Record 2 cannot be written"),
        (SimpleNamespace(text=None), "is not a text"),
    ],
)
def test_a_record_that_is_none_is_named_and_leaves_nothing(tmp_path: Path, record: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        written_input(["good", record], JobSpec("m"), tmp_path)
    assert list((tmp_path / "inputs").iterdir()) == []


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ({"text": "Good evening."}, "A dict is not a list of records"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["one"]})}),
            "A DatasetDict is not a list.*one of its splits",
        ),
        (5, "A int is not a list of records"),
    ],
)
def test_names_of_splits_and_columns_are_not_taken_for_texts(
    tmp_path: Path, records: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        written_input(records, JobSpec("m"), tmp_path)
    assert caught.value.code is ErrorCode.INPUT_WRONG_FORMAT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"colour": "red"}, "colour"),
        ({"generation": {"warmth": 3}}, "warmth"),
        ({"generation": {"temperature": "hot"}}, "temperature"),
        ({"qa_set": ["no pair"]}, "no pair"),
        (
            {"qa_set": "bounds.pause.high=2"},
            "The option qa_set is 'bounds.pause.high=2': Input should be a list",
        ),
        ({"voic": "heart"}, "Did you mean 'voice'"),
        ({"generation": {"temprature": 1}}, "temprature"),
        ({"labels": "corpus"}, "The option labels is 'corpus'"),
        ({"columns": "sentence"}, "The option columns is 'sentence'"),
        ({"voice_of": "heart"}, "The option voice_of is 'heart'"),
        ({"voice_for": "heart"}, "The option voice_for is 'heart'"),
        ({"qa": "loose"}, "'off', 'basic' or 'strict'"),
        ({"on_error": "stop"}, "'skip' or 'abort'"),
        ({"input_format": "xlsx"}, "input_format is 'xlsx'"),
        ({"voice": 7}, "voice is 7"),
        ({"model": 3}, "The option model is 3"),
        ({"idempotency_key": " "}, "idempotency_key"),
        ({"voice_of": {"robot": "heart"}}, "'user' or 'assistant'"),
        ({"labels": {"corpus": 1}}, "labels.corpus is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"limit": 0}, "limit is 0"),
        ({"sample_rate": 7_999}, "sample_rate is 7999"),
        ({"sample_rate": 48_001}, "sample_rate is 48001"),
        ({"format": "mp4"}, "format is 'mp4'"),
        ({"speak": "answer"}, "speak is 'answer'"),
        ({"limit": 2.5}, "limit is 2.5"),
        ({"priority": 101}, "priority is 101"),
        ({"weight": 0}, "weight is 0"),
        ({"max_attempts": 101}, "max_attempts is 101"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"error_budget": 7}, "error_budget is 7"),
        ({"idempotency_key": ""}, "idempotency_key is ''"),
    ],
)
def test_options_that_do_not_exist_or_cannot_be_used_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        job_asked(options)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: nightjar.run("Good evening.", out="here"),
            r"There is no file 'Good evening.'. .*put it into a list: nightjar.run",
        ),
        (lambda: nightjar.submit("Good evening.", out="here"), "There is no file"),
        (lambda: nightjar.run(["Hi."], out=5), "The argument `out` is 5"),  # type: ignore[arg-type]
        (lambda: nightjar.run(["Hi."], gpu=[0]), r"The argument `gpu` is \[0\]"),  # type: ignore[arg-type]
        (lambda: nightjar.find_job(5), "The argument `job` is 5"),  # type: ignore[arg-type]
        (lambda: nightjar.find_job("01", out=5), "The argument `out` is 5"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nightjar.NightjarError, match=words):
        call()
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_numbers() -> None:
    options: Any = {"seed": np.int64(3), "limit": np.int32(2), "generation": {"temperature": np.float32(0.5)}}
    assert job_asked(options) == job_asked({"seed": 3, "limit": 2, "generation": {"temperature": 0.5}})
    assert checked_generation({"temperature": np.float64(0.5)}) == Generation(temperature=0.5)


def test_none_is_the_default_and_options_may_be_paths_and_mappings_of_any_kind(tmp_path: Path) -> None:
    nothing: Any = dict.fromkeys(nightjar.JobOptions.__annotations__)
    assert job_asked(nothing) == job_asked({})
    options: nightjar.JobOptions = {
        "model": tmp_path,
        "voice_of": MappingProxyType({"assistant": "sky"}),
        "priority": -100,
    }
    spec, submitted = job_asked(options)
    assert (spec.model, submitted.priority) == (str(tmp_path), -100)
    assert spec.generation.roles == {"assistant": Generation(voice="sky")}


def test_a_job_is_not_found_where_there_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no ledger") as caught:
        nightjar.find_job("01m8", out=tmp_path)
    assert "--out" in caught.value.advice
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.__new__(Job)
    for name, call in (("datasets", job.to_datasets), ("lhotse", job.to_lhotse)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=f"needs the library {name}") as caught:
            call()
        assert caught.value.code is ErrorCode.CONFIG_MISSING_LIBRARY


def test_a_folder_that_cannot_be_written_has_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NightjarError) as caught:
        nightjar.run(["Good evening."], out=tmp_path / "file", quiet=True)
    assert caught.value.code is ErrorCode.STORE_FORBIDDEN
    assert "`out`" in caught.value.advice


@pytest.mark.parametrize("where", ["s3://voices/anna.wav", "S3://voices/anna.wav"])
def test_audio_in_a_bucket_keeps_its_address(tmp_path: Path, where: str) -> None:
    dialogue = {"messages": [["user", "audio", where], ["user", "text", "one"]]}
    row = {"text": "three", "reference_audio": where}
    for record in (dialogue, row):
        (line,) = read(written_input([record], JobSpec("m"), tmp_path))
        assert line["messages"][0] == ["user", "audio", where]
    (line,) = read(written_input([{"text": "three", "reference_audio": "anna.wav"}], JobSpec("m"), tmp_path))
    assert line["messages"][0] == ["user", "audio", str(Path.cwd() / "anna.wav")]


def test_messages_of_two_kinds_are_left_to_the_check_of_lines(tmp_path: Path) -> None:
    odd = {"role": "user", "content": "Hello.", "name": "Ann"}
    path = written_input([{"messages": [["user", "audio", "/a.wav"], odd]}], JobSpec("m"), tmp_path)
    assert read(path)[0]["messages"] == [["user", "audio", "/a.wav"], odd]

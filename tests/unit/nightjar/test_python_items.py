"""An item in Python says what exports say of it, in this process and in others."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

import nightjar
from jobs.export.items import audio_items, item_metadata
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec
from jobs.settings import Settings
from jobs.store import FolderStore
from nightjar.job import Job
from pipelines.errors import ConfigError
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities, Generation
from tests.support.export_kit import finished_job
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.serving_kit import wav

LINES = [
    {
        "example_id": "own",
        "messages": [["user", "audio", "own.wav"], ["user", "text", "By its own recording."]],
    },
    {"example_id": "named", "messages": [["user", "text", "By name."]], "generation": {"voice": "heart"}},
    {"example_id": "talk", "messages": [["user", "text", "Who is it?"], ["assistant", "text", "It is me."]]},
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    card = dataclasses.replace(
        fake_card("clones"), capabilities=Capabilities(voices=("heart", "ben"), cloning=True)
    )
    forget = register_pipeline("clones", card, lambda **_: FakePipeline())
    (tmp_path / "own.wav").write_bytes(wav(1.0))
    spec = JobSpec("clones", speak="all", generation=Generation(roles={"assistant": Generation(voice="ben")}))
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES, spec)
    settings = Settings(home=tmp_path, database_url=SecretStr(f"sqlite:///{tmp_path}/ledger.sqlite"))
    job = Job(made.job_id, settings)
    yield job
    job.close()
    made.ledger.close()
    forget()


def test_text_and_speaker_are_those_of_exports(job: Job, tmp_path: Path) -> None:
    with closing(Ledger(f"sqlite:///{tmp_path}/ledger.sqlite")) as ledger:
        found = list(audio_items(ledger, FolderStore(tmp_path / "store"), job.id))
    known = {item.id: item_metadata(job.status.job, item) for item in found}
    items = {item.id: item for item in job.items()}
    assert {name: (item.text, item.speaker) for name, item in items.items()} == {
        name: (metadata.text, metadata.speaker) for name, metadata in known.items()
    }
    assert items["own"].speaker.startswith("ref-")
    assert [items[name].speaker for name in ("named", "talk:turn0", "talk:turn1")] == [
        "heart",
        "clones",
        "ben",
    ]
    assert items["talk:turn1"].text == "It is me."


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda job: list(job.items(state="dnoe")), "There is no state 'dnoe'. Did you mean 'done'"),
        (lambda job: list(job.items(state=["done"])), "There is no state"),
        (lambda job: list(job.items(limit="3")), "The argument `limit` is '3'"),
        (lambda job: list(job.items(where=5)), "The argument `where` is 5"),
        (lambda job: job.wait("5"), "The argument `timeout_seconds` is '5'"),
        (lambda job: job.delete(yes="no"), "The argument `yes` is 'no'"),
        (lambda job: job.report(5), "The argument `to` is 5"),
        (lambda job: job.export("manifest", 5), "The argument `to` is 5"),
        (
            lambda job: job.export("manifest", "x", absolut=True),
            "There is no option 'absolut'. Did you mean 'absolute'",
        ),
        (lambda job: job.export("manifest", "x", splits="train=0.5"), "add up"),
        (lambda job: job.export("manifest", "x", splits=["a"]), "splits of the export is .'a'.*type is str"),
        (lambda job: job.export("manifest", "x", unique="yes"), "unique of the export is 'yes'"),
        (
            lambda job: job.export("webdataset", "x", part_mb=0),
            "part_mb of the export is 0.*type is int, above 0",
        ),
        (lambda job: job.export("webdataset", "x", part_mb=1.5), "part_mb of the export is 1.5"),
        (lambda job: job.export("webdataset", "x", license=3), "license of the export is 3"),
        (
            lambda job: job.export("webdataset", "x", sample_rate="8000"),
            "sample_rate of the export is '8000'",
        ),
        (lambda job: job.export(5, "x"), "The argument `format` is 5"),
        (lambda job: nightjar.export(job, "manifest", "x"), "The argument `jobs` is Item"),
        (lambda job: nightjar.decode("x", "y", model=5), "`model` is 5"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type_are_one_sentence(
    job: Job, tmp_path: Path, call: Callable[[Job], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        call(job)
    assert len(list(job.items(limit=np.int64(2)))) == 2  # type: ignore[arg-type]
    assert job.wait(np.float32(1)).done  # type: ignore[arg-type]
    assert job.export("webdataset", tmp_path / "to", part_mb=np.int64(1), license=None).is_dir()


def test_splits_are_written_as_in_the_command(job: Job, tmp_path: Path) -> None:
    to = job.export("nemo", tmp_path / "to", splits="dev=1", audio_root=str(tmp_path / "root"))
    assert [path.name for path in to.glob("dev*")]


def test_an_item_as_a_dict_is_what_it_says(job: Job) -> None:
    item = next(job.items())
    known = dataclasses.asdict(item)
    assert known["id"] == item.id == "own"
    assert json.loads(json.dumps(known)) == known
    assert not [name for name in known if name.startswith("_")]


IN_ANOTHER_PROCESS = """
import pickle, sys
job, items = pickle.load(sys.stdin.buffer)
for item in (*items, *job.items()):
    print(item.id, item.speaker, len(item.audio.samples), item.text)
print(job.done, len(job), job.state)
"""


def test_jobs_and_items_work_after_pickling_in_another_process(job: Job, tmp_path: Path) -> None:
    items = list(job.items())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=pickle.dumps((job, items)),
        capture_output=True,
        check=True,
        cwd=elsewhere,
    )
    said = [f"{item.id} {item.speaker} {len(item.audio.samples)} {item.text}" for item in items]
    assert done.stdout.decode().splitlines() == [*said, *said, "True 4 completed"]


def test_a_handle_of_a_relative_home_leads_to_its_ledger_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job("01", Settings(home=Path("out")))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickle.dumps(job))._settings.home == tmp_path / "out"

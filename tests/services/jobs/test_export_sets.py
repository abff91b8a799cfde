"""Several jobs as one dataset: one index, ids that are unique, duplicates, splits, what formats need equal, the
choice of jobs, and the dataset card."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import soundfile
from click.testing import CliRunner

import nightjar
from jobs.checks import PRESETS
from jobs.cli import cli
from jobs.export import StoredJob, export_jobs, parse_splits
from jobs.export.card import Hours
from jobs.export.items import Part
from jobs.export.job_set import Repeats
from jobs.ledger.records import JobSpec
from jobs.recent_jobs import JobChoice
from jobs.store import FolderStore
from jobs.where import parse_where
from pipelines.errors import ConfigError, ErrorCode, NotFoundError
from pipelines.registry import register_pipeline
from pipelines.request import Generation
from tests.support.export_kit import Finished, datasets_library, finished_job
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline

#: Of each job: an id that all have, one of its own, and two whose texts are in other jobs too.
SPECS = (
    JobSpec("hibari", generation=Generation(voice="heart"), quality=PRESETS["basic"]),
    JobSpec("hibari", generation=Generation(voice="heart")),
    JobSpec("fake", generation=Generation(voice="other"), seed=3),
)


def lines_of(number: int) -> list[dict[str, Any]]:
    texts = {
        "same": f"Only {number}",
        f"own-{number}": f"Mine {number}",
        f"a-{number}": "Twice",
        "fails": "x",
    }
    own = {"same": 'Only "one"', f"b-{number}": "Thrice", f"c-{number}": "Twice"} if number == 1 else {}
    return [
        {"example_id": name, "messages": [["user", "text", text]], "kind": number}
        for name, text in (texts | own).items()
    ]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Finished]]:
    """Three jobs of two models, each with a ledger and a store of its own."""
    card = fake_card()
    card = replace(card, capabilities=replace(card.capabilities, voices=("other",)))
    forget = register_pipeline("fake", card, FakePipeline)
    made = []
    for number, spec in enumerate(SPECS):
        folder = tmp_path / f"job-{number}"
        folder.mkdir()
        made.append(finished_job(folder, FolderStore(folder / "store"), lines_of(number), spec))
    yield made
    forget()
    for one in made:
        one.ledger.close()


def stored(jobs: Sequence[Finished]) -> list[StoredJob]:
    return [StoredJob(one.ledger, one.store, one.ledger.job(one.job_id)) for one in jobs]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in gzip.decompress((folder / "manifest.jsonl.gz").read_bytes()).splitlines()
    ]


def library(name: str) -> Any:
    return pytest.importorskip(
        name, reason=f"NOT READ BACK: the library {name} is missing; it comes with the extra `dev`."
    )


class StoppedError(Exception):
    pass


def stopped_after(parts: int) -> Any:
    seen: list[Part] = []

    def on_part(part: Part) -> None:
        seen.append(part)
        if len(seen) == parts:
            raise StoppedError

    return on_part


@pytest.mark.parametrize("format", ["webdataset", "parquet", "shar", "audiofolder"])
def test_a_stopped_set_goes_on_to_the_same_bytes(three: list[Finished], tmp_path: Path, format: str) -> None:
    if format in ("parquet", "audiofolder"):
        library("pyarrow")
    whole, again = tmp_path / "whole", tmp_path / "again"
    options: dict[str, Any] = {"part_bytes": 100_000, "splits": parse_splits("train=0.6,dev=0.4")}
    report = export_jobs(stored(three), format, str(whole), **options)
    assert (report.items, report.left_out, report.duplicates) == (11, 3, 2)
    # In another order, and stopped in the middle.
    shuffled = random.Random(3).sample(stored(three), 3)
    with pytest.raises(StoppedError):
        export_jobs(shuffled, format, str(again), on_part=stopped_after(3), **options)
    assert not (again / "export.json").exists()
    export_jobs(shuffled, format, str(again), **options)
    assert contents(again) == contents(whole)


def test_webdataset_of_three_jobs(three: list[Finished], tmp_path: Path) -> None:
    webdataset = library("webdataset")
    export_jobs(stored(three), "webdataset", str(tmp_path / "to"), part_bytes=100_000)
    tars = sorted(map(str, (tmp_path / "to" / "train").iterdir()))
    samples = list(webdataset.WebDataset(tars, shardshuffle=False))
    audio = [data for one in three for data in one.audio.values()]
    assert [sample["wav"] for sample in samples] == audio
    keys = [sample["__key__"] for sample in samples]
    assert keys == sorted(set(keys))
    told = [json.loads(sample["json"]) for sample in samples]
    ids = [one.job_id for one in three]
    assert [ids.index(one["job"]) for one in told] == [0] * 3 + [1] * 5 + [2] * 3
    # An id that several jobs have begins with that of its job.
    assert [one["example_id"] for one in told if one["example_id"].endswith("same")] == [
        f"{own}-same" for own in ids
    ]
    assert told[1]["example_id"] == "own-0"
    assert [one["index"] for one in told] == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12]
    # One job has checks, so all examples have the same keys.
    assert len({tuple(one) for one in told}) == 1
    assert (told[0]["scores"]["clipped"], told[5]["scores"]["clipped"]) == (0.0, None)


def test_cuts_of_three_jobs(three: list[Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lhotse = library("lhotse")
    export_jobs(stored(three), "lhotse", str(tmp_path / "to"))
    monkeypatch.chdir(tmp_path / "to" / "train")
    cuts = list(lhotse.CutSet.from_file("cuts.jsonl.gz"))
    assert len({cut.id for cut in cuts}) == 11
    for cut, data in zip(cuts, [data for one in three for data in one.audio.values()], strict=True):
        assert cut.load_audio().shape == (1, soundfile.info(io.BytesIO(data)).frames)


def test_tables_of_three_jobs(three: list[Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = datasets_library(monkeypatch)
    export_jobs(stored(three), "parquet", str(tmp_path / "to"), part_bytes=100_000)
    made = datasets.load_dataset(str(tmp_path / "to"), split="train", cache_dir=str(tmp_path / "cache"))
    found = made.cast_column("audio", datasets.Audio(decode=False, sampling_rate=24_000))
    audio = [data for one in three for data in one.audio.values()]
    assert [row["audio"]["bytes"] for row in found] == audio
    assert [row["job"] for row in found] == [one.job_id for one in three for _ in one.audio]
    assert [row["metadata"]["kind"] for row in found] == [0] * 3 + [1] * 5 + [2] * 3
    assert made.features["audio"].sampling_rate == 24_000


def test_an_id_that_looks_like_one_of_a_set_stays_unique(tmp_path: Path) -> None:
    """As in a dataset of a set that was submitted again."""
    first = finished_job(tmp_path, FolderStore(tmp_path / "store"), lines_of(0))
    lines = [{"example_id": f"{first.job_id}-same", "messages": [["user", "text", "Again"]]}, *lines_of(0)]
    (tmp_path / "b").mkdir()
    other = finished_job(tmp_path / "b", first.store, lines)
    to = tmp_path / "to.jsonl"
    assert export_jobs(stored([first, other]), "espnet", str(to)).items == 7
    ids = [json.loads(line)["example_id"] for line in to.read_text().splitlines()]
    assert len(set(ids)) == 7
    assert f"{other.job_id}-{first.job_id}-same" in ids
    for one in (first, other):
        one.ledger.close()


def test_splits_are_those_of_each_job(three: list[Finished], tmp_path: Path) -> None:
    splits = parse_splits("train=0.5,dev=0.5")
    found: dict[str, set[tuple[str, str]]] = {}
    for name, jobs in {"set": three, **{one.job_id: [one] for one in three}}.items():
        export_jobs(stored(jobs), "manifest", str(tmp_path / name), splits=splits)
        found[name] = {
            (split, json.loads(line)["sha256"] + json.loads(line)["text"])
            for split in splits.bounds
            if (file := tmp_path / name / f"{split}.jsonl").exists()
            for line in file.read_text().splitlines()
        }
    assert found.pop("set") == set.union(*found.values())


def test_duplicates_are_left_out_on_request(three: list[Finished], tmp_path: Path) -> None:
    to = tmp_path / "to"
    report = export_jobs(stored(three), "webdataset", str(to), unique=True)
    # "Twice" in the voice `heart` is in the first job, and twice in the second.
    assert (report.items, report.duplicates, str(report.reasons)) == (9, 2, "3 without audio, 2 duplicates")
    assert sum(one["text"] == "Twice" for one in manifest(to)) == 2
    assert json.loads((to / "export.json").read_text())["reasons"]["duplicates"] == 2
    lines = tmp_path / "to.jsonl"
    assert export_jobs(stored(three), "nemo", str(lines), unique=True).items == 9
    assert [json.loads(line)["text"] for line in lines.read_text().splitlines()] == [
        one["text"] for one in manifest(to)
    ]
    # Another set of the same jobs is another export.
    with pytest.raises(ConfigError, match="contains another export"):
        export_jobs(stored(three), "webdataset", str(to))


def test_a_dialogue_is_a_duplicate_as_a_whole(tmp_path: Path) -> None:
    lines = [
        {"example_id": name, "messages": [["user", "text", asked], ["assistant", "text", "Yes."]]}
        for name, asked in (("a", "Here?"), ("b", "There?"), ("c", "Here?"))
    ]
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), lines, JobSpec("hibari", speak="all"))
    to = tmp_path / "to.jsonl"
    report = export_jobs(stored([made]), "espnet", str(to), unique=True)
    assert (report.items, report.duplicates) == (4, 2)
    assert [json.loads(line)["example_id"] for line in to.read_text().splitlines()] == ["a", "b"]
    turns = export_jobs(stored([made]), "nemo", str(to), unique=True)
    assert (turns.items, turns.duplicates) == (3, 3)
    made.ledger.close()


def test_what_a_format_needs_equal_is_refused_by_name(tmp_path: Path) -> None:
    jobs = []
    for name, rate, audio_format in (("a", 24_000, "wav"), ("b", 16_000, "flac")):
        (tmp_path / name).mkdir()
        spec, store = JobSpec("hibari", format=audio_format), FolderStore(tmp_path / name / "store")
        jobs.append(finished_job(tmp_path / name, store, lines_of(0)[:2], spec, sample_rate=rate))
    both = [one.job_id for one in jobs]
    with pytest.raises(ConfigError) as caught:
        export_jobs(stored(jobs), "webdataset", str(tmp_path / "to"))
    assert caught.value.message == (
        f"The format webdataset needs one audio format, and these jobs have several: wav in {both[0]}, flac in {both[1]}."
    )
    assert caught.value.advice == "Add --audio-format flac, or export the jobs to several datasets."
    with pytest.raises(ConfigError, match="needs one sample rate") as caught:
        export_jobs(stored(jobs), "kaldi", str(tmp_path / "to"))
    assert "--sample-rate 16000 and --audio-root" in caught.value.advice
    report = export_jobs(
        stored(jobs), "webdataset", str(tmp_path / "to"), audio_format="wav", sample_rate=16_000
    )
    assert report.items == 4
    assert {(one["sample_rate"], one["key"][-3:]) for one in manifest(tmp_path / "to")} == {
        (24_000, "wav"),
        (16_000, "lac"),
    }
    for one in jobs:
        one.ledger.close()


def test_the_card_of_a_set(three: list[Finished], tmp_path: Path) -> None:
    yaml = library("yaml")
    to = tmp_path / "to"
    export_jobs(stored(three), "kaldi", str(to), license="cc-by-4.0")
    _, header, body = (to / "README.md").read_text().split("---\n", 2)
    known = yaml.safe_load(header)
    assert (known["license"], known["size_categories"], known.get("configs")) == ("cc-by-4.0", ["n<1K"], None)
    for told in (
        "11 examples, 0.00 hours",
        *(
            f"| {one.job_id} | `A night` | `{model}` |"
            for one, model in zip(three, ("hibari", "hibari", "fake"), strict=True)
        ),
        "| `heart` | 0.00 |\n| `other` | 0.00 |",
        "| `clipped` |  | 0.001 |",
        "3 items of the jobs have no audio and are left out (3 synth.no_eos).",
        "Duplicates, with the text and the voice of an earlier example: 2, kept.",
        "| `Twice` |",
    ):
        assert told in body, told


def test_a_card_says_what_a_choice_left_out(three: list[Finished], tmp_path: Path) -> None:
    to = tmp_path / "to"
    export_jobs(stored(three), "webdataset", str(to), unique=True, where=parse_where("seconds > 0.5"))
    card = (to / "README.md").read_text()
    assert "The filter `seconds > 0.5` left out: " in card
    assert "of an earlier example: 2, left out." in card


def test_a_text_cannot_write_into_the_card(tmp_path: Path) -> None:
    text = "| `x` |\n---\n# ![a](http://b) <script>"
    line = {"example_id": "a`|\n#", "messages": [["user", "text", text]]}
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), [line])
    export_jobs(stored([made]), "lhotse", str(tmp_path / "to"))
    card = (tmp_path / "to" / "README.md").read_text()
    assert "| `a'\\| #` | `heart` | 1.00 | `\\| 'x' \\| --- # ![a](http://b) <script>` |" in card
    made.ledger.close()


def test_any_number_of_names_and_keys_is_counted_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.export.card.ROWS", 3)
    hours, repeats = Hours(), Repeats()
    for number in range(1000):
        hours.add(f'name "{number % 100}"', number % 100)
        repeats.add(["text", number % 400], number)
    assert hours.longest() == [(f'name "{number}"', 10 * number) for number in (99, 98, 97)]
    assert hours.names == 100
    assert sorted(index for index, _ in repeats.later()) == list(range(400, 1000))


def test_jobs_are_chosen_by_name_schedule_and_dates(three: list[Finished]) -> None:
    job = three[0].ledger.job(three[0].job_id)
    night = {"schedule": "news", "night": "2026-11-20"}
    nightly = replace(job, labels=night)
    assert JobChoice(name="A *").has(job)
    assert not JobChoice(name="a *").has(job)
    assert [JobChoice(schedule="news").has(one) for one in (job, nightly)] == [False, True]
    assert [JobChoice(since="2026-11-20", until="2026-11-20").has(one) for one in (job, nightly)] == [
        False,
        True,
    ]
    assert not JobChoice(until="2026-11-19").has(nightly)
    with pytest.raises(ConfigError, match="is not a date"):
        JobChoice(since="yesterday").has(job)


def test_the_command_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ids = []
    for number in range(2):
        with nightjar.run(
            [f"Good night {number}.", "Good night."], out=f"out-{number}", quiet=True, name=f"n-{number}"
        ) as job:
            ids.append(job.id)
    run = CliRunner()
    one = run.invoke(cli, ["export", *ids, "--format", "webdataset", "--to", "one", "--json"])
    assert (one.exit_code, json.loads(one.stdout)["jobs"], json.loads(one.stdout)["duplicates"]) == (
        0,
        ids,
        1,
    )
    # Both jobs are found by their names, in their own folders.
    two = run.invoke(cli, ["export", "--name", "n-*", "--format", "webdataset", "--to", "two", "--unique"])
    assert two.exit_code == 0, two.output
    assert "3 items written" in two.output
    found = nightjar.find_jobs(name="n-*")
    assert [job.id for job in found] == ids
    assert contents(nightjar.export(found, "webdataset", "three", unique=True)) == contents(tmp_path / "two")
    for wrong in ([], [ids[0], "--name", "n-*"]):
        assert run.invoke(cli, ["export", *wrong]).exit_code == 2
    assert nightjar.find_jobs(name="n-*", since="2020-01-01", until=date.today())
    for never in ({"until": "2020-01-01"}, {"since": date.max}):
        with pytest.raises(NotFoundError):
            nightjar.find_jobs(name="n-*", **never)
    with pytest.raises(NotFoundError) as caught:
        nightjar.find_jobs(name="nobody")
    assert caught.value.code is ErrorCode.LEDGER_NOT_FOUND

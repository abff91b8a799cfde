"""Formats read back with the libraries that training uses: lhotse, webdataset, datasets, and ESPnet's
rules on top of lhotse."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile

from jobs.export import parse_splits
from jobs.ledger.records import JobSpec
from jobs.store import FolderStore
from tests.support.export_kit import SAMPLE_RATE, Finished, export, finished_job

IDS = [f"utterance {number}.x" for number in range(9)]
LINES: list[dict[str, Any]] = [
    {
        "example_id": example_id,
        "messages": [["user", "text", f"Größe {number}"]],
        "generation": {"voice": "heart", "language": "English"} if number else {},
    }
    for number, example_id in enumerate(IDS)
] + [{"example_id": "fails", "messages": [["user", "text", "x"]]}]
SMALL_PART = 120_000


def library(name: str) -> Any:
    return pytest.importorskip(
        name, reason=f"NOT READ BACK: the library {name} is missing; it comes with the extra `dev`."
    )


@pytest.fixture(params=["wav", "flac"])
def finished(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Finished]:
    made = finished_job(
        tmp_path, FolderStore(tmp_path / "store"), LINES, JobSpec("hibari", format=request.param)
    )
    yield made
    made.ledger.close()


def exported(finished: Finished, format: str, **options: Any) -> Path:
    to = finished.folder / format
    report = export(finished.ledger, finished.store, finished.job_id, format, str(to), **options)
    assert (report.items, report.left_out) == (9, 1)
    assert not (to / "_export").exists() or not list((to / "_export").iterdir())
    return to


def check_cut(cut: Any, index: int) -> None:
    samples = cut.load_audio()
    assert samples.shape == (1, SAMPLE_RATE + index)
    assert cut.sampling_rate == SAMPLE_RATE
    (supervision,) = cut.supervisions
    assert supervision.text == f"Größe {index}"
    assert supervision.speaker == "heart"
    assert supervision.language == ("English" if index else None)
    assert supervision.custom["example_id"] == IDS[index]
    assert supervision.custom["seed"] == index + 2**62


@pytest.mark.parametrize("absolute", [False, True])
def test_lhotse_manifests(finished: Finished, absolute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lhotse = library("lhotse")
    qa = library("lhotse.qa")
    to = exported(finished, "lhotse", absolute=absolute) / "train"
    # Lhotse takes a path as seen from where it runs.
    monkeypatch.chdir(finished.folder if absolute else to)
    recordings = lhotse.RecordingSet.from_file(to / "recordings.jsonl.gz")
    supervisions = lhotse.SupervisionSet.from_file(to / "supervisions.jsonl.gz")
    cuts = lhotse.CutSet.from_file(to / "cuts.jsonl.gz")
    qa.validate_recordings_and_supervisions(recordings.to_eager(), supervisions.to_eager(), read_data=True)
    qa.validate(cuts.to_eager(), read_data=True)
    assert (
        [cut.id for cut in cuts]
        == [recording.id for recording in recordings]
        == [one.id for one in supervisions]
        == IDS
    )
    for index, cut in enumerate(cuts):
        check_cut(cut, index)


def test_lhotse_shar(finished: Finished) -> None:
    lhotse = library("lhotse")
    to = exported(finished, "shar", part_bytes=SMALL_PART) / "train"
    assert len(list(to.iterdir())) > 4
    cuts = list(lhotse.CutSet.from_shar(in_dir=to))
    assert len(cuts) == 9
    for index, cut in enumerate(cuts):
        check_cut(cut, index)
    assert [cut.id for cut in cuts] == [Path(key).stem for key in finished.audio]


def test_webdataset(finished: Finished) -> None:
    webdataset = library("webdataset")
    to = exported(finished, "webdataset", part_bytes=SMALL_PART)
    tars = sorted(map(str, (to / "train").iterdir()))
    assert len(tars) > 1
    samples = list(webdataset.WebDataset(tars, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [Path(key).stem for key in finished.audio]
    for index, (sample, (key, data)) in enumerate(zip(samples, finished.audio.items(), strict=True)):
        assert sample[Path(key).suffix[1:]] == data
        assert sample["txt"].decode() == f"Größe {index}"
        about = json.loads(sample["json"])
        assert (about["example_id"], about["index"], about["samples"]) == (
            IDS[index],
            index,
            SAMPLE_RATE + index,
        )
        assert about["sha256"] == hashlib.sha256(data).hexdigest()


def test_parquet_with_datasets(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    library("pyarrow")
    datasets = library("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    to = exported(finished, "parquet", splits=parse_splits("train=0.7,dev=0.3"), part_bytes=SMALL_PART)
    assert len(list((to / "data").iterdir())) > 2
    loaded = datasets.load_dataset(str(to), cache_dir=str(finished.folder / "cache"))
    assert set(loaded) == {"train", "dev"}
    assert loaded["train"].features["audio"] == datasets.Audio(sampling_rate=SAMPLE_RATE)
    rows = [
        row for split in loaded.values() for row in split.cast_column("audio", datasets.Audio(decode=False))
    ]
    rows.sort(key=lambda row: row["index"])
    assert [row["example_id"] for row in rows] == IDS
    for row, (key, data) in zip(rows, finished.audio.items(), strict=True):
        assert row["audio"] == {"bytes": data, "path": Path(key).name}
        assert soundfile.info(io.BytesIO(row["audio"]["bytes"])).frames == SAMPLE_RATE + row["index"]
        assert row["text"] == f"Größe {row['index']}"
        assert row["language"] == ("English" if row["index"] else None)
        assert row["seed"] == row["index"] + 2**62
    streamed = datasets.load_dataset(str(to), split="train", streaming=True).cast_column(
        "audio", datasets.Audio(decode=False)
    )
    assert sum(1 for _ in streamed) == len(loaded["train"])


def test_a_group_of_rows_that_is_full_at_the_end_is_whole(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("pyarrow")
    parquet = library("pyarrow.parquet")
    monkeypatch.setattr("jobs.export.table_formats.GROUP_ROWS", 3)
    (path,) = (exported(finished, "parquet") / "data").iterdir()
    file = parquet.ParquetFile(path)
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [3, 3, 3]
    assert file.read(["example_id"]).column(0).to_pylist() == IDS


def test_the_sample_rate_is_that_of_the_audio(tmp_path: Path) -> None:
    library("pyarrow")
    parquet = library("pyarrow.parquet")
    rate = 16_000
    finished = finished_job(
        tmp_path, FolderStore(tmp_path / "store"), LINES, JobSpec("hibari"), sample_rate=rate
    )
    lhotse, shar, tars, tables = (
        exported(finished, name) for name in ("lhotse", "shar", "webdataset", "parquet")
    )
    finished.ledger.close()
    for path in (*(lhotse / "train").glob("*.gz"), *(shar / "train").glob("*.gz")):
        made = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        recordings = [
            one.get("recording", one) for one in made if "sampling_rate" in one.get("recording", one)
        ]
        assert [(one["sampling_rate"], one["num_samples"]) for one in recordings] == [
            (rate, rate + index) for index in range(len(recordings))
        ]
        assert len(recordings) == (0 if "supervisions" in path.name else len(IDS)), path
        assert [one["duration"] for one in made] == [(rate + index) / rate for index in range(len(IDS))]
    (path,) = (tars / "train").iterdir()
    with tarfile.open(path) as tar:
        told = [json.load(tar.extractfile(member)) for member in tar if member.name.endswith(".json")]  # type: ignore[arg-type]
    assert [(one["sample_rate"], one["duration"]) for one in told] == [
        (rate, round((rate + index) / rate, 6)) for index in range(len(IDS))
    ]
    (path,) = (tables / "data").iterdir()
    features = json.loads(parquet.read_schema(path).metadata[b"huggingface"])["info"]["features"]
    assert features["audio"]["sampling_rate"] == rate


def test_the_dataset_card(finished: Finished) -> None:
    library("pyarrow")
    yaml = library("yaml")
    card = (exported(finished, "parquet") / "README.md").read_text()
    _, header, body = card.split("---\n", 2)
    known = yaml.safe_load(header)
    assert known["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}
    ]
    assert (known["pretty_name"], known["size_categories"], known["task_categories"]) == (
        "A night",
        ["n<1K"],
        ["text-to-speech"],
    )
    assert "| train | 9 |" in body
    assert "1 items of the job have no audio" in body


def test_espnet_audio_reader(finished: Finished) -> None:
    """The rules of espnet2.speechlm's LhotseAudioReader: cuts by id, audio [channels, samples]."""
    lhotse = library("lhotse")
    to = exported(finished, "espnet-dataset", absolute=True) / "train"
    dataset = json.loads((to / "audio_text.json").read_text())
    audio = next(entry for entry in dataset["data_entry"] if entry["reader"] == "lhotse_audio")
    valid = set(dataset["samples"])
    manifest = lhotse.CutSet.from_cuts(
        [cut for cut in lhotse.CutSet.from_file(Path(audio["path"]) / "cuts.jsonl.gz") if cut.id in valid]
    )
    for index, example_id in enumerate(IDS):
        assert manifest[example_id].load_audio().shape == (1, SAMPLE_RATE + index)


def test_kaldi_with_lhotse(finished: Finished) -> None:
    library("lhotse")
    kaldi = library("lhotse.kaldi")
    if "flac" in next(iter(finished.audio)) and shutil.which("flac") is None:
        pytest.skip("Kaldi's pipes need the program flac")
    recordings, supervisions, _ = kaldi.load_kaldi_data_dir(
        exported(finished, "kaldi", absolute=True) / "train", sampling_rate=SAMPLE_RATE
    )
    assert sorted(recording.num_samples - SAMPLE_RATE for recording in recordings) == list(range(9))
    assert sorted(one.text for one in supervisions) == [f"Größe {index}" for index in range(9)]

"""Formats that are folders of audio files, read back as their readers do: LJ Speech's and Hugging Face's
AudioFolder."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.checks import Quality
from jobs.export import parse_splits
from jobs.export.folder_formats import one_line
from jobs.ledger.records import JobSpec
from jobs.store import FolderStore
from pipelines.errors import ConfigError
from tests.support.export_kit import SAMPLE_RATE, Finished, datasets_library, export, finished_job

TEXTS = [
    'He said: "No|yes".',
    "One\ntwo\r\nthree",
    "A\u2028b\x85c\x00d",
    "Größe",
    " None ",
    "'a' || b",
    "NA",
    "1,2\t3",
    "x",
]
LINES: list[dict[str, Any]] = [
    {
        "example_id": f"u|{number}",
        "messages": [["user", "text", text]],
        "generation": {"language": "English"} if number > 6 else {},
    }
    for number, text in enumerate(TEXTS)
] + [{"example_id": "fails", "messages": [["user", "text", "x"]]}]
SMALL_PART = 120_000


@pytest.fixture(scope="module", params=[False, True], ids=["files", "packs"])
def finished(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("job")
    spec = JobSpec(
        "hibari", pack=request.param, quality=None if request.param else Quality(meters={"asr": {}})
    )
    made = finished_job(folder, FolderStore(folder / "store"), LINES, spec)
    yield made
    made.ledger.close()


def written(finished: Finished, format: str, to: Path, **options: Any) -> Path:
    report = export(
        finished.ledger, finished.store, finished.job_id, format, str(to), part_bytes=SMALL_PART, **options
    )
    assert (report.items, report.left_out) == (9, 1)
    return to


def rows_of(folder: Path) -> list[list[str]]:
    """As torchaudio.datasets.LJSPEECH and the readers of TTS toolkits read it."""
    with (folder / "metadata.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE))
    assert len((folder / "metadata.csv").read_text(encoding="utf-8").splitlines()) == len(rows)
    return rows


def test_ljspeech(finished: Finished, tmp_path: Path) -> None:
    folder = written(finished, "ljspeech", tmp_path / "lj") / "train"
    rows = rows_of(folder)
    said = ['He said: "No yes".', "One two three", "A b c d", "Größe", "None", "'a' b", "NA", "1,2 3", "x"]
    assert [row[1:] for row in rows] == [[text, text] for text in said]
    assert [(folder / "wavs" / f"{name}.wav").read_bytes() for name, _, _ in rows] == list(
        finished.audio.values()
    )
    assert len(list((folder / "wavs").iterdir())) == len(rows)


def test_ljspeech_in_splits(finished: Finished, tmp_path: Path) -> None:
    to = written(finished, "ljspeech", tmp_path / "lj", splits=parse_splits("train=0.5,dev=0.5"))
    assert sum(len(rows_of(to / split)) for split in ("train", "dev")) == len(TEXTS)
    for split in ("train", "dev"):
        assert {path.stem for path in (to / split / "wavs").iterdir()} == {
            row[0] for row in rows_of(to / split)
        }


def test_ljspeech_is_wav_only(tmp_path: Path) -> None:
    made = finished_job(
        tmp_path, FolderStore(tmp_path / "store"), LINES[:1], JobSpec("hibari", format="flac")
    )
    for audio_format in (None, "opus"):
        with pytest.raises(
            ConfigError, match="Readers of ljspeech open wav, and the audio would be"
        ) as caught:
            export(
                made.ledger,
                made.store,
                made.job_id,
                "ljspeech",
                str(tmp_path / "to"),
                audio_format=audio_format,
            )
        assert caught.value.advice == "Add --audio-format wav."
    export(
        made.ledger,
        made.store,
        made.job_id,
        "ljspeech",
        str(tmp_path / "to"),
        audio_format="wav",
        sample_rate=16_000,
    )
    (path,) = (tmp_path / "to" / "train" / "wavs").iterdir()
    assert path.suffix == ".wav"
    made.ledger.close()


@pytest.mark.parametrize(
    ("text", "wanted"), [("", ""), ("|", ""), (" a | b ", "a b"), ("a\u2029b", "a b"), ("a\u00a0b", "a b")]
)
def test_a_text_is_one_field(text: str, wanted: str) -> None:
    assert one_line(text, "|") == wanted


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Any:
    return datasets_library(monkeypatch)


def test_audiofolder(finished: Finished, tmp_path: Path, datasets: Any) -> None:
    to = written(finished, "audiofolder", tmp_path / "af", splits=parse_splits("train=0.6,test=0.4"))
    assert len(list(to.glob("data/train/*/metadata.parquet"))) > 1
    loaded = datasets.load_dataset("audiofolder", data_dir=str(to), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"train", "test"}
    assert loaded["train"].features == loaded["test"].features
    rows = [
        row for split in loaded.values() for row in split.cast_column("audio", datasets.Audio(decode=False))
    ]
    rows.sort(key=lambda row: row["index"])
    assert [row["text"] for row in rows] == [text.strip() for text in TEXTS]
    assert [Path(row["audio"]["path"]).read_bytes() for row in rows] == list(finished.audio.values())
    for index, row in enumerate(rows):
        assert (row["seed"], row["example_id"], row["language"]) == (
            index + 2**62,
            f"u|{index}",
            "English" if index > 6 else None,
        )
        assert (row["duration"], row["voice"]) == (round(1 + index / SAMPLE_RATE, 6), "heart")
        if finished.ledger.job(finished.job_id).spec.quality is not None:
            assert (row["draw"], row["transcript"], row["score_wer"]) == (
                index % 2,
                f"heard {index}",
                index / 100,
            )
            assert row["score_duration"] is None


def test_audiofolder_with_names_of_splits_that_only_its_card_knows(
    finished: Finished, tmp_path: Path, datasets: Any
) -> None:
    to = written(
        finished,
        "audiofolder",
        tmp_path / "af",
        splits=parse_splits("mine=0.5,yours=0.5"),
        audio_format="flac",
    )
    loaded = datasets.load_dataset(str(to), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"mine", "yours"}
    assert loaded["mine"].features["audio"] == datasets.Audio()
    assert sum(len(split) for split in loaded.values()) == len(TEXTS)
    assert all(path.suffix == ".flac" for path in to.glob("data/*/*/0*"))

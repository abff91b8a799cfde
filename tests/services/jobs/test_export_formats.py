"""Each format that plain files make, read back by the rules of those who read it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile

from jobs.console import exit_code
from jobs.export import parse_splits
from jobs.ledger.records import JobSpec
from jobs.store import FolderStore
from pipelines.errors import ConfigError, ErrorCode
from pipelines.request import Generation
from tests.support.export_kit import SAMPLE_RATE, Finished, export, finished_job

IDS = ["b", "a", "a b", "fails", "a-1", "Ünder", "../x\n", "a" * 300]
LINES: list[dict[str, Any]] = [
    {
        "example_id": example_id,
        "messages": [["user", "text", f" Text  of\n{number}. "]],
        "generation": {"voice": "HEART"} if number % 2 else {},
    }
    for number, example_id in enumerate(IDS)
]
MADE = [number for number, example_id in enumerate(IDS) if example_id != "fails"]


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES)
    yield made
    made.ledger.close()


def exported(finished: Finished, format: str, **options: Any) -> Path:
    to = finished.folder / format
    report = export(finished.ledger, finished.store, finished.job_id, format, str(to), **options)
    assert (report.items, report.left_out, report.to) == (len(MADE), 1, str(to))
    return to


def table(path: Path) -> list[tuple[str, str]]:
    """A Kaldi table, by the rules of `utils/validate_data_dir.sh`."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    assert b"\r" not in data
    assert b"  " not in data
    lines = data.split(b"\n")[:-1]
    assert lines == sorted(lines, key=lambda line: line.split(b" ")[0])
    rows = [line.decode().split(" ", 1) for line in lines]
    assert all(len(row) == 2 and row[1] and row[1] == row[1].strip() for row in rows)
    keys = [key for key, _ in rows]
    assert len(set(keys)) == len(keys)
    return [(key, value) for key, value in rows]


def test_kaldi(finished: Finished) -> None:
    folder = exported(finished, "kaldi") / "train"
    assert sorted(path.name for path in folder.iterdir()) == [
        "reco2dur",
        "spk2utt",
        "text",
        "utt2dur",
        "utt2spk",
        "wav.scp",
    ]
    wavs, texts, speakers = table(folder / "wav.scp"), table(folder / "text"), table(folder / "utt2spk")
    utterances = [utterance for utterance, _ in wavs]
    assert utterances == [utterance for utterance, _ in texts] == [utterance for utterance, _ in speakers]
    assert [speaker for _, speaker in speakers] == sorted(speaker for _, speaker in speakers)
    assert all(utterance.startswith(f"{speaker}-") for utterance, speaker in speakers)
    by_speaker = {speaker: value.split(" ") for speaker, value in table(folder / "spk2utt")}
    assert by_speaker == {
        name: [u for u, speaker in speakers if speaker == name] for name in ("HEART", "heart")
    }
    durations = dict(table(folder / "utt2dur"))
    assert (folder / "reco2dur").read_bytes() == (folder / "utt2dur").read_bytes()
    for (utterance, path), (_, text) in zip(wavs, texts, strict=True):
        assert not Path(path).is_absolute()
        info = soundfile.info(str(folder / path))
        assert float(durations[utterance]) == pytest.approx(info.frames / info.samplerate, abs=1e-6)
        index = info.frames - SAMPLE_RATE
        assert text == f"Text of {index}."
        # Without a voice of its own, in the model's only one.
        assert utterance.startswith("HEART-" if index % 2 else "heart-")
    assert "heart-a~20b" in utterances


def test_no_control_character_is_in_kaldis_files(tmp_path: Path) -> None:
    said = [f"One{chr(code)}two." for code in (*range(32), *range(127, 160))]
    lines = [
        {"example_id": f"a\x1b{number:02}", "messages": [["user", "text", text]]}
        for number, text in enumerate(said)
    ]
    finished = finished_job(tmp_path, FolderStore(tmp_path / "store"), lines, seconds=0.01)
    export(finished.ledger, finished.store, finished.job_id, "kaldi", str(tmp_path / "kaldi"))
    finished.ledger.close()
    for path in (tmp_path / "kaldi" / "train").iterdir():
        assert not [
            character for character in path.read_text() if character != "\n" and not character.isprintable()
        ], path
    assert [text for _, text in table(tmp_path / "kaldi" / "train" / "text")] == ["One two."] * len(said)


def test_kaldi_takes_flac_from_a_command(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "it's a store")
    finished = finished_job(tmp_path, store, LINES[:1], JobSpec("hibari", format="flac"))
    export(finished.ledger, store, finished.job_id, "kaldi", str(tmp_path / "kaldi"))
    (key,) = finished.audio
    (line,) = (tmp_path / "kaldi" / "train" / "wav.scp").read_text().splitlines()
    quoted = f"../../it's a store/{key}".replace("'", "'\"'\"'")
    assert line == f"heart-b flac -c -d -s '{quoted}' |"
    finished.ledger.close()


def test_kaldi_in_splits(finished: Finished) -> None:
    to = exported(finished, "kaldi", splits=parse_splits("train=0.5,dev=0.5"))
    both = [key for split in ("train", "dev") for key, _ in table(to / split / "wav.scp")]
    assert len(set(both)) == len(MADE)


def test_nemo(finished: Finished) -> None:
    lines = [json.loads(line) for line in exported(finished, "nemo").read_text().splitlines()]
    for line, index in zip(lines, MADE, strict=True):
        turn = {"speaker", "example_id", "role", "message_index", "seed", "model", "voice"}
        assert line.keys() == {"audio_filepath", "duration", "text", *turn}
        assert soundfile.info(str(finished.folder / line["audio_filepath"])).duration == pytest.approx(
            line["duration"], abs=1e-6
        )
        assert (line["example_id"], line["text"]) == (IDS[index], f"Text  of\n{index}.")


def test_a_language_is_the_lines_or_the_jobs(tmp_path: Path) -> None:
    lines = [LINES[0], {**LINES[1], "generation": {"language": "english"}}]
    finished = finished_job(
        tmp_path,
        FolderStore(tmp_path / "s"),
        lines,
        JobSpec("hibari", generation=Generation(language="English")),
    )
    export(finished.ledger, finished.store, finished.job_id, "nemo", str(tmp_path / "nemo"))
    assert [json.loads(line)["lang"] for line in (tmp_path / "nemo").read_text().splitlines()] == [
        "English",
        "english",
    ]
    finished.ledger.close()


def test_openai_batch(finished: Finished) -> None:
    lines = [json.loads(line) for line in exported(finished, "openai-batch").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [IDS[index] for index in MADE]
    for line in lines:
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert line["response"].keys() == {"status_code", "request_id", "body"}
        assert line["response"]["status_code"] == 200
        audio = line["response"]["body"]["audio"]
        assert soundfile.info(str(finished.folder / audio["url"])).samplerate == audio["sample_rate"]
    assert len({line["id"] for line in lines}) == len(lines)


def test_openai_batch_errors(tmp_path: Path) -> None:
    finished = finished_job(
        tmp_path,
        FolderStore(tmp_path / "s"),
        [*LINES[2:5], {"example_id": "empty", "messages": [["user", "text", " "]]}],
    )
    report = export(
        finished.ledger, finished.store, finished.job_id, "openai-batch-errors", str(tmp_path / "errors")
    )
    lines = [json.loads(line) for line in (tmp_path / "errors").read_text().splitlines()]
    assert report.items == 2
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in lines] == [
        ("empty", None, "input.empty_text"),
        ("fails", None, "synth.no_eos"),
    ]
    with pytest.raises(ConfigError):
        export(
            finished.ledger,
            finished.store,
            finished.job_id,
            "openai-batch-errors",
            "x",
            splits=parse_splits("a=1"),
        )
    finished.ledger.close()


def test_espnet_dataset_texts_and_dialogues(finished: Finished) -> None:
    to = exported(finished, "espnet-dataset") / "train"
    for name in ("audio_text", "dialogue"):
        dataset = json.loads((to / f"{name}.json").read_text())
        assert dataset.keys() == {"data_entry", "samples"}
        assert dataset["samples"] == sorted(IDS[index] for index in MADE)
        for entry in dataset["data_entry"]:
            assert entry.keys() == {"name", "path", "reader"}
            assert (to / entry["path"]).exists()
    # The rules of TextReader for .jsonl, and of DialogueReader.
    texts = {
        line["id"]: line["text"] for line in map(json.loads, (to / "text.jsonl").read_text().splitlines())
    }
    assert texts == {IDS[index]: f"Text  of\n{index}." for index in MADE}
    dialogues = {
        line["example_id"]: line["messages"]
        for line in map(json.loads, (to / "dialogue.jsonl").read_text().splitlines())
    }
    assert list(dialogues) == [IDS[index] for index in MADE]
    for messages in dialogues.values():
        assert [(role, modality) for role, modality, _ in messages] == [
            ("user", "text"),
            ("assistant", "audio"),
        ]
        assert soundfile.read(to / messages[1][2])[1] == SAMPLE_RATE


@pytest.mark.parametrize("format", ["parquet", "audiofolder"])
def test_a_format_without_its_library_leaves_nothing(
    finished: Finished, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    to = finished.folder / "dataset"
    with pytest.raises(ConfigError, match=f"The format {format} needs the library pyarrow") as caught:
        export(finished.ledger, finished.store, finished.job_id, format, str(to))
    assert (caught.value.code, exit_code(caught.value), to.exists()) == (
        ErrorCode.CONFIG_MISSING_LIBRARY,
        4,
        False,
    )

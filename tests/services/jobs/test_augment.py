"""Augmented datasets: what each effect does, the same bytes in any order and after a stop, recipes, clean masters."""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner
from scipy import signal

import nightjar
from jobs.cli import cli
from jobs.export import augment as augmenting
from jobs.export.augment import Effects, augment, parse_range
from jobs.export.dataset import Finished as FinishedExport
from jobs.export.dataset import Identity, WrittenFile
from jobs.export.folder_formats import tar_file
from jobs.store import FolderStore
from pipelines.errors import ConfigError
from tests.support.export_kit import SAMPLE_RATE, Finished, datasets_library, export, finished_job

LINES = [{"example_id": f"u {n}", "messages": [["user", "text", f"Text {n}"]]} for n in range(6)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("job")
    made = finished_job(folder, FolderStore(folder / "store"), LINES)
    yield made
    made.ledger.close()


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    """All effects, with two noises at other rates than the speech, one of them short, and two rooms."""
    random = np.random.default_rng(1)
    for name, rate, seconds in (("noise/a.wav", 16_000, 3.0), ("noise/deep/b.flac", 48_000, 0.3)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / name, random.uniform(-0.5, 0.5, (round(rate * seconds), 2)), rate)
    (tmp_path / "room").mkdir()
    for name in ("hall", "bath"):
        tail = random.normal(0, 1, 4_000) * np.exp(-np.arange(4_000) / 400)
        response = np.concatenate([np.zeros(100), [8.0], tail])
        soundfile.write(tmp_path / "room" / f"{name}.wav", response / 16, 16_000)
    return Effects(
        seed=5,
        speed=(0.9, 1.1),
        room=tmp_path / "room",
        noise=tmp_path / "noise",
        band=(300, 3400),
        codecs=("mp3", "opus", "mulaw"),
    )


def given(effects: Effects) -> dict[str, Any]:
    return msgspec.structs.asdict(effects)


def exported(finished: Finished, format: str, to: Path) -> Path:
    if format == "audiofolder":
        pytest.importorskip(
            "pyarrow", reason="NOT TESTED: the library pyarrow comes with the extra `export`."
        )
    export(finished.ledger, finished.store, finished.job_id, format, str(to), part_bytes=100_000)
    return to


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*/*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def check_recipes(folder: Path, effects: Effects) -> None:
    """The lines say what was done."""
    lines = lines_of(folder)
    assert [line["example_id"] for line in lines] == [line["example_id"] for line in LINES]
    for line in lines:
        recipe = line["augment"]
        assert recipe == effects.recipe(f"{line['example_id']}/{line['message_index']}") | {
            "clean_sha256": recipe["clean_sha256"]
        }
        assert line["sha256"] != recipe["clean_sha256"]
        samples = (SAMPLE_RATE + line["index"]) / (recipe["speed"] or 1)
        assert line["duration"] * SAMPLE_RATE == pytest.approx(samples, abs=2)


def test_webdataset_in_any_order_and_after_a_stop(
    finished: Finished, effects: Effects, tmp_path: Path
) -> None:
    webdataset = pytest.importorskip(
        "webdataset", reason="NOT READ BACK: webdataset comes with the extra `dev`."
    )
    source = exported(finished, "webdataset", tmp_path / "source")
    before, whole, again = contents(source), tmp_path / "whole", tmp_path / "again"
    augment(source, str(whole), **given(effects))
    check_recipes(whole, effects)
    tars = sorted(map(str, (whole / "train").glob("*.tar")))
    samples = list(webdataset.WebDataset(tars, shardshuffle=False))
    assert [json.loads(sample["json"])["augment"] for sample in samples] == [
        line["augment"] for line in lines_of(whole)
    ]
    for sample, line in zip(samples, lines_of(whole), strict=True):
        assert soundfile.info(io.BytesIO(sample["wav"])).frames == line["samples"]
        assert sample["txt"].decode() == line["text"]
    second = sorted((source / "train").glob("*.tar"))[1]
    clean = second.read_bytes()
    second.write_bytes(b"no tar".ljust(len(clean), b"x"))
    with pytest.raises(ConfigError):
        augment(source, str(again), **given(effects))
    assert not (again / "export.json").exists()
    assert (again / "train").is_dir(), "the first part was made"
    second.write_bytes(clean)
    augment(source, str(again), **given(effects))
    assert contents(again) == contents(whole)
    # The last part alone gives the bytes that it has in the whole.
    alone = tmp_path / "alone"
    shutil.copytree(source, alone)
    last = Path(tars[-1]).name
    for path in (alone / "train").glob("*.tar"):
        path.name == last or path.unlink()
    with pytest.raises(ConfigError, match=r"no finished export: .*shard-000000.tar"):
        augment(alone, str(tmp_path / "one"), **given(effects))
    end = json.loads((alone / "export.json").read_text())
    end["files"] = [one for one in end["files"] if (alone / one["name"]).exists()]
    (alone / "export.json").write_text(json.dumps(end))
    augment(alone, str(tmp_path / "one"), **given(effects))
    assert (tmp_path / "one" / "train" / last).read_bytes() == Path(tars[-1]).read_bytes()
    assert contents(source) == before
    with pytest.raises(ConfigError, match="contains another export"):
        augment(source, str(whole), seed=6, speed=(1.1, 1.2))


def test_a_table_names_no_audio_outside_of_its_folder(
    finished: Finished, effects: Effects, tmp_path: Path
) -> None:
    source = exported(finished, "audiofolder", tmp_path / "source")
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="NOT TESTED: pyarrow comes with the extra `export`."
    )
    table = next(source.glob("data/*/*/metadata.parquet"))
    rows = parquet.read_table(table).to_pylist()
    (table.parent / rows[0]["file_name"]).rename(tmp_path / "outside.wav")
    rows[0]["file_name"] = "../../../../outside.wav"
    parquet.write_table(parquet.read_table(table).from_pylist(rows, parquet.read_schema(table)), table)
    summary = source / "export.json"
    end = json.loads(summary.read_text())
    for file in end["files"]:
        file["bytes"] = (source / file["name"]).stat().st_size if file["name"].endswith("parquet") else 0
    summary.write_text(json.dumps(end))
    with pytest.raises(ConfigError, match="cannot be read"):
        augment(source, str(tmp_path / "to"), **given(effects))


def test_an_audiofolder_is_read_by_datasets(
    finished: Finished, effects: Effects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = datasets_library(monkeypatch)
    source, to = exported(finished, "audiofolder", tmp_path / "source"), tmp_path / "to"
    augment(source, str(to), **given(effects))
    found = datasets.load_dataset(
        "audiofolder", data_dir=str(to), split="train", cache_dir=str(tmp_path / "c")
    )
    rows = found.cast_column("audio", datasets.Audio(decode=False))
    assert [row["augment"] for row in rows] == [
        effects.recipe(f"{row['example_id']}/{row['message_index']}")
        | {"clean_sha256": row["augment"]["clean_sha256"]}
        for row in rows
    ]
    for row in rows:
        data = Path(row["audio"]["path"]).read_bytes()
        assert (row["sha256"], row["duration"]) == (
            hashlib.sha256(data).hexdigest(),
            round(soundfile.info(io.BytesIO(data)).frames / SAMPLE_RATE, 6),
        )


def test_the_card_says_that_the_set_is_augmented(
    finished: Finished, effects: Effects, tmp_path: Path
) -> None:
    source = exported(finished, "webdataset", tmp_path / "source")
    augment(source, str(tmp_path / "to"), **given(effects))
    clean, card = ((folder / "README.md").read_text() for folder in (source, tmp_path / "to"))
    fields = clean.partition("\n---\n")[0].splitlines()
    assert card.splitlines()[: len(fields)] == [
        fields[0],
        fields[1].replace('"', '"Augmented ', 1),
        *fields[2:],
    ]
    ranges = json.loads(card.partition("```json")[2].partition("```")[0])
    assert ranges == json.loads(msgspec.json.encode(effects, enc_hook=lambda folder: folder.name))
    assert " hours." in clean
    assert " hours." not in card
    assert str(tmp_path) not in card


def power(samples: np.ndarray, low: float = 0, high: float = SAMPLE_RATE) -> float:
    """The mean power per Hz between two frequencies."""
    frequencies, density = signal.welch(samples, SAMPLE_RATE)
    return float(density[(frequencies >= low) & (frequencies <= high)].mean())


def test_each_effect_does_what_it_says(effects: Effects) -> None:
    speech = np.random.default_rng(0).normal(0, 0.05, (SAMPLE_RATE, 2)).astype(np.float32)
    nothing = dict.fromkeys(effects.recipe("a"))

    def after(**recipe: Any) -> np.ndarray:
        made = effects.applied(nothing | recipe, speech, SAMPLE_RATE)
        assert made.dtype == np.float32
        return made

    assert (after() == speech).all()
    assert len(after(speed=1.25)) == pytest.approx(SAMPLE_RATE / 1.25, abs=1)
    noise = after(noise="a.wav", noise_at=0.3, snr_db=10.0) - speech
    assert 10 * np.log10((speech**2).mean() / (noise**2).mean()) == pytest.approx(10, abs=0.1)
    assert noise[:, 0] == pytest.approx(noise[:, 1], abs=1e-6)
    room = after(room="hall.wav")
    # The direct path is not delayed.
    assert np.argmax(np.correlate(room[:2000, 0], speech[:1000, 0], "valid")) == 0
    band = after(band_hz="300..3400")[:, 0]
    assert power(band, 500, 3000) > 100 * max(power(band, 0, 100), power(band, 6000, 12_000))
    for codec in ("mp3", "opus", "mulaw"):
        coded = after(codec=codec)
        assert coded.shape == speech.shape
        assert not (coded == speech).all()
    phone = after(codec="mulaw")[:, 0]
    assert power(phone, 500, 3000) > 100 * power(phone, 5000, 12_000)
    loud = effects.applied(
        nothing | {"noise": "a.wav", "noise_at": 0.0, "snr_db": -30.0}, speech, SAMPLE_RATE
    )
    assert np.abs(loud).max() == 1


def test_recipes_depend_on_seed_and_item_alone(effects: Effects) -> None:
    ids = [f"{number}/None" for number in range(400)]
    recipes = [effects.recipe(one) for one in ids]
    assert recipes == [effects.recipe(one) for one in reversed(ids)][::-1]
    drawn = [one["speed"] for one in recipes]
    assert (min(drawn), max(drawn)) == (pytest.approx(0.9, abs=0.01), pytest.approx(1.1, abs=0.01))
    assert {one["noise"] for one in recipes} == {"a.wav", "deep/b.flac"}
    assert {one["codec"] for one in recipes} == {"mp3", "opus", "mulaw"}
    assert recipes[0] != msgspec.structs.replace(effects, seed=6).recipe(ids[0]) | {"seed": 5}


def test_what_cannot_be_augmented_is_refused(finished: Finished, effects: Effects, tmp_path: Path) -> None:
    source, empty = exported(finished, "webdataset", tmp_path / "source"), tmp_path / "empty"
    empty.mkdir()
    silent, nothing = tmp_path / "silent", tmp_path / "nothing"
    for folder, samples in ((silent, 100), (nothing, 0)):
        folder.mkdir()
        soundfile.write(folder / "a.wav", np.zeros(samples), 8000)
    for wrong, said in (
        ({}, "No effect is chosen"),
        ({"codecs": ("mp3", "amr")}, "An effect is impossible"),
        ({"speed": (0, 1)}, "An effect is impossible"),
        ({"snr": (5, 1e308)}, "An effect is impossible"),
        ({"band": (99_000, 99_000)}, "is no band at 24000 Hz"),
        ({"band": (50_000, 99_000)}, "is no band at 24000 Hz"),
        ({"room": silent}, "is silent"),
        ({"noise": nothing}, "is silent"),
        ({"noise": empty}, "There are no audio files in"),
    ):
        with pytest.raises(ConfigError, match=said):
            augment(source, str(tmp_path / "to"), **wrong)
    with pytest.raises(ConfigError, match="is no finished export"):
        augment(empty, str(tmp_path / "to"), **given(effects))
    for to in (source, source / "below", tmp_path):
        with pytest.raises(ConfigError, match="cannot be in one folder"):
            augment(source, str(to), **given(effects))
    assert (parse_range("20..5"), parse_range("7")) == ([5, 20], [7, 7])
    for text in ("loud", "5..", "1..x", "1..2..3", "nan", "5..inf"):
        with pytest.raises(ConfigError, match="is not a range"):
            parse_range(text)
    (tmp_path / "noise" / "c.wav").write_text("no audio")
    augmenting.sounds.cache_clear()
    with pytest.raises(ConfigError, match="is not an audio file"):
        augment(source, str(tmp_path / "to"), noise=tmp_path / "noise")
    assert not (tmp_path / "to" / "export.json").exists()


@pytest.mark.parametrize("word", [["Hi", 0.5, 0.75], {"text": "Hi", "start_s": 0.5, "end_s": 0.75}])
def test_the_times_of_words_and_turns_change_with_the_speed(word: Any) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(800), 8000, format="WAV")
    made = {"words": [word], "turns": [{"start": 1.0, "end": 2.0, "words": None}]}
    augmenting._augmented("a", {"wav": file.getvalue()}, made, Effects(speed=(2, 2)))
    assert [*(made["words"][0].values() if isinstance(word, dict) else made["words"][0])] == [
        "Hi",
        0.25,
        0.375,
    ]
    assert made["turns"] == [{"start": 0.5, "end": 1.0, "words": None}]


def test_an_export_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    shard = tmp_path / "source" / "train" / "shard-000000.tar"
    shard.parent.mkdir(parents=True)
    summary = tmp_path / "source" / "export.json"

    def listed(**sizes: int) -> None:
        files = [WrittenFile(f"train/{name}.tar", size, "") for name, size in sizes.items()]
        identity = Identity("job", "webdataset", 3, "", (), 0, "")
        summary.write_bytes(msgspec.json.encode(FinishedExport(identity, {}, 0, files)))

    def holding(**members: bytes) -> bytes:
        file = io.BytesIO()
        with tar_file(file) as add:
            for extension, data in members.items():
                add(f"a.{extension}", data)
        return file.getvalue()

    for number, (data, said) in enumerate(
        (
            (b"no tar" * 200, "cannot be read"),
            (holding(wav=b"x"), "cannot be read: 'json'"),
            (holding(json=b"no json"), "cannot be read: JSON"),
            (holding(json=b"{}"), "'a' has no audio that can be read"),
            (holding(wav=b"no audio", json=b"{}"), "'a' has no audio that can be read"),
        )
    ):
        shard.write_bytes(data)
        listed(**{"shard-000000": len(data)})
        with pytest.raises(ConfigError, match=said):
            augment(tmp_path / "source", str(tmp_path / f"to{number}"), speed=(1.1, 1.2))
    # The reader of tar files does not notice a missing end.
    for sizes, said in (
        ({"shard-000000": 10_240, "shard-000001": 1}, r"no finished export: .*shard-000001.tar"),
        ({"shard-000000": 20_480}, r"no finished export: 'shard-000000.tar' was changed"),
        ({}, "is not an export that can be augmented"),
    ):
        listed(**sizes)
        with pytest.raises(ConfigError, match=said):
            augment(tmp_path / "source", str(tmp_path / "to"), speed=(1.1, 1.2))
    summary.unlink()
    with pytest.raises(ConfigError, match="is no finished export"):
        augment(tmp_path / "source", str(tmp_path / "to"), speed=(1.1, 1.2))


def test_the_command(finished: Finished, effects: Effects, tmp_path: Path) -> None:
    source = exported(finished, "webdataset", tmp_path / "source")
    arguments = ["augment", str(source), "--to", str(tmp_path / "to"), "--seed", "5"]
    arguments += ["--speed", "0.9..1.1", "--room", str(effects.room), "--noise", str(effects.noise)]
    arguments += ["--band", "300..3400", "--json"]
    arguments += [f"--codec={codec}" for codec in effects.codecs]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"schema": "nightjar.augment/1", "to": str(tmp_path / "to")}
    check_recipes(tmp_path / "to", effects)
    with tarfile.open(next((tmp_path / "to" / "train").glob("*.tar"))) as archive:
        assert [Path(name).suffix for name in archive.getnames()] == [".wav", ".json", ".txt"] * 2


def test_python_augments_as_the_command_does(finished: Finished, effects: Effects, tmp_path: Path) -> None:
    source = exported(finished, "webdataset", tmp_path / "source")
    arguments = ["augment", str(source), "--to", str(tmp_path / "command"), "--noise", str(effects.noise)]
    assert (
        CliRunner().invoke(cli, [*arguments, "--snr", "3..9", "--codec", "mulaw", "--seed", "2"]).exit_code
        == 0
    )
    given = {"noise": str(effects.noise), "snr": (3, 9), "codecs": ["mulaw"], "seed": 2}
    to = nightjar.augment(str(source), tmp_path / "python", **given)
    made = [
        {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (to, tmp_path / "command")
    ]
    assert len(made[0]) > 3
    assert made[0] == made[1]
    refused = (
        ({"spede": 1}, "spede"),
        ({"speed": 30}, "An effect is impossible"),
        ({"speed": "fast"}, "'fast' is not a range"),
        ({"noise": effects.noise, "snr": (math.nan, 9)}, "'nan..9' is not a range"),
        ({}, "No effect"),
    )
    for wrong, why in refused:
        with pytest.raises(ConfigError, match=why):
            nightjar.augment(source, tmp_path / "other", **wrong)

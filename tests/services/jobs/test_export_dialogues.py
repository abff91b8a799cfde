"""Whole dialogues as sounds: each two-channel file against its turn table sample by sample, each format read
back by its library, and the same bytes in any order, part or after a stop."""

from __future__ import annotations

import gzip
import io
import json
import math
import tarfile
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile

from jobs.export import StoredJob, parse_splits
from jobs.export.audio import Conversion
from jobs.export.conversation import KNEE, Gaps, Sounds, mixed, parse_gaps
from jobs.export.export import export_jobs
from jobs.export.folder_formats import cut_of
from jobs.export.items import Part, audio_items
from jobs.ledger.records import JobSpec, Quality
from jobs.store import FolderStore
from jobs.where import parse_where
from pipelines.errors import ConfigError, StoreError
from pipelines.request import Word
from tests.services.jobs.test_export_resume import StoppedError, contents, stop_at
from tests.support.export_kit import SAMPLE_RATE, Finished, export, finished_job

SPOKEN = JobSpec("hibari", speak="all", seed=7)
#: Roles of the turns of each dialogue.
DIALOGUES = {
    "a": "uaua",
    "b c": "uuaa",
    "fails": "ua",
    "alone": "u",
    "d": "auaaauuu",
    **{f"e{number}": "ua" for number in range(6)},
}
ROLES = {"u": "user", "a": "assistant"}
LINES: list[dict[str, Any]] = [
    {
        "example_id": example_id,
        "messages": [
            [ROLES[role], "text", f"{example_id} says {number}."] for number, role in enumerate(roles)
        ],
        "generation": {"language": "English", "roles": {"user": {"voice": "heart"}}},
    }
    for example_id, roles in DIALOGUES.items()
]
WHOLE = [name for name in DIALOGUES if name != "fails"]
TURNS = sum(len(DIALOGUES[name]) for name in WHOLE)
FORMATS = ["lhotse", "nemo", "rttm", "shar", "webdataset"]
#: The audio of a dialogue of two turns.
PART = 110_000
WIDE = "uniform(-2,1)"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("job")
    made = finished_job(folder, FolderStore(folder / "store"), LINES, SPOKEN)
    yield made
    made.ledger.close()


def exported(finished: Finished, to: Path, format: str, **options: Any) -> Path:
    given: dict[str, Any] = {"dialogues": "stereo", "gaps": WIDE, "part_bytes": PART, **options}
    report = export(finished.ledger, finished.store, finished.job_id, format, str(to), **given)
    assert (report.items, report.left_out) == (TURNS, 2)
    return to


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"NOT READ BACK: {name} is missing; it comes with `dev`.")


def turn_table(to: Path) -> dict[str, list[dict[str, Any]]]:
    """Name of a sound -> its turns, as the manifest of an export lists them."""
    table: dict[str, list[dict[str, Any]]] = {}
    for line in gzip.decompress((to / "manifest.jsonl.gz").read_bytes()).splitlines():
        turn = json.loads(line)
        table.setdefault(turn["dialogue"], []).append(turn)
    return table


def sound_of(turns: list[dict[str, Any]], finished: Finished) -> np.ndarray:
    """The two channels, int16 [samples, 2], made from a turn table and the audio of the turns alone."""
    made = np.zeros((max(round(turn["end"] * SAMPLE_RATE) for turn in turns), 2), np.int16)
    for turn in turns:
        pcm = soundfile.read(io.BytesIO(finished.audio[turn["key"]]), dtype="int16")[0]
        start, end = (round(turn[side] * SAMPLE_RATE) for side in ("start", "end"))
        assert end - start == len(pcm) == turn["samples"]
        own = made[start:end, ("user", "assistant").index(turn["role"])]
        assert not own.any(), "turns of one channel overlap"
        own[:] = pcm
    return made


def members(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("**/*.tar")):
        with tarfile.open(path) as tar:
            found |= {f"{path.name[:4]} {one.name}": tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    return found


def test_two_channels_are_their_turn_table_sample_by_sample(finished: Finished, tmp_path: Path) -> None:
    webdataset = library("webdataset")
    to = exported(finished, tmp_path / "to", "webdataset")
    table = turn_table(to)
    tars = sorted(map(str, (to / "train").iterdir()))
    assert len(tars) > 5
    samples = list(webdataset.WebDataset(tars, shardshuffle=False))
    assert [json.loads(sample["json"])["example_id"] for sample in samples] == WHOLE
    overlaps = 0
    for sample in samples:
        turns, about = table[sample["__key__"]], json.loads(sample["json"])
        sound, rate = soundfile.read(io.BytesIO(sample["wav"]), dtype="int16", always_2d=True)
        assert (rate, len(sound)) == (SAMPLE_RATE, about["samples"])
        np.testing.assert_array_equal(sound, sound_of(turns, finished))
        assert "".join(turn["role"][0] for turn in turns) == DIALOGUES[about["example_id"]]
        assert sample["txt"].decode().splitlines() == [turn["text"] for turn in turns]
        shared = ("start", "end", "channel", "role", "speaker", "text", "sha256", "seed")
        for told, turn in zip(about["turns"], turns, strict=True):
            assert {key: told[key] for key in shared} == {key: turn[key] for key in shared}
        assert turns[0]["start"] == 0
        for before, turn in pairwise(turns):
            assert turn["start"] >= before["start"]
            overlaps += turn["start"] < before["end"]
    assert overlaps > 5


def test_mono_is_the_sum_of_the_channels(finished: Finished, tmp_path: Path) -> None:
    stereo = members(exported(finished, tmp_path / "stereo", "webdataset", audio_format="flac"))
    mono = members(exported(finished, tmp_path / "mono", "webdataset", audio_format="flac", dialogues="mono"))
    sounds = [name for name in stereo if name.endswith(".flac")]
    assert len(sounds) == len(WHOLE)
    for name in sounds:
        two, one = (soundfile.read(io.BytesIO(files[name]), dtype="int16")[0] for files in (stereo, mono))
        np.testing.assert_array_equal(one, two.sum(axis=1))
    assert turn_table(tmp_path / "stereo").keys() == turn_table(tmp_path / "mono").keys()
    assert {turn["channel"] for turns in turn_table(tmp_path / "mono").values() for turn in turns} == {0}


def test_lhotse_reads_multicuts(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lhotse, qa = library("lhotse"), library("lhotse.qa")
    to = exported(finished, tmp_path / "to", "lhotse")
    monkeypatch.chdir(to / "train")
    cuts, recordings, supervisions = (
        kind.from_file(f"{name}.jsonl.gz").to_eager()
        for kind, name in (
            (lhotse.CutSet, "cuts"),
            (lhotse.RecordingSet, "recordings"),
            (lhotse.SupervisionSet, "supervisions"),
        )
    )
    qa.validate_recordings_and_supervisions(recordings, supervisions, read_data=True)
    qa.validate(cuts, read_data=True)
    assert [cut.id for cut in cuts] == WHOLE
    for cut, turns in zip(cuts, turn_table(to).values(), strict=True):
        assert type(cut) is lhotse.MultiCut
        sound = np.rint(cut.load_audio().T * 32768).astype(np.int16)
        np.testing.assert_array_equal(sound, sound_of(turns, finished))
        for spoken, turn in zip(cut.supervisions, turns, strict=True):
            assert (spoken.channel, spoken.text, spoken.speaker) == (
                turn["channel"],
                turn["text"],
                turn["speaker"],
            )
            assert (spoken.start, spoken.end) == pytest.approx((turn["start"], turn["end"]), abs=1e-6)
            assert spoken.custom["role"] == turn["role"]


@pytest.mark.parametrize("mode", ["stereo", "mono"])
def test_lhotse_reads_archives(finished: Finished, tmp_path: Path, mode: str) -> None:
    lhotse = library("lhotse")
    to = exported(finished, tmp_path / "to", "shar", dialogues=mode)
    cuts = list(lhotse.CutSet.from_shar(in_dir=to / "train"))
    assert [cut.id for cut in cuts] == list(turn_table(to))
    for cut, turns in zip(cuts, turn_table(to).values(), strict=True):
        sound = np.rint(cut.load_audio().T * 32768).astype(np.int16)
        expected = sound_of(turns, finished)
        np.testing.assert_array_equal(
            sound, expected if mode == "stereo" else expected.sum(axis=1, keepdims=True)
        )
        assert [spoken.channel for spoken in cut.supervisions] == [turn["channel"] for turn in turns]


def test_nemo_has_a_source_and_a_target(finished: Finished, tmp_path: Path) -> None:
    """What NeMo's DuplexS2SDataset takes of a cut: `recording`, `target_audio`, and the roles as speakers."""
    lhotse = library("lhotse")
    collation = library("lhotse.dataset.collation")
    to = exported(finished, tmp_path / "to", "nemo", sample_rate=16_000, audio_format="flac")
    cuts = lhotse.CutSet.from_shar(in_dir=to / "train").to_eager()
    assert [cut.id for cut in cuts] == list(turn_table(to))
    source, source_lengths = collation.collate_audio(cuts)
    target, target_lengths = collation.collate_audio(cuts, recording_field="target_audio")
    assert source.shape == target.shape
    assert source_lengths.tolist() == target_lengths.tolist() == [cut.num_samples for cut in cuts]
    for row, (cut, turns) in enumerate(zip(cuts, turn_table(to).values(), strict=True)):
        assert (cut.sampling_rate, cut.target_audio.sampling_rate) == (16_000, 16_000)
        for spoken, turn in zip(cut.supervisions, turns, strict=True):
            assert spoken.speaker == {"user": "user", "assistant": "agent"}[turn["role"]]
            middle = round((turn["start"] + turn["end"]) / 2 * 16_000)
            heard = (source if turn["role"] == "user" else target)[row, middle - 50 : middle + 50]
            assert float(heard.abs().max()) > 0.02


@pytest.mark.parametrize("mode", [None, "stereo"])
def test_rttm_is_read_by_lhotse(finished: Finished, tmp_path: Path, mode: str | None) -> None:
    lhotse = library("lhotse")
    to = exported(finished, tmp_path / "to", "rttm", dialogues=mode)
    found = lhotse.SupervisionSet.from_rttm(sorted(to.rglob("*.rttm")))
    by_name: dict[str, list[Any]] = {}
    for segment in found:
        by_name.setdefault(segment.recording_id, []).append(segment)
    assert list(by_name) == list(turn_table(to))
    for name, turns in turn_table(to).items():
        (sound,) = to.rglob(f"{name}.wav")
        assert soundfile.info(sound).channels == (2 if mode else 1)
        for segment, turn in zip(by_name[name], turns, strict=True):
            assert (segment.start, segment.end) == pytest.approx((turn["start"], turn["end"]), abs=2e-6)
            assert (segment.channel, segment.speaker) == (turn["channel"] + 1, turn["speaker"])


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_bytes_stopped_or_not(finished: Finished, tmp_path: Path, format: str) -> None:
    options: dict[str, Any] = {"splits": parse_splits("train=0.7,dev=0.3")}
    whole = contents(exported(finished, tmp_path / "whole", format, **options))
    with pytest.raises(StoppedError):
        exported(finished, tmp_path / "to", format, on_part=stop_at(1), **options)
    redone: list[Part] = []
    assert contents(exported(finished, tmp_path / "to", format, on_part=redone.append, **options)) == whole
    assert redone
    # The parts of an export change its files, but no sound.
    if format == "webdataset":
        big = exported(finished, tmp_path / "big", format, part_bytes=10**9)
        assert members(big) == members(tmp_path / "whole")
        assert turn_table(big) == turn_table(tmp_path / "whole")


def test_other_gaps_are_another_export(finished: Finished, tmp_path: Path) -> None:
    to = exported(finished, tmp_path / "to", "webdataset", gaps="0.4")
    assert exported(finished, to, "webdataset", gaps="uniform(0.4,0.4)") == to
    for turns in turn_table(to).values():
        for before, turn in pairwise(turns):
            assert turn["start"] == pytest.approx(before["end"] + 0.4, abs=1e-6)
    for other in ({"gaps": "0.5"}, {"gaps": "0.4", "dialogues": "mono"}):
        with pytest.raises(ConfigError, match="another export"):
            exported(finished, to, "webdataset", **other)


def test_a_dialogue_with_a_turn_that_the_filter_leaves_out_is_left_out(tmp_path: Path) -> None:
    finished = finished_job(
        tmp_path,
        FolderStore(tmp_path / "store"),
        LINES,
        JobSpec("hibari", speak="all", quality=Quality(meters={"asr": {}})),
    )
    # The measured `wer` of an item is a hundredth of its index.
    where = parse_where("wer != 0.01 and wer != 0.05")
    to = tmp_path / "to"
    report = export(
        finished.ledger, finished.store, finished.job_id, "webdataset", str(to), dialogues="mono", where=where
    )
    kept = [name for name in WHOLE if name not in ("a", "b c")]
    assert [turns[0]["example_id"] for turns in turn_table(to).values()] == kept
    assert report.items == TURNS - 8
    assert str(report.reasons) == (
        "2 without audio, 1 by wer != 0.01, 1 by wer != 0.05, 6 by other turns of their dialogue"
    )
    finished.ledger.close()


def test_several_jobs_of_dialogues_are_one_set(finished: Finished, tmp_path: Path) -> None:
    # The last dialogue of the first job and the first one of the second have one example id.
    lines = [LINES[0] | {"example_id": LINES[-1]["example_id"]}, *LINES[1:3]]
    second = finished_job(tmp_path, FolderStore(tmp_path / "store"), lines, SPOKEN, seconds=0.5)
    jobs = [StoredJob(one.ledger, one.store, one.ledger.job(one.job_id)) for one in (finished, second)]
    to = tmp_path / "to"
    report = export_jobs(jobs, "webdataset", str(to), dialogues="stereo", gaps=WIDE)
    assert (report.items, report.left_out) == (TURNS + 8, 4)
    table, files = turn_table(to), members(to)
    both = Finished(tmp_path, second.ledger, second.store, "", finished.audio | second.audio)
    for name, turns in table.items():
        sound = soundfile.read(io.BytesIO(files[f"shar {name}.wav"]), dtype="int16")[0]
        np.testing.assert_array_equal(sound, sound_of(turns, both))
    roles = ["".join(turn["role"][0] for turn in turns) for turns in table.values()]
    assert roles == [*(DIALOGUES[name] for name in WHOLE), "uaua", "uuaa"]
    assert "stereo" in (to / "README.md").read_text()
    # Pauses are those of an export of the job alone, also of a dialogue whose id got that of its job.
    export_jobs(jobs[1:], "webdataset", str(tmp_path / "alone"), dialogues="stereo", gaps=WIDE)
    alone = [[turn["start"] for turn in turns] for turns in turn_table(tmp_path / "alone").values()]
    assert [[turn["start"] for turn in turns] for turns in table.values()][-len(alone) :] == alone
    second.ledger.close()


@pytest.mark.parametrize(
    ("format", "options", "words"),
    [
        ("kaldi", {}, "The format kaldi has no sounds of dialogues"),
        ("nemo", {"dialogues": "mono"}, "a source and a target"),
        ("webdataset", {"dialogues": "surround"}, "channels of the sounds are not given"),
        ("webdataset", {"dialogues": None, "gaps": "0.4"}, "channels of the sounds are not given"),
        ("webdataset", {"gaps": "normal(0.2,-1)"}, "no distribution"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    finished: Finished, tmp_path: Path, format: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        exported(finished, tmp_path / "to", format, **options)
    assert not (tmp_path / "to").exists()


def test_two_channels_need_two_roles(tmp_path: Path) -> None:
    finished = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES[:2])
    given = finished.ledger, finished.store, finished.job_id, "nemo", str(tmp_path / "to")
    with pytest.raises(ConfigError, match="speaks only one role"):
        export(*given, dialogues="stereo")
    finished.ledger.close()


@pytest.mark.parametrize(
    "text", ["", "x", "normal", "normal(1)", "normal(1,2,3)", "normal(1,-1)", "uniform(1,0)", "61", "nan",
             "uniform(-inf,0)", "normal(0,nan)", "0.2 0.3", "gamma(1,2)"]
)  # fmt: skip
def test_gaps_that_are_no_distribution(text: str) -> None:
    with pytest.raises(ConfigError, match="no distribution"):
        parse_gaps(text)


def test_gaps_are_drawn_by_seed_example_and_turn() -> None:
    gaps = parse_gaps(" normal( 0.2, 0.3 )")
    assert gaps == Gaps("normal", 0.2, 0.3)
    drawn = np.array([gaps.drawn(1, f"e{number}", 2) for number in range(20_000)])
    assert (drawn.mean(), drawn.std()) == pytest.approx((0.2, 0.3), abs=0.02)
    assert len({gaps.drawn(*key) for key in ((1, "a", 1), (2, "a", 1), (1, "b", 1), (1, "a", 2))}) == 4
    even = parse_gaps("uniform(-0.5,1)")
    drawn = np.array([even.drawn(1, f"e{number}", 2) for number in range(20_000)])
    assert drawn.min() >= -0.5
    assert drawn.max() <= 1
    assert (drawn.mean(), drawn.std()) == pytest.approx((0.25, 1.5 / math.sqrt(12)), abs=0.02)
    # Fixed for ever, so that an export can be made again.
    assert parse_gaps("normal(0.2,0.3)").drawn(0, "a", 1) == pytest.approx(0.0, abs=2)


def test_words_count_from_the_start_of_the_sound(finished: Finished) -> None:
    sounds = Sounds("stereo", parse_gaps("0.5"), Conversion(), apart=False)
    items = list(islice(audio_items(finished.ledger, finished.store, finished.job_id), 4))
    columns = msgspec.structs.replace(items[0].columns, timed=True)
    said = [msgspec.structs.replace(item, columns=columns, words=(Word("Oh", 0.25, 0.5),)) for item in items]
    turns = tuple(sounds.placed(said))
    for turn in turns:
        (word,) = turn.words
        start = turn.place.start
        assert (word.start_s, word.end_s) == pytest.approx((start + 0.25, start + 0.5), abs=1e-3)
    assert turns[-1].place.start > 4
    cut = cut_of("a", msgspec.structs.replace(items[0], turns=turns), {})
    for turn, spoken in zip(turns, cut["supervisions"], strict=True):
        assert spoken["alignment"]["word"][0][1] == turn.words[0].start_s


def test_a_sum_is_limited_without_clicks() -> None:
    seconds = np.arange(SAMPLE_RATE) / SAMPLE_RATE
    two = np.stack([0.95 * np.sin(2 * np.pi * hertz * seconds) for hertz in (200, 310)], axis=1)
    two[: SAMPLE_RATE // 4, 1] = 0
    two[-SAMPLE_RATE // 4 :, 0] = 0
    two = two.astype(np.float32)
    total, made = two.sum(axis=1), mixed(two.copy())[:, 0]
    assert np.abs(total).max() > 1.5
    assert np.abs(made).max() <= 1
    alone = ~two.all(axis=1)
    np.testing.assert_array_equal(made[alone], total[alone])
    quiet = np.abs(total) <= KNEE
    np.testing.assert_array_equal(made[quiet], total[quiet])
    # No step is larger than those of the two sounds together.
    steps = np.abs(np.diff(made))
    assert (steps <= np.abs(np.diff(two, axis=0)).sum(axis=1) * 1.25 + 1e-4).all()


def test_audio_that_changed_is_not_mixed(finished: Finished, tmp_path: Path) -> None:
    key = list(finished.audio)[-1]
    finished.store.delete(key)
    finished.store.put(key, bytes(len(finished.audio[key])))
    with pytest.raises(StoreError, match="has changed"):
        exported(finished, tmp_path / "to", "webdataset")
    finished.store.delete(key)
    finished.store.put(key, finished.audio[key])

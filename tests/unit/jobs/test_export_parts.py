"""The pieces of an export: splits, plan, sorting, tar members, ids for Kaldi."""

from __future__ import annotations

import hashlib
import io
import random
import sys
import tarfile
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.export import parse_splits
from jobs.export.audio import AudioNames
from jobs.export.card import ROWS, Hours
from jobs.export.dataset import (
    BATCH_FILES,
    Dataset,
    Destination,
    Finished,
    FolderDestination,
    Identity,
    PartFiles,
    WrittenFile,
    open_destination,
)
from jobs.export.files import SortedLines
from jobs.export.folder_formats import kaldi_ids, tar_file
from jobs.export.items import WHOLE, LeftOut, exported, make_plan
from jobs.formatting import json_bytes
from jobs.ledger.records import Artifact, ItemRow, ItemState
from jobs.store import FolderStore
from pipelines.errors import ConfigError, ErrorCode, StoreError


def row(index: int, audio_bytes: int | None = 10, state: ItemState = ItemState.DONE) -> ItemRow:
    artifact = None
    if audio_bytes is not None:
        sha256 = hashlib.sha256(b"%d" % index).hexdigest()
        artifact = Artifact(index, "audio", f"k{index}", sha256, audio_bytes, 1000, 24_000, 24_000, 0)
    return ItemRow(index, f"e{index}", state, 0, 1, None, None, artifact)


def test_splits_by_hash_keep_their_shares_and_their_members() -> None:
    splits = parse_splits("train=0.9, dev=0.05, test=0.05")
    members = {f"utterance-{number}": splits.of(f"utterance-{number}") for number in range(20_000)}
    counts = [list(members.values()).count(name) for name in splits.bounds]
    assert counts == pytest.approx([18_000, 1000, 1000], rel=0.1)
    wider = parse_splits("train=0.8,dev=0.15,test=0.05")
    assert all(wider.of(name) == "test" for name, split in members.items() if split == "test")
    # Fixed for ever, so that a dataset that grows keeps its test set.
    assert [name for name, split in members.items() if split == "test"][:5] == [
        f"utterance-{number}" for number in (146, 155, 159, 166, 220)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "train",
        "train=",
        "train=1.1",
        "train=0.5",
        "train=0.5,dev=0.4",
        "train=0.5,train=0.5",
        "a b=1",
        "../x=1",
        "train=-1,dev=2",
        "x=1/0",
        "x=nan",
    ],
)
def test_shares_that_make_no_splits(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_splits(text)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_thirds_add_up_to_one() -> None:
    assert parse_splits("a=1/3,b=1/3,c=1/3").bounds["c"] == 2**64


def test_a_plan_cuts_before_the_limit() -> None:
    rows = [
        row(0),
        row(1),
        row(2, None, ItemState.FAILED),
        row(3),
        row(4, 25),
        row(5),
        row(6, state=ItemState.PENDING),
    ]
    plan = make_plan(exported(rows), WHOLE, 20)
    assert [
        (part.first, part.last, part.items, part.audio_bytes, part.number, part.of) for part in plan.parts
    ] == [
        (0, 1, 2, 20, 0, 4),
        (3, 3, 1, 10, 1, 4),
        (4, 4, 1, 25, 2, 4),
        (5, 5, 1, 10, 3, 4),
    ]
    assert plan.items == 5
    assert len(make_plan(exported(rows), WHOLE, None).parts) == 1


def test_plans_differ_exactly_when_the_made_items_do() -> None:
    rows = [row(0), row(1, None, ItemState.FAILED)]
    assert make_plan(exported(rows), WHOLE, 20).digest == make_plan(exported(rows), WHOLE, None).digest
    assert make_plan(exported(rows), WHOLE, 20).digest != make_plan([row(0), row(1)], WHOLE, 20).digest
    assert make_plan([], WHOLE, 20).parts == ()


def test_every_made_item_is_in_one_part() -> None:
    splits = parse_splits("train=0.6,dev=0.4")
    rows = [row(index, random.Random(index).randrange(1, 30)) for index in range(500)]
    plan = make_plan(rows, splits, 100)
    assert plan.items == 500
    for split in splits.bounds:
        parts = [part for part in plan.parts if part.split == split]
        assert all(before.last < after.first for before, after in pairwise(parts))
        assert all(part.audio_bytes <= 100 for part in parts)


@given(st.lists(st.binary(max_size=8).map(lambda data: data.replace(b"\n", b"") + b"\n")), st.integers(1, 40))
def test_lines_are_sorted_by_their_bytes_however_small_the_runs(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], run: int
) -> None:
    folder = tmp_path_factory.mktemp("sort")
    for run_bytes in (run, 1 << 20):
        sorter = SortedLines(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jobs.export.files.SORT_BYTES", run_bytes)
            for line in lines:
                sorter.add(line)
        assert list(sorter) == sorted(lines)
        assert list(sorter) == sorted(lines)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=4), st.text(min_size=1, max_size=4)), unique=True))
def test_utterances_in_order_have_their_speakers_in_order(pairs: list[tuple[str, str]]) -> None:
    ids = [kaldi_ids(speaker, example) for speaker, example in pairs]
    utterances = sorted((utterance, speaker) for speaker, utterance in ids)
    assert [speaker for _, speaker in utterances] == sorted(speaker for speaker, _ in ids)
    assert len({utterance for utterance, _ in utterances}) == len(pairs)
    assert all(utterance.split() == [utterance] and utterance.isascii() for utterance, _ in utterances)


def test_tar_files_have_the_bytes_that_they_always_had() -> None:
    members = {
        "000000000-utt.wav": bytes(range(256)) * 3,
        "000000000-utt.json": b"{}",
        "000000000-utt.txt": b"",
        "n" * 120 + ".wav": bytes(512),
    }
    file = io.BytesIO()
    with tar_file(file) as add:
        for name, data in members.items():
            add(name, data)
    assert (
        hashlib.sha256(file.getvalue()).hexdigest()
        == "bfaea961e5e015704727f62aef2706ef2ad1c4bb68034064664c204cd458de35"
    )
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        read = {member.name: archive.extractfile(member) for member in archive}
        assert {name: data.read() for name, data in read.items() if data is not None} == members
    with tar_file(empty := io.BytesIO()):
        pass
    assert empty.getvalue() == bytes(tarfile.RECORDSIZE)


def test_a_bucket_takes_nothing_foreign_for_an_exports_file(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    store = FolderStore(tmp_path / "bucket")
    destination = Destination(store, store.url, tmp_path)

    def publish(content: bytes) -> None:
        path = tmp_path / "file"
        path.write_bytes(content)
        destination.publish("train/a.jsonl", str(path), hashlib.sha256(content).hexdigest())

    publish(b"ours")
    publish(b"ours")
    for other in (b"foreign", b"Ours", b""):
        with pytest.raises(StoreError) as caught:
            publish(other)
        assert caught.value.code is ErrorCode.STORE_CONFLICT
    assert store.get("train/a.jsonl") == b"ours"


def write_small_files(files: PartFiles, *, stopped: bool = False) -> None:
    """Writes more files than are held, beside one that stays open."""
    table = files.open("train/table.txt")
    for number in range(BATCH_FILES + 2):
        files.add(f"train/small/{number:06d}.txt", b"%d" % number)
    table.write(b"the table")
    if stopped:
        raise KeyboardInterrupt


def test_small_files_are_published_before_their_part_ends(tmp_path: Path) -> None:
    identity = Identity("job", "textgrid", 1, "digest", (), 0, "")

    def dataset() -> tuple[Dataset, bool]:
        made = Dataset(there, identity, AudioNames((), None))
        return made, made.begin()

    def found() -> list[str]:
        names = (str(path.relative_to(to)) for path in to.rglob("*") if path.is_file())
        return sorted(name for name in names if name.startswith("train/"))

    to = tmp_path / "to"
    with open_destination(str(to), None) as there:
        first, _ = dataset()
        with pytest.raises(KeyboardInterrupt):
            first.add("train-00000", partial(write_small_files, stopped=True))
        assert len(found()) == BATCH_FILES
    with open_destination(str(to), None) as there:
        second, _ = dataset()
        assert second.add("train-00000", write_small_files)
        assert len(found()) == BATCH_FILES + 3
    (to / "train/small/000000.txt").unlink()
    for written_again in (True, False):
        with open_destination(str(to), None) as there:
            third, _ = dataset()
            assert third.add("train-00000", write_small_files) is written_again
    with open_destination(str(to), None) as there:
        last, _ = dataset()
        assert not last.add("train-00000", write_small_files)
        last.finish({"train": 1}, LeftOut())
        assert dataset()[1]
    files = [
        WrittenFile(name, len(data := (to / name).read_bytes()), hashlib.sha256(data).hexdigest())
        for name in found()
    ]
    assert len(files) == BATCH_FILES + 3
    assert (to / "export.json").read_bytes() == json_bytes(Finished(identity, {"train": 1}, 0, files))
    assert [path.name for path in to.iterdir() if path.name != "train"] == ["export.json"]


def test_no_name_of_a_file_is_kept_until_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python 3.12 never frees an interned text, and a path of pathlib interns its parts.
    interned, intern = set[str](), sys.intern
    monkeypatch.setattr(sys, "intern", lambda text: interned.add(text) or intern(text))
    with open_destination(str(tmp_path / "to"), None) as there:
        dataset = Dataset(there, Identity("job", "textgrid", 1, "digest", (), 0, ""), AudioNames((), None))
        dataset.begin()
        dataset.add("train-00000", write_small_files)
        dataset.finish({"train": 1}, LeftOut())
        assert there.store.uri("train/small/000007.txt") == str(tmp_path / "to/train/small") + "/000007.txt"
    assert "scratch" in interned
    assert [name for name in interned if name.startswith("0")] == []


def test_a_lost_or_changed_file_is_found_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    store = FolderStore(tmp_path / "bucket")
    files = [WrittenFile(name, 1, "") for name in ("a/b.txt", "a/c.txt", "b.txt")]
    folder = FolderDestination(tmp_path / "bucket")
    for name in ("a/b.txt", "a/b2.txt", "a/c.txt", "b.txt", "c.txt"):
        store.put(name, b"x")
    for there in (Destination(store, store.url, tmp_path), folder):
        assert there.lost(files) is None
        for wrong in (WrittenFile("a/b1.txt", 1, ""), WrittenFile("a/c.txt", 2, ""), WrittenFile("d", 1, "")):
            assert there.lost(sorted([*files[:1], wrong], key=lambda one: one.name)) == wrong.name


def test_a_card_sums_the_audio_of_more_names_than_are_in_memory() -> None:
    hours, expected = Hours(), Counter[str]()
    for number in range(25_000):
        name, milliseconds = f"voice {number % 12_000}", 1 + 5 * (number % 3000 == 7)
        hours.add(name, milliseconds)
        expected[name] += milliseconds
    longest = sorted(((-value, name) for name, value in expected.items()))[:ROWS]
    assert hours.longest() == [(name, -negative) for negative, name in longest]
    assert hours.names == 12_000

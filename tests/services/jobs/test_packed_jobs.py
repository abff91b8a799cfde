"""Jobs whose audio is in packs: the same exports as of a loose job, damage that is found, and repair."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from jobs.export import format_names, parse_splits
from jobs.export.formats import find_format
from jobs.layout import pack_index_name, pack_key
from jobs.ledger.records import JobSpec, JobState
from jobs.packs import read_artifact
from jobs.repair import repair_objects, reproduce
from jobs.report import write_report
from jobs.store import FolderStore, ObjectStore, open_store
from jobs.verify import Expected, Fault, ObjectCheck, expected_objects, listed_faults
from pipelines.errors import ConfigError, ErrorCode, StoreError
from pipelines.registry import describe, open_pipeline
from tests.services.jobs.test_s3_store import access_of
from tests.support.export_kit import Finished, export, finished_job, run_all
from tests.support.ledger_kit import execute
from tests.support.manifests import newest_job_manifest, read_manifest
from tests.support.services import S3
from worker.pack_writer import PackBuilder

IDS = ["b", "a", "a b", "fails", "Ünder", "../x\n", "a" * 300, "last"]
LINES = [
    {"example_id": example_id, "messages": [["user", "text", f"Text number {n}."]]}
    for n, example_id in enumerate(IDS)
]
PACKED = JobSpec("hibari", pack=True)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return FolderStore(tmp_path / "store")
    s3: S3 = request.getfixturevalue("moto")
    name = "packs-" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:20]
    return open_store(f"s3://{s3.create_bucket(name)}/p", access_of(s3.endpoint, s3.secret_key))


@pytest.fixture
def packed(tmp_path: Path, store: ObjectStore) -> Iterator[Finished]:
    """A job of seven items in four packs, of two items each but the second."""
    made = finished_job(tmp_path, store, LINES, PACKED, seconds=0.1)
    yield made
    made.ledger.close()


def faults(packed: Finished, *, deep: bool = False) -> list[tuple[str | None, Fault]]:
    check = ObjectCheck(packed.ledger, packed.store, packed.ledger.job(packed.job_id), deep=deep)
    return [(expected.example_id, fault) for expected, fault in check]


def replace_pack(packed: Finished, index: int, change: bytes | None) -> str:
    """Puts other bytes in the place of the pack of an item, or nothing; its key."""
    pack = next(
        row.artifact.pack for row in packed.ledger.items(packed.job_id) if row.index == index and row.artifact
    )
    assert pack is not None
    packed.store.delete(pack)
    if change is not None:
        packed.store.put(pack, change)
    return pack


def pack_of(packed: Finished, index: int) -> tuple[bytes, Expected]:
    """The pack of an item, and what the ledger says of the item."""
    expected = next(
        one for one in expected_objects(packed.ledger, packed.job_id, ("audio",)) if one.index == index
    )
    return packed.store.get(expected.pack or expected.key), expected


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("deep", [False, True])
class TestVerify:
    def test_whole_packs_are_whole(self, packed: Finished, deep: bool) -> None:
        assert len(packed.ledger.packs(packed.job_id)) == 4
        assert faults(packed, deep=deep) == []

    def test_one_flipped_byte_is_one_changed_item(self, packed: Finished, deep: bool) -> None:
        data, expected = pack_of(packed, 1)
        replace_pack(packed, 1, flipped(data, expected.end - 1))
        assert faults(packed, deep=deep) == [("a", "changed")]

    def test_a_pack_that_is_cut_off_lacks_its_last_member(self, packed: Finished, deep: bool) -> None:
        data, expected = pack_of(packed, 1)
        replace_pack(packed, 1, data[: expected.end - 1])
        assert faults(packed, deep=deep) == [("a", "changed")]

    def test_a_pack_that_is_gone_lacks_all_of_them(self, packed: Finished, deep: bool) -> None:
        replace_pack(packed, 1, None)
        assert faults(packed, deep=deep) == [("b", "missing"), ("a", "missing")]

    def test_damage_between_the_members_is_no_items(self, packed: Finished, deep: bool) -> None:
        data, expected = pack_of(packed, 0)
        replace_pack(packed, 0, flipped(data, (expected.pack_offset or 0) - 1))
        assert faults(packed, deep=deep) == []

    def test_a_wrong_offset_in_the_ledger_is_found_by_reading(self, packed: Finished, deep: bool) -> None:
        execute(packed.ledger, "UPDATE artifacts SET pack_offset = pack_offset + 1 WHERE idx = 4")
        # A bucket that is asked for its checksums says that the pack is whole; it is.
        found = [] if packed.store.remote and not deep else [("Ünder", "changed")]
        assert faults(packed, deep=deep) == found


def test_listings_find_packs_that_are_gone_or_too_short(packed: Finished) -> None:
    data, expected = pack_of(packed, 1)
    replace_pack(packed, 1, data[: expected.end - 1])
    replace_pack(packed, 7, None)
    found = listed_faults(packed.store, expected_objects(packed.ledger, packed.job_id))
    assert [(lost.index, fault) for lost, fault in found] == [
        (1, "changed"),
        (6, "missing"),
        (7, "missing"),
    ]
    with pytest.raises(StoreError) as refused:
        export(packed.ledger, packed.store, packed.job_id, "webdataset", str(packed.folder / "out"))
    assert refused.value.code is ErrorCode.STORE_MISSING


def test_an_export_refuses_a_member_that_has_changed(packed: Finished) -> None:
    data, expected = pack_of(packed, 1)
    replace_pack(packed, 1, flipped(data, expected.end - 1))
    for chosen, root in (("webdataset", None), ("kaldi", packed.folder / "audio")):
        with pytest.raises(StoreError) as refused:
            export(
                packed.ledger,
                packed.store,
                packed.job_id,
                chosen,
                str(packed.folder / chosen),
                audio_root=root,
            )
        assert refused.value.code is ErrorCode.STORE_CONFLICT


def test_what_is_made_again_leaves_its_pack(tmp_path: Path, store: ObjectStore) -> None:
    spec = JobSpec("hibari", describe("hibari").revision, pack=True, format="flac")
    packed = finished_job(tmp_path, store, LINES[:3], spec, seconds=0.1)
    job = packed.ledger.job(packed.job_id)
    assert job.state is JobState.COMPLETED
    lost = [one for one in expected_objects(packed.ledger, job.id, ("audio",)) if one.index == 1]
    with closing(open_pipeline("hibari")) as pipeline:
        assert repair_objects(packed.ledger, store, job, pipeline, lost) == {"other": 1}
        rows = {row.index: row.artifact for row in packed.ledger.items(job.id)}
        again = rows[1]
        assert again is not None
        assert again.pack is None
        assert store.head(again.key) is not None
        assert rows[0] is not None
        assert rows[0].pack is not None
        assert faults(packed) == []
        assert [item.match for item in reproduce(packed.ledger, store, job, pipeline, 3)].count("same") == 1
        # What comes out as it was moves out of its pack all the same: the pack may be gone.
        execute(packed.ledger, "UPDATE artifacts SET pack = 'gone.tar', pack_offset = 0 WHERE idx = 1")
        lost = [one for one in expected_objects(packed.ledger, job.id, ("audio",)) if one.index == 1]
        assert repair_objects(packed.ledger, store, job, pipeline, lost) == {"same": 1}
    assert faults(packed) == []
    newest = newest_job_manifest(store, job.id)
    assert newest is not None
    assert [line.pack is None for line in read_manifest(store, newest)] == [False, True, False]
    packed.ledger.close()


def test_manifests_say_where_members_are(packed: Finished) -> None:
    to = packed.folder / "manifest.jsonl"
    export(packed.ledger, packed.store, packed.job_id, "manifest", str(to))
    lines = [json.loads(line) for line in to.read_text().splitlines()]
    assert len(lines) == 7
    for line in lines:
        data = packed.store.get(line["pack"])[line["pack_offset"] :][: line["bytes"]]
        assert hashlib.sha256(data).hexdigest() == line["sha256"]


@pytest.mark.parametrize("format", ["espnet", "nemo", "openai-batch", "kaldi", "lhotse", "espnet-dataset"])
def test_a_format_of_paths_needs_a_folder_for_the_audio(packed: Finished, format: str) -> None:
    to = str(packed.folder / "to")
    with pytest.raises(ConfigError, match="audio-root"):
        export(packed.ledger, packed.store, packed.job_id, format, to)
    assert not Path(to).exists()
    export(packed.ledger, packed.store, packed.job_id, format, to, audio_root=packed.folder / "audio")
    assert len(list((packed.folder / "audio").rglob("*.wav"))) == 7


def test_a_report_plays_what_is_in_packs(packed: Finished) -> None:
    page = packed.folder / "report.html"
    write_report(packed.ledger, packed.store, packed.job_id, page)
    assert page.read_text().count("data:audio/flac;base64,") >= 7
    assert "Players read the files" not in page.read_text()


def pack_in_place(finished: Finished) -> None:
    """Moves the objects of a loose job into one pack; spec and hashes stay, so every export has to stay as
    it is."""
    builder = PackBuilder()
    artifacts = list(finished.ledger.artifacts(finished.job_id, "audio"))
    for one in artifacts:
        data = finished.store.get(one.key)
        offset = builder.add(one, data, example_id="")
        execute(
            finished.ledger,
            "UPDATE artifacts SET pack_offset = :offset WHERE idx = :index",
            offset=offset,
            index=one.index,
        )
        finished.store.delete(one.key)
    whole = builder.finish(pack_index_name(finished.job_id, 0, 1, 0))
    pack = pack_key(finished.job_id, 0, 1, 0, hashlib.sha256(whole).hexdigest())
    finished.store.put(pack, whole)
    execute(finished.ledger, "UPDATE artifacts SET pack = :pack", pack=pack)


def files_of(finished: Finished, format: str, to: Path) -> dict[str, bytes]:
    """Name -> content of an export, without what manifests say of packs and what follows from it."""
    chosen = find_format(format)
    audio = finished.folder / "audio"
    root = None if chosen.embeds_audio or chosen.failure_line or not chosen.names_audio else audio
    splits = parse_splits("train=0.5,dev=0.5") if chosen.failure_line is None else None
    export(finished.ledger, finished.store, finished.job_id, format, str(to), audio_root=root, splits=splits)
    paths = [path for path in (to, *to.rglob("*"), *audio.rglob("*")) if path.is_file()]
    files = {os.path.relpath(path, to): path.read_bytes() for path in paths}
    files.pop("export.json", None)
    for name, data in files.items():
        if name == "manifest.jsonl.gz" or (format == "manifest" and name.endswith(".jsonl")):
            plain = gzip.decompress(data) if name.endswith(".gz") else data
            lines = [json.loads(line) for line in plain.splitlines()]
            files[name] = repr(
                [{key: value for key, value in line.items() if "pack" not in key} for line in lines]
            ).encode()
    return files


def of_audio(format: str) -> bool:
    """Whether a format needs neither codes nor times of words."""
    found = find_format(format)
    return not (found.needs_codes or found.needs_words)


@pytest.mark.parametrize("format", filter(of_audio, format_names()))
def test_every_format_is_the_same_from_packs(tmp_path: Path, format: str) -> None:
    finished = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES, seconds=0.1)
    loose = files_of(finished, format, tmp_path / "loose")
    if (tmp_path / "audio").exists():
        (tmp_path / "audio").rename(tmp_path / "audio of the loose one")
    pack_in_place(finished)
    assert not list((tmp_path / "store").rglob("*.wav"))
    packed = files_of(finished, format, tmp_path / "packed")
    assert {
        name.replace("packed", "loose"): data.replace(b"/packed/", b"/loose/")
        for name, data in packed.items()
    } == loose
    finished.ledger.close()


def test_a_retry_makes_new_packs(packed: Finished) -> None:
    before = packed.ledger.packs(packed.job_id)
    assert packed.ledger.retry(packed.job_id, None) == 1
    run_all(packed.ledger, packed.store, packed.job_id, 0.1, mended=True)
    after = packed.ledger.packs(packed.job_id)
    assert before < after
    assert len(after) == 5
    assert faults(packed) == []
    assert {row.index for row in packed.ledger.items(packed.job_id) if row.artifact} == set(range(8))


def test_texts_are_read_from_packs_too(packed: Finished) -> None:
    execute(packed.ledger, "UPDATE artifacts SET kind = 'text' WHERE idx = 1")
    (text,) = packed.ledger.artifacts(packed.job_id, "text")
    assert hashlib.sha256(read_artifact(packed.store, text)).hexdigest() == text.sha256
    assert faults(packed) == []
    replace_pack_of_text = packed.store.get(text.pack or "")
    packed.store.delete(text.pack or "")
    packed.store.put(text.pack or "", flipped(replace_pack_of_text, (text.pack_offset or 0) + 3))
    assert faults(packed) == [(None, "changed")]

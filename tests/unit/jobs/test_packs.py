"""Packs: plain tar files whose members begin where the ledger says, and reading one member of them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.layout import item_key, lease_of_pack, pack_index_name, pack_key, sha256_of_pack
from jobs.ledger.records import Artifact
from jobs.packs import KEPT_PIECES, PIECE_BYTES, ArtifactReader, read_artifact
from pipelines.errors import ErrorCode, StoreError
from tests.support.fakes import MemoryStore
from worker.pack_writer import PackBuilder

JOB = "01m82cxvbf9gd73qc850cvphp6"
INDEX = pack_index_name(JOB, 3, 1, 0)


def packed(members: Mapping[str, bytes]) -> tuple[bytes, list[Artifact]]:
    """A pack of these members, and what the ledger would know of them."""
    builder = PackBuilder()
    rows: list[Artifact] = []
    for number, (key, data) in enumerate(members.items()):
        sha256 = hashlib.sha256(data).hexdigest()
        row = Artifact(number, "audio", key, sha256, len(data), 1, 1, 1, 0, "pack.tar")
        offset = builder.add(row, data, example_id=f"item-{number}")
        rows.append(msgspec.structs.replace(row, pack_offset=offset))
    return builder.finish(INDEX), rows


def read_tar(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # pyright: ignore[reportOptionalMemberAccess]


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1),
        st.binary(),
        max_size=8,
    )
)
def test_members_begin_where_they_are_said_to(members: dict[str, bytes]) -> None:
    data, rows = packed({f"audio/{name}": content for name, content in members.items()})
    store = MemoryStore()
    store.put("pack.tar", data)
    assert [read_artifact(store, row) for row in rows] == list(members.values())
    found = read_tar(data)
    assert found.pop(INDEX).count(b"\n") == len(members)
    assert found == {f"audio/{name}": content for name, content in members.items()}


def test_ten_thousand_members_with_names_longer_than_the_old_format_takes() -> None:
    long = "x" * 60
    members = {
        item_key(JOB, "audio", number, f"{number}-{long}", "flac", draw=1): b"%d" % number * (number % 7)
        for number in range(10_000)
    }
    assert max(map(len, members)) > 100
    members["audio/" + "y" * 240 + ".wav"] = b"longer than any field of the old format"
    data, rows = packed(members)
    assert all(
        data[row.pack_offset : row.pack_offset + row.bytes] == members[row.key]
        for row in rows
        if row.pack_offset is not None
    )
    found = read_tar(data)
    lines = [json.loads(line) for line in found.pop(INDEX).splitlines()]
    assert found == members
    assert [
        (line["key"], line["offset"], line["bytes"], line["sha256"], line["index"], line["example_id"])
        for line in lines
    ] == [(row.key, row.pack_offset, row.bytes, row.sha256, row.index, f"item-{row.index}") for row in rows]


def test_equal_members_give_equal_bytes_and_whole_blocks() -> None:
    members = {"a.wav": b"", "b.wav": b"x" * 512, "c.wav": b"y" * 513}
    data, _ = packed(members)
    assert data == packed(members)[0]
    assert len(data) % 512 == 0


def test_a_pack_without_members_is_a_tar_file() -> None:
    data, _ = packed({})
    assert read_tar(data) == {INDEX: b""}


def test_an_artifact_of_its_own_is_read_under_its_key() -> None:
    store = MemoryStore()
    store.put("a.wav", b"alone")
    assert read_artifact(store, Artifact(0, "audio", "a.wav", "", 5, 1, 1, 1, 0)) == b"alone"


def test_a_pack_that_is_cut_off_or_gone_is_an_error() -> None:
    store = MemoryStore()
    data, (row,) = packed({"a.wav": b"0123456789"})
    store.put("pack.tar", data[: (row.pack_offset or 0) + 9])
    with pytest.raises(StoreError) as cut:
        read_artifact(store, row)
    assert cut.value.code is ErrorCode.STORE_CONFLICT
    store.delete("pack.tar")
    with pytest.raises(StoreError) as gone:
        read_artifact(store, row)
    assert gone.value.code is ErrorCode.STORE_MISSING


def test_the_key_of_a_pack_says_who_wrote_it_and_what_it_holds() -> None:
    sha256 = hashlib.sha256(b"pack").hexdigest()
    key = pack_key(JOB, 3, 12, 7, sha256)
    assert key == f"jobs/{JOB}/packs/000003-12-7-{sha256[:16]}.tar"
    assert lease_of_pack(key, JOB) == (3, 12)
    assert sha256_of_pack(key) == sha256[:16]
    assert lease_of_pack(key, "another") is None
    assert lease_of_pack(INDEX, JOB) is None
    assert sha256_of_pack("notes.tar") == ""


class RemoteStore(MemoryStore):
    """A store in memory that takes itself for a remote one, and counts what is asked of it."""

    remote: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return super().get_range(key, offset, length)


@pytest.fixture
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of pieces that the parameter gives."""
    monkeypatch.setattr("jobs.packs.PIECE_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("piece_bytes", [100, 512, 5000, 1 << 20], indirect=True)
def test_neighbours_in_a_remote_store_are_read_in_pieces(piece_bytes: int) -> None:
    data, rows = packed({f"{number}.wav": b"%d" % number * (100 * number) for number in range(30)})
    store = RemoteStore()
    store.put("pack.tar", data)
    reader = ArtifactReader(store)
    for row in rows:
        assert reader.read(row) == data[row.pack_offset or 0 :][: row.bytes]
    pieces = {one for one in store.asked if one[1] == piece_bytes}
    assert all(offset % piece_bytes == 0 for offset, _ in pieces)
    assert len(pieces) <= -(-len(data) // piece_bytes)


def test_threads_that_want_one_piece_ask_for_it_once() -> None:
    data, rows = packed({f"{number}.wav": b"x" * 10 for number in range(64)})
    store = RemoteStore()
    store.put("pack.tar", data)
    reader = ArtifactReader(store)
    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(reader.read, rows)) == {b"x" * 10}
    assert store.asked == [(0, PIECE_BYTES)]


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("piece_bytes", [1024], indirect=True)
def test_few_pieces_are_kept_and_a_failed_one_is_asked_for_again() -> None:
    data, rows = packed({f"{number}.wav": b"x" * 512 for number in range(3 * KEPT_PIECES)})
    store = RemoteStore()
    store.put("pack.tar", data)
    reader = ArtifactReader(store)
    store.fail_next = [StoreError(ErrorCode.STORE_UNREACHABLE, "away")]
    with pytest.raises(StoreError):
        reader.read(rows[0])
    assert [reader.read(row) for row in rows] == [b"x" * 512] * len(rows)
    before = len(store.asked)
    reader.read(rows[-1])
    assert len(store.asked) == before
    reader.read(rows[0])
    assert len(store.asked) == before + 1


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("piece_bytes", [512], indirect=True)
def test_a_piece_that_ends_early_is_an_error_too() -> None:
    data, (first, last) = packed({"a.wav": b"a" * 600, "b.wav": b"b" * 600})
    store = RemoteStore()
    store.put("pack.tar", data[: (last.pack_offset or 0) + 599])
    reader = ArtifactReader(store)
    assert reader.read(first) == b"a" * 600
    with pytest.raises(StoreError) as cut:
        reader.read(last)
    assert cut.value.code is ErrorCode.STORE_CONFLICT

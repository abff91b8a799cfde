"""Keys of a job's objects, whatever its example ids are; payloads and manifests under them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.layout import item_key, numbered_key, put_numbered, slug
from jobs.ledger.records import Job, JobSpec, JobState
from jobs.shard_file import compress, encode_lines, read_raw_shard, read_shard
from jobs.spec import GoodLine
from jobs.store import FolderStore
from jobs.store.base import split_key
from pipelines.errors import ErrorCode, StoreError
from pipelines.request import Generation, Message
from tests.support.fakes import MemoryStore


def job_record() -> Job:
    spec = JobSpec("hibari")
    return Job(
        spec,
        "5a" * 32,
        "in",
        "00",
        "",
        "file:///x",
        id="01J",
        state=JobState.COMPLETED,
        state_reason="",
        total_items=3,
        total_shards=1,
        rejected_lines=0,
        lines_read=3,
        created_at=0.0,
        started_at=0.0,
        finished_at=0.0,
    )


def test_an_audio_key() -> None:
    assert item_key("01J", "audio", 12_345, "utt-1", "wav") == "jobs/01J/audio/00001/000012345-utt-1.wav"


@pytest.mark.parametrize(
    ("example_id", "expected"),
    [
        ("../../x", "x"),
        ("a b/c", "a_b_c"),
        ("Zoë", "Zoe"),
        ("日本語", "item"),
        ("..", "item"),
        ("'; DROP TABLE items; --", "DROP_TABLE_items_--"),
        ("$(rm -rf /)\n", "rm_-rf"),
        ("x" * 300, "x" * 60),
    ],
)
def test_slugs(example_id: str, expected: str) -> None:
    assert slug(example_id) == expected


@given(st.text(min_size=1, max_size=400))
def test_no_example_id_makes_a_bad_key_or_leaves_its_folder(example_id: str) -> None:
    segments = split_key(item_key("01J", "audio", 7, example_id, "wav"))
    assert segments[:4] == ["jobs", "01J", "audio", "00000"]
    assert len(segments) == 5
    assert segments[4].isascii()
    assert segments[4].startswith("000000007-")


def test_numbered_keys() -> None:
    assert numbered_key("a.b/000001.jsonl.zst", 1) == "a.b/000001.jsonl.zst"
    assert numbered_key("a.b/000001.jsonl.zst", 12) == "a.b/000001.12.jsonl.zst"


def test_put_numbered_adopts_what_is_equal_and_keeps_what_is_not(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)

    def put(data: bytes) -> tuple[str, bool]:
        result = put_numbered(store, "x.jsonl", data)
        return result.key, result.created

    assert put(b"one") == ("x.jsonl", True)
    assert put(b"one") == ("x.jsonl", False)
    assert put(b"two") == ("x.2.jsonl", True)
    assert put(b"two") == ("x.2.jsonl", False)
    assert put(b"three") == ("x.3.jsonl", True)
    assert store.get("x.jsonl") == b"one"


def test_a_shard_comes_back() -> None:
    raw = b'{"example_id":"a","messages":[["user","audio","v.wav"],["user","text","hi\\n"],["assistant","audio","gt.wav"]],"other":[1, 2]}'
    plain = '{"example_id": "ü", "messages": [["user", "text", "x"]], "generation": {"seed": 3}, "index": 99}'.encode()
    data = compress(
        [
            *encode_lines(0, GoodLine(1, "a", raw, 0, {0: "jobs/j/references/s.wav"})),
            *encode_lines(1, GoodLine(5, "ü", plain, 0, {})),
        ]
    )
    store = MemoryStore()
    store.put("k", data)
    sha256 = hashlib.sha256(data).hexdigest()

    first, second = read_shard(store, "k", sha256)
    assert (first.index, first.line, first.example_id, first.message_index) == (0, 1, "a", 2)
    assert first.messages[0] == Message("user", "audio", "jobs/j/references/s.wav")
    assert first.generation == Generation()
    assert (second.index, second.line, second.example_id, second.message_index) == (1, 5, "ü", 1)
    assert second.generation == Generation(seed=3)
    assert [bytes(line.dialogue) for line in read_raw_shard(store, "k", sha256)] == [raw, plain]


def test_a_shard_of_other_bytes_is_refused() -> None:
    store = MemoryStore()
    store.put("k", compress([b"{}\n"]))
    with pytest.raises(StoreError) as caught:
        read_shard(store, "k", "0" * 64)
    assert caught.value.code is ErrorCode.STORE_CONFLICT

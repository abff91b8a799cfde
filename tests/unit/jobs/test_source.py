"""Inputs of every kind give the same lines; damaged, endless and missing ones end in `input.unreadable` or
a skipped line."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from jobs.source import MAX_BLANK_LINES, MAX_LINE_BYTES, LineBatch, batches_of, open_source, split_lines
from pipelines.errors import ErrorCode, InputError

TEXT = b"one\ntwo\n\nfour\r\nfive"
LINES = [b"one", b"two", b"", b"four\r", b"five"]


def lines_of(path: Path | str, after_line: int = 0) -> list[bytes | None]:
    with open_source(str(path)) as source:
        return [line for batch in batches_of(source.lines(), 3, 1 << 20, after_line) for line in batch.lines]


@pytest.mark.parametrize(
    "content",
    [
        TEXT,
        b"\xef\xbb\xbf" + TEXT,
        gzip.compress(TEXT, mtime=0),
        gzip.compress(TEXT[:7], mtime=0) + gzip.compress(TEXT[7:], mtime=0),
        zstandard.compress(TEXT),
        zstandard.compress(TEXT[:7]) + zstandard.compress(TEXT[7:]),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip" + zstandard.compress(TEXT),
    ],
)
def test_plain_and_compressed_files_give_the_same_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    assert lines_of(path) == LINES
    with open_source(str(path)) as source:
        assert source.sha256 == hashlib.sha256(content).hexdigest()
        assert (source.uri, source.folder, source.bytes) == (str(path), tmp_path, len(content))
        assert [batch.first for batch in batches_of(source.lines(), 3, 1 << 20)] == [1, 4]
        assert list(batches_of(source.lines(), 3, 1 << 20, after_line=4)) == [LineBatch(5, [b"five"])]


@pytest.mark.parametrize("skip", range(7))
def test_a_second_reading_goes_on_after_any_line(tmp_path: Path, skip: int) -> None:
    path = tmp_path / "in"
    path.write_bytes(TEXT)
    assert lines_of(path, after_line=skip) == LINES[skip:]


@given(st.binary(max_size=300).map(lambda data: data.removeprefix(b"\xef\xbb\xbf")), st.integers(1, 50))
def test_lines_do_not_depend_on_how_they_are_read(data: bytes, size: int) -> None:
    class Slow(io.BytesIO):
        def read(self, _: int | None = -1) -> bytes:
            return super().read(size)

    if data[:2] == b"\xef\xbb":
        return
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [line for some in split_lines(Slow(data)) for line in some] == expected


def test_a_line_that_is_too_long_is_one_missing_line() -> None:
    most = b"x" * MAX_LINE_BYTES
    data = b"a\n" + most + b"\n" + most + b"y\nb\n" + most * 5 + b"\nc\n" + most * 3
    assert [line for some in split_lines(io.BytesIO(data)) for line in some] == [
        b"a",
        most,
        None,
        b"b",
        None,
        b"c",
        None,
    ]


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(TEXT * 1000, mtime=0)[:-9],
        gzip.compress(TEXT * 1000, mtime=0)[:-1],
        gzip.compress(TEXT * 1000, mtime=0)[:-8] + b"\0" * 8,
        gzip.compress(TEXT, mtime=0)[:12] + b"\xff" * 20,
        zstandard.compress(TEXT * 1000)[:-1],
        zstandard.compress(TEXT) + zstandard.compress(TEXT)[:5],
        zstandard.compress(TEXT) + b"garbage",
    ],
)
def test_a_damaged_archive_is_unreadable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        lines_of(path)
    assert caught.value.code is ErrorCode.INPUT_UNREADABLE


@pytest.mark.parametrize("name", ["", "missing", "missing/below", "a\0b", "x" * 300])
def test_what_cannot_be_opened_is_unreadable(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        lines_of(f"{tmp_path}/{name}")
    assert caught.value.code is ErrorCode.INPUT_UNREADABLE


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(TEXT, mtime=0)))
    writer.start()
    assert lines_of(pipe) == LINES
    writer.join()


def test_standard_input_is_read() -> None:
    with CliRunner().isolation(zstandard.compress(TEXT)):
        assert lines_of("-") == LINES


def test_batches_of_long_lines_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes((b"x" * 400_000 + b"\n") * 50)
    with open_source(str(path)) as source:
        batches = list(batches_of(source.lines(), 10_000, 2 << 20))
    assert sum(len(batch.lines) for batch in batches) == 50
    assert all(len(batch.lines) <= 16 for batch in batches)
    assert [batch.first for batch in batches] == [
        1 + sum(len(b.lines) for b in batches[:n]) for n in range(len(batches))
    ]


@pytest.mark.parametrize("blank", [b"\n", b" \t\r\n"])
def test_an_archive_of_blank_lines_is_refused_before_it_is_read_to_its_end(
    tmp_path: Path, blank: bytes
) -> None:
    path = tmp_path / "in.zst"
    path.write_bytes(zstandard.compress(b"one\n" + blank * (4 << 20)))
    lines = 0
    with pytest.raises(InputError, match="blank lines") as caught, open_source(str(path)) as source:
        for batch in batches_of(source.lines(), 1000, 1 << 20):
            lines += len(batch.lines)
    assert caught.value.code is ErrorCode.INPUT_UNREADABLE
    assert lines < 2 << 20


def test_blank_lines_between_others_are_no_fault(tmp_path: Path) -> None:
    path, pairs = tmp_path / "in", MAX_BLANK_LINES // 2
    path.write_bytes(b"one\n\n\r\n" * pairs + b"\n" * 20)
    assert len(lines_of(path)) == 3 * pairs + 20


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(TEXT)
    with open_source(str(path)) as source:
        source.check_unchanged()
        with path.open("ab") as file:
            file.write(b"more")
        with pytest.raises(InputError):
            source.check_unchanged()


BOMBED = """
import resource, sys
from jobs.source import open_source
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
with open_source(sys.argv[1]) as source:
    print([*source.lines()] == [None])
"""


@pytest.mark.parametrize("compress", [lambda data: gzip.compress(data, 1), zstandard.compress])
def test_a_line_of_half_a_gigabyte_in_an_archive_needs_little_memory(tmp_path: Path, compress) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(compress(bytes(1 << 29)))
    # Of address space, most of which is libraries; the line alone is more than this.
    limit = 400 << 20
    child = subprocess.run(
        [sys.executable, "-c", BOMBED, str(path), str(limit)], capture_output=True, text=True, check=False
    )
    assert (child.stdout.strip(), child.stderr) == ("True", "")


def test_a_sentence_of_the_store_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError) as caught, open_source("s3://b/in.jsonl"):
        pass
    assert (
        str(caught.value)
        == "The input 's3://b/in.jsonl' cannot be read: No S3 credentials are set for s3://b/in.jsonl. "
        "Check the S3 credentials and the bucket's policy."
    )

"""Exports of a job in a real ledger: order, content, audio places, failures left out, files complete or
absent."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
from click.testing import CliRunner

from jobs.cli import cli
from jobs.export import parse_splits
from jobs.export.items import AudioItem, audio_items
from jobs.export.manifest import put_manifest
from jobs.layout import item_key
from jobs.ledger.records import Artifact, Done
from jobs.store import FolderStore, open_store
from pipelines.errors import ConfigError, ErrorCode, NotFoundError, StoreError
from tests.services.jobs.test_s3_store import access_of
from tests.support.export_kit import Finished, export, finished_job
from tests.support.manifests import read_manifest
from tests.support.services import MotoS3

LINES = [
    {"example_id": "plain", "messages": [["user", "text", " one "]]},
    {
        "example_id": "ground truth",
        "messages": [
            ["user", "text", "two"],
            ["assistant", "audio", "gt/2.wav"],
            ["assistant", "text", "zwei"],
        ],
        "speaker": {"id": 123456789012345678901234567890, "gain": 1.50},
    },
    {"example_id": "fails", "messages": [["user", "text", "three"]]},
    {
        "example_id": "../../x\nü",
        "messages": [["system", "text", "s"], ["user", "text", "four"]],
        "generation": {"seed": 7},
    },
]


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES)
    yield made
    made.ledger.close()


def exported(finished: Finished, format: str, **options: Any) -> list[dict[str, object]]:
    to = finished.folder / "exports" / "out.jsonl"
    report = export(finished.ledger, finished.store, finished.job_id, format, str(to), **options)
    assert (report.format, report.to, report.items, report.left_out) == (format, str(to), 3, 1)
    assert [path.name for path in to.parent.iterdir()] == ["out.jsonl"]
    return [json.loads(line) for line in to.read_text().splitlines()]


def test_espnet(finished: Finished) -> None:
    first, second, third = exported(finished, "espnet")
    paths = [f"../store/{key}" for key in finished.audio]
    assert first == {**LINES[0], "messages": [["user", "text", " one "], ["assistant", "audio", paths[0]]]}
    assert second == {
        **LINES[1],
        "messages": [
            ["user", "text", "two"],
            ["user", "audio", paths[1]],
            ["assistant", "audio", "gt/2.wav"],
            ["assistant", "text", "zwei"],
        ],
    }
    assert third == {
        **LINES[3],
        "messages": [["system", "text", "s"], ["user", "text", "four"], ["assistant", "audio", paths[2]]],
    }
    for path in paths:
        assert soundfile.info(str(finished.folder / "exports" / path)).samplerate == 24_000


def test_manifest(finished: Finished) -> None:
    lines = exported(finished, "manifest")
    job = finished.ledger.job(finished.job_id)
    for line, (key, data) in zip(lines, finished.audio.items(), strict=True):
        index = line["index"]
        assert isinstance(index, int)
        assert line == {
            "example_id": LINES[index]["example_id"],
            "index": index,
            "key": key,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "sample_rate": 24_000,
            "samples": 24_000 + index,
            "duration": round(1 + index / 24_000, 6),
            "seed": index + 2**62,
            "spec_sha": job.spec_sha,
            "text": ("one", "two", "", "four")[index],
            "role": "user",
            "message_index": (0, 0, 0, 1)[index],
            "model": "hibari",
            "voice": "heart",
            **({"metadata": {"speaker": LINES[1]["speaker"]}} if index == 1 else {}),
        }


def test_the_manifest_in_the_store_has_the_lines_of_its_workers(finished: Finished) -> None:
    lines = exported(finished, "manifest")
    info = put_manifest(finished.ledger, finished.store, finished.job_id)
    assert info.key == f"jobs/{finished.job_id}/manifest.jsonl"
    own = [{name: value for name, value in line.items() if name not in ("model", "voice")} for line in lines]
    assert [json.loads(line) for line in finished.store.get(info.key).splitlines()] == own
    assert [entry.index for entry in read_manifest(finished.store, info.key)] == [0, 1, 3]


def test_the_line_of_a_manifest_in_the_store(finished: Finished) -> None:
    info = put_manifest(finished.ledger, finished.store, finished.job_id)
    first = json.loads(finished.store.get(info.key).splitlines()[0])
    facts = [
        "example_id",
        "index",
        "key",
        "sha256",
        "bytes",
        "sample_rate",
        "samples",
        "duration",
        "seed",
        "spec_sha",
        "text",
        "role",
    ]
    assert [name for name in first if name != "message_index"] == facts
    assert (first["duration"], first["seed"]) == (1.0, 2**62)


def test_a_manifest_in_the_making_has_no_name(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a process that is killed leaves none behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen: list[list[Path]] = []

    def items(*arguments: Any) -> Iterator[AudioItem]:
        for item in audio_items(*arguments):
            seen.append(list(temporary.iterdir()))
            yield item

    monkeypatch.setattr("jobs.export.manifest.audio_items", items)
    info = put_manifest(finished.ledger, finished.store, finished.job_id)
    assert seen == [[], [], []]
    assert len(list(read_manifest(finished.store, info.key))) == 3


def test_bytes_are_the_same_each_time(finished: Finished) -> None:
    for name in ("espnet", "manifest"):
        contents: set[bytes] = set()
        for _ in range(2):
            exported(finished, name)
            contents.add((finished.folder / "exports" / "out.jsonl").read_bytes())
        assert len(contents) == 1


def test_standard_output(finished: Finished, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    exported(finished, "espnet", absolute=True)
    report = export(finished.ledger, finished.store, finished.job_id, "espnet", "-")
    assert (report.to, report.items) == ("-", 3)
    assert capfdbinary.readouterr().out == (finished.folder / "exports" / "out.jsonl").read_bytes()


def test_an_audio_root_is_filled_from_a_bucket(tmp_path: Path, moto: MotoS3) -> None:
    bucket = moto.create_bucket(f"export-{tmp_path.name.replace('_', '-')[-20:]}")
    finished = finished_job(
        tmp_path, open_store(f"s3://{bucket}/p", access_of(moto.endpoint, moto.secret_key)), LINES
    )
    plain = exported(finished, "espnet")
    root = tmp_path / "local"
    for _ in range(2):
        local = exported(finished, "espnet", audio_root=root)
        for line, remote, (key, data) in zip(local, plain, finished.audio.items(), strict=True):
            (where,) = [
                content
                for _, modality, content in line["messages"]
                if modality == "audio" and content != "gt/2.wav"
            ]  # type: ignore[union-attr]
            assert where == str(root / key)
            assert Path(where).read_bytes() == data
            assert f"s3://{bucket}/p/{key}" in str(remote["messages"])
    assert sum(path.is_file() for path in root.rglob("*")) == 3
    finished.ledger.close()


def test_audio_that_is_not_what_was_made_is_noticed(finished: Finished) -> None:
    key = next(iter(finished.audio))
    finished.store.delete(key)
    finished.store.put(key, b"something else")
    to = finished.folder / "out.jsonl"
    with pytest.raises(StoreError) as caught:
        export(
            finished.ledger,
            finished.store,
            finished.job_id,
            "espnet",
            str(to),
            audio_root=finished.folder / "local",
        )
    assert caught.value.code is ErrorCode.STORE_CONFLICT
    assert not to.exists()
    assert not [
        path for path in (finished.folder / "local").rglob("*") if path.is_file() and key in str(path)
    ]


def test_what_stops_an_export(finished: Finished) -> None:
    with pytest.raises(ConfigError):
        export(finished.ledger, finished.store, finished.job_id, "mp3", "-")
    with pytest.raises(NotFoundError):
        export(finished.ledger, finished.store, "none", "espnet", "-")
    (finished.folder / "file").touch()
    for to in (finished.folder, finished.folder / "file" / "below"):
        with pytest.raises(ConfigError):
            export(finished.ledger, finished.store, finished.job_id, "espnet", str(to))


def test_a_file_that_was_there_stays_when_an_export_fails(finished: Finished) -> None:
    to = finished.folder / "keep" / "out.jsonl"
    to.parent.mkdir()
    to.write_text("before")
    for key, _ in finished.ledger.shard_inputs(finished.job_id).values():
        finished.store.delete(key)
    with pytest.raises(StoreError):
        export(finished.ledger, finished.store, finished.job_id, "espnet", str(to))
    assert to.read_text() == "before"
    assert [path.name for path in to.parent.iterdir()] == ["out.jsonl"]


def test_a_link_leads_to_the_file_and_what_is_no_file_stays(finished: Finished) -> None:
    folder = finished.folder / "links"
    folder.mkdir()
    target, link, pipe, to_pipe = (
        folder / name for name in ("target.jsonl", "link.jsonl", "pipe", "to-pipe")
    )
    target.write_text("before")
    link.symlink_to(target)
    export(finished.ledger, finished.store, finished.job_id, "manifest", str(link))
    assert link.is_symlink()
    assert len(target.read_text().splitlines()) == 3
    os.mkfifo(pipe)
    to_pipe.symlink_to(pipe)
    for to in (pipe, to_pipe):
        with pytest.raises(ConfigError, match="regular file"):
            export(finished.ledger, finished.store, finished.job_id, "manifest", str(to))
    assert pipe.is_fifo()
    assert len(list(folder.iterdir())) == 4


def test_a_wrong_file_below_the_audio_root_is_fetched_anew(finished: Finished) -> None:
    root = finished.folder / "local"
    key, data = next(iter(finished.audio.items()))
    exported(finished, "espnet", audio_root=root)
    (root / key).write_bytes(bytes(len(data)))
    exported(finished, "espnet", audio_root=root)
    assert (root / key).read_bytes() == data
    mine = finished.folder / "mine.wav"
    mine.write_bytes(b"mine")
    (root / key).unlink()
    (root / key).symlink_to(mine)
    exported(finished, "espnet", audio_root=root)
    assert (root / key).read_bytes() == data
    assert mine.read_bytes() == b"mine"


def test_answers_in_text_alone_are_in_the_file_and_splits_refuse_them(finished: Finished) -> None:
    finished.ledger.retry(finished.job_id, None)
    (ticket,) = finished.ledger.take_ready(5)
    lease = finished.ledger.claim(ticket, "w", 60)
    assert lease is not None
    ((index, (example_id, _)),) = lease.open_items.items()
    key = item_key(finished.job_id, "text", index, example_id, "txt")
    info = finished.store.put(key, b"drei")
    finished.ledger.commit(
        lease.ticket, [Done(index, (Artifact(index, "text", key, info.sha256, 4, 0, 0, 0, 0),))]
    )
    to = finished.folder / "out.jsonl"
    report = export(finished.ledger, finished.store, finished.job_id, "espnet", str(to))
    assert (report.items, report.left_out) == (4, 0)
    assert json.loads(to.read_text().splitlines()[-1])["messages"] == [
        ["user", "text", "three"],
        ["assistant", "text", "drei"],
    ]
    splits = parse_splits("train=0.5,dev=0.5")
    with pytest.raises(ConfigError, match="text without audio"):
        export(
            finished.ledger,
            finished.store,
            finished.job_id,
            "espnet",
            str(finished.folder / "sets"),
            splits=splits,
        )
    assert not (finished.folder / "sets").exists()
    assert (
        export(
            finished.ledger,
            finished.store,
            finished.job_id,
            "nemo",
            str(finished.folder / "sets"),
            splits=splits,
        ).items
        == 3
    )


def test_what_is_said_counts_in_english(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".nightjar").mkdir(parents=True)
    finished = finished_job(home / ".nightjar", FolderStore(home), [LINES[0], LINES[2]])
    finished.ledger.close()
    done = CliRunner().invoke(
        cli, ["export", finished.job_id, "--home", str(home), "--to", str(tmp_path / "x")]
    )
    assert done.stderr == f"1 item written to {tmp_path / 'x'}. Left out: 1 without audio.\n"


@pytest.mark.parametrize("format", ["espnet", "nemo", "openai-batch", "kaldi", "lhotse", "espnet-dataset"])
def test_an_export_moves_with_its_store(tmp_path: Path, format: str) -> None:
    """A name is a path as seen from the file that has it, also where a link leads there, and stays right
    when both are moved."""
    (tmp_path / "before" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "before" / "deep")
    finished = finished_job(tmp_path, FolderStore(tmp_path / "before" / "store"), LINES)
    to = tmp_path / "link" / "set"
    for _ in range(2):
        export(finished.ledger, finished.store, finished.job_id, format, str(to))
    (tmp_path / "before").rename(tmp_path / "after")
    moved = tmp_path / "after" / "deep" / "set"
    found = 0
    # Provenance says where the input was.
    files = (
        [moved]
        if moved.is_file()
        else [path for path in moved.rglob("*") if path.is_file() and path.name != "provenance.json"]
    )
    for file in files:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        assert str(tmp_path).encode() not in data
        for name in re.findall(rb"[./]+/store/jobs/[^\" ]+\.wav", data):
            assert (file.parent / name.decode()).is_file()
            found += 1
    assert found >= 3
    # The same export of the moved job to the moved place is complete: nothing in it was for the place it was
    # made at.
    again = FolderStore(tmp_path / "after" / "store")
    assert export(finished.ledger, again, finished.job_id, format, str(moved)).items == 3
    finished.ledger.close()

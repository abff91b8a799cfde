"""Exports to folders: the same bytes each time, stopped and gone on with, never mixed with another export."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.export import parse_splits
from jobs.export.items import Part
from jobs.ledger.records import Artifact, Done, ItemState
from jobs.provenance import provenance_key
from jobs.store import FolderStore
from pipelines.errors import ConfigError, ErrorCode, StoreError
from tests.support.export_kit import Finished, export, finished_job

LINES: list[dict[str, Any]] = [
    {"example_id": f"u{number}", "messages": [["user", "text", f"Text {number}"]]} for number in range(20)
]
LINES.insert(7, {"example_id": "fails", "messages": [["user", "text", "x"]]})
#: Two files of audio.
PART = 100_000
SPLITS = parse_splits("train=0.7,dev=0.3")
FOLDERS = ["espnet-dataset", "kaldi", "lhotse", "shar", "webdataset", "parquet", "audiofolder", "ljspeech"]
LINES_IN_FOLDERS = ["nemo", "manifest", "espnet", "openai-batch"]


class StoppedError(Exception):
    pass


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES)
    yield made
    made.ledger.close()


def run(finished: Finished, format: str, to: Path | str, **options: Any) -> int:
    if format in ("parquet", "audiofolder"):
        pytest.importorskip(
            "pyarrow", reason="NOT TESTED: the library pyarrow is missing; it comes with the extra `export`."
        )
    given: dict[str, Any] = {"splits": SPLITS, "part_bytes": PART, **options}
    return export(finished.ledger, finished.store, finished.job_id, format, str(to), **given).items


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_at(number: int) -> Callable[[Part], None]:
    seen: list[Part] = []

    def stop(part: Part) -> None:
        seen.append(part)
        if len(seen) == number:
            raise StoppedError

    return stop


@pytest.mark.parametrize("format", [*FOLDERS, *LINES_IN_FOLDERS])
def test_the_same_bytes_stopped_or_not(finished: Finished, format: str) -> None:
    to = finished.folder / "to"
    assert run(finished, format, to) == 20
    whole = contents(to)
    assert {"export.json", "manifest.jsonl.gz", "provenance.json"} < whole.keys()
    assert not [name for name in whole if name.startswith("_export")]
    for path in sorted(to.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(StoppedError):
        run(finished, format, to, on_part=stop_at(1))
    assert "export.json" not in contents(to)
    kept = {path: path.stat().st_mtime_ns for path in to.rglob("*") if path.is_file()}
    redone: list[Part] = []
    assert run(finished, format, to, on_part=redone.append) == 20
    assert contents(to) == whole
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items() if path.exists())
    planned = {name for name in whole if name.startswith(("train", "dev", "data"))}
    assert len(redone) < len(planned) or len(redone) == 1


def test_a_path_with_two_dots_behind_a_link_is_the_folder_that_the_system_opens(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/a")
    other = tmp_path / "set" / "README.md"
    other.parent.mkdir()
    other.write_text("precious")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run(finished, "webdataset", Path("link/../set")) == 20
        assert {"export.json", "README.md"} < contents(tmp_path / "far" / "set").keys()
    assert [path.name for path in other.parent.iterdir()] == ["README.md"]
    assert other.read_text() == "precious"


def test_export_json_names_every_file_with_its_hash(finished: Finished) -> None:
    to = finished.folder / "to"
    run(finished, "webdataset", to)
    files = contents(to)
    about = json.loads(files.pop("export.json"))
    assert {file["name"]: (file["bytes"], file["sha256"]) for file in about["files"]} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()
    }
    assert (sum(about["items"].values()), about["left_out"]) == (20, 1)
    lines = gzip.decompress(files["manifest.jsonl.gz"]).splitlines()
    assert [json.loads(line)["example_id"] for line in lines] == [
        line["example_id"] for line in LINES if line["example_id"] != "fails"
    ]
    (record,) = json.loads(files["provenance.json"])
    assert (record["job"], record["recorded_by"], record["model"]["family"]) == (
        finished.job_id,
        "export",
        "hibari",
    )


def test_a_complete_export_is_left_as_it_is(finished: Finished) -> None:
    to = finished.folder / "to"
    run(finished, "webdataset", to)
    before = {path: path.stat().st_mtime_ns for path in to.rglob("*") if path.is_file()}
    redone: list[Part] = []
    assert run(finished, "webdataset", to, on_part=redone.append) == 20
    assert not redone
    assert {path: path.stat().st_mtime_ns for path in to.rglob("*") if path.is_file()} == before


def test_a_complete_export_that_lacks_a_file_is_written_anew(finished: Finished) -> None:
    to = finished.folder / "to"
    run(finished, "webdataset", to)
    whole = contents(to)
    lost = next(name for name in whole if name.endswith(".tar"))
    (to / lost).unlink()
    assert run(finished, "webdataset", to) == 20
    assert contents(to) == whole
    (to / lost).write_bytes(b"mine")
    before = contents(to)
    with pytest.raises(ConfigError, match="was changed after it was exported"):
        run(finished, "webdataset", to)
    assert contents(to) == before


@pytest.mark.parametrize("outside", ["../mine.txt", "absolute"])
def test_a_record_cannot_name_files_outside(finished: Finished, outside: str) -> None:
    to, mine = finished.folder / "to", finished.folder / "mine.txt"
    mine.write_text("mine")
    run(finished, "webdataset", to)
    about = json.loads((to / "export.json").read_text())
    name = str(mine) if outside == "absolute" else outside
    about["files"].append({"name": name, "bytes": 4, "sha256": hashlib.sha256(b"mine").hexdigest()})
    (to / "export.json").write_text(json.dumps(about))
    (to / "provenance.json").unlink()
    with pytest.raises(StoreError) as caught:
        run(finished, "webdataset", to)
    assert caught.value.code is ErrorCode.STORE_BAD_KEY
    assert mine.read_text() == "mine"


def test_a_stopped_export_that_lacks_a_file_writes_it_again(finished: Finished) -> None:
    whole, to = finished.folder / "whole", finished.folder / "to"
    run(finished, "webdataset", whole)
    with pytest.raises(StoppedError):
        run(finished, "webdataset", to, on_part=stop_at(2))
    lost, changed = sorted(to.rglob("*.tar"))
    lost.unlink()
    data = changed.read_bytes()
    changed.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=f"{changed.name}.*changed after it was exported"):
        run(finished, "webdataset", to)
    assert changed.read_bytes() == b"mine"
    assert not (to / "export.json").exists()
    changed.write_bytes(data)
    redone: list[Part] = []
    assert run(finished, "webdataset", to, on_part=redone.append) == 20
    assert contents(to) == contents(whole)
    # One was whole, and the refused run had written the lost one.
    assert len(redone) == len(list(whole.rglob("*.tar"))) - 2


def test_an_export_does_not_end_well_while_a_file_is_gone(finished: Finished) -> None:
    to = finished.folder / "to"

    def lose(part: Part) -> None:
        for path in to.rglob("*.tar"):
            path.unlink()

    with pytest.raises(ConfigError, match="removed or changed during the export"):
        run(finished, "webdataset", to, on_part=lose)
    assert not (to / "export.json").exists()


@pytest.mark.parametrize("other", [{"format": "shar"}, {"part_bytes": PART + 1}, {"splits": None}])
@pytest.mark.parametrize("complete", [True, False])
def test_another_export_is_not_mixed_in(finished: Finished, other: dict[str, Any], complete: bool) -> None:
    to = finished.folder / "to"
    if complete:
        run(finished, "webdataset", to)
    else:
        with pytest.raises(StoppedError):
            run(finished, "webdataset", to, on_part=stop_at(1))
    before = contents(to)
    with pytest.raises(ConfigError, match="another export"):
        run(finished, **{"format": "webdataset", "to": to, **other})
    assert contents(to) == before


@pytest.mark.parametrize("format", ["parquet", "kaldi"])
def test_files_that_are_no_exports_are_never_written_over(finished: Finished, format: str) -> None:
    to = finished.folder / "to"
    to.mkdir()
    (to / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="no export wrote"):
        run(finished, format, to)
    assert contents(to) == {"README.md": b"mine"}


def test_a_persons_scratch_folder_is_left_as_it_is(finished: Finished) -> None:
    to = finished.folder / "to"
    scratch = to / "_export" / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no export wrote"):
        run(finished, "kaldi", to)
    assert contents(to) == {"_export/scratch/notes.txt": b"mine"}


def test_an_export_killed_before_it_had_a_plan_goes_on(finished: Finished) -> None:
    to = finished.folder / "to"
    scratch = to / "_export" / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "record").write_text("{")
    assert run(finished, "kaldi", to) == 20
    assert not (to / "_export").exists()


def test_a_job_that_went_on_is_another_export(finished: Finished) -> None:
    to = finished.folder / "to"
    with pytest.raises(StoppedError):
        run(finished, "webdataset", to, on_part=stop_at(1))
    finished.ledger.retry(finished.job_id, None)
    (ticket,) = finished.ledger.take_ready(5)
    lease = finished.ledger.claim(ticket, "w", 60)
    assert lease is not None
    ((index, _),) = lease.open_items.items()
    key = f"jobs/{finished.job_id}/audio/00000/late.wav"
    info = finished.store.put(key, b"late")
    finished.ledger.commit(
        lease.ticket, [Done(index, (Artifact(index, "audio", key, info.sha256, 4, 1, 1, 1, 1),))]
    )
    assert [row.state for row in finished.ledger.items(finished.job_id)].count(ItemState.DONE) == 21
    with pytest.raises(ConfigError, match="another export"):
        run(finished, "webdataset", to)


def test_two_at_once(finished: Finished) -> None:
    to = finished.folder / "to"
    to.mkdir()
    handle = os.open(to, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="Another export"):
        run(finished, "kaldi", to)
    os.close(handle)
    assert run(finished, "kaldi", to) == 20


def test_a_file_system_without_locks_is_said(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="No locks"):
        run(finished, "kaldi", finished.folder / "to")


@pytest.mark.parametrize("content", [b"{}", b'[{"name": "\xff"}]'])
@pytest.mark.parametrize("name", ["train-00000.json", "mine.files.json"])
def test_records_that_are_no_exports_are_said(finished: Finished, name: str, content: bytes) -> None:
    to = finished.folder / "to"
    with pytest.raises(StoppedError):
        run(finished, "webdataset", to, on_part=stop_at(1))
    (to / "_export" / name).write_bytes(content)
    before = contents(to)
    other = {"part_bytes": PART + 1, "replaces": [finished.job_id]} if name == "mine.files.json" else {}
    with pytest.raises(ConfigError, match=f"{name}.*no export wrote"):
        run(finished, "webdataset", to, **other)
    assert contents(to) == before
    (to / "_export" / name).unlink()
    assert run(finished, "webdataset", to, **other) == 20


def test_a_damaged_record_of_the_making_is_said(finished: Finished) -> None:
    finished.store.put(provenance_key(finished.job_id), b'{"job": 1}')
    with pytest.raises(StoreError, match=r"provenance\.json") as caught:
        run(finished, "kaldi", finished.folder / "to")
    assert caught.value.code is ErrorCode.STORE_CONFLICT


@pytest.mark.parametrize("format", ["webdataset", "shar", "parquet"])
def test_changed_audio_stops_an_export_and_leaves_no_half_file(finished: Finished, format: str) -> None:
    to = finished.folder / "to"
    key = list(finished.audio)[-1]
    finished.store.delete(key)
    # As large as it was: only reading it tells.
    finished.store.put(key, bytes(len(finished.audio[key])))
    with pytest.raises(StoreError) as caught:
        run(finished, format, to, splits=None)
    assert caught.value.code is ErrorCode.STORE_CONFLICT
    written = [name for name in contents(to) if not name.startswith("_export")]
    assert written
    assert not [name for name in written if "00009" in name]
    assert not (to / "_export" / "scratch").exists()


@pytest.mark.parametrize("format", ["webdataset", "parquet", "lhotse", "kaldi", "ljspeech"])
def test_a_full_disk_is_said_and_waited_for(finished: Finished, format: str) -> None:
    """A limit on the size of files stands for the disk: the system refuses to write on."""
    to = finished.folder / "to"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, before[1]))
    try:
        with pytest.raises(StoreError) as caught:
            run(finished, format, to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code is ErrorCode.STORE_FULL
    assert run(finished, format, to) == 20


def test_what_a_format_cannot_do_is_said_before_anything_is_written(finished: Finished) -> None:
    to = finished.folder / "to"
    with pytest.raises(ConfigError):
        run(finished, "webdataset", to, audio_root=finished.folder / "audio")
    with pytest.raises(ConfigError):
        run(finished, "kaldi", "-")
    (finished.folder / "file").touch()
    with pytest.raises(ConfigError):
        run(finished, "kaldi", finished.folder / "file")
    assert not contents(to)


@pytest.mark.parametrize("dialogues", [None, "mono"])
def test_a_killed_export_goes_on(finished: Finished, dialogues: str | None) -> None:
    """SIGKILL at any moment; what was published stays, scratch files go."""
    whole, to = finished.folder / "whole", finished.folder / "to"
    run(finished, "webdataset", whole, dialogues=dialogues)
    code = (
        "import sys\n"
        "from jobs.ledger import Ledger; from jobs.store import open_store; from jobs.export import StoredJob, export_jobs, parse_splits\n"
        "ledger, store, job, to = sys.argv[1:]\n"
        "def told(part): print(part.number, flush=True); sys.stdin.readline()\n"
        "ledger = Ledger(ledger)\n"
        "export_jobs([StoredJob(ledger, open_store(store), ledger.job(job))], 'webdataset', to,"
        f" splits=parse_splits('train=0.7,dev=0.3'), part_bytes={PART}, on_part=told, dialogues={dialogues!r})"
    )
    arguments = [finished.ledger.url, str(finished.folder / "store"), finished.job_id, str(to)]
    for more in (0, 2):
        with subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            # It is killed in the middle of a part, or after it, but goes no further than these.
            process.stdin.write(b"\n" * more)
            process.stdin.flush()
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
    assert len(list(whole.rglob("*.tar"))) > 6
    assert 0 < len(list(to.rglob("*.tar"))) < len(list(whole.rglob("*.tar")))
    run(finished, "webdataset", to, dialogues=dialogues)
    assert contents(to) == contents(whole)

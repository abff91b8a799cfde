"""Jobs in MP3 and Opus with a sample rate of their own, from the command line to a dataset."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import soundfile

from tests.support.report_kit import read_page, rows_of
from tests.support.run_kit import Shell, write_input


@pytest.mark.parametrize(
    ("audio_format", "options", "rate"),
    [("opus", ("--sample-rate", "16000", "--pack"), 16_000), ("mp3", (), 24_000)],
    ids=["opus", "mp3"],
)
def test_a_job_in_a_lossy_format(
    shell: Shell, audio_format: str, options: tuple[str, ...], rate: int
) -> None:
    write_input(shell.folder / "in.jsonl", 3)
    run = shell.run("run", "in.jsonl", "--json", "--format", audio_format, *options, "--qa", "basic")
    assert run.returncode == 0, run.stderr
    view = json.loads(run.stdout)
    job = view["job"]
    assert view["items"]["done"] == 3
    items = shell.items()
    assert {(row["sample_rate"], str(row["key"]).rpartition(".")[2]) for row in items.values()} == {
        (rate, audio_format)
    }
    (record,) = [
        json.loads(path.read_text()) for path in (shell.folder / "out/jobs" / job).glob("provenance*.json")
    ]
    assert record["encoder"].startswith("libsndfile ")
    assert record["spec"].get("sample_rate") == (rate if options else None)
    if not options:
        next((shell.folder / "out").rglob("*.mp3")).unlink()
    verified = shell.run("verify", job, "--repair", "--json")
    assert verified.returncode == 0, verified.stderr
    summary = json.loads(verified.stdout.splitlines()[-1])
    assert (summary["redrawn"]["same"], summary["repaired"]["same"], summary["repaired"]["other"]) == (
        3,
        int(not options),
        0,
    )
    page = read_page(Path(view["report"]).read_text())
    assert len(rows_of(page)) == 3
    # What is in a pack is no file that a page could link to.
    players = [player.attributes["src"] for player in page.all("audio")]
    assert (
        len(
            [
                src
                for src in players
                if src.startswith("data:audio/flac;" if options else "..")
                and (options or src.endswith(".mp3"))
            ]
        )
        == 3
    ), players
    exported = shell.run("export", job, "--format", "webdataset", "--to", "set")
    assert exported.returncode == 0, exported.stderr
    with tarfile.open(shell.folder / "set/train/shard-000000.tar") as archive:
        members = {member.name: member for member in archive}
        audio = sorted(name for name in members if name.endswith(f".{audio_format}"))
        assert len(audio) == 3
        for name in audio:
            about = json.load(archive.extractfile(members[f"{name.partition('.')[0]}.json"]) or io.BytesIO())
            samples, found = soundfile.read(
                io.BytesIO((archive.extractfile(members[name]) or io.BytesIO()).read())
            )
            assert (len(samples), found) == (about["samples"], rate)
            assert about["duration"] == round(len(samples) / rate, 6)
            row = items[about["example_id"]]
            assert row["duration_ms"] == round(1000 * len(samples) / rate)

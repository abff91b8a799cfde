"""`nightjar run` as its users meet it: a real process, a real Valkey, a real worker; items made, made
again, and those that fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import soundfile

from tests.support.report_kit import read_page, rows_of
from tests.support.run_kit import Shell, write_input


def test_a_run_makes_every_item_and_leaves_nothing(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 8)
    run = shell.run("run", "in.jsonl", "--json")
    assert run.returncode == 0, run.stderr
    assert not shell.processes()
    view = json.loads(run.stdout)
    assert view["schema"] == "nightjar.run/1"
    assert view["items"] == {"total": 8, "done": 8, "failed": 0, "skipped": 0, "pending": 0}
    assert view["audio_seconds"] > 4
    for row in shell.items().values():
        samples, rate = soundfile.read(shell.folder / "out" / str(row["key"]))
        assert (len(samples) * 1000 / rate, rate) == (pytest.approx(row["duration_ms"], abs=1), 24000)
    assert not list((shell.folder / "out/.nightjar").glob("broker.json"))
    assert (Path(view["audio"]).is_dir(), Path(view["manifest"]).is_file(), view["text"]) == (
        True,
        True,
        None,
    )
    report = Path(view["report"])
    assert report == shell.folder / "out" / "reports" / f"{view['job']}.html"
    page = read_page(report.read_text())
    assert len(rows_of(page)) == 8
    assert all((report.parent / player.attributes["src"]).is_file() for player in page.all("audio"))


def test_a_second_run_of_the_same_input_makes_nothing_again(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 3)
    first = shell.run("run", "in.jsonl", "-q")
    written = {
        path: path.stat().st_mtime_ns for path in (shell.folder / "out").glob("jobs/**/*") if path.is_file()
    }
    second = shell.run("run", "in.jsonl", "-q")
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert first.stdout == second.stdout
    assert first.stderr == second.stderr == ""
    assert written == {
        path: path.stat().st_mtime_ns for path in (shell.folder / "out").glob("jobs/**/*") if path.is_file()
    }


def test_lines_and_items_that_fail_end_with_1_and_are_listed(shell: Shell) -> None:
    good = write_input(shell.folder / "in.jsonl", 2).read_text()
    (shell.folder / "in.jsonl").write_text(
        good + "not json\n" + good.splitlines()[0] + "\n" + '{"example_id": "e", "messages": []}\n'
    )
    run = shell.run("run", "in.jsonl", "--json")
    assert run.returncode == 1, run.stderr
    view = json.loads(run.stdout)
    assert (view["state"], view["rejected_lines"]) == ("completed_with_errors", 3)
    errors = [json.loads(line) for line in shell.run("errors", view["job"], "--json").stdout.splitlines()]
    assert [(error["kind"], error["line"], error["code"]) for error in errors][:2] == [
        ("line", 3, "input.bad_json"),
        ("line", 4, "input.duplicate_id"),
    ]


def test_abort_on_a_bad_line_leaves_nothing(shell: Shell) -> None:
    (shell.folder / "in.jsonl").write_text("{not json\n")
    run = shell.run("run", "in.jsonl", "--on-error", "abort", "--json")
    assert run.returncode == 4
    assert json.loads(run.stderr.splitlines()[-1])["error"]["code"] == "input.bad_json"
    assert not list((shell.folder / "out").glob("jobs/*"))


def test_a_run_of_a_finished_job_makes_again_what_is_lost(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 4)
    job = shell.run("run", "in.jsonl", "-q").stdout.strip()
    made = {
        path: path.read_bytes()
        for path in (shell.folder / "out" / "jobs" / job).rglob("*")
        if path.suffix in (".wav", ".zst")
    }
    gone, empty, *_ = sorted(path for path in made if path.suffix == ".wav")
    (lines,) = (path for path in made if path.suffix == ".zst")
    gone.unlink()
    os.truncate(empty, 0)
    os.truncate(lines, 0)
    refused = shell.run("export", job, "--format", "nemo", "--to", "x.jsonl")
    assert refused.returncode == 5
    assert "store.missing" in refused.stderr
    assert (
        f"missing {gone.relative_to(shell.folder / 'out')}, changed {empty.relative_to(shell.folder / 'out')}"
        in refused.stderr
    )
    assert f"nightjar verify {job} --repair" in refused.stderr
    again = shell.run("run", "in.jsonl", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["job"] == job
    assert "Lost or damaged: 1 shard input of this job." in again.stderr
    assert "Missing or damaged: 2 files of this job." in again.stderr
    assert "Repaired: 2 with the same bytes, 0 with other bytes." in again.stderr
    assert {path: path.read_bytes() for path in made} == made

"""Jobs from Python: the same as those of the command line, item by item, gone on with after an
interruption."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import jobs.local_run
import nightjar
from jobs.ledger import Ledger
from pipelines.errors import ConfigError, ErrorCode, NightjarError, StoreError
from tests.support.docs_kit import ROOT
from tests.support.run_kit import Shell, until, write_input

SLOW = """
import sys, nightjar
job = nightjar.run("in.jsonl", out="out", model="slow", quiet=True)
print(job.id, flush=True)
for item in job:
    print(item.id, flush=True)
"""


CAUGHT = """
except KeyboardInterrupt:
  print(job._thread.is_alive(), flush=True)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, whose jobs are not remembered elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def python(shell: Shell, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_whose_folder_is_moved_writes_no_report_in_its_place(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is elsewhere, and tells nothing of it."""
    monkeypatch.setenv("SPEECH_STORE_URL", str(here / "store"))
    made = jobs.local_run._results

    def made_and_moved(*arguments: Any) -> dict[str, str | None]:
        found = made(*arguments)
        (here / "out").rename(here / "moved")
        return found

    monkeypatch.setattr(jobs.local_run, "_results", made_and_moved)
    with pytest.raises(StoreError, match="no longer at"):
        nightjar.run(["Good evening."], out="out", quiet=True).wait()
    assert not (here / "out").exists()


def test_a_job_gives_each_item_as_it_ends(here: Path, shell: Shell) -> None:
    options = {"out": "out", "qa_set": ["bounds.pause.high=30"], "quiet": True}
    with nightjar.run(["Good evening.", {"id": "b", "text": "Good night."}], **options) as job:  # type: ignore[arg-type]
        items = {item.id: item for item in job}
    assert len(items) == len(job) == 2
    assert job.state == "completed"
    item = items["b"]
    assert (item.state, item.text, item.draw, item.index) == ("done", "Good night.", 0, 1)
    assert item.path is not None
    samples, rate = soundfile.read(item.path, dtype="float32")
    assert (rate, len(samples) / rate) == (item.audio.sample_rate, item.seconds)
    assert np.array_equal(samples, item.audio.samples)
    assert "loudness" in item.scores
    assert "<audio" in item._repr_html_()
    # The command line shows the same job, and makes nothing again.
    status = shell.run("status", job.id, "--out", "out", "--json")
    assert json.loads(status.stdout)["items"]["done"] == job.status.items.done
    assert [one.id for one in job.items(state="done")] == [
        one.id for one in nightjar.find_job(job.id, out="out").items(state="done")
    ]
    assert len(list(job.items(limit=1))) == 1
    shorter, longer = sorted(items.values(), key=lambda one: one.seconds)
    where = f"loudness > -200 and not seconds <= {shorter.seconds!r}"
    assert [one.id for one in job.items(where=where)] == [longer.id]
    exported = job.export("manifest", "loud.jsonl", where=where)
    assert [json.loads(line)["index"] for line in exported.read_text().splitlines()] == [longer.index]
    assert len(job.to_lhotse(where="seconds > 0").to_eager()) == 2
    with pytest.raises(nightjar.NightjarError, match="has the score 'wer'"):
        job.items(where="wer < 0.1")


def test_a_job_is_that_of_the_command_line(here: Path, shell: Shell) -> None:
    write_input(here / "in.jsonl", 3)
    made = shell.run("run", "in.jsonl", "--json")
    assert made.returncode == 0, made.stderr
    job = nightjar.run("in.jsonl", out="out", quiet=True).wait()
    assert job.id == json.loads(made.stdout)["job"]
    assert job.done
    assert nightjar.run("in.jsonl", out="out", quiet=True, limit=2).wait().id != job.id


def test_datasets_cuts_and_a_report(here: Path) -> None:
    job = nightjar.run(["Good evening.", "Good night."], out="out", quiet=True)
    dataset = job.to_datasets()
    assert dataset["text"][:] == ["Good evening.", "Good night."]
    assert dataset["example_id"][:] == ["line-1", "line-2"]
    cuts = list(job.to_lhotse())
    assert [cut.supervisions[0].text for cut in cuts] == ["Good evening.", "Good night."]
    assert [cut.load_audio().shape[1] / cut.sampling_rate for cut in cuts] == [
        item.seconds for item in job.items()
    ]
    report = job.report()
    assert report.path.read_text().startswith("<!doctype html>")
    assert report._repr_html_().startswith("<iframe")
    assert "2 done" in job._repr_html_()
    # What was exported is not written again.
    assert job.to_datasets()["sha256"][:] == dataset["sha256"][:]
    for empty in (job.to_datasets, job.to_lhotse):
        with pytest.raises(ConfigError, match="no items with audio that match 'seconds > 1000'"):
            empty(where="seconds > 1000")


def test_refused_lines_and_errors(here: Path) -> None:
    (here / "in.csv").write_text("text\nGood evening.\na,b\n")
    job = nightjar.run("in.csv", out="out", quiet=True).wait()
    assert [(line.line, line.code.value) for line in job.refused()] == [(3, "input.bad_line")]
    for wrong, code in (("none.csv", "input.unreadable"), ([], "input.no_items")):
        with pytest.raises(nightjar.NightjarError) as caught:
            nightjar.run(wrong, out="out", quiet=True)
        assert caught.value.code.value == code
    with pytest.raises(nightjar.NightjarError, match="no voice"):
        nightjar.run(["a"], out="out", voice="nobody", quiet=True)


def test_an_interrupted_program_leaves_nothing_and_the_same_call_goes_on(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 60)
    slow.hold("line-0")
    first = python(slow, SLOW)
    until(lambda: slow.done() >= 10, "no item was made")
    first.send_signal(signal.SIGINT)
    given, said = first.communicate(timeout=240)
    assert "KeyboardInterrupt" in said
    until(lambda: not slow.processes(), "processes are left")
    before = {path: path.stat().st_mtime_ns for path in (slow.folder / "out").glob("jobs/*/audio/*/*.wav")}
    assert 10 <= len(before) < 60
    slow.let_go()
    second = python(slow, SLOW)
    again, said = second.communicate(timeout=400)
    assert second.returncode == 0, said
    job, *items = again.split()
    assert job == given.split()[0]
    assert sorted(items) == sorted(f"line-{number}" for number in range(60))
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())


def test_a_program_that_does_not_wait_is_waited_for_and_one_that_fails_is_not(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 20)
    slow.hold("line-19")
    failing = python(
        slow,
        "import nightjar\nnightjar.run('in.jsonl', out='out', model='slow', quiet=True)\nraise ValueError('mine')",
    )
    _, said = failing.communicate(timeout=240)
    assert (failing.returncode, "mine" in said) == (1, True)
    until(lambda: not slow.processes(), "processes are left")
    assert slow.done() < 20
    slow.let_go()
    patient = python(slow, "import nightjar\nnightjar.run('in.jsonl', out='out', model='slow', quiet=True)")
    _, said = patient.communicate(timeout=240)
    assert (patient.returncode, said) == (0, "")
    assert slow.done() == 20


def test_an_interrupt_in_a_notebook_stops_the_run(slow: Shell) -> None:
    """There the program goes on after Ctrl-C."""
    write_input(slow.folder / "in.jsonl", 60)
    slow.hold("line-0")
    program = python(
        slow,
        SLOW.replace("for item", "try:\n  for item").replace("    print(item.id", "    print(item.id")
        + CAUGHT,
    )
    until(lambda: slow.done() >= 10, "no item was made")
    program.send_signal(signal.SIGINT)
    said, wrong = program.communicate(timeout=240)
    assert (program.returncode, said.split()[-1]) == (0, "False"), wrong


def test_a_job_that_was_stopped_says_so(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 20)
    slow.hold("line-19")
    code = "import nightjar\njob = nightjar.run('in.jsonl', out='out', model='slow', quiet=True)\njob.stop()\njob.wait()"
    _, said = python(slow, code).communicate(timeout=240)
    assert "was stopped" in said
    until(lambda: not slow.processes(), "processes are left")


def test_a_job_for_a_fleet(here: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_BROKER_URL", valkey_url)
    job = nightjar.submit(["Good evening."], out="fleet", quiet=True, labels={"corpus": "evening"})
    assert (job.state, len(job), job.status.job.labels) == ("ready", 1, {"corpus": "evening"})
    assert nightjar.submit(["Good evening."], out="fleet", quiet=True).id == job.id
    assert list(job.items()) == []
    with closing(Ledger(f"sqlite:///{here}/fleet/.nightjar/ledger.sqlite")) as ledger:
        ledger.cancel(job.id)
    for again in (nightjar.submit, nightjar.run):
        with pytest.raises(NightjarError, match="cancelled") as caught:
            again(["Good evening."], out="fleet", quiet=True, labels={"corpus": "evening"})
        assert (caught.value.code, "`--idempotency-key KEY`" in caught.value.advice) == (
            ErrorCode.LEDGER_CANCELLED,
            True,
        )
    assert nightjar.submit(["Good evening."], out="fleet", quiet=True, idempotency_key="again").id != job.id
    job.close()


def test_one_text_whole_and_as_a_stream(tmp_path: Path) -> None:
    with nightjar.open_model("hibari") as voice:
        whole = voice.speak("Good evening. Good night.", voice="heart", seed=1)
        pieces = list(voice.stream("Good evening. Good night.", voice="heart", seed=1))
        assert len(pieces) == 2
        assert sum(len(piece.samples) for piece in pieces) == len(whole.samples)
        with pytest.raises(nightjar.InputError, match="colour"):
            voice.speak("Hi.", colour="red")
        for wrong in ({"voice": "nobody"}, {"voice": 7}, {"temperature": "hot"}, {"seed": "x"}, {"seed": -1}):
            with pytest.raises(nightjar.InputError):
                voice.speak("Hi.", **wrong)
        with pytest.raises(nightjar.InputError, match="cannot be read"):
            voice.speak("Hi.", reference=tmp_path / "none.wav")
    assert soundfile.info(whole.save(tmp_path / "a.flac")).duration == pytest.approx(whole.seconds)
    assert "data:audio/wav;base64," in whole._repr_html_()


NOTEBOOK = ROOT / "examples/python.ipynb"


def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    """Each cell as a notebook runs it: its statements, then its last expression, which is shown."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], [cell for cell in notebook["cells"] if cell.get("outputs")]) == (4, [])
    script: list[str] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        *_, last = ast.parse(source).body
        if isinstance(last, ast.Expr) and not source.startswith("for "):
            lines = source.splitlines()
            source = "\n".join([*lines[: last.lineno - 1], f"shown = {ast.unparse(last)}"])
            source += "\nprint('SHOWN', len(getattr(shown, '_repr_html_', shown.__repr__)()))"
        script.append(source)
    (tmp_path / "cells.py").write_text("\n".join(script))
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SHOWN") == 6


def test_the_page_names_what_there_is() -> None:
    page = (ROOT / "docs/python.md").read_text()
    for name in nightjar.__all__:
        assert f"`{name}" in page or f"nightjar.{name}" in page, name


def test_a_job_is_deleted_only_with_a_yes_and_after_its_end(here: Path) -> None:
    job = nightjar.run(["Good evening."], out="out", quiet=True).wait()
    counted = job.delete()
    assert (counted.items, counted.objects > 1, job.state) == (1, True, "completed")
    assert job.delete(yes=True) == counted
    assert list((here / "out/jobs").iterdir()) == []
    with pytest.raises(nightjar.NightjarError) as caught:
        nightjar.find_job(job.id, out="out")
    assert caught.value.code is nightjar.ErrorCode.LEDGER_NOT_FOUND
    again = nightjar.run(["Good evening."], out="out", quiet=True).wait()
    assert (again.id != job.id, again.state) == (True, "completed")

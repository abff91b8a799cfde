"""`nightjar check` as a process of its own: killed, repeated, and asked for what it cannot do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.packages import write_package

ITEMS = 40
#: Writes the text of each draw that it measures; `number 7` has a low score, and on `number 9` it fails.
METER = """
import os, time
class Meter:
    def measure(self, sample):
        with open(os.environ["MEASURED"], "a") as file:
            file.write(f"{os.getpid()} {sample.text}\\n")
        time.sleep(0.1)
        if "number 9." in sample.text and os.environ.get("BROKEN"):
            raise ValueError("no ears")
        return {"peak": (0.1 if "number 7." in sample.text else 1.0, sample.text)}
"""
CHECKS = ["--qa-set", "meters.peak={}", "--qa-set", "bounds.peak.low=0.5"]


class Home:
    """A folder with a job of `nightjar run`, and a meter of another package."""

    def __init__(self, folder: Path) -> None:
        self.folder, package = folder, folder / "meters"
        write_package(package, "peak-meter", "nightjar.meters", {"peak": "peak_meter:Meter"})
        (package / "peak_meter.py").write_text(METER)
        self.log = folder / "measured"
        self.environment = os.environ | {
            "PYTHONPATH": f"{package}:{Path(__file__).parents[3]}",
            "MEASURED": str(self.log),
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        lines = (
            {"example_id": f"u{n}", "messages": [["user", "text", f"This is number {n}."]]}
            for n in range(ITEMS)
        )
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        made = self.run("run", "in.jsonl", "--out", "out", "--quiet")
        assert made.returncode == 0, made.stderr
        self.job = made.stdout.strip()

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "jobs", *words],
            cwd=self.folder,
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **more)
        out, errors = process.communicate(timeout=240)
        return subprocess.CompletedProcess(words, process.returncode, out, errors)

    def measured(self) -> list[str]:
        """The texts that were measured, in order, with the process that did it."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def items(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.run("items", self.job, "--json").stdout.splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("check"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_check_that_is_asked_to_end_leaves_its_shard_and_keeps_what_it_measured(
    tmp_path: Path, number: signal.Signals
) -> None:
    home = Home(tmp_path)
    process = home.start("check", home.job, *CHECKS)
    deadline = time.monotonic() + 240
    while len(home.measured()) < 6:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    assert errors == "Stopped. What was measured is kept. To continue, repeat the command.\n"
    before = home.measured()
    began = time.monotonic()
    ended = home.run("check", home.job, *CHECKS)
    assert "Another check" not in ended.stderr
    assert time.monotonic() - began < 50, "the lease was not released"
    texts = Counter(line.partition(" ")[2] for line in home.measured())
    assert len(texts) == ITEMS
    # Only the draw that was being measured, and one whose answer was on its way.
    assert sum(count > 1 for count in texts.values()) <= 2 < len(before)


def test_a_check_that_is_killed_goes_on_where_it_was(made: Home) -> None:
    process = made.start("check", made.job, *CHECKS)
    deadline = time.monotonic() + 240
    while len(made.measured()) < 20:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    process.wait()
    # Its meter ends with it.
    meter = int(made.measured()[0].partition(" ")[0])
    while Path(f"/proc/{meter}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = len(made.measured())
    ended = made.run("check", made.job, *CHECKS, "--json", BROKEN="1")
    assert ended.returncode == 1, ended.stderr
    texts = Counter(line.partition(" ")[2] for line in made.measured())
    assert len(texts) == ITEMS
    # Only what was not committed yet is measured again.
    assert sum(count > 1 for count in texts.values()) <= 9
    assert before < len(made.measured()) < ITEMS + 10
    states = {item["example_id"]: (item["state"], item["error_code"]) for item in made.items()}
    assert {name for name, state in states.items() if state == ("failed", "qa.score")} == {"u7"}
    view = json.loads(ended.stdout)
    left = view["left"]
    assert left == ("is left" in ended.stderr)
    assert view["left_by_code"] == ({"qa.meter": 1} if left else {})
    again = made.run("check", made.job, *CHECKS, "--json")
    assert json.loads(again.stdout)["left"] == 0
    assert len(made.measured()) - before < ITEMS
    last = len(made.measured())
    assert made.run("check", made.job, *CHECKS).returncode == 1
    assert len(made.measured()) == last
    heard = made.run("export", made.job, "--format", "manifest", "--where", "peak > 0.5")
    assert len(heard.stdout.splitlines()) == ITEMS - 1
    (quarantined,) = (item for item in made.items() if item["state"] == "failed")
    assert quarantined["key"] is None
    verified = made.run("verify", made.job, "--sample", "0")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        ([], 4, "config.invalid"),
        (["--qa", "basic"], 4, "config.invalid"),
        (["--qa", "loud"], 4, "config.invalid"),
        (["--qa", "off"], 4, "config.invalid"),
        ([*CHECKS, "--qa-sample", "200%"], 4, "config.invalid"),
        ([*CHECKS, "--qa-sample", "nan"], 4, "config.invalid"),
        (["--qa-set", "meters.peek={}"], 4, "config.invalid"),
        (["--qa-config", "/nowhere"], 4, "config.invalid"),
        ([*CHECKS, "--qa-set", "bounds.log_probability.low=-4"], 4, "config.invalid"),
    ],
)
def test_checks_that_make_no_sense_are_refused(made: Home, words: list[str], status: int, code: str) -> None:
    refused = made.run("check", made.job, *words, "--json")
    assert (refused.returncode, refused.stdout) == (status, "")
    assert json.loads(refused.stderr)["error"]["code"] == code


PROGRAM = """
import nightjar, sys
job = nightjar.find_job(sys.argv[1], out="out")
checked = job.check(qa_set=["meters.peak={}", "bounds.peak.low=0.5"])
print(checked.passed, checked.measured.items, checked.measured.still_failed, dict(checked.left), str(checked))
for wrong in ({}, {"qa_sample": "5x"}, {"nope": 1}, {"qa_set": "meters.peak={}"}):
    try:
        job.check(**wrong)
    except nightjar.NightjarError as error:
        print(error.code.value)
"""


def test_a_program_checks_too(made: Home) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, made.job], cwd=made.folder, env=made.environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *errors = done.stdout.splitlines()
    assert first.startswith(
        "False 40 1 {} 1 of 40 measured items failed a draw: 2.5% (0.4% to 12.9%); 1 still fail"
    )
    assert errors == ["config.invalid"] * 4


def test_an_unknown_job_is_not_found(made: Home) -> None:
    gone = made.run("check", "zzzz", *CHECKS)
    assert gone.returncode == 3
    assert "ledger.not_found" in gone.stderr


def test_ctrl_c_ends_a_check_without_a_trace(tmp_path: Path) -> None:
    home = Home(tmp_path)
    process, deadline = home.start("check", home.job, *CHECKS), time.monotonic() + 240
    while not home.measured():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 130, (out, errors)
    assert "Traceback" not in errors
    assert len(home.measured()) < ITEMS

"""Each benchmark on a CPU at sizes whose figures mean nothing: it runs to its end, nothing fails, and what it counts is
right. `make soak` runs these tests; others leave them out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT

TINY = ("--device", "cpu", "--tiny")


def run(folder: Path, module: str, *words: str) -> dict[str, Any]:
    """The result of a benchmark."""
    path = folder / "found.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", *words, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return json.loads(path.read_text())


def test_the_engine(tmp_path: Path) -> None:
    more = ("--slots", "4", "--codec", "--reproducible", "4", "--codec-rows", "4", "--long-prompts", "4")
    found = run(tmp_path, "engine", *TINY, *more)
    rows = [(row["part"], row.get("reproducible"), row.get("more_text")) for row in found["rows"]]
    assert rows == [("codec", None, None), ("all", False, 0), ("all", True, 0), ("all", False, 192)]
    assert all(row["wrong_lengths"] == 0 for row in found["rows"])


@pytest.mark.parametrize("family", ["spark", "fish"])
def test_both_families(tmp_path: Path, family: str) -> None:
    more = ("--engines", "native", "--requests", "2", "--streams", "1", "--seconds", "0.2")
    found = run(tmp_path, "speech", family, *TINY, *more)
    assert found["faults"] == {}
    parts = {row["part"] for row in found["rows"]}
    assert parts == {"speech, end to end", "first chunk"}


def test_bits_and_a_soak(tmp_path: Path) -> None:
    assert run(tmp_path, "qwen3", "bits", *TINY)["same_bits"]
    assert run(tmp_path, "qwen3", "soak", *TINY, "--count", "20")["problems"] == []


def test_errors_of_fp8(tmp_path: Path) -> None:
    found = run(tmp_path, "precision", *TINY)
    counts = {
        part: sum(row["part"] == part for row in found["rows"]) for part in ("products", "codec", "drift")
    }
    assert (found["faults"], counts) == ({}, {"products": 12, "codec": 12, "drift": 4})
    own, *parts = (row for row in found["rows"] if row["part"] == "products")
    assert all(row["residual_error"] > own["residual_error"] for row in parts)


def test_a_job_with_and_without_a_voice_that_costs_nothing(tmp_path: Path) -> None:
    engine, job = run(tmp_path, "job", *TINY, "--items", "40")["rows"]
    assert engine["engine_audio_s_per_s"] > 0
    assert (job["failed"], job["made_audio_s"]) == (0, pytest.approx(job["asked_audio_s"]))
    cloning = ("--skip-engine", "--cloning", "vector", "context", "--voices", "3", "--items", "8")
    rows = run(tmp_path, "job", *TINY, *cloning)["rows"]
    made = [(row["cloning"], row["voices"], row["failed"], row["items"]) for row in rows]
    assert made == [("vector", 3, 0, 8), ("context", 3, 0, 8)]
    (job,) = run(tmp_path, "job", "--device", "cpu", "--instant", "1", "--items", "60")["rows"]
    assert (job["failed"], job["items"]) == (0, 60)
    assert 0 < job["start_s"]["worker up"] < job["first_audio_s"] < job["command_s"]


def test_streams(tmp_path: Path) -> None:
    parts, more = ("--parts", "closed", "neutral"), ("--clients", "2", "--rates", "0.5")
    # The first requests of each client are counted, so that a slow machine has some too.
    more += ("--warm-up", "0", "--duration", "8", "--seeds", "1")
    found = run(tmp_path, "stream", "--tiny", *parts, *more)
    assert all(
        (row["failures"], row.get("too_short"), row["left_over"]) == ({}, 0, 0) for row in found["rows"]
    )
    assert all(row["requests"] > 0 for row in found["rows"])
    neutral = found["rows"][-1]
    assert (neutral["harness"], neutral["inaudible"]) == ("neutral", 0)
    assert neutral["audible_ms"]["50"] >= neutral["first_pcm_ms"]["50"]


def test_an_engine_that_is_killed_under_load(tmp_path: Path) -> None:
    more = ("--clients", "2", "--warm-up", "0.5", "--duration", "5")
    (row,) = run(tmp_path, "stream", "--tiny", "--parts", "recovery", *more)["rows"]
    assert (row["mode"], row["clients"], row["failures"], row["left_over"]) == ("recovery", 2, {}, 0)
    assert row["healthy_again_s"] > 0.25 < row["first_again_s"] < 20
    assert row["retried"] + row["failed"].get("connection lost", 0) <= 2


def test_streams_that_clone(tmp_path: Path) -> None:
    load = ("--clients", "2", "--warm-up", "0", "--duration", "4", "--requests", "5")
    *rows, seed_tts = run(tmp_path, "stream", "--tiny", "--parts", "cloning", "seed_tts", *load)["rows"]
    assert (seed_tts["harness"], seed_tts["requests"], seed_tts["failures"]) == ("seed_tts", 5, {})
    kinds = [(row["cloning"], row["recording"]) for row in rows]
    assert kinds == [(one, two) for one in ("vector", "context") for two in ("kept", "new")]
    assert all(row["failures"] == {} and row["requests"] > 0 for row in rows)


def test_what_a_processor_does(tmp_path: Path) -> None:
    found = run(tmp_path, "cpu", "filters", "--items", "3000")
    kept = [one["aim"] for one in found["figures"] if "all pages" in one["name"]]
    assert (found["faults"], kept) == ({}, ["28 items", "24 items"])
    some = ("--items", "40", "--formats", "manifest", "interleaved", "ctm", "shar dialogues")
    names = [one["name"] for one in run(tmp_path, "cpu", "exports", *some)["figures"]]
    kinds = ("manifest", "shar, dialogues", "manifest, unique", "manifest", "interleaved", "ctm")
    assert [name.removeprefix("memory of ").rpartition(", ")[0] for name in names[::2]] == [*kinds]


def test_errors_of_the_times_of_words(tmp_path: Path) -> None:
    *errors, skipped, repeated = run(tmp_path, "cpu", "words", "--texts", "3")["figures"]
    assert [row["name"].partition(", ")[2] for row in errors] == 4 * ["46 edges"], errors
    medians, most = errors[::2], errors[1::2]
    assert all(0 < one["value"] < other["value"] for one, other in zip(medians, most, strict=True))
    assert (skipped["value"], repeated["value"]) == (1.0, 1.0)


def test_kernels_need_a_gpu() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.kernel", "--device", "cpu"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_the_options_of_every_command_on_a_page_are_there() -> None:
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/NOTES.md"]
    text = " ".join(page.read_text() for page in pages)
    known: dict[str, set[str]] = {}
    for module, command in re.findall(r"python -m benchmarks\.(\w+)([^`#]*?)[`#]", text):
        known.setdefault(module, set()).update(re.findall(r"--[\w-]+", command))
    assert {"engine", "job", "stream", "qwen3"} <= known.keys()
    for module, options in known.items():
        command = [sys.executable, "-m", f"benchmarks.{module}", "--help"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert options <= set(re.findall(r"--[\w-]+", shown)), module

"""The steps of a session on a GPU: which run, for how long, and what a failed one costs the others."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import gpu_session
from benchmarks.gpu_session import Outcome, Step


def test_a_session_goes_on_after_a_failure_and_keeps_to_its_time(tmp_path: Path) -> None:
    chosen = [
        Step("broken", "check", ("json.nothing_of_this_name",), 300),
        Step("slow", "check", ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"), 2),
        Step("gpu", "check", ("json.tool",), 300, gpu_only=True),
        Step("fine", "speed", ("calendar", "2026"), 300),
        Step("packages", "speed", ("calendar",), 300, needs="NIGHTJAR_NOTHING_OF_THIS_NAME"),
    ]
    told: list[Outcome] = []
    gpu_session.run_all(chosen, "cpu", 10, tmp_path, told.append)
    assert [outcome.ended for outcome in told] == ["failed", "too slow", "left out", "ok", "left out"]
    kept = json.loads((tmp_path / "session.json").read_text())
    assert [step["name"] for step in kept["steps"]] == [step.name for step in chosen]
    assert "December" in (tmp_path / "session.log").read_text()
    assert (
        gpu_session.run(chosen[3], "cpu", 1.0, tmp_path, (tmp_path / "log").open("w")).why
        == "no time is left"
    )


def test_every_step_of_a_session_is_a_module_that_exists(tmp_path: Path) -> None:
    for tiny in (False, True):
        for step in gpu_session.steps("cpu" if tiny else "cuda", tiny, tmp_path):
            path = Path(__file__).parents[1] / step.arguments[0].replace(".", "/")
            assert (
                step.arguments[0] == "pytest"
                or path.with_suffix(".py").exists()
                or (path / "__main__.py").exists()
            )
            assert step.group in (
                "check",
                "speed",
                "tune",
                "engines",
                "spark",
                "fish",
                "eight",
                "kernels",
                "megakernel",
                "rows",
            )


def test_long_steps_run_when_they_are_asked_for(tmp_path: Path) -> None:
    known = gpu_session.steps("cuda", False, tmp_path)
    assert not {"eight", "kernels", "megakernel", "rows"} & {
        step.group for step in gpu_session.named(known, [])
    }
    assert not any(step.name.startswith("rows") for step in gpu_session.named(known, ["tune"]))
    assert [step.name for step in gpu_session.named(known, ["rows"])] == ["rows 0.6B", "rows 1.7B"]
    assert known[-1].group == "rows"

"""Numbers on the command line that are none: refused before anything is read or made."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.job_options import checked_options, job_of
from pipelines.errors import ConfigError, InputError
from worker.cli import cli as worker_cli

KEYS = [
    "error_budget",
    "temperature",
    "top_p",
    "repetition_penalty",
    "cfg",
    "max_seconds",
    "text_temperature",
    "audio_temperature",
]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN", "1e999"])
@pytest.mark.parametrize("key", KEYS)
def test_what_is_no_number_is_wrong_usage(
    key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"example_id": "a", "messages": [["user", "text", "Hello."]]}\n')
    for command in ("submit", "run"):
        done = CliRunner().invoke(cli, [command, "in.jsonl", "--set", f"{key}={value}"])
        assert (done.exit_code, key in done.output) == (2, True), done.output
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "words", [["wait", "j", "--timeout=nan"], ["report", "j", "--price=nan"], ["status", "j", "--price=inf"]]
)
def test_of_other_commands_too(words: list[str]) -> None:
    assert CliRunner().invoke(cli, words).exit_code == 2


@pytest.mark.parametrize(
    "words", [["nightly", "--wait=nan"], ["nightly", "--wait=inf"], ["sweep", "--grace-hours=nan"]]
)
def test_of_the_worker_too(words: list[str]) -> None:
    assert CliRunner().invoke(worker_cli, words).exit_code == 2


@pytest.mark.parametrize("budget", [float("nan"), float("inf"), -0.1, 1.1])
def test_no_budget_that_is_none_is_an_option_of_a_job(budget: float) -> None:
    """In Python, nights and the command line alike."""
    with pytest.raises(ConfigError, match="error_budget"):
        checked_options({"error_budget": budget})


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_budgets_that_are_some_are_taken(budget: float) -> None:
    assert job_of(checked_options({"error_budget": budget}))[1].error_budget == budget


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_dry_run_refuses_what_the_run_would(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"example_id": "a", "messages": [["user", "text", "Hello."]]}\n')
    done = CliRunner().invoke(cli, [command, "in.jsonl", "--dry-run", "--label", "corpus"])
    assert (done.exit_code, "'corpus' is not KEY=VALUE" in done.output) == (2, True), done.output
    done = CliRunner().invoke(cli, [command, str(tmp_path), "--dry-run"], standalone_mode=False)
    assert isinstance(done.exception, InputError)
    assert "for a Kaldi folder, its `text`" in done.exception.advice

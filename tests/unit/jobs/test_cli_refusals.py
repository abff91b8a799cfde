"""What a command says where the system refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.cli import main
from jobs.console import fail


@pytest.mark.parametrize("words", [["list"], ["run", __file__], ["doctor"]])
def test_a_working_directory_that_was_deleted_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said == "Error system: The working directory no longer exists.\nChange to one that exists.\n"


def test_a_refusal_names_the_file_and_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    fail(PermissionError(13, "Permission denied", "/the/file"), as_json=False)
    assert capsys.readouterr().err.startswith("Error system: System error: Permission denied: /the/file.\n")

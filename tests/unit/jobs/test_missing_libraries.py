"""Commands that need a library of an extra say which one, and how to install it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs.cli import main


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "pipelines.speechlm.weights", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["models", "convert", "base.pt", "--like", "folder", "--out", "new"]) == 1
    said = capsys.readouterr().err
    assert "Error model.missing_extra: Converting" in said
    assert "the library torch.\nInstall it with: pip install 'nightjar-speech[gpu]'." in said
    assert list(tmp_path.iterdir()) == []

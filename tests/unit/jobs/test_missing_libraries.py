"""Commands that need a library of an extra say which one, and how to install it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs.cli import main


@pytest.mark.parametrize(
    ("words", "library", "imported", "extra"),
    [
        (["models", "convert", "base.pt", "--like", "folder", "--out", "new"], "torch", "pipelines.speechlm.weights", "gpu"),
        (["evaluate", "in.jsonl", "--to", "answers.jsonl"], "httpx2", "jobs.evaluation", "serve"),
    ],
)
def test_a_missing_library_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    library: str,
    imported: str,
    extra: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"example_id": "a", "messages": [["user", "text", "Good evening."]]}\n')
    for name in [name for name in sys.modules if name == imported or name.startswith(f"{imported}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert f"Error model.missing_extra: {'Converting' if extra == 'gpu' else 'Asking'}" in said
    assert f"the library {library}.\nInstall Nightjar with its extra `{extra}` (docs/install.md)." in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]

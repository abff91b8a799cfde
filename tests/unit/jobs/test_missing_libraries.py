"""Commands that need a library of an extra say which one, and how to install it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs.cli import main


@pytest.mark.parametrize(
    ("words", "library", "extra"),
    [
        ("models convert base.pt --like folder --out new", "torch", "gpu"),
        ("serve --model hibari", "fastapi", "serve"),
        ("list", "psycopg", "postgres"),
        ("submit s3://bucket/in.jsonl --dry-run", "boto3", "s3"),
        ("submit in.parquet --dry-run", "pyarrow", "export"),
        ("run in.jsonl --qa-set meters.asr={}", "faster_whisper", "qa"),
    ],
)
def test_a_missing_library_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    library: str,
    extra: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if library == "psycopg":
        monkeypatch.setenv("SPEECH_DATABASE_URL", "postgresql://localhost:9/speech")
    Path("in.jsonl").write_text('{"example_id": "a", "messages": [["user", "text", "Good evening."]]}\n')
    Path("in.parquet").write_bytes(b"PAR1 and PAR1")
    monkeypatch.delitem(sys.modules, "pipelines.speechlm.weights", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    assert main(words.split()) == 4
    said = capsys.readouterr().err
    assert said.startswith(f"Error {'model.missing_extra' if extra == 'gpu' else 'config.missing_library'}: ")
    assert f" {library}" in said.splitlines()[0]
    assert f"Install Nightjar with its extra `{extra}` (docs/install.md)." in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.parquet"]

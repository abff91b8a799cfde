"""What `nightjar.run` gives to the run of a job on this machine, and what it refuses before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nightjar
import nightjar.runs
from pipelines.errors import ConfigError, ModelError


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings, file, spec, options and devices of runs, none of which works."""
    monkeypatch.chdir(tmp_path)
    given = list[Any]()

    def run_locally(*arguments: Any) -> None:
        *own, _progress, _stop, submitted = arguments
        given.extend(own)
        submitted(SimpleNamespace(id="job"))

    monkeypatch.setattr(nightjar.runs, "run_locally", run_locally)
    return given


def test_a_file_of_records_has_the_columns_and_voices_that_were_asked_for(
    asked: list[Any], tmp_path: Path
) -> None:
    rows = [{"sentence": "Good evening.", "who": "s1"}]
    nightjar.run(rows, columns={"text": "sentence", "speaker": "who"}, voices="heart", voices_by="speaker")
    settings, _path, resolved, _options, devices = asked
    # They are in its lines already.
    assert not resolved.spec.reading or resolved.spec.reading.columns is None
    assert not resolved.spec.pool.by_speaker
    # Paths of recordings start in the working directory.
    assert settings.audio_roots[-1] == tmp_path
    assert devices is None


def test_a_gpu_that_is_not_there_is_refused(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="no GPU was found"):
        nightjar.run(["Good evening."], gpu="all")
    assert asked == []


def test_a_meter_without_its_model_is_refused(asked: list[Any]) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        nightjar.run(["Good evening."], qa="basic", qa_set=["meters.align.model=nowhere"])
    assert asked == []

"""What of a job's settings is frozen at submit: the model's own words for what a person asks for in others."""

from __future__ import annotations

import pytest

from jobs.ledger.records import JobSpec
from jobs.settings_groups import Schedule
from jobs.spec import resolve
from nightjar.runs import _job_options
from pipelines.errors import ErrorCode, InputError
from pipelines.request import Generation
from worker.nightly import _spec


def frozen(**settings: str) -> Generation:
    return resolve(JobSpec("hibari", generation=Generation(**settings))).spec.generation  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["en", "EN", "en_US", "en-US", " en"])
def test_a_code_of_a_language_is_frozen_as_the_models_name(asked: str) -> None:
    assert frozen(language=asked).language == "English"
    specs = [
        JobSpec("hibari", generation=Generation(language=asked)),
        _job_options({"language": asked, "qa": "off"})[0],
        _spec(Schedule(input="x", language=asked, qa="off")),
    ]
    assert [resolve(spec).spec.generation.language for spec in specs] == ["English"] * 3


def test_a_name_of_a_language_is_frozen_as_it_is_written() -> None:
    # Another spelling would be another hash: the same file would become another job.
    assert [frozen(language=name).language for name in ("English", "english", "ENGLISH")] == ["English", "english", "ENGLISH"]


@pytest.mark.parametrize("asked", ["klingon", "de", "de-DE", ""])
def test_a_language_that_a_model_has_not_is_refused_with_those_that_it_has(asked: str) -> None:
    with pytest.raises(InputError, match="It has: English") as caught:
        frozen(language=asked)
    assert caught.value.code is ErrorCode.INPUT_UNKNOWN_LANGUAGE

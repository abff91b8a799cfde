"""What of a job's settings is frozen at submit: the model's own words for what a person asks for in
others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jobs.job_options import checked_options, job_of
from jobs.ledger.records import JobSpec
from jobs.settings import Schedule
from jobs.spec import resolve, spec_sha
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import register_pipeline
from pipelines.request import Capabilities, Generation, Message
from pipelines.serving import ServeOptions
from pipelines.serving.voices import Voices
from pipelines.validation import OPENAI_VOICES, speech_task
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline


def frozen(**settings: str) -> Generation:
    return resolve(JobSpec("hibari", generation=Generation(**settings))).spec.generation  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["en", "EN", "en_US", "en-US", " en"])
def test_a_code_of_a_language_is_frozen_as_the_models_name(asked: str) -> None:
    assert frozen(language=asked).language == "English"
    specs = [
        JobSpec("hibari", generation=Generation(language=asked)),
        job_of(checked_options({"language": asked, "qa": "off"}))[0],
        job_of(Schedule.model_validate({"input": "x", "language": asked, "qa": "off"}).options)[0],
    ]
    assert [resolve(spec).spec.generation.language for spec in specs] == ["English"] * 3


def test_a_name_of_a_language_is_frozen_as_it_is_written() -> None:
    # Another spelling would be another hash: the same file would become another job.
    assert [frozen(language=name).language for name in ("English", "english", "ENGLISH")] == [
        "English",
        "english",
        "ENGLISH",
    ]


def test_an_empty_voice_is_none_and_not_the_only_voice() -> None:
    # As from a variable of a shell that is not set. Another value would be another hash.
    assert frozen(voice="").voice is None


def test_names_of_openai_mean_the_same_voices_as_in_the_server() -> None:
    able = Capabilities(voices=("ada", "bob"))
    card = replace(fake_card("two"), capabilities=able)
    served = Voices(SimpleNamespace(card=card, options=ServeOptions(("two",))))  # type: ignore[arg-type]
    forget = register_pipeline("two", card, lambda **_: FakePipeline())
    try:
        for name in OPENAI_VOICES:
            roles = {"assistant": Generation(voice=name)}
            spec = resolve(JobSpec("two", generation=Generation(voice=name, roles=roles))).spec  # type: ignore[arg-type]
            line = speech_task([Message("user", "text", "Hello.")], Generation(voice=name), able)
            assert spec.generation.roles is not None
            assert {spec.generation.voice, spec.generation.roles["assistant"].voice, line.voice} == {
                served.named(name)
            }
    finally:
        forget()
    assert frozen(voice="verse").voice == "heart"


def test_a_name_of_openai_is_the_own_voice_of_a_model_that_has_none_to_choose_from() -> None:
    assert (
        speech_task([Message("user", "text", "Hello.")], Generation(voice="alloy"), Capabilities()).voice
        is None
    )
    with pytest.raises(InputError, match="Unknown voice 'alloy'"):
        speech_task(
            [Message("user", "text", "Hello.")], Generation(voice="alloy"), Capabilities(multi_turn=True)
        )


def test_the_only_voice_of_a_model_is_frozen_where_nobody_names_one() -> None:
    bare, named = resolve(JobSpec("hibari")), resolve(JobSpec("hibari", generation=Generation(voice="heart")))
    assert bare.spec.generation.voice == "heart"
    assert spec_sha(bare.spec) == spec_sha(named.spec)
    for able in (
        Capabilities(voices=("ada", "bob")),
        Capabilities(voices=("ada",), cloning=True),
        Capabilities(),
    ):
        forget = register_pipeline(
            "other", replace(fake_card("other"), capabilities=able), lambda **_: FakePipeline()
        )
        try:
            # Its voice is the model's choice, or the recording's of a line.
            assert resolve(JobSpec("other")).spec.generation.voice is None
        finally:
            forget()


@pytest.mark.parametrize("asked", ["klingon", "de", "de-DE", ""])
def test_a_language_that_a_model_has_not_is_refused_with_those_that_it_has(asked: str) -> None:
    with pytest.raises(InputError, match="It has: English") as caught:
        frozen(language=asked)
    assert caught.value.code is ErrorCode.INPUT_UNKNOWN_LANGUAGE

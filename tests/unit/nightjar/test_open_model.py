"""Errors of `nightjar.open_model` say what to give it, and not which setting a worker would take that
from."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import nightjar
from nightjar.voice import _in_python  # pyright: ignore[reportPrivateUsage]
from pipelines.engine_choice import FRAMES_ADVICE
from pipelines.fish_speech.pipeline import FishOptions
from pipelines.options import ENGINE
from pipelines.qwen3_tts.pipeline import PipelineOptions
from tests.support import fish_checkpoint

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"executor": "megakernel"}, "Set the option `executor` to eager, or leave it out."),
        ({"max_context": 2}, "Set the option `max_context` to 64 or more, or leave it out."),
    ],
)
def test_advice_names_the_option(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(nightjar.NightjarError) as caught:
        nightjar.open_model(GOLDEN / "qwen3_tts/checkpoint-custom", device="cpu", **options)
    assert (caught.value.code, caught.value.advice) == (nightjar.ErrorCode.CONFIG_INVALID, advice)


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize("model", ["spark", "fish"])
def test_the_list_of_options_has_the_engine_where_it_is_one(model: str, engine: str) -> None:
    folder = GOLDEN / "spark/checkpoint" if model == "spark" else fish_checkpoint.whole()
    with pytest.raises(nightjar.NightjarError, match="Unknown option 'engin'") as caught:
        nightjar.open_model(folder, engine=engine, engin="vllm")
    assert ", engine, " in caught.value.advice
    with pytest.raises(nightjar.NightjarError, match="Unknown option 'engine'"):
        nightjar.open_model("hibari", engine=engine)


def test_every_advice_of_a_model_has_words_of_python() -> None:
    """All texts of the sources that name a setting of an engine; the options they then name exist."""
    texts = {FRAMES_ADVICE}
    for path in (ROOT / "pipelines").rglob("*.py"):
        texts |= set(re.findall(r'"([^"\n]*SPEECH_(?:ENGINE|VLLM)__[^"\n]*)"', path.read_text()))
    assert len(texts) >= 10
    known = {field.name for kind in (FishOptions, PipelineOptions) for field in fields(kind)} | {ENGINE}
    for text in texts:
        said = _in_python(text)
        assert not re.search(r"SPEECH_|\bunset\b|\bUnset\b", said), said
        assert set(re.findall(r"the option `(\w+)`", said)) <= known, said


def test_other_advice_stays_as_it_is() -> None:
    assert (
        _in_python("Unset SPEECH_DATABASE_URL for this command.")
        == "Unset SPEECH_DATABASE_URL for this command."
    )

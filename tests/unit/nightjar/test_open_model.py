"""Errors of `nightjar.open_model` name the option that they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nightjar
from tests.support import fish_checkpoint

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"


@pytest.mark.parametrize(("option", "value"), [("executor", "megakernel"), ("max_context", 2)])
def test_an_option_that_cannot_be_used_here_is_named(option: str, value: Any) -> None:
    with pytest.raises(nightjar.NightjarError) as caught:
        nightjar.open_model(GOLDEN / "qwen3_tts/checkpoint-custom", device="cpu", **{option: value})
    assert caught.value.code is nightjar.ErrorCode.CONFIG_INVALID
    assert option.upper() in caught.value.advice


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize("model", ["spark", "fish"])
def test_the_list_of_options_has_the_engine_where_it_is_one(model: str, engine: str) -> None:
    folder = GOLDEN / "spark/checkpoint" if model == "spark" else fish_checkpoint.whole()
    with pytest.raises(nightjar.NightjarError, match="Unknown option 'engin'") as caught:
        nightjar.open_model(folder, engine=engine, engin="vllm")
    assert ", engine, " in caught.value.advice
    with pytest.raises(nightjar.NightjarError, match="Unknown option 'engine'"):
        nightjar.open_model("hibari", engine=engine)

"""A SparkTTS folder without vLLM: it runs on our own engine; asked for vLLM, it fails with an error that
names the extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelines.errors import ConfigError, ErrorCode, ModelError
from pipelines.registry import describe, open_pipeline
from tests.support.golden_checkpoint import weightless
from tests.support.vllm_kit import checkpoint


def test_opening_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert describe(str(checkpoint())).engine == "native"
    with pytest.raises(ModelError, match="extra `vllm`") as caught:
        open_pipeline(str(checkpoint()), engine="vllm")
    assert caught.value.code is ErrorCode.MODEL_MISSING_EXTRA


@pytest.mark.parametrize("engine", ["auto", "native", "vllm"])
def test_an_unknown_option_is_named(engine: str) -> None:
    with pytest.raises(ConfigError, match="'slot'"):
        open_pipeline(str(checkpoint()), engine=engine, slot=3)


def test_an_engine_that_it_does_not_run_on_is_named() -> None:
    with pytest.raises(ConfigError, match="'fast'"):
        open_pipeline(str(checkpoint()), engine="fast")


def test_graphs_are_refused_on_a_cpu_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The graph executor") as caught:
        open_pipeline(
            str(weightless(checkpoint(), tmp_path)), engine="native", device="cpu", executor="graph"
        )
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_type_that_the_model_does_not_work_in_is_refused(engine: str) -> None:
    with pytest.raises(ConfigError, match="float16") as caught:
        open_pipeline(str(checkpoint()), engine=engine, dtype="float16")
    assert caught.value.code is ErrorCode.CONFIG_INVALID

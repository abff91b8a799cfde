"""Which executor a model gets on its device."""

from __future__ import annotations

import pytest

from pipelines.engine.executor import EagerExecutor
from pipelines.errors import ConfigError, ErrorCode
from pipelines.qwen3_tts.execution import engine_options, open_executor
from tests.unit.qwen3_golden import golden_model


def test_auto_is_eager_on_a_cpu_and_graphs_are_refused() -> None:
    model = golden_model("base")
    sizes = engine_options(model, 2, 8, 8, 64)
    assert (sizes.frames_per_turn, sizes.admit_turns) == (1, 1)
    assert isinstance(open_executor(model, sizes), EagerExecutor)
    with pytest.raises(ConfigError) as caught:
        open_executor(model, sizes, "graph")
    assert caught.value.code is ErrorCode.CONFIG_INVALID

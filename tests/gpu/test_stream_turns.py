"""Streams on a CUDA device: turns that are read at once, newcomers in small graphs, and everything
captured before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.checkpoint import dummy_model
from pipelines.engine.core import EngineOptions
from pipelines.engine.graph import GraphExecutor
from pipelines.engine.opening import graph_executor, open_executor
from pipelines.engine.prefill import PACKED_SIZES, SHAPES, PackedPrefills
from pipelines.engine.scheduler import GenerationRequest
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.pipeline import open_pipeline
from tests.gpu.test_graph_executor import Heard, requests
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import GOLDEN

pytestmark = pytest.mark.gpu
SIZES: dict[str, int] = {"pages": 512, "page_size": 64, "max_context": 1024}


@pytest.fixture(scope="module")
def narrow() -> Qwen3TTSModel:
    return dummy_model("0b6", torch.device("cuda"), torch.bfloat16, 1024)


@pytest.fixture(scope="module")
def wide() -> Qwen3TTSModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return dummy_model("0b6", torch.device("cuda"), torch.float32, 1024)


class Chunks(Heard):
    """Also keeps what was handed on of each stream."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[str, list[np.ndarray]] = {}

    def frames(self, request: GenerationRequest, codes: np.ndarray) -> None:
        self.chunks.setdefault(request.request_id, []).append(codes)


def spoken(
    executor: Any, batch: list[GenerationRequest], together: int, frames: int = 1, stream_slots: int = 0
) -> Chunks:
    heard = Chunks()
    options = EngineOptions(
        slots=executor.state.slots, frames_per_turn=frames, stream_slots=stream_slots, **SIZES
    )
    core = ListenedCore(executor, options, heard)
    with torch.cuda.stream(executor.stream):
        for start in range(0, len(batch), together):
            for request in batch[start : start + together]:
                core.add(request)
                core.step()
            while core.busy:
                core.step()
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages
    return heard


def all_captured(executor: GraphExecutor) -> bool:
    prefills, slots = executor.prefills, executor.state.page_table.shape[1]
    wanted = (
        PACKED_SIZES
        if isinstance(prefills, PackedPrefills)
        else range(sum(new + before <= slots for _, new, before in SHAPES))
    )
    frames = set(executor.graphs.captured) == set(executor.batch_sizes)
    return frames and set(prefills.rows.captured) == set(wanted) and not executor.prepare()


def test_streams_and_whole_utterances_in_company_say_what_they_say_alone(narrow: Qwen3TTSModel) -> None:
    executor = graph_executor(
        narrow, EngineOptions(slots=16, **SIZES), reproducible=True, first_on_device=True
    )
    batch = requests(narrow, 24, greedy=False)
    mixed = [replace(one, stream=index % 2 == 0) for index, one in enumerate(batch)]
    alone = spoken(executor, batch, 1)
    together = spoken(executor, mixed, 24, frames=2, stream_slots=6)
    for request in mixed:
        codes = together.codes[request.request_id]
        np.testing.assert_array_equal(alone.codes[request.request_id], codes)
        if request.stream and request.request_id in together.chunks:
            handed = np.concatenate(together.chunks[request.request_id])
            np.testing.assert_array_equal(handed, codes[: len(handed)])


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_turns_that_are_read_at_once_and_a_turn_later_make_the_same_codes(
    narrow: Qwen3TTSModel, frames: int
) -> None:
    executor = graph_executor(narrow, EngineOptions(slots=16, **SIZES), reproducible=True)
    batch = requests(narrow, 12, greedy=False)
    later = spoken(executor, batch, 12, frames=frames)
    executor.lag = 0
    at_once = spoken(executor, batch, 12, frames=frames)
    for name in later.codes:
        np.testing.assert_array_equal(later.codes[name], at_once.codes[name])


@pytest.mark.parametrize("reproducible", [False, True])
def test_an_executor_for_streams_has_every_graph_and_its_work_goes_first(
    narrow: Qwen3TTSModel, reproducible: bool
) -> None:
    executor = open_executor(narrow, EngineOptions(slots=9, **SIZES), reproducible=reproducible, streams=4)
    assert isinstance(executor, GraphExecutor)
    assert all_captured(executor)
    assert executor.stream is not None
    assert executor.stream.priority < 0
    assert len(spoken(executor, requests(narrow, 12, greedy=False), 12).codes) == 12


@pytest.fixture
def pipeline() -> Iterator[Any]:
    opened = open_pipeline(
        GOLDEN / "checkpoint-base", device="cuda", slots=8, pages=512, streams=4, keep_unfinished=True
    )
    yield opened
    opened.close()


def test_a_pipeline_for_streams_is_open_when_all_graphs_stand_and_speech_was_made(pipeline: Any) -> None:
    executor = pipeline.engine.core.executor
    if isinstance(executor, GraphExecutor):
        assert all_captured(executor)
    assert pipeline.codec.decoder.stream_graphs is not None
    assert pipeline.engine.core.options.stream_slots == 4
    assert pipeline.stats().requests_done == 2
    assert pipeline.stats().running == 0

"""A model on another device than the current one: its threads, graphs and prepared voices are on the
model's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.registry import on_device
from pipelines.qwen3_tts.pipeline import Qwen3TTSPipeline, open_pipeline
from pipelines.request import Generation, Message, SynthesisRequest, stream, submit
from tests.support.qwen3_golden import GOLDEN

pytestmark = pytest.mark.gpu
SECONDS = 240


def asked(name: str) -> SynthesisRequest:
    reference = (GOLDEN / "refs" / "ref_a_24k_mono.wav").read_bytes()
    messages = Message("user", "audio", reference), Message("user", "text", "Good morning.")
    return SynthesisRequest(
        name, messages, Generation(max_seconds=0.8, temperature=0.0, reference_text="It was a bright day."), 1
    )


def heard(pipeline: Qwen3TTSPipeline) -> list[np.ndarray]:
    """A whole utterance and a stream, of a voice that is prepared by this thread."""
    whole = submit(pipeline, asked("whole")).result(SECONDS).samples
    return [whole, np.concatenate([chunk.samples for chunk in stream(pipeline, asked("stream"))])]


@pytest.mark.parametrize(
    "options",
    [{"executor": "eager"}, {"executor": "auto"}, {"executor": "auto", "streams": 4}],
    ids=["eager", "graphs", "streams"],
)
def test_models_on_two_devices_of_one_process_say_the_same(options: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    current = torch.cuda.current_device()
    pipelines: list[Qwen3TTSPipeline] = []
    try:
        for name in ("cuda:1", "cuda:0"):
            folder = GOLDEN / "checkpoint-base"
            pipelines.append(
                open_pipeline(
                    folder, device=name, dtype="float32", slots=8, pages=512, keep_unfinished=True, **options
                )
            )
        assert [pipeline.engine.core.executor.kv.k.device.index for pipeline in pipelines] == [1, 0]
        assert torch.cuda.current_device() == current
        second, first = (heard(pipeline) for pipeline in pipelines)
        for there, here in zip(second, first):
            assert np.abs(here).max() > 0
            np.testing.assert_allclose(there, here, atol=1e-3)
    finally:
        for pipeline in pipelines:
            pipeline.close()


def test_a_thread_goes_back_to_the_device_that_was_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for device in (torch.device("cuda:1"), torch.device("cpu"), None):
        with on_device(device):
            assert torch.cuda.current_device() == (1 if device is not None and device.type == "cuda" else 0)
        assert torch.cuda.current_device() == 0

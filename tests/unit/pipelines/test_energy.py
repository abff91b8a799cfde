"""The energy of a GPU's board, by a double of NVML's library."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pipelines.energy import board_joules
from pipelines.qwen3_tts.pipeline import open_pipeline
from pipelines.request import EngineStats
from tests.support.qwen3_golden import GOLDEN

#: A reading is kept for a quarter of a second.
KEPT_SECONDS = 0.3


class Nvml(ModuleType):
    """Two boards; the process has memory on the second one."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.millijoules: int | None = 5_000_000
        self.readings = 0
        #: Whether the process uses CUDA.
        self.in_use = True

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        """Does nothing."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return {"GPU-b": "the second board"}[uuid]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        assert handle == "the second board"
        self.readings += 1
        if self.millijoules is None:
            raise OSError("GPU is lost")
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    for name, value in (
        ("is_initialized", lambda: library.in_use),
        ("device_count", lambda: 2),
        ("memory_allocated", lambda device: (10, 2**30)[device]),
        ("get_device_properties", lambda device: SimpleNamespace(uuid="ab"[device])),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    time.sleep(KEPT_SECONDS)
    return library


def test_joules_count_from_the_first_reading_and_are_read_four_times_a_second(nvml: Nvml) -> None:
    before = board_joules()
    assert before is not None
    nvml.millijoules = 5_000_000 + 2_500
    began, known = time.monotonic(), nvml.readings
    for _ in range(100):
        board_joules()
    assert nvml.readings - known <= 1 + 4 * (time.monotonic() - began)
    time.sleep(KEPT_SECONDS)
    assert board_joules() == before + 2.5
    nvml.millijoules = None
    time.sleep(KEPT_SECONDS)
    assert board_joules() is None


def test_without_the_library_or_without_cuda_nothing_is_known(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert board_joules() is None
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    time.sleep(KEPT_SECONDS)
    assert board_joules() is not None
    nvml.in_use = False
    assert board_joules() is None


def test_an_engine_says_what_its_board_uses(nvml: Nvml) -> None:
    nvml.in_use = False
    pipeline = open_pipeline(
        GOLDEN / "checkpoint-base", slots=1, pages=8, page_size=16, max_context=100, device="cpu"
    )
    try:
        assert pipeline.stats().joules is EngineStats().joules is None
        nvml.in_use = True
        before = pipeline.stats().joules
        assert before is not None
        assert nvml.millijoules is not None
        nvml.millijoules += 7_000
        time.sleep(KEPT_SECONDS)
        assert pipeline.stats().joules == before + 7
    finally:
        pipeline.close()

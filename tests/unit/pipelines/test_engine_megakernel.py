"""The executor `megakernel`: which frames it makes, and how it becomes the graph executor where it must."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from kernels import binaries, lm_persistent
from kernels.lm_frame import FusedFrame, PersistentFrame
from kernels.lm_persistent import FAILED
from pipelines.engine import graph, megakernel
from pipelines.engine.buckets import Buckets
from pipelines.engine.executor import EngineOptions, FrameCodes, FrameSettings, PendingFrames
from pipelines.engine.graph import GraphExecutor
from pipelines.engine.megakernel import MegakernelExecutor, PersistentKernelError
from pipelines.engine.opening import graph_executor
from tests.support import persistent_kit
from tests.support.fake_gpus import FakeGpus
from tests.support.lm_tensors import Maker, Shape
from tests.support.persistent_kit import SMALLEST
from tests.support.qwen3_golden import golden_model

SETTINGS = FrameSettings(64, ())


class Eager(GraphExecutor):
    """A graph executor that captures nothing; a captured graph is its frame."""

    flags: np.ndarray

    def _capture(self, bucket: int) -> tuple[Any, FusedFrame]:
        return None, self._new_frame(bucket)

    def frames(self, *_: object) -> PendingFrames:
        return lambda: FrameCodes(np.zeros((1, 2, 5), np.int64), self.flags, np.zeros((1, 2), np.float32))

    def warm(self, *_: object) -> None:
        pass


class Unmade(MegakernelExecutor, Eager):
    """An executor with all that frames are made of, on a CPU; a captured graph is its frame."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, shape: Shape = SMALLEST) -> None:
        maker = Maker("cpu", dtype)
        self.tensors = maker.frame(shape)
        k, v = maker.caches(SMALLEST, 9, 16)
        self.kv = SimpleNamespace(k=k, v=v)  # type: ignore[assignment]
        slots = maker.state(SMALLEST, 2, 9, 16, torch.zeros(2, dtype=torch.int64))
        self.state = SimpleNamespace(tensors=slots)  # type: ignore[assignment]
        self.graphs = Buckets((1, 2, 4))
        self.flags = np.zeros((1, 2), np.uint8)

    def capture(self, bucket: int) -> tuple[Any, FusedFrame]:
        return self._capture(bucket)

    def frame(self, bucket: int) -> Any:
        """That of a bucket, which is captured where it is not."""
        return self.graphs.of(bucket, self._capture)[1]

    @property
    def kinds(self) -> list[type]:
        """The kind of frame of each bucket."""
        return [type(self.frame(bucket)) for bucket in (1, 2, 4)]

    @property
    def captured(self) -> set[int]:
        return set(self.graphs.captured)

    @property
    def persistent(self) -> tuple[Any, Any]:
        """The persistent kernels of talker and predictor, as far as they are made."""
        return self._talker, self._predictor

    def turn_plain(self) -> None:
        self._turn_plain()


@pytest.fixture(autouse=True)
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent kernels run here."""
    persistent_kit.emulate(monkeypatch)


def test_one_and_two_rows_have_the_persistent_kernel_and_share_its_weights() -> None:
    executor = Unmade()
    assert executor.kinds == [PersistentFrame, PersistentFrame, FusedFrame]
    one, two = (executor.frame(bucket) for bucket in (1, 2))
    assert isinstance(one, PersistentFrame)
    assert isinstance(two, PersistentFrame)
    assert one.predictor_run.predictor is two.predictor_run.predictor
    assert one.predictor_run.control is not two.predictor_run.control


def test_the_talkers_layers_have_a_persistent_kernel_where_there_is_one_for_their_sizes() -> None:
    executor = Unmade(shape=replace(SMALLEST, inter=SMALLEST.inter + 16))
    executor.capture(1)
    assert executor.frame(1).talker is None  # type: ignore[attr-defined]
    assert executor.frame(1).plan.pdl
    executor = Unmade()
    assert executor.kinds == [PersistentFrame, PersistentFrame, FusedFrame]
    assert not executor.frame(1).plan.pdl, "no kernel is launched early after a cooperative one"
    one, two = (executor.frame(bucket).talker for bucket in (1, 2))  # type: ignore[attr-defined]
    assert one.talker is two.talker
    assert one.predictor_run is executor.frame(1).predictor_run  # type: ignore[attr-defined]
    x = torch.zeros(1, SMALLEST.hidden, dtype=torch.bfloat16)
    one_row = executor.frame(1)
    one_row._pending = torch.ones(1)
    one_row._backbone(torch.zeros(1, dtype=torch.int64), x)
    assert x.any()
    assert one_row._pending is None, "what was left of other layers belongs to no state of the kernel"
    executor.turn_plain()
    assert executor.persistent == (None, None)


def test_a_model_without_a_kernel_has_plain_frames_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    executor = Unmade(torch.float32)
    executor.warm()
    assert executor.name == "graph"
    assert executor.kinds == [FusedFrame] * 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_device_without_room_has_plain_frames_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    persistent_kit.emulate(monkeypatch, room=lambda: 1)
    executor = Unmade()
    executor.warm()
    assert executor.name == "megakernel"
    assert executor.kinds == [FusedFrame] * 3
    assert executor.name == "graph"
    (record,) = caplog.records
    assert "holds 1 of them at once" in record.getMessage()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_fault_of_the_device_is_not_a_missing_kernel(
    kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> int:
        raise kind("CUDA error")

    persistent_kit.emulate(monkeypatch, room=fails)
    with pytest.raises(kind):
        Unmade().capture(1)


def test_a_talker_that_finds_no_memory_leaves_no_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise torch.OutOfMemoryError

    executor = Unmade()
    with monkeypatch.context() as full:
        full.setattr(megakernel, "Talker", fails)
        with pytest.raises(torch.OutOfMemoryError):
            executor.capture(1)
    assert executor.persistent[1] is None
    executor.capture(1)
    assert executor.frame(1).talker is not None  # type: ignore[attr-defined]


def test_persistent_kernels_are_the_executor_megakernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "GraphExecutor", lambda *_: "graph")
    monkeypatch.setattr(megakernel, "MegakernelExecutor", lambda *_: "megakernel")
    opened = [
        graph_executor(golden_model("base"), EngineOptions(1, 8, 8, 64), persistent=persistent)
        for persistent in (False, True)
    ]
    assert opened == ["graph", "megakernel"]


def test_a_wheel_brings_both_kernels() -> None:
    for source in (lm_persistent.SOURCE, lm_persistent.TALKER_SOURCE):
        assert binaries.targets_of(source) == [binaries.HOPPER, binaries.NEWER]


def test_a_launch_that_gives_up_is_an_error_once_and_plain_frames_follow(
    caplog: pytest.LogCaptureFixture, gpus: FakeGpus
) -> None:
    executor, held = Unmade(), list[set[int]]()
    gpus.waits.append(lambda: held.append(executor.captured))
    assert executor.kinds == [PersistentFrame, PersistentFrame, FusedFrame]
    assert executor.frames([0], 1, SETTINGS)().flags.tolist() == [[0, 0]]
    executor.flags[0, 0] = FAILED
    frame = executor.frame(2)
    assert isinstance(frame, PersistentFrame)
    frame.predictor_run.control[1] = -(1 << 31) | 3 << 20 | 7
    with pytest.raises(
        PersistentKernelError, match=r"The persistent kernel timed out; later frames run without it\."
    ):
        executor.frames([0], 1, SETTINGS)()
    assert [record.getMessage() for record in caplog.records] == [
        "the persistent kernel for 2 rows timed out: Block 3 of the predictor waited too long for exchange 7."
    ]
    assert held == [{1, 2, 4}], "the device is waited for once, before what it may be using goes"
    assert executor.name == "graph"
    assert executor.captured == {4}
    assert executor.kinds == [FusedFrame] * 3


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_reproducible_mode_embeds_each_prompt_alone(reproducible: bool) -> None:
    asked: list[list[str]] = []
    model = SimpleNamespace(
        embed=lambda prompt: asked.append([prompt]) or torch.zeros(1),
        embed_all=lambda prompts: asked.append(list(prompts)) or [torch.zeros(1)] * len(prompts),
    )
    executor: Any = object.__new__(GraphExecutor)
    executor.reproducible, executor._model = reproducible, model
    assert len(GraphExecutor.embed(executor, ["one", "two", "three"])) == 3
    assert asked == ([["one"], ["two"], ["three"]] if reproducible else [["one", "two", "three"]])

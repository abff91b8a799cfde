"""Frames of one or two rows with persistent kernels; all others run as in the graph executor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from kernels.lm_frame import FusedFrame, PersistentFrame, plan_for
from kernels.lm_persistent import (
    FAILED,
    ROWS,
    Predictor,
    PredictorRun,
    Talker,
    predictor_config,
    talker_config,
)
from kernels.toolchain import first_line
from pipelines.engine.executor import FrameCodes, FrameSettings, PendingFrames
from pipelines.engine.graph import GraphExecutor

log = logging.getLogger(__name__)


class PersistentKernelError(RuntimeError):
    """Blocks of a persistent kernel timed out waiting for each other."""


class MegakernelExecutor(GraphExecutor):
    """A graph executor whose graphs of one and two rows replace the predictor's kernels, and the talker's layers
    if there is a kernel for them, with one cooperative launch each.

    If there is no such kernel for a model or a device, it logs a warning and all graphs are plain. If a launch
    times out, the pending frames raise `PersistentKernelError`, which fails their requests (they can be
    retried), and all later graphs are plain. `name` is that of the graph executor while all graphs are plain.
    """

    name = "megakernel"
    _predictor: Predictor | None = None
    _talker: Talker | None = None
    _plain = False

    def warm(self, everything: bool = False) -> None:
        self._has_kernel()
        super().warm(everything)

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        return partial(self._watched, super().frames(slots, count, settings))

    def _watched(self, pending: PendingFrames) -> FrameCodes:
        """Reads frames, and raises `PersistentKernelError` if they are invalid."""
        made = pending()
        if (made.flags & FAILED).any():
            self._give_up()
            raise PersistentKernelError("The persistent kernel timed out; later frames run without it.")
        return made

    def _give_up(self) -> None:
        """Drops the graphs with persistent kernels, and logs their faults; plain ones are captured when
        needed."""
        torch.cuda.synchronize(self.kv.k.device)  # pending work may still use the graphs
        self._turn_plain()
        for bucket in ROWS:
            _, frame = self.graphs.captured.pop(bucket, (None, None))
            if isinstance(frame, PersistentFrame) and (fault := frame.predictor_run.fault) is not None:
                log.warning("the persistent kernel for %d rows timed out: %s", bucket, fault)

    def _capture(self, bucket: int) -> tuple[torch.cuda.CUDAGraph, FusedFrame]:
        try:
            return super()._capture(bucket)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if self._plain or bucket not in ROWS:
                raise
            log.warning(
                "there is no persistent kernel here (%s); frames run in plain graphs", first_line(error)
            )
            self._give_up()
        return super()._capture(bucket)

    def _new_frame(self, bucket: int) -> FusedFrame:
        if bucket not in ROWS or not self._has_kernel():
            return super()._new_frame(bucket)
        if self._predictor is None:
            # The weights in the kernels' layout; both or none, if there is no memory for the talker.
            talker = None if talker_config(self.tensors) is None else Talker(self.tensors)
            self._predictor = Predictor(self.tensors)
            self._talker = talker
        plan = plan_for(bucket, self.tensors.backbone.hidden)
        return PersistentFrame(
            PredictorRun(self._predictor, bucket),
            self.state.tensors,
            self.kv.k,
            self.kv.v,
            plan,
            self._talker,
        )

    def _has_kernel(self) -> bool:
        """Whether frames can have a persistent kernel; logs a warning once if the model has none."""
        if not self._plain and predictor_config(self.tensors) is None:
            log.warning("there is no persistent kernel for this model; frames run in plain graphs")
            self._turn_plain()
        return not self._plain

    def _turn_plain(self) -> None:
        self._plain = True
        self._predictor = None
        self._talker = None
        self.name = GraphExecutor.name

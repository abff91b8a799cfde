"""A stream of Qwen3-TTS on its way to the codec."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.qwen3_tts import pipeline
from pipelines.qwen3_tts.pipeline import FrameRequestInfo, FrameStreamer
from tests.support.fakes import FakeClock


def test_a_chunk_is_due_when_the_listener_has_heard_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far ahead of the listener it is made: by then the codec has others to decode first."""
    clock = FakeClock(1000.0)
    monkeypatch.setattr(pipeline, "time", clock)
    asked: list[tuple[int, bool, float]] = []
    stage: Any = SimpleNamespace(
        new_state=lambda: None,
        decode_chunk=lambda codes, _done, _state, last, deadline: asked.append((len(codes), last, deadline)),
    )
    streamer = FrameStreamer(
        FrameRequestInfo("Hello.", 24_000, {}, False, frame_seconds=0.5), stage, lambda _: None
    )
    streamer._state = SimpleNamespace()  # type: ignore[assignment]
    codes = np.zeros((40, 16), np.int64)
    for begin, end in ((0, 4), (4, 12), (12, 24)):
        streamer.frames(codes[begin:end])
        clock.advance(0.01)
    streamer.finished(codes, "eos")
    assert asked == [(4, False, 0.0), (8, False, 1002.0), (12, False, 1006.0), (16, True, 1012.0)]

"""A stream of Qwen3-TTS on its way to the codec."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipelines.qwen3_tts.pipeline import FrameRequestInfo, FrameStreamer


def test_a_chunk_is_due_when_the_listener_has_heard_all_before_it() -> None:
    """However far ahead of the listener it is made: by then the codec has others to decode first."""
    asked: list[tuple[int, bool, float]] = []
    stage: Any = SimpleNamespace(
        new_state=SimpleNamespace,
        decode_chunk=lambda codes, _done, _state, last, deadline: asked.append((len(codes), last, deadline)),
    )
    streamer = FrameStreamer(
        FrameRequestInfo("Hello.", 24_000, {}, False, frame_seconds=0.5), stage, lambda _: None
    )
    codes = np.zeros((40, 16), np.int64)
    before = time.monotonic()
    streamer.frames(codes[:4])
    after = time.monotonic()
    for begin, end in ((4, 12), (12, 24)):
        streamer.frames(codes[begin:end])
    streamer.finished(codes, "eos", np.zeros(len(codes)))
    due = asked[1][2]
    assert before + 2 <= due <= after + 2
    assert asked == [(4, False, 0.0), (8, False, due), (12, False, due + 4), (16, True, due + 10)]

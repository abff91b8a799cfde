"""What a request writes next, tracked by what it wrote, never guessed from logits. On the device a phase is its number."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from torch import Tensor


class Phase(IntEnum):
    #: The marker of text is forced.
    TEXT_MARK = 0
    TEXT = 1
    #: After the text's eot: the second assistant token is forced, then the marker of audio.
    ASSISTANT = 2
    AUDIO_MARK = 3
    AUDIO = 4


def phase_after(start: Phase, written: Sequence[int], assistant: int, audio: int, eot: int) -> tuple[Phase, int]:
    """The phase of a request that began in `start` and wrote these stream-0 ids, and how many of them came before its audio."""
    if start is Phase.AUDIO:
        return start, 0
    if audio in written:
        return Phase.AUDIO, written.index(audio) + 1
    last = written[-1] if written else None
    if last is None:
        return start, 0
    return (Phase.AUDIO_MARK if last == assistant else Phase.ASSISTANT if last == eot else Phase.TEXT), 0


def next_phase(phase: Tensor, token: Tensor, eot: int) -> Tensor:
    """The phases after these tokens, int64 [n]. A text that may not go on ends with its eot, so nobody asks what comes then."""
    text = (phase == Phase.TEXT_MARK) | (phase == Phase.TEXT)
    after_text = (token == eot).long() + Phase.TEXT
    return after_text.where(text, (phase + 1).clamp(max=int(Phase.AUDIO)))

"""What a request writes: its phases, the delay pattern of its streams, and its text and codes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipelines.speechlm.config import Specials, SpeechLmConfig

#: First code of the row that ends the audio, whose token is always eos: what ended it.
ENDED_BY_EOT, ENDED_BY_LIMIT = 1, 2
End = Literal["eos", "eot", "length"]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Stream-0 ids with the forced ones and the end, as published models write them, and the rows of audio."""

    ids: list[int]
    text_ids: list[int]
    #: int64 [rows, streams]: 0 is a stream's pad, 1 + c its code c. None where the audio's marker never came.
    rows: NDArray[np.int64] | None
    end: End


def read_output(config: SpeechLmConfig, ids: Sequence[int], codes: NDArray[np.int64] | None, *, finished: bool) -> ModelOutput:
    """Reads the ids of a request; `codes` [len(ids), streams] where it may have audio; `finished` unless max_tokens ended it."""
    special = config.specials
    ids = list(ids)
    begin = ids.index(special.audio) + 1 if special.audio in ids else None
    written = ids[: ids.index(special.assistant)] if special.assistant in ids else ids
    text_ids = [one for one in written if config.text_start <= one < config.text_end]
    if begin is None or codes is None:
        last = ids[-1] if ids and finished else None
        return ModelOutput(ids, text_ids, None, "eos" if last == special.eos else "eot" if last == special.eot else "length")
    rows = codes[begin:].copy()
    end: End = "length"
    if finished and len(rows) and rows[-1, 0] == special.eos:
        mark = int(rows[-1, 1])
        end = "eot" if mark == ENDED_BY_EOT else "length" if mark == ENDED_BY_LIMIT else "eos"
        ids[-1] = special.eot if end == "eot" else special.eos
        rows = rows[:-1]
    rows[:, 0] -= config.codec_base
    # Codes beside the token are 1 + their place in their stream's ids; a pad stands in place 0.
    rows[:, 1:] -= 1
    return ModelOutput(ids, text_ids, rows, end)


def interleave(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Codes [frames, streams] in 0.. -> rows [frames + streams - 1, streams]; 0 is the pad, code c is 1 + c."""
    frames, streams = codes.shape
    rows = np.zeros((frames + streams - 1 if frames else 0, streams), np.int64)
    for stream in range(streams):
        rows[stream : stream + frames, stream] = codes[:, stream] + 1
    return rows


def deinterleave(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows [n, streams] as in `interleave` -> codes [max(n - streams + 1, 0), streams]; a pad becomes code 0."""
    streams = rows.shape[1]
    frames = max(len(rows) - streams + 1, 0)
    codes = np.stack([rows[stream : stream + frames, stream] for stream in range(streams)], axis=1)
    return np.maximum(codes - 1, 0)


class Phase(IntEnum):
    #: The marker of text is forced.
    TEXT_MARK = 0
    TEXT = 1
    #: After the text's eot: the second assistant token is forced, then the marker of audio.
    ASSISTANT = 2
    AUDIO_MARK = 3
    AUDIO = 4


def phase_after(start: Phase, written: Sequence[int], special: Specials) -> tuple[Phase, int]:
    """The phase of a request that began in `start` and wrote these stream-0 ids, and how many of them came before its audio."""
    if start is Phase.AUDIO or not written:
        return start, 0
    if special.audio in written:
        return Phase.AUDIO, written.index(special.audio) + 1
    after = {special.assistant: Phase.AUDIO_MARK, special.eot: Phase.ASSISTANT}
    return after.get(written[-1], Phase.TEXT), 0


def next_phase(phase: Tensor, token: Tensor, eot: int) -> Tensor:
    """The phases after these tokens, int64 [n]. A text that may not go on ends with its eot, so nobody asks what comes then."""
    text = (phase == Phase.TEXT_MARK) | (phase == Phase.TEXT)
    after_text = (token == eot).long() + Phase.TEXT
    return after_text.where(text, (phase + 1).clamp(max=int(Phase.AUDIO)))

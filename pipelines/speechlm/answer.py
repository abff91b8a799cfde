"""What a request wrote, read from the engine's ids and codes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.speechlm.config import SpeechLmConfig

#: First code of the row that ends the audio, whose token is always eos: what ended it.
ENDED_BY_EOT, ENDED_BY_LIMIT = 1, 2
End = Literal["eos", "eot", "length"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Stream-0 ids with the forced ones and the end, as published models write them, and the rows of audio."""

    ids: list[int]
    text_ids: list[int]
    #: int64 [rows, streams]: 0 is a stream's pad, 1 + c its code c. None where the audio's marker never came.
    rows: NDArray[np.int64] | None
    end: End


def read_answer(config: SpeechLmConfig, ids: Sequence[int], codes: NDArray[np.int64] | None, *, finished: bool) -> Answer:
    """Reads the ids of a request; `codes` [len(ids), streams] where it may have audio; `finished` unless max_tokens ended it."""
    special = config.specials
    ids = list(ids)
    begin = ids.index(special.audio) + 1 if special.audio in ids else None
    written = ids[: ids.index(special.assistant)] if special.assistant in ids else ids
    text_ids = [one for one in written if config.text_start <= one < config.text_end]
    if begin is None or codes is None:
        last = ids[-1] if ids and finished else None
        return Answer(ids, text_ids, None, "eos" if last == special.eos else "eot" if last == special.eot else "length")
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
    return Answer(ids, text_ids, rows, end)

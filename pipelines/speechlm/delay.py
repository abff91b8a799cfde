"""The delay pattern: stream s of a frame stands s rows behind stream 0 of that frame. Imports no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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

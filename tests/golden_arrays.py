"""Arrays of golden folders. A large one may be thinned: every n-th of its values, under the key `<key>~<n>~<size>x<size>`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARK = "~"


@dataclass(frozen=True, slots=True)
class Thinned:
    """Every `step`-th value, in C order, of an array of this shape."""

    values: NDArray[Any]
    shape: tuple[int, ...]
    step: int

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Array = NDArray[Any] | Thinned


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by their keys."""
    found: dict[str, Array] = {}
    with np.load(path, allow_pickle=False) as data:
        for stored in data.files:
            key, *how = stored.split(_MARK)
            values = data[stored]
            found[key] = Thinned(values, tuple(map(int, how[1].split("x"))), int(how[0])) if how else values
    return found


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Writes what `read_arrays` reads."""
    stored: dict[str, Any] = {}
    for key, array in arrays.items():
        if isinstance(array, Thinned):
            stored[f"{key}{_MARK}{array.step}{_MARK}{'x'.join(map(str, array.shape))}"] = array.values
        else:
            stored[key] = array
    np.savez_compressed(path, **stored)


def thinned(array: NDArray[Any], step: int) -> Thinned:
    return Thinned(array.reshape(-1)[::step].copy(), array.shape, step)


def flat(array: Array) -> Array:
    """The array in one dimension."""
    return replace(array, shape=(array.size,)) if isinstance(array, Thinned) else array.reshape(-1)


def aligned(got: NDArray[Any], want: Array, what: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """What can be compared, as float64. Raises AssertionError for another shape."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if isinstance(want, Thinned):
        got, want = got.reshape(-1)[:: want.step], want.values
    return got.astype(np.float64), want.astype(np.float64)


def largest_difference(got: NDArray[Any], want: Array, what: str) -> float:
    """The largest absolute difference. Raises AssertionError for another shape."""
    mine, theirs = aligned(got, want, what)
    return float(np.abs(mine - theirs).max()) if mine.size else 0.0

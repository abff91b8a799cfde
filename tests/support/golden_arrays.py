"""Arrays of golden folders. A large one may be thinned: every n-th of its values, under the key
`<key>~<n>~<size>x<size>`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARK = "~"
#: Rounding in float32 grows with the values: where that is more than a limit, so much of the largest of them
#: is allowed.
RELATIVE = 1e-5


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


class Arrays(dict[str, Any]):
    """The arrays of a file by their keys, and which of them were looked at."""

    def __init__(self, found: Mapping[str, Array]) -> None:
        super().__init__(found)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Raises AssertionError for an array that the file lacks."""
        assert key in self, f"the array {key} is absent"
        self.seen.add(key)
        return super().__getitem__(key)

    def check_listed(self, listed: Mapping[str, tuple[str, list[int]]]) -> None:
        """Raises AssertionError where an array that is listed as {key: (type, shape)} is absent or another
        one."""
        for key, (kind, shape) in listed.items():
            assert key in self, f"the array {key} is absent"
            array = super().__getitem__(key)
            values = array.values if isinstance(array, Thinned) else array
            found = (str(values.dtype), list(array.shape))
            assert found == (kind, list(shape)), f"the array {key} is {found}, listed is {(kind, shape)}"


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


def check_near(what: str, got: Any, want: Array, limit: float) -> None:
    """Raises AssertionError for another shape, and for a difference above `limit` and above `RELATIVE` of
    the largest value."""
    mine = got.detach().float().cpu().numpy() if hasattr(got, "detach") else np.asarray(got)
    values = want.values if isinstance(want, Thinned) else want
    allowed = max(limit, RELATIVE * float(np.abs(values).max(initial=0.0)))
    difference = largest_difference(mine, want, what)
    assert difference <= allowed, f"{what}: largest difference {difference:.2e}, allowed {allowed:.0e}"

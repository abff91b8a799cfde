"""How golden arrays are compared: limits that grow with the values, and nothing that is absent passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.golden_arrays import Arrays, check_near, read_arrays, thinned, write_arrays

STATES = np.linspace(-170, 170, 700, dtype=np.float32).reshape(7, 100)


@pytest.mark.parametrize("want", [STATES, thinned(STATES, 7)])
def test_limits_are_relative_to_the_size_of_the_values(want: object) -> None:
    moved = STATES.copy()
    moved[0, 0] += 5e-4
    check_near("states", moved, want, 1e-4)  # pyright: ignore[reportArgumentType]
    moved[0, 0] += 5e-3
    with pytest.raises(AssertionError, match=r"states: largest difference 5\.5\de-03, allowed 2e-03"):
        check_near("states", moved, want, 1e-4)  # pyright: ignore[reportArgumentType]


def test_small_values_keep_the_limit_of_their_kind() -> None:
    quiet = STATES / 1_000
    check_near("wave", quiet + 1e-5, quiet, 2e-5)
    with pytest.raises(AssertionError, match="allowed 2e-05"):
        check_near("wave", quiet + 3e-5, quiet, 2e-5)


def test_another_shape_and_what_is_no_number_fail() -> None:
    with pytest.raises(AssertionError, match="shape"):
        check_near("states", STATES[:6], STATES, 1.0)
    with pytest.raises(AssertionError, match="largest difference nan"):
        check_near("states", np.full_like(STATES, np.nan), STATES, 1.0)


def test_an_absent_array_and_another_one_than_listed_fail(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.npz", {"whole": STATES, "thin": thinned(STATES, 7)})
    arrays = Arrays(read_arrays(tmp_path / "a.npz"))
    arrays.check_listed({"whole": ("float32", [7, 100]), "thin": ("float32", [7, 100])})
    assert arrays.seen == set()
    assert len(arrays["whole"]) == 7
    assert arrays.seen == {"whole"}
    for listed in (
        {"gone": ("float32", [1])},
        {"whole": ("float32", [100, 7])},
        {"thin": ("int64", [7, 100])},
    ):
        with pytest.raises(AssertionError, match=next(iter(listed))):
            arrays.check_listed(listed)
    with pytest.raises(AssertionError, match="the array gone is absent"):
        arrays["gone"]

"""Seeds are pinned: a change of the formula would change every job that is resumed or run again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobs.spec import item_seed


def test_pinned_values() -> None:
    assert item_seed(0, "a", 0) == 3900155168082948805
    assert item_seed(7, "utt-ü", 3, draw=2) == 3040250904725350469


def test_every_field_counts() -> None:
    seeds = [
        item_seed(0, "a", 0),
        item_seed(1, "a", 0),
        item_seed(0, "b", 0),
        item_seed(0, "a", 1),
        item_seed(0, "a", 0, 1),
    ]
    seeds += [
        item_seed(1, "1", 1, 11),
        item_seed(1, "1", 11, 1),
        item_seed(11, "1", 1, 1),
        item_seed(1, "11", 1, 1),
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_lines_own_seed_is_used_as_it_is_until_the_first_redraw() -> None:
    assert item_seed(5, "a", 0, line_seed=42) == 42
    assert item_seed(5, "a", 0, draw=1, line_seed=42) not in (42, item_seed(5, "a", 0, draw=1))


@given(
    st.integers(0, 2**63 - 1),
    st.text(st.characters(exclude_categories=("Cs",))),
    st.integers(0, 99),
    st.integers(0, 9),
)
def test_seeds_are_in_range(job_seed: int, example_id: str, message_index: int, draw: int) -> None:
    assert 0 <= item_seed(job_seed, example_id, message_index, draw) < 2**63

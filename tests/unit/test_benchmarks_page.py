"""docs/benchmarks.md takes every figure from the file of results that it names, and README takes its own
from there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks.md").read_text()
SECTIONS = [section for section in PAGE.split("\n## ") if "\n|" in section]


def measured(found: Any) -> Iterator[float]:
    """Every number of a file of results, how many are in a list, and none of a row that another version
    made."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from measured([one for one in value if "commit" not in one] if key == "rows" else value)
    elif isinstance(found, list):
        yield len(found)
        for value in found:
            yield from measured(value)
    elif isinstance(found, int | float):
        yield float(found)


def values(section: str) -> list[tuple[str, str]]:
    """(load, value) of each row of the section's table."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    assert all(len(row) == 2 for row in rows), rows
    return [(load, value) for load, value in rows[2:]]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_a_table_is_of_one_version_and_says_what_its_file_does(section: str) -> None:
    (name,) = re.findall(r"`(benchmarks/results/\w+\.json)`", section)
    (commit,) = re.findall(r"commit `(\w+)`", section)
    found = json.loads((ROOT / name).read_text())
    assert found["commit"] == commit
    assert found["device"] in section
    assert re.search(r"`python -m benchmarks\.\w+[^`]*`", section)
    known = {round(figure) for figure in measured(found)}
    for load, value in values(section):
        number = float(value.removesuffix(" x").replace(",", ""))
        if value.endswith(" x"):
            told = [float(other.replace(",", "")) for _, other in values(section) if not other.endswith(" x")]
            assert number in {round(one / another, 1) for one, another in permutations(told, 2)}, load
        else:
            assert number in known, load


def test_the_figures_of_the_first_page_are_among_them() -> None:
    shown = re.findall(r"(?m)^\| \*\*([^*]+)\*\* \|", (ROOT / "README.md").read_text())
    assert len(shown) == 3
    assert set(shown) <= {value for section in SECTIONS for _, value in values(section)}


def test_the_first_page_is_short_and_its_picture_and_sound_are_small() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    for name in re.findall(r"\((docs/media/[^)]+)\)", text):
        assert (ROOT / name).stat().st_size < 200_000, name

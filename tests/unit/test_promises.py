"""The tests that pages name for their promises exist, and so do the kinds of faults of the soak."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
SITES = ("embedded_site.py", "cluster_site.py")


@pytest.mark.parametrize("page", ["docs/resume.md", "SECURITY.md"])
def test_each_named_test_exists(page: str) -> None:
    named = TEST.findall((REPOSITORY / page).read_text())
    for file, test in named:
        assert f"def {test}(" in (REPOSITORY / file).read_text(), f"{page} names {file}::{test}"
    assert named or page != "docs/resume.md"


def test_each_named_kind_of_fault_exists() -> None:
    sites = "".join((REPOSITORY / "tests" / "faults" / "soak" / name).read_text() for name in SITES)
    rows = [
        line.partition("soak: ")[2]
        for line in (REPOSITORY / "docs" / "resume.md").read_text().splitlines()
        if "soak: " in line
    ]
    named = {kind for row in rows for kind in re.findall(r"`([^`]+)`", row)}
    assert {kind for kind in named if f'"{kind}"' not in sites} == set()
    assert {"store unmounted", "store answers 404", "output folder renamed"} <= named

"""The documentation says what the code does: settings, error codes, commands, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs.cli import COMMANDS
from jobs.cli.admin import markdown_rows
from pipelines.errors import ErrorCode

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows(page: str) -> list[list[str]]:
    """Cells of the table rows of a page whose first cell is code."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def test_the_configuration_page_lists_every_setting() -> None:
    lines = (ROOT / "docs/configuration.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == markdown_rows(), "see `jobs config list --markdown`"


def test_the_error_page_lists_every_code_with_advice() -> None:
    listed = {row[0].strip("`"): row for row in rows("errors.md") if len(row) == 4}
    assert list(listed) == [code.value for code in ErrorCode]
    for code in ErrorCode:
        _, meaning, advice, retried = listed[code.value]
        assert meaning
        assert advice
        assert retried == ("yes" if code.retryable else "no"), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    code = [*re.findall(r"`([^`]*)`", text), *re.findall(r"(?m)^    (.*)$", text)]
    for command in re.findall(r"(?:^|[(/]|\$\(|&& )jobs ([a-z]+)\b", "\n".join(code), re.MULTILINE):
        assert command in COMMANDS, command

"""The Python of docs/voice-agents.md and of the README runs unchanged, with a real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmark import rows
from conftest import ROOT, NightjarServer

PAGES = (ROOT / "docs/voice-agents.md", ROOT / "integrations/pipecat-nightjar/README.md")
BLOCKS = [
    (page, source) for page in PAGES for source in re.findall(r"(?ms)^```python$(.*?)^```$", page.read_text())
]


@pytest.mark.parametrize(
    ("page", "source"), BLOCKS, ids=[f"{page.name}-{number}" for number, (page, _) in enumerate(BLOCKS)]
)
def test_python_of_a_page_runs(page: Path, source: str, server: NightjarServer) -> None:
    exec(compile(source.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"), page.name, "exec"), {})  # noqa: S102


def test_the_latency_table_is_that_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/pipecat.json").read_text())
    assert rows(measured["ways"]) in (ROOT / "docs/voice-agents.md").read_text()


def test_the_pages_show_python() -> None:
    assert {page for page, _ in BLOCKS} == set(PAGES)

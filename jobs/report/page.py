"""The page of a report: its parts as data, and the template that shows them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import jinja2

from jobs.dialogue import clean
from jobs.ledger.records import Job
from jobs.report import charts, clips
from jobs.report.charts import Histogram, Lines, number
from jobs.report.clips import Clip


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of the overview."""

    name: str
    value: str
    note: str = ""
    bad: bool = False


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How often a code came up."""

    code: str
    count: int
    #: Of all failed items and refused lines.
    share: float
    example: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Row:
    """An item in the table. Texts are safe for a page: bounded, without control characters."""

    #: 1 is the worst.
    rank: int
    index: int
    #: Names the turn too, where several of its dialogue are spoken.
    example_id: str
    #: Whose turn it is.
    role: str
    text: str
    state: str
    why: str
    code: str
    message: str
    seconds: float | None
    #: `pipelines.duration.text_units` a second.
    pace: float | None
    scores: Mapping[str, float]
    #: Names of scores that a check refused.
    refused: frozenset[str]
    draws: Sequence[str]
    clip: Clip


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that a report shows. Texts are safe for a page, as in `Row`; of `job` only generated fields are shown."""

    job: Job
    #: The job's name, or its input's; its input, its model, its voices, and why it is in its state.
    name: str
    input: str
    model: str
    voice: str
    reason: str
    state: str
    #: When the figures were true, ISO 8601.
    at: str
    facts: Sequence[Fact]
    #: Commits, or leases of shards, in the charts; too few are not drawn.
    spans: int
    charts: Sequence[Lines]
    #: (share of the time, said, was, error)
    eta_rows: Sequence[tuple[str, str, str, str]]
    histograms: Sequence[Histogram]
    #: (score, value) of those that are the same for all items.
    constant: Sequence[tuple[str, str]]
    errors: Sequence[ErrorRow]
    #: Names of the scores in the table.
    scores: Sequence[str]
    rows: Sequence[Row]
    #: Items with audio in the histograms, and whether these are all.
    measured: int
    whole: bool
    #: Players read files outside the page.
    linked: bool
    source: str


def render(page: Page) -> Iterator[str]:
    """The page in pieces. Every text is escaped; styles and script are in the page, and its policy allows only these."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "media-src 'self' file: data:; base-uri 'none'; form-action 'none'"
    )
    return _template().generate(page=page, policy=policy, style=style, script=script, **_TOOLS)


def _shown(name: str) -> str:
    return clean(name, 60)


#: What the template calls.
_TOOLS: dict[str, Any] = {"charts": charts, "pictures": clips, "number": number, "shown": _shown}


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html")


def _asset(name: str) -> str:
    """A file of this package, without its last newline: the hash is of the text between the tags."""
    return files("jobs.report").joinpath(name).read_text(encoding="utf-8").rstrip("\n")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""Skipped tests are counted: a run that has to be whole fails on a skip that `skips.toml` does not list."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "skips.toml"


@dataclass(frozen=True, slots=True)
class AllowedSkip:
    """Tests that may be skipped, and the reason that they then give."""

    #: A pattern of test ids, as of a shell.
    tests: str
    #: A regular expression that stands in the reason.
    reason: str

    def allows(self, test: str, reason: str) -> bool:
        return fnmatch(test, self.tests) and re.search(self.reason, reason) is not None


def allowed_skips(path: Path = LIST) -> list[AllowedSkip]:
    return [AllowedSkip(entry["tests"], entry["reason"]) for entry in tomllib.loads(path.read_text())["skip"]]


def unlisted(skipped: list[tuple[str, str]], allowed: list[AllowedSkip]) -> list[tuple[str, str]]:
    """Of (test, reason), those that no entry allows."""
    return [
        (test, reason) for test, reason in skipped if not any(entry.allows(test, reason) for entry in allowed)
    ]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Where all must run (`CI` is set), an unlisted skip is a failure. With xdist this is asked of the
    process that counts.

    It wraps the reporter's own hook, so that its lines stand below the summary, at the end of a long log.
    """
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    skipped = [(report.nodeid, _reason(report)) for report in reporter.stats.get("skipped", [])]
    left = unlisted(skipped, allowed_skips())
    for test, reason in left:
        reporter.write_line(f"SKIP THAT tests/skips.toml DOES NOT LIST: {test}: {reason}")
    if left and os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)

"""The text of a filter: what it may say, its one form, and where it is wrong."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.checks import CHECKS, PRESETS
from jobs.ledger.queries import check_names
from jobs.ledger.records import SCORE_COLUMNS, JobSpec
from jobs.where import EXAMPLE, MAX_COMPARISONS, Where, parse_where
from pipelines.errors import ConfigError, ErrorCode


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (EXAMPLE, EXAMPLE),
        ("  wer<.10and(distillmos>3.50)", EXAMPLE),
        ("0.1 > wer", "wer < 0.1"),
        ("not wer < 0.1", "wer >= 0.1"),
        ("not (wer < 0.1 or not -2 <= pause < 3)", "wer >= 0.1 and pause >= -2 and pause < 3"),
        ("not (wer < 0.1 and pause == 3)", "wer >= 0.1 or pause != 3"),
        ("wer < 1 or pause < 1 and silence < +2", "wer < 1 or (pause < 1 and silence < 2)"),
        ("wer < 1 and (pause < 1 and 'f0-mean' > -0.0)", "wer < 1 and pause < 1 and 'f0-mean' > 0"),
        ("attempts == 1_0", "attempts == 10"),
    ],
)
def test_a_filter_has_one_form(text: str, form: str) -> None:
    assert str(parse_where(text)) == form
    assert parse_where(form) == parse_where(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("wer", "'wer', which is not a comparison"),
        ("wer < 0.1 and", "cannot be read, at its end"),
        ("wer < 0.1 AND pause < 1", "at character 11"),
        ("wer = 0.1", "at character"),
        ("wer < pause", "'wer < pause', which does not compare a score with a number"),
        ("  é < 0.1 and f(1)", "'f(1)', which"),
        ("wer < True", "'wer < True', which"),
        ("wer < 'a'", "which does not compare"),
        ("1 < 2", "'1 < 2', which"),
        ("a.b < 1", "'a.b < 1', which"),
        ("wer in (1, 2)", "'wer in (1, 2)', which"),
        ("wer < 1e999", "which does not compare"),
        ("'a\"b' < 1", "which does not compare"),
        ("__import__('os')", "which is not a comparison"),
        ("wer < 1; pause < 1", "at character"),
        ("wer < 1\x00", "cannot be read"),
        ("(" * 300 + "wer < 1" + ")" * 300, "cannot be read"),
        ("wer < 1" + " " * 2000, "characters"),
        (" and ".join(["wer < 1"] * (MAX_COMPARISONS + 1)), "comparisons"),
    ],
)
def test_a_wrong_filter_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="filter") as caught:
        parse_where(text)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert said in caught.value.message
    assert caught.value.advice


@given(st.text(max_size=60) | st.text("wer<>=!()'and ornt0.1-\n", max_size=40))
def test_any_text_is_a_filter_or_a_refusal(text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(parse_where(text), Where)


def test_columns_of_the_ledger_are_those_of_checks() -> None:
    # The scores of a check without one are in the column of the others, where filters find them more slowly.
    assert set(SCORE_COLUMNS) <= set(CHECKS)


@pytest.mark.parametrize(
    ("text", "preset", "advice"),
    [
        ("wer < 1", "basic", "Use one of: clipped, duration, "),
        ("loudnes > 1", "basic", "Did you mean 'loudness'? Use one of: clipped, "),
        ("second > 1", "basic", "Did you mean 'seconds'? "),
        ("wer < 1", "off", "Use one of: seconds, draw, attempts. Checks measure others (docs/quality.md)."),
    ],
)
def test_a_score_that_is_not_there_is_answered_with_the_nearest(text: str, preset: str, advice: str) -> None:
    job: Any = SimpleNamespace(id="01m8", spec=JobSpec("fake", quality=PRESETS[preset]))
    with pytest.raises(ConfigError, match=f"No item of job 01m8 has the score '{text.split()[0]}'") as caught:
        check_names(job, parse_where(text), [])
    assert caught.value.advice.startswith(advice)
    check_names(job, parse_where("seconds > 1"), [])
    check_names(job, parse_where("utmos > 1"), {"utmos"})

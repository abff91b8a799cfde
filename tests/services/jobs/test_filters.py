"""Filters of items, answered by each database, against a plain Python reading of the same text."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.ledger import Ledger, queries
from jobs.ledger.records import ItemState, Job, NewShard
from jobs.where import Comparison, Condition, parse_where
from pipelines.errors import ConfigError, ErrorCode
from tests.support.ledger_kit import done, failed, lease_next, measured, new_job, rows, submit

NAMES = ("wer", "pause", "my-score", "never")
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}
VALUES = (0.0, 0.5, 1.0, 2.0)
Facts = Mapping[str, float | None]


def verdict(condition: Condition, facts: Facts) -> bool | None:
    """Kleene's logic: None is neither true nor false."""
    if isinstance(condition, Comparison):
        value = facts.get(condition.name)
        return None if value is None else OPERATORS[condition.operator](value, condition.value)
    found = [verdict(part, facts) for part in condition.parts]
    decides = not condition.all
    return decides if decides in found else None if None in found else not decides


def made_by(ledger: Ledger, turns: Mapping[int, int] | None = None) -> tuple[Job, dict[int, Facts]]:
    """A job with items that have some of the scores, items that have none, and items that failed; index -> what is known of it."""
    dice, size = random.Random(3), 60
    job = ledger.begin_job(new_job(spec=submit(ledger).spec))
    names = [(index, f"e{index - (turns or {}).get(index, 0)}") for index in range(size)]
    ledger.stage(job.id, [NewShard(0, tuple(names), "input/0", "sha", 1000, turns or {})], [], size)
    ledger.seal_job(job.id)
    ledger.cancel(ledger.jobs()[-1].id)
    lease = lease_next(ledger)
    known: dict[int, Facts] = {}
    for index in range(size):
        if index % 7 == 0:
            known[index] = {"attempts": 1.0} if index % 2 else {"attempts": 1.0, "seconds": 1.5}
            ledger.commit(lease.ticket, [failed(index, ErrorCode.INPUT_BAD_JSON) if index % 2 else done(index)])
            continue
        scores = {name: dice.choice((*VALUES, None)) for name in ("wer", "pause", "my-score") if dice.random() < 0.8}
        scores["never"] = None
        draw, samples = dice.choice((0, 0, 2)), dice.choice((12_000, 24_000, 48_000))
        ledger.commit(lease.ticket, [measured(index, scores, draw, samples)])
        known[index] = {**scores, "draw": float(draw), "seconds": samples / 24_000, "attempts": 1.0}
    ledger.finish_shard(lease.ticket)
    return ledger.job(job.id), known


numbers = st.sampled_from(["0", "0.5", "1", "2"])
compared = st.builds(
    lambda name, sign, number, swapped: f"{number} {sign} {name}" if swapped else f"{name} {sign} {number}",
    st.sampled_from(["wer", "pause", "'my-score'", "seconds", "draw", "attempts"]),
    st.sampled_from(list(OPERATORS)),
    numbers,
    st.booleans(),
)
expressions = st.recursive(
    compared,
    lambda inner: st.one_of(
        inner.map(lambda text: f"not ({text})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"),
    ),
    max_leaves=5,
)


def test_the_database_says_what_the_text_says(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS", 7)
    job, known = made_by(ledger)

    @settings(max_examples=120, deadline=None)
    @given(expressions)
    def holds(text: str) -> None:
        where = parse_where(text)
        matching = [index for index, facts in known.items() if verdict(where.condition, facts) is True]
        assert [item.index for item in ledger.items(job.id, where=where)] == matching
        done_items = [index for index in matching if "seconds" in known[index]]
        assert [item.index for item in ledger.items(job.id, ItemState.DONE, where=where, limit=9)] == done_items[:9]
        for place, (condition, out) in enumerate(zip(where.conditions, ledger.filtered_out(job.id, where), strict=True)):
            before = [facts for facts in known.values() if "seconds" in facts]
            for earlier in where.conditions[:place]:
                before = [facts for facts in before if verdict(earlier, facts) is True]
            found = [verdict(condition, facts) for facts in before]
            assert (out.condition, out.items, out.without_score) == (str(condition), len(found) - found.count(True), found.count(None))

    holds()

"""Filters of items, answered by each database, against a plain Python reading of the same text."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.checks import Quality
from jobs.ledger import Ledger, queries
from jobs.ledger.records import Failed, ItemState, Job, JobSpec, NewShard, Ticket
from jobs.where import Comparison, Condition, parse_where
from pipelines.errors import ConfigError, ErrorCode
from tests.support.ledger_kit import done, failed, lease_next, measured, new_job, rows, submit

OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
VALUES = (0.0, 0.5, 1.0, 2.0)
#: Of a job whose scores are of any name: what another package's meter measures is not known beforehand.
MEASURED = JobSpec("fake", quality=Quality(meters={"asr": {}, "another": {}}))
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
    """A job with items that have some of the scores, items that have none, and items that failed; index ->
    what is known of it."""
    dice, size = random.Random(3), 60
    job = ledger.begin_job(new_job(spec=msgspec.structs.replace(MEASURED, speak="all")))
    names = [(index, f"e{index - (turns or {}).get(index, 0)}") for index in range(size)]
    ledger.stage(job.id, [NewShard(0, tuple(names), "input/0", "sha", 1000, turns or {})], [], size)
    ledger.seal_job(job.id)
    lease = lease_next(ledger)
    known: dict[int, Facts] = {}
    for index in range(size):
        if index % 7 == 0:
            known[index] = {"attempts": 1.0} if index % 2 else {"attempts": 1.0, "seconds": 1.5}
            ledger.commit(
                lease.ticket, [failed(index, ErrorCode.INPUT_BAD_JSON) if index % 2 else done(index)]
            )
            continue
        scores = {
            name: dice.choice((*VALUES, None)) for name in ("wer", "pause", "my-score") if dice.random() < 0.8
        }
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
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"
        ),
    ),
    max_leaves=5,
)


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are read in pages of seven."""
    monkeypatch.setattr(queries, "PAGE_ROWS", 7)


def test_the_database_says_what_the_text_says(ledger: Ledger, short_pages: None) -> None:
    job, known = made_by(ledger)

    @settings(max_examples=60, deadline=None)
    @given(expressions)
    def holds(text: str) -> None:
        where = parse_where(text)
        matching = [index for index, facts in known.items() if verdict(where.condition, facts) is True]
        assert [item.index for item in ledger.items(job.id, where=where)] == matching
        done_items = [index for index in matching if "seconds" in known[index]]
        assert [
            item.index for item in ledger.items(job.id, ItemState.DONE, where=where, limit=9)
        ] == done_items[:9]
        for place, (condition, out) in enumerate(
            zip(where.conditions, ledger.filtered_out(job.id, where), strict=True)
        ):
            before = [facts for facts in known.values() if "seconds" in facts]
            for earlier in where.conditions[:place]:
                before = [facts for facts in before if verdict(earlier, facts) is True]
            found = [verdict(condition, facts) for facts in before]
            assert (out.condition, out.items, out.without_score) == (
                str(condition),
                len(found) - found.count(True),
                found.count(None),
            )

    holds()


@pytest.mark.parametrize("text", ["wer < 1", "seconds > 1.2 or wer == 2", "not wer < 1 and attempts < 2"])
def test_with_the_other_items_of_their_dialogues(ledger: Ledger, short_pages: None, text: str) -> None:
    turns = {index: index % 3 for index in range(60) if index % 3}
    job, known = made_by(ledger, turns)
    where = parse_where(text)
    assert job.speaks_turns
    matching = {
        index - turns.get(index, 0)
        for index, facts in known.items()
        if verdict(where.condition, facts) is True
    }
    wanted = [index for index in known if index - turns.get(index, 0) in matching]
    assert [item.index for item in ledger.items(job.id, where=where, dialogues=True)] == wanted
    left = [index for index, facts in known.items() if "seconds" in facts and index not in wanted]
    assert sum(out.items for out in ledger.filtered_out(job.id, where, dialogues=True)) == len(left)


def test_an_item_without_a_score_matches_neither_a_comparison_nor_its_negation(ledger: Ledger) -> None:
    job = submit(ledger, (3,), spec=MEASURED)
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [measured(0, {"wer": 0.2}), measured(1, {"wer": None}), done(2)])
    for text, indexes in {
        "wer < 1": [0],
        "not wer < 1": [],
        "wer < 1 or attempts == 1": [0, 1, 2],
        "not (wer < 1 and attempts > 1)": [0, 1, 2],
    }.items():
        assert [item.index for item in ledger.items(job.id, where=parse_where(text))] == indexes
    (out,) = ledger.filtered_out(job.id, parse_where("wer > 0.5"))
    assert (out.condition, out.items, out.without_score) == ("wer > 0.5", 3, 2)


def test_scores_are_those_of_the_draw_that_is_kept_also_after_a_retry(ledger: Ledger) -> None:
    job = submit(ledger, (2,), spec=MEASURED)
    lease = lease_next(ledger)
    refused = measured(0, {"wer": 0.9}).draws[0]
    ledger.commit(
        lease.ticket,
        [
            Failed(
                0,
                ErrorCode.QA_WER,
                "bad",
                (msgspec.structs.replace(refused, kept=False, code=ErrorCode.QA_WER),),
            )
        ],
    )
    ledger.commit(lease.ticket, [measured(1, {"wer": 0.3}, draw=1)])
    ledger.finish_shard(lease.ticket)
    assert ledger.retry(job.id, None) == 1
    lease = lease_next(ledger)
    kept = msgspec.structs.replace(measured(0, {"wer": 0.1}).draws[0], draw=1)
    again = msgspec.structs.replace(done(0), draws=(kept,))
    for _ in range(2):
        ledger.commit(lease.ticket, [again])
    assert rows(ledger, "SELECT idx, draw, wer FROM scores ORDER BY idx") == [(0, 1, 0.1), (1, 1, 0.3)]
    stale = Ticket(job.id, lease.shard_no, lease.epoch - 1)
    assert ledger.commit(stale, [measured(1, {"wer": 0.0})]).lost
    assert [item.index for item in ledger.items(job.id, where=parse_where("wer < 0.2"))] == [0]


def test_a_job_without_checks_has_no_rows(ledger: Ledger) -> None:
    submit(ledger, (2,))
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [done(0), done(1)])
    assert rows(ledger, "SELECT count(*) FROM scores") == [(0,)]


def test_a_score_that_the_checks_of_a_job_do_not_measure_is_refused(ledger: Ledger) -> None:
    job = submit(ledger, (2,), spec=JobSpec("fake", quality=Quality(meters={"asr": {}})))
    for name in ("mos", "distillmos"):
        with pytest.raises(ConfigError, match=f"'{name}'") as caught:
            ledger.items(job.id, where=parse_where(f"pause < 3 and {name} > 1"))
        assert caught.value.code is ErrorCode.CONFIG_INVALID
        assert {"wer", "pause", "seconds"} <= set(
            caught.value.advice.rstrip(".").replace(":", ",").split(", ")
        )
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [measured(0, {"pause": 1.0, "wer": None}), measured(1, {"pause": 2.0})])
    # No item has this one yet, and the job's checks measure it.
    assert list(ledger.items(job.id, where=parse_where("wer < 1"))) == []
    assert [item.index for item in ledger.items(job.id, where=parse_where("pause < 2"))] == [0]


def test_what_a_meter_of_another_package_measures_is_taken(ledger: Ledger) -> None:
    job = submit(ledger, (2,), spec=MEASURED)
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [measured(0, {"my-score": 3.0}), measured(1, {})])
    assert [item.index for item in ledger.items(job.id, where=parse_where("'my-score' == 3"))] == [0]

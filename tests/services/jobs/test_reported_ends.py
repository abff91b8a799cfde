"""Which ends of jobs are reported, on SQLite and on PostgreSQL: each one, by one sender at a time, and
again after a retry."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from jobs.ledger import Ledger
from jobs.ledger.control import OLDEST_END_SECONDS, JobEnd
from tests.support.ledger_kit import execute, failed, lease_next, submit
from tests.support.run_kit import Shell, write_input

SECONDS = 60.0


def ended(ledger: Ledger) -> JobEnd:
    """A job whose only item failed."""
    submit(ledger, (1,))
    return end_again(ledger)


def end_again(ledger: Ledger) -> JobEnd:
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [failed(0)])
    ledger.finish_shard(lease.ticket)
    (end,) = ledger.unreported_ends()
    assert end.job_id == lease.job.id
    return end


def test_one_of_many_senders_reports_an_end(ledger: Ledger) -> None:
    end, start = ended(ledger), Barrier(8)

    def claim(_: int) -> int | None:
        start.wait()
        return ledger.claim_end(end, SECONDS)

    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(claim, range(8)))
    assert sorted(claims, key=str) == [1, *[None] * 7]
    assert ledger.unreported_ends() == []


def test_an_end_whose_sender_died_is_taken_over_and_then_noted(ledger: Ledger) -> None:
    end = ended(ledger)
    assert ledger.claim_end(end, SECONDS) == 1
    execute(ledger, "UPDATE jobs SET notify_due_at = notify_due_at - 61")
    assert ledger.unreported_ends() == [end]
    assert ledger.claim_end(end, SECONDS) == 2
    ledger.note_report(end, -1)
    assert ledger.claim_end(end, SECONDS) == 3
    ledger.note_report(end, None)
    execute(ledger, "UPDATE jobs SET notify_due_at = NULL")
    assert ledger.unreported_ends() == []
    assert ledger.claim_end(end, SECONDS) is None


def test_a_job_that_is_retried_is_reported_again(ledger: Ledger) -> None:
    end = ended(ledger)
    ledger.claim_end(end, SECONDS)
    ledger.retry(end.job_id, None)
    # Who reports the first end comes too late to speak for the second one.
    ledger.note_report(end, None)
    ledger.note_report(end, SECONDS)
    second = end_again(ledger)
    assert second.finished_at > end.finished_at
    assert ledger.claim_end(end, SECONDS) is None
    assert ledger.claim_end(second, SECONDS) == 1
    ledger.note_report(second, None)
    assert ledger.unreported_ends() == []


def test_every_kind_of_end_is_reported_and_old_ones_are_not(ledger: Ledger) -> None:
    empty, cancelled, running = submit(ledger, ()), submit(ledger, (1,)), submit(ledger, (1,))
    ledger.cancel(cancelled.id)
    assert {end.job_id for end in ledger.unreported_ends()} == {empty.id, cancelled.id}
    assert running.id not in {end.job_id for end in ledger.unreported_ends()}
    execute(ledger, "UPDATE jobs SET finished_at = finished_at - :seconds", seconds=OLDEST_END_SECONDS + 1)
    assert ledger.unreported_ends() == []


def test_a_time_of_a_wrong_clock_holds_nothing_up(ledger: Ledger) -> None:
    end = ended(ledger)
    ledger.note_report(end, 1e6)
    assert ledger.unreported_ends() == [end]
    assert ledger.claim_end(end, SECONDS) == 1


def test_the_end_of_a_run_is_reported_before_it_returns_and_a_hook_that_fails_is_asked_again(
    shell: Shell,
) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    refused = shell.run("run", "in.jsonl", SPEECH_NOTIFY__COMMAND="false")
    assert (refused.returncode, "was not reported: the command ended with status 1" in refused.stderr) == (
        0,
        True,
    ), refused.stderr
    # The report of the job is there when its end is told.
    hook = "sh -c 'test -e out/reports/$NIGHTJAR_JOB.html && cat >> ends && echo >> ends'"
    for _ in range(2):
        assert shell.run("run", "in.jsonl", "-q", SPEECH_NOTIFY__COMMAND=hook).returncode == 0
    (end,) = (shell.folder / "ends").read_text().splitlines()
    view = json.loads(end)
    assert (view["state"], view["items"]["done"], view["job"]) == ("completed", 1, refused.stdout.split()[0])

"""Creation of a job from the lines of an input file."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
from sqlalchemy.exc import IntegrityError

from jobs.ledger.control import TOTALS
from jobs.ledger.lifecycle import NUMBER, lock_known_job, update_job
from jobs.ledger.records import (
    KEPT_REJECTED_LINES,
    Job,
    JobState,
    NewJob,
    NewShard,
    RejectedLine,
    clean,
    no_such_job,
)
from jobs.ledger.status import jobs_by, read_job
from jobs.ledger.transaction import Transaction, columns_of
from jobs.own_files import recorded
from pipelines.errors import ErrorCode, InputError

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_UNIQUE_VIOLATION = "23505"
#: `:rows` is JSON: shard -> index -> example id. One statement takes half the time of an INSERT per row, and
#: other threads can run meanwhile.
_ADD_ITEMS = """
INSERT INTO items (job_no, idx, example_id, shard_no, turn)
SELECT :job_no, CAST(item.key AS INTEGER), item.value, CAST(shard.key AS INTEGER), :turn
FROM json_each(:rows) AS shard, json_each(shard.value) AS item
"""


def new_job_id() -> str:
    """A ULID in lowercase: 26 characters that sort by time."""
    number = (int(time.time() * 1000) << 80) | int.from_bytes(os.urandom(10))
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


class DuplicateExamples(InputError):  # noqa: N818 - named by the contract
    """Example ids that occur more than once in the job; nothing of the batch was written."""

    def __init__(self, example_ids: Sequence[str]) -> None:
        self.example_ids = tuple(example_ids)
        super().__init__(
            ErrorCode.INPUT_DUPLICATE_ID,
            f"{len(self.example_ids)} example_id values occur more than once in the input, such as {clean(self.example_ids[0])[:100]!r}.",
            "Give every line its own example_id.",
        )


def begin_job(sql: Transaction, new: NewJob) -> Job:
    """The job with this idempotency key: an existing one in any state, or a new one in state `ingesting`."""
    row = {
        **columns_of(new),
        "id": new_job_id(),
        "state": JobState.INGESTING.value,
        "store_url": recorded(new.store_url, sql.place),
    }
    sql.insert("jobs", [row], "ON CONFLICT (idempotency_key) DO NOTHING", created_at="<now>")
    statement = "SELECT * FROM jobs WHERE idempotency_key = :key"
    return next(jobs_by(sql, statement, key=row["idempotency_key"]))


def stage(
    sql: Transaction,
    job_id: str,
    shards: Sequence[NewShard],
    rejected: Sequence[RejectedLine],
    lines_read: int,
) -> bool:
    """Adds shards with their items, and rejected lines, to an ingesting job. False: these lines were staged
    before.

    `lines_read` counts from the start of the input. All rejected lines are counted, but only the first
    `KEPT_REJECTED_LINES` of the job are stored: a small archive can contain a billion. After a lost
    connection the same batch can be staged again.
    """
    job = lock_known_job(sql, job_id, "added to", JobState.INGESTING)
    if job.lines_read >= lines_read:
        return False
    if any("\x00" in example_id for shard in shards for _, example_id in shard.items):
        raise InputError(
            ErrorCode.INPUT_BAD_LINE, "An example_id contains a NUL character.", "Remove it from the input."
        )
    _add_items(sql, job.no, shards)
    rows = [
        {
            "job_id": job_id,
            "job_no": job.no,
            "no": shard.no,
            "first_index": shard.items[0][0],
            "last_index": shard.items[-1][0],
            "n_items": len(shard.items),
            "input_key": shard.input_key,
            "input_sha256": shard.input_sha256,
            "estimated_ms": shard.estimated_ms,
        }
        for shard in shards
        if shard.items
    ]
    sql.insert("shards", rows)
    kept = rejected[: max(0, KEPT_REJECTED_LINES - job.rejected_lines)]
    sql.insert("rejected_lines", [{"job_id": job_id, **columns_of(line)} for line in kept])
    update_job(
        sql,
        job_id,
        "lines_read = :lines_read, rejected_lines = rejected_lines + :rejected",
        lines_read=lines_read,
        rejected=len(rejected),
    )
    return True


def _add_items(sql: Transaction, job_no: int, shards: Sequence[NewShard]) -> None:
    """Inserts the items. Raises `IntegrityError` if an example id or an index exists already."""
    if sql.engine == "postgresql":
        _copy_items(sql, job_no, shards)
        return
    by_turn: dict[int, dict[int, dict[int, str]]] = {}
    for shard in shards:
        for index, example_id in shard.items:
            of_turn = by_turn.setdefault(shard.turns.get(index, 0), {})
            of_turn.setdefault(shard.no, {})[index] = example_id
    for turn, rows in by_turn.items():
        sql.change(_ADD_ITEMS, job_no=job_no, turn=turn, rows=msgspec.json.encode(rows).decode())


def _copy_items(sql: Transaction, job_no: int, shards: Sequence[NewShard]) -> None:
    """Uses COPY, which takes half the time of any INSERT."""
    statement = "COPY items (job_no, idx, example_id, shard_no, turn) FROM STDIN"
    try:
        with sql.connection.connection.driver_connection.cursor() as cursor, cursor.copy(statement) as copy:
            for shard in shards:
                for index, example_id in shard.items:
                    copy.write_row((job_no, index, example_id, shard.no, shard.turns.get(index, 0)))
    except Exception as error:
        # COPY uses psycopg directly, so SQLAlchemy does not wrap its errors.
        if getattr(error, "sqlstate", None) == _UNIQUE_VIOLATION:
            raise IntegrityError(statement, None, error) from error
        raise


def duplicates(sql: Transaction, job_id: str, shards: Sequence[NewShard]) -> list[str]:
    """The example ids of `shards` that occur twice or are already in the job, in input order."""
    # The items of a dialogue share its id, so only the first one is compared.
    ids = [example_id for shard in shards for index, example_id in shard.items if index not in shard.turns]
    found = {example_id for example_id, count in Counter(ids).items() if count > 1}
    statement = f"SELECT example_id FROM items WHERE job_no = {NUMBER} AND example_id IN (:ids)"
    found.update(sql.column(statement, job=job_id, ids=ids))
    return list(dict.fromkeys(example_id for example_id in ids if example_id in found))


def seal_job(sql: Transaction, job_id: str) -> Job:
    """Sets the totals of an ingesting job and makes it ready, or failed (`input.no_items`) if it has no
    items."""
    if lock_known_job(sql, job_id).state == JobState.INGESTING:
        update_job(sql, job_id, f"state = 'ready', {TOTALS}", job=job_id)
        failed = "state = 'failed', state_reason = :reason, finished_at = <now>"
        statement = f"UPDATE jobs SET {failed} WHERE id = :job AND total_items = 0"
        sql.change(statement, job=job_id, reason=ErrorCode.INPUT_NO_ITEMS)
    return read_job(sql, job_id)


def abandon_job(sql: Transaction, job_id: str) -> None:
    """Deletes all rows of an ingesting job."""
    job = lock_known_job(sql, job_id, "abandoned", JobState.INGESTING)
    sql.change("DELETE FROM items WHERE job_no = :job_no", job_no=job.no)
    for table in ("rejected_lines", "shards"):
        sql.change(f"DELETE FROM {table} WHERE job_id = :job", job=job_id)
    sql.change("DELETE FROM jobs WHERE id = :job", job=job_id)


def staged_shards(sql: Transaction, job_id: str) -> tuple[int, int, int]:
    """The committed numbers (shards, items, lines_read), from which an interrupted ingest continues."""
    # One statement, because another process may stage more between two statements.
    row = sql.row(
        """
        SELECT count(shards.no), CAST(COALESCE(sum(n_items), 0) AS BIGINT), lines_read
        FROM jobs LEFT JOIN shards ON shards.job_id = jobs.id WHERE jobs.id = :job GROUP BY jobs.id, lines_read
        """,
        job=job_id,
    )
    if row is None:
        raise no_such_job(job_id)
    return row

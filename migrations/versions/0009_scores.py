"""What was measured of each item's audio, a column for each check; filled from the draws that are there."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_CHECKS = ("ended", "duration", "clipped", "silence", "pause", "loudness", "wer", "cer", "distillmos", "dnsmos", "similarity")


def upgrade() -> None:
    op.create_table(
        "scores",
        sa.Column("job_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("draw", sa.SmallInteger(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in _CHECKS),
        sa.Column("others", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("job_no", "idx", name=op.f("pk_scores")),
        sqlite_with_rowid=False,
    )
    named = ", ".join(f"'{name}'" for name in _CHECKS)
    if op.get_context().dialect.name == "sqlite":
        values = [f"json_extract(scores, '$.{name}[0]')" for name in _CHECKS]
        others = f"""nullif((SELECT json_group_object(score.key, json_extract(score.value, '$[0]')) FROM json_each(draws.scores) AS score
            WHERE score.key NOT IN ({named}) AND json_extract(score.value, '$[0]') IS NOT NULL), '{{}}')"""  # noqa: S608 - names of ours
    else:
        values = [f"(scores -> '{name}' ->> 0)::double precision" for name in _CHECKS]
        others = f"""(SELECT json_object_agg(score.key, score.value -> 0) FROM json_each(draws.scores) AS score
            WHERE score.key NOT IN ({named}) AND (score.value ->> 0) IS NOT NULL)"""  # noqa: S608 - names of ours
    op.execute(
        f"INSERT INTO scores (job_no, idx, draw, {', '.join(_CHECKS)}, others)"  # noqa: S608 - names of ours
        f" SELECT job_no, idx, draw, {', '.join(values)}, {others} FROM draws WHERE kept"
        " ON CONFLICT DO NOTHING"
    )


def downgrade() -> None:
    op.drop_table("scores")

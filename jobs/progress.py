"""Shows the progress of a job: a bar on a terminal, else a line every 30 s, with the speed of the last
minute."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

import click

from jobs.formatting import seconds_text
from jobs.ledger.records import JobState
from jobs.ledger.status import JobStatus
from jobs.status import energy_text, items_per_second, rtfx

if TYPE_CHECKING:
    from jobs.ingest import IngestProgress

#: Narrower terminals show the counts without a bar.
BAR_COLUMNS = 80
#: Interval of lines on a stream that is not a terminal.
LINE_SECONDS = 30.0
#: An ingest that takes longer than this is reported in a line.
FIRST_LINE_SECONDS = 5.0
#: The rate covers the last `RATE_SECONDS`. It is unknown until `MIN_RATE_SECONDS` have passed.
RATE_SECONDS = 60.0
MIN_RATE_SECONDS = 3.0


class RecentRate:
    """The rate of a job over the last minute, without earlier pauses and interruptions."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int, int]]()

    def facts(self, status: JobStatus) -> str:
        """A text that continues a sentence: failed and skipped items, items per second, RTFx and time left,
        as far as they are known."""
        items = status.items
        rate, factor = self._add(status)
        parts = [
            f"{count} {what}"
            for count, what in ((items.failed, "failed"), (items.skipped, "skipped"))
            if count
        ]
        if rate:
            parts.append(f"{rate:.2f} items/s")
        if factor:
            parts.append(f"RTFx {factor:.1f}")
        if rate and not status.job.state.final and status.job.state is not JobState.PAUSED:
            parts.append(f"{seconds_text(items.pending / rate)} left")
        return "".join(f", {part}" for part in parts) + energy_text(status)

    def _add(self, status: JobStatus) -> tuple[float, float | None]:
        """Adds a status, and returns the rates per second of items and of audio seconds: those of the last
        minute, or those of its whole time for an ended job."""
        ended = status.items.ended
        self._seen.append((status.now, ended, status.audio_ms))
        while len(self._seen) > 2 and self._seen[1][0] <= status.now - RATE_SECONDS:
            self._seen.popleft()
        since, ended_then, audio_then = self._seen[0]
        seconds = status.now - since
        if status.job.state.final:
            return items_per_second(status), rtfx(status)
        if seconds < MIN_RATE_SECONDS or ended == ended_then:
            return 0.0, None
        return (ended - ended_then) / seconds, (status.audio_ms - audio_then) / 1000 / seconds


class Progress:
    """Shows a job's progress on stderr: a bar on a terminal, else a line at the start and every 30 s; a context
    manager. `only_notes`: without bar and lines."""

    def __init__(self, *, quiet: bool, only_notes: bool = False) -> None:
        self._quiet = quiet
        self._only_notes = only_notes
        self._note = ""
        self._next_line = 0.0
        self._rate = RecentRate()
        self._bar = None if quiet or only_notes or not sys.stderr.isatty() else _bar()
        if self._bar is not None:
            self._bar.add_task("starting", total=None, facts="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a note, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif not self._quiet:
            click.echo(text, err=True)

    def reading(self, ingest: IngestProgress) -> None:
        """Shows the progress of an ingest; on a stream that is not a terminal, only of a long one. A note is
        printed once."""
        if ingest.note != self._note:
            self._note = ingest.note
            self.say(ingest.note)
        percent = 100 * ingest.bytes_read // max(1, ingest.bytes_total)
        if self._next_line == 0.0:
            self._next_line = time.monotonic() + FIRST_LINE_SECONDS
        facts = f"{ingest.lines} lines"
        self._show("reading", percent, 100, facts, f"{facts}, {percent} % of the input")

    def update(self, status: JobStatus) -> None:
        items = status.items
        facts = self._rate.facts(status)
        line = f"{items.ended} of {items.total} items{facts}"
        self._show(status.job.state.value, items.ended, items.total, facts.removeprefix(", "), line)

    def _show(self, state: str, completed: int, total: int, facts: str, line: str) -> None:
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], description=state, completed=completed, total=total, facts=facts
            )
        elif not self._quiet and not self._only_notes and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            click.echo(f"{state}: {line}", err=True)


def _bar():
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Facts(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.fields["facts"], no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
    narrow = console.width < BAR_COLUMNS
    state = TextColumn("{task.description}")
    count = MofNCompleteColumn(table_column=Column(no_wrap=True))
    facts = Facts(table_column=Column(no_wrap=not narrow))
    columns = (state, count, facts) if narrow else (SpinnerColumn(), state, BarColumn(), count, facts)
    return Progress(*columns, console=console, transient=True)

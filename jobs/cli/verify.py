"""`jobs verify`: a job's objects against their hashes, and a sample of its items made again."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import click

from jobs.cli.context import common_options, found_job, job_argument
from jobs.cli.output import FAILED, Output, printable

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.records import Job
    from jobs.store.base import ObjectStore


@click.command()
@job_argument
@click.option("--sample", default=3, show_default=True, type=click.IntRange(min=0), help="Items that are made again with their seeds.")
@click.option("--deep", is_flag=True, help="Read the objects of a bucket rather than asking for their checksums.")
@common_options
def verify(job: str, sample: int, deep: bool, home: str | None, as_json: bool, quiet: bool) -> int:
    """Check that JOB's objects are what was made, and that some of its items come out the same again.

    Exit code 1: an object is missing or changed, or an item came out different.
    """
    from jobs.store import open_store
    from jobs.verify import ObjectCheck

    output = Output(as_json=as_json, quiet=quiet)
    with found_job(job, home) as (settings, ledger, found):
        store = open_store(found.store_url, settings.s3)
        check = ObjectCheck(ledger, store, found, deep=deep)
        faults = 0
        for expected, fault in check:
            faults += 1
            if as_json:
                view = {"schema": "nightjar.fault/1", "job": found.id, "key": expected.key, "example_id": expected.example_id}
                output.data({**view, "fault": fault.value})
            else:
                output.line(f"{fault.value}\t{expected.key}\t{printable(expected.example_id or '')}")
        likeness = _redraw(ledger, store, found, sample, output) if sample else Counter[str]()
        _summarize(found, check.objects, faults, likeness, output)
    return FAILED if faults or likeness["different"] or likeness["failed"] else 0


def _redraw(ledger: Ledger, store: ObjectStore, job: Job, sample: int, output: Output) -> Counter[str]:
    from jobs.redraw import redraw
    from pipelines.registry import describe, open_pipeline

    now = describe(job.spec.model).revision
    if now != job.spec.model_revision:
        output.note(f"The job was made with revision {job.spec.model_revision or 'unknown'} of its model; here is {now or 'unknown'}.")
    counts: Counter[str] = Counter()
    with closing(open_pipeline(job.spec.model)) as pipeline:
        for redrawn in redraw(ledger, store, job, pipeline, sample):
            counts[redrawn.likeness.value] += 1
            finite = redrawn.snr_db is not None and math.isfinite(redrawn.snr_db)
            if output.as_json:
                view = {"schema": "nightjar.redrawn/1", "job": job.id, "index": redrawn.index, "example_id": redrawn.example_id}
                snr = redrawn.snr_db if finite else None
                output.data({**view, "likeness": redrawn.likeness.value, "snr_db": snr, "reason": redrawn.reason or None})
            else:
                about = f"{redrawn.snr_db:.1f} dB" if finite else printable(redrawn.reason)
                output.line(f"{redrawn.likeness.value}\titem {redrawn.index}\t{printable(redrawn.example_id)}\t{about}".rstrip())
    return counts


def _summarize(job: Job, objects: int, faults: int, likeness: Counter[str], output: Output) -> None:
    if output.as_json:
        counts = {name: likeness[name] for name in ("same", "close", "different", "failed")}
        output.data({"schema": "nightjar.verify/1", "job": job.id, "objects": objects, "faults": faults, "redrawn": counts})
        return
    state = f"{faults} of them missing or changed" if faults else "all of them as they were made"
    output.note(f"{objects} objects checked, {state}.")
    if likeness:
        output.note(f"{likeness.total()} items made again: " + ", ".join(f"{count} {name}" for name, count in likeness.items()) + ".")

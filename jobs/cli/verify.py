"""`nightjar verify`: a job's objects against their hashes, and a sample of its items made again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click

from jobs.cli.context import common_options, found_job, job_argument
from jobs.console import FAILED, Output
from jobs.formatting import counted, printable
from jobs.recent_jobs import out_words

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.records import Job
    from jobs.store.base import ObjectStore
    from jobs.verify import Expected
    from pipelines.request import Pipeline


@click.command()
@job_argument
@click.option(
    "--sample", default=3, show_default=True, metavar="N", type=click.IntRange(min=0), help="Number of items to synthesize again."
)
@click.option("--deep", is_flag=True, help="In a bucket: read every object, instead of asking the server for checksums.")
@click.option("--repair", is_flag=True, help="Synthesize missing and changed files again, with the same seeds.")
@common_options
def verify(job: str, sample: int, deep: bool, repair: bool, home: str | None, output: Output) -> int:
    """Check the files of JOB against the ledger, and synthesize some items again to compare.

    Exit code 1: a file is missing or changed and was not made again, or an item came out different.

    \b
    Examples:
      nightjar verify JOB
      nightjar verify JOB --repair
    """
    from jobs.store import open_store
    from jobs.verify import ObjectCheck

    with found_job(job, home) as (settings, ledger, found):
        store = open_store(found.store_url, settings.s3)
        check = ObjectCheck(ledger, store, found, deep=deep)
        lost: list[Expected] = []
        for expected, fault in check:
            lost.append(expected)
            if output.as_json:
                view = {"schema": "nightjar.fault/1", "job": found.id, "key": expected.key, "example_id": expected.example_id}
                output.data({**view, "fault": fault.value})
            else:
                output.line(f"{fault.value}\t{expected.key}\t{printable(expected.example_id or '')}")
        mended, matches = Counter[str](), Counter[str]()
        if sample or (repair and lost):
            with _opened(found, output) as pipeline:
                mended = _mend(ledger, store, found, pipeline, lost, output) if repair else mended
                matches = _reproduce(ledger, store, found, pipeline, sample, output)
        _summarize(found, check.objects, len(lost), mended, matches, output, out_words(found.id, ledger.database.path))
    left = len(lost) - mended["same"] - mended["other"]
    return FAILED if left or matches["different"] or matches["failed"] else 0


@contextmanager
def _opened(job: Job, output: Output) -> Iterator[Pipeline]:
    """The model of a job, with a note where it is another revision by now."""
    from pipelines.registry import describe, open_pipeline

    now = describe(job.spec.model).revision
    if now != job.spec.model_revision:
        output.note(
            f"The job was made with revision {job.spec.model_revision or 'unknown'} of the model; the installed one is {now or 'unknown'}."
        )
    with closing(open_pipeline(job.spec.model)) as pipeline:
        yield pipeline


def _mend(ledger: Ledger, store: ObjectStore, job: Job, pipeline: Pipeline, lost: Iterable[Expected], output: Output) -> Counter[str]:
    from jobs.repair import Mended, Repaired, mend

    said = {Mended.SAME: "made again", Mended.OTHER: "made again, other bytes", Mended.FAILED: "not made again"}

    def say(repaired: Repaired) -> None:
        if output.as_json:
            view = {"schema": "nightjar.repaired/1", "job": job.id, "key": repaired.key, "example_id": repaired.example_id}
            output.data({**view, "outcome": repaired.outcome.value, "reason": repaired.reason or None})
        else:
            about = [said[repaired.outcome], repaired.key, printable(repaired.example_id), printable(repaired.reason)]
            output.line("\t".join(about).rstrip())

    return mend(ledger, store, job, pipeline, lost, say)


def _reproduce(ledger: Ledger, store: ObjectStore, job: Job, pipeline: Pipeline, sample: int, output: Output) -> Counter[str]:
    from jobs.reproduce import reproduce

    counts: Counter[str] = Counter()
    for item in reproduce(ledger, store, job, pipeline, sample):
        counts[item.match.value] += 1
        finite = item.snr_db is not None and math.isfinite(item.snr_db)
        if output.as_json:
            view = {"schema": "nightjar.redrawn/1", "job": job.id, "index": item.index, "example_id": item.example_id}
            snr = item.snr_db if finite else None
            output.data({**view, "likeness": item.match.value, "snr_db": snr, "reason": item.reason or None})
        else:
            about = f"{item.snr_db:.1f} dB" if finite else printable(item.reason)
            output.line(f"{item.match.value}\titem {item.index}\t{printable(item.example_id)}\t{about}".rstrip())
    return counts


def _summarize(job: Job, objects: int, faults: int, mended: Counter[str], matches: Counter[str], output: Output, where: str) -> None:
    """`where`: what advice about the job adds to its id."""
    if output.as_json:
        counts = {name: matches[name] for name in ("same", "close", "different", "failed")}
        repaired = {name: mended[name] for name in ("same", "other", "failed")}
        view = {"schema": "nightjar.verify/1", "job": job.id, "objects": objects, "faults": faults}
        output.data({**view, "repaired": repaired, "redrawn": counts})
        return
    state = f"{faults} missing or changed" if faults else "all unchanged"
    output.note(f"{counted(objects, 'file')} checked, {state}.")
    if mended:
        output.note(
            f"Made again: {mended['same']} with the same bytes, {mended['other']} with other bytes. Not made again: {mended['failed']}."
        )
    elif faults:
        output.note(f"To make them again: nightjar verify {job.id} --repair{where}")
    if matches:
        compared = ", ".join(f"{count} {name}" for name, count in matches.items())
        output.note(f"{counted(matches.total(), 'item')} made again: {compared}.")

"""`nightjar show`: what a job is made with, as it was frozen at submit, and what made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from jobs.cli.options import common_options, job_argument, read_ledger
from jobs.console import Output
from jobs.formatting import counted, printable
from jobs.job_command import command_text, engines_of, job_command, unsaid
from jobs.ledger.records import INPUT_FORMAT, Job
from jobs.ledger.status import find_job
from jobs.recent_jobs import keep_remembered, settings_for_job
from jobs.settings import Settings
from jobs.status import job_view, labels_text, utc
from pipelines.errors import NightjarError
from pipelines.request import Generation

if TYPE_CHECKING:
    from jobs.checks import Bound, Quality
    from jobs.provenance import Provenance

#: Characters of a hash that tell it from others.
_HASH_CHARACTERS = 12


@click.command()
@job_argument
@common_options
def show(job: str, home: str | None, output: Output) -> None:
    """Show what JOB is made with: its frozen spec, its input, its store, the versions that made it, and
    the command that makes it again.

    \b
    Examples:
      nightjar show JOB
      nightjar show JOB --json
    """
    settings = settings_for_job(job, home)
    found = read_ledger(settings, lambda reader: find_job(reader, job))
    keep_remembered(found.id, settings)
    made_with = _records(settings, found, output)
    home = str(settings.home.absolute()) if settings.database_url is None else None
    engines = engines_of(found, made_with or ())
    command, notes = job_command(found, home, engines), unsaid(found, home, engines)
    if output.as_json:
        output.data(job_view(found, made_with, command, notes))
        return
    for name, text in _lines(found, made_with or ()):
        output.line(f"{name:<9}{text}")
    output.line(f"command  {printable(command_text(command))}")
    for note in notes:
        output.note(note)
    output.note("While this job exists the command finds it. Add --idempotency-key KEY to make another one.")


def _records(settings: Settings, job: Job, output: Output) -> list[Provenance] | None:
    from jobs.provenance import records
    from jobs.store import store_of

    try:
        return records(store_of(job, settings.s3), job)
    except NightjarError as error:
        output.note(f"What made the job cannot be read: {printable(str(error))}")
        return None


def _lines(job: Job, made_with: Sequence[Provenance]) -> Iterator[tuple[str, str]]:
    """(word, text) of each line for a person."""
    spec = job.spec
    yield "job", f"{job.id}  {job.state.value}{f'  {printable(job.name)}' if job.name else ''}"
    yield (
        "owner",
        f"{printable(job.owner) or 'unknown'}, priority {job.priority}, weight {job.weight}{_limits(job)}",
    )
    if job.labels:
        yield "labels", printable(labels_text(job.labels))
    written = job.labels.get(INPUT_FORMAT, "dialogues")
    refused = f", {job.rejected_lines} refused" if job.rejected_lines else ""
    yield "input", f"{printable(job.input_uri)}, {written}, {counted(job.lines_read, 'line')}{refused}"
    yield "", f"sha256 {job.input_sha256}"
    if spec.reading is not msgspec.UNSET:
        yield "reads", _fields(msgspec.to_builtins(spec.reading))
    yield "items", f"{job.total_items} in {counted(job.total_shards, 'shard')}"
    yield "model", f"{spec.model}{f', revision {spec.model_revision}' if spec.model_revision else ''}"
    if generation := _generation(spec.generation):
        yield "settings", generation
    if spec.stored_voices is not msgspec.UNSET:
        yield "voices", f"stored: {printable(', '.join(sorted(spec.stored_voices)))}"
    spoken = "" if spec.speak is msgspec.UNSET else f", speaks {spec.speak}"
    yield "seed", f"{spec.seed}{spoken}"
    yield from _checks(spec.quality)
    rate = "" if spec.sample_rate is msgspec.UNSET else f" at {spec.sample_rate} Hz"
    yield "audio", f"{spec.format}{rate}{', in packs' if spec.pack is True else ''}"
    yield "store", f"{printable(job.store_url)}, below jobs/{job.id}/"
    times = (("created", job.created_at), ("started", job.started_at), ("finished", job.finished_at))
    yield "times", ", ".join(f"{word} {utc(at)}" for word, at in times if at is not None)
    for record in made_with:
        yield from _versions(record)


def _limits(job: Job) -> str:
    shards = "" if job.max_in_flight is None else f", at most {counted(job.max_in_flight, 'shard')} at once"
    budget = "" if job.error_budget is None else f", error budget {job.error_budget:g}"
    return f"{shards}, {counted(job.max_attempts, 'attempt')} an item{budget}"


def _generation(generation: Generation) -> str:
    plain = msgspec.to_builtins(generation)
    roles = plain.pop("roles", None) or {}
    return ", ".join(
        part for part in (_fields(plain), *(f"{role}: {_fields(own)}" for role, own in roles.items())) if part
    )


def _checks(quality: Quality | None) -> Iterator[tuple[str, str]]:
    if quality is None:
        yield "checks", "none"
        return
    texts = [f"{name} {_limits_of(bound)}".rstrip() for name, bound in sorted(quality.bounds.items())]
    yield "checks", ", ".join(texts) or "recorded only"
    trimmed = f", ends trimmed to {quality.trim_keep_ms} ms" if quality.trim else ""
    yield "", f"{counted(quality.draws, 'draw')}, then {quality.on_fail}; speech by {quality.vad}{trimmed}"
    for name, options in sorted(quality.meters.items()):
        yield "meter", f"{name}{f' ({_fields(options)})' if options else ''}"


def _limits_of(bound: Bound) -> str:
    sides = ((">=", bound.low), ("<=", bound.high))
    return " and ".join(f"{sign} {limit:g}" for sign, limit in sides if limit is not None)


def _versions(record: Provenance) -> Iterator[tuple[str, str]]:
    commit = f" ({record.commit[:_HASH_CHARACTERS]})" if record.commit else ""
    device = record.device or record.machine
    yield (
        "made by",
        f"{record.recorded_by}, nightjar {record.nightjar}{commit}, Python {record.python}, on {device}",
    )
    model = record.model
    yield "", f"{model.name}, engine {model.engine}{f', revision {model.revision}' if model.revision else ''}"
    if record.engine is not None:
        made = msgspec.to_builtins(record.engine).items()
        # Without a GPU the slots are not recorded: they change nothing there.
        yield (
            "",
            _fields({name: value for name, value in made if value != "" and (name, value) != ("slots", 0)}),
        )
    for file in model.files:
        yield "", f"{file.name} sha256 {file.sha256}"
    yield "", ", ".join(f"{name} {version}" for name, version in record.libraries.items())


def _fields(values: Mapping[str, object]) -> str:
    return printable(", ".join(f"{name}={value}" for name, value in values.items()))

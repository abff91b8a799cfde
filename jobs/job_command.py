"""The command that makes a job again, from its frozen spec."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from jobs.checks import DEFAULT, PRESETS, Quality
from jobs.job_options import flags, options_of, usual_options
from jobs.ledger.records import Job, JobSpec
from pipelines.errors import NightjarError
from pipelines.request import Generation

if TYPE_CHECKING:
    from jobs.provenance import Provenance
    from pipelines.registry import ModelCard

#: The variable that chooses the engine of a model that several can run.
ENGINE = "SPEECH_ENGINE__KIND"
#: Parts of the longest key of `--qa-set`.
_KEY_PARTS = 3


def job_command(job: Job, home: str | None, engines: Sequence[str] = ()) -> list[str]:
    """The words of the command: `nightjar run` in a home, else `nightjar submit`. While the job exists it
    finds the job again.

    `engines`: those that made it, of a model that several can run. A run is told the one; a submit leaves
    it to the workers.
    """
    if home is None:
        program = ["nightjar", "submit", job.input_uri]
    else:
        chosen = ["env", f"{ENGINE}={engines[0]}"] if len(engines) == 1 else []
        program = [*chosen, "nightjar", "run", job.input_uri, "--out", home]
    return [*program, *_of_options(job), *_of_quality(_without_own_pace(job.spec))]


def command_text(words: list[str]) -> str:
    """The command as a shell reads it."""
    return shlex.join(words)


def engines_of(job: Job, made_with: Iterable[Provenance]) -> list[str]:
    """The engines that made a job, by its records; none where its model runs on one alone, or is not here."""
    card = _card(job.spec.model)
    choice: set[str] = set() if card is None else set(card.engines)
    return sorted({record.model.engine for record in made_with} & choice)


def unsaid(job: Job, home: str | None, engines: Sequence[str] = ()) -> list[str]:
    """What the command of `job_command` cannot say, in sentences."""
    notes: list[str] = []
    if len(engines) > 1:
        notes.append(
            f"The job was made on the engines {' and '.join(engines)}; the command names none of them."
        )
    elif engines and home is None:
        notes.append(
            f"The job was made on the engine {engines[0]}: the workers of the next one need {ENGINE}={engines[0]}."
        )
    if job.input_uri == "-":
        notes.append("The input came from standard input: give the same lines again.")
    roles = (job.spec.generation.roles or {}).values()
    if any(one != Generation(voice=one.voice) for one in roles):
        notes.append("Its generation has settings that no option has; see `spec` in the JSON.")
    card, revision = _card(job.spec.model), job.spec.model_revision
    if revision and (card is None or card.revision != revision):
        notes.append(f"The job was made with revision {revision} of the model, which is not the one here.")
    if job.spec.stored_voices is not msgspec.UNSET:
        notes.append(
            f"Stored voices are taken as they are then: {', '.join(sorted(job.spec.stored_voices))}."
        )
    return notes


def _card(model: str) -> ModelCard | None:
    """The model's card; None: it is not here."""
    from pipelines.registry import describe

    try:
        return describe(model)
    except NightjarError:
        return None


def _of_options(job: Job) -> Iterator[str]:
    """The model, and each other option that is not as usual."""
    made, usual = options_of(job.spec, job), usual_options()
    settings = {
        **made.pop("generation"),
        **{name: value for name, value in made.items() if name not in flags() and value != usual[name]},
    }
    for name, shown in flags().items():
        value = made.get(name)
        if value is None or (value == usual.get(name) and name != "model"):
            continue
        if isinstance(value, Mapping):
            for key, one in sorted(cast("Mapping[str, str]", value).items()):
                yield from (shown.flag, f"{key}={one}")
        elif value is True:
            yield shown.flag
        else:
            yield from (shown.flag, str(value))
    for name, value in settings.items():
        yield from ("--set", f"{name}={value}")


def _without_own_pace(spec: JobSpec) -> Quality | None:
    """The checks without the pace that a submit takes from the model itself."""
    quality = spec.quality
    if quality is None or not quality.paces:
        return quality
    card = _card(spec.model)
    return (
        quality
        if card is None or quality.paces != (card.pace,)
        else msgspec.structs.replace(quality, paces=())
    )


def _of_quality(quality: Quality | None) -> Iterator[str]:
    """The preset that is nearest to the checks, and their differences."""
    if quality is None:
        yield from ("--qa", "off")
        return
    wanted = _tree(quality)
    presets = {name: _tree(preset) for name, preset in PRESETS.items() if preset is not None}
    changes = {name: list(_changes(preset, wanted)) for name, preset in presets.items()}
    name = min(changes, key=lambda one: (len(changes[one]), one != DEFAULT))
    if name != DEFAULT:
        yield from ("--qa", name)
    for key, value in changes[name]:
        yield from ("--qa-set", f"{key}={json.dumps(value, ensure_ascii=False)}")


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each difference: `false` for a bound or a meter that is taken out, `null` for
    a side without a limit."""
    for key in {**before, **after}:
        here = (*path, key)
        old, new = before.get(key), after.get(key)
        if old == new and (key in before) == (key in after):
            continue
        if key not in after:
            yield ".".join(here), None if len(here) == _KEY_PARTS else False
        elif isinstance(new, Mapping) and len(here) < _KEY_PARTS and (new or old):
            yield from _changes(cast("Mapping[str, Any]", old or {}), cast("Mapping[str, Any]", new), here)
        else:
            yield ".".join(here), new


def _tree(quality: Quality) -> dict[str, Any]:
    return cast("dict[str, Any]", msgspec.to_builtins(quality))

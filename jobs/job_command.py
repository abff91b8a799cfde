"""The command that makes a job again, from its frozen spec."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from jobs.ledger.records import INPUT_FORMAT, Job, JobSpec
from jobs.quality import DEFAULT, PRESETS, Quality
from jobs.turns import ASKED
from pipelines.errors import NightjarError
from pipelines.request import Generation

if TYPE_CHECKING:
    from jobs.provenance import Provenance
    from pipelines.registry import ModelCard

#: The variable that chooses the engine of a model that several can run.
ENGINE = "SPEECH_ENGINE__KIND"

#: Of `Generation`: what no option says, for it is a line's own, or has its own option.
_NO_OPTION = ("reference_text", "seed", "roles")
_MOST_ATTEMPTS = 3
#: Parts of the longest key of `--qa-set`.
_KEY_PARTS = 3


def job_command(job: Job, home: str | None, engines: Sequence[str] = ()) -> list[str]:
    """The words of the command: `nightjar run` in a home, else `nightjar submit`. While the job exists it finds the job again.

    `engines`: those that made it, of a model that several can run. A run is told the one; a submit leaves it to the workers.
    """
    if home is None:
        program = ["nightjar", "submit", job.input_uri]
    else:
        chosen = ["env", f"{ENGINE}={engines[0]}"] if len(engines) == 1 else []
        program = [*chosen, "nightjar", "run", job.input_uri, "--out", home]
    return [*program, *_of_spec(job.spec), *_of_job(job)]


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
        notes.append(f"The job was made on the engines {' and '.join(engines)}; the command names none of them.")
    elif engines and home is None:
        notes.append(f"The job was made on the engine {engines[0]}: the workers of the next one need {ENGINE}={engines[0]}.")
    if job.input_uri == "-":
        notes.append("The input came from standard input: give the same lines again.")
    roles = (job.spec.generation.roles or {}).values()
    if job.spec.generation.reference_text is not None or any(one != Generation(voice=one.voice) for one in roles):
        notes.append("Its generation has settings that no option has; see `spec` in the JSON.")
    card, revision = _card(job.spec.model), job.spec.model_revision
    if revision and (card is None or card.revision != revision):
        notes.append(f"The job was made with revision {revision} of the model, which is not the one here.")
    if job.spec.stored_voices is not msgspec.UNSET:
        notes.append(f"Stored voices are taken as they are then: {', '.join(sorted(job.spec.stored_voices))}.")
    return notes


def _card(model: str) -> ModelCard | None:
    """The model's card; None: it is not here."""
    from pipelines.registry import describe

    try:
        return describe(model)
    except NightjarError:
        return None


def _of_spec(spec: JobSpec) -> Iterator[str]:
    yield from ("--model", spec.model)
    for name in Generation.__struct_fields__:
        value = getattr(spec.generation, name)
        if value is not None and name not in _NO_OPTION:
            yield from (f"--{name.replace('_', '-')}", str(value))
    for role, own in (spec.generation.roles or {}).items():
        if own.voice is not None:
            yield from ("--voice-of", f"{role}={own.voice}")
    if spec.seed:
        yield from ("--seed", str(spec.seed))
    if spec.format != "wav":
        yield from ("--format", spec.format)
    if spec.sample_rate is not msgspec.UNSET:
        yield from ("--sample-rate", str(spec.sample_rate))
    if spec.speak is not msgspec.UNSET and spec.speak in ASKED and spec.speak != "auto":
        yield from ("--speak", spec.speak)
    if spec.pack is True:
        yield "--pack"
    yield from _of_quality(_without_own_pace(spec))
    if spec.reading is not msgspec.UNSET:
        for name in ("limit", "sample"):
            if (count := getattr(spec.reading, name)) is not None:
                yield from (f"--{name}", str(count))
        for option, pairs in (("--column", spec.reading.columns), ("--voice-for", spec.reading.voices)):
            for key, value in (pairs or {}).items():
                yield from (option, f"{key}={value}")


def _of_job(job: Job) -> Iterator[str]:
    if (written := job.labels.get(INPUT_FORMAT)) is not None:
        yield from ("--input-format", written)
    if job.name:
        yield from ("--name", job.name)
    for key, value in sorted(job.labels.items()):
        if key != INPUT_FORMAT:
            yield from ("--label", f"{key}={value}")
    plain = {"priority": (job.priority, 0), "weight": (job.weight, 1), "max-attempts": (job.max_attempts, _MOST_ATTEMPTS)}
    limits = {"max-in-flight": (job.max_in_flight, None), "error-budget": (job.error_budget, None)}
    for name, (value, usual) in {**plain, **limits}.items():
        if value != usual:
            yield from (f"--{name}", str(value))


def _without_own_pace(spec: JobSpec) -> Quality | None:
    """The checks without the pace that a submit takes from the model itself."""
    quality = spec.quality
    if quality is None or not quality.paces:
        return quality
    card = _card(spec.model)
    return quality if card is None or quality.paces != (card.pace,) else msgspec.structs.replace(quality, paces=())


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


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each difference: `false` for a bound or a meter that is taken out, `null` for a side without a limit."""
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

"""The command that makes a job again, from its frozen spec."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from jobs.checks import BASIC, DEFAULT, PRESETS, checks_of_codes
from jobs.job_options import default_options, flags, options_of
from jobs.ledger.records import Job, JobSpec
from pipelines.errors import NightjarError
from pipelines.registry import ModelCard, describe
from pipelines.request import Generation

if TYPE_CHECKING:
    from jobs.provenance import Provenance

#: The variable that chooses the engine of a model that several engines can run.
ENGINE = "SPEECH_ENGINE__KIND"
#: Number of dots in the longest keys of `--qa-set`, which name a limit (`bounds.wer.high`).
_LONGEST_KEY_DOTS = 2


def job_command(
    job: Job, home: str | None, made_with: Iterable[Provenance] = ()
) -> tuple[list[str], list[str]]:
    """The words of the command: `nightjar run` if the job is in a home, else `nightjar submit`. While the job
    exists, the command finds it and makes no new one. Also returns sentences about settings of the job that the
    command cannot contain.

    `made_with`: the job's provenance records. If its model has a choice of engines, the command of a run sets the
    engine, unless several made the job. A submit cannot set it, because the workers' settings decide.
    """
    try:
        card = describe(job.spec.model)
    except NightjarError:
        card = None  # the model is not installed
    engines = sorted({record.model.engine for record in made_with} & set(card.engines if card else ()))
    if home is None:
        program = ["nightjar", "submit", job.input_uri]
    else:
        chosen = ["env", f"{ENGINE}={engines[0]}"] if len(engines) == 1 else []
        program = [*chosen, "nightjar", "run", job.input_uri, "--out", home]
    words = [*program, *_of_options(job), *_of_quality(job.spec, card)]
    return words, list(_omitted(job, home, engines, card))


def _omitted(job: Job, home: str | None, engines: Sequence[str], card: ModelCard | None) -> Iterator[str]:
    """Yields sentences about settings of the job that its command cannot contain."""
    if len(engines) > 1:
        yield f"The job was made on the engines {' and '.join(engines)}; the command names none of them."
    elif engines and home is None:
        yield f"The job was made on the engine {engines[0]}: workers of a new job need {ENGINE}={engines[0]}."
    if job.input_uri == "-":
        yield "The input was standard input: give the same lines again."
    roles = (job.spec.generation.roles or {}).values()
    if any(one != Generation(voice=one.voice) for one in roles):
        yield "The job has generation settings that no option can set; see `spec` in the JSON."
    revision = job.spec.model_revision
    if revision and (card is None or card.revision != revision):
        yield f"The job was made with revision {revision} of the model, which is not installed here."
    if job.spec.stored_voices:
        names = sorted(job.spec.stored_voices)
        more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
        yield f"The command uses the current recordings of stored voices: {', '.join(names[:10])}{more}."
    if job.spec.lexicon:
        yield "The job has a lexicon: give --set lexicon=FILE as it was given then."
    if job.spec.pool and job.spec.stored_voices:
        yield "If these are recordings of a folder or a table, give --voices as it was given then."


def _of_options(job: Job) -> Iterator[str]:
    """Yields the words of the model's option, and of each other option whose value is not the default."""
    made, defaults, known = options_of(job.spec, job), default_options(), flags()
    for name, value in {**made.pop("generation"), **made}.items():
        if value is None or (value == defaults.get(name) and name != "model"):
            continue
        if name not in known:
            yield from ("--set", f"{name}={value}")
        elif isinstance(value, Mapping):
            for key, one in sorted(cast("Mapping[str, str]", value).items()):
                yield from (known[name].flag, f"{key}={one}")
        else:
            yield known[name].flag
            yield from () if value is True else (str(value),)


def _of_quality(spec: JobSpec, card: ModelCard | None) -> Iterator[str]:
    """Yields the options of the checks: the preset with the fewest differences, and the differences. The pace
    of the model is left out, because a submit adds it."""
    if spec.quality is None:
        yield from ("--qa", "off")
        return
    wanted = msgspec.to_builtins(spec.quality)
    if card is not None and spec.quality.paces == (card.pace,):
        wanted["paces"] = ()
    presets = {name: msgspec.to_builtins(preset) for name, preset in PRESETS.items() if preset is not None}
    if spec.output == "codes":
        presets = {DEFAULT: msgspec.to_builtins(checks_of_codes(BASIC))}
    changes = {name: list(_changes(preset, wanted)) for name, preset in presets.items()}
    name = min(changes, key=lambda one: (len(changes[one]), one != DEFAULT))
    if name != DEFAULT:
        yield from ("--qa", name)
    for key, value in changes[name]:
        yield from ("--qa-set", f"{key}={json.dumps(value, ensure_ascii=False)}")


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each difference: `false` removes a bound or a meter, `null` a limit."""
    for key in {**before, **after}:
        here, old, new = f"{path}{key}", before.get(key), after.get(key)
        is_limit = here.count(".") == _LONGEST_KEY_DOTS
        if old == new and (key in before) == (key in after):
            continue
        if key not in after:
            yield here, None if is_limit else False
        elif isinstance(new, Mapping) and not is_limit and (new or old):
            yield from _changes(old or {}, cast("Mapping[str, Any]", new), f"{here}.")
        else:
            yield here, new

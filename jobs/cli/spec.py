"""The options that `nightjar run` and `nightjar submit` share: what a job is made with, and how it is run."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import msgspec

from jobs.cli.completion import models, voices
from jobs.cli.context import CHECKS, INPUT, JOB, MODEL, SAMPLING, TEXT_AND_AUDIO, label_option, labels_of, option
from jobs.console import FiniteRange, NamedPath
from jobs.input_format import INPUT_FORMATS
from jobs.ledger.records import JobSpec, Reading
from jobs.quality import DEFAULT, PRESETS, quality_of
from jobs.turns import ASKED
from pipelines.audio_format import AUDIO_FORMATS
from pipelines.request import Generation, Mode, SpokenRole

F = TypeVar("F", bound=Callable[..., Any])

PRIORITY = click.IntRange(-100, 100)
_BATCH = "openai-batch"
_TEMPERATURE, _TOP_K = FiniteRange(min=0), click.IntRange(min=0)

#: Each is the field of `Generation` of its name.
_GENERATION = (
    option("--voice", metavar="NAME", heading=MODEL, shell_complete=voices, help="Voice for lines without a voice."),
    option("--language", metavar="NAME", heading=MODEL, help="Language for lines without a language."),
    option("--instruct", metavar="TEXT", heading=MODEL, help="Style instruction for lines without one."),
    option("--temperature", metavar="N", type=_TEMPERATURE, heading=SAMPLING, help="Sampling temperature."),
    option("--top-k", metavar="N", type=_TOP_K, heading=SAMPLING, help="Sample from the N most likely codes."),
    option(
        "--top-p",
        metavar="N",
        type=FiniteRange(0, 1, min_open=True),
        heading=SAMPLING,
        help="Sample from the smallest set of codes with this total probability.",
    ),
    option(
        "--repetition-penalty",
        metavar="N",
        type=FiniteRange(min=0, min_open=True),
        heading=SAMPLING,
        help="Penalty for repeated codes; 1 is none.",
    ),
    option("--cfg", metavar="N", type=FiniteRange(min=0), heading=SAMPLING, help="Scale of classifier-free guidance; 1 or less is none."),
    option(
        "--max-seconds",
        metavar="SECONDS",
        type=FiniteRange(min=0, min_open=True),
        heading=SAMPLING,
        help="Maximum audio seconds of an item.",
    ),
    option(
        "--mode", type=click.Choice(get_args(Mode)), heading=TEXT_AND_AUDIO, help="Output of the model: text only, or text and then audio."
    ),
    option(
        "--text-temperature",
        metavar="N",
        type=_TEMPERATURE,
        heading=TEXT_AND_AUDIO,
        help="Temperature for text; overrides --temperature.",
    ),
    option(
        "--audio-temperature",
        metavar="N",
        type=_TEMPERATURE,
        heading=TEXT_AND_AUDIO,
        help="Temperature for audio; overrides --temperature.",
    ),
    option("--audio-top-k", metavar="N", type=_TOP_K, heading=TEXT_AND_AUDIO, help="Top-k for audio; overrides --top-k."),
    option(
        "--max-tokens",
        metavar="N",
        type=click.IntRange(min=1),
        heading=TEXT_AND_AUDIO,
        help="Maximum steps of an answer: text tokens and audio frames together.",
    ),
)
_SPEC = (
    option(
        "--format",
        "formats",
        multiple=True,
        type=click.Choice([*AUDIO_FORMATS, _BATCH]),
        heading=INPUT,
        help="Audio format: wav, flac, mp3 or opus. `openai-batch`: INPUT is an OpenAI batch file; one of the others may be given too. "
        "[default: wav]",
    ),
    option(
        "--sample-rate",
        metavar="HZ",
        type=click.IntRange(8_000, 48_000),
        heading=JOB,
        help="Sample rate of the audio, 8000 to 48000. mp3 and opus hold only some rates. [default: the model's]",
    ),
    option(
        "--input-format",
        type=click.Choice(["auto", *INPUT_FORMATS]),
        heading=INPUT,
        help="How INPUT is written. `auto`: as its first lines or its name say. [default: auto]",
    ),
    option(
        "--column",
        "columns",
        multiple=True,
        metavar="FIELD=NAME",
        heading=INPUT,
        help="Column of a table that holds a field, for example text=sentence. Can be given more than once.",
    ),
    option("--limit", metavar="N", type=click.IntRange(min=1), heading=INPUT, help="Use the first N lines of INPUT only."),
    option("--sample", metavar="N", type=click.IntRange(min=1), heading=INPUT, help="Use N lines of INPUT only, chosen by --seed."),
    option(
        "--pack",
        is_flag=True,
        heading=JOB,
        help="Store the audio of many items in one object, a pack (tar), for stores that charge or throttle by object.",
    ),
    option(
        "--model",
        metavar="MODEL",
        shell_complete=models,
        default="hibari",
        show_default=True,
        heading=MODEL,
        help="Name of a model, or path of a checkpoint folder. See `nightjar models`.",
    ),
    option(
        "--speak",
        type=click.Choice(ASKED),
        heading=MODEL,
        help="Whose texts become speech. `auto`: the assistant's texts that have no audio; if the dialogue has none, the user's texts. "
        "[default: auto]",
    ),
    option(
        "--voice-of",
        "voices",
        multiple=True,
        metavar="ROLE=NAME",
        heading=MODEL,
        help="Voice for one role, for example assistant=heart. Can be given more than once.",
    ),
    option(
        "--voice-for",
        "speakers",
        multiple=True,
        metavar="SPEAKER=NAME",
        heading=MODEL,
        help="Voice for a speaker of a table, or of Kaldi's utt2spk; `*` is every other speaker. Can be given more than once.",
    ),
    option(
        "--seed",
        metavar="N",
        type=click.IntRange(0, 2**63 - 1),
        default=0,
        show_default=True,
        heading=MODEL,
        help="Seed of the job. The same seed gives the same noise; on a GPU equal bits need the reproducible mode.",
    ),
    option(
        "--qa",
        type=click.Choice(list(PRESETS)),
        default=DEFAULT,
        show_default=True,
        heading=CHECKS,
        help="Quality checks: off, basic or strict.",
    ),
    option("--qa-config", type=NamedPath(path_type=Path), metavar="FILE", heading=CHECKS, help="TOML file with changes to the checks."),
    option(
        "--qa-set",
        multiple=True,
        metavar="KEY=VALUE",
        heading=CHECKS,
        help="Change one value of the checks, for example bounds.pause.high=2. Can be given more than once.",
    ),
)
_JOB = (
    option(
        "--on-error",
        type=click.Choice(["skip", "abort"]),
        default="skip",
        show_default=True,
        heading=INPUT,
        help="`skip`: leave bad lines out and list them. `abort`: refuse the whole file.",
    ),
    option(
        "--max-attempts",
        metavar="N",
        default=3,
        show_default=True,
        type=click.IntRange(1, 100),
        heading=CHECKS,
        help="Maximum attempts per item.",
    ),
    option(
        "--error-budget",
        metavar="SHARE",
        type=FiniteRange(0, 1),
        heading=CHECKS,
        help="Pause the job when more than this share of its items fails.",
    ),
    option("--name", metavar="NAME", default="", heading=JOB, help="Display name of the job."),
    label_option("Label of the job; `nightjar list --label` finds it. Can be given more than once."),
    option(
        "--priority",
        metavar="N",
        default=0,
        show_default=True,
        type=PRIORITY,
        heading=JOB,
        help="Jobs with a higher priority run first.",
    ),
    option(
        "--weight",
        metavar="N",
        default=1,
        show_default=True,
        type=click.IntRange(1, 1000),
        heading=JOB,
        help="Share of the workers among jobs of the same priority.",
    ),
    option(
        "--max-in-flight",
        metavar="N",
        type=click.IntRange(min=1),
        heading=JOB,
        help="Maximum shards of this job that run at the same time.",
    ),
    option(
        "--idempotency-key",
        metavar="KEY",
        heading=JOB,
        help="Key that identifies the job. Submitting the same key again creates no second job. [default: hash of the file and the spec]",
    ),
)


dry_run_option = option("--dry-run", is_flag=True, heading=JOB, help="Check the file and estimate time, size and cost. Writes nothing.")


def job_options(function: F) -> F:
    """Adds the options of a job, handed over as keyword arguments that `take_spec` and then `submit_options` take."""
    for add in reversed((*_SPEC, *_GENERATION, *_JOB)):
        function = add(function)
    return function


def take_spec(given: dict[str, Any]) -> JobSpec:
    """Takes the options of a spec out of a command's keyword arguments; what is not a spec's stays there, with `input_format`."""
    formats: Sequence[str] = given.pop("formats")
    encodings = [name for name in formats if name in AUDIO_FORMATS]
    if len(set(encodings)) > 1:
        raise click.UsageError("--format names two encodings; a job has one.")
    given["input_format"] = _input_format(given["input_format"], formats)
    fields = {name: given.pop(name) for name in Generation.__struct_fields__ if name in given and name != "seed"}
    generation = Generation(**fields, roles=_roles(given.pop("voices")))
    quality = quality_of(given.pop("qa"), given.pop("qa_config"), given.pop("qa_set"))
    speak, sample_rate = given.pop("speak"), given.pop("sample_rate")
    reading = Reading(
        limit=given.pop("limit"),
        sample=given.pop("sample"),
        columns=_pairs(given.pop("columns"), "column", "FIELD=NAME"),
        voices=_pairs(given.pop("speakers"), "voice", "SPEAKER=NAME"),
    )
    return JobSpec(
        given.pop("model"),
        generation=generation,
        seed=given.pop("seed"),
        format=encodings[0] if encodings else AUDIO_FORMATS[0],
        quality=quality,
        speak=msgspec.UNSET if speak is None else speak,
        pack=given.pop("pack") or msgspec.UNSET,
        reading=reading,
        sample_rate=msgspec.UNSET if sample_rate is None else sample_rate,
    )


def _input_format(asked: str | None, formats: Sequence[str]) -> str:
    if asked is None:
        return _BATCH if _BATCH in formats else "auto"
    if _BATCH in formats and asked != _BATCH:
        raise click.UsageError("--format and --input-format name two formats of INPUT.")
    return asked


def _pairs(given: Sequence[str], what: str, shape: str) -> dict[str, str] | None:
    pairs: dict[str, str] = {}
    for pair in given:
        key, _, value = pair.partition("=")
        if not key or not value:
            raise click.UsageError(f"The {what} {pair!r} is not {shape}.")
        if key in pairs:
            raise click.UsageError(f"{shape.partition('=')[0].capitalize()} {key!r} is given twice.")
        pairs[key] = value
    return pairs or None


def _roles(voices: Sequence[str]) -> dict[SpokenRole, Generation] | None:
    named: dict[SpokenRole, Generation] = {}
    for voice in voices:
        role, _, name = voice.partition("=")
        if role not in ("user", "assistant") or not name:
            raise click.UsageError(f"The voice {voice!r} is not ROLE=NAME; the roles are user and assistant.")
        if role in named:
            raise click.UsageError(f"--voice-of names two voices of the {role}.")
        named[role] = Generation(voice=name)
    return named or None


def submit_options(given: dict[str, Any]) -> Any:
    """The `SubmitOptions` of what `take_spec` left."""
    from jobs.ingest import SubmitOptions

    labels = labels_of(given.pop("labels"))
    if given["idempotency_key"] is not None and not given["idempotency_key"].strip():
        raise click.UsageError("The idempotency key is empty.")
    return SubmitOptions(owner=_owner(), labels=labels, **given)


def _owner() -> str:
    """The name of who submits."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""

"""The options that say what a job is made with; `nightjar run` and `nightjar submit` share them."""

from __future__ import annotations

import getpass
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import msgspec

from jobs.cli.context import FiniteRange, NamedPath
from jobs.ledger.records import JobSpec
from jobs.quality import DEFAULT, PRESETS, Quality, quality_of
from jobs.turns import ASKED, Speak
from pipelines.errors import ErrorCode, InputError, NightjarError
from pipelines.request import Generation, Mode, SpokenRole

F = TypeVar("F", bound=Callable[..., Any])

_ENCODINGS = ("wav", "flac")
_INPUT_FORMATS = ("openai-batch",)
_GENERATION: tuple[tuple[str, Any, str], ...] = (
    ("voice", str, "Voice of lines that name none."),
    ("language", str, "Language of lines that name none."),
    ("instruct", str, "Instruction of lines that have none."),
    ("temperature", FiniteRange(min=0), "Sampling temperature."),
    ("top_k", click.IntRange(min=0), "Sample among the likeliest codes."),
    ("top_p", FiniteRange(0, 1, min_open=True), "Sample among the codes that hold this probability."),
    ("repetition_penalty", FiniteRange(min=0, min_open=True), "Penalty of repeated codes."),
    ("cfg", FiniteRange(min=0), "Scale of the guidance."),
    ("max_seconds", FiniteRange(min=0, min_open=True), "Longest audio of an item."),
    ("mode", click.Choice(get_args(Mode)), "What a model that can do both writes: text, or text and then audio."),
    ("text_temperature", FiniteRange(min=0), "Sampling temperature of such a model's text."),
    ("audio_temperature", FiniteRange(min=0), "Sampling temperature of its audio."),
    ("audio_top_k", click.IntRange(min=0), "Sample its audio among the likeliest codes."),
    ("max_tokens", click.IntRange(min=1), "Most steps of such a model: text tokens and frames together."),
)


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """The options as they were given."""

    model: str
    seed: int
    format: str
    generation: Generation
    quality: Quality | None
    speak: Speak | None = None


def spec_options(function: F) -> F:
    """Adds the options of a spec, handed over as keyword arguments that `take_spec` takes."""
    text = "Voice of one role's turns, as assistant=NAME; may be given again."
    function = click.option("--voice-of", "voices", multiple=True, metavar="ROLE=NAME", help=text)(function)
    for name, kind, text in reversed(_GENERATION):
        function = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(function)
    text = "One value of the checks, as bounds.pause.high=2; may be given again."
    function = click.option("--qa-set", multiple=True, metavar="KEY=VALUE", help=text)(function)
    text = "TOML file that changes the checks."
    function = click.option("--qa-config", type=NamedPath(path_type=Path), metavar="FILE", help=text)(function)
    text = "Checks that the speech has to pass."
    function = click.option("--qa", type=click.Choice(list(PRESETS)), default=DEFAULT, show_default=True, help=text)(function)
    text = "Encoding of the audio (wav or flac; wav is the default), or how INPUT is written (openai-batch); may be given for each."
    choice = click.Choice([*_ENCODINGS, *_INPUT_FORMATS])
    function = click.option("--format", "formats", multiple=True, type=choice, help=text)(function)
    function = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the job.")(function)
    text = (
        "Whose texts are spoken: the user's, the assistant's or all; auto: the assistant's that have no audio yet, the user's where "
        "there is none. [default: auto]"
    )
    function = click.option("--speak", type=click.Choice(ASKED), help=text)(function)
    text = "Pipeline, by name or checkpoint folder."
    return click.option("--model", default="hibari", show_default=True, help=text)(function)


def take_spec(given: dict[str, Any]) -> SpecOptions:
    """Takes the options of a spec out of a command's keyword arguments, and leaves the `input_format` there for the submit."""
    formats = given.pop("formats")
    encodings = [name for name in formats if name in _ENCODINGS]
    if len(set(encodings)) > 1:
        raise click.UsageError("--format names two encodings; a job has one.")
    given["input_format"] = next((name for name in formats if name in _INPUT_FORMATS), "dialogues")
    generation = Generation(**{name: given.pop(name) for name, _, _ in _GENERATION}, roles=_roles(given.pop("voices")))
    quality = quality_of(given.pop("qa"), given.pop("qa_config"), given.pop("qa_set"))
    return SpecOptions(
        given.pop("model"), given.pop("seed"), encodings[0] if encodings else _ENCODINGS[0], generation, quality, given.pop("speak")
    )


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


def resolve_spec(options: SpecOptions) -> JobSpec:
    """The frozen spec of a job: the model's full name and revision. Raises `model.*` and `input.unknown_voice`, `.unknown_language`."""
    from pipelines.registry import describe

    card = describe(options.model)
    generation = options.generation
    for said in (generation, *(generation.roles or {}).values()):
        _require(said.voice, card.capabilities.voices, ErrorCode.INPUT_UNKNOWN_VOICE, "voice", card.name)
    _require(generation.language, card.capabilities.languages, ErrorCode.INPUT_UNKNOWN_LANGUAGE, "language", card.name)
    speak = msgspec.UNSET if options.speak is None else options.speak
    return JobSpec(card.name, card.revision, generation, options.seed, options.format, options.quality, speak)


def _require(wanted: str | None, known: tuple[str, ...], code: ErrorCode, what: str, model: str) -> None:
    if wanted is not None and known and wanted.casefold() not in {name.casefold() for name in known}:
        raise InputError(code, f"The model {model} has no {what} {wanted!r}.", f"It has: {', '.join(known)}.")


def lacking_meters(spec: JobSpec, say: Callable[[str], None] | None = None) -> NightjarError | None:
    """What this machine lacks for the checks of a job: a meter's libraries (`model.missing_extra`) or weights (`model.unreachable`).

    With `say`, for a job that runs here, weights that are not here are fetched, and `say` is told so.
    """
    from jobs.checks import lacking, lacking_weights

    if spec.quality is None:
        return None
    lack = lacking(spec.quality.meters) or lacking_weights(spec.quality.meters, fetch=False)
    if lack is None or lack.code is not ErrorCode.MODEL_UNREACHABLE or say is None:
        return lack
    say("Fetching the weights of the quality checks.")
    return lacking_weights(spec.quality.meters, fetch=True)


def check_source(source: str) -> str:
    """The input's name, if it can be written down, read, and has an end. Raises `input.unreadable` before anything is made."""
    try:
        source.encode()
    except UnicodeEncodeError:
        raise InputError(ErrorCode.INPUT_UNREADABLE, "The input's name is not UTF-8.", "Rename the file.") from None
    from jobs.source import reading

    if source == "-" or source.startswith("s3://"):
        return source
    with reading(source):
        mode = os.stat(source).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            open(source, "rb").close()
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise InputError(ErrorCode.INPUT_UNREADABLE, f"{source!r} is a device.", "Give a file, or `-` for standard input.")
    return source


def owner() -> str:
    """The name of who submits, for the job's `owner`."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""

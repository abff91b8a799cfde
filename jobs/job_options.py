"""The table of all job options, which the command line, Python, schedules and `nightjar show` read, and the command
that makes a job again, from its frozen spec."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from jobs.checks import BASIC, DEFAULT, PRESETS, Quality, checks_of_codes, quality_of
from jobs.formatting import field_docs
from jobs.ledger.records import INPUT_FORMAT, Job, JobSpec, JobTerms, Reading
from jobs.source import AskedFormat
from pipelines.audio_format import AudioFormat
from pipelines.errors import ConfigError, NightjarError, invalid, nearest
from pipelines.registry import ModelCard, describe
from pipelines.request import Generation, Output, SpokenRole

if TYPE_CHECKING:
    from jobs.provenance import Provenance
    from jobs.voices import PoolRecording

PositiveInt = Annotated[int, Field(ge=1)]


def _share(value: object) -> object:
    """A percentage as a number; other values unchanged."""
    with suppress(ValueError):
        return round(float(str(value).removesuffix("%")) / 100, 9) if str(value).endswith("%") else value
    return value


#: A share such as `5%` or `0.05`.
Share = Annotated[float, BeforeValidator(_share), Field(ge=0, le=1)]
#: Options, or settings of a generation, by their names.
Options = dict[str, Any]
DEFAULT_MODEL = "hibari"
AUDIO: Output = "audio"
JOB, KEYS, MESSAGES = "Job", "Keys of --set", "Messages and help"


class InputOptions(TypedDict, total=False):
    """Options of the input and of the audio files."""

    format: AudioFormat
    """Audio format: wav, flac, mp3 or opus."""
    output: Output
    """What is stored: audio, the codes of the model's codec, or both. Codes alone are not decoded; `nightjar
    decode` makes their audio."""
    input_format: AskedFormat
    """Format of INPUT. `auto`: recognized by its first lines or its name."""
    columns: Mapping[str, str]
    """Column of a table that contains FIELD, for example text=sentence. Can be given more than once."""
    keep: str | Sequence[str]
    """Other columns or keys of INPUT that become metadata, separated by commas. [default: all]"""
    drop: str | Sequence[str]
    """Other columns or keys of INPUT that do not become metadata; `*` means all."""
    limit: PositiveInt
    """Use only the first N lines of INPUT."""
    sample: PositiveInt
    """Use only N lines of INPUT, chosen at random by --seed."""
    on_error: Literal["skip", "abort"]
    """`skip`: leave bad lines out and list them. `abort`: refuse the whole file."""


class ModelOptions(TypedDict, total=False):
    """Options of the model and the voice."""

    model: str | Path
    """Name of a model, or path of a checkpoint folder. See `nightjar models`."""
    voice: str
    """Voice for lines without a voice."""
    language: str
    """Language for lines without a language."""
    instruct: str
    """Style instruction for lines without one."""
    voice_of: Mapping[SpokenRole, str]
    """Voice for one role, for example assistant=heart. Can be given more than once."""
    voice_for: Mapping[str, str]
    """Voice for a speaker in a table or in Kaldi's utt2spk; `*` means all other speakers. Can be given more
    than once."""
    voices: str | Path
    """Pool of voices: a folder of recordings, a CSV or TSV file of voices, or names such as anna=2,ben. Each
    spoken role of a dialogue without a voice gets one, drawn by --seed."""
    voices_by: Literal["dialogue", "speaker"]
    """`speaker`: draw one voice of the pool for each speaker in a table or in Kaldi's utt2spk."""
    balance: bool
    """Give each voice of the pool an amount of text in proportion to its weight."""
    speak: Literal["auto", "user", "assistant", "all"]
    """Role whose texts become speech. `auto`: the assistant's texts without audio; if there are none, the
    user's texts."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    """Seed of the random numbers of the job. On a GPU, identical audio also needs the reproducible mode."""


class CheckOptions(TypedDict, total=False):
    """Options of the quality checks."""

    qa: Literal["off", "basic", "strict"]
    """Quality checks: off, basic or strict."""
    qa_config: str | Path
    """TOML file with changes to the checks."""
    qa_set: Sequence[str]
    """Change one value of the checks, for example bounds.pause.high=2. Can be given more than once."""
    qa_sample: Annotated[Share, Field(gt=0)]
    """Share of the items that the meters measure, for example 5%, drawn by --seed. [default: all]"""
    qa_max_failure_rate: Share
    """Mark the job if more than this share of the measured items fails, for example 2%."""


class OwnOptions(TypedDict, total=False):
    """Options of the job itself."""

    sample_rate: Annotated[int, Field(ge=8_000, le=48_000)]
    """Sample rate of the audio, 8000 to 48000. mp3 and opus support only some rates. [default: the
    model's]"""
    pack: bool
    """Store the audio of many items in one object, a pack (tar), for stores that charge or throttle per
    object."""
    timestamps: bool
    """Store when each word is said. Models that do not know it need the aligner of the checks."""
    name: str
    """Display name of the job."""
    labels: Mapping[str, str]
    """Label of the job; `nightjar list --label` finds it. Can be given more than once."""
    priority: Annotated[int, Field(ge=-100, le=100)]
    """Jobs with a higher priority run first."""
    idempotency_key: Annotated[str, Field(pattern=r"\S")]
    """Key that identifies the job. Submitting the same key again creates no second job. [default: hash
    of the file and the spec]"""


class SetOptions(TypedDict, total=False):
    """Options that the command line takes with `--set`."""

    weight: Annotated[int, Field(ge=1, le=1000)]
    """Share of the workers, relative to other jobs of the same priority."""
    max_attempts: Annotated[int, Field(ge=1, le=100)]
    """Maximum attempts per item."""
    max_in_flight: PositiveInt
    """Maximum shards of this job that run at the same time."""
    normalize: Literal["en"]
    """Speak numbers, dates, money and units of English texts in words: en. Needs the extra `text`."""
    lexicon: str | Path
    """CSV or TSV file of words and their spelling, or /phonemes/ if the model takes them."""
    error_budget: Annotated[float, Field(ge=0, le=1)]
    """Pause the job when more than this share of its items (0 to 1) fails."""


@with_config(ConfigDict(extra="forbid"))
class JobOptions(InputOptions, ModelOptions, CheckOptions, OwnOptions, SetOptions, total=False):
    """The options of `nightjar run` and `nightjar submit`. The docstring of an option is its help."""

    generation: Mapping[str, Any]
    """Other keys of `generation`, such as `temperature` or `max_seconds`."""


#: The headings of `nightjar run --help`, in order, with their options.
GROUPS = {
    "Input and output": InputOptions,
    "Model and voice": ModelOptions,
    "Checks": CheckOptions,
    JOB: OwnOptions,
    KEYS: SetOptions,
    MESSAGES: None,
}
#: Metavars of options other than NAME, N and choices.
_METAVARS = {
    "model": "MODEL",
    "instruct": "TEXT",
    "qa_config": "FILE",
    "sample_rate": "HZ",
    "idempotency_key": "KEY",
    "voice_of": "ROLE=NAME",
    "voice_for": "SPEAKER=NAME",
    "voices": "VOICES",
    "columns": "FIELD=NAME",
    "keep": "NAMES",
    "drop": "NAMES",
    "labels": "KEY=VALUE",
    "qa_set": "KEY=VALUE",
    "qa_sample": "SHARE",
    "qa_max_failure_rate": "SHARE",
}
#: The variable that chooses the engine of a model that several engines can run.
ENGINE = "SPEECH_ENGINE__KIND"
#: Number of dots in the longest keys of `--qa-set`, which name a limit (`bounds.wer.high`).
_LONGEST_KEY_DOTS = 2


class Flag(NamedTuple):
    """How the command line shows an option."""

    #: The type of the option, without its bounds.
    kind: Any
    heading: str
    flag: str
    metavar: str | None


#: Fields of `Generation` that have their own option. Below: the other fields, which `--set` accepts, and
#: their help.
OWN_OPTION = ("voice", "language", "instruct")
GENERATION = {
    "reference_text": "Transcript of the reference recordings.",
    "temperature": "Sampling temperature.",
    "top_k": "Sample from the N most likely codes.",
    "top_p": "Sample from the smallest set of codes with this total probability.",
    "repetition_penalty": "Penalty for repeated codes; 1 turns it off.",
    "cfg": "Scale of classifier-free guidance; 1 or less turns it off.",
    "max_seconds": "Maximum audio seconds of an item.",
    "mode": "Output of models that write text and audio: text_only or text_audio.",
    "text_temperature": "Temperature for text, if the model writes text and audio; overrides temperature.",
    "audio_temperature": "Temperature for audio, if the model writes text and audio; overrides temperature.",
    "audio_top_k": "The top_k for audio, if the model writes text and audio; overrides top_k.",
    "max_tokens": "Maximum text tokens and audio frames of an answer together, if the model writes text and audio.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions(JobTerms):
    """The options of a job other than its input and its spec."""

    #: `skip`: bad lines are left out and listed by `nightjar errors`; `abort`: a bad line undoes the submit.
    on_error: Literal["skip", "abort"] = "skip"
    #: The format of the input; ignored if the spec is already resolved.
    input_format: AskedFormat = "dialogues"
    #: The recordings of the job's pool of voices, by name.
    recordings: Mapping[str, PoolRecording] = field(default_factory=dict)
    #: Key that identifies the job; None: a hash of input, spec and store.
    idempotency_key: str | None = None


@dataclass(eq=False)
class OptionError(ValueError):
    """An unknown option, or one whose value cannot be used."""

    name: str
    reason: str
    value: object = None
    unknown: bool = False

    def __str__(self) -> str:
        return f"The option {self.name} is {self.value!r:.100}: {self.reason}."


@cache
def hints() -> Options:
    """Option -> its annotated type, in the order of the table."""
    return get_type_hints(JobOptions, include_extras=True)


@cache
def _adapter() -> TypeAdapter[JobOptions]:
    return TypeAdapter(JobOptions)


def read_options(options: Mapping[str, Any]) -> Options:
    """Converts options to their types, also from text; None means not given. Raises `OptionError`."""
    given = plain_numbers({name: value for name, value in options.items() if value is not None})
    try:
        return {**_adapter().validate_python(given)}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # In `loc` the option is followed by a key of a mapping, or by a type that was tried.
        is_mapping = isinstance(given.get(str(first["loc"][0])), Mapping)
        name = ".".join(map(str, first["loc"][: 2 if is_mapping else 1]))
        reason = "Input should be a list" if first["type"] == "sequence_str" else first["msg"]
        raise OptionError(name, reason, first["input"], unknown=first["type"] == "extra_forbidden") from None


def checked_options(options: Mapping[str, Any]) -> Options:
    """Like `read_options`, but raises `config.invalid`."""
    try:
        return read_options(options)
    except OptionError as fault:
        if fault.unknown:
            raise unknown_name("option", fault.name, hints()) from None
        raise invalid(str(fault), "Correct it; docs/python.md lists the options.") from None


def checked_generation(asked: Mapping[str, Any]) -> Generation:
    """Converts the settings of a `generation`, also from text. Raises `config.invalid` for an unknown key and
    for a value of a wrong type."""
    try:
        return msgspec.convert(plain_numbers(asked), Generation, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(Generation.__struct_fields__)
        raise invalid(f"The generation is not valid: {error}.", f"Its keys are: {known}.") from None


def plain_numbers(values: Mapping[str, Any]) -> Options:
    """Converts NumPy's numbers to Python's."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error of an unknown name, with the nearest and all known names."""
    names = list(known)
    return invalid(
        f"There is no {what} {name!r:.100}.",
        f"{nearest(name, names)}The {what.partition(' ')[0]}s are: {', '.join(names)}.",
    )


@cache
def flags() -> dict[str, Flag]:
    """The options that have their own flag."""
    found: dict[str, Flag] = {}
    for heading, group in GROUPS.items():
        for name, kind in get_type_hints(group).items() if group not in (None, SetOptions) else ():
            is_many = get_origin(kind) is Mapping
            flag = f"--{(name.removesuffix('s') if is_many else name).replace('_', '-')}"
            metavar = None if kind is bool or get_origin(kind) is Literal else "N" if kind is int else "NAME"
            found[name] = Flag(kind, heading, flag, _METAVARS.get(name, metavar))
    return found


@cache
def help_of(name: str) -> str:
    """The help of an option, with its default."""
    helps = {key: text for group in GROUPS.values() if group for key, text in field_docs(group).items()}
    default = default_options().get(name)
    is_text = isinstance(default, str | int) and not isinstance(default, bool) and default != ""
    return f"{helps[name]} [default: {default}]" if is_text else helps[name]


def settable() -> dict[str, str]:
    """The keys of `--set` with their help: options without a flag, and settings of a generation."""
    return field_docs(SetOptions) | GENERATION


def job_of(options: Mapping[str, Any], owner: str = "") -> tuple[JobSpec, SubmitOptions]:
    """Divides options, as `read_options` returns them, into the job's spec and the other options. Raises
    `config.invalid`."""
    given = {"input_format": "auto", **options}
    asked = {**given.pop("generation", {}), **_popped(given, OWN_OPTION)}
    if voices := given.pop("voice_of", None):
        asked["roles"] = {role: {"voice": voice} for role, voice in voices.items()}
    generation = checked_generation(asked)
    own: Options = {name: given.pop(name, False) or msgspec.UNSET for name in ("pack", "timestamps")}
    own |= {"model": str(given.pop("model", DEFAULT_MODEL))}
    by_speaker = given.pop("voices_by", "dialogue") == "speaker"
    balance = given.pop("balance", False)
    if (voices := given.pop("voices", None)) is not None:
        from jobs.voices import read_pool

        own["pool"], given["recordings"] = read_pool(voices, balance=balance, by_speaker=by_speaker)
    elif by_speaker or balance:
        raise invalid("There is no pool of voices.", "Give its voices with --voices.")
    quality = asked_quality(given)
    for name in given.keys() & {"keep", "drop"}:
        names = given[name]
        given[name] = [one.strip() for one in names.split(",")] if isinstance(names, str) else [*names]
    output = given.pop("output", AUDIO)
    if output == "codes" and quality is not None:
        quality = checks_of_codes(quality)
    if output == AUDIO and quality is not None and "repetition" in quality.bounds:
        raise invalid("The check `repetition` needs codes.", "Make both with `--output both`.")
    reading = Reading(voices=given.pop("voice_for", None), **_popped(given, Reading.__struct_fields__))
    own |= {} if output == AUDIO else {"output": output}
    if (lexicon := given.pop("lexicon", None)) is not None:
        from jobs.spoken_text import read_lexicon

        own["lexicon"] = read_lexicon(Path(lexicon))
    own |= _popped(given, JobSpec.__struct_fields__)
    spec = JobSpec(generation=generation, quality=quality, reading=reading, **own)
    return spec, SubmitOptions(owner=owner, **given)


def asked_quality(given: Options) -> Quality | None:
    """Removes the options of the checks, and returns their `quality`. Raises `config.invalid`."""
    changes = [*given.pop("qa_set", ())]
    for name in ("sample", "max_failure_rate"):
        if (share := given.pop(f"qa_{name}", None)) is not None:
            changes.append(f"{name}={share}")
    return quality_of(given.pop("qa", DEFAULT), given.pop("qa_config", None), changes)


def _popped(given: Options, names: Iterable[str]) -> Options:
    """Removes and returns the options with these names."""
    return {name: given.pop(name) for name in names if name in given}


def options_of(spec: JobSpec, job: Job | SubmitOptions) -> Options:
    """The options that a job was made with, except those of its checks and its idempotency key; None: not given or
    not known."""
    reading = spec.reading or Reading()
    found = {
        name: next(
            (getattr(owner, name) for owner in (spec, reading, spec.generation, job) if hasattr(owner, name)),
            None,
        )
        for name in hints()
        if not name.startswith("qa") and name != "idempotency_key"
    }
    found = {name: None if value is msgspec.UNSET else value for name, value in found.items()}
    generation = {
        name: value for name, value in msgspec.to_builtins(spec.generation).items() if name in GENERATION
    }
    labels = dict(job.labels)
    return found | {
        "voice_of": {
            role: own.voice for role, own in (spec.generation.roles or {}).items() if own.voice is not None
        },
        "voice_for": reading.voices,
        "keep": None if reading.keep is None else ",".join(reading.keep),
        "drop": None if reading.drop is None else ",".join(reading.drop),
        "voices": ",".join(
            f"{name}={repr(weight).removesuffix('.0')}" for name, weight in spec.pool.weights.items()
        )
        if spec.pool
        else None,
        "output": spec.output or AUDIO,
        "voices_by": "speaker" if spec.pool and spec.pool.by_speaker else "dialogue",
        "balance": bool(spec.pool and spec.pool.balance),
        # Its file is not known.
        "lexicon": None,
        "generation": generation,
        "speak": "auto" if spec.speak == "answer" else spec.speak,
        "input_format": labels.pop(INPUT_FORMAT, "auto"),
        "labels": labels,
    }


def default_options() -> Options:
    """The defaults of the options."""
    return options_of(JobSpec(DEFAULT_MODEL), SubmitOptions()) | {"qa": DEFAULT}


def user_name() -> str:
    """The name of the user; empty if unknown."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


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
    if any(one != Generation(voice=one.voice) for one in (job.spec.generation.roles or {}).values()):
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
    made = options_of(job.spec, job)
    defaults = default_options()
    known = flags()
    for name, value in {**made.pop("generation"), **made}.items():
        if value is None or (value == defaults.get(name) and name != "model"):
            continue
        if name not in known:
            yield from ("--set", f"{name}={value}")
        elif isinstance(value, Mapping):
            for key, one in sorted(value.items()):
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
        here = f"{path}{key}"
        old = before.get(key)
        new = after.get(key)
        is_limit = here.count(".") == _LONGEST_KEY_DOTS
        if old == new and (key in before) == (key in after):
            continue
        if key not in after:
            yield here, None if is_limit else False
        elif isinstance(new, Mapping) and not is_limit and (new or old):
            yield from _changes(old or {}, new, f"{here}.")
        else:
            yield here, new

"""What one may say about a job in Python, and the check of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from jobs.input_format import AskedFormat
from jobs.turns import Speak
from pipelines.errors import ConfigError, ErrorCode, nearest
from pipelines.request import Generation, SpokenRole


class JobOptions(TypedDict, total=False):
    """What one may say about a job: the options of `nightjar run` and `nightjar submit`, with their defaults."""

    #: Name of a model, or the folder of a checkpoint.
    model: str | Path
    voice: str
    language: str
    instruct: str
    #: Role (`user`, `assistant`) -> voice.
    voice_of: Mapping[SpokenRole, str]
    #: Speaker -> voice; `*` is every other speaker.
    voice_for: Mapping[str, str]
    #: Other keys of `generation`, such as `temperature` or `max_seconds`.
    generation: Mapping[str, Any]
    speak: Speak
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    #: `wav`, `flac`, `mp3` or `opus`.
    format: str
    #: Hz of the audio, 8000 to 48000; without it the model's own rate.
    sample_rate: int
    #: `off`, `basic` or `strict`; `qa_config` is a TOML file with changes, `qa_set` changes such as `bounds.pause.high=2`.
    qa: Literal["off", "basic", "strict"]
    qa_config: str | Path
    qa_set: Sequence[str]
    #: Only the first records, or so many of all, chosen by `seed`.
    limit: Annotated[int, Field(ge=1)]
    sample: Annotated[int, Field(ge=1)]
    #: Field -> column of a table, such as `{"text": "sentence"}`.
    columns: Mapping[str, str]
    input_format: AskedFormat
    on_error: Literal["skip", "abort"]
    pack: bool
    name: str
    labels: Mapping[str, str]
    priority: Annotated[int, Field(ge=-100, le=100)]
    weight: Annotated[int, Field(ge=1, le=1000)]
    max_attempts: Annotated[int, Field(ge=1, le=100)]
    max_in_flight: Annotated[int, Field(ge=1)]
    error_budget: Annotated[float, Field(ge=0, le=1)]
    idempotency_key: Annotated[str, Field(pattern=r"\S")]


def check_type(name: str, value: object, kinds: type | tuple[type, ...], words: str) -> None:
    """Raises `config.invalid` for an argument of another type than these; True and False are no numbers."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        message = f"The argument `{name}` is {value!r:.100}."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, f"Give {words}; docs/python.md says what there is.")


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error of a name that there is not, with the nearest and all that there are."""
    names = list(known)
    advice = f"{nearest(name, names)}The {what.partition(' ')[0]}s are: {', '.join(names)}."
    return ConfigError(ErrorCode.CONFIG_INVALID, f"There is no {what} {name!r:.100}.", advice)


def checked_options(options: JobOptions) -> dict[str, Any]:
    """The options that are given; None counts as not given. Raises `config.invalid` for one that does not exist or cannot be used."""
    given = plain_numbers({name: value for name, value in options.items() if value is not None})
    try:
        found = _model().model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # What follows the option is a key, or a type that was tried.
        inside = isinstance(given.get(str(first["loc"][0])), Mapping)
        name = ".".join(map(str, first["loc"][: 2 if inside else 1]))
        if first["type"] == "extra_forbidden":
            raise unknown_name("option", name, JobOptions.__annotations__) from None
        said = "Input should be a list" if first["type"] == "sequence_str" else first["msg"]
        message = f"The option {name} is {first['input']!r:.100}: {said}."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Correct it; docs/python.md says what the options are.") from None
    values = {name: getattr(found, name) for name in given}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def checked_generation(asked: Mapping[str, Any]) -> Generation:
    """The settings of a `generation`. Raises `config.invalid` for a key that does not exist, and for a value of a wrong type."""
    try:
        return msgspec.convert(plain_numbers(asked), Generation)
    except msgspec.ValidationError as error:
        if unknown := sorted(asked.keys() - set(Generation.__struct_fields__)):
            raise unknown_name("key of `generation`", unknown[0], Generation.__struct_fields__) from None
        known = ", ".join(Generation.__struct_fields__)
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"The generation is not valid: {error}.", f"Its keys are: {known}.") from None


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with NumPy's numbers as Python's: those of an array are as good as typed ones."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


@cache
def _model() -> type[BaseModel]:
    fields: dict[str, Any] = {name: (hint, None) for name, hint in get_type_hints(JobOptions, include_extras=True).items()}
    return create_model("JobOptions", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)

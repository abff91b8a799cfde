"""Options of a pipeline as a person names them. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import msgspec

from pipelines.errors import ConfigError, ErrorCode, nearest

#: Of what there must be one at least.
Count = Annotated[int, msgspec.Meta(ge=1)]

T = TypeVar("T")

#: msgspec crashes where two threads use a class for the first time at once.
_converting = threading.Lock()


def read_options(kind: type[T], given: Mapping[str, Any], *others: str) -> T:
    """The dataclass `kind` of options by name. `others`: options that a person may give too, and that are
    not read here.

    Raises `ConfigError` (`config.invalid`) for an option that it does not have, or a value that this one
    cannot have.
    """
    known = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(set(given) - known):
        names = sorted({*known, *others})
        advice = f"{nearest(unknown[0], names)}Options are: {', '.join(names)}."
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"Unknown option {unknown[0]!r}.", advice)
    try:
        with _converting:
            return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, f"An option has a wrong value: {error}.", "Correct it, or leave it out."
        ) from error

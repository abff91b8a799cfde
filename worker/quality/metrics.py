"""Meters measure a draw with a model of their own. There are built-in ones and those of other packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from jobs.checks import ENTRY_POINT_GROUP, METERS, Option, known_meters
from pipelines.errors import ErrorCode, ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Utterance:
    """The speech of one draw, as a meter gets it."""

    #: float32 [samples], mono, within [-1, 1].
    samples: NDArray[np.float32]
    sample_rate: int
    #: What it should say.
    text: str
    #: Of the request; empty where it names none.
    language: str = ""
    #: The encoded file of the voice that was cloned.
    reference: bytes | None = None

    def resampled(self, sample_rate: int) -> NDArray[np.float32]:
        """The samples [samples] at another rate."""
        import soxr

        return self.samples if self.sample_rate == sample_rate else soxr.resample(self.samples, self.sample_rate, sample_rate)


class Reading(NamedTuple):
    """One score of a draw."""

    value: float
    detail: str = ""
    #: False: the speech is too short to judge it by this score, so the score is only recorded.
    judged: bool = True

    @classmethod
    def of(cls, found: tuple[float, str] | Reading) -> Reading:
        """What a meter returned as a reading."""
        return found if isinstance(found, Reading) else cls(*found)


#: Name of a score -> its reading, or only (value, detail). A score that cannot be measured is left out, and decides nothing.
Readings = Mapping[str, tuple[float, str] | Reading]


class Meter(Protocol):
    """A loaded meter; called from one thread. Equal samples must give equal readings, because verdicts are part of a job's result."""

    def measure(self, utterance: Utterance) -> Readings: ...


#: The `open_meter` of a built-in module, or what an entry point of the group `nightjar.meters` names.
MeterFactory = Callable[..., Meter]


def open_meter(name: str, options: Mapping[str, Option]) -> Meter:
    """The meter of this name with its options of the spec.

    Raises `ModelError`: `model.unknown` for a name nobody knows, `config.missing_library` where its libraries are not installed,
    `model.bad_checkpoint` for weights or options it cannot use, `model.unreachable` for weights that cannot be fetched now.
    """
    built_in = METERS.get(name)
    try:
        if built_in is not None:
            factory = cast(MeterFactory, importlib.import_module(f"worker.quality.{name}").open_meter)
        else:
            found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
            if not found:
                known = ", ".join(known_meters())
                raise ModelError(ErrorCode.MODEL_UNKNOWN, f"There is no meter {name[:80]!r} on this worker.", f"It has: {known}.")
            factory = cast(MeterFactory, found[0].load())
        return factory(**options)
    except ImportError as error:
        raise missing_library(name, error) from error
    except TypeError as error:
        raise ModelError(
            ErrorCode.MODEL_BAD_CHECKPOINT,
            f"The meter {name} does not take its options: {error}.",
            "Correct `meters` of the quality config.",
        ) from error


def missing_library(name: str, error: ImportError) -> ModelError:
    """The error of a meter whose library does not import (`config.missing_library`)."""
    built_in = METERS.get(name)
    advice = built_in.advice if built_in is not None else "Install what the package of this meter needs."
    return ModelError(ErrorCode.CONFIG_MISSING_LIBRARY, f"The meter {name} needs the library {error.name or error}.", advice)

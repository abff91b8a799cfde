"""Meters: what judges a draw with a model of its own. Built-in ones, and those of packages that register theirs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, cast

from jobs.quality import Option
from pipelines.errors import ErrorCode, ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ENTRY_POINT_GROUP = "nightjar.meters"
_QA = "Install it with: pip install 'nightjar-speech[qa]'."
#: Name -> (module, what installs its libraries).
BUILT_IN: dict[str, tuple[str, str]] = {
    "asr": ("worker.quality.asr", _QA),
    "silero": ("worker.quality.silero", _QA),
    "dnsmos": ("worker.quality.dnsmos", "Install it with: pip install speechmos==0.0.1.1."),
    "distillmos": (
        "worker.quality.distillmos",
        "Install it with: pip install --no-deps distillmos==0.9.1 xls-r-sqa==0.1.0 (and torch, of the extra `gpu`).",
    ),
    "speaker": (
        "worker.quality.speaker",
        "Install it with: pip install --no-deps resemblyzer==0.1.4 and pip install webrtcvad-wheels librosa (and torch).",
    ),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One draw as a meter gets it."""

    #: float32 [samples], mono, within [-1, 1].
    samples: NDArray[np.float32]
    sample_rate: int
    #: What it should say.
    text: str
    #: Of the request; empty where it names none.
    language: str = ""
    #: The encoded file of the voice that was cloned.
    reference: bytes | None = None


#: Name of a score -> (value, detail). A value that cannot be measured is left out, and nothing depends on it then.
Readings = Mapping[str, tuple[float, str]]


class Meter(Protocol):
    """A loaded meter; called from one thread. Equal samples must give equal readings: verdicts are part of a job's result."""

    def measure(self, sample: Sample) -> Readings: ...


#: What a built-in module has as `open_meter`, and an entry point of the group `nightjar.meters` names.
MeterFactory = Callable[..., Meter]


def open_meter(name: str, options: Mapping[str, Option]) -> Meter:
    """The meter of this name with its options of the spec.

    Raises `ModelError`: `model.unknown` for a name nobody knows, `model.missing_extra` where its libraries are not installed,
    `model.bad_checkpoint` for weights or options it cannot use.
    """
    built_in = BUILT_IN.get(name)
    try:
        if built_in is not None:
            factory = cast(MeterFactory, importlib.import_module(built_in[0]).open_meter)
        else:
            found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
            if not found:
                known = ", ".join(sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))}))
                raise ModelError(ErrorCode.MODEL_UNKNOWN, f"There is no meter {name[:80]!r} on this worker.", f"It has: {known}.")
            factory = cast(MeterFactory, found[0].load())
        return factory(**options)
    except ImportError as error:
        advice = built_in[1] if built_in is not None else "Install what the package of this meter needs."
        missing = getattr(error, "name", None) or error
        raise ModelError(ErrorCode.MODEL_MISSING_EXTRA, f"The meter {name} needs the library {missing}.", advice) from error
    except TypeError as error:
        raise ModelError(
            ErrorCode.MODEL_BAD_CHECKPOINT,
            f"The meter {name} does not take its options: {error}.",
            "Correct `meters` of the quality config.",
        ) from error

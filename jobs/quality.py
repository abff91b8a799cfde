"""The `quality` part of a job's spec: which checks its speech has to pass, what they allow, and what a failure leads to.

Everything that decides is frozen in the spec at submit, so an item's verdict does not depend on its shard, on the order of
the others or on a retry: bounds that were learned come from a calibration, never from the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from jobs.meters import BUILT_IN, added_meters, known_meters
from pipelines.duration import Pace
from pipelines.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path

MAX_DRAWS = 20
#: Parts of the longest key, as in `bounds.wer.high`.
_KEY_PARTS = 3

#: What is scored without a meter.
CHEAP_SCORES = ("ended", "duration", "clipped", "silence", "pause", "loudness")

#: What a failed score ends an item with; scores of other packages' meters have `qa.score`.
SCORE_CODES: dict[str, ErrorCode] = {
    "ended": ErrorCode.SYNTH_NO_EOS,
    "duration": ErrorCode.QA_DURATION,
    "clipped": ErrorCode.QA_CLIPPED,
    "silence": ErrorCode.QA_SILENCE,
    "pause": ErrorCode.QA_SILENCE,
    "loudness": ErrorCode.QA_LOUDNESS,
    "wer": ErrorCode.QA_WER,
    "cer": ErrorCode.QA_WER,
    "distillmos": ErrorCode.QA_MOS,
    "dnsmos": ErrorCode.QA_MOS,
    "similarity": ErrorCode.QA_SPEAKER,
}

Option = str | int | float | bool


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a score may be; None: anything on that side."""

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


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checks of a job's speech; part of its frozen spec."""

    #: Most draws of an item, the first one included.
    draws: int = 3
    #: What becomes of an item none of whose draws passed: its best draw goes to quarantine and it fails, or is kept.
    on_fail: Literal["quarantine", "keep"] = "quarantine"
    #: Cuts silence off both ends, down to `trim_keep_ms`, before anything is measured.
    trim: bool = False
    trim_keep_ms: int = 100
    #: Who tells speech from silence; `silero` is the energy VAD where its library is missing, and the score says so.
    vad: Literal["energy", "silero"] = "energy"
    #: What scores may be, by name; a score without a bound is only noted. `duration` (length over the expected one) has the
    #: bounds of its pace too.
    bounds: dict[str, Bound] = {}
    #: Learned lengths; the first that fits an item's voice and language counts. Without one, length is not looked at.
    paces: tuple[Pace, ...] = ()
    #: Meters to run, by name, with their options.
    meters: dict[str, dict[str, Option]] = {}


_CHEAP = {
    "ended": Bound(low=1.0),
    "duration": Bound(),
    "clipped": Bound(high=0.001),
    "silence": Bound(high=0.75),
    "pause": Bound(high=3.0),
    "loudness": Bound(low=-55.0, high=-5.0),
}
PRESETS: dict[str, Quality | None] = {
    "off": None,
    "basic": Quality(bounds=_CHEAP),
    "strict": Quality(
        vad="silero",
        bounds={
            **_CHEAP,
            "silence": Bound(high=0.6),
            "pause": Bound(high=2.0),
            "loudness": Bound(low=-40.0, high=-10.0),
            "wer": Bound(high=0.5),
            "cer": Bound(high=0.3),
            "distillmos": Bound(low=2.5),
        },
        meters={"asr": {}, "distillmos": {}},
    ),
}
DEFAULT = "basic"


def quality_of(preset: str, config: Path | None = None, overrides: Sequence[str] = ()) -> Quality | None:
    """The checks of a preset, changed by a TOML file and then by `KEY=VALUE` with dotted keys (`bounds.wer.high=0.2`).

    A whole bound or meter is taken out with `false` in its place; the preset's bounds of a meter go with it. Raises `ConfigError`
    (`config.invalid`).
    """
    base = PRESETS[preset]
    if base is None:
        if config is not None or overrides:
            raise _invalid("Quality checks are off, and they are configured too.", "Choose `--qa basic` or `--qa strict`.")
        return None
    tree = cast("dict[str, Any]", msgspec.to_builtins(base))
    changes = [*([] if config is None else [_read(config)]), *map(_override, overrides)]
    for change in changes:
        _merge(tree, change)
    if tree.get("vad") == "silero" and _taken_out("silero", changes):
        raise _invalid("`vad` is `silero`, and the meter silero is taken out.", "Set `vad` to `energy`, as with `--qa-set vad=energy`.")
    _leave_out_bounds(tree, changes)
    try:
        quality = msgspec.convert(tree, Quality)
    except msgspec.ValidationError as error:
        raise _invalid(f"The quality checks cannot be used: {error}.", "See docs/quality.md for the keys.") from None
    return checked(quality)


def checked(quality: Quality) -> Quality:
    """The same checks; raises `ConfigError` for values that make no sense."""
    if _has_infinite(msgspec.to_builtins(quality)):
        raise _invalid("The quality checks hold a number that is infinite or none.", "Take a bound out with `false` in its place.")
    if not 1 <= quality.draws <= MAX_DRAWS:
        raise _invalid(f"`draws` is {quality.draws}.", f"Use 1 to {MAX_DRAWS}.")
    if quality.trim_keep_ms < 0:
        raise _invalid(f"`trim_keep_ms` is {quality.trim_keep_ms}.", "Use 0 or more.")
    for name, bound in quality.bounds.items():
        if bound.low is not None and bound.high is not None and bound.low > bound.high:
            raise _invalid(f"The bound of `{name}` is empty: {bound.low} to {bound.high}.", "Let `low` be at most `high`.")
    for pace in quality.paces:
        if not (0 <= pace.low <= pace.high and pace.seconds_per_unit >= 0 and pace.base_seconds >= 0 and pace.slack_seconds >= 0):
            raise _invalid("A pace has a negative number, or its `low` is above its `high`.", "Make it with `nightjar calibrate`.")
        if not pace.base_seconds + pace.seconds_per_unit:
            raise _invalid("A pace expects speech of no length: both its seconds are 0.", "Make it with `nightjar calibrate`.")
    _check_names(quality)
    return quality


def _check_names(quality: Quality) -> None:
    """A name that nothing answers to would check nothing, and nobody would see it."""
    own = quality.meters.keys() - BUILT_IN.keys()
    if unknown := sorted(own - added_meters() if own else ()):
        raise _invalid(f"There is no meter {unknown[0][:80]!r}.", f"There are: {', '.join(known_meters())}.")
    if own:
        # What another package's meter scores is known when it has measured.
        return
    scores = {*CHEAP_SCORES, *(score for name in quality.meters for score in BUILT_IN[name].scores)}
    for name in quality.bounds:
        if name not in scores:
            meters = [meter for meter, card in BUILT_IN.items() if name in card.scores]
            message = f"There is a bound of `{name[:80]}`, which nothing measures."
            if meters:
                raise _invalid(message, f"Add the meter with `[meters.{meters[0]}]`, or `--qa-set meters.{meters[0]}={{}}`.")
            raise _invalid(message, f"The scores of these checks are: {', '.join(sorted(scores))}.")


def _has_infinite(value: Any) -> bool:
    """JSON has no infinity and no NaN, and the spec is kept as JSON."""
    if isinstance(value, Mapping):
        return any(map(_has_infinite, cast("Mapping[str, Any]", value).values()))
    if isinstance(value, list | tuple):
        return any(map(_has_infinite, cast("Sequence[Any]", value)))
    return isinstance(value, float) and not math.isfinite(value)


def code_of(score: str) -> ErrorCode:
    """What an item ends with whose score of this name no draw passed."""
    return SCORE_CODES.get(score, ErrorCode.QA_SCORE)


def _read(path: Path) -> dict[str, Any]:
    # `nightjar status` reads this module, and no file.
    import tomllib

    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise _invalid(f"The quality config {path} cannot be read: {error.strerror}.", "Give a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(f"The quality config {path} is not TOML: {error}.", "Correct it.") from None


def _override(text: str) -> dict[str, Any]:
    import json

    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise _invalid(f"The quality setting {text[:80]!r} is not KEY=VALUE.", "As in bounds.wer.high=0.2.")
    try:
        leaf = json.loads(value)
    except (ValueError, RecursionError):
        leaf = value
    for name in reversed(names):
        leaf = {name: leaf}
    return cast("dict[str, Any]", leaf)


def _taken_out(meter: str, changes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last change that names the meter takes it out."""
    named = [meters[meter] for change in changes if isinstance(meters := change.get("meters"), Mapping) and meter in meters]
    return bool(named) and named[-1] is False


def _leave_out_bounds(tree: dict[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Takes bounds that no change named out of the tree where the changes took out their meter."""
    meters, bounds = tree.get("meters"), tree.get("bounds")
    if not isinstance(meters, dict) or not isinstance(bounds, dict):
        return
    named = {name for change in changes if isinstance(chosen := change.get("bounds"), Mapping) for name in chosen}
    scores = {*CHEAP_SCORES, *(score for name in meters if name in BUILT_IN for score in BUILT_IN[name].scores)}
    for name in set(bounds) - named - scores:
        del bounds[name]


def _merge(into: dict[str, Any], values: Mapping[str, Any], depth: int = 0) -> None:
    if depth >= _KEY_PARTS:
        raise _invalid(f"A key of the quality checks has more than {_KEY_PARTS} parts.", "See docs/quality.md for the keys.")
    for key, value in values.items():
        old = into.get(key)
        if isinstance(value, Mapping):
            child: dict[str, Any] = cast("dict[str, Any]", old) if isinstance(old, dict) else {}
            into[key] = child
            _merge(child, cast("Mapping[str, Any]", value), depth + 1)
        elif value is False and depth == 1:
            into.pop(key, None)
        else:
            into[key] = value


def _invalid(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)

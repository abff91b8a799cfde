"""The `quality` part of a job's spec: the checks that its speech has to pass, their bounds, and what follows from a failure.

All of it is frozen in the spec at submit. So the verdict on an item does not depend on its shard, on the order of the items or on a
retry. Learned bounds come from a calibration, never from the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from jobs.checks import CHECKS, METERS, Bound, Option, added_meters, known_meters, scores_with, strict_meters
from pipelines.duration import Pace
from pipelines.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path

MAX_DRAWS = 20
#: Parts of the longest key, as in `bounds.wer.high`.
_KEY_PARTS = 3


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checks of a job's speech; part of its frozen spec."""

    #: The maximum number of draws of an item, the first included.
    draws: int = 3
    #: For an item without a draw that passed: put its best draw into quarantine and fail the item, or keep the best draw.
    on_fail: Literal["quarantine", "keep"] = "quarantine"
    #: Whether silence at both ends is cut, down to `trim_keep_ms`, before anything is measured.
    trim: bool = False
    trim_keep_ms: int = 100
    #: What tells speech from silence. Where Silero's library is missing the energy detector does, and the score says so.
    vad: Literal["energy", "silero"] = "energy"
    #: Bounds by the name of the score; a score without a bound is only recorded. `duration` has the bounds of its pace too.
    bounds: dict[str, Bound] = {}
    #: Learned lengths; the first that fits an item's voice and language counts. Without one, length is not checked.
    paces: tuple[Pace, ...] = ()
    #: Meters to run, by name, with their options.
    meters: dict[str, dict[str, Option]] = {}


PRESETS: dict[str, Quality | None] = {
    "off": None,
    "basic": Quality(bounds={name: check.basic for name, check in CHECKS.items() if check.basic is not None}),
    "strict": Quality(
        vad="silero",
        bounds={name: check.strict for name, check in CHECKS.items() if check.strict is not None},
        meters=strict_meters(),
    ),
}
DEFAULT = "basic"


def quality_of(preset: str, config: Path | None = None, overrides: Sequence[str] = ()) -> Quality | None:
    """The checks of a preset, changed by a TOML file and then by `KEY=VALUE` with dotted keys (`bounds.wer.high=0.2`).

    `false` removes a whole bound or meter; the preset's bounds of that meter go with it. Raises `ConfigError` (`config.invalid`).
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
            raise _invalid("A pace has a negative number, or its `low` is above its `high`.", "See docs/quality.md.")
        if not pace.base_seconds + pace.seconds_per_unit:
            raise _invalid("A pace expects speech of no length: both its seconds are 0.", "See docs/quality.md.")
    _check_names(quality)
    return quality


def _check_names(quality: Quality) -> None:
    """Refuses names that no score or meter has: they would check nothing, and nobody would notice."""
    own = quality.meters.keys() - METERS.keys()
    if unknown := sorted(own - added_meters() if own else ()):
        raise _invalid(f"There is no meter {unknown[0][:80]!r}.", f"There are: {', '.join(known_meters())}.")
    if own:
        # The scores of another package's meter are known only after it has measured.
        return
    scores = scores_with(quality.meters)
    for name in quality.bounds:
        if name not in scores:
            message = f"There is a bound of `{name[:80]}`, which nothing measures."
            if name in CHECKS and (meter := CHECKS[name].meter) is not None:
                raise _invalid(message, f"Add the meter with `[meters.{meter.name}]`, or `--qa-set meters.{meter.name}={{}}`.")
            raise _invalid(message, f"The scores of these checks are: {', '.join(sorted(scores))}.")


def _has_infinite(value: Any) -> bool:
    """JSON has no infinity and no NaN, and the spec is kept as JSON."""
    if isinstance(value, Mapping):
        return any(map(_has_infinite, cast("Mapping[str, Any]", value).values()))
    if isinstance(value, list | tuple):
        return any(map(_has_infinite, cast("Sequence[Any]", value)))
    return isinstance(value, float) and not math.isfinite(value)


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
    for name in set(bounds) - named - scores_with(meters):
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

"""The checks that need no model: what can be told of every draw in microseconds, and what no job's speech may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from jobs.ledger.records import Score
from jobs.quality import Quality
from pipelines.duration import pace_of
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Generation, Speech
from pipelines.vad import FRAME_SECONDS, activity, frame_powers
from worker.quality.metrics import Reading, Readings

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: Samples this near to the peak may be clipped ones.
_NEAR_PEAK = np.float32(0.98)
_NO_LEVEL = -120.0


def cheap_scores(speech: Speech, quality: Quality, text: str, generation: Generation) -> dict[str, Score]:
    """`ended`, `clipped`, `silence`, `pause`, `loudness`, and `duration` where lengths were learned; `passed` by the bounds.

    `speech` holds finite samples, at least one. `text` is what it says, `generation` names its voice and language. Each call
    of numpy may hand the interpreter to another thread, so there are few.
    """
    samples, rate = speech.samples, speech.sample_rate
    powers = frame_powers(samples, rate)
    sounding, pause, power = activity(powers)
    values: Readings = {
        "ended": (_ended(speech), ""),
        "clipped": (clipped_share(samples), ""),
        "silence": (1.0 - sounding / len(powers), "energy"),
        "pause": (pause * FRAME_SECONDS, "energy"),
        "loudness": _loudness(speech, power),
    }
    scores = judged(values, quality)
    pace = pace_of(quality.paces, generation.voice, generation.language)
    if pace is not None and text:
        seconds, expected = len(samples) / rate, pace.expected_seconds(text)
        ratio, bound = seconds / expected, quality.bounds.get("duration")
        passed = None if bound is None else pace.fits(seconds, expected, text) and bound.allows(ratio)
        scores["duration"] = Score(round(ratio, 4), passed, f"{expected:.2f} s expected")
    return scores


def judged(readings: Readings, quality: Quality) -> dict[str, Score]:
    """Readings as scores, each passed or not where the spec has a bound for it and there was enough to judge by."""
    bounds = quality.bounds
    scores: dict[str, Score] = {}
    for name, reading in readings.items():
        value, detail, judging = Reading.of(reading)
        bound = bounds.get(name) if judging else None
        scores[name] = Score(round(value, 4), None if bound is None else bound.allows(value), detail)
    return scores


def clipped_share(samples: NDArray[np.float32]) -> float:
    """Share of samples [samples] in the middle of a flat top: three equal values in a row near the peak.

    A flat top betrays clipping at any later gain; of a pure tone no three samples in a row are equal.
    """
    magnitude = np.abs(samples)
    peak = magnitude.max()
    if np.count_nonzero(magnitude == peak) < 3:
        return 0.0
    near = np.flatnonzero(magnitude >= peak * _NEAR_PEAK)
    row = (near[2:] - near[:-2] == 2) & (samples[near[2:]] == samples[near[:-2]]) & (samples[near[1:-1]] == samples[near[:-2]])
    return float(np.count_nonzero(row)) / len(samples)


def longest_pause(active: NDArray[np.bool_]) -> int:
    """Most frames in a row without sound between two with, of [frames]."""
    places = np.flatnonzero(active)
    return int(np.diff(places).max()) - 1 if len(places) > 1 else 0


def _ended(speech: Speech) -> float:
    """0 where a model was stopped at its limit before it ended by itself."""
    return 0.0 if "length" in (speech.meta.get("finish"), speech.meta.get("finish_reason")) else 1.0


def _loudness(speech: Speech, power: float) -> tuple[float, str]:
    """LUFS where the pipeline measured it, else the level in dBFS of the frames with sound, of this mean power."""
    lufs = speech.meta.get("loudness_lufs")
    if isinstance(lufs, float | int) and math.isfinite(lufs):
        return float(lufs), "lufs"
    return (10 * math.log10(power) if power else _NO_LEVEL), "rms"


#: -60 dBFS: below this peak a recording of speech holds none.
SILENT_PEAK = 1e-3


def check_speech(speech: Speech) -> None:
    """Raises `SynthesisError`: `synth.no_audio` for no samples, `synth.nan` for NaN or infinity, `synth.silent` for silence."""
    samples = speech.samples
    if len(samples) == 0:
        raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The engine returned no samples.")
    peak = max(float(samples.max()), -float(samples.min()))
    if not math.isfinite(peak):
        raise SynthesisError(ErrorCode.SYNTH_NAN, "The audio holds values that are not numbers.")
    if peak < SILENT_PEAK:
        raise SynthesisError(ErrorCode.SYNTH_SILENT, f"The audio is silent: its peak is {peak:.2g} of full scale.")

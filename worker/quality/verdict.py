"""The verdict on a draw, from checks that need no model and from readings of meters, and the choice of the best
rejected draw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from jobs.checks import OF_ENGINES, Bound, Quality, code_of
from jobs.ledger.records import Draw, Score
from pipelines.audio import FRAME_SECONDS, activity, frame_powers, peak
from pipelines.engine.runaway import repeated_seconds
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import Generation, Speech
from worker.quality.meters import Reading

#: Failures of the engine that another seed may avoid; other failures concern the attempt, not the draw.
REDRAWABLE = frozenset(
    {
        ErrorCode.SYNTH_NO_EOS,
        ErrorCode.SYNTH_RUNAWAY,
        ErrorCode.SYNTH_NO_AUDIO,
        ErrorCode.SYNTH_NAN,
        ErrorCode.SYNTH_SILENT,
    }
)
#: Those of `REDRAWABLE` that a sampling model may avoid with the next seed even after several equal failures.
_RANDOM = frozenset({ErrorCode.SYNTH_NO_EOS, ErrorCode.SYNTH_RUNAWAY, ErrorCode.SYNTH_NO_AUDIO})
#: Number of failed checks that is assumed for a draw without speech, so that its rank is after all others.
_NO_SPEECH = 1000
#: Peak below which a recording counts as silent: -60 dBFS.
SILENT_PEAK = 1e-3
#: Samples above this share of the peak may be clipped.
_NEAR_PEAK = np.float32(0.98)
#: Level in dBFS of speech without a frame that has sound.
_NO_LEVEL = -120.0


class CheckedDraw(NamedTuple):
    """A draw with its verdict."""

    record: Draw
    #: The speech to store; None if there is none.
    speech: Speech | None
    message: str
    #: (number of failed checks, distance from their bounds); smaller is better.
    rank: tuple[int, float]


@dataclass(frozen=True, slots=True)
class History:
    """The rejected draws of an item so far, and the best of them with its speech."""

    draws: tuple[Draw, ...] = ()
    best: CheckedDraw | None = None
    #: Total engine time of these draws.
    engine_ms: int = 0
    #: The message of the last draw.
    message: str = ""

    def ended_by(self, draw: CheckedDraw, sampled: bool) -> bool:
        """Whether a draw failed exactly like the previous one, so that another seed would not help. `sampled`: the model
        samples, so that a failure without speech does not predict the next draw."""
        now = draw.record
        if not self.draws or (sampled and not now.scores and now.code in _RANDOM):
            return False
        return draw.message == self.message and now == replace(self.draws[-1], draw=now.draw, seed=now.seed)

    def after(self, draw: CheckedDraw, engine_ms: int) -> History:
        """The history with one more draw. Of draws with equal rank the earlier one is better."""
        best = draw if self.best is None or draw.rank < self.best.rank else self.best
        return History((*self.draws, draw.record), best, self.engine_ms + engine_ms, draw.message)


def check_speech(speech: Speech) -> None:
    """Raises `SynthesisError`: `synth.no_audio` for no samples, `synth.nan` for NaN or infinity,
    `synth.silent` for silence. Of codes alone only their number is checked."""
    samples = speech.samples
    if len(samples) == 0:
        if speech.sample_count:
            return
        raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The engine returned no samples.")
    highest = peak(samples)
    if not math.isfinite(highest):
        raise SynthesisError(ErrorCode.SYNTH_NAN, "The audio contains values that are not finite numbers.")
    if highest < SILENT_PEAK:
        raise SynthesisError(
            ErrorCode.SYNTH_SILENT, f"The audio is silent: its peak is {highest:.2g} of full scale."
        )


def check_draw(
    number: int, seed: int, speech: Speech, quality: Quality, text: str, generation: Generation
) -> CheckedDraw:
    """The verdict of the checks that need no model: `ended`, `duration` if the pace of the voice is known, those of
    `OF_ENGINES` that the speech has, `clipped`, `silence`, `pause` and `loudness`. If several fail, the item gets the
    code of the first one. Of codes alone there are those of `OF_CODES`.

    `speech`: the speech as it would be stored; `text`: the requested text; `generation`: has the voice and the
    language. NumPy is called only a few times, because each call may switch threads.
    """
    try:
        check_speech(speech)
    except SynthesisError as error:
        return failed_draw(number, seed, error, speech if error.code is ErrorCode.SYNTH_SILENT else None)
    meta = speech.meta
    # A model that reached its limit did not end by itself.
    stopped = "length" in (meta.get("finish"), meta.get("finish_reason"))
    readings: dict[str, tuple[float, str] | Score] = {"ended": (0.0 if stopped else 1.0, "")}
    voice, language = generation.voice, generation.language
    pace = next((pace for pace in quality.paces if pace.applies_to(voice, language)), None)
    if pace is not None and text:
        seconds, expected = speech.sample_count / speech.sample_rate, pace.expected_seconds(text)
        ratio, bound = seconds / expected, quality.bounds.get("duration")
        passed = None if bound is None else pace.fits(seconds, expected, text) and bound.allows(ratio)
        readings["duration"] = Score(round(ratio, 4), passed, f"{expected:.2f} s expected")
    for name in OF_ENGINES:
        if isinstance(value := meta.get(name), float):
            readings[name] = value, ""
    if speech.codes is not None:
        frame_seconds = speech.frame_samples / speech.sample_rate
        readings["repetition"] = repeated_seconds(speech.codes[:, 0], frame_seconds), ""
    if len(speech.samples):
        powers = frame_powers(speech.samples, speech.sample_rate)
        sounding, pause, power = activity(powers)
        # In LUFS if the pipeline measured it, else the level of the frames with sound in dBFS.
        loudness, unit = meta.get("loudness_lufs"), "lufs"
        if not isinstance(loudness, float | int) or not math.isfinite(loudness):
            loudness, unit = 10 * math.log10(power) if power else _NO_LEVEL, "rms"
        readings |= {
            "clipped": (clipped_share(speech.samples), ""),
            "silence": (1.0 - sounding / len(powers), "energy"),
            "pause": (pause * FRAME_SECONDS, "energy"),
            "loudness": (float(loudness), unit),
        }
    return judged(number, seed, speech, quality, readings)


def failed_draw(number: int, seed: int, error: NightjarError, speech: Speech | None = None) -> CheckedDraw:
    """The verdict on a draw without speech to measure."""
    record = Draw(number, seed, error.code, False, 0 if speech is None else speech.duration_ms, {})
    return CheckedDraw(record, speech, str(error), (_NO_SPEECH + (speech is None), 0.0))


def clipped_share(samples: NDArray[np.float32]) -> float:
    """Share of the samples [samples] that are in the middle of a flat top, that is, of three equal consecutive values
    near the peak.

    A flat top indicates clipping even if the gain was changed afterwards. A pure tone has no three equal consecutive
    samples.
    """
    equal = samples[1:] == samples[:-1]
    flat = equal[1:] & equal[:-1]
    # Most speech ends here, after one pass over its samples.
    if not flat.any():
        return 0.0
    magnitude = np.abs(samples)
    highest = magnitude.max()
    if np.count_nonzero(magnitude == highest) < 3:
        return 0.0
    flat &= magnitude[1:-1] >= highest * _NEAR_PEAK
    return float(np.count_nonzero(flat)) / len(samples)


def judged(
    number: int,
    seed: int,
    speech: Speech,
    quality: Quality,
    readings: Mapping[str, tuple[float, str] | Reading | Score],
    before: Mapping[str, Score] | None = None,
) -> CheckedDraw:
    """The verdict from scores. A reading passes or fails if it can be judged and the spec has a bound for it. Readings
    replace scores of the same name in `before`."""
    scores = dict(before or {})
    for name, found in readings.items():
        if isinstance(found, Score):
            scores[name] = found
            continue
        reading = found if isinstance(found, Reading) else Reading(*found)
        passed = reading.passes(quality.bounds.get(name))
        scores[name] = Score(round(reading.value, 4), passed, reading.detail)
    failed = [(name, score, quality.bounds[name]) for name, score in scores.items() if score.passed is False]
    code = code_of(failed[0][0]) if failed else None
    record = Draw(number, seed, code, kept=not failed, duration_ms=speech.duration_ms, scores=scores)
    # A duration is judged mainly by the voice's pace, so its distance is measured from the expected ratio of 1.
    excess = sum(
        abs(score.value - 1.0) if name == "duration" else bound.excess(score.value)
        for name, score, bound in failed
        if score.value is not None
    )
    return CheckedDraw(record, speech, "; ".join(_explained(*one) for one in failed), (len(failed), excess))


def _explained(name: str, score: Score, bound: Bound) -> str:
    wanted = f", allowed: {limits}" if (limits := str(bound)) else ""
    detail = f" ({score.detail[:200]})" if score.detail else ""
    return f"`{name}` is {score.value}{wanted}{detail}."

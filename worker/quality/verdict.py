"""Draws of one item: what the checks say of each, and which is the best of those that did not pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from jobs.checks import Bound, Option, code_of
from jobs.ledger.records import Draw, Score
from jobs.quality import Quality
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import Generation, Speech
from pipelines.vad import trim_silence
from worker.quality.checks import cheap_scores, check_speech, judged
from worker.quality.metrics import Readings

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Failures of the engine that another seed may mend; other failures are the attempt's, not the draw's.
REDRAWN = frozenset({ErrorCode.SYNTH_NO_EOS, ErrorCode.SYNTH_NO_AUDIO, ErrorCode.SYNTH_NAN, ErrorCode.SYNTH_SILENT})

#: Of these a model that samples may be rid with the next seed, however often they came.
_BY_CHANCE = frozenset({ErrorCode.SYNTH_NO_EOS, ErrorCode.SYNTH_NO_AUDIO})

#: Comes after every draw that at least holds speech.
_NO_SPEECH = 1000


@dataclass(frozen=True, slots=True)
class CheckedDraw:
    """A draw with its verdict."""

    record: Draw
    #: As it would be stored; None where there is nothing to store.
    speech: Speech | None
    message: str = ""
    #: (checks failed, how far outside the bounds): the less the better.
    rank: tuple[int, float] = (0, 0.0)

    @property
    def passed(self) -> bool:
        return self.record.code is None


@dataclass(frozen=True, slots=True)
class History:
    """The draws of an item that did not pass so far, and the best of them with its speech."""

    draws: tuple[Draw, ...] = ()
    best: CheckedDraw | None = None
    #: Engine time of them all.
    engine_ms: int = 0
    #: What was said of the last one.
    message: str = ""

    def ended_by(self, draw: CheckedDraw, sampled: bool) -> bool:
        """Whether a draw after these failed as the one before it did, so that no other seed will mend it. `sampled`: the model
        takes chances, so that a failure without speech to measure says nothing of the next draw."""
        if not self.draws or (sampled and not draw.record.scores and draw.record.code in _BY_CHANCE):
            return False
        last, now = self.draws[-1], draw.record
        return (last.code, last.duration_ms, last.scores, self.message) == (now.code, now.duration_ms, now.scores, draw.message)

    def after(self, draw: CheckedDraw, engine_ms: int) -> History:
        """With one more. Of equally bad draws the earlier one is the better."""
        best = draw if self.best is None or draw.rank < self.best.rank else self.best
        return History((*self.draws, draw.record), best, self.engine_ms + engine_ms, draw.message)


def meters_of(quality: Quality) -> Mapping[str, Mapping[str, Option]]:
    """The meters that a draw which passed the cheap checks goes to."""
    return {"silero": {}, **quality.meters} if quality.vad == "silero" else quality.meters


def trimmed(speech: Speech, quality: Quality) -> Speech:
    """The speech as it is stored."""
    if not quality.trim:
        return speech
    return replace(speech, samples=trim_silence(speech.samples, speech.sample_rate, quality.trim_keep_ms))


def check_draw(number: int, seed: int, speech: Speech, quality: Quality, text: str, generation: Generation) -> CheckedDraw:
    """What the cheap checks say. `speech` is as it would be stored; `text` is what it should say."""
    try:
        check_speech(speech)
    except SynthesisError as error:
        whole = None if error.code is not ErrorCode.SYNTH_SILENT else speech
        return failed_draw(number, seed, error, whole)
    return _with_scores(number, seed, speech, quality, cheap_scores(speech, quality, text, generation))


def failed_draw(number: int, seed: int, error: NightjarError, speech: Speech | None = None) -> CheckedDraw:
    """A draw that holds no speech to measure."""
    duration_ms = 0 if speech is None else speech.duration_ms
    record = Draw(number, seed, error.code, kept=False, duration_ms=duration_ms, scores={})
    return CheckedDraw(record, speech, str(error), (_NO_SPEECH + (speech is None), 0.0))


def with_readings(draw: CheckedDraw, readings: Readings, quality: Quality) -> CheckedDraw:
    """The draw with what meters read; a reading takes the place of the cheap check's of the same name."""
    assert draw.speech is not None
    scores = {**draw.record.scores, **judged(readings, quality)}
    return _with_scores(draw.record.draw, draw.record.seed, draw.speech, quality, scores)


def kept(draws: Iterable[Draw], number: int) -> tuple[Draw, ...]:
    """The draws, of which this one's audio is the item's."""
    return tuple([msgspec.structs.replace(draw, kept=True) if draw.draw == number else draw for draw in draws])


def _with_scores(number: int, seed: int, speech: Speech, quality: Quality, scores: dict[str, Score]) -> CheckedDraw:
    failed = [name for name, score in scores.items() if score.passed is False]
    code = code_of(failed[0]) if failed else None
    record = Draw(number, seed, code, kept=not failed, duration_ms=speech.duration_ms, scores=scores)
    if not failed:
        return CheckedDraw(record, speech)
    message = "; ".join(_explained(name, scores[name], quality.bounds[name]) for name in failed)
    rank = (len(failed), sum(_excess(name, scores[name], quality.bounds[name]) for name in failed))
    return CheckedDraw(record, speech, message, rank)


def _excess(name: str, score: Score, bound: Bound) -> float:
    if score.value is None:
        return 0.0
    # A length has the bounds of its pace, around 1, and only then its own.
    return abs(score.value - 1.0) if name == "duration" else bound.excess(score.value)


def _explained(name: str, score: Score, bound: Bound) -> str:
    wanted = f", allowed: {limits}" if (limits := str(bound)) else ""
    heard = f" ({score.detail[:200]})" if score.detail else ""
    return f"`{name}` is {score.value}{wanted}{heard}."

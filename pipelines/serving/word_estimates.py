"""Estimates when a model that does not know it says each word of a stream."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from pipelines.audio import FRAME_SECONDS, NO_SAMPLES, Samples, frame_powers, sound_floor
from pipelines.duration import text_units
from pipelines.request import Word
from pipelines.text_units import has_words
from pipelines.words import words_of

#: Units of text (`text_units`) that a voice says in a second of sound, before its own pace is known.
UNITS_PER_SECOND = 17.0
#: Silence of this length is a pause at a mark of punctuation; shorter silence belongs to a consonant.
PAUSE_SECONDS = 0.14
#: How far a mark may be from where the pace expects it, as a part of the units since the mark before.
TOLERANCE = 0.4
#: A word is sent once this much audio follows its estimated end, in which a pause may correct it.
DELAY_SECONDS = 0.5
_MARKS = ".,;:!?\u2026\u2014\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a"


class WordEstimates:
    """Divides the sound among the words of the text, in proportion to their length, between marks of
    punctuation; a mark is where the voice pauses."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        self._rest = NO_SAMPLES
        self._loudest = 0.0
        self._frame_count = 0
        self._units_per_second = UNITS_PER_SECOND
        self._text = ""
        self._words = list[str]()
        #: The units from the beginning of the text to the end of each word; the first one is 0.
        self._ends = [0.0]
        #: Words before the last pause at a mark, and words that were yielded.
        self._passed = 0
        self._yielded = 0
        #: Numbers of the frames with sound since that pause.
        self._sounding = list[int]()

    def add(self, samples: Samples, text: str, final: bool) -> Iterator[Word]:
        """Adds float32 [samples]. Yields the words that end in the audio so far; with `final` all that are
        left. `text`: the text so far."""
        if text != self._text:
            # Text only grows, so that all words but the last one stay as they are.
            words = words_of(text)
            kept = max(len(self._words) - 1, 0)
            units = (max(1.0, text_units(word.strip(_MARKS))) for word in words[kept:])
            self._ends[kept:] = accumulate(units, initial=self._ends[kept])
            self._text = text
            self._words = words
        samples = np.concatenate([self._rest, samples])
        length = int(FRAME_SECONDS * self._sample_rate)
        end = len(samples) // length * length
        self._rest = samples[end:]
        if end:
            powers = frame_powers(samples[:end], self._sample_rate)
            self._loudest = max(self._loudest, float(powers.max()))
            for power in powers.tolist():
                if power > sound_floor(self._loudest):
                    silence = self._frame_count - self._sounding[-1] if self._sounding else 0
                    if silence > PAUSE_SECONDS / FRAME_SECONDS:
                        yield from self._pass_mark()
                    self._sounding.append(self._frame_count)
                self._frame_count += 1
        before = self._ends[self._passed]
        if final:
            yield from self._until(len(self._words), (self._ends[-1] - before) / max(len(self._sounding), 1))
        elif text:
            heard = self._units_per_second * (len(self._sounding) * FRAME_SECONDS - DELAY_SECONDS)
            # The last word may still be written.
            whole = len(self._words) - (not text[-1].isspace())
            count = min(bisect_right(self._ends, before + heard) - 1, whole)
            yield from self._until(count, self._units_per_second * FRAME_SECONDS)

    def _pass_mark(self) -> Iterator[Word]:
        """Yields the words up to the mark at which the voice has paused, if there is one."""
        seconds = len(self._sounding) * FRAME_SECONDS
        heard = seconds * self._units_per_second
        before = self._ends[self._passed]
        marked = [
            (abs(self._ends[number + 1] - before - heard), number + 1)
            for number in range(self._passed, len(self._words))
            if self._words[number][-1] in _MARKS
        ]
        error, count = min(marked, default=(math.inf, 0))
        if error <= TOLERANCE * heard:
            units = self._ends[count] - before
            yield from self._until(count, units / len(self._sounding))
            self._passed = count
            self._units_per_second += (units / seconds - self._units_per_second) / 2
            self._sounding = []

    def _until(self, count: int, units_per_frame: float) -> Iterator[Word]:
        """Yields the words before `count` that were not yielded."""
        frames = [*self._sounding, self._sounding[-1] + 1] if self._sounding else [self._frame_count]
        for number in range(self._yielded, count):
            begin, end = (
                FRAME_SECONDS
                * frames[min(round((at - self._ends[self._passed]) / units_per_frame), len(frames) - 1)]
                for at in self._ends[number : number + 2]
            )
            if has_words(self._words[number]):
                yield Word(self._words[number], round(begin, 4), round(end, 4))
        self._yielded = max(self._yielded, count)

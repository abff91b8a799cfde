"""An item whose text is too long for one request: its parts are drawn and checked one by one, and joined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import BinaryIO

from jobs.checks import CHECKS, Quality
from jobs.encoded_audio import EncodedAudio, JoinedSpeech, words_file
from jobs.ledger.records import Done, Draw, JobSpec, Score
from pipelines.request import Meta, Speech
from pipelines.text_units import TextPart

#: Scores whose detail is a transcript.
_TRANSCRIBED = ("wer", "cer")


class LongItem:
    """The parts of one item, and their kept draws. Thread-safe."""

    def __init__(
        self, parts: Sequence[TextPart], first: int, spec: JobSpec, seed: Callable[[int], int]
    ) -> None:
        """`first`: number of the first draw; `seed`: the item's seed for a draw, from which those of the parts
        derive."""
        self.parts = parts
        self._first, self._quality, self._seed = first, spec.quality, seed
        #: Total time of its draws in the engine.
        self.engine_ms = 0
        self._speech = JoinedSpeech([part.pause for part in parts], spec)
        #: Number of a part -> the number of its kept draw, and all its draws.
        self._kept: dict[int, tuple[int, Sequence[Draw]]] = {}
        self._lock = threading.Lock()

    def keep(
        self, part: int, done: Done, speech: Speech, draw: int
    ) -> tuple[Done, EncodedAudio[BinaryIO], bytes, Meta, int] | None:
        """Keeps a draw of a part. None: other parts are missing; otherwise the outcome of the item with its
        audio, the times of its words (empty: not known), the facts of the audio, and its seed."""
        with self._lock:
            self._kept[part] = draw, done.draws
        if not self._speech.add(part, speech):
            return None
        kept = [self._kept[number] for number in range(len(self.parts))]
        later = " ".join(f"{number}:{one}" for number, (one, _) in enumerate(kept) if one != self._first)
        meta: Meta = {"parts": len(kept), "first_draw": self._first, "redrawn": later}
        audio = self._speech.encoded()
        draws = () if self._quality is None else self._joined([draws for _, draws in kept], self._quality)
        words = words_file(self._speech) if self._speech.words else b""
        return Done(done.index, (), self.engine_ms, draws), audio, words, meta, self._seed(self._first)

    def _joined(self, parts: Sequence[Sequence[Draw]], quality: Quality) -> tuple[Draw, ...]:
        """The draws of the item. A score is the worst one of any part: in the last draw, of the kept draws of
        all parts; in an earlier one, of the parts that were drawn again after it."""
        joined: list[Draw] = []
        for place in range(count := max(map(len, parts))):
            is_last = place == count - 1
            of_parts = {
                number: next(draw for draw in draws if draw.kept) if is_last else draws[place]
                for number, draws in enumerate(parts)
                if is_last or len(draws) > place + 1
            }
            names = dict.fromkeys(name for draw in of_parts.values() for name in draw.scores)
            scores = {
                name: _worst(
                    name,
                    {number: draw.scores[name] for number, draw in of_parts.items() if name in draw.scores},
                    quality,
                )
                for name in names
            }
            code = next((draw.code for draw in of_parts.values() if draw.code is not None), None)
            milliseconds = sum(draw.duration_ms for draw in of_parts.values())
            number = self._first + place
            joined.append(Draw(number, self._seed(number), code, is_last, milliseconds, scores))
        return tuple(joined)


def _worst(name: str, scores: dict[int, Score], quality: Quality) -> Score:
    """The worst of the scores of parts; its detail names the part, or is the whole transcript."""
    bad = (
        CHECKS[name].bad
        if name in CHECKS
        else "low"
        if (bound := quality.bounds.get(name)) and bound.low is not None
        else "high"
    )

    def badness(number: int) -> tuple[bool, float]:
        score = scores[number]
        value = score.value or 0.0
        return score.passed is False, {"low": -value, "high": value, "both": abs(value - 1)}[bad]

    part = max(
        (number for number in scores if scores[number].value is not None), key=badness, default=min(scores)
    )
    worst = scores[part]
    if name in _TRANSCRIBED:
        return Score(worst.value, worst.passed, " ".join(score.detail for score in scores.values()))
    return Score(worst.value, worst.passed, f"part {part + 1}: {worst.detail}".removesuffix(": "))

"""An item whose text is too long for one request: its parts are drawn and checked one by one, and joined."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import msgspec

from jobs.checks import CHECKS
from jobs.encoded_audio import EncodedAudio, JoinedSpeech
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
        self._first, self._seed = first, seed
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
        audio, words = self._speech.encoded()
        draws = tuple(self._joined([draws for _, draws in kept])) if done.draws else ()
        return Done(done.index, (), self.engine_ms, draws), audio, words, meta, self._seed(self._first)

    def _joined(self, parts: Sequence[Sequence[Draw]]) -> Iterator[Draw]:
        """The draws of the item: in each, every part has its draw of that number, or its kept one if no other
        followed. A score is the worst one of any part."""
        for place in range(count := max(map(len, parts))):
            chosen = [
                draws[place] if place < len(draws) - 1 else next(draw for draw in draws if draw.kept)
                for draws in parts
            ]
            names = dict.fromkeys(name for draw in chosen for name in draw.scores)
            scores = {
                name: _worst(name, [draw.scores.get(name, Score(None)) for draw in chosen]) for name in names
            }
            code = next((draw.code for draw in chosen if draw.code is not None), None)
            milliseconds, number = sum(draw.duration_ms for draw in chosen), self._first + place
            yield Draw(number, self._seed(number), code, place == count - 1, milliseconds, scores)


def _worst(name: str, scores: Sequence[Score]) -> Score:
    """The worst of the scores of parts; its detail names the part, or is the whole transcript."""
    bad = CHECKS[name].bad if name in CHECKS else "low"

    def badness(part: int) -> tuple[bool, float]:
        value = scores[part].value
        far = -math.inf if value is None else {"low": -value, "high": value, "both": abs(value - 1)}[bad]
        return scores[part].passed is False, far

    part = max(range(len(scores)), key=badness)
    detail = f"part {part + 1}: {scores[part].detail}".removesuffix(": ")
    if name in _TRANSCRIBED:
        detail = " ".join(score.detail for score in scores)
    return msgspec.structs.replace(scores[part], detail=detail)

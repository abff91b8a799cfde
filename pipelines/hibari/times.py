"""When the embedded voice says each word and phoneme, from the durations by which its model makes the sound."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any, cast

import numpy as np
from hibari import Hibari, dsp
from hibari.g2p import G2P
from hibari.voices import DEFAULT, voice_path
from numpy.typing import NDArray

from pipelines.audio import FRAME_SECONDS, NO_SAMPLES, Samples, frame_powers
from pipelines.request import Word

#: The value of hibari's model that holds the frames, of 25 ms, of each phoneme; the model does not return it by
#: itself.
_FRAMES = "/Round_output_0"
#: The sound of a phoneme is this much, two frames, before its place by the durations: the place where fricatives
#: hiss and where vowels begin after consonants without voice, in the median of 740 borders.
_LEAD_SECONDS = 0.05
#: Power of a frame, relative to the loudest one, from which on it can be heard (-40 dB).
_HEARD_POWER = 1e-4
#: Phoneme ids up to this one are marks and the space, which are heard as pauses.
SPACE = 16
_STRESS = "ˈˌ"
#: Maximum number of words that are read for one word of a text, and of ways to divide them that are followed.
_MAX_READ = _MAX_WAYS = 24
#: The cost of uneven shares; that of each word that is read otherwise is 1, or 2 beside the word itself.
_EVEN = 0.01
_MARKS = re.compile(r"[\W_]+")


class TimedVoice(Hibari):
    """hibari's voice, whose model also returns the duration of each phoneme. `timed` takes the place of `from_ids`."""

    def __init__(self, g2p: G2P) -> None:
        path = voice_path(DEFAULT)
        super().__init__(model=_with_frames(Path(path).read_bytes()), g2p=g2p)
        self.model_path = path
        self.symbols = {number: symbol for symbol, number in self.vocab.items()}

    def timed(
        self, ids: Sequence[int], generator: np.random.Generator
    ) -> tuple[Samples, NDArray[np.float32]]:
        """The speech [samples] of phoneme ids, and the duration [ids] of each in frames."""
        if len(ids) < 3:
            return NO_SAMPLES, np.zeros(len(ids), np.float32)
        given = {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)}
        made: Any = self.sess.run(None, given)
        return dsp.synth(*(part[0] for part in made[:-1]), rng=generator), made[-1]

    def words(
        self,
        ids: Sequence[int],
        samples: Samples,
        frames: NDArray[np.float32],
        before: float,
        owners: deque[int],
        texts: Sequence[str],
    ) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
        """The words and the phonemes of a piece, which `timed` made, `before` seconds after the beginning. `owners`: for each next id other than the
        space, the index of its word in `texts`; those of this piece are removed.

        A mark of stress belongs to the vowel after it. Two words share the space between them. Pauses at marks
        are outside of words: a sound before one lasts as long as it is heard.
        """
        seconds = len(samples) / dsp.SR
        edges = np.cumsum([0.0, *frames]) * (seconds / frames.sum()) - _LEAD_SECONDS
        powers = frame_powers(samples, dsp.SR)
        heard = np.flatnonzero(powers > powers.max() * _HEARD_POWER)
        words = dict[int, Word]()
        phonemes = list[Word]()
        held = ""
        begin = 0.0

        def is_shared(place: int) -> bool:
            return ids[place] == SPACE and min(ids[place - 1], ids[place + 1]) > SPACE

        for place, number in enumerate(ids[1:-1], 1):
            if number == SPACE:
                continue
            owner = owners.popleft()
            end = edges[place + 1]
            if number < SPACE:
                continue
            if not held:
                begin = edges[place - 1 : place + 1].mean() if is_shared(place - 1) else edges[place]
            held += self.symbols[number]
            if held[-1] in _STRESS:
                continue
            if is_shared(place + 1):
                end = edges[place + 1 : place + 3].mean()
            elif ids[place + 1] <= SPACE:
                last = heard[heard * FRAME_SECONDS < end].max(initial=0)
                end = min(end, max(begin + FRAME_SECONDS, (last + 1) * FRAME_SECONDS))
            phoneme = Word(held, float(begin), float(end)).moved(before, before + seconds)
            phonemes.append(phoneme)
            words[owner] = Word(texts[owner], words.get(owner, phoneme).start_s, phoneme.end_s)
            held = ""
        return tuple(words.values()), tuple(phonemes)


def read_as(written: Sequence[str], read: Sequence[str]) -> list[int]:
    """For each word that is read, the index of the word of the text that it belongs to: `7:30` is read as
    `seven thirty`. Of the ways to divide what is read, it is the most even one of those with the fewest words that
    are read otherwise than they are written."""
    keys, spoken = ([_MARKS.sub("", word).casefold() or word for word in words] for words in (written, read))
    #: The end of what was read so far -> the cost, the end, its last word's begin, and the way up to there.
    ways: dict[int, tuple[float, int, int, Any]] = {0: (0.0, 0, 0, None)}
    for key in keys:
        after = dict[int, tuple[float, int, int, Any]]()
        for before in nsmallest(_MAX_WAYS, ways.values()):
            cost, begin, *_ = before
            is_same = spoken[begin : begin + 1] == [key]
            for count in range(min(_MAX_READ, len(spoken) - begin) + 1):
                others = 2 * abs(count - 1) if is_same else count
                way = cost + others + count * count * _EVEN, begin + count, begin, before
                after[begin + count] = min(way, after.get(begin + count, way))
        ways = after
    owners = [number * len(keys) // len(spoken) for number in range(len(spoken))]
    way = ways.get(len(spoken))
    for number in reversed(range(len(keys) if way else 0)):
        _, end, begin, way = cast(Any, way)
        owners[begin:end] = [number] * (end - begin)
    return owners


def _with_frames(model: bytes) -> Any:
    """The ONNX model with the output `_FRAMES`. Protocol buffers merge a message that is written twice, so the
    model is followed by a graph (field 7) with nothing but that output (field 12, whose field 1 is its name).
    """
    content = _FRAMES.encode()
    for field in (1, 12, 7):
        content = bytes([field << 3 | 2, len(content)]) + content
    return model + content

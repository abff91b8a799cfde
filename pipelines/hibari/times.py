"""When the embedded voice says each word and phoneme, from the durations by which its model makes the sound."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from hibari import Hibari, dsp
from hibari.g2p import G2P
from hibari.voices import DEFAULT, voice_path
from numpy.typing import NDArray

from pipelines.request import Word

#: The value of hibari's model that holds the frames, of 25 ms, of each phoneme; the model does not return it by
#: itself.
_FRAMES = "/Round_output_0"
#: The sound of a phoneme is this much, two frames, before its place by the durations: the place where fricatives
#: hiss and where vowels begin after consonants without voice, in the median of 740 borders.
_LEAD_SECONDS = 0.05
#: Frames of sound, and their power relative to the loudest one from which on they can be heard (-40 dB).
_HEARD_SECONDS, _HEARD_POWER = 0.01, 1e-4
#: Phoneme ids up to this one are marks and the space, which are heard as pauses.
SPACE = 16
_STRESS = "ˈˌ"
#: Maximum number of words, written and read together, of one place where a text is read differently.
_MAX_GROUP = 24
_MARKS = re.compile(r"[\W_]+")


class TimedVoice(Hibari):
    """hibari's voice, whose model also returns the duration of each phoneme. Its speech is the same."""

    def __init__(self, g2p: G2P) -> None:
        path = voice_path(DEFAULT)
        super().__init__(model=_with_output(Path(path).read_bytes(), _FRAMES), g2p=g2p)
        self.model_path = path
        self.symbols = {number: symbol for symbol, number in self.vocab.items()}

    def from_ids(
        self, ids: Sequence[int], speed: float = 1.0, rng: np.random.Generator | None = None
    ) -> NDArray[np.float32]:
        """The speech [samples] of phoneme ids."""
        return self.timed(ids, speed, rng)[0]

    def timed(
        self, ids: Sequence[int], speed: float = 1.0, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """The speech [samples] of phoneme ids, and the beginning and the end [ids, 2] of each in seconds.

        The space between two words is shared by them. A sound before a pause lasts as long as it is heard.
        """
        if len(ids) < 3:
            return np.zeros(0, np.float32), np.zeros((len(ids), 2))
        given = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        made: Any = self.sess.run(None, given)
        *parts, frames = made
        lh, th, ln, lr, phi, f0 = (part[0] for part in parts)
        samples = dsp.synth(lh, th, ln, lr, phi, f0, rng or np.random.default_rng())
        ends = np.cumsum(frames, dtype=np.float64) * (len(samples) / dsp.SR / frames.sum())
        spans = np.maximum(np.stack([np.r_[0.0, ends[:-1]], ends], axis=1) - _LEAD_SECONDS, 0.0)
        for place in range(1, len(ids)):
            if ids[place - 1] <= SPACE:
                continue
            if ids[place] == SPACE and ids[place + 1] > SPACE:
                spans[place - 1, 1] = spans[place + 1, 0] = spans[place].mean()
            elif ids[place] <= SPACE:
                spans[place - 1, 1] = _sound_end(samples, *spans[place - 1])
        return samples, spans

    def words(
        self, ids: Sequence[int], spans: NDArray[np.float64], owners: deque[int], texts: Sequence[str]
    ) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
        """The words and the phonemes of a piece. `spans`: of its ids, in seconds [ids, 2]; `owners`: for each
        next id other than the space, the index of its word in `texts`; those of this piece are removed.

        A mark of stress belongs to the vowel after it. Pauses at marks are outside of words.
        """
        phonemes: list[tuple[int, Word]] = []
        held, begin = "", 0.0
        for number, (start, end) in zip(ids[1:-1], spans[1:-1].round(4).tolist(), strict=True):
            if number == SPACE:
                continue
            owner, symbol = owners.popleft(), self.symbols[number]
            if number < SPACE:
                continue
            begin = begin if held else start
            held += symbol
            if symbol not in _STRESS:
                phonemes.append((owner, Word(held, begin, end)))
                held = ""
        words: list[Word] = []
        for owner, group in groupby(phonemes, key=lambda pair: pair[0]):
            said = [phoneme for _, phoneme in group]
            words.append(Word(texts[owner], said[0].start_s, said[-1].end_s))
        return tuple(words), tuple(phoneme for _, phoneme in phonemes)


def _sound_end(samples: NDArray[np.float32], begin: float, end: float) -> float:
    """The end of the last frame in this span that can be heard, at least one frame after its beginning."""
    first, last = (round(at / _HEARD_SECONDS) for at in (begin, end))
    length = round(_HEARD_SECONDS * dsp.SR)
    frames = np.square(samples[: len(samples) // length * length]).reshape(-1, length).mean(axis=1)
    heard = np.flatnonzero(frames[first:last] > frames.max() * _HEARD_POWER)
    return min((first + (int(heard[-1]) if len(heard) else 0) + 1) * _HEARD_SECONDS, end)


def read_as(written: Sequence[str], read: Sequence[str]) -> Iterator[int]:
    """For each word that is read, the index of the word of the text that it belongs to: `7:30` is read as
    `seven thirty`. The words between two equal ones belong together; of several, each gets an equal share."""
    keys, spoken = ([_MARKS.sub("", word).casefold() or word for word in words] for words in (written, read))
    place = done = 0
    while done < len(spoken):
        left = len(keys) - place, len(spoken) - done
        own, said = next(
            (
                (skipped, size - skipped)
                for size in range(_MAX_GROUP)
                for skipped in range(size + 1)
                if skipped < left[0]
                and size - skipped < left[1]
                and keys[place + skipped] == spoken[done + size - skipped]
            ),
            left,
        )
        for number in range(said):
            yield place + number * own // said if own else max(place - 1, 0)
        place, done = place + own, done + said
        if done < len(spoken):
            yield place
            place, done = place + 1, done + 1


def _with_output(model: bytes, name: str) -> Any:
    """The ONNX model with one more output. Protocol buffers merge a message that is written twice, so the
    model is followed by a graph (field 7) with nothing but that output (field 12, whose field 1 is its name).
    """
    content = name.encode()
    for field in (1, 12, 7):
        content = bytes([field << 3 | 2, len(content)]) + content
    return model + content

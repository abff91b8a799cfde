"""The aligner: finds when each word of a known text is said, by a CTC model and the Viterbi algorithm (Graves et al.,
2006; Kürzinger et al., 2020)."""

from __future__ import annotations

import unicodedata
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.audio import FRAME_SECONDS, frame_powers
from pipelines.errors import ErrorCode, ModelError
from pipelines.languages import language_code
from pipelines.request import Word
from worker.quality.meters import SAMPLE_RATE, UNSPACED, Reading, Readings, Utterance

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Longer speech is read in windows of this length, with this context on both sides, so many at once.
WINDOW_SECONDS, CONTEXT_SECONDS, BATCH = 20, 1, 8
#: Strides of CTC models are multiples of this many samples, 5 ms.
_STRIDE_UNIT = 80
#: The score is the worst mean of so many seconds: about a short word.
SCORE_SECONDS = 0.4
#: Power of a frame relative to the loudest one from which on it is sound (-40 dB), and the shortest pause.
_SOUND_POWER, _PAUSE_SECONDS = 1e-4, 0.06


class AlignMeter:
    """Score `align`, and the times of words: how well speech fits its text at its worst place.

    The score is the log probability of the text less that of the best tokens, in nats a frame: 0 if the model hears
    exactly the text. Skipped words are tokens where it hears others, repeated ones are sound where the text has none.
    `model`: the folder of a CTC model in Hugging Face's layout, whose tokens are characters. A word without a token of
    the model, such as a number, is aligned to whatever is said in its place.
    """

    def __init__(self, model: str, device: str = "cpu", threads: int = 1) -> None:
        import torch

        # Its types depend on what is installed.
        library: Any = import_module("transformers")
        self._torch, self._device = torch, device
        torch.set_num_threads(threads)
        folder = str(Path(model).expanduser())
        try:
            self._features, tokenizer, self._model = (
                kind.from_pretrained(folder, local_files_only=True)
                for kind in (library.AutoFeatureExtractor, library.AutoTokenizer, library.AutoModelForCTC)
            )
            self._model = self._model.eval().to(device)
            self._vocabulary: dict[str, int] = tokenizer.get_vocab()
            self._between = self._vocabulary.get(getattr(tokenizer, "word_delimiter_token", None) or "|")
            self._blank = int(self._model.config.pad_token_id)
        except Exception as error:
            raise ModelError(
                ErrorCode.MODEL_BAD_CHECKPOINT,
                f"The model {model[:200]!r} of the meter align cannot be opened: {error}.",
                "Set `meters.align.model` to the folder of a CTC model in Hugging Face's layout.",
            ) from error
        self._upper = "A" in self._vocabulary

    def measure(self, utterance: Utterance) -> Readings:
        is_unspaced = language_code(utterance.language) in UNSPACED
        words = list("".join(utterance.text.split())) if is_unspaced else utterance.text.split()
        tokens = [self._tokens(word) for word in words]
        words, tokens = (
            [word for word, own in zip(words, tokens, strict=True) if own],
            [own for own in tokens if own],
        )
        audio = utterance.resampled()
        if not words or not len(audio):
            return {}
        log_probs, stride = self._log_probs(audio)
        ids, owners = [], []
        for number, own in enumerate(tokens):
            if number and self._between is not None and not is_unspaced:
                ids.append(self._between)
                owners.append(-1)
            ids += own
            owners += [number] * len(own)
        path = viterbi(log_probs, ids, self._blank)
        if path is None:
            return {"align": Reading(float(log_probs.min()), "the speech is shorter than its text")}
        owned = np.array([*owners, -1])[path]
        said = np.where(path < 0, self._blank, np.array([*ids, self._blank])[path])
        worse = log_probs[np.arange(len(said)), said] - log_probs[:, :-1].max(axis=1)
        width = min(len(worse), max(1, round(SCORE_SECONDS / stride)))
        means = np.convolve(worse, np.full(width, 1 / width), mode="valid")
        place = int(means.argmin())
        detail = f"mean {worse.mean():.3f}, worst at {place * stride:.2f} s"
        times = word_times(words, owned, stride, audio)
        return {"align": Reading(float(means[place]), detail, words=times)}

    def _tokens(self, word: str) -> list[int]:
        """The tokens of a word; one that stands for anything if the model has none of them; none for marks."""
        text = unicodedata.normalize("NFKC", word).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        text = text.upper() if self._upper else text.lower()
        known = [
            self._vocabulary[one] for one in text if one in self._vocabulary and (one.isalpha() or one == "'")
        ]
        spoken = any(one.isalnum() for one in text)
        return known if any(one.isalpha() for one in text) and known else [-1] if spoken else []

    def _log_probs(self, audio: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
        """Log probabilities [frames, tokens + 1], the last of anything but the blank, and the seconds of a frame."""
        window, context = WINDOW_SECONDS * SAMPLE_RATE, CONTEXT_SECONDS * SAMPLE_RATE
        if len(audio) <= window + context:
            pieces = [np.pad(audio, (0, max(0, SAMPLE_RATE - len(audio))))]
        else:
            padded = np.pad(audio, (context, context + window))
            pieces = [padded[at : at + window + 2 * context] for at in range(0, len(audio), window)]
        found: list[NDArray[np.float32]] = []
        for first in range(0, len(pieces), BATCH):
            given = self._features(
                pieces[first : first + BATCH], sampling_rate=SAMPLE_RATE, return_tensors="pt"
            )
            with self._torch.inference_mode():
                logits = self._model(**given.to(self._device)).logits.float().log_softmax(-1)
            found += list(logits.cpu().numpy())
        samples = _STRIDE_UNIT * round(len(pieces[0]) / len(found[0]) / _STRIDE_UNIT)
        if len(pieces) > 1:
            found = [one[context // samples :][: window // samples] for one in found]
        log_probs = np.concatenate(found)[: -(-len(audio) // samples)]
        anything = np.delete(log_probs, self._blank, axis=1).max(axis=1, keepdims=True)
        return np.concatenate([log_probs, anything], axis=1), samples / SAMPLE_RATE


def viterbi(log_probs: NDArray[np.float32], ids: list[int], blank: int) -> NDArray[np.int64] | None:
    """The most likely place [frames] in `ids` of each frame; -1 for the blank. None if there are too few frames.

    `log_probs`: [frames, tokens]; -1 in `ids` is the last token.
    """
    count = 2 * len(ids) + 1
    states = np.full(count, blank)
    states[1::2] = ids
    # A blank may be skipped between different tokens.
    skips = np.zeros(count, bool)
    skips[3::2] = states[3::2] != states[1:-2:2]
    scores = np.full(count, -np.inf, np.float32)
    scores[:2] = log_probs[0, states[:2]]
    moves = np.zeros((len(log_probs), count), np.int8)
    for frame in range(1, len(log_probs)):
        one = np.concatenate([[-np.inf], scores[:-1]])
        two = np.where(skips, np.concatenate([[-np.inf, -np.inf], scores[:-2]]), -np.inf)
        best = np.maximum(np.maximum(scores, one), two)
        moves[frame] = np.where(best == scores, 0, np.where(best == one, 1, 2))
        scores = (best + log_probs[frame, states]).astype(np.float32)
    state = count - 1 if scores[-1] >= scores[-2] else count - 2
    if scores[state] == -np.inf:
        return None
    path = np.empty(len(log_probs), np.int64)
    for frame in range(len(log_probs) - 1, -1, -1):
        path[frame] = state
        state -= int(moves[frame, state])
    return np.where(path % 2, path // 2, -1)


def word_times(
    words: list[str], owned: NDArray[np.int64], stride: float, audio: NDArray[np.float32]
) -> tuple[Word, ...]:
    """The times of words. `owned`: the word [frames] of each frame, -1 between words; `audio`: at `SAMPLE_RATE`.

    Two words meet in the middle between their tokens, unless there is a pause: there they end and begin with the sound.
    """
    powers = frame_powers(audio, SAMPLE_RATE)
    sound = powers > powers.max() * _SOUND_POWER
    seconds = len(audio) / SAMPLE_RATE
    frames = [np.flatnonzero(owned == number) for number in range(len(words))]
    firsts, lasts = ([float(own[place]) * stride for own in frames] for place in (0, -1))
    #: End of each word, and beginning of the next one.
    ends, begins = list[float](), [_pause(sound, 0.0, firsts[0])[1]]
    for last, first in zip(lasts, firsts[1:], strict=False):
        end, begin = _pause(sound, last, first)
        ends.append(end)
        begins.append(begin)
    ends.append(_pause(sound, lasts[-1], seconds)[0])
    return tuple(
        Word(word, round(begin, 4), round(min(end, seconds), 4))
        for word, begin, end in zip(words, begins, ends, strict=True)
    )


def _pause(sound: NDArray[np.bool_], begin: float, end: float) -> tuple[float, float]:
    """Beginning and end of the longest pause of this span in seconds; without one, twice its middle."""
    first, last = (round(at / FRAME_SECONDS) for at in (begin, end + FRAME_SECONDS))
    edges = np.flatnonzero(np.diff(np.concatenate([[True], sound[first:last], [True]]).astype(np.int8)))
    runs = edges.reshape(-1, 2)
    if len(runs):
        start, stop = runs[(runs[:, 1] - runs[:, 0]).argmax()]
        if (stop - start) * FRAME_SECONDS >= _PAUSE_SECONDS:
            return (first + start) * FRAME_SECONDS, (first + stop) * FRAME_SECONDS
    return (begin + end) / 2, (begin + end) / 2

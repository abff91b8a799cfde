"""Meters that read speech with a CTC model (Graves et al., 2006): `asr`, and the aligner, which finds when each word of a
known text is said by the Viterbi algorithm (Kürzinger et al., 2020)."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.checks import ALIGNER
from pipelines.audio import FRAME_SECONDS, frame_powers
from pipelines.request import Word
from pipelines.words import are_spaced, words_of
from worker.quality.meters import (
    NO_ROOM,
    SAMPLE_RATE,
    Reading,
    Readings,
    Utterance,
    ctc_folder,
    error_rates,
    torch_device,
    unusable,
)

#: Longer speech is read in windows of this length, with this context on both sides.
WINDOW_SECONDS, CONTEXT_SECONDS = 20, 1
#: Seconds that are read at once, shorter pieces with the silence that fills them.
BATCH_SECONDS = 80
#: Samples of which the length of a batch is a multiple on a GPU, which chooses its kernels anew, in 80 ms, for
#: each shape. Models that read spectra, not samples, read any length.
GPU_STEP = 2 * SAMPLE_RATE
#: Strides of CTC models are multiples of this many samples, 5 ms.
_STRIDE_UNIT = 80
#: The score is the worst mean of so many seconds, about a syllable.
SCORE_SECONDS = 0.2
#: Power of a frame relative to the loudest one from which on it is sound (-40 dB), and the shortest pause.
_SOUND_POWER, _PAUSE_SECONDS = 1e-4, 0.06


class CtcMeter:
    """A meter that reads speech with the CTC model in the folder `model`, in Hugging Face's layout, whose tokens are
    characters: score `align` and the times of words, how well speech fits its text at its worst place, or if it `hears`,
    `wer` and `cer` by the most likely tokens, whose words become their detail.

    `align` is the log probability of the text less that of the best tokens, in nats a frame: 0 if the model hears
    exactly the text. Skipped words are tokens where it hears others, repeated ones are sound where the text has none.
    A word without a token of the model, such as a number, is aligned to whatever is said in its place.
    """

    def __init__(
        self, model: str, device: str = "auto", threads: int = 1, language: str = "", *, hears: bool
    ) -> None:
        folder = ctc_folder(model)
        # Its types depend on what is installed.
        import torch

        library: Any = import_module("transformers")
        kinds = "AutoFeatureExtractor", "AutoTokenizer", "AutoModelForCTC"
        try:
            self._features, self._tokenizer, network = (
                getattr(library, kind).from_pretrained(str(folder), local_files_only=True) for kind in kinds
            )
            for layer in network.modules():
                # Each call would compute the normalized weights again.
                if hasattr(layer, "parametrizations"):
                    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
            place = torch_device(device, threads)
            # float16 is as precise as TF32, in which a GPU else computes, and takes half of the time.
            kind = torch.float32 if place == "cpu" else torch.float16
            self._torch, self._model = torch, network.eval().to(place, kind)
        except Exception as error:
            if NO_ROOM in str(error):
                raise
            raise unusable("asr" if hears else ALIGNER, model, error) from error
        self._language, self._hears = language, hears
        #: Whether the model can leave out the silence after a shorter piece.
        self._masks = self._features.return_attention_mask and not getattr(
            network.config, "add_adapter", False
        )
        reads_samples = self._features.model_input_names[0] == "input_values"
        #: Samples of which the length of a batch is a multiple.
        self._step = GPU_STEP if place != "cpu" and self._masks and reads_samples else 1
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self._blank = int(network.config.pad_token_id)

    def measure(self, utterance: Utterance) -> Readings:
        return self.measure_batch([utterance])[0]

    def measure_batch(self, utterances: Sequence[Utterance]) -> Sequence[Readings]:
        readings = self._heard if self._hears else self._aligned
        found = zip(utterances, self._log_probs([one.resampled() for one in utterances]), strict=True)
        return [readings(one, *log_probs) for one, log_probs in found]

    def _heard(self, utterance: Utterance, log_probs: NDArray[np.float32], _: float) -> Readings:
        best = log_probs.argmax(axis=1)
        # The tokenizer, which is slow, gets the letters alone.
        letters = best[(np.diff(best, prepend=-1) != 0) & (best != self._blank)]
        heard = self._tokenizer.decode(letters, group_tokens=False)
        return error_rates(utterance.text, heard, utterance.language or self._language)

    def _log_probs(self, audios: Sequence[NDArray[np.float32]]) -> list[tuple[NDArray[np.float32], float]]:
        """Log probabilities [frames, tokens] of each audio [samples], and the seconds of a frame."""
        window, context = WINDOW_SECONDS * SAMPLE_RATE, CONTEXT_SECONDS * SAMPLE_RATE
        pieces = list[tuple[int, NDArray[np.float32]]]()
        for owner, audio in enumerate(audios):
            padded, starts = np.pad(audio, (0, max(0, SAMPLE_RATE - len(audio)))), range(1)
            if len(audio) > window + context:
                padded, starts = np.pad(audio, (context, context + window)), range(0, len(audio), window)
            pieces += [(owner, padded[at : at + window + 2 * context]) for at in starts]
        # Pieces of one batch have about one length, the first one is the longest.
        pieces.sort(key=lambda piece: -len(piece[1]))
        found, samples = [list[NDArray[np.float32]]() for _ in audios], 0
        while pieces:
            longest = -(-len(pieces[0][1]) // self._step) * self._step
            at_once = BATCH_SECONDS * SAMPLE_RATE // longest if self._masks else 1
            owners, batch = zip(*pieces[:at_once], strict=True)
            del pieces[:at_once]
            read = self._read(batch)
            # The longest piece of all says it most exactly.
            samples = samples or _STRIDE_UNIT * round(len(batch[0]) / len(read[0]) / _STRIDE_UNIT)
            for owner, piece, log_probs in zip(owners, batch, read, strict=True):
                is_window = len(piece) == window + 2 * context
                kept = log_probs[context // samples :][: window // samples] if is_window else log_probs
                found[owner].append(kept)
        return [
            (np.concatenate(own)[: -(-len(audio) // samples)], samples / SAMPLE_RATE)
            for audio, own in zip(audios, found, strict=True)
        ]

    def _read(self, pieces: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Log probabilities [frames, tokens] of each piece [samples]."""
        steps = {"pad_to_multiple_of": self._step} if self._step > 1 else {}
        given = self._features(
            list(pieces), sampling_rate=SAMPLE_RATE, padding=True, return_tensors="pt", **steps
        )
        mask = given.get("attention_mask")
        with self._torch.inference_mode():
            moved = given.to(self._model.device, self._model.dtype)
            found = self._model(**moved).logits.float().log_softmax(-1).cpu().numpy()
        if self._model.dtype == self._torch.float16 and not np.isfinite(found).all():
            # The numbers of this model are too large for float16.
            self._model.float()
            return self._read(pieces)
        if not self._masks:
            return list(found)
        lengths, config = mask.sum(1), self._model.config
        if mask.shape[1] != found.shape[1]:
            for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
                lengths = (lengths - kernel) // stride + 1
        return [one[:length] for one, length in zip(found, lengths.tolist(), strict=True)]

    def _aligned(self, utterance: Utterance, log_probs: NDArray[np.float32], stride: float) -> Readings:
        audio = utterance.resampled()
        spoken = [(word, tokens) for word in words_of(utterance.text) if (tokens := self._tokens(word))]
        if not spoken or not len(audio):
            return {}
        #: The tokens, each with its word; -1 between words.
        pairs: list[tuple[int, int]] = []
        for number, (word, own) in enumerate(spoken):
            if number and "|" in self._vocabulary and are_spaced(spoken[number - 1][0], word):
                pairs.append((self._vocabulary["|"], -1))
            pairs += [(token, number) for token in own]
        anything = np.delete(log_probs, self._blank, axis=1).max(axis=1, keepdims=True)
        log_probs = np.concatenate([log_probs, anything], axis=1)
        path = viterbi(log_probs, [token for token, _ in pairs], self._blank)
        if path is None:
            return {"align": Reading(float(log_probs.min()), "the speech is shorter than its text")}
        said, owned = np.where(path[:, None] < 0, (self._blank, -1), np.array(pairs)[path]).T
        worse = log_probs[np.arange(len(said)), said] - log_probs.max(axis=1)
        width = min(len(worse), max(1, round(SCORE_SECONDS / stride)))
        means = np.convolve(worse, np.full(width, 1 / width), mode="valid")
        times = word_times([word for word, _ in spoken], owned, stride, audio)
        return {"align": Reading(float(means.min()), f"at {means.argmin() * stride:.2f} s", words=times)}

    def _tokens(self, word: str) -> list[int]:
        """The tokens of a word; one that stands for anything if the model has none of them; none for marks."""
        text = unicodedata.normalize("NFKC", word).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        text = text.upper() if "A" in self._vocabulary else text.lower()
        letters = (one for one in text if unicodedata.category(one)[0] in "LM" or one == "'")
        known = [self._vocabulary[one] for one in letters if one in self._vocabulary]
        return known or [-1] * any(one.isalnum() for one in text)


def viterbi(log_probs: NDArray[np.float32], ids: Sequence[int], blank: int) -> NDArray[np.int64] | None:
    """The most likely place [frames] in `ids` of each frame; -1 for the blank. None if there are too few frames.

    `log_probs`: [frames, tokens]; -1 in `ids` is the last token.
    """
    count = 2 * len(ids) + 1
    states = np.full(count, blank)
    states[1::2] = ids
    # A blank may be skipped between different tokens.
    skips = np.full(count, -np.inf, np.float32)
    skips[3::2][states[3::2] != states[1:-2:2]] = 0
    nothing = np.full(2, -np.inf, np.float32)
    scores = np.where(np.arange(count) < 2, log_probs[0, states], -np.inf).astype(np.float32)
    moves = np.zeros((len(log_probs), count), np.int8)
    for frame in range(1, len(log_probs)):
        before = np.concatenate([nothing, scores])
        choices = np.stack([scores, before[1:-1], before[:-2] + skips])
        moves[frame] = choices.argmax(axis=0)
        scores = choices.max(axis=0) + log_probs[frame, states]
    state = count - 2 + int(scores[-1] >= scores[-2])
    if scores[state] == -np.inf:
        return None
    path = np.empty(len(log_probs), np.int64)
    for frame in reversed(range(len(path))):
        path[frame] = state
        state -= int(moves[frame, state])
    return np.where(path % 2, path // 2, -1)


def word_times(
    words: Sequence[str], owned: NDArray[np.int64], stride: float, audio: NDArray[np.float32]
) -> tuple[Word, ...]:
    """The times of words. `owned`: the word [frames] of each frame, -1 between words; `audio`: at `SAMPLE_RATE`.

    Two words meet in the middle between their tokens, unless there is a pause: there they end and begin with the sound.
    """
    powers, seconds = frame_powers(audio, SAMPLE_RATE), len(audio) / SAMPLE_RATE
    sound = powers > powers.max() * _SOUND_POWER
    # Models find tokens also in the silence around the speech.
    first, last = (np.flatnonzero(sound)[[0, -1]] + (0, 1)) * FRAME_SECONDS if sound.any() else (0.0, seconds)
    frames = (np.flatnonzero(owned == number) * stride for number in range(len(words)))
    edges = [0.0, *(at for own in frames for at in own[[0, -1]]), seconds]
    pauses = [_pause(sound, *edge) for edge in zip(edges[::2], edges[1::2], strict=True)]
    return tuple(
        Word(word, max(begin, first), max(end, first)).moved(0.0, last)
        for word, (_, begin), (end, _) in zip(words, pauses, pauses[1:], strict=False)
    )


def _pause(sound: NDArray[np.bool_], begin: float, end: float) -> tuple[float, float]:
    """Beginning and end of the longest pause of this span in seconds; without one, twice its middle."""
    first, last = (round(at / FRAME_SECONDS) for at in (begin, end + FRAME_SECONDS))
    bounded = np.concatenate([[True], sound[first:last], [True]]).astype(np.int8)
    runs = (first + np.flatnonzero(np.diff(bounded)).reshape(-1, 2)) * FRAME_SECONDS
    start, stop = max(runs.tolist(), key=lambda run: run[1] - run[0], default=(0.0, 0.0))
    middle = (begin + end) / 2
    return (start, stop) if stop - start >= _PAUSE_SECONDS else (middle, middle)

"""From the engine's tokens to speech: the text, the guided audio after it, and the codec."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, NightjarError, NoAudioError, SynthesisError
from pipelines.request import AudioChunk, Listener, Speech
from pipelines.results import FinishedCodes, RequestInfo, Utterance
from pipelines.speechlm.config import SpeechLmConfig
from pipelines.speechlm.lm import ModelOutput, Script, TextCoder, deinterleave, read_output
from pipelines.tokens import Tokens

#: Characters of the text that an error without audio quotes.
_QUOTED = 2000
#: Times that a pair is asked for again when it broke.
_REDOS = 3
#: No pair has the name of another one.
_pairs = itertools.count()


@dataclass(frozen=True, slots=True)
class SpeechLmRequestInfo(RequestInfo[None]):
    """What delivery must know of a request, and how it asks the engine for more."""

    config: SpeechLmConfig
    coder: TextCoder
    script: Script


class SpeechLmUtterance(Utterance[None]):
    """Receives a request's text, and asks for the audio behind it."""

    def __init__(self, info: SpeechLmRequestInfo, stage: CodecStage[None], listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self._request = info
        #: Stream-0 ids before the audio, once it is asked for.
        self._before: list[int] = []
        self._redone = 0

    def finished(self, tokens: Tokens) -> None:
        try:
            if self._before:
                self._audio_finished(tokens)
            else:
                self._text_finished(tokens)
        except NightjarError as error:
            self.failed(error)

    def _text_finished(self, tokens: Tokens) -> None:
        special, script = self._request.config.specials, self._request.script
        ids, ended = [special.text, *tokens.ids], tokens.finish == "stop"
        if script.with_audio and ended and ids[-1] == special.eot:
            ids += [special.assistant, special.audio]
            if len(ids) < script.max_tokens:
                self._before = ids
                self._ask_for_audio()
                return
            ended = False
        self._deliver(ids[: script.max_tokens], None, ended)

    def _ask_for_audio(self) -> None:
        info = self._request
        self.go_on(info.script.audio_request(info.config, self._before, f"{os.getpid()}-{next(_pairs)}"))

    def _audio_finished(self, tokens: Tokens) -> None:
        ended = tokens.finish == "stop"
        if ended and tokens.ids[-1] == self._request.config.specials.pad:
            self._redone += 1
            if self._redone > _REDOS:
                message = f"The guidance pair broke {self._redone} times."
                advice = "Open the model with more memory for its KV cache, or fewer slots."
                raise SynthesisError(ErrorCode.SYNTH_ENGINE, message, advice)
            self._ask_for_audio()
            return
        self._deliver([*self._before, *tokens.ids], tokens.codes, ended)

    def _deliver(self, ids: list[int], codes: NDArray[np.int64] | None, finished: bool) -> None:
        """Text alone settles the future; audio goes to the codec first."""
        info = self._request
        answer = read_output(info.config, ids, codes, finished=finished)
        text = info.coder.decode(answer.text_ids)
        info.meta["tokens"] = len(answer.ids)
        finish = "length" if answer.end == "length" else "stop"
        if not info.script.with_audio:
            none = np.zeros(0, np.float32)
            self.done(Speech(none, info.sample_rate, info.text, text, {**info.meta, "finish": finish}))
            return
        frames = (
            np.zeros((0, info.config.streams), np.int64) if answer.rows is None else deinterleave(answer.rows)
        )
        if not len(frames):
            message = f"{_why(answer)} It wrote: {text[:_QUOTED]!r}."
            raise NoAudioError(
                message,
                "Try another seed, or a prompt that asks for audio.",
                text,
                {**info.meta, "finish": finish},
            )
        info.check_end(finish, len(frames))
        self.decode(FinishedCodes(frames, finish, text_out=text))


def _why(answer: ModelOutput) -> str:
    if answer.rows is not None:
        return f"The model wrote {len(answer.rows)} rows of audio, too few for a frame."
    if answer.end == "length":
        return "The text did not end within max_tokens, and no audio followed it."
    return "The model ended its answer after the text."


class SpeechLmStreamer(SpeechLmUtterance):
    """Streams the text of a request while it is written; the audio comes whole, behind it."""

    streamed = True

    def __init__(self, info: SpeechLmRequestInfo, stage: CodecStage[None], listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self._sent = ""
        self._decoder = DecodeStream(skip_special_tokens=True)

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        config, tokenizer = self._request.config, self._request.coder.tokenizer
        for one in ids:
            if config.text_start <= one < config.text_end and (piece := self._decoder.step(tokenizer, one)):
                self._sent += piece
                self._listener(self._chunk(piece))

    def done(self, speech: Speech) -> None:
        """The audio behind the text, and then the end."""
        rest = (speech.text_out or "").removeprefix(self._sent)
        if rest and speech.text_out == self._sent + rest:
            self._listener(self._chunk(rest))
        if len(speech.samples):
            self._listener(AudioChunk(speech.samples, self._request.sample_rate))
        super().done(replace(speech, samples=np.zeros(0, np.float32)))

    def _chunk(self, text: str) -> AudioChunk:
        return AudioChunk(np.zeros(0, np.float32), self._request.sample_rate, text)

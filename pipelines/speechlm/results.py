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
from pipelines.tokens import TokenHost, TokenRequest, Tokens

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
    host: TokenHost


class SpeechLmUtterance(Utterance[None]):
    """Receives a request's text and audio, and asks for the guided audio once the text is there."""

    def __init__(self, info: SpeechLmRequestInfo, stage: CodecStage[None], listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self._request = info
        self._written: list[int] = []
        self._redone = 0
        #: The pair that is under way.
        self._pair: TokenRequest | None = None

    def finished(self, tokens: Tokens) -> None:
        try:
            if self._pair is not None:
                self._pair_finished(tokens)
            elif self._request.script.guided and self._goes_on(tokens):
                self._written = list(tokens.ids)
                self._ask_for_audio()
            else:
                forced = self._forced_to_the_limit(tokens)
                self._deliver([*tokens.ids, *forced], tokens.codes, tokens.finish == "stop" and not forced)
        except NightjarError as error:
            self.failed(error)

    def over(self, done: bool) -> None:
        """Nobody waits any longer: ends the guided audio if it is under way, and none is asked for from
        now on."""
        if not done:
            self._end_pair()

    def _end_pair(self) -> None:
        if self._pair is not None:
            self._request.host.cancel(self._pair)

    def _goes_on(self, tokens: Tokens) -> bool:
        """Whether the text ended with eot and room is left for the assistant token, the marker and audio."""
        ended = tokens.finish == "stop" and tokens.ids[-1] == self._request.config.specials.eot
        return ended and len(tokens.ids) + 2 < self._request.script.max_tokens

    def _forced_to_the_limit(self, tokens: Tokens) -> list[int]:
        """What of the assistant token and the marker still counts where guided audio has no room behind
        them."""
        config, script = self._request.config, self._request.script
        if not script.guided or tokens.finish != "stop" or tokens.ids[-1] != config.specials.eot:
            return []
        return [config.specials.assistant, config.specials.audio][: script.max_tokens - len(tokens.ids)]

    def _ask_for_audio(self) -> None:
        info = self._request
        if not self._listener.is_open:
            return
        self._pair = info.script.audio_pair(info.config, self._written, f"{os.getpid()}-{next(_pairs)}")
        info.host.submit(self._pair, self)
        if not self._listener.is_open:  # meanwhile
            self._end_pair()

    def _pair_finished(self, tokens: Tokens) -> None:
        special = self._request.config.specials
        if tokens.finish == "stop" and tokens.ids[-1] == special.pad:
            self._redone += 1
            if self._redone > _REDOS:
                message = f"The guidance pair broke {self._redone} times."
                advice = "Open the model with more memory for its KV cache, or fewer slots."
                raise SynthesisError(ErrorCode.SYNTH_ENGINE, message, advice)
            self._ask_for_audio()
            return
        assert tokens.codes is not None
        before = [*self._written, special.assistant, special.audio]
        blank = np.zeros((len(before), tokens.codes.shape[1]), np.int64)
        self._deliver([*before, *tokens.ids], np.concatenate((blank, tokens.codes)), tokens.finish == "stop")

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
        self._text_over = False

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        config = self._request.config
        for one in ids:
            if one in (config.specials.assistant, config.specials.audio):
                self._text_over = True
            if self._pair is None and not self._text_over and config.text_start <= one < config.text_end:
                piece = self._decoder.step(self._request.coder.tokenizer, one)
                if piece:
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

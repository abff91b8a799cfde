"""The pipeline of SpeechLM: makes prompts from dialogues, text and eight streams on vLLM, and audio with
Xcodec."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from torch import Tensor

from pipelines.audio import NO_SAMPLES
from pipelines.codec.stage import CodecStage
from pipelines.errors import (
    ErrorCode,
    InputError,
    NightjarError,
    NoAudioError,
    engine_error,
    unsupported,
)
from pipelines.nn.checkpoint import Checkpoint, open_device, precision, type_name
from pipelines.options import TokenModelOptions, read_options
from pipelines.recording import KEPT_BYTES, Recording, RecordingCache
from pipelines.request import AudioChunk, IntArray, Message, Speech, SynthesisRequest
from pipelines.results import FinishedCodes, RequestInfo, SpeechPipeline, StageDecoder, Utterance
from pipelines.speechlm.audio_encoder import SAMPLE_RATE, AudioEncoder, load_tower
from pipelines.speechlm.codec import Xcodec, XcodecDecoder, frame_samples, load_codec
from pipelines.speechlm.config import CAPABILITIES, TOWER_SECONDS, SpeechLmConfig
from pipelines.speechlm.lm import (
    ModelOutput,
    Script,
    StreamSampling,
    TextCoder,
    build_prompt,
    chosen_messages,
    deinterleave,
    model_spec,
    read_output,
)
from pipelines.speechlm.weights import check_names, refuse_pickle
from pipelines.tokens import TokenHost, TokenRequest, Tokens
from pipelines.validation import MAX_TOP_K, bounded, frames_within, or_default, room_after, speech_task
from pipelines.vllm_engine.library import load_vllm

#: Maximum utterances of a batch of the codec.
_CODEC_BATCH = 64
#: Maximum characters of the text that are quoted by the error of an answer without audio.
_QUOTED = 2000
#: Maximum number of times that a broken guidance pair is requested again.
_REDOS = 3
#: Numbers for the unique names of guidance pairs.
_pairs = itertools.count()
#: Default maximum steps of an answer, as in the published clients.
_STEPS = {"text_only": 4096, "text_audio": 12_000}


@dataclass(frozen=True, slots=True)
class SpeechLmOptions(TokenModelOptions):
    """Options of a checkpoint; None means the best value for the device, or that of its config.json."""

    #: Whether recordings get zero mean and unit variance before the tower, as in training. The published
    #: servers do not do this.
    normalise_audio: bool = False
    #: Minimum rows of audio (50 per second).
    min_rows: int = 0
    #: Whether prompts that begin alike share their KV, such as those of all null branches.
    share_prefixes: bool | None = None


def open_pipeline(folder: Path, **options: Any) -> SpeechLmPipeline:
    """Loads a checkpoint folder.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that is
    unknown or not supported.
    """
    chosen = read_options(SpeechLmOptions, options)
    load_vllm(chosen.cpu_kv_gib)
    device = open_device(chosen.device, chosen.threads)
    refuse_pickle(folder)
    config = SpeechLmConfig.from_folder(folder)
    coder = TextCoder(config)
    codec_dtype = precision(chosen.codec_dtype, device)
    with Checkpoint(folder) as checkpoint:
        check_names(checkpoint, config)
        codec = load_codec(checkpoint, config, device, codec_dtype) if chosen.decodes else None
        encoder = load_tower(checkpoint, config, device, codec_dtype, chosen.normalise_audio)
    # Opened last, because it measures the remaining memory, and because it takes half a minute: other errors
    # are raised before.
    from pipelines.vllm_engine.host import VllmHost

    host = VllmHost(model_spec(config, chosen.share_prefixes), chosen)
    return SpeechLmPipeline(config, coder, encoder, codec, host, chosen)


def open_decoder(folder: Path, **options: Any) -> StageDecoder:
    """Loads the decoder of a checkpoint's codec alone, with the options of `open_pipeline`; raises like it."""
    chosen = read_options(SpeechLmOptions, options)
    device = open_device(chosen.device, chosen.threads)
    config = SpeechLmConfig.from_folder(folder)
    with Checkpoint(folder) as checkpoint:
        codec = load_codec(checkpoint, config, device, precision(chosen.codec_dtype, device))
    return StageDecoder(open_stage(codec), config.sample_rate)


def open_stage(codec: Xcodec | None) -> CodecStage:
    """Opens the codec's stage; without a decoder it only stands for one."""
    if codec is None:
        return CodecStage()
    return CodecStage(XcodecDecoder(codec), _CODEC_BATCH, codec.device)


@dataclass(frozen=True, slots=True)
class SpeechLmRequestInfo(RequestInfo):
    """The parts of a request that are needed later: for its results, and to request the audio after the text."""

    config: SpeechLmConfig
    coder: TextCoder
    script: Script


class SpeechLmUtterance(Utterance):
    """Receives a request's text, and then requests the audio after it."""

    _info: SpeechLmRequestInfo  # pyright: ignore[reportIncompatibleVariableOverride]
    #: Stream-0 ids before the audio, once the audio is requested.
    _before: Sequence[int] = ()
    _redone = 0

    def finished(self, tokens: Tokens) -> None:
        try:
            if self._before:
                self._audio_finished(tokens)
            else:
                self._text_finished(tokens)
        except NightjarError as error:
            self.failed(error)

    def _text_finished(self, tokens: Tokens) -> None:
        special = self._info.config.specials
        script = self._info.script
        ids = [special.text, *tokens.ids]
        ended = tokens.finish == "stop"
        if script.with_audio and ended and ids[-1] == special.eot:
            ids += [special.assistant, special.audio]
            if len(ids) < script.max_tokens:
                self._before = ids
                self._request_audio()
                return
            ended = False
        self._deliver(ids[: script.max_tokens], None, ended)

    def _request_audio(self) -> None:
        info = self._info
        self.request_more(
            info.script.audio_request(info.config, self._before, f"{os.getpid()}-{next(_pairs)}")
        )

    def _audio_finished(self, tokens: Tokens) -> None:
        ended = tokens.finish == "stop"
        if ended and tokens.ids[-1] == self._info.config.specials.pad:
            self._redone += 1
            if self._redone > _REDOS:
                raise engine_error(
                    f"The guidance pair broke {self._redone} times.",
                    "Open the model with more memory for its KV cache, or fewer slots.",
                )
            self._request_audio()
            return
        self._deliver([*self._before, *tokens.ids], tokens.codes, ended)

    def _deliver(self, ids: list[int], codes: IntArray | None, finished: bool) -> None:
        """Delivers an answer of text at once; sends audio to the codec first."""
        info = self._info
        answer = read_output(info.config, ids, codes, finished=finished)
        text = info.coder.decode(answer.ids)
        frames = deinterleave(answer.rows)
        info.meta["tokens"] = len(answer.ids)
        finish = "length" if answer.end == "length" else "stop"
        meta = {**info.meta, "finish": finish}
        if not info.script.with_audio:
            self.done(Speech(NO_SAMPLES, info.sample_rate, info.text, text, meta))
            return
        if not len(frames):
            raise NoAudioError(
                f"{_no_audio_reason(answer)} It wrote: {text[:_QUOTED]!r}.",
                "Try another seed, or a prompt that asks for audio.",
                text,
                meta,
            )
        info.check_end(finish, len(frames))
        self.decode(FinishedCodes(frames, finish, text_out=text))


def _no_audio_reason(answer: ModelOutput) -> str:
    if len(answer.rows):
        return f"The model wrote {len(answer.rows)} rows of audio, too few for a frame."
    if answer.end == "length":
        return "The text did not end within max_tokens, and no audio followed it."
    return "The model ended its answer after the text."


class SpeechLmStreamer(SpeechLmUtterance):
    """Streams the text of a request while it is written, and then sends all audio at once."""

    streamed = True
    _sent = ""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._decoder = DecodeStream(skip_special_tokens=True)

    def tokens(self, ids: list[int], codes: IntArray | None) -> None:
        config = self._info.config
        tokenizer = self._info.coder.tokenizer
        for token in ids:
            is_text = config.text_token_offset <= token < config.text_token_end
            if is_text and (piece := self._decoder.step(tokenizer, token)):
                self._sent += piece
                self._listener(self._chunk(piece))

    def done(self, speech: Speech) -> None:
        """Sends the rest of the text, the audio, and then the end."""
        rest = (speech.text_out or "").removeprefix(self._sent)
        if rest and speech.text_out == self._sent + rest:
            self._listener(self._chunk(rest))
        if len(speech.samples):
            self._listener(AudioChunk(speech.samples, speech.sample_rate))
        super().done(replace(speech, samples=NO_SAMPLES))

    def _chunk(self, text: str) -> AudioChunk:
        return AudioChunk(NO_SAMPLES, self._info.sample_rate, text)


class SpeechLmPipeline(SpeechPipeline[TokenRequest, SpeechLmRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`.

    A result of mode `text_only` has no samples. A stream sends the text while it is written, and then all
    audio at once.
    """

    def __init__(
        self,
        config: SpeechLmConfig,
        coder: TextCoder,
        encoder: AudioEncoder,
        codec: Xcodec | None,
        host: TokenHost,
        options: SpeechLmOptions,
    ) -> None:
        self.config = config
        self.coder = coder
        self.encoder = encoder
        self.name = config.folder.name
        self.sample_rate = config.sample_rate
        self.capabilities = CAPABILITIES
        self._options = options
        self._cached_features: RecordingCache[Tensor] = RecordingCache(KEPT_BYTES, lambda rows: rows.nbytes)
        self.frame_samples = frame_samples(config)
        self._frames_per_second = config.sample_rate / self.frame_samples
        self._context = host.info.max_context
        self._meta = {"engine": "vllm", "dtype": host.info.dtype}
        if codec is not None:
            self._meta["codec_dtype"] = type_name(codec.dtype)
        super().__init__(host, open_stage(codec), SpeechLmStreamer, SpeechLmUtterance)  # pyright: ignore[reportArgumentType]

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, SpeechLmRequestInfo]:
        """The engine's first request, and the parts of the request that its results need. Raises `InputError`
        for what this model cannot do."""
        generation = request.generation
        task = speech_task(request.messages, generation, self.capabilities, request.seed)
        if generation.repetition_penalty not in (None, 1.0):
            raise unsupported("This model has no repetition penalty.", "Remove `repetition_penalty`.")
        mode = generation.mode or CAPABILITIES.modes[0]
        messages = chosen_messages(request.messages, mode)
        features, salt = self._features(messages)
        config = self.config
        prompt = build_prompt(config, self.coder, messages, [len(rows) for rows in features])
        room = room_after(len(prompt.ids), self._context)
        max_rows = _STEPS["text_audio"]
        if generation.max_seconds is not None:
            # Audio ends `delay` rows after its last frame began.
            max_rows = frames_within(generation.max_seconds, self._frames_per_second, max_rows) + config.delay
        top_p = or_default(generation.top_p, 1.0)
        text = or_default(generation.text_temperature, generation.temperature, config.text_temperature)
        audio = or_default(generation.audio_temperature, generation.temperature, config.audio_temperature)
        text_top_k = or_default(generation.top_k, config.text_topk)
        audio_top_k = or_default(generation.audio_top_k, generation.top_k, config.audio_topk)
        script = Script(
            request.request_id,
            prompt.ids,
            min(or_default(generation.max_tokens, _STEPS[mode]), room),
            request.seed,
            StreamSampling(bounded(text), min(text_top_k, MAX_TOP_K), top_p),
            StreamSampling(bounded(audio), min(audio_top_k, MAX_TOP_K), top_p),
            with_audio=mode == "text_audio",
            cfg=bounded(or_default(generation.cfg, 1.0)),
            min_rows=self._options.min_rows,
            max_rows=max_rows,
            features=[(position, rows) for (position, _), rows in zip(prompt.features, features)],
            salt=salt,
        )
        meta = {**self._meta, "mode": mode, "cfg": script.cfg, "prompt_positions": len(prompt.ids)}
        keep = self._options.keep_unfinished
        info = SpeechLmRequestInfo(task.text, self.sample_rate, meta, keep, config, self.coder, script)
        return script.text_request(config), info

    def _features(self, messages: list[Message]) -> tuple[list[Tensor], str | None]:
        """Features of every recording, in order, and a digest of the recordings. Raises `InputError` for
        audio that this model cannot use."""
        features = list[Tensor]()
        digest = hashlib.sha256()
        for message in messages:
            if message.modality != "audio":
                continue
            if message.role != "user" or isinstance(message.content, str):
                text = "Audio in the prompt must be in a user's message, as the bytes of an encoded file."
                raise InputError(
                    ErrorCode.INPUT_AUDIO_MISSING,
                    text,
                    "Use mode text_audio to skip the assistant's messages.",
                )
            recording = Recording.of(message.content)
            features.append(self._cached_features.get(recording, None, partial(self._encode, recording)))
            digest.update(bytes.fromhex(recording.digest))
        return features, digest.hexdigest() if features else None

    def _encode(self, recording: Recording) -> Tensor:
        from pipelines.audio import decode  # only needed if there is audio

        samples, _ = decode(recording.data, SAMPLE_RATE, max_seconds=2 * TOWER_SECONDS)
        return self.encoder.encode(samples)

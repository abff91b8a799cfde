"""Qwen3-TTS as a pipeline: requests in the words of a dialogue to prompts, codes to speech."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import Finish
from pipelines.engine.opening import check_executor, memory_told
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import NightjarError, SynthesisError
from pipelines.nn.checkpoint import Checkpoint, open_device, precision, type_name
from pipelines.nn.config_keys import bad_checkpoint
from pipelines.options import read_options
from pipelines.qwen3_tts.codec import Codec, fuses_front, load_codec
from pipelines.qwen3_tts.config import (
    CONTROL_IDS,
    Qwen3TTSConfig,
    SamplingDefaults,
    SpeakerEncoderConfig,
    capabilities,
)
from pipelines.qwen3_tts.execution import LATE_STATES, PipelineOptions, open_stage, plan_sizes, start_warming
from pipelines.qwen3_tts.frontend import Frontend, OpenText, TokenizedTask, read
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights
from pipelines.qwen3_tts.prompt import NONE, Prompt, PromptParts, Reference, build_prompt
from pipelines.qwen3_tts.speaker import PreparedVoice, SpeakerEncoder, VoiceCache, voice_identity
from pipelines.recording import RecordingFiles
from pipelines.request import (
    AudioChunk,
    EngineInfo,
    Event,
    Failed,
    Generation,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    SynthesisRequest,
    TextPieces,
    check_start,
)
from pipelines.results import FinishedCodes, RequestInfo, SpeechPipeline, Streamer, Utterance, no_audio
from pipelines.validation import bounded, bounded_top_k, check_room, either, frames_within


@dataclass(frozen=True, slots=True)
class FrameRequestInfo(RequestInfo):
    """A request's info, and where the codec starts: after the reference's codes when cloning in context,
    else None."""

    start: CodecState | None = None
    #: The speech in a frame.
    frame_seconds: float = 0.08

    def check(self, codes: NDArray[np.int64], finish: Finish) -> None:
        """Raises `SynthesisError` for codes [frames, codebooks] that are no whole speech: `synth.no_eos`,
        `synth.no_audio`."""
        self.check_end(finish, len(codes))
        if not len(codes):
            raise no_audio("The model ended the speech before its first frame.")


class FrameUtterance(Utterance[CodecState]):
    """Receives one whole utterance."""

    def __init__(self, info: FrameRequestInfo, stage: CodecStage[CodecState], listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self._frames = info

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Whole utterances wait for their end."""

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        try:
            self._frames.check(codes, finish)
        except SynthesisError as error:
            self.failed(error)
        else:
            self.decode(FinishedCodes(codes, finish, self._frames.start))


class FrameStreamer(Streamer[CodecState]):
    """Receives one utterance chunk by chunk, as the engine cuts it."""

    def __init__(self, info: FrameRequestInfo, stage: CodecStage[CodecState], listener: Listener) -> None:
        super().__init__(info, stage, listener, info.start.copy() if info.start else stage.new_state())
        self._frames = info
        self._received = 0
        #: When the listener has heard all that came; the first chunk is due at once.
        self._dry_at = 0.0

    def frames(self, codes: NDArray[np.int64]) -> None:
        self._received += len(codes)
        self.decode(codes, deadline=self._dry_at)
        self._dry_at = (self._dry_at or time.monotonic()) + len(codes) * self._frames.frame_seconds

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        if len(rest := codes[self._received :]):
            self.decode(rest, last=True, deadline=self._dry_at)
        try:
            self._frames.check(codes, finish)
        except SynthesisError as error:
            self.close(Failed(error))
        else:
            self.complete(len(codes), finish)


log = logging.getLogger(__name__)

#: Positions and frames of what is said before the first request; a stream has chunks of every size in it.
_WARM_POSITIONS, _WARM_FRAMES = 32, 28
#: Hard default of the published API; a larger max_new_tokens of generation_config.json is not speech but a
#: runaway.
MAX_TOKENS = 2048


def open_pipeline(folder: Path, **options: Any) -> Qwen3TTSPipeline:
    """Loads a checkpoint folder.

    Raises `ModelError` (`model.bad_checkpoint`), `ConfigError` for options that are unknown or that the
    device cannot have, and `SynthesisError` (`synth.oom`) where other programs have taken the GPU's memory
    meanwhile.
    """
    with memory_told():
        return Qwen3TTSPipeline(folder, read_options(PipelineOptions, options))


class Qwen3TTSPipeline(SpeechPipeline[GenerationRequest, FrameRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`."""

    def __init__(self, folder: Path, options: PipelineOptions) -> None:
        device = open_device(options.device, options.threads)
        dtype = precision(options.dtype, device)
        self.config = Qwen3TTSConfig.from_folder(folder)
        codec_dtype = precision(options.codec_dtype or options.dtype, device)
        stacks = (self.config.talker, self.config.predictor)
        check_executor(device, options.executor, options.reproducible, options.page_size, stacks)
        sizes = plan_sizes(self.config, options, device, dtype, codec_dtype)
        fused = fuses_front(device, codec_dtype, options.reproducible, options.codec_rows)
        self.codec = load_codec(
            folder / "speech_tokenizer", device, codec_dtype, options.reproducible, fused, self.config.clones
        )
        _check_codec(self.config, self.codec)
        wait_for_codec = start_warming(self.codec.decoder)
        self._frontend = Frontend(folder, self.config)
        model, speaker = _load(self.config, device, dtype, sizes.max_context)
        self.name = folder.name
        self.sample_rate = self.codec.config.output_sample_rate
        self._frame_seconds = self.codec.decoder.samples_per_frame / self.sample_rate
        sizes = replace(sizes, frame_seconds=self._frame_seconds)
        self.capabilities = replace(capabilities(self.config), text_in=not _text_first(self.config, options))
        self._options = options
        self._voices = VoiceCache(speaker, self.codec, self._voice_files(speaker)) if speaker else None
        self._positions = min(sizes.pages * sizes.page_size, sizes.max_context)
        self._meta = {"engine": "native", "dtype": type_name(dtype)}
        wait_for_codec()
        if options.streams:
            self.codec.decoder.prepare_streams(sizes.slots + LATE_STATES)
        self.codec.decoder.prepare_utterances(options.codec_rows)
        stage = open_stage(self.codec.decoder, sizes.decode_frames, streams=bool(options.streams))
        self.engine = options.open_engine(model, sizes, stage)
        super().__init__(self.engine, stage, FrameUtterance, FrameStreamer)
        if options.streams and device.type == "cuda":
            self.warm_up()

    def warm_up(self) -> None:
        """Makes speech of a made-up prompt, once as a stream and once in whole, so that no request is the
        first on its way."""
        shape, ids = (_WARM_POSITIONS, self.config.codebooks), self.config.text_ids
        prompt = Prompt(
            np.full(shape[0], ids.tts_pad), np.full(shape, NONE), np.full(_WARM_FRAMES, ids.tts_pad)
        )
        wanted = GenerationRequest(
            "", prompt, SamplingParams(min_new_tokens=_WARM_FRAMES + 1), 0, _WARM_FRAMES + 1
        )
        info = FrameRequestInfo("", self.sample_rate, {}, True, None, self._frame_seconds)
        events: SimpleQueue[Event] = SimpleQueue()
        error: NightjarError | None = None
        try:
            for stream in (True, False):
                self._begin(replace(wanted), info, events.put, stream)
                while isinstance(event := events.get(), AudioChunk):
                    pass
                if isinstance(event, Failed):
                    error = event.error
        except NightjarError as refused:
            error = refused
        if error is not None:
            log.warning("speech could not be made while the model was opened: %s", error)

    @property
    def info(self) -> EngineInfo:
        """How the engine was opened, and what of the codec is not as by default."""
        info = super().info
        return (
            info
            if self.codec.decoder.utterances is None
            else replace(info, kernels=f"{info.kernels}, continuous codec")
        )

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        """See `Pipeline.start`. Of a text that comes in pieces one token is read a frame."""
        check_start(self, request, stream)
        task, pieces = self._tokenized(request)
        if task.text_open:
            return self._start_open(request, task, pieces, on_event)
        return self._begin(*self._generation(request, task, *self._parts(task)), on_event, stream)

    def _tokenized(
        self, request: SynthesisRequest | PreparedRequest
    ) -> tuple[TokenizedTask, TextPieces | None]:
        return (
            (read(request), None)
            if isinstance(request, PreparedRequest)
            else self._frontend.tokenize(request)
        )

    def _start_open(
        self,
        request: SynthesisRequest | PreparedRequest,
        task: TokenizedTask,
        pieces: TextPieces | None,
        on_event: OnEvent,
    ) -> Handle:
        parts, voice = self._parts(task)

        def begin(ids: Sequence[int], final: bool) -> tuple[GenerationRequest, Handle]:
            whole = replace(parts, body_ids=ids, text_open=not final)
            wanted, info = self._generation(request, task, whole, voice)
            wanted = replace(wanted, stream=True, text_open=not final)
            return wanted, self._begin(wanted, info, on_event, stream=True)

        text = OpenText(
            self.engine, begin, parts.streamed_ids, self.config.text_ids.tts_eos, on_event, pieces
        )
        text.append(task.body_ids, False)
        return text

    def _generation(
        self,
        request: SynthesisRequest | PreparedRequest,
        task: TokenizedTask,
        parts: PromptParts,
        voice: PreparedVoice | None,
    ) -> tuple[GenerationRequest, FrameRequestInfo]:
        prompt = build_prompt(self.config, parts)
        room = self._positions - len(prompt) + 1
        check_room(len(prompt), self._positions, room, "more pages")
        max_tokens = min(self._token_limit(task.generation), room)
        sampling = sampling_params(self.config.sampling, task.generation)
        generation = GenerationRequest(request.request_id, prompt, sampling, request.seed, max_tokens)
        start = voice.codec_state if voice else None
        # As it is now: one with persistent kernels goes on without them when a launch gave up.
        meta = {**self._meta, "executor": self.engine.core.executor.name, "prompt_positions": len(prompt)}
        info = FrameRequestInfo(
            task.text, self.sample_rate, meta, self._options.keep_unfinished, start, self._frame_seconds
        )
        return generation, info

    def _streamed(self, wanted: GenerationRequest) -> GenerationRequest:
        return wanted if wanted.stream else replace(wanted, stream=True)

    def _parts(self, task: TokenizedTask) -> tuple[PromptParts, PreparedVoice | None]:
        """Ids and voice of a prompt, in the mode that the checkpoint and the task make."""
        first = _text_first(self.config, self._options)
        parts = PromptParts(
            task.role_ids, task.body_ids, task.instruct_ids, task.language, task.voice, text_first=first
        )
        if self._voices is None or task.recording is None:
            return parts, None
        voice = self._voices.prepare(task.recording, in_context=task.reference_ids is not None)
        reference = None
        if task.reference_ids is not None and voice.codes is not None:
            reference = Reference(task.reference_ids, voice.codes)
        return replace(parts, speaker=None, voice=voice.vector, reference=reference), voice

    def _voice_files(self, speaker: SpeakerEncoder) -> RecordingFiles | None:
        config, options = self.config, self._options
        if options.voice_cache is None:
            return None
        codec = self.codec.config
        identity = partial(voice_identity, config, codec, speaker.device, speaker.dtype)
        return RecordingFiles(Path(options.voice_cache), options.voice_cache_mib << 20, identity)

    def _token_limit(self, generation: Generation) -> int:
        """Draws of codebook 0: the frames asked for, and one that may be the end."""
        limit = min(self.config.sampling.max_new_tokens, MAX_TOKENS)
        if generation.max_seconds is None:
            return limit
        return frames_within(generation.max_seconds, 1 / self._frame_seconds, limit - 1) + 1


def _text_first(config: Qwen3TTSConfig, options: PipelineOptions) -> bool:
    """Whether the whole text stands before the first frame. The published default: not for clones."""
    return not config.clones if options.text_first is None else options.text_first


def sampling_params(defaults: SamplingDefaults, generation: Generation) -> SamplingParams:
    """How a request is drawn: its own settings over the checkpoint's.

    As in the published API they are the talker's; the predictor keeps its own, but a temperature of 0
    makes both greedy.
    """
    temperature = either(generation.temperature, defaults.temperature if defaults.do_sample else 0.0)
    predictor = (
        defaults.predictor_temperature
        if defaults.predictor_do_sample and generation.temperature != 0
        else 0.0
    )
    return SamplingParams(
        temperature=bounded(temperature),
        top_k=bounded_top_k(either(generation.top_k, defaults.top_k)),
        top_p=either(generation.top_p, defaults.top_p),
        repetition_penalty=bounded(either(generation.repetition_penalty, defaults.repetition_penalty)),
        residual_temperature=bounded(predictor),
        residual_top_k=defaults.predictor_top_k,
        residual_top_p=defaults.predictor_top_p,
    )


def _load(
    config: Qwen3TTSConfig, device: torch.device, dtype: torch.dtype, max_context: int
) -> tuple[Qwen3TTSModel, SpeakerEncoder | None]:
    """Reads the main safetensors; every tensor must be accounted for."""
    speaker = None
    with Checkpoint.open(config.folder) as checkpoint:
        weights = take_weights(checkpoint, config, dtype, device)
        if config.clones:
            sizes = SpeakerEncoderConfig.read(config.speaker_encoder)
            if sizes.enc_dim != config.talker.hidden:
                what = f"enc_dim is {sizes.enc_dim}, but the talker is {config.talker.hidden} wide"
                raise bad_checkpoint(f"{config.folder}: speaker_encoder_config.{what}.")
            speaker = SpeakerEncoder(sizes, checkpoint, device, dtype)
        checkpoint.ignore("*rotary_emb*")
        checkpoint.finish()
    with torch.inference_mode():
        return Qwen3TTSModel(config, weights, max_context), speaker


def _check_codec(config: Qwen3TTSConfig, codec: Codec) -> None:
    decoder = codec.config.decoder
    most = max(config.predictor.vocab, config.talker.vocab - CONTROL_IDS)
    if decoder.num_quantizers != config.codebooks or decoder.codebook_size < most:
        raise bad_checkpoint(
            f"{config.folder}: the speech tokenizer has {decoder.num_quantizers} codebooks of {decoder.codebook_size}, "
            f"but the talker makes {config.codebooks} of {most}.",
            "Download the checkpoint again, with its own speech_tokenizer folder.",
        )

"""The pipeline of Qwen3-TTS: makes prompts from requests, and speech from codes; the sizes of its engine, and the
codec's stage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from kernels.lm_persistent import PREDICTORS, TALKERS
from kernels.registry import on_device
from pipelines.codec.decoder import CodecState, gathering_stage
from pipelines.codec.graphs import stream_bytes, utterance_bytes
from pipelines.codec.stage import CodecStage
from pipelines.duration import longest_seconds
from pipelines.engine.core import EngineOptions, Finish
from pipelines.engine.engine import Engine
from pipelines.engine.opening import (
    MemoryNeeds,
    NativeModelOptions,
    check_executor,
    explain_oom,
    may_be_persistent,
)
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import ConfigError, ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.nn.checkpoint import Checkpoint, TensorSource, open_device, precision, type_name
from pipelines.nn.config_keys import StackConfig, bad_checkpoint
from pipelines.options import Count, read_options
from pipelines.qwen3_tts.codec import Codec, CodecDecoder, fuses_front, load_codec
from pipelines.qwen3_tts.config import (
    CONTROL_IDS,
    CodecConfig,
    CodecDecoderConfig,
    Qwen3TTSConfig,
    SamplingDefaults,
    capabilities,
)
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights
from pipelines.qwen3_tts.prompt import NONE, Frontend, Prompt, TokenizedTask, build_prompt, decode
from pipelines.qwen3_tts.speaker import PreparedVoice, SpeakerEncoder, VoiceCache
from pipelines.request import (
    AnyRequest,
    AudioChunk,
    Event,
    Failed,
    FloatArray,
    Generation,
    Handle,
    IntArray,
    Listener,
    OnEvent,
    PreparedRequest,
    SynthesisRequest,
    TextPieces,
    check_start,
)
from pipelines.results import (
    FinishedCodes,
    Meta,
    RequestInfo,
    SpeechPipeline,
    StageDecoder,
    Streamer,
    no_audio,
)
from pipelines.validation import MAX_TOP_K, bounded, frames_within, or_default, room_after


@dataclass(frozen=True, slots=True)
class FrameRequestInfo(RequestInfo):
    """A request's info. `start`: when cloning in context, the codec's state after the codes of the
    reference."""

    start: CodecState | None = None
    #: Seconds of speech in a frame.
    frame_seconds: float = 0.08
    #: The codes of that reference, int64 [frames, codebooks].
    voice_codes: IntArray | None = None

    def read(self, codes: IntArray, finish: Finish, log_probabilities: FloatArray) -> FinishedCodes:
        """See `RequestInfo.read`; codes: [frames, codebooks]."""
        self.check_end(finish, len(codes))
        if not len(codes):
            raise no_audio("The model ended the speech before its first frame.")
        return FinishedCodes(codes, finish, self.start, None, self.voice_codes, log_probabilities)


class FrameStreamer(Streamer):
    """Decodes an utterance from the chunks that the engine makes."""

    def __init__(self, info: FrameRequestInfo, stage: CodecStage, listener: Listener) -> None:
        super().__init__(info, stage, listener, info.start.copy() if info.start else stage.new_state())
        self._frame_seconds = info.frame_seconds
        self._received = 0
        #: Time at which all received audio will have been played; 0 before the first chunk, which is due at
        #: once.
        self._played_until = 0.0

    def frames(self, codes: IntArray) -> None:
        self._received += len(codes)
        self.decode(codes, deadline=self._played_until)
        self._played_until = (self._played_until or time.monotonic()) + len(codes) * self._frame_seconds

    def finished(self, codes: IntArray, *made: Any) -> None:
        if len(rest := codes[self._received :]):
            self.decode(rest, last=True, deadline=self._played_until)
        super().finished(codes, *made)


log = logging.getLogger(__name__)

#: Maximum memory for each frame of the codec's batches in bfloat16 on a GPU. Measured: 4.6 GiB for batches of
#: 4,096 frames.
_DECODED_FRAME_BYTES = 1_300_000
#: On a GPU: maximum time that an utterance waits to be decoded with others. The shorter time applies beside
#: streams, and between steps of a continuous batch.
_GATHER_SECONDS = 0.5
_SHORT_GATHER_SECONDS = 0.2
#: Frames and utterances of a full batch.
_GATHER_FRAMES = 16384
_MAX_UTTERANCES = 256
#: States for streams that left their slot while their last chunk is decoded, in addition to one for each slot.
LATE_STATES = 128

#: Requests that wait for a slot, from which on a recording waits for others, and how long it does.
_AHEAD = 32
_PATIENCE_SECONDS = 0.3
#: On a GPU: memory of the batches of recordings that are encoded, and of states after them.
VOICE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PipelineOptions(NativeModelOptions):
    """Options of a checkpoint; None means the best value for the device."""

    dtype: Literal["float32", "bfloat16"] | None = None
    codec_dtype: Literal["float32", "bfloat16"] | None = None
    #: On a GPU: rows of the codec's continuous batch of whole utterances, such as 256; 0: it gathers them into
    #: batches of similar lengths.
    codec_rows: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: Whether the whole text precedes the first frame; None: the published default of the mode.
    text_first: bool | None = None
    #: Folder that keeps prepared voices for later processes, and its limit in MiB; None: only in memory.
    voice_cache: str | None = None
    voice_cache_mib: Count = 256


_DEFAULTS = NativeModelOptions()


def plan_sizes(
    config: Qwen3TTSConfig,
    options: PipelineOptions,
    device: torch.device,
    dtype: torch.dtype,
    codec_dtype: torch.dtype,
) -> EngineOptions:
    """Sizes of the engine, before weights are loaded. Raises like `engine_options`."""
    with (
        Checkpoint(config.folder) as model,
        Checkpoint(config.folder / "speech_tokenizer") as codec,
    ):
        taken = model.values() * dtype.itemsize
        if options.decodes or config.clones:
            taken += codec.values() * codec_dtype.itemsize
    state = 0
    packed = 0
    streams = bool(options.streams and options.decodes)
    if device.type == "cuda":
        decoder = CodecConfig.load(config.folder / "speech_tokenizer").decoder
        rows = options.codec_rows if options.decodes else 0
        if streams or rows:
            graphs, state = codec_needs(decoder, codec_dtype, streams, rows)
            taken += graphs
        taken += VOICE_BYTES * config.clones
        packed = packed_needs(config, dtype)
        if packed and not may_be_persistent(options.executor, options.reproducible, streams, device):
            packed = 0
    wide = not (streams or options.reproducible)
    whole = partial(engine_options, config, device, dtype, options, taken + packed, state, wide)
    if options.executor == "megakernel" or not packed:
        return whole()
    # Persistent kernels that the user did not request must not reduce the slots or prevent the engine from
    # fitting.
    plain = engine_options(config, device, dtype, options, taken, state, wide)
    with suppress(ConfigError, SynthesisError):
        if (found := whole()).slots == plain.slots:
            return found
    return replace(plain, persistent=False)


def engine_options(
    config: Qwen3TTSConfig,
    device: torch.device,
    dtype: torch.dtype,
    options: NativeModelOptions = _DEFAULTS,
    taken: int = 0,
    state: int = 0,
    wide: bool = False,
) -> EngineOptions:
    """Sizes of the engine of a model that is not loaded yet.

    `taken`: bytes of its weights, and of the codec's weights and graphs; `state`: bytes of a stream's state in
    each slot; `wide` and errors: see `NativeModelOptions.plan`.
    """
    positions = options.positions(config.talker.max_positions)
    needs = memory_needs(config, dtype, options.page_size, positions, taken)
    needs = needs._replace(slot=needs.slot + state)
    return options.plan(needs, device, config.talker.max_positions, wide=wide)


def memory_needs(
    config: Qwen3TTSConfig, dtype: torch.dtype, page_size: int, max_context: int, weight_bytes: int
) -> MemoryNeeds:
    """The GPU memory that a checkpoint needs; `weight_bytes`: bytes of its weights in their types on the
    device."""
    talker = config.talker
    predictor = config.predictor
    width = dtype.itemsize
    # The projected text embeddings, and the embeddings of the codebooks.
    derived = (config.text_vocab + 1) * talker.hidden * width
    if config.needs_projection:
        derived += (talker.vocab + (config.codebooks - 1) * predictor.vocab + 1) * predictor.hidden * width
    # A row's keys and values in the predictor, whose positions are padded to a power of two; the row's other
    # buffers are smaller.
    span = 1 << (config.codebooks - 1).bit_length()
    row = 2 * span * predictor.cached_values * width
    return MemoryNeeds(
        weights=weight_bytes + derived,
        # The text that follows a prompt, as int64, and rows in the graphs of all buckets, up to three for each
        # slot.
        slot=8 * max_context + 3 * row,
        page=page_size * talker.cached_values * width,
        decoded_frame=_DECODED_FRAME_BYTES,
    )


def codec_needs(config: CodecDecoderConfig, dtype: torch.dtype, streams: bool, rows: int) -> tuple[int, int]:
    """Bytes of all graphs of a codec that is not loaded yet, for streams and for a continuous batch of `rows`
    rows of whole utterances; and bytes of a stream's state."""
    # On the CPU and without codes, which takes 0.2 s. PyTorch would import packages for seconds to compute on "meta".
    with torch.inference_mode():
        decoder = CodecDecoder(replace(config, codebook_size=1), TensorSource(), "cpu", dtype, fused=False)
    taken = utterance_bytes(decoder.shape, rows) if rows else 0
    if not streams:
        return taken, 0
    return taken + stream_bytes(decoder.shape, LATE_STATES), decoder.state_size * dtype.itemsize


def packed_needs(config: Qwen3TTSConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights in the layout of persistent kernels, for a model that is not loaded yet; 0 if there
    are no such kernels."""

    def layers(stack: StackConfig) -> int:
        heads = 2 * (stack.q_width + stack.kv_width)
        return stack.layers * stack.hidden * (heads + 3 * stack.intermediate)

    def sizes(stack: StackConfig) -> tuple[int, ...]:
        return stack.hidden, stack.intermediate, stack.heads, stack.kv_heads, stack.head_dim

    predictor = config.predictor
    talker = config.talker
    residuals = config.codebooks - 1
    if (
        dtype != torch.bfloat16
        or (*sizes(predictor), predictor.vocab, predictor.layers, residuals) not in PREDICTORS
    ):
        return 0
    values = layers(predictor) + residuals * predictor.vocab * predictor.hidden
    if sizes(talker) in TALKERS:
        values += layers(talker)
    return values * dtype.itemsize


def start_warming(decoder: CodecDecoder | None, clones: bool) -> Callable[[], None]:
    """Warms the codec's decoder on a GPU while other parts of the model are opened. Returns a function that
    waits until that is done."""

    if decoder is None or decoder.device.type == "cpu":
        return lambda: None

    def warm() -> None:
        """Only logs errors, since they occur again when speech is decoded."""
        try:
            with on_device(decoder.device), torch.cuda.stream(torch.cuda.Stream(decoder.device)):
                decoder.warm(clones)
                torch.cuda.current_stream().synchronize()
        except Exception:
            log.warning("the codec could not be warmed up", exc_info=True)

    thread = threading.Thread(target=warm, name="codec-warming", daemon=True)
    thread.start()
    return thread.join


def open_stage(
    decoder: CodecDecoder | None, decode_frames: int | None = None, streams: bool = False
) -> CodecStage:
    """See `gathering_stage`; `streams`: whether there can be streams."""
    short = streams or (decoder is not None and decoder.utterances is not None)
    gather_seconds = _SHORT_GATHER_SECONDS if short else _GATHER_SECONDS
    return gathering_stage(decoder, _MAX_UTTERANCES, gather_seconds, _GATHER_FRAMES, decode_frames)


#: Positions and frames of the warm-up speech; as a stream it has chunks of every size.
_WARM_POSITIONS = 32
_WARM_FRAMES = 28
#: Default of the published API. It also limits max_new_tokens of generation_config.json: longer output is not
#: speech.
MAX_TOKENS = 2048


@explain_oom()
def open_pipeline(folder: Path, **options: Any) -> Qwen3TTSPipeline:
    """Loads a checkpoint folder.

    Raises `ModelError` (`model.bad_checkpoint`), `ConfigError` for options that are unknown or that the device
    does not support, and `SynthesisError` (`synth.oom`) if other programs use the GPU's memory.
    """
    return Qwen3TTSPipeline(folder, read_options(PipelineOptions, options))


def open_decoder(folder: Path, **options: Any) -> StageDecoder:
    """Loads the decoder of a checkpoint's codec alone, with the options of `open_pipeline`; raises like it."""
    chosen = read_options(PipelineOptions, {**options, "decodes": True})
    codec = _codec(folder, chosen, open_device(chosen.device, chosen.threads), encodes=False)
    decoder = codec.decoder
    assert decoder is not None
    decoder.prepare_utterances(chosen.codec_rows)
    return StageDecoder(open_stage(decoder), codec.config.output_sample_rate, decoder.state_after)


def _codec(folder: Path, options: PipelineOptions, device: torch.device, encodes: bool) -> Codec:
    dtype = precision(options.codec_dtype or options.dtype, device)
    fused = fuses_front(device, dtype, options.reproducible, options.codec_rows)
    place = folder / "speech_tokenizer"
    return load_codec(place, device, dtype, options.reproducible, fused, encodes, options.decodes)


class Qwen3TTSPipeline(SpeechPipeline[GenerationRequest, FrameRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`."""

    def __init__(self, folder: Path, options: PipelineOptions) -> None:
        device = open_device(options.device, options.threads)
        dtype = precision(options.dtype, device)
        self.config = config = Qwen3TTSConfig.from_folder(folder)
        codec_dtype = precision(options.codec_dtype or options.dtype, device)
        check_executor(
            device,
            options.executor,
            options.reproducible,
            options.page_size,
            (config.talker, config.predictor),
        )
        sizes = plan_sizes(config, options, device, dtype, codec_dtype)
        self.codec = _codec(folder, options, device, config.clones)
        _check_codec(config, self.codec)
        decoder = self.codec.decoder
        wait_for_codec = start_warming(decoder, config.clones)
        self._frontend = Frontend(folder, config)
        model, self.voices = _load(config, self.codec, options, device, dtype, sizes.max_context)
        self.name = folder.name
        self.sample_rate = self.codec.config.output_sample_rate
        self.frame_samples = self.codec.config.decoder.samples_per_frame
        self._frame_seconds = self.frame_samples / self.sample_rate
        sizes = replace(sizes, frame_seconds=self._frame_seconds)
        # The published default: the whole text precedes the first frame, except for clones.
        self._text_first = not config.clones if options.text_first is None else options.text_first
        self.capabilities = replace(capabilities(config), text_in=not self._text_first)
        self._keep_unfinished = options.keep_unfinished
        self._positions = min(sizes.pages * sizes.page_size, sizes.max_context)
        self._meta: Meta = {"engine": "native", "dtype": type_name(dtype)}
        wait_for_codec()
        streams = bool(options.streams and decoder)
        if decoder is not None:
            if streams:
                decoder.prepare_streams(sizes.slots + LATE_STATES, options.few_graphs)
            decoder.prepare_utterances(options.codec_rows)
        stage = open_stage(decoder, sizes.decode_frames, streams=streams)
        continuous = "" if decoder is None or decoder.utterances is None else "continuous codec"
        self.engine = options.open_engine(model, sizes, stage, continuous)
        super().__init__(self.engine, stage, FrameStreamer)
        if streams and device.type == "cuda":
            self.warm_up()

    def warm_up(self) -> None:
        """Makes speech from an artificial prompt, once as a stream and once whole, so that the first request
        is not slower."""
        pad = self.config.text_ids.tts_pad_token_id
        draws = _WARM_FRAMES + 1
        codes = np.full((_WARM_POSITIONS, self.config.codebooks), NONE)
        prompt = Prompt(np.full(_WARM_POSITIONS, pad), codes, np.full(_WARM_FRAMES, pad))
        info = FrameRequestInfo("", self.sample_rate, {}, True, None, self._frame_seconds)
        for stream in (True, False):
            events: SimpleQueue[Event] = SimpleQueue()
            wanted = GenerationRequest("", prompt, SamplingParams(min_new_tokens=draws), 0, draws, stream)
            try:
                self._begin(wanted, info, events.put, stream)
                while isinstance(event := events.get(), AudioChunk):
                    pass
                if isinstance(event, Failed):
                    raise event.error
            except NightjarError as error:
                log.warning("speech could not be made while the model was opened: %s", error)

    def start(self, request: AnyRequest, on_event: OnEvent, stream: bool = False) -> Handle:
        """See `Pipeline.start`. The engine reads one token of an open text in each frame."""
        check_start(self, request, stream)
        pieces = None
        if isinstance(request, SynthesisRequest):
            request, pieces = self._frontend.prepare(request)
        task = decode(request.data)
        voice = None
        if self.voices is not None and request.recording is not None:
            # Recordings of later speech wait until they fill a batch, while the engine has enough to do.
            waits = not stream and self.engine.stats().waiting >= _AHEAD
            voice = self.voices.prepare(
                request.recording, task.reference_ids is not None, _PATIENCE_SECONDS if waits else 0.0
            )
        start = partial(self._start, request, voice=voice, on_event=on_event, stream=stream)
        if not task.text_open:
            return start(task)[1]

        def begin(ids: list[int], final: bool) -> tuple[GenerationRequest, Handle]:
            return start(msgspec.structs.replace(task, body_ids=ids, text_open=not final))

        first = task.streamed_ids(voice and voice.codes)
        text = OpenText(self.engine, begin, first, self.config.text_ids.tts_eos_token_id, on_event, pieces)
        text.append(task.body_ids, False)
        return text

    def _start(
        self,
        request: PreparedRequest,
        task: TokenizedTask,
        voice: PreparedVoice | None,
        on_event: OnEvent,
        stream: bool,
    ) -> tuple[GenerationRequest, Handle]:
        """Submits a request with its text so far to the engine."""
        vector, codes, state = (voice.vector, voice.codes, voice.codec_state) if voice else (None, None, None)
        prompt = build_prompt(self.config, task, vector, codes, self._text_first)
        # Draws of codebook 0: the requested frames, and one for the end, whose position is not needed.
        room = room_after(len(prompt), self._positions, "more pages", beyond=1)
        draws = min(self.config.sampling.max_new_tokens, MAX_TOKENS)
        if (seconds := task.generation.max_seconds) is not None:
            draws = frames_within(seconds, 1 / self._frame_seconds, draws - 1) + 1
        wanted = GenerationRequest(
            request.request_id,
            prompt,
            sampling_params(self.config.sampling, task.generation),
            request.seed,
            min(draws, room),
            stream,
            text_open=task.text_open,
            longest=None if task.text_open else round(longest_seconds(task.text) / self._frame_seconds),
        )
        # The current name, since an executor stops using persistent kernels after a fault.
        meta = {**self._meta, "executor": self.engine.core.executor.name, "prompt_positions": len(prompt)}
        info = FrameRequestInfo(
            task.text, self.sample_rate, meta, self._keep_unfinished, state, self._frame_seconds, codes
        )
        return wanted, self._begin(wanted, info, on_event, stream, request.output)


#: Submits a request with these text ids; the flag says whether the text is complete. Raises `NightjarError`.
Begin = Callable[[list[int], bool], tuple[GenerationRequest, Handle]]


@dataclass(eq=False)
class OpenText:
    """The `pipelines.request.Handle` of an open text.

    Submits the request once the ids of its prompt are known.
    """

    _engine: Engine
    _begin: Begin
    #: The number of text ids that the prompt needs, and the id after the text.
    _first: int
    _end_id: int
    _on_event: OnEvent
    #: Tokenizes text; None: `append` receives ids.
    _pieces: TextPieces | None = None

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._ids = list[int]()
        self._begun: tuple[GenerationRequest, Handle] | None = None
        #: Whether the text or the stream has ended.
        self._complete = False

    def append(self, text: str | list[int], final: bool) -> None:
        error: NightjarError | None = None
        with self._lock:
            if self._complete:
                return
            if isinstance(text, list):
                ids = text
            else:
                assert self._pieces is not None, "the text of a prepared request is ids"
                ids = self._pieces(text, final)
            self._complete = final
            if self._begun is not None:
                if ids or final:
                    self._engine.append(self._begun[0], [*ids, self._end_id] if final else ids, final)
                return
            self._ids += ids
            try:
                if final and not self._ids:
                    raise InputError(
                        ErrorCode.INPUT_EMPTY_TEXT, "There is no text to speak.", "Send some text."
                    )
                if final or len(self._ids) >= self._first:
                    self._begun = self._begin(self._ids, final)
            except NightjarError as refused:
                self._complete = True
                error = refused
        if error is not None:
            self._on_event(Failed(error))

    def cancel(self) -> None:
        with self._lock:
            self._complete = True
            begun = self._begun
        if begun is not None:
            begun[1].cancel()


def sampling_params(defaults: SamplingDefaults, generation: Generation) -> SamplingParams:
    """The sampling of a request: its settings override the checkpoint's.

    As in the published API, a request's settings apply only to the talker, except that a temperature of 0
    makes the predictor greedy too.
    """
    temperature = or_default(generation.temperature, defaults.temperature if defaults.do_sample else 0.0)
    predictor = (
        defaults.predictor_temperature
        if defaults.predictor_do_sample and generation.temperature != 0
        else 0.0
    )
    return SamplingParams(
        temperature=bounded(temperature),
        top_k=min(or_default(generation.top_k, defaults.top_k), MAX_TOP_K),
        top_p=or_default(generation.top_p, defaults.top_p),
        repetition_penalty=bounded(or_default(generation.repetition_penalty, defaults.repetition_penalty)),
        residual_temperature=bounded(predictor),
        residual_top_k=defaults.predictor_top_k,
        residual_top_p=defaults.predictor_top_p,
    )


def _load(
    config: Qwen3TTSConfig,
    codec: Codec,
    options: PipelineOptions,
    device: torch.device,
    dtype: torch.dtype,
    max_context: int,
) -> tuple[Qwen3TTSModel, VoiceCache | None]:
    """Reads the main safetensors. A missing or unknown tensor is an error."""
    voices = None
    with Checkpoint(config.folder) as checkpoint:
        weights = take_weights(checkpoint, config, dtype, device)
        if config.clones:
            speaker = SpeakerEncoder(config.speaker_encoder, checkpoint, device, dtype)
            voices = VoiceCache(config, speaker, codec, options.voice_cache, options.voice_cache_mib << 20)
        checkpoint.ignore("*rotary_emb*")
        checkpoint.finish()
    with torch.inference_mode():
        return Qwen3TTSModel(config, weights, max_context), voices


def _check_codec(config: Qwen3TTSConfig, codec: Codec) -> None:
    decoder = codec.config.decoder
    codes = max(config.predictor.vocab, config.talker.vocab - CONTROL_IDS)
    if decoder.num_quantizers != config.codebooks or decoder.codebook_size < codes:
        raise bad_checkpoint(
            f"{config.folder}: the speech tokenizer has {decoder.num_quantizers} codebooks of {decoder.codebook_size}, "
            f"but the talker makes {config.codebooks} of {codes}.",
            "Download the checkpoint again, with its own speech_tokenizer folder.",
        )

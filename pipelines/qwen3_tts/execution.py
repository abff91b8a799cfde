"""How Qwen3-TTS runs on its device: the sizes of the engine, and the codec's stage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import msgspec
import torch

from kernels.lm_persistent import PREDICTORS, TALKERS
from kernels.registry import on_device
from pipelines.codec.decoder import CodecState
from pipelines.codec.graphs import stream_bytes, utterance_bytes
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineOptions
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, may_be_persistent
from pipelines.errors import ConfigError, SynthesisError
from pipelines.nn.checkpoint import Checkpoint, Shapes
from pipelines.options import Count
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.config import CodecConfig, CodecDecoderConfig, Qwen3TTSConfig, StackConfig

log = logging.getLogger(__name__)

#: Maximum memory for each frame of the codec's batches in bfloat16 on a GPU. Measured: 4.6 GiB for batches of
#: 4,096 frames.
_DECODED_FRAME_BYTES = 1_300_000
#: On a GPU: maximum time that an utterance waits to be decoded with others. The shorter time applies beside
#: streams, and between steps of a continuous batch.
_GATHER_SECONDS, _SHORT_GATHER_SECONDS = 0.5, 0.2
#: Frames and utterances of a full batch.
_GATHER_FRAMES, _MAX_UTTERANCES = 16384, 256
#: States for streams that left their slot while their last chunk is decoded, in addition to one for each slot.
LATE_STATES = 128

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
        Checkpoint.open(config.folder) as model,
        Checkpoint.open(config.folder / "speech_tokenizer") as codec,
    ):
        taken = model.values() * dtype.itemsize
        if options.decodes or config.clones:
            taken += codec.values() * codec_dtype.itemsize
    state, packed, streams = 0, 0, bool(options.streams and options.decodes)
    if device.type == "cuda":
        decoder = CodecConfig.load(config.folder / "speech_tokenizer").decoder
        rows = options.codec_rows if options.decodes else 0
        graphs, state = codec_needs(decoder, codec_dtype, streams, rows)
        taken += graphs + (VOICE_BYTES if config.clones else 0)
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
    frame = needs.decoded_frame if options.decodes else 1
    return options.plan(
        replace(needs, slot=needs.slot + state, decoded_frame=frame),
        device,
        config.talker.max_positions,
        wide=wide,
    )


def memory_needs(
    config: Qwen3TTSConfig, dtype: torch.dtype, page_size: int, max_context: int, weight_bytes: int
) -> MemoryNeeds:
    """The GPU memory that a checkpoint needs; `weight_bytes`: bytes of its weights in their types on the
    device."""
    talker, predictor, width = config.talker, config.predictor, dtype.itemsize
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
    decoder = CodecDecoder(config, Shapes(), "meta", dtype, fused=False)
    taken = utterance_bytes(decoder.shape, rows) if rows else 0
    if not streams:
        return taken, 0
    return taken + stream_bytes(decoder.shape, LATE_STATES), decoder.state_size * dtype.itemsize


def packed_needs(config: Qwen3TTSConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights in the layout of persistent kernels, for a model that is not loaded yet; 0 if there
    are no such kernels."""

    def layers(stack: StackConfig) -> int:
        heads = 2 * (stack.heads + stack.kv_heads) * stack.head_dim
        return stack.layers * stack.hidden * (heads + 3 * stack.intermediate)

    def sizes(stack: StackConfig) -> tuple[int, ...]:
        return stack.hidden, stack.intermediate, stack.heads, stack.kv_heads, stack.head_dim

    predictor, talker, residuals = config.predictor, config.talker, config.codebooks - 1
    if (
        dtype != torch.bfloat16
        or (*sizes(predictor), predictor.vocab, predictor.layers, residuals) not in PREDICTORS
    ):
        return 0
    values = layers(predictor) + residuals * predictor.vocab * predictor.hidden
    if sizes(talker) in TALKERS:
        values += layers(talker)
    return values * dtype.itemsize


def start_warming(decoder: CodecDecoder | None, clones: bool = False) -> Callable[[], None]:
    """Warms the codec's decoder on a GPU while other parts of the model are opened. Returns a function that
    waits until that is done."""

    def warm() -> None:
        """Only logs errors, since they occur again when speech is decoded."""
        try:
            assert decoder is not None
            with on_device(decoder.device), torch.cuda.stream(torch.cuda.Stream(decoder.device)):
                decoder.warm(clones)
                torch.cuda.current_stream().synchronize()
        except Exception:
            log.warning("the codec could not be warmed up", exc_info=True)

    if decoder is None or decoder.device.type == "cpu":
        return lambda: None
    thread = threading.Thread(target=warm, name="codec-warming", daemon=True)
    thread.start()
    return thread.join


def open_stage(
    decoder: CodecDecoder | None, decode_frames: int | None = None, streams: bool = False
) -> CodecStage[CodecState]:
    """Opens the codec's stage; without a decoder it only stands for one. On a GPU it gathers utterances into batches of up to `decode_frames` frames, or
    decodes them as a continuous batch if the decoder was prepared for one. `streams`: whether there can be
    streams."""
    if decoder is None:
        return CodecStage()
    decoder.batch_frames = decode_frames or decoder.batch_frames
    if decoder.device.type == "cpu":
        return CodecStage(decoder)
    gather_seconds = _SHORT_GATHER_SECONDS if streams or decoder.utterances is not None else _GATHER_SECONDS
    return CodecStage(decoder, _MAX_UTTERANCES, decoder.device, gather_seconds, _GATHER_FRAMES)

"""Fish Speech S2 as a pipeline: requests in the words of a dialogue to turns, the dual AR on either
engine, its frames to speech."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.engine.opening import NativeModelOptions, memory_told
from pipelines.errors import ErrorCode, InputError
from pipelines.fish_speech.codec import Codec, CodecDecoder, ReferenceEncoder, load_codec
from pipelines.fish_speech.config import CAPABILITIES, FishConfig
from pipelines.fish_speech.engines import model_spec, native_host, plan_sizes
from pipelines.fish_speech.model import FishModel, load_weights
from pipelines.fish_speech.multi_turn import (
    FishRequestInfo,
    FishStreamer,
    FishUtterance,
    TurnPlan,
)
from pipelines.fish_speech.prompt import Conversation, Reference, Vocabulary, clean, clean_reference, groups
from pipelines.nn.checkpoint import open_device, precision, type_name
from pipelines.options import ENGINE, TokenModelOptions, read_options, take_engine
from pipelines.request import SynthesisRequest
from pipelines.results import Meta, SpeechPipeline
from pipelines.tokens import TokenHost, TokenRequest, token_sampling
from pipelines.validation import check_room, frames_within, speech_task
from pipelines.vllm_engine.library import load_vllm

#: On a GPU finished utterances wait this long for company, or until there are so many of them or of their
#: frames.
_GATHER_SECONDS, _GATHER_UTTERANCES, _GATHER_FRAMES = 0.05, 256, 4096


@dataclass(frozen=True, slots=True)
class FishOptions(TokenModelOptions):
    """How a checkpoint is opened on vLLM; None means the best for the device."""

    #: Whether prompts that begin alike share their KV, as those of one voice do.
    share_prefixes: bool | None = None


@memory_told()
def open_pipeline(folder: Path, **options: Any) -> FishPipeline:
    """Loads a checkpoint folder. The option `engine` is `native`, `vllm` or `auto`
    (`pipelines.engine_choice`); the others are its own.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that
    is unknown or that it cannot run with, and `SynthesisError` (`synth.oom`) where other programs have
    taken the GPU's memory meanwhile.
    """
    engine, rest = take_engine(options)
    chosen = read_options(NativeModelOptions if engine == "native" else FishOptions, rest, ENGINE)
    native = isinstance(chosen, NativeModelOptions)
    if not native:
        load_vllm(chosen.cpu_kv_gib)
    device = open_device(chosen.device, chosen.threads)
    dtype = precision(chosen.dtype, device)
    config = FishConfig.from_folder(folder)
    sizes = plan_sizes(config, chosen, device, dtype) if native else None
    vocabulary = Vocabulary.from_folder(config)
    codec_dtype = chosen.codec_dtype or (chosen.dtype if native else None)
    codec = load_codec(config, device, precision(codec_dtype, device), chosen.reproducible)
    stage = open_stage(codec.decoder, sizes.decode_frames if sizes else None)
    if isinstance(chosen, NativeModelOptions):
        assert sizes is not None
        with torch.inference_mode():
            model = FishModel(config, load_weights(config, dtype, device), sizes.max_context)
        host = native_host(config, chosen.open_engine(model, sizes, stage))
    else:
        # vLLM reads the tensors in a process of its own, where an error would only be a dead engine; and it
        # measures the memory that is left, so it is the last.
        load_weights(config, torch.float32, torch.device("meta"))
        from pipelines.vllm_engine.host import VllmHost

        host = VllmHost(model_spec(config, chosen.share_prefixes), chosen)
    return FishPipeline(config, vocabulary, codec, host, stage, keep_unfinished=chosen.keep_unfinished)


class FishPipeline(SpeechPipeline[TokenRequest, FishRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`."""

    def __init__(
        self,
        config: FishConfig,
        vocabulary: Vocabulary,
        codec: Codec,
        host: TokenHost,
        stage: CodecStage[CodecState],
        *,
        keep_unfinished: bool = False,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.references = ReferenceEncoder(codec.encoder)
        self.host = host
        self.name = config.folder.name
        self.sample_rate = config.sample_rate
        self.capabilities = CAPABILITIES
        self._keep_unfinished = keep_unfinished
        self._context = host.info.max_context
        info, codec_dtype = host.info, type_name(codec.decoder.dtype)
        self._meta: Meta = {"engine": info.engine, "dtype": info.dtype, "codec_dtype": codec_dtype}
        if info.engine == "native":
            self._meta["executor"] = info.executor
        super().__init__(host, stage, FishStreamer, FishUtterance, cuts_chunks=info.engine == "native")

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, FishRequestInfo]:
        """The item's turns and what delivery must know. Raises `InputError` for what this model cannot do."""
        task = speech_task(request.messages, request.generation, self.capabilities, request.seed)
        if request.generation.repetition_penalty not in (None, 1.0):
            message = (
                "This model has no repetition penalty: its sampling looks out for repetitions by itself."
            )
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, message, "Remove `repetition_penalty`.")
        defaults, context = self.config.sampling, self._context
        texts = groups(clean(task.text), defaults.chunk_bytes, defaults.chunk_turns)
        words = [len(self.vocabulary.spoken(text)) for text in texts]
        self._check_room(sum(words))
        spoken = [(recording, clean_reference(text)) for recording, text in task.references]
        references = [Reference(text, self.references.prepare(recording)) for recording, text in spoken]
        conversation = Conversation(self.vocabulary, self.config.codebooks, references)
        sampling = token_sampling(
            defaults, request.generation, defaults.max_new_tokens, request.seed, (self.config.end,)
        )
        seconds, rate = request.generation.max_seconds, self.config.frames_per_second
        frames = None if seconds is None else frames_within(seconds, rate, context)
        plan = TurnPlan(
            request.request_id, conversation, texts, sampling, frames, context, self._keep_unfinished
        )
        self._check_room(len(plan.prompt.ids) + sum(words[1:]))
        meta = {**self._meta, "prompt_positions": len(plan.prompt.ids), "turns": len(texts)}
        info = FishRequestInfo(task.text, self.sample_rate, meta, self._keep_unfinished, plan)
        return plan.current, info

    def _check_room(self, positions: int) -> None:
        """Raises `InputError` (`input.too_long`) where so many positions leave no room for speech."""
        check_room(positions, self._context, self._context - positions, "a larger max_context")


def open_stage(decoder: CodecDecoder, decode_frames: int | None = None) -> CodecStage[CodecState]:
    """The codec's decoder on threads of its own; on a GPU utterances wait for company, of which
    `decode_frames` are decoded together."""
    decoder.batch_frames = decode_frames or decoder.batch_frames
    if decoder.device.type == "cpu":
        return CodecStage(decoder)
    return CodecStage(decoder, _GATHER_UTTERANCES, decoder.device, _GATHER_SECONDS, _GATHER_FRAMES)

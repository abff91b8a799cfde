"""Fish Speech S2 as a pipeline: requests in the words of a dialogue to turns, the dual AR on vLLM, its frames to speech."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, InputError
from pipelines.fish_speech.codec import Codec, CodecDecoder, ReferenceEncoder, load_codec
from pipelines.fish_speech.config import CAPABILITIES, FishConfig
from pipelines.fish_speech.language_model import LanguageModel, as_extra
from pipelines.fish_speech.multi_turn import TurnEngine, TurnPlan
from pipelines.fish_speech.prompt import Conversation, Reference, Vocabulary, clean, groups
from pipelines.fish_speech.weights import check_language_model
from pipelines.nn.checkpoint import TokenModelOptions, open_device, precision, read_options, type_name
from pipelines.request import Generation, SynthesisRequest
from pipelines.results import FinishedCodes, SpeechPipeline, no_audio
from pipelines.validation import check_room, check_seed, frames_within, speech_task
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import Tokens
from pipelines.vllm_engine.tokens import TokenRequestInfo, TokenStreamer, TokenUtteranceFuture, token_sampling


@dataclass(frozen=True, slots=True)
class FishRequestInfo(TokenRequestInfo[CodecState]):
    """What results need to know of a request, and the codec that its streams start in."""

    decoder: CodecDecoder

    def read(self, tokens: Tokens) -> FinishedCodes[CodecState]:
        """The frames of all turns. Raises `SynthesisError`: `synth.no_eos`, `synth.no_audio` when a turn has none."""
        assert tokens.codes is not None
        self.check_end(tokens.finish, len(tokens.codes))
        if not len(tokens.codes):
            raise no_audio("The model ended a turn before its first frame.")
        return FinishedCodes(tokens.codes, tokens.finish)

    def reader(self) -> FishReader:
        return FishReader(self.decoder)


class FishReader:
    """A `pipelines.vllm_engine.tokens.TokenReader` of frames that are whole as they come."""

    def __init__(self, decoder: CodecDecoder) -> None:
        self._decoder = decoder

    def read(self, ids: list[int], codes: NDArray[np.int64] | None) -> NDArray[np.int64]:
        assert codes is not None
        return codes

    def start(self) -> CodecState:
        return self._decoder.new_state()


class FishStreamer(TokenStreamer[CodecState]):
    """A stream of frames, 21.5 a second: the first chunk is the first frame."""

    chunk_frames = (1, 2, 4, 8, 12)


#: Positions of a sequence: a dialogue of ten minutes with its references and texts.
_CONTEXT = 16_384
#: Of the GPU's memory: the LM has nine billion bytes, and the codec works beside it.
_MEMORY_SHARE = 0.6
#: On a GPU finished utterances wait this long for company, or until there are so many of them or of their frames.
_GATHER_SECONDS, _GATHER_UTTERANCES, _GATHER_FRAMES = 0.05, 256, 4096


def open_pipeline(folder: Path, **options: Any) -> FishPipeline:
    """Loads a checkpoint folder.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that is unknown.
    """
    chosen = read_options(TokenModelOptions, options)
    load_vllm(chosen.cpu_kv_gib)
    device = open_device(chosen.device, chosen.threads)
    config = FishConfig.from_folder(folder)
    check_language_model(config)
    vocabulary = Vocabulary.from_folder(config)
    codec = load_codec(config, device, precision(chosen.codec_dtype, device))
    model = LanguageModel(config)
    try:
        # Last: it measures the memory that is left, and a fault of the folder shows before half a minute of its start.
        host = VllmHost(model.spec, chosen.vllm(_MEMORY_SHARE, _CONTEXT, config.max_positions))
    except BaseException:
        model.close()
        raise
    return FishPipeline(config, vocabulary, codec, model, host, keep_unfinished=chosen.keep_unfinished)


class FishPipeline(SpeechPipeline[TurnPlan, FishRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`."""

    def __init__(
        self,
        config: FishConfig,
        vocabulary: Vocabulary,
        codec: Codec,
        model: LanguageModel,
        host: VllmHost,
        *,
        keep_unfinished: bool = False,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.codec = codec
        self.references = ReferenceEncoder(codec.encoder)
        self.host = host
        self.name = config.folder.name
        self.sample_rate = config.sample_rate
        self.capabilities = CAPABILITIES
        self._model = model
        self._keep_unfinished = keep_unfinished
        self._meta = {"engine": "vllm", "dtype": host.dtype, "codec_dtype": type_name(codec.decoder.dtype)}
        super().__init__(TurnEngine(host), _stage(codec.decoder), TokenUtteranceFuture, FishStreamer)

    def close(self) -> None:
        """Frees the engine; see `Pipeline.close`."""
        super().close()
        self._model.close()

    def _prepare(self, request: SynthesisRequest) -> tuple[TurnPlan, FishRequestInfo]:
        """The item's turns and what delivery must know. Raises `InputError` for what this model cannot do."""
        task = speech_task(request.messages, request.generation, self.capabilities)
        check_seed(request.seed)
        if request.generation.repetition_penalty not in (None, 1.0):
            message = "This model has no repetition penalty: its sampling looks out for repetitions by itself."
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, message, "Remove `repetition_penalty`.")
        defaults, context = self.config.sampling, self.host.max_context
        texts = groups(clean(task.text), defaults.chunk_bytes, defaults.chunk_turns)
        words = [len(self.vocabulary.spoken(text)) for text in texts]
        self._check_room(sum(words))
        spoken = [(recording, clean(text)) for recording, text in task.references]
        references = [Reference(text, self.references.prepare(recording)) for recording, text in spoken]
        conversation = Conversation(self.vocabulary, self.config.codebooks, references)
        sampling = token_sampling(defaults, request.generation, defaults.max_new_tokens, request.seed, (self.config.end,))
        frames = self._frames(request.generation)
        plan = TurnPlan(request.request_id, conversation, texts, sampling, frames, context, as_extra, self._keep_unfinished)
        self._check_room(len(plan.prompt.ids) + sum(words[1:]))
        meta = {**self._meta, "prompt_positions": len(plan.prompt.ids), "turns": len(texts)}
        return plan, FishRequestInfo(task.text, self.sample_rate, meta, self._keep_unfinished, self.codec.decoder)

    def _check_room(self, positions: int) -> None:
        """Raises `InputError` (`input.too_long`) where so many positions leave no room for speech."""
        context = self.host.max_context
        check_room(positions, context, context - positions, "a larger max_context")

    def _frames(self, generation: Generation) -> int | None:
        """Frames of the whole item; None: only its turns are limited."""
        if generation.max_seconds is None:
            return None
        return frames_within(generation.max_seconds, self.config.frames_per_second, self.host.max_context)


def _stage(decoder: CodecDecoder) -> CodecStage[CodecState]:
    if decoder.device.type == "cpu":
        return CodecStage(decoder)
    return CodecStage(decoder, _GATHER_UTTERANCES, decoder.device, _GATHER_SECONDS, _GATHER_FRAMES)

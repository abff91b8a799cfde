"""The pipeline of SparkTTS: makes prompts from requests, runs the LM on either engine, and makes speech from
its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pipelines.codec.stage import CodecStage
from pipelines.duration import longest_seconds
from pipelines.engine.engine import NativeHost
from pipelines.engine.opening import NativeModelOptions, check_executor, explain_oom
from pipelines.errors import invalid, unsupported
from pipelines.nn.checkpoint import open_device, precision, type_name
from pipelines.options import CONTEXT, TokenModelOptions, read_model_options
from pipelines.request import IntArray, Listener, SynthesisRequest
from pipelines.results import (
    FinishedCodes,
    RequestInfo,
    SpeechPipeline,
    StageDecoder,
    Streamer,
    no_audio,
)
from pipelines.spark_tts.bicodec import (
    BATCH_TOKENS,
    RIGHT_TOKENS,
    BiCodec,
    BiCodecDecoder,
    Voice,
    load_bicodec,
)
from pipelines.spark_tts.config import CAPABILITIES, DEFAULT_VOICE, LLM, SAMPLING, WAV2VEC2, SparkConfig
from pipelines.spark_tts.language_model import Drawable, SparkModel, load_weights, plan_sizes
from pipelines.spark_tts.prompt import Vocabulary, clone_prompt, creation_prompt
from pipelines.spark_tts.reference import ReferenceEncoder, SemanticFeatures
from pipelines.tokens import TokenHost, TokenPrompt, TokenRequest, Tokens, token_sampling
from pipelines.validation import SpeechTask, frames_within, room_after, speech_task
from pipelines.vllm_engine.library import ModelSpec, load_vllm


@dataclass(frozen=True, slots=True)
class SparkRequestInfo(RequestInfo):
    """The parts of a request that its results need."""

    vocabulary: Vocabulary
    #: The global tokens of a cloned voice; None if the LM makes them.
    voice: tuple[int, ...] | None
    #: Number of global tokens of a voice.
    voice_tokens: int
    #: Maximum semantic tokens of the speech; None: the LM's limit.
    max_semantic: int | None = None

    def read(self, tokens: Tokens) -> FinishedCodes:
        """See `RequestInfo.read`; cuts speech that is longer than requested."""
        found = self.vocabulary.parse(tokens.ids)
        finish = tokens.finish
        semantic = found.semantic[: self.max_semantic]
        if len(semantic) < len(found.semantic):
            finish = "length"
        self.check_end(finish, len(semantic), "speech tokens")
        voice = found.voice if self.voice is None else self.voice
        if not semantic:
            raise no_audio("The model wrote no speech tokens.")
        if len(voice) != self.voice_tokens:
            raise no_audio(f"The model wrote {len(voice)} tokens of a voice instead of {self.voice_tokens}.")
        state = Voice(torch.tensor(voice))
        own = tokens.log_probabilities
        if own is not None:
            speech = self.vocabulary.semantic
            own = own[[token in speech for token in tokens.ids]][: len(semantic)]
        return FinishedCodes(column(semantic), finish, state, None, column(voice), own)


class SparkStreamer(Streamer):
    """A stream of semantic tokens, 50 per second. The global tokens of a created voice precede them."""

    chunk_frames = (20, 25, 50, 100)
    looks_ahead = True

    def __init__(self, info: SparkRequestInfo, stage: CodecStage, listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self._request = info
        self._ids = list[int]()
        self._left = info.max_semantic

    def frames_of(self, ids: list[int], codes: IntArray | None) -> IntArray:
        self._ids += ids
        semantic = self._request.vocabulary.parse(ids).semantic[: self._left]
        if self._left is not None:
            self._left -= len(semantic)
        return column(semantic)

    def first_state(self) -> Voice | None:
        """The voice, whose tokens precede the first semantic one; None if it is incomplete."""
        info = self._request
        voice = info.vocabulary.parse(self._ids).voice if info.voice is None else info.voice
        return Voice(torch.tensor(voice)) if len(voice) == info.voice_tokens else None


def column(semantic: tuple[int, ...] | list[int]) -> IntArray:
    """Semantic tokens as codes of one codebook, int64 [steps, 1]."""
    return np.array(semantic, dtype=np.int64).reshape(-1, 1)


def model_spec(config: SparkConfig) -> ModelSpec:
    """The model's specification for vLLM."""
    return ModelSpec(
        config.folder / LLM,
        memory_share=_MEMORY_SHARE,
        context=CONTEXT,
        max_positions=config.lm.max_positions,
    )


#: Maximum and usual numbers of tokens of a created voice besides its global and semantic tokens: pitch and
#: speed values, and control tokens around the parts.
CREATION_EXTRAS = 32
_USUAL_EXTRAS = 8
#: vLLM's share of the GPU's memory. The LM has a billion bytes; BiCodec and the reference encoder need the
#: rest.
_MEMORY_SHARE = 0.5
#: Maximum utterances of a batch of the codec.
_CODEC_BATCH = 64
#: On a GPU utterances wait this long to be decoded with others, since a small batch costs more for each token.
_GATHER_SECONDS = 0.05


@explain_oom()
def open_pipeline(folder: Path, **options: Any) -> SparkPipeline:
    """Loads a checkpoint folder. The option `engine` is `native`, `vllm` or `auto`
    (`pipelines.options`); the other options are those of that engine.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that
    is unknown or not supported, and `SynthesisError` (`synth.oom`) if other programs use the GPU's memory.
    """
    chosen = read_model_options(options, NativeModelOptions, TokenModelOptions)
    if chosen.dtype == "float16":
        raise invalid("SparkTTS does not work in float16.", "Choose bfloat16 or float32.")
    if isinstance(chosen, TokenModelOptions):
        load_vllm(chosen.cpu_kv_gib)
    device = open_device(chosen.device, chosen.threads)
    config = SparkConfig.from_folder(folder)
    if isinstance(chosen, TokenModelOptions):
        # Checks the tensors here: vLLM reads them in another process, where an error would only end the
        # engine.
        load_weights(config, Drawable(np.zeros(0, np.int64), ()), torch.bfloat16, "meta")
        parts = Parts.load(config, device, precision(chosen.codec_dtype, device), chosen.decodes)
        from pipelines.vllm_engine.host import VllmHost

        # Opened last, because it measures the remaining memory, and because it takes half a minute: other
        # errors are raised before.
        host = VllmHost(model_spec(config), chosen)
        return SparkPipeline(parts, open_stage(parts.codec), host, chosen.keep_unfinished)
    dtype = precision(chosen.dtype, device)
    lm = config.lm
    check_executor(device, chosen.executor, chosen.reproducible, chosen.page_size, [lm])
    sizes = plan_sizes(config, chosen, device, dtype)
    parts = Parts.load(config, device, precision(chosen.codec_dtype or chosen.dtype, device), chosen.decodes)
    drawable = Drawable.of(parts.vocabulary, lm)
    stage = open_stage(parts.codec, chosen.reproducible)
    with torch.inference_mode():
        model = SparkModel(lm, load_weights(config, drawable, dtype, device), drawable, sizes.max_context)
    host = NativeHost(chosen.open_engine(model, sizes, stage), drawable.ids)
    return SparkPipeline(parts, stage, host, chosen.keep_unfinished)


def open_decoder(folder: Path, **options: Any) -> StageDecoder:
    """Loads the decoder of a checkpoint's codec alone, with the options of `open_pipeline`; raises like it."""
    chosen = read_model_options(options, NativeModelOptions, TokenModelOptions)
    device = open_device(chosen.device, chosen.threads)
    config = SparkConfig.from_folder(folder)
    native = isinstance(chosen, NativeModelOptions)
    dtype = precision(chosen.codec_dtype or (chosen.dtype if native else None), device)
    stage = open_stage(load_bicodec(config, device, dtype)[1], native and chosen.reproducible)
    return StageDecoder(stage, config.sample_rate, lambda voice: Voice(voice[:, 0]))


class Parts(NamedTuple):
    """The parts of the model except the LM."""

    config: SparkConfig
    vocabulary: Vocabulary
    references: ReferenceEncoder
    codec: BiCodec | None

    @classmethod
    def load(
        cls, config: SparkConfig, device: torch.device, codec_dtype: torch.dtype, decodes: bool = True
    ) -> Parts:
        """Reads a checkpoint folder, the codec's decoder only with `decodes`. Raises `ModelError` (`model.bad_checkpoint`)."""
        sizes = config.bicodec
        vocabulary = Vocabulary.from_folder(config.folder / LLM, sizes.codebook_size, sizes.global_codes)
        tokenizer, codec = load_bicodec(config, device, codec_dtype, decodes=decodes)
        features = SemanticFeatures(config.folder / WAV2VEC2, device)
        return cls(config, vocabulary, ReferenceEncoder(config, tokenizer, features), codec)


def open_stage(codec: BiCodec | None, reproducible: bool = False) -> CodecStage:
    """Opens BiCodec's stage; without a decoder it only stands for one. On a GPU utterances are gathered into
    batches, unless `reproducible`."""
    if codec is None:
        return CodecStage()
    gather = 0.0 if reproducible or codec.device.type == "cpu" else _GATHER_SECONDS
    return CodecStage(BiCodecDecoder(codec, reproducible), _CODEC_BATCH, codec.device, gather, BATCH_TOKENS)


class SparkPipeline(SpeechPipeline[TokenRequest, SparkRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`."""

    def __init__(self, parts: Parts, stage: CodecStage, host: TokenHost, keep_unfinished: bool) -> None:
        self.parts = parts
        self.config = parts.config
        self.name = self.config.folder.name
        self.sample_rate = self.config.sample_rate
        self.frame_samples = self.config.bicodec.samples_per_token
        self.capabilities = CAPABILITIES
        self._keep_unfinished = keep_unfinished
        info = host.info
        self._context = info.max_context
        executor = {"executor": info.executor} if info.engine == "native" else {}
        self._meta = {"engine": info.engine, **executor, "dtype": info.dtype}
        if parts.codec is not None:
            self._meta["codec_dtype"] = type_name(parts.codec.dtype)
        super().__init__(host, stage, SparkStreamer)

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, SparkRequestInfo]:
        """The LM's request, and the parts of the request that its results need. Raises `InputError` for a
        request that this model cannot serve."""
        config = self.config
        generation = request.generation
        vocabulary = self.parts.vocabulary
        task = speech_task(request.messages, generation, self.capabilities, request.seed)
        prompt, voice = self._prompt(task)
        room = room_after(len(prompt), self._context)
        # Maximum tokens that the LM writes: speech, the tokens before it, and one for the end.
        tokens = config.bicodec.speaker.token_num
        max_tokens = SAMPLING.max_new_tokens
        max_semantic = None
        if generation.max_seconds is not None:
            max_semantic = frames_within(generation.max_seconds, config.tokens_per_second, max_tokens)
            before = 1 if voice is not None else tokens + CREATION_EXTRAS
            max_tokens = min(max_tokens, before + max_semantic + 1)
        stops = (config.lm.eos_token_id, vocabulary.controls["end_semantic_token"])
        sampling = token_sampling(SAMPLING, generation, min(max_tokens, room), request.seed, stops)
        meta = {**self._meta, "prompt_positions": len(prompt)}
        info = SparkRequestInfo(
            task.text, self.sample_rate, meta, self._keep_unfinished, vocabulary, voice, tokens, max_semantic
        )
        before = tokens + _USUAL_EXTRAS if voice is None else int(task.reference_text is None)
        longest = before + round(longest_seconds(task.text) * config.tokens_per_second)
        inaudible = before + RIGHT_TOKENS
        return TokenRequest(
            request.request_id, TokenPrompt(prompt), sampling, inaudible=inaudible, longest=longest
        ), info

    def _prompt(self, task: SpeechTask) -> tuple[list[int], tuple[int, ...] | None]:
        """The prompt of a task and the voice it clones; None for a voice that the LM creates."""
        vocabulary = self.parts.vocabulary
        if not task.reference_audio:
            return creation_prompt(vocabulary, task.text, task.voice or DEFAULT_VOICE), None
        if task.voice is not None:
            raise unsupported(
                f"The line has both reference audio and the created voice {task.voice!r}.",
                "Remove one of them.",
            )
        reference = self.parts.references.prepare(task.recording, with_semantic=bool(task.reference_text))
        prompt = clone_prompt(vocabulary, task.text, reference.voice, task.reference_text, reference.semantic)
        return prompt, reference.voice

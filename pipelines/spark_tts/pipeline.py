"""SparkTTS as a pipeline: requests in the words of a dialogue to prompts, the LM on vLLM, its tokens to speech."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.delivery.pipeline import SpeechPipeline
from pipelines.delivery.tokens import TokenUtterer, token_sampling
from pipelines.engine.codec_stage import CodecStage
from pipelines.errors import ConfigError, ErrorCode, InputError
from pipelines.nn.options import TokenModelOptions, open_device, precision, read_options, type_name
from pipelines.request import Generation, SynthesisRequest
from pipelines.spark_tts.bicodec import BiCodec, load_bicodec
from pipelines.spark_tts.card import CAPABILITIES, DEFAULT_VOICE
from pipelines.spark_tts.config import LLM, WAV2VEC2, SparkConfig
from pipelines.spark_tts.delivery import SparkOrder, SparkStreamer
from pipelines.spark_tts.features import SemanticFeatures
from pipelines.spark_tts.lm import check_weights, model_spec
from pipelines.spark_tts.prompt import clone_prompt, creation_prompt
from pipelines.spark_tts.reference import ReferenceEncoder
from pipelines.spark_tts.stage import BATCH_TOKENS, BiCodecDecoder
from pipelines.spark_tts.vocabulary import Vocabulary
from pipelines.task import SpeechTask, check_room, check_seed, frames_within, speech_task
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import TokenRequest, VllmOptions

#: Tokens that a created voice writes beside its global and semantic tokens: pitch and speed values, and the marks around the parts.
CREATION_EXTRAS = 32
#: Positions of a sequence: a minute of reference, a minute of speech, and their texts.
_CONTEXT = 8192
#: Of the GPU's memory: the LM has a billion bytes, and BiCodec and the reference encoder work beside it.
_MEMORY_SHARE = 0.5
_CODEC_BATCH = 64
#: On a GPU utterances wait this long for company: a small batch costs more a token.
_GATHER_SECONDS = 0.05


def open_pipeline(folder: Path, **options: Any) -> SparkPipeline:
    """Loads a checkpoint folder.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that is unknown or that it
    cannot run with.
    """
    chosen = read_options(TokenModelOptions, options)
    if chosen.dtype == "float16":
        raise ConfigError(ErrorCode.CONFIG_INVALID, "SparkTTS does not work in float16.", "Choose bfloat16 or float32.")
    load_vllm(chosen.cpu_kv_gib)
    device = open_device(chosen.device, chosen.threads)
    config = SparkConfig.from_folder(folder)
    check_weights(config)
    sizes = config.bicodec
    vocabulary = Vocabulary.from_folder(folder / LLM, sizes.codebook_size, sizes.global_codes)
    tokenizer, codec = load_bicodec(config, device, precision(chosen.codec_dtype, device))
    references = ReferenceEncoder(config, tokenizer, SemanticFeatures(folder / WAV2VEC2, device))
    # Last: it measures the memory that is left, and a fault of the folder shows before half a minute of its start.
    host = VllmHost(model_spec(config), vllm_options(chosen, config))
    return SparkPipeline(config, vocabulary, references, codec, host, keep_unfinished=chosen.keep_unfinished)


class SparkPipeline(SpeechPipeline[TokenRequest, SparkOrder]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`."""

    def __init__(
        self,
        config: SparkConfig,
        vocabulary: Vocabulary,
        references: ReferenceEncoder,
        codec: BiCodec,
        host: VllmHost,
        *,
        keep_unfinished: bool = False,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.references = references
        self.host = host
        self.name = config.folder.name
        self.sample_rate = config.sample_rate
        self.capabilities = CAPABILITIES
        self._keep_unfinished = keep_unfinished
        self._meta = {"engine": "vllm", "dtype": host.dtype, "codec_dtype": type_name(codec.dtype)}
        gather = 0.0 if codec.device.type == "cpu" else _GATHER_SECONDS
        stage = CodecStage(BiCodecDecoder(codec), _CODEC_BATCH, codec.device, gather, BATCH_TOKENS)
        super().__init__(host, stage, TokenUtterer, SparkStreamer)

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, SparkOrder]:
        """The LM's request and what delivery must know. Raises `InputError` for what this model cannot do."""
        task = speech_task(request.messages, request.generation, self.capabilities)
        check_seed(request.seed)
        prompt, voice = self._prompt(task)
        room = self.host.max_context - len(prompt)
        check_room(len(prompt), self.host.max_context, room, "a larger max_context")
        most = min(self._token_limit(request.generation, created=voice is None), room)
        stops = (self.config.lm.eos, self.vocabulary.control("end_semantic_token"))
        sampling = token_sampling(self.config.sampling, request.generation, most, request.seed, stops)
        meta = {**self._meta, "prompt_positions": len(prompt)}
        tokens = self.config.bicodec.speaker.tokens
        order = SparkOrder(task.text, self.sample_rate, meta, self._keep_unfinished, self.vocabulary, voice, tokens)
        return TokenRequest(request.request_id, prompt, sampling), order

    def _prompt(self, task: SpeechTask) -> tuple[list[int], tuple[int, ...] | None]:
        """The prompt of a task and the voice it clones; None for a voice that the LM creates."""
        if task.reference_audio is None:
            return creation_prompt(self.vocabulary, task.text, task.voice or DEFAULT_VOICE), None
        if task.voice is not None:
            message = f"The line has both reference audio and the created voice {task.voice!r}."
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, message, "Remove one of them.")
        reference = self.references.prepare(task.recording, with_semantic=bool(task.reference_text))
        prompt = clone_prompt(self.vocabulary, task.text, reference.voice, task.reference_text, reference.semantic)
        return prompt, reference.voice

    def _token_limit(self, generation: Generation, created: bool) -> int:
        """Tokens that the LM may write: speech, what stands before it, and one that may be the end."""
        limit = self.config.sampling.max_new_tokens
        if generation.max_seconds is None:
            return limit
        before = self.config.bicodec.speaker.tokens + CREATION_EXTRAS if created else 1
        return min(limit, before + frames_within(generation.max_seconds, self.config.tokens_per_second, limit) + 1)


def vllm_options(options: TokenModelOptions, config: SparkConfig) -> VllmOptions:
    """What vLLM is told of a person's choice, with the defaults of this model."""
    return options.vllm(_MEMORY_SHARE, _CONTEXT, config.lm.max_positions)

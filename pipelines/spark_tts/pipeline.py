"""SparkTTS as a pipeline: requests in the words of a dialogue to prompts, the LM on vLLM, its tokens to speech."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from pipelines.engine.codec_stage import CodecStage
from pipelines.errors import ConfigError, ErrorCode, InputError, SynthesisError
from pipelines.request import AudioChunk, EngineStats, Generation, Speech, SynthesisRequest
from pipelines.spark_tts.bicodec import BiCodec, load_bicodec
from pipelines.spark_tts.card import CAPABILITIES, DEFAULT_VOICE
from pipelines.spark_tts.config import LLM, WAV2VEC2, SamplingDefaults, SparkConfig
from pipelines.spark_tts.delivery import Order, Streamer, Utterer
from pipelines.spark_tts.features import SemanticFeatures
from pipelines.spark_tts.lm import check_weights, model_spec
from pipelines.spark_tts.prompt import clone_prompt, creation_prompt
from pipelines.spark_tts.reference import ReferenceEncoder
from pipelines.spark_tts.stage import BiCodecDecoder, Voice
from pipelines.spark_tts.vocabulary import Vocabulary
from pipelines.task import SpeechTask, speech_task
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import TokenRequest, TokenSampling, VllmOptions

#: Tokens that a created voice writes beside its global and semantic tokens: pitch and speed values, and the marks around the parts.
CREATION_EXTRAS = 32
#: Positions of a sequence: a minute of reference, a minute of speech, and their texts.
_CONTEXT = 8192
#: Of the GPU's memory: the LM has a billion bytes, and BiCodec and the reference encoder work beside it.
_MEMORY_SHARE = 0.5
_CODEC_BATCH = 64
#: Of a token: seconds that are whole tokens must not become one more.
_ROUNDING = 1e-6
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How a checkpoint is opened; None means the best for the device. The LM's are those of `VllmOptions`."""

    #: Of BiCodec and the reference encoder; vLLM takes the device it was built for.
    device: str | None = None
    codec_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    memory_share: float | None = None
    cpu_kv_gib: int = 1
    slots: int | None = None
    waiting_room: int = 64
    max_context: int | None = None
    step_tokens: int | None = None
    tensor_parallel: int = 1
    eager: bool | None = None
    #: Whether speech that reaches its limit without an end is returned (meta finish "length") instead of failing.
    keep_unfinished: bool = False
    #: CPU threads of BiCodec and the reference encoder.
    threads: int | None = None


def open_pipeline(folder: Path, **options: Any) -> SparkPipeline:
    """Loads a checkpoint folder.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that is unknown.
    """
    known = {field.name for field in fields(SparkOptions)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"Unknown option {unknown[0]!r}.", f"Options are: {', '.join(sorted(known))}.")
    chosen = SparkOptions(**options)
    load_vllm(chosen.cpu_kv_gib)
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" or chosen.threads:
        torch.set_num_threads(chosen.threads or 1)
    config = SparkConfig.from_folder(folder)
    check_weights(config)
    sizes = config.bicodec
    vocabulary = Vocabulary.from_folder(folder / LLM, sizes.codebook_size, sizes.global_codes)
    codec_dtype = _TYPES[chosen.codec_dtype or ("float32" if device.type == "cpu" else "bfloat16")]
    tokenizer, codec = load_bicodec(config, device, codec_dtype)
    references = ReferenceEncoder(config, tokenizer, SemanticFeatures(folder / WAV2VEC2, device))
    # Last: it measures the memory that is left, and a fault of the folder shows before half a minute of its start.
    host = VllmHost(model_spec(config), vllm_options(chosen, config))
    return SparkPipeline(config, vocabulary, references, codec, host, keep_unfinished=chosen.keep_unfinished)


class SparkPipeline:
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
        self._lock = threading.Lock()
        self._receivers: dict[str, list[Utterer | Streamer]] = {}
        self._audio_seconds = 0.0
        self._stage: CodecStage[Voice] = CodecStage(BiCodecDecoder(codec), max_batch=_CODEC_BATCH)
        self._meta = {"engine": "vllm", "dtype": host.dtype, "codec_dtype": str(codec.dtype).removeprefix("torch.")}

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        """Queues a request; see `Pipeline.submit`."""
        sequence, order = self._prepare(request)
        utterer = Utterer(order, self._stage, lambda seconds: self._forget(request.request_id, utterer, seconds))
        self._send(sequence, utterer)
        return utterer.future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        """Audio from the first tokens on; closing the iterator ends the request. See `Pipeline.stream`."""
        sequence, order = self._prepare(request)
        streamer = Streamer(order, self._stage, lambda seconds: self._forget(request.request_id, streamer, seconds))
        self._send(sequence, streamer)
        return self._chunks(streamer, sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request; see `Pipeline.abort`."""
        with self._lock:
            receivers = list(self._receivers.get(request_id, ()))
        for receiver in receivers:
            receiver.failed(SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))
        self.host.abort(request_id)

    def stats(self) -> EngineStats:
        return self.host.stats(self._audio_seconds)

    def close(self) -> None:
        """Frees the engine; see `Pipeline.close`."""
        self.host.close()
        self._stage.close()

    def _chunks(self, streamer: Streamer, sequence: TokenRequest) -> Iterator[AudioChunk]:
        try:
            yield from streamer.chunks()
        finally:
            self.host.cancel(sequence)

    def _send(self, sequence: TokenRequest, receiver: Utterer | Streamer) -> None:
        with self._lock:
            self._receivers.setdefault(sequence.request_id, []).append(receiver)
        try:
            self.host.submit(sequence, receiver)
        except BaseException:
            self._forget(sequence.request_id, receiver, 0.0)
            raise

    def _forget(self, request_id: str, receiver: Utterer | Streamer, seconds: float) -> None:
        with self._lock:
            self._audio_seconds += seconds
            left = [one for one in self._receivers.pop(request_id, []) if one is not receiver]
            if left:
                self._receivers[request_id] = left

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, Order]:
        """The LM's request and what delivery must know. Raises `InputError` for what this model cannot do."""
        task = speech_task(request.messages, request.generation, self.capabilities)
        prompt, voice = self._prompt(task)
        room = self.host.max_context - len(prompt)
        if room < 2:
            raise InputError(
                ErrorCode.INPUT_TOO_LONG,
                f"The prompt has {len(prompt)} positions; the engine holds {self.host.max_context}.",
                "Shorten the text or the reference, or open the model with a larger max_context.",
            )
        most = min(self._token_limit(request.generation, created=voice is None), room)
        stops = (self.config.lm.eos, self.vocabulary.control("end_semantic_token"))
        sampling = token_sampling(self.config.sampling, request.generation, most, request.seed, stops)
        meta = {**self._meta, "prompt_positions": len(prompt)}
        tokens = self.config.bicodec.speaker.tokens
        order = Order(task.text, self.sample_rate, self.vocabulary, voice, tokens, meta, self._keep_unfinished)
        return TokenRequest(request.request_id, prompt, sampling), order

    def _prompt(self, task: SpeechTask) -> tuple[list[int], tuple[int, ...] | None]:
        """The prompt of a task and the voice it clones; None for a voice that the LM creates."""
        if task.reference_audio is None:
            return creation_prompt(self.vocabulary, task.text, task.voice or DEFAULT_VOICE), None
        if task.voice is not None:
            message = f"The line has both reference audio and the created voice {task.voice!r}."
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, message, "Remove one of them.")
        if not isinstance(task.reference_audio, bytes):
            raise InputError(ErrorCode.INPUT_AUDIO_MISSING, "The reference audio was not loaded.", "Give it as bytes of the encoded file.")
        reference = self.references.prepare(task.reference_audio, with_semantic=bool(task.reference_text))
        prompt = clone_prompt(self.vocabulary, task.text, reference.voice, task.reference_text, reference.semantic)
        return prompt, reference.voice

    def _token_limit(self, generation: Generation, created: bool) -> int:
        """Tokens that the LM may write: speech, what stands before it, and one that may be the end."""
        limit = self.config.sampling.max_new_tokens
        if generation.max_seconds is None:
            return limit
        before = self.config.bicodec.speaker.tokens + CREATION_EXTRAS if created else 1
        return min(limit, before + math.ceil(generation.max_seconds * self.config.tokens_per_second - _ROUNDING) + 1)


def token_sampling(defaults: SamplingDefaults, generation: Generation, most: int, seed: int, stops: tuple[int, ...]) -> TokenSampling:
    """How a request is drawn: its own settings over the model's."""

    def either(mine: float | None, default: float) -> float:
        return default if mine is None else mine

    return TokenSampling(
        max_tokens=most,
        temperature=either(generation.temperature, defaults.temperature),
        top_k=int(either(generation.top_k, defaults.top_k)),
        top_p=either(generation.top_p, defaults.top_p),
        repetition_penalty=either(generation.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        stop_ids=stops,
    )


def vllm_options(options: SparkOptions, config: SparkConfig) -> VllmOptions:
    """What vLLM is told of a person's choice, with the defaults of this model."""
    return VllmOptions(
        dtype=options.dtype,
        memory_share=_MEMORY_SHARE if options.memory_share is None else options.memory_share,
        cpu_kv_gib=options.cpu_kv_gib,
        max_sequences=options.slots,
        waiting_room=options.waiting_room,
        max_context=min(options.max_context or _CONTEXT, config.lm.max_positions),
        step_tokens=options.step_tokens,
        tensor_parallel=options.tensor_parallel,
        eager=options.eager,
    )

"""SpeechLM as a pipeline: dialogues to prompts, text and eight streams on vLLM, Xcodec."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, InputError
from pipelines.nn.checkpoint import Checkpoint, open_device, precision, type_name
from pipelines.options import TokenModelOptions, read_options
from pipelines.recording import RecordingCache
from pipelines.request import Generation, Message, Mode, SynthesisRequest
from pipelines.results import SpeechPipeline
from pipelines.speechlm.audio_encoder import SAMPLE_RATE, AudioEncoder, load_tower
from pipelines.speechlm.codec import Xcodec, XcodecDecoder, load_codec
from pipelines.speechlm.config import CAPABILITIES, TOWER_SECONDS, SpeechLmConfig
from pipelines.speechlm.lm import (
    Prompt,
    Script,
    StreamSampling,
    TextCoder,
    build_prompt,
    chosen_messages,
    model_spec,
)
from pipelines.speechlm.results import SpeechLmRequestInfo, SpeechLmStreamer, SpeechLmUtterance
from pipelines.speechlm.weights import check_names, refuse_pickle
from pipelines.tokens import TokenRequest
from pipelines.validation import (
    bounded,
    bounded_top_k,
    check_room,
    check_seed,
    either,
    frames_within,
    speech_task,
)
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm

_CODEC_BATCH = 64
#: Recordings whose features are kept.
_RECORDINGS = 64
#: Steps of an answer, as the published clients ask for them.
_STEPS: dict[Mode, int] = {"text_only": 4096, "text_audio": 12_000}


@dataclass(frozen=True, slots=True)
class SpeechLmOptions(TokenModelOptions):
    """How a checkpoint is opened; None means the best for the device, or what its config.json says."""

    #: Mel frames of half a chunk of the audio tower, and of its attention's window; public sources disagree
    #: on them.
    n_window: int | None = None
    window_infer: int | None = None
    #: Zero mean and unit variance of recordings before the tower, as in training; the published servers do
    #: not.
    normalise_audio: bool = False
    #: Rows of audio (50 a second) before which it may not end.
    min_rows: int = 0
    #: Whether prompts that begin alike share their KV, as all null branches do.
    share_prefixes: bool | None = None


def open_pipeline(folder: Path, **options: Any) -> SpeechLmPipeline:
    """Loads a checkpoint folder.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that
    is unknown or that the model cannot run with.
    """
    chosen = read_options(SpeechLmOptions, options)
    load_vllm(chosen.cpu_kv_gib)
    device = open_device(chosen.device, chosen.threads)
    refuse_pickle(folder)
    config = SpeechLmConfig.from_folder(folder)
    coder = TextCoder(config)
    codec_dtype = precision(chosen.codec_dtype, device)
    with Checkpoint.open(folder) as checkpoint:
        check_names(checkpoint, config)
        codec = load_codec(checkpoint, config, device, codec_dtype)
        windows = chosen.n_window, chosen.window_infer
        encoder = load_tower(checkpoint, config, device, codec_dtype, *windows, chosen.normalise_audio)
    # Last: it measures the memory that is left, and a fault of the folder shows before half a minute of its
    # start.
    host = VllmHost(model_spec(config, chosen.share_prefixes), chosen)
    return SpeechLmPipeline(config, coder, encoder, codec, host, chosen)


class SpeechLmPipeline(SpeechPipeline[TokenRequest, SpeechLmRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`.

    A result of mode `text_only` has no samples. A stream gives the text while it is written, and the audio
    whole behind it.
    """

    def __init__(
        self,
        config: SpeechLmConfig,
        coder: TextCoder,
        encoder: AudioEncoder,
        codec: Xcodec,
        host: VllmHost,
        options: SpeechLmOptions,
    ) -> None:
        self.config = config
        self.coder = coder
        self.encoder = encoder
        self.host = host
        self.name = config.folder.name
        self.sample_rate = config.sample_rate
        self.capabilities = CAPABILITIES
        self._options = options
        self._heard: RecordingCache[Tensor] = RecordingCache(_RECORDINGS)
        self._frames_per_second = config.sample_rate / codec.samples_per_frame
        self._meta = {"engine": "vllm", "dtype": host.info.dtype, "codec_dtype": type_name(codec.dtype)}
        stage = CodecStage(XcodecDecoder(codec), _CODEC_BATCH, codec.device)
        super().__init__(host, stage, SpeechLmStreamer, SpeechLmUtterance)  # pyright: ignore[reportArgumentType]

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, SpeechLmRequestInfo]:
        """The engine's first request and what delivery must know. Raises `InputError` for what this model
        cannot do."""
        generation = request.generation
        task = speech_task(request.messages, generation, self.capabilities)
        check_seed(request.seed)
        if either(generation.repetition_penalty, 1.0) != 1.0:
            raise InputError(
                ErrorCode.INPUT_UNSUPPORTED,
                "This model has no repetition penalty.",
                "Remove `repetition_penalty`.",
            )
        mode = generation.mode or CAPABILITIES.modes[0]
        messages = chosen_messages(request.messages, mode)
        features, salt = self._features(messages)
        prompt = build_prompt(self.config, self.coder, messages, [len(one) for one in features])
        room = self.host.max_context - len(prompt.ids)
        check_room(len(prompt.ids), self.host.max_context, room, "a larger max_context")
        script = self._script(request, mode, prompt, features, salt, room)
        meta = {**self._meta, "mode": mode, "cfg": script.cfg, "prompt_positions": len(prompt.ids)}
        parts = self.config, self.coder, script
        info = SpeechLmRequestInfo(task.text, self.sample_rate, meta, self._options.keep_unfinished, *parts)
        return script.text_request(self.config), info

    def _script(
        self,
        request: SynthesisRequest,
        mode: Mode,
        prompt: Prompt,
        features: list[Tensor],
        salt: str | None,
        room: int,
    ) -> Script:
        asked, config, top_p = request.generation, self.config, either(request.generation.top_p, 1.0)
        text, audio = (
            StreamSampling(
                bounded(either(own, either(asked.temperature, default))), bounded_top_k(top_k), top_p
            )
            for own, default, top_k in (
                (asked.text_temperature, config.text_temperature, either(asked.top_k, config.text_top_k)),
                (
                    asked.audio_temperature,
                    config.audio_temperature,
                    either(asked.audio_top_k, either(asked.top_k, config.audio_top_k)),
                ),
            )
        )
        return Script(
            request.request_id,
            prompt.ids,
            min(either(asked.max_tokens, _STEPS[mode]), room),
            request.seed,
            text,
            audio,
            with_audio=mode == "text_audio",
            cfg=bounded(either(asked.cfg, 1.0)),
            min_rows=self._options.min_rows,
            max_rows=self._most_rows(asked),
            features=[(position, rows) for (position, _), rows in zip(prompt.features, features)],
            salt=salt,
        )

    def _most_rows(self, generation: Generation) -> int:
        """Rows of audio, which come to an end `delay` rows after its last frame began."""
        most = _STEPS["text_audio"]
        if generation.max_seconds is None:
            return most
        return frames_within(generation.max_seconds, self._frames_per_second, most) + self.config.delay

    def _features(self, messages: list[Message]) -> tuple[list[Tensor], str | None]:
        """Features of every recording, in order, and a name for their content. Raises `InputError` for
        audio that is not heard."""
        features: list[Tensor] = []
        digest = hashlib.sha256()
        for message in messages:
            if message.modality != "audio":
                continue
            if message.role != "user" or not isinstance(message.content, bytes):
                text = "Audio in the prompt must be a user's, as the bytes of an encoded file."
                raise InputError(
                    ErrorCode.INPUT_AUDIO_MISSING,
                    text,
                    "Use mode text_audio to skip the assistant's messages.",
                )
            features.append(
                self._heard.get(
                    message.content, None, lambda recording=message.content: self._hear(recording)
                )
            )
            digest.update(hashlib.sha256(message.content).digest())
        return features, digest.hexdigest() if features else None

    def _hear(self, recording: bytes) -> Tensor:
        from pipelines.audio import decode  # only where there is audio to read

        samples, _ = decode(recording, SAMPLE_RATE, max_seconds=2 * TOWER_SECONDS)
        return self.encoder.encode(samples)

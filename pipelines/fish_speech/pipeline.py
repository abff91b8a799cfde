"""The pipeline of Fish Speech S2: divides requests into turns, runs the dual AR on either engine, and makes
speech from its frames. Every turn is a sequence of the engine, whose prompt contains the turns before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.codec.decoder import gathering_stage
from pipelines.codec.stage import CodecStage
from pipelines.duration import longest_seconds
from pipelines.engine.opening import NativeModelOptions, explain_oom
from pipelines.errors import NightjarError, input_too_long, unsupported
from pipelines.fish_speech.codec import Codec, ReferenceEncoder, load_codec
from pipelines.fish_speech.config import CAPABILITIES, FishConfig
from pipelines.fish_speech.model import FishModel, load_weights, model_spec, native_host, plan_sizes
from pipelines.fish_speech.prompt import (
    Conversation,
    Reference,
    Vocabulary,
    clean,
    clean_reference,
    groups,
)
from pipelines.nn.checkpoint import open_device, precision, type_name
from pipelines.options import TokenModelOptions, read_model_options
from pipelines.request import FloatArray, IntArray, Listener, SynthesisRequest
from pipelines.results import (
    FinishedCodes,
    Receiver,
    RequestInfo,
    SpeechPipeline,
    StageDecoder,
    Streamer,
    Utterance,
    no_audio,
)
from pipelines.tokens import TokenHost, TokenRequest, Tokens, TokenSampling, token_sampling
from pipelines.validation import frames_within, room_after, speech_task
from pipelines.vllm_engine.library import load_vllm

#: Difference between the seeds of an item's turns (2**64 / golden ratio), which makes all of them distinct.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 1 << 63


@dataclass(slots=True, eq=False)
class TurnPlan:
    """The remaining turns of one item, and its current sequence."""

    request_id: str
    conversation: Conversation
    #: The user messages, one for each turn.
    texts: Sequence[str]
    #: Sampling of every turn, with its maximum of columns.
    sampling: TokenSampling
    #: Maximum frames of all remaining turns; None: no limit.
    frames: int | None
    #: Maximum positions of the engine.
    context: int
    #: Whether the item continues after a turn that was cut.
    keep_unfinished: bool
    frames_per_second: float
    #: Whether a turn reached its limit without an end, or no frames were left for a turn.
    cut: bool = False
    turn: int = 0
    current: TokenRequest = field(init=False)

    def __post_init__(self) -> None:
        self.current = self._request()

    @property
    def max_columns(self) -> int:
        """Maximum columns (a token and the codes of its frame) of the current turn. The last one is never
        speech: it is the end, or it is dropped."""
        return self.current.sampling.max_tokens

    def advance(self, frames: IntArray, cut: bool) -> bool:
        """Adds the frames of the current turn, which ended or was `cut`. Returns whether there is another
        turn, which is then `current`.

        Raises `InputError` (`input.too_long`) if the dialogue does not fit into the engine.
        """
        self.turn += 1
        self.cut |= cut
        if self.turn == len(self.texts) or not len(frames) or (cut and not self.keep_unfinished):
            return False
        if self.frames is not None:
            self.frames -= len(frames)
            if self.frames < 1:
                self.cut = True
                return False
        self.conversation.answer(frames)
        self.current = self._request()
        if self.max_columns < 2:
            raise input_too_long(
                f"The dialogue has filled the engine's {self.context} positions before its message {self.turn + 1}.",
                "Split it into several lines, or open the model with a larger max_context.",
            )
        return True

    def _request(self) -> TokenRequest:
        text = self.texts[self.turn]
        prompt = self.conversation.ask(text, self.turn + 1 < len(self.texts))
        columns = min(self.sampling.max_tokens, self.context - len(prompt))
        if self.frames is not None:
            columns = min(columns, self.frames + 1)
        seed = (self.sampling.seed + self.turn * _SEED_STEP) % _SEEDS
        return TokenRequest(
            self.request_id,
            prompt,
            replace(self.sampling, max_tokens=max(columns, 1), seed=seed),
            longest=round(longest_seconds(text) * self.frames_per_second),
        )


@dataclass(frozen=True, slots=True)
class FishRequestInfo(RequestInfo):
    """The parts of a request that its results need."""

    plan: TurnPlan
    #: Sizes of the codebooks.
    sizes: Sequence[int]

    def read(self, tokens: Tokens) -> FinishedCodes:
        """The frames of all turns. Raises `SynthesisError`: `synth.no_eos`, and `synth.no_audio` if a turn has
        no frames."""
        assert tokens.codes is not None
        self.check_end(tokens.finish, len(tokens.codes))
        if not len(tokens.codes):
            raise no_audio("The model ended a turn before its first frame.")
        # The model may draw codes that the codec reads as the last one.
        heard = np.minimum(tokens.codes, np.array(self.sizes) - 1)
        return FinishedCodes(heard, tokens.finish, log_probabilities=tokens.log_probabilities)


class Turns(Receiver):
    """A mixin for receivers, which then receive all turns as one sequence."""

    def __init__(self, info: FishRequestInfo, stage: CodecStage, listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self._plan = info.plan
        self._columns = 0
        self._parts = list[IntArray]()
        self._log_probabilities = list[FloatArray]()

    def tokens(self, ids: list[int], codes: IntArray | None) -> None:
        assert codes is not None
        # The last possible column is not speech, as in the published loop.
        whole = codes[: max(self._plan.max_columns - 1 - self._columns, 0)]
        self._columns += len(ids)
        spoken = _spoken(whole, self._plan.current)
        if len(spoken):
            super().tokens(ids[: len(spoken)], spoken)

    def finished(self, tokens: Tokens) -> None:
        assert tokens.codes is not None
        plan = self._plan
        frames = _spoken(tokens.codes[: plan.max_columns - 1], plan.current)
        self._parts.append(frames)
        if tokens.log_probabilities is not None:
            self._log_probabilities.append(tokens.log_probabilities[: len(frames)])
        self._columns = 0
        try:
            if plan.advance(frames, tokens.finish == "length"):
                self.request_more(plan.current)
                return
        except NightjarError as error:
            self.failed(error)
            return
        codes = np.concatenate(self._parts) if len(frames) else frames
        own = np.concatenate(self._log_probabilities) if self._log_probabilities else None
        super().finished(Tokens(codes[:, 0].tolist(), "length" if plan.cut else "stop", codes, own))


class FishUtterance(Turns, Utterance):
    """The speech of all turns."""


class FishStreamer(Turns, Streamer):
    """A stream of frames, 21.5 per second: the first chunk is the first frame."""


def _spoken(columns: IntArray, request: TokenRequest) -> IntArray:
    """The codes [frames, codebooks] of columns [n, 1 + codebooks] before their end."""
    ends = np.flatnonzero(np.isin(columns[:, 0], request.sampling.stop_ids))
    return columns[: ends[0] if len(ends) else len(columns), 1:]


#: On a GPU finished utterances wait to be decoded together: maximum time, utterances and frames.
GATHER = (256, 0.05, 4096)


@dataclass(frozen=True, slots=True)
class FishOptions(TokenModelOptions):
    """Options of a checkpoint on vLLM; None means the best value for the device."""

    #: Whether prompts with equal prefixes share their KV, such as prompts of one voice.
    share_prefixes: bool | None = None


@explain_oom()
def open_pipeline(folder: Path, **options: Any) -> FishPipeline:
    """Loads a checkpoint folder. The option `engine` is `native`, `vllm` or `auto`
    (`pipelines.options`); the other options are those of that engine.

    Raises `ModelError` (`model.bad_checkpoint`, `model.missing_extra`), `ConfigError` for an option that is
    unknown or not supported, and `SynthesisError` (`synth.oom`) if other programs use the GPU's memory.
    """
    chosen = read_model_options(options, NativeModelOptions, FishOptions)
    native = isinstance(chosen, NativeModelOptions)
    if not native:
        load_vllm(chosen.cpu_kv_gib)
    device = open_device(chosen.device, chosen.threads)
    dtype = precision(chosen.dtype, device)
    config = FishConfig.from_folder(folder)
    sizes = plan_sizes(config, chosen, device, dtype) if native else None
    vocabulary = Vocabulary.from_folder(config)
    codec = _codec(config, chosen, device, chosen.decodes)
    stage = gathering_stage(codec.decoder, *GATHER, sizes.decode_frames if sizes else None)
    if isinstance(chosen, NativeModelOptions):
        assert sizes is not None
        with torch.inference_mode():
            model = FishModel(config, load_weights(config, dtype, device), sizes.max_context)
        host = native_host(config, chosen.open_engine(model, sizes, stage))
    else:
        # Checks the tensors here: vLLM reads them in another process, where an error would only end the
        # engine. It is opened last, because it measures the remaining memory.
        load_weights(config, torch.float32, torch.device("meta"))
        from pipelines.vllm_engine.host import VllmHost

        host = VllmHost(model_spec(config, chosen.share_prefixes), chosen)
    return FishPipeline(config, vocabulary, codec, host, stage, keep_unfinished=chosen.keep_unfinished)


def open_decoder(folder: Path, **options: Any) -> StageDecoder:
    """Loads the decoder of a checkpoint's codec alone, with the options of `open_pipeline`; raises like it."""
    chosen = read_model_options(options, NativeModelOptions, FishOptions)
    config = FishConfig.from_folder(folder)
    codec = _codec(config, chosen, open_device(chosen.device, chosen.threads), decodes=True)
    return StageDecoder(gathering_stage(codec.decoder, *GATHER), config.sample_rate)


def _codec(
    config: FishConfig, chosen: NativeModelOptions | FishOptions, device: torch.device, decodes: bool
) -> Codec:
    dtype = chosen.codec_dtype or (chosen.dtype if isinstance(chosen, NativeModelOptions) else None)
    return load_codec(config, device, precision(dtype, device), chosen.reproducible, decodes)


class FishPipeline(SpeechPipeline[TokenRequest, FishRequestInfo]):
    """A loaded checkpoint with its engine. Implements `pipelines.request.Pipeline`."""

    def __init__(
        self,
        config: FishConfig,
        vocabulary: Vocabulary,
        codec: Codec,
        host: TokenHost,
        stage: CodecStage,
        *,
        keep_unfinished: bool = False,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.references = ReferenceEncoder(codec.encoder)
        self.name = config.folder.name
        self.sample_rate = config.sample_rate
        self.capabilities = CAPABILITIES
        self._keep_unfinished = keep_unfinished
        info = host.info
        self._context = info.max_context
        self.frame_samples = config.codec.samples_per_frame
        self._meta = {"engine": info.engine, "dtype": info.dtype}
        if codec.decoder is not None:
            self._meta["codec_dtype"] = type_name(codec.decoder.dtype)
        if info.engine == "native":
            self._meta["executor"] = info.executor
        super().__init__(host, stage, FishStreamer, FishUtterance)

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, FishRequestInfo]:
        """The item's first turn, and the parts of the request that its results need. Raises `InputError` for
        a request that this model cannot serve."""
        task = speech_task(request.messages, request.generation, self.capabilities, request.seed)
        if request.generation.repetition_penalty not in (None, 1.0):
            raise unsupported(
                "This model has no repetition penalty: its sampling always avoids repetitions.",
                "Remove `repetition_penalty`.",
            )
        defaults = self.config.sampling
        context = self._context
        texts = groups(clean(task.text), defaults.chunk_bytes, defaults.chunk_turns)
        words = [len(self.vocabulary.spoken(text)) for text in texts]
        room_after(sum(words), context)
        spoken = [(recording, clean_reference(text)) for recording, text in task.references]
        references = [Reference(text, self.references.prepare(recording)) for recording, text in spoken]
        conversation = Conversation(self.vocabulary, self.config.codebooks, references)
        sampling = token_sampling(
            defaults, request.generation, defaults.max_new_tokens, request.seed, (self.config.end,)
        )
        seconds = request.generation.max_seconds
        rate = self.config.frames_per_second
        frames = None if seconds is None else frames_within(seconds, rate, context)
        plan = TurnPlan(
            request.request_id, conversation, texts, sampling, frames, context, self._keep_unfinished, rate
        )
        positions = len(plan.current.prompt)
        room_after(positions + sum(words[1:]), context)
        meta = {**self._meta, "prompt_positions": positions, "turns": len(texts)}
        info = FishRequestInfo(
            task.text, self.sample_rate, meta, self._keep_unfinished, plan, self.config.codec.codes
        )
        return plan.current, info

"""The requests, results and protocols of pipelines, independent of models. Imports no model library."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from pipelines.errors import NightjarError, unsupported
from pipelines.recording import Recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]
    Codes = NDArray[np.int16]
else:  # what is decoded from a message has types without numpy
    Samples = Codes = Any

Role = Literal["user", "assistant", "system"]
Modality = Literal["text", "audio", "image", "video", "toolcall"]
#: Roles whose texts can be spoken.
SpokenRole = Literal["user", "assistant"]
Mode = Literal["text_only", "text_audio"]
#: What is made: audio, codes of the model's codec, or both.
Output = Literal["audio", "codes", "both"]

EngineState = Literal["ready", "starting", "broken"]
#: `exact`: the model itself knows when it says each word; `estimated`: from the text and the frames made.
WordTimes = Literal["exact", "estimated"]
Meta = dict[str, str | int | float | bool]
#: Ids or codes. A string, so that requests are read without numpy.
IntArray: TypeAlias = "NDArray[np.int64]"
FloatArray: TypeAlias = "NDArray[np.float64]"
#: Makes the voice vector of speech, float32 [width] of length 1, from samples and their rate in Hz.
SpeakerVector: TypeAlias = "Callable[[Samples, int], Samples]"


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The optional `generation` object of a dialogue line, and the job's defaults for it. None selects the
    model's own default."""

    voice: str | None = None
    language: str | None = None
    instruct: str | None = None
    reference_text: str | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    cfg: float | None = None
    max_seconds: float | None = None
    #: What the model writes: text alone, or text and then audio.
    mode: Mode | None = None
    #: For models that write text and audio; each takes precedence over `temperature` or `top_k`.
    text_temperature: float | None = None
    audio_temperature: float | None = None
    audio_top_k: int | None = None
    #: Maximum steps of the engine: text tokens plus frames.
    max_tokens: int | None = None
    #: Settings of one role's turns; each takes precedence over the same setting outside of `roles`.
    roles: dict[SpokenRole, Generation] | None = None

    def of(self, role: SpokenRole) -> Generation:
        """The settings of one role's turns. `reference_text` outside of `roles` belongs to the user's
        recording."""
        whole = msgspec.structs.replace(
            self, roles=None, reference_text=self.reference_text if role == "user" else None
        )
        own = None if self.roles is None else self.roles.get(role)
        return whole if own is None else own.over(whole)

    def over(self, defaults: Generation) -> Generation:
        """This object with every unset field taken from `defaults`."""
        mine = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **mine)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One `[role, modality, content]` of a dialogue.

    `content` is the text, or for audio the path or key in the line. In a `SynthesisRequest` loaded audio is
    the bytes of the encoded file (WAV, FLAC, OGG or MP3); pipelines of the class `ReadsRecordings` take a
    `Recording` too.
    """

    role: Role
    modality: Modality
    content: str | bytes | Recording


@dataclass(frozen=True, slots=True)
class SynthesisRequest:
    """One item to synthesize. Equal requests get equal noise in any batch, and equal bits if
    `EngineInfo.reproducible` is set."""

    request_id: str
    messages: tuple[Message, ...]
    generation: Generation = field(default_factory=Generation)
    #: Seed of all noise of this request, 0 <= seed < 2**63.
    seed: int = 0
    #: Whether more text follows by `Handle.append`; for models with `capabilities.text_in`.
    text_open: bool = False
    #: Whether the times of the words are wanted; ignored by models without `capabilities.word_times`.
    timestamps: bool = False
    #: Other outputs than audio are for whole utterances of models with `capabilities.codes`.
    output: Output = "audio"
    #: Word -> phonemes, for models with `capabilities.phonemes`; see `WholeWords`.
    pronunciations: Mapping[str, str] = field(default_factory=dict[str, str])


class PreparedRequest(msgspec.Struct, frozen=True, tag=True):
    """A request prepared by its family's `Frontend`."""

    request_id: str
    seed: int
    #: Data that only the family reads.
    data: bytes
    #: The voice to clone.
    recording: Recording | None = None
    output: Output = "audio"


AnyRequest = SynthesisRequest | PreparedRequest
#: Tokenizes the next piece of a text; the flag marks the last piece. Returns the new ids that later text cannot
#: change. Raises `InputError` for a piece that the model refuses; the text stays open.
TextPieces = Callable[[str, bool], list[int]]


class Frontend(Protocol):
    """The part of a pipeline that needs neither weights nor a device; it runs outside of the engine's process
    (`pipelines.registry.Family`)."""

    def prepare(self, request: SynthesisRequest) -> tuple[PreparedRequest, TextPieces | None]:
        """The prepared request, and the tokenizer of further text if the text is open. Raises `InputError`
        for a request that the model cannot serve."""
        ...


class Word(msgspec.Struct, frozen=True, array_like=True):
    """A word, or a phoneme, and when it is said, in seconds from the beginning of the speech. As JSON:
    `[text, start_s, end_s]`."""

    text: str
    start_s: float
    end_s: float

    def moved(self, seconds: float, end_s: float = math.inf) -> Word:
        """The word that many seconds later, within speech that ends at `end_s`."""
        start, end = (max(0.0, min(at + seconds, end_s)) for at in (self.start_s, self.end_s))
        return Word(self.text, round(start, 4), round(end, 4))


class CodecIdentity(msgspec.Struct, frozen=True):
    """The codec that codes belong to."""

    name: str
    #: SHA-256 of its weights.
    sha256: str
    #: Frames per second, and the rate of its audio in Hz.
    frame_rate: float
    sample_rate: int
    #: Number of codes of each codebook.
    codebook_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Speech:
    """The result of one request. It has no samples if only text or codes were requested."""

    #: float32 [samples], mono, within [-1, 1].
    samples: Samples
    sample_rate: int
    #: The requested text.
    text: str = ""
    #: Text the model itself wrote, for models with `capabilities.text_out`.
    text_out: str | None = None
    #: Facts to store with the audio: frames, finish reason, loudness in LUFS, engine mode.
    meta: Meta = field(default_factory=Meta)
    #: The words as the text writes them, and their phonemes, if `SynthesisRequest.timestamps` asks for them.
    #: What is not spoken, such as a dash between words, is left out.
    words: tuple[Word, ...] = ()
    phonemes: tuple[Word, ...] = ()
    #: int16 [frames, codebooks], if codes were requested.
    codes: Codes | None = None
    #: int16 [n, codebooks]: what the codec decodes these codes after, if anything: the codes of a reference, or
    #: the global tokens of a voice.
    voice_codes: Codes | None = None
    #: Samples that the codec makes of a frame of `codes`.
    frame_samples: int = 0

    @property
    def sample_count(self) -> int:
        """The number of samples, also of speech that has only codes."""
        return len(self.samples) or (0 if self.codes is None else len(self.codes)) * self.frame_samples

    @property
    def duration_ms(self) -> int:
        return round(self.sample_count * 1000 / self.sample_rate)


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A piece of a stream: float32 [samples], mono."""

    samples: Samples
    sample_rate: int
    #: A piece of the text that the model writes, for models with `capabilities.text_out`.
    text: str = ""
    #: The words and phonemes that end in this piece, by the time since the beginning of the stream.
    words: tuple[Word, ...] = ()
    phonemes: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a request, with its speech. The speech of a stream has no samples, since its chunks had
    them."""

    speech: Speech


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a request; chunks may have been delivered before."""

    error: NightjarError


#: An event of a request: a stream has any number of chunks, then one end.
Event = AudioChunk | Done | Failed
#: Called on any thread, one call at a time; must return quickly.
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a pipeline. Lines that need other abilities are refused before any engine work."""

    #: Named voices; empty: not selectable.
    voices: tuple[str, ...] = ()
    #: Languages; empty: not selectable.
    languages: tuple[str, ...] = ()
    cloning: bool = False
    #: Cloning only: a line without reference audio is refused.
    needs_reference: bool = False
    #: A line with reference audio but without `reference_text` is refused.
    needs_reference_text: bool = False
    #: Maximum recordings of voices in a dialogue line; `reference_text` has one line of text for each
    #: recording.
    references: int = 1
    instruct: bool = False
    streaming: bool = False
    #: Speaks while its text is still being written: `SynthesisRequest.text_open`.
    text_in: bool = False
    guidance: bool = False
    #: Takes temperature, top_k, top_p and repetition_penalty.
    sampling: bool = True
    text_out: bool = False
    #: The characters of phonemes that it takes for words; empty: none.
    phonemes: str = ""
    #: Tells when each word is said: `SynthesisRequest.timestamps`.
    word_times: WordTimes | None = None
    audio_in: bool = False
    #: The modes that it supports, its default first; empty: not selectable.
    modes: tuple[Mode, ...] = ()
    #: Takes the whole dialogue rather than one user turn.
    multi_turn: bool = False
    #: Gives the codes of its codec: `SynthesisRequest.output`. Without `audio` it was opened for codes alone.
    codes: bool = False
    audio: bool = True
    max_text_characters: int = 5000


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How a pipeline was opened; for provenance, metrics and logs."""

    #: Maximum utterances that run at once, and maximum utterances that wait before `start` blocks.
    slots: int = 1
    waiting_room: int = 0
    device: str = ""
    dtype: str = ""
    #: The executor of frames, and the kind of its kernels (such as `fused CUDA`, `Triton`, `plain`) with
    #: other choices that change the bits of results (such as `packed prefill`). Empty if there is no choice.
    executor: str = ""
    kernels: str = ""
    #: Number of pages of the KV cache, and positions of a page; 0 if the engine has no pages.
    kv_pages: int = 0
    page_size: int = 0
    #: Maximum positions of an utterance, including its prompt; 0 if there is no limit.
    max_context: int = 0
    #: Whether equal requests give equal bits in any batch.
    reproducible: bool = True
    #: `native` or `vllm`; empty if requests are not batched.
    engine: str = ""

    def summary(self, model: str) -> str:
        """One line for logs: the model, and what runs it."""
        words = (
            f"{model} on {self.device}" if self.device else model,
            self.executor and f"{self.executor} executor",
            self.kernels and f"{self.kernels} kernels",
            self.dtype,
            f"{self.slots} slots",
            f"{self.kv_pages} KV pages of {self.page_size}" if self.kv_pages else "",
            "reproducible" if self.reproducible else "",
        )
        return ", ".join(word for word in words if word)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The current state of an engine. Counters start at 0 with its process."""

    running: int = 0
    waiting: int = 0
    requests_done: int = 0
    frames: int = 0
    audio_seconds: float = 0.0
    #: Share of the KV cache in use, 0 to 1; 0 if the engine has none.
    kv_use: float = 0.0
    #: Energy of the whole board of the engine's GPU, idle time and other programs included; None if unknown.
    joules: float | None = None
    #: `starting`: no pipeline is open yet; `broken`: the engine has ended, and the pipeline must be reopened.
    state: EngineState = "ready"


class Handle(Protocol):
    """A started request. Its methods may be called from any thread and do not block."""

    def append(self, text: str | list[int], final: bool) -> None:
        """Appends to an open text; `final` ends it. Text after that, or after the request's end, is ignored.

        For a `PreparedRequest` the text is given as ids, which the frontend's `TextPieces` returns. Raises
        `InputError` for text that the model refuses; the request continues.
        """
        ...

    def cancel(self) -> None:
        """Ends the request. Only a chunk that is being delivered already can still arrive. Does nothing after
        the end."""
        ...


class Pipeline(Protocol):
    """A loaded model. All methods may be called from any thread."""

    name: str
    sample_rate: int
    capabilities: Capabilities
    #: Whether `start` of a stream never blocks, so that an event loop may call it.
    starts_at_once: bool

    @property
    def info(self) -> EngineInfo: ...

    def start(self, request: AnyRequest, on_event: OnEvent, stream: bool = False) -> Handle:
        """Starts a request, whose speech is delivered whole or as a `stream` of chunks. The functions
        `submit` and `stream` are easier to use.

        Blocks while the waiting room is full, except for a stream: callers must bound their streams. Only
        families with a `Frontend` take a `PreparedRequest`. Raises `NightjarError` for a refused request:
        `InputError` for one that the model cannot serve, before any engine work, and `SynthesisError`
        (`synth.aborted`) after the pipeline is closed.
        """
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Frees the engine; requests in flight fail with `synth.aborted`. May be called more than once."""
        ...


def submit(pipeline: Pipeline, request: SynthesisRequest) -> Future[Speech]:
    """Starts a request and returns the future of its speech; its exception is a `NightjarError`. Blocks and
    raises like `Pipeline.start`."""
    future = Future[Speech]()
    future.set_running_or_notify_cancel()

    def on_event(event: Event) -> None:
        if isinstance(event, Done):
            future.set_result(event.speech)
        elif isinstance(event, Failed):
            future.set_exception(event.error)

    pipeline.start(request, on_event)
    return future


def stream(pipeline: Pipeline, request: SynthesisRequest) -> Iterator[AudioChunk]:
    """Iterates over the chunks of a stream. The first `next` starts the request, and closing the iterator
    ends it. Raises like `Pipeline.start`, and the error of a failed request."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    handle = pipeline.start(request, events.put, stream=True)
    try:
        while not isinstance(event := events.get(), Done):
            if isinstance(event, Failed):
                raise event.error
            yield event
    finally:
        handle.cancel()


def check_start(pipeline: Pipeline, request: AnyRequest, stream: bool) -> None:
    """Raises `InputError` (`input.unsupported`) for a stream, an open text or an output that the model does not
    support."""
    able = pipeline.capabilities
    text_open = isinstance(request, SynthesisRequest) and request.text_open
    if stream and not able.streaming:
        lacks = "cannot stream"
        advice = "Ask for whole speech."
    elif text_open and not (stream and able.text_in):
        lacks = "takes no text in pieces"
        advice = "Give it whole sentences."
    elif request.output != "audio" and not able.codes:
        lacks = "gives no codes"
        advice = "Ask for audio."
    elif request.output != "codes" and not able.audio:
        lacks = "was opened without the decoder of its codec"
        advice = "Ask for codes."
    elif request.output != "audio" and stream:
        lacks = "gives no codes in a stream"
        advice = "Ask for whole speech."
    else:
        return
    raise unsupported(f"The model {pipeline.name} {lacks}.", advice)


@dataclass(eq=False)
class Listener:
    """Delivers the events of one request, which may come from any thread, in order until its end. It is the
    `Handle` of a request whose text is complete."""

    _on_event: OnEvent
    #: Called once after the end, with True after `Done` and False after an error or `cancel`.
    _on_end: Callable[[bool], object]
    #: Seconds of audio that were delivered.
    seconds: float = 0.0
    _order: threading.RLock = field(default_factory=threading.RLock)
    #: Taken by the end of the request, and never given back.
    _ended: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, event: Event) -> None:
        with self._order:
            if not (self.is_open if isinstance(event, AudioChunk) else self._ended.acquire(blocking=False)):
                return
            if not isinstance(event, Failed):
                audio = event.speech if isinstance(event, Done) else event
                made = audio.sample_count if isinstance(audio, Speech) else len(audio.samples)
                self.seconds += made / audio.sample_rate
            try:
                self._on_event(event)
            finally:
                if not isinstance(event, AudioChunk):
                    self._on_end(isinstance(event, Done))

    def append(self, text: str | list[int], final: bool) -> None:
        """Raises `ValueError`, because the text is complete."""
        raise ValueError("The text of this request is complete.")

    def cancel(self) -> None:
        """Stops the delivery of events. Does not wait for a chunk that is being delivered."""
        if self._ended.acquire(blocking=False):
            self._on_end(False)

    @property
    def is_open(self) -> bool:
        """Whether the request has not ended."""
        return not self._ended.locked()

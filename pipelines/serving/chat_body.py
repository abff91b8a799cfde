"""What a client of `/v1/chat/completions` sends: OpenAI's fields, as far as they mean something here, and `vllm_xargs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pipelines.request import Mode
from pipelines.serving.errors import Body

MAX_MESSAGES = 1000


class TextPart(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str


class InputAudio(Body):
    """A file as base64 or a data URL, and its format."""

    data: str
    format: str


class AudioPart(Body):
    """Audio, as OpenAI has it."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(Body):
    """A data URL."""

    url: str


class AudioUrlPart(Body):
    """Audio, as vLLM has it."""

    type: Literal["audio_url"]
    audio_url: AudioUrl


def _part_tag(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return f"of:{kind}" if kind in ("text", "input_audio", "audio_url") else None


def _content_tag(content: Any) -> str:
    return "of:parts" if isinstance(content, list) else "of:string"


#: Tags begin with `of:`, so that an error's path shows only what the client wrote.
Part = Annotated[
    Annotated[TextPart, Tag("of:text")] | Annotated[AudioPart, Tag("of:input_audio")] | Annotated[AudioUrlPart, Tag("of:audio_url")],
    Discriminator(_part_tag, custom_error_type="part_type", custom_error_message="A part has the type text, input_audio or audio_url"),
]
Content = Annotated[
    Annotated[str, Tag("of:string")] | Annotated[list[Part], Tag("of:parts"), Field(min_length=1, max_length=MAX_MESSAGES)],
    Discriminator(_content_tag),
]


class ChatMessage(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Xargs(Body):
    """The settings of a model that writes text and audio, in the spelling of its published server."""

    mode: Mode | None = None
    #: Where a request begins; the only beginning there is.
    phase: Literal["text"] | None = None
    text_temperature: float | None = None
    audio_temperature: float | None = None
    #: 0 or less: among all codes.
    audio_topk: int | None = None
    cfg: float | None = None


class AudioOut(Body):
    """How the audio of an answer comes."""

    format: Literal["wav", "flac", "pcm16"] = "wav"
    voice: str | None = None


class StreamOptions(Body):
    """OpenAI's."""

    include_usage: bool = False


class ChatBody(Body):
    """The whole request."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    vllm_xargs: Xargs = Xargs()
    modalities: list[Literal["text", "audio"]] | None = None
    audio: AudioOut = AudioOut()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_seconds: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop_token_ids: list[int] = Field(default_factory=list[int])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    #: Kept nowhere.
    user: str | None = None

"""Lines of an OpenAI batch for `/v1/audio/speech` as dialogues, so that a file written for that service becomes a job.

    {"custom_id": "a1", "method": "POST", "url": "/v1/audio/speech",
     "body": {"model": "hibari", "input": "Good evening.", "voice": "heart", "response_format": "wav", "instructions": "Calm."}}

Source: https://platform.openai.com/docs/api-reference/batch/request-input and .../audio/createSpeech. A line that
asks for something that the job cannot do is an error, so that nobody gets speech other than the requested one.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from jobs.dialogue import check_example_id, clean
from jobs.input_format import InputFormat
from pipelines.audio_format import AUDIO_FORMATS
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import ModelCard
from pipelines.request import Generation
from pipelines.validation import is_visible

URL = "/v1/audio/speech"
_SHAPE = (
    "A line of a batch is one JSON object with `custom_id` (text), `method` (POST), "
    f"`url` ({URL}) and `body` (an object with `model`, `input` and `voice`)."
)


class LineForm(Protocol):
    """How the lines of an input hold dialogues."""

    #: The key of the example id in a line.
    id_key: str

    def dialogue(self, line: bytes) -> bytes:
        """The dialogue of a line, as one line of JSON. Raises `InputError`."""
        ...

    def example_id(self, line: bytes) -> str | None:
        """The example id of a refused line, or None where it has no valid one."""
        ...


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    input: str
    voice: str | None = None
    response_format: str | None = None
    speed: float | None = None
    instructions: str | None = None
    stream_format: str | None = None


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: _Body


class _Dialogue(msgspec.Struct, frozen=True):
    example_id: str
    messages: tuple[tuple[str, str, str], ...]
    generation: Generation | msgspec.UnsetType = msgspec.UNSET


class _CustomId(msgspec.Struct, frozen=True):
    custom_id: str


_decode = msgspec.json.Decoder(_Request).decode
_decode_id = msgspec.json.Decoder(_CustomId).decode
_encode = msgspec.json.Encoder().encode


def line_form(format: InputFormat, card: ModelCard, encoding: str) -> LineForm | None:
    """How the lines of an input are read for a job of this model and audio encoding; None: they are dialogues by then."""
    return OpenAiBatchForm(card, encoding) if format == "openai-batch" else None


class OpenAiBatchForm:
    """Lines of a batch for one job: its model, and the encoding of its audio."""

    id_key = "custom_id"

    def __init__(self, card: ModelCard, encoding: str) -> None:
        #: A checkpoint folder may be named by its last part.
        self._models = (card.name, card.name.rpartition("/")[2])
        self._instruct = card.capabilities.instruct
        self._encoding = encoding

    def dialogue(self, line: bytes) -> bytes:
        """The dialogue: `custom_id` is its `example_id`, `input` the user's text, `voice` and `instructions` its generation.

        Raises `InputError`: `input.bad_json`, `input.bad_line`, `input.empty_text`, and `input.unsupported` for what the job
        cannot do. Messages use the keys of a batch.
        """
        request = _read(line)
        body = request.body
        if request.method != "POST" or request.url != URL:
            asked = clean(f"{request.method} {request.url}", 100)
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, f"The line asks for {asked!r}.", f"Only POST {URL} is supported.")
        check_example_id(request.custom_id, self.id_key, _SHAPE)
        self._check(body)
        # An empty voice or instruction counts as none.
        generation = Generation(voice=body.voice or None, instruct=body.instructions or None)
        wanted = generation if generation != Generation() else msgspec.UNSET
        return _encode(_Dialogue(request.custom_id, (("user", "text", body.input),), wanted))

    def example_id(self, line: bytes) -> str | None:
        """The `custom_id` of a line, even if the rest of the line is invalid."""
        try:
            custom_id = _decode_id(line).custom_id
            check_example_id(custom_id, self.id_key, _SHAPE)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, InputError):
            return None
        return custom_id

    def _check(self, body: _Body) -> None:
        if body.model not in self._models:
            raise _unsupported(
                "model", body.model, f"This job's model is {self._models[0]}; submit with another --model, or change the line."
            )
        if not is_visible(body.input):
            raise InputError(ErrorCode.INPUT_EMPTY_TEXT, "The `input` has no text to speak.", "Put the text there.")
        if body.instructions and not self._instruct:
            advice = "Leave `instructions` out, or submit with a --model that follows them."
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, "This model does not follow instructions.", advice)
        if body.response_format is not None and body.response_format != self._encoding:
            known = body.response_format in AUDIO_FORMATS
            other = f"`--format {body.response_format}` makes the other" if known else f"other formats are {', '.join(AUDIO_FORMATS)}"
            advice = f"This job's audio is {self._encoding}, and a job has one format; {other}."
            raise _unsupported("response_format", body.response_format, advice)
        if body.speed is not None and body.speed != 1:
            raise _unsupported("speed", f"{body.speed:g}", "Only the natural speed, 1, is supported; leave `speed` out.")
        if body.stream_format not in (None, "audio"):
            raise _unsupported("stream_format", body.stream_format or "", "A batch writes whole files; leave `stream_format` out.")


def _read(line: bytes) -> _Request:
    try:
        request = _decode(line)
        if not line.isascii():
            line.decode()
    except msgspec.ValidationError as error:
        what, _, path = clean(str(error)).partition(" - at `$")
        where = f" in {path[1:-1]}" if path[1:-1] else ""
        if "unknown field" in what:
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, f"{what}{where}.", "It would have no effect; remove it from the line.") from None
        raise InputError(ErrorCode.INPUT_BAD_LINE, f"{what}{where}.", _SHAPE) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InputError(ErrorCode.INPUT_BAD_JSON, f"The line is not JSON: {clean(reason)}.", "Write one JSON object a line.") from None
    return request


def _unsupported(key: str, value: str, advice: str) -> InputError:
    return InputError(ErrorCode.INPUT_UNSUPPORTED, f"The line asks for {key} {clean(value, 100)!r}.", advice)

"""One line of an input file: a dialogue of ESPnet with its optional `generation` object, strictly decoded;
and chat messages and requests of an OpenAI batch, which become one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pipelines.audio_format import AUDIO_FORMATS
from pipelines.errors import ErrorCode, InputError
from pipelines.request import Generation, Message, Modality, Role
from pipelines.validation import is_visible

if TYPE_CHECKING:
    from pipelines.registry import ModelCard

MAX_EXAMPLE_ID_CHARACTERS = 1000
#: PostgreSQL cannot index longer values.
MAX_EXAMPLE_ID_BYTES = 2000
#: Python reads no longer integers (`sys.get_int_max_str_digits`): a line that has one could be exported, but
#: not read again.
MAX_INTEGER_DIGITS = 4300
_LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_INTEGER_DIGITS + 1))
#: msgspec's "Invalid enum value 'x' - at `$.messages[0][1]`", or "... - at `key` in `$.generation.roles`".
_REASON = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)
#: A message, or what stands in it: `.messages[0]`, `.messages[0][2]`.
_MESSAGE = re.compile(r"\.messages\[\d+\](\[\d+\])?")
#: msgspec's names of types.
_KINDS = {
    "array": "a list",
    "object": "an object",
    "str": "a text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
_SHAPE = "A line is one JSON object with `example_id` or `id` (text) and `messages` (a list of [role, modality, content])."


class Dialogue(msgspec.Struct, frozen=True, gc=False):
    """A decoded line. Keys that Nightjar does not know stay in the line and come back in exports."""

    example_id: str
    messages: tuple[tuple[Role, Modality, str], ...]
    generation: Generation | None = None

    def typed_messages(self) -> tuple[Message, ...]:
        """The messages in the words of a request; audio content is still the line's path."""
        return tuple([Message(role, modality, content) for role, modality, content in self.messages])


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A line as a person writes it: `id` may stand in the place of `example_id`."""

    messages: tuple[tuple[Role, Modality, str], ...]
    example_id: str | msgspec.UnsetType = msgspec.UNSET
    generation: Generation | None = None
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.Encoder().encode
Decoded = TypeVar("Decoded")


def decode_line(
    decode: Callable[[bytes], Decoded], line: bytes, refused: Callable[[str], InputError]
) -> Decoded:
    """A line of UTF-8 JSON by a decoder of msgspec; `refused` makes the error of JSON that the decoder
    does not take, of the reason that it gives. Raises also `input.bad_json`."""
    try:
        found = decode(line)
        if not line.isascii():
            line.decode()
    except msgspec.ValidationError as error:
        raise refused(clean(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InputError(
            ErrorCode.INPUT_BAD_JSON,
            f"The line is not JSON: {clean(reason)}.",
            "Write one JSON object a line.",
        ) from None
    return found


def parse_line(raw: bytes) -> tuple[Dialogue, bytes]:
    """The dialogue of one line of UTF-8 JSON, and the line with its `example_id`, which it may call `id`.

    Raises `InputError`: `input.bad_json`, `input.bad_line`, `input.bad_role`, `input.bad_modality` or
    `input.bad_generation`. Ranges of `generation` are `pipelines.validation`'s to check.
    """
    line = decode_line(_decode, raw, _shape_error)
    if len(raw) > MAX_INTEGER_DIGITS and _LONG_NUMBER.search(raw):
        try:
            json.loads(raw)
        except (ValueError, RecursionError):
            message = f"The line has an integer of more than {MAX_INTEGER_DIGITS:,} digits."
            raise InputError(ErrorCode.INPUT_BAD_JSON, message, "Write it as text.") from None
    example_id, named = line.example_id, raw
    if line.id is not msgspec.UNSET:
        example_id = chosen_id(example_id, decode_line(msgspec.json.decode, bytes(line.id), _shape_error))
        if line.example_id is msgspec.UNSET and example_id is not None:
            named = b'{"example_id":%b,%b' % (_encode(example_id), raw.lstrip()[1:])
    if example_id is msgspec.UNSET or example_id is None:
        raise InputError(ErrorCode.INPUT_BAD_LINE, "The line has no `example_id`.", _SHAPE)
    if len(example_id) > 500 or not example_id.isprintable() or not example_id:
        check_example_id(example_id, "example_id", _SHAPE)
    if not line.messages:
        raise InputError(ErrorCode.INPUT_BAD_LINE, "The line has no messages.", _SHAPE)
    return Dialogue(example_id, line.messages, line.generation), named


def chosen_id(example_id: object, other: object) -> str | None:
    """The id of a record that may call it `example_id` or `id`; None: it has neither. Raises
    `input.bad_line` where they differ."""
    ids = [
        str(one) for one in (example_id, other) if isinstance(one, str | int) and not isinstance(one, bool)
    ]
    if len(set(ids)) > 1:
        both = " and ".join(f"{clean(one, 100)!r}" for one in ids)
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            f"`example_id` and `id` differ: {both}.",
            "Leave one of them out; of a table `--column id=NAME` takes one.",
        )
    return ids[0] if ids else None


def spoken_text(messages: Sequence[Message]) -> str:
    """The user's texts of a dialogue, one a line."""
    return "\n".join(
        message.content.strip()
        for message in messages
        if message.role == "user" and message.modality == "text" and isinstance(message.content, str)
    )


def speech_position(messages: Sequence[Sequence[str]]) -> int:
    """Where the speech of a dialogue stands among its messages, given as (role, modality, ...): the place
    of the first assistant audio message, or after the last message where there is none."""
    for place, message in enumerate(messages):
        if message[0] == "assistant" and message[1] == "audio":
            return place
    return len(messages)


def clean(text: str, limit: int = 500) -> str:
    """Text of an input made fit for a ledger and a terminal: control characters escaped, length bounded."""
    short = text if len(text) <= limit else f"{text[:limit]}..."
    return short if short.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def check_example_id(example_id: str, key: str, shape: str) -> None:
    """Raises `input.bad_line` for an id that cannot be an item's; `key` is what the line calls it, `shape`
    how a line is written."""
    if not example_id:
        raise InputError(ErrorCode.INPUT_BAD_LINE, f"The `{key}` is empty.", shape)
    if len(example_id) > MAX_EXAMPLE_ID_CHARACTERS or len(example_id.encode()) > MAX_EXAMPLE_ID_BYTES:
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            f"The `{key}` is longer than {MAX_EXAMPLE_ID_CHARACTERS} characters or {MAX_EXAMPLE_ID_BYTES} bytes.",
            "Use a shorter one.",
        )
    if "\0" in example_id:
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            f"The `{key}` holds a NUL character.",
            "Databases cannot store it; remove it.",
        )


def _shape_error(reason: str) -> InputError:
    """msgspec's message as a code and, where it is about messages, as a sentence in words of JSON."""
    found = _REASON.fullmatch(reason)
    what, path = (found[1], found[2] or "") if found else (reason, "")
    value, number = what.partition("value ")[2], path.partition("[")[2].partition("]")[0]
    if path.startswith(".messages") and path.endswith("[0]") and "enum" in what:
        message = f"Message {number} has the unknown role {value}."
        return InputError(ErrorCode.INPUT_BAD_ROLE, message, "Roles are user, assistant and system.")
    if path.startswith(".messages") and path.endswith("[1]") and "enum" in what:
        message = f"Message {number} has the unknown modality {value}."
        return InputError(
            ErrorCode.INPUT_BAD_MODALITY, message, "Modalities are text, audio, image, video and toolcall."
        )
    if path.startswith(".generation"):
        fields = ", ".join(Generation.__struct_fields__)
        return InputError(
            ErrorCode.INPUT_BAD_GENERATION,
            f"{what} in {path[1:]}.",
            f"The keys of `generation` are: {fields}.",
        )
    if _MESSAGE.fullmatch(path):
        return InputError(
            ErrorCode.INPUT_BAD_LINE,
            f"Message {number} is not a list of three texts, [role, modality, content].",
            _SHAPE,
        )
    if (
        path in ("", ".messages")
        and (kind := _KINDS.get(what.rpartition("got `")[2].rstrip("`"))) is not None
    ):
        wanted = "`messages` is {}, not a list." if path else "The line is {}, not an object."
        return InputError(ErrorCode.INPUT_BAD_LINE, wanted.format(kind), _SHAPE)
    where = f" in {path[1:]}" if path[1:] else ""
    return InputError(ErrorCode.INPUT_BAD_LINE, f"{what}{where}.", _SHAPE)


#: Of chat messages.
_CHAT_SHAPE = "A line is one JSON object with `messages`, a list of objects with `role` and `content`."


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part]


class _Chat(msgspec.Struct, frozen=True):
    messages: list[_ChatMessage]
    example_id: str | int | None = None
    id: str | int | None = None
    generation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Row(msgspec.Struct, frozen=True):
    """A dialogue as it is written for a line of another kind."""

    example_id: str
    messages: Sequence[tuple[str, str, str]]
    generation: Generation | msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_chat = msgspec.json.Decoder(_Chat).decode


def chat_dialogue(line: bytes, number: int) -> bytes:
    """The dialogue of a line of chat messages, as JSON; `example_id` or `id` is its id, else its number.
    Raises `InputError`.

        {"id": "a1", "messages": [{"role": "user", "content": "Good evening."}, {"role": "assistant", "content": "Hello."}]}

    Source: https://platform.openai.com/docs/api-reference/chat/create (`messages`) and
    https://huggingface.co/docs/transformers/chat_templating.
    """
    found = decode_line(
        _decode_chat, line, lambda reason: InputError(ErrorCode.INPUT_BAD_LINE, f"{reason}.", _CHAT_SHAPE)
    )
    named = chosen_id(found.example_id, found.id)
    messages = [
        (message.role, "text", _text(message.content, place)) for place, message in enumerate(found.messages)
    ]
    return _encode(_Row(f"line-{number}" if named is None else named, messages, found.generation))


def _text(content: str | list[_Part], place: int) -> str:
    if isinstance(content, str):
        return content
    other = next((part.type for part in content if part.type != "text"), None)
    if other is not None:
        message = f"Message {place} has a part of type {clean(other, 40)!r}."
        raise InputError(
            ErrorCode.INPUT_BAD_MODALITY,
            message,
            "Parts of chat messages are texts; write audio as a dialogue.",
        )
    return "\n".join(part.text for part in content)


#: What lines of an OpenAI batch call the id of an example, and the requests that they may hold.
CUSTOM_ID = "custom_id"
URL = "/v1/audio/speech"
_BATCH_SHAPE = (
    "A line of a batch is one JSON object with `custom_id` (text), `method` (POST), "
    f"`url` ({URL}) and `body` (an object with `model`, `input` and `voice`)."
)


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


class _CustomId(msgspec.Struct, frozen=True):
    custom_id: str


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_id = msgspec.json.Decoder(_CustomId).decode


def batch_dialogue(line: bytes, card: ModelCard, encoding: str) -> bytes:
    """The dialogue of a line of an OpenAI batch for `/v1/audio/speech`, for a job with this model and
    encoding of its audio: `custom_id` is its `example_id`, `input` the user's text, `voice` and
    `instructions` its generation.

        {"custom_id": "a1", "method": "POST", "url": "/v1/audio/speech",
         "body": {"model": "hibari", "input": "Good evening.", "voice": "heart", "response_format": "wav", "instructions": "Calm."}}

    Source: https://platform.openai.com/docs/api-reference/batch/request-input and .../audio/createSpeech.
    A line that asks for something that the job cannot do is an error, so that nobody gets speech other
    than the requested one. Raises `InputError`: `input.bad_json`, `input.bad_line`, `input.empty_text`, and
    `input.unsupported`. Messages use the keys of a batch.
    """
    request = decode_line(_decode_request, line, _batch_error)
    body = request.body
    if request.method != "POST" or request.url != URL:
        asked = f"The line asks for {clean(f'{request.method} {request.url}', 100)!r}."
        raise InputError(ErrorCode.INPUT_UNSUPPORTED, asked, f"Only POST {URL} is supported.")
    check_example_id(request.custom_id, CUSTOM_ID, _BATCH_SHAPE)
    # A checkpoint folder may be named by its last part.
    if body.model not in (card.name, card.name.rpartition("/")[2]):
        advice = f"This job's model is {card.name}; submit with another --model, or change the line."
        raise _unsupported("model", body.model, advice)
    if not is_visible(body.input):
        message = "The `input` has no text to speak."
        raise InputError(ErrorCode.INPUT_EMPTY_TEXT, message, "Put the text there.")
    if body.instructions and not card.capabilities.instruct:
        advice = "Leave `instructions` out, or submit with a --model that follows them."
        raise InputError(ErrorCode.INPUT_UNSUPPORTED, "This model does not follow instructions.", advice)
    if (asked := body.response_format) not in (None, encoding):
        other = (
            f"`--format {asked}` makes the other"
            if asked in AUDIO_FORMATS
            else f"other formats are {', '.join(AUDIO_FORMATS)}"
        )
        advice = f"This job's audio is {encoding}, and a job has one format; {other}."
        raise _unsupported("response_format", asked, advice)
    if body.speed not in (None, 1):
        advice = "Only the natural speed, 1, is supported; leave `speed` out."
        raise _unsupported("speed", f"{body.speed:g}", advice)
    if body.stream_format not in (None, "audio"):
        advice = "A batch writes whole files; leave `stream_format` out."
        raise _unsupported("stream_format", body.stream_format, advice)
    # An empty voice or instruction counts as none.
    generation = Generation(voice=body.voice or None, instruct=body.instructions or None)
    wanted = generation if generation != Generation() else msgspec.UNSET
    return _encode(_Row(request.custom_id, (("user", "text", body.input),), wanted))


def custom_id(line: bytes) -> str | None:
    """The `custom_id` of a line of a batch, even if the rest of the line is invalid."""
    try:
        found = _decode_id(line).custom_id
        check_example_id(found, CUSTOM_ID, _BATCH_SHAPE)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, InputError):
        return None
    return found


def _batch_error(reason: str) -> InputError:
    what, _, path = reason.partition(" - at `$")
    where = f" in {path[1:-1]}" if path[1:-1] else ""
    if "unknown field" in what:
        return InputError(
            ErrorCode.INPUT_UNSUPPORTED,
            f"{what}{where}.",
            "It would have no effect; remove it from the line.",
        )
    return InputError(ErrorCode.INPUT_BAD_LINE, f"{what}{where}.", _BATCH_SHAPE)


def _unsupported(key: str, value: str, advice: str) -> InputError:
    return InputError(ErrorCode.INPUT_UNSUPPORTED, f"The line asks for {key} {clean(value, 100)!r}.", advice)

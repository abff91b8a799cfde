"""One line of an input file: strict decoding of an ESPnet dialogue and its optional `generation` object."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from pipelines.errors import ErrorCode, InputError
from pipelines.request import Generation, Message, Modality, Role

MAX_EXAMPLE_ID_CHARACTERS = 1000
#: PostgreSQL cannot index longer values.
MAX_EXAMPLE_ID_BYTES = 2000
#: Python reads no longer integers (`sys.get_int_max_str_digits`): a line that has one could be exported, but not read again.
MAX_INTEGER_DIGITS = 4300
_LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_INTEGER_DIGITS + 1))
#: Texts are found so that they are passed over; of numbers, the digits, and what makes one no integer.
_NUMBER_OR_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(\d+)((?:\.\d+)?(?:[eE][+-]?\d+)?)')
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


def parse_dialogue(raw: bytes) -> Dialogue:
    """The dialogue of one line, as `parse_line`."""
    return parse_line(raw)[0]


def parse_line(raw: bytes) -> tuple[Dialogue, bytes]:
    """The dialogue of one line of UTF-8 JSON, and the line with its `example_id`, which it may call `id`.

    Raises `InputError`: `input.bad_json`, `input.bad_line`, `input.bad_role`, `input.bad_modality` or
    `input.bad_generation`. Ranges of `generation` are `pipelines.validation`'s to check.
    """
    try:
        line = _decode(raw)
        if not raw.isascii():
            raw.decode()
        if len(raw) > MAX_INTEGER_DIGITS and _LONG_NUMBER.search(raw):
            _check_integers(raw)
        example_id, named = line.example_id, raw
        if line.id is not msgspec.UNSET:
            example_id = chosen_id(example_id, msgspec.json.decode(line.id))
            if line.example_id is msgspec.UNSET and example_id is not None:
                named = b'{"example_id":%b,%b' % (msgspec.json.encode(example_id), raw.lstrip()[1:])
    except msgspec.ValidationError as error:
        raise _shape_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InputError(ErrorCode.INPUT_BAD_JSON, f"The line is not JSON: {clean(reason)}.", "Write one JSON object a line.") from None
    if example_id is msgspec.UNSET or example_id is None:
        raise InputError(ErrorCode.INPUT_BAD_LINE, "The line has no `example_id`.", _SHAPE)
    if len(example_id) > 500 or not example_id.isprintable() or not example_id:
        check_example_id(example_id, "example_id", _SHAPE)
    if not line.messages:
        raise InputError(ErrorCode.INPUT_BAD_LINE, "The line has no messages.", _SHAPE)
    return Dialogue(example_id, line.messages, line.generation), named


def chosen_id(example_id: object, other: object) -> str | None:
    """The id of a record that may call it `example_id` or `id`; None: it has neither. Raises `input.bad_line` where they differ."""
    ids = [str(one) for one in (example_id, other) if isinstance(one, str | int) and not isinstance(one, bool)]
    if len(set(ids)) > 1:
        both = " and ".join(f"{clean(one, 100)!r}" for one in ids)
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            f"`example_id` and `id` differ: {both}.",
            "Leave one of them out; of a table `--column id=NAME` takes one.",
        )
    return ids[0] if ids else None


def _check_integers(raw: bytes) -> None:
    """Raises `input.bad_json` for an integer outside of texts that is too long; takes a line that is known to be JSON."""
    longest = max((len(digits) for digits, rest in _NUMBER_OR_TEXT.findall(raw) if not rest), default=0)
    if longest > MAX_INTEGER_DIGITS:
        message = f"The line has an integer of {longest:,} digits; {MAX_INTEGER_DIGITS:,} are the maximum."
        raise InputError(ErrorCode.INPUT_BAD_JSON, message, "Write it as text.")


def spoken_text(messages: Sequence[Message]) -> str:
    """The user's texts of a dialogue, one a line."""
    return "\n".join(
        message.content.strip()
        for message in messages
        if message.role == "user" and message.modality == "text" and isinstance(message.content, str)
    )


def speech_position(messages: Sequence[Sequence[str]]) -> int:
    """Where the speech of a dialogue stands among its messages, given as (role, modality, ...): the place of the first assistant
    audio message, or after the last message where there is none."""
    for place, message in enumerate(messages):
        if message[0] == "assistant" and message[1] == "audio":
            return place
    return len(messages)


def clean(text: str, limit: int = 500) -> str:
    """Text of an input made fit for a ledger and a terminal: control characters escaped, length bounded."""
    short = text if len(text) <= limit else f"{text[:limit]}..."
    return short if short.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def check_example_id(example_id: str, key: str, shape: str) -> None:
    """Raises `input.bad_line` for an id that cannot be an item's; `key` is what the line calls it, `shape` how a line is written."""
    if not example_id:
        raise InputError(ErrorCode.INPUT_BAD_LINE, f"The `{key}` is empty.", shape)
    if len(example_id) > MAX_EXAMPLE_ID_CHARACTERS or len(example_id.encode()) > MAX_EXAMPLE_ID_BYTES:
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            f"The `{key}` is longer than {MAX_EXAMPLE_ID_CHARACTERS} characters or {MAX_EXAMPLE_ID_BYTES} bytes.",
            "Use a shorter one.",
        )
    if "\0" in example_id:
        raise InputError(ErrorCode.INPUT_BAD_LINE, f"The `{key}` holds a NUL character.", "Databases cannot store it; remove it.")


def _shape_error(reason: str) -> InputError:
    """msgspec's message as a code and, where it is about messages, as a sentence in words of JSON."""
    found = _REASON.fullmatch(clean(reason))
    what, path = (found[1], found[2] or "") if found else (reason, "")
    value, number = what.partition("value ")[2], path.partition("[")[2].partition("]")[0]
    if path.startswith(".messages") and path.endswith("[0]") and "enum" in what:
        message = f"Message {number} has the unknown role {value}."
        return InputError(ErrorCode.INPUT_BAD_ROLE, message, "Roles are user, assistant and system.")
    if path.startswith(".messages") and path.endswith("[1]") and "enum" in what:
        message = f"Message {number} has the unknown modality {value}."
        return InputError(ErrorCode.INPUT_BAD_MODALITY, message, "Modalities are text, audio, image, video and toolcall.")
    if path.startswith(".generation"):
        fields = ", ".join(Generation.__struct_fields__)
        return InputError(ErrorCode.INPUT_BAD_GENERATION, f"{what} in {path[1:]}.", f"The keys of `generation` are: {fields}.")
    if _MESSAGE.fullmatch(path):
        return InputError(ErrorCode.INPUT_BAD_LINE, f"Message {number} is not a list of three texts, [role, modality, content].", _SHAPE)
    if path in ("", ".messages") and (kind := _KINDS.get(what.rpartition("got `")[2].rstrip("`"))) is not None:
        wanted = "`messages` is {}, not a list." if path else "The line is {}, not an object."
        return InputError(ErrorCode.INPUT_BAD_LINE, wanted.format(kind), _SHAPE)
    where = f" in {path[1:]}" if path[1:] else ""
    return InputError(ErrorCode.INPUT_BAD_LINE, f"{what}{where}.", _SHAPE)

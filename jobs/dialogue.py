"""The lines of an input: dialogues in ESPnet's format with an optional `generation` object, strictly decoded;
and chat messages, requests of an OpenAI batch and rows of a table, which are converted to dialogues.

A spoken turn of a dialogue is one text message that becomes an item, identified by its place among the messages.
Messages are (role, modality, content).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from jobs.formatting import printable
from pipelines.audio_format import AUDIO_FORMATS
from pipelines.errors import ErrorCode, InputError, bad_line, unsupported
from pipelines.registry import ModelCard
from pipelines.request import Generation, Message, Modality, Role
from pipelines.validation import check_generation, is_visible

#: `auto`: the assistant's texts without audio; if there are none, the user's. `answer`: the model's answer to
#: the whole dialogue.
Speak = Literal["auto", "user", "assistant", "all", "answer"]

Triple = tuple[Role, Modality, str]
_NO_KEYS: Mapping[int, str] = {}

MAX_EXAMPLE_ID_CHARACTERS = 1000
#: PostgreSQL cannot index longer values.
MAX_EXAMPLE_ID_BYTES = 2000
#: Python cannot parse longer integers (`sys.get_int_max_str_digits`), so an exported line could not be read
#: again.
MAX_INTEGER_DIGITS = 4300
_LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_INTEGER_DIGITS + 1))
#: Patterns of msgspec's messages for wrong JSON, each with its error code and advice.
Faults = tuple[tuple[str, ErrorCode, str], ...]
_FAULTS = (
    (
        r"Invalid enum.*messages\[\d+\]\[0\]`",
        ErrorCode.INPUT_BAD_ROLE,
        "Roles are user, assistant and system.",
    ),
    (
        r"Invalid enum.*messages\[\d+\]\[1\]`",
        ErrorCode.INPUT_BAD_MODALITY,
        "Modalities are text, audio, image, video and toolcall.",
    ),
    (
        r".*`\$\.generation.*`",
        ErrorCode.INPUT_BAD_GENERATION,
        f"The keys of `generation` are: {', '.join(Generation.__struct_fields__)}.",
    ),
)
_SHAPE = "A line is one JSON object with `example_id` or `id` (text) and `messages` (a list of [role, modality, content])."


class Dialogue(msgspec.Struct, frozen=True, gc=False):
    """A decoded line. Its other keys are its metadata, see `metadata_json`."""

    example_id: str
    messages: tuple[Triple, ...]
    generation: Generation | None = None

    def typed_messages(self, references: Mapping[int, str] = _NO_KEYS) -> tuple[Message, ...]:
        """The messages of a request. `references`: place of an audio message -> key in the store, which
        replaces the path in the line."""
        return tuple(
            [
                Message(role, modality, references.get(place, content))
                for place, (role, modality, content) in enumerate(self.messages)
            ]
        )


#: Decodes a line of a shard.
decode_dialogue = msgspec.json.Decoder(Dialogue).decode
#: The settings of every line without settings of its own.
NO_GENERATION = Generation()


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A line as it is written, with `id` or `example_id`."""

    messages: tuple[Triple, ...]
    example_id: str | UnsetType = UNSET
    generation: Generation | None = None
    id: msgspec.Raw | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Line).decode
_encode = msgspec.json.encode
Decoded = TypeVar("Decoded")
#: Returns the voice of a speaker, or None for a speaker without one; None itself: speakers have no voices.
VoiceOf = Callable[[str], str | None] | None
#: The errors of msgspec for a line that is not JSON, or not what is expected.
BAD_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)


def decode_line(decode: Callable[[bytes], Decoded], line: bytes, shape: str, faults: Faults = ()) -> Decoded:
    """Decodes a line of UTF-8 JSON with a msgspec decoder. Raises `input.bad_json` for a line that is not
    JSON. For JSON that the decoder refuses, raises the error code of the first matching pattern in `faults`,
    or `input.bad_line` with the expected `shape`."""
    try:
        found = decode(line)
        if not line.isascii():
            line.decode()
    except msgspec.ValidationError as error:
        reason = printable(str(error), 500)
        for pattern, code, advice in faults:
            if re.fullmatch(pattern, reason):
                raise InputError(code, f"{reason}.", advice) from None
        raise bad_line(f"{reason}.", shape) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InputError(
            ErrorCode.INPUT_BAD_JSON,
            f"The line is not JSON: {printable(reason, 500)}.",
            "Write one JSON object per line.",
        ) from None
    return found


def parse_line(raw: bytes) -> tuple[Dialogue, bytes]:
    """Decodes the dialogue of a line of UTF-8 JSON; returns it and the line. If the line has only `id`,
    `example_id` is added to it.

    Raises `InputError`: `input.bad_json`, `input.bad_line`, `input.bad_role`, `input.bad_modality` or
    `input.bad_generation`. `pipelines.validation` checks the ranges of `generation`.
    """
    line = decode_line(_decode, raw, _SHAPE, _FAULTS)
    if len(raw) > MAX_INTEGER_DIGITS and _LONG_NUMBER.search(raw):
        try:
            json.loads(raw)
        except (ValueError, RecursionError):
            raise InputError(
                ErrorCode.INPUT_BAD_JSON,
                f"The line has an integer of more than {MAX_INTEGER_DIGITS:,} digits.",
                "Write it as text.",
            ) from None
    example_id = line.example_id
    named = raw
    if line.id is not UNSET:
        example_id = chosen_id(example_id, decode_line(msgspec.json.decode, bytes(line.id), _SHAPE))
        if line.example_id is UNSET:
            named = b'{"example_id":%b,%b' % (_encode(example_id), raw.lstrip()[1:])
    if not isinstance(example_id, str):
        raise bad_line("The line has no `example_id`.", _SHAPE)
    if len(example_id) > 500 or not example_id.isprintable() or not example_id:
        check_example_id(example_id, "example_id")
    if not line.messages:
        raise bad_line("The line has no messages.", _SHAPE)
    return Dialogue(example_id, line.messages, line.generation), named


#: The keys of a line that are a dialogue's own. The others are its metadata.
LINE_KEYS = ("example_id", "id", "messages", "generation")
decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def metadata_json(line: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The metadata of a line: its keys that are not a dialogue's own, with their values as they are written."""
    return {name: value for name, value in decode_object(line).items() if name not in LINE_KEYS}


def metadata_of(line: bytes | msgspec.Raw) -> dict[str, Any]:
    """The metadata of a line, decoded."""
    # Other decoders refuse numbers beyond the range of a double.
    return json.loads(_encode(metadata_json(line)))


def chosen_id(example_id: object, other: object) -> str | None:
    """The id of a record from `example_id` or `id`; None: it has neither. Raises `input.bad_line` if they
    differ."""
    ids = [
        str(one) for one in (example_id, other) if isinstance(one, str | int) and not isinstance(one, bool)
    ]
    if len(set(ids)) > 1:
        both = " and ".join(f"{printable(one, 100)!r}" for one in ids)
        raise bad_line(
            f"`example_id` and `id` differ: {both}.",
            "Leave one of them out; for a table, `--column id=NAME` selects one.",
        )
    return ids[0] if ids else None


def spoken_text(messages: Sequence[Message]) -> str:
    """The user's texts of a dialogue, one per line."""
    return "\n".join(
        message.content.strip()
        for message in messages
        if message.role == "user" and message.modality == "text" and isinstance(message.content, str)
    )


def speech_position(messages: Sequence[Sequence[str]]) -> int:
    """The place of a dialogue's speech among its messages (role, modality, ...): the place of the first
    assistant audio message, or else the place after the last message."""
    audio = (
        place for place, message in enumerate(messages) if message[0] == "assistant" and message[1] == "audio"
    )
    return next(audio, len(messages))


def check_example_id(example_id: str, key: str) -> None:
    """Raises `input.bad_line` for an id that is empty or that databases cannot store; `key`: its name in the
    line."""
    if (
        not example_id
        or "\0" in example_id
        or len(example_id) > MAX_EXAMPLE_ID_CHARACTERS
        or len(example_id.encode()) > MAX_EXAMPLE_ID_BYTES
    ):
        limits = f"{MAX_EXAMPLE_ID_CHARACTERS:,} characters or {MAX_EXAMPLE_ID_BYTES:,} bytes"
        raise bad_line(
            f"The `{key}` is empty, longer than {limits}, or contains a NUL.", "Give the line another id."
        )


def spoken_turns(messages: Sequence[Triple], speak: Speak) -> tuple[int, ...]:
    """The places of the texts that are spoken, in order; texts without a visible character are skipped."""
    user = _places(messages, "user")
    assistant = _places(messages, "assistant")
    if speak == "auto":
        return tuple([place for place in assistant if not _recordings(messages, place)] or user)
    return tuple(sorted(([] if speak == "assistant" else user) + ([] if speak == "user" else assistant)))


def plain_turn(messages: Sequence[Triple], speak: Speak, max_characters: int) -> int | None:
    """The only spoken turn of a dialogue that has only text, as most have, if that turn is visible and not too long.
    None: any other dialogue, for `turns_and_recordings`."""
    places = {"user": [], "assistant": [], "system": []}
    for place, (role, modality, _) in enumerate(messages):
        if modality != "text":
            return None
        places[role].append(place)
    user = places["user"]
    assistant = places["assistant"]
    if speak == "all":
        turns = user + assistant
    elif speak == "auto":
        turns = assistant or user
    else:
        turns = places[speak]
    if len(turns) != 1:
        return None
    text = messages[turns[0]][2]
    visible = text and ("!" <= text[0] <= "~" or is_visible(text))
    return turns[0] if visible and len(text) <= max_characters else None


def turns_and_recordings(
    messages: Sequence[Triple], speak: Speak
) -> tuple[tuple[int, ...] | None, list[int]]:
    """The places of the messages that are spoken (None: the whole dialogue), and of the audio that they
    need."""
    if speak == "answer":
        return None, [
            place
            for place, (role, modality, _) in enumerate(messages)
            if modality == "audio" and role != "assistant"
        ]
    turns = spoken_turns(messages, speak)
    return turns, sorted({place for turn in turns for place in reference_places(messages, turn)})


def reference_places(messages: Sequence[Triple], turn: int) -> tuple[int, ...]:
    """The places of the recordings whose voice speaks a turn.

    For a user turn: the audio among the consecutive user messages around the text, or if there is none,
    around the nearest earlier user text that has audio. For an assistant turn: the audio of the system
    messages.
    """
    if messages[turn][0] != "user":
        return tuple(_places(messages, "system", "audio"))
    if not _places(messages, "user", "audio"):
        return ()
    for place in reversed(_places(messages[: turn + 1], "user")):
        first, end = _run_of_role(messages, place)
        if recordings := [number for number in range(first, end) if messages[number][1] == "audio"]:
            return tuple(recordings)
    return ()


def turn_messages(
    messages: Sequence[Triple], turn: int, keys: Mapping[int, str] = _NO_KEYS, spoken: str | None = None
) -> tuple[Message, ...]:
    """The messages of a turn as every pipeline expects them: system messages, then reference audio and the
    text in the user's role. `keys` replaces audio contents by place, `spoken` the text."""
    role, _, text = messages[turn]
    recordings = reference_places(messages, turn)
    view = [Message(*message) for message in messages if message[0] == "system" and message[1] != "audio"]
    view += [Message("user", "audio", keys.get(place, messages[place][2])) for place in recordings]
    if role == "user":
        # Other modalities, which no model supports, are kept, so that the turn is refused.
        first, end = _run_of_role(messages, turn)
        view += [Message(*message) for message in messages[first:end] if message[1] not in ("text", "audio")]
    return (*view, Message("user", "text", text if spoken is None else spoken))


def with_audio(messages: Sequence[Sequence[str]], audio: Mapping[int, str]) -> Iterator[Sequence[str]]:
    """Yields the messages and the audio of spoken turns, each directly after its text and in its role.
    `audio`: place of a turn -> its audio.

    If a dialogue has only one text, and it is the user's, its audio becomes the assistant's: a pair of text
    and speech, as models are trained on. It follows all messages of that turn, so that a voice to clone stays
    next to its text. Earlier recordings of the same text by the assistant are left out.
    """
    triples = cast("Sequence[Triple]", messages)
    replaced = {recording for turn in audio for recording in _recordings(triples, turn)}
    after: dict[int, tuple[Role, str]] = {}
    for turn, where in audio.items():
        if _is_only_text(triples, turn):
            after[_run_of_role(triples, turn)[1] - 1] = ("assistant", where)
        else:
            after[turn] = (triples[turn][0], where)
    for place, message in enumerate(messages):
        if place not in replaced:
            yield message
        if place in after:
            role, where = after[place]
            yield [role, "audio", where]


def _places(messages: Iterable[Triple], role: Role, kind: Modality = "text") -> list[int]:
    """The places of a role's audio, or of its texts with a visible character."""
    return [
        place
        for place, (whose, modality, content) in enumerate(messages)
        if whose == role and modality == kind and (kind != "text" or is_visible(content))
    ]


def _is_only_text(messages: Sequence[Triple], turn: int) -> bool:
    """Whether the text at a place is the user's and the only text of user and assistant."""
    return _places(messages, "user") == [turn] and not _places(messages, "assistant")


def _run_of_role(messages: Sequence[Triple], place: int) -> tuple[int, int]:
    """The first place, and the place after the last, of the consecutive messages of one role around a
    place."""
    role = messages[place][0]
    first = end = place
    while first and messages[first - 1][0] == role:
        first -= 1
    while end < len(messages) and messages[end][0] == role:
        end += 1
    return first, end


def _recordings(messages: Sequence[Triple], turn: int) -> list[int]:
    """The places of the assistant's recordings of a text."""
    if messages[turn][0] != "assistant":
        return _places(messages, "assistant", "audio") if _is_only_text(messages, turn) else []
    first, end = _run_of_role(messages, turn)
    texts = [place for place in range(first, end) if messages[place][1] == "text"]
    # Audio follows its text; audio before the first text belongs to that text.
    after = first if turn == texts[0] else turn
    before = next((place for place in texts if place > turn), end)
    return [place for place in range(after, before) if messages[place][1] == "audio"]


_CHAT_SHAPE = "A line is one JSON object with `messages`, a list of objects with `role` and `content`."
_CHAT_FAULTS = (
    (
        r".*content\[.*\.type`",
        ErrorCode.INPUT_BAD_MODALITY,
        "The parts of a chat message must be texts; audio needs the format of dialogues.",
    ),
)


class _Part(msgspec.Struct, frozen=True):
    type: Literal["text"]
    text: str = ""


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


class _Chat(msgspec.Struct, frozen=True):
    messages: list[_ChatMessage]
    example_id: str | int | None = None
    id: str | int | None = None
    generation: msgspec.Raw | UnsetType = UNSET


_decode_chat = msgspec.json.Decoder(_Chat).decode


def chat_dialogue(line: bytes, number: int) -> bytes:
    """Converts a line of chat messages to a dialogue, as JSON. Its id is `example_id` or `id`, or else is
    made from the line's number. Raises `InputError`.

        {"id": "a1", "messages": [{"role": "user", "content": "Good evening."}, {"role": "assistant", "content": "Hello."}]}

    Source: https://platform.openai.com/docs/api-reference/chat/create (`messages`) and
    https://huggingface.co/docs/transformers/chat_templating.
    """
    found = decode_line(_decode_chat, line, _CHAT_SHAPE, _CHAT_FAULTS)
    named = chosen_id(found.example_id, found.id)
    messages = [(message.role, "text", message.text) for message in found.messages]
    made = {"example_id": f"line-{number}" if named is None else named, "messages": messages}
    if found.generation is not UNSET:
        made["generation"] = found.generation
    return _encode(made | metadata_json(line))


#: The key of an example's id in an OpenAI batch, and the supported request.
CUSTOM_ID = "custom_id"
URL = "/v1/audio/speech"
_FORMATS = f"Choose the job's format with --format: {', '.join(AUDIO_FORMATS)}."
_BATCH_SHAPE = (
    "A line of a batch is one JSON object with `custom_id` (text), `method` (POST), "
    f"`url` ({URL}) and `body` (an object with `model`, `input` and `voice`)."
)
_BATCH_FAULTS = (
    (
        "Object contains unknown field.*",
        ErrorCode.INPUT_UNSUPPORTED,
        "It has no effect; remove it from the line.",
    ),
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


_decode_request = msgspec.json.Decoder(_Request).decode


def batch_dialogue(line: bytes, card: ModelCard, encoding: str) -> bytes:
    """Converts a line of an OpenAI batch for `/v1/audio/speech` to a dialogue, for a job with this model and
    audio format: `custom_id` becomes `example_id`, `input` becomes the user's text, and `voice` and
    `instructions` become settings of `generation`.

        {"custom_id": "a1", "method": "POST", "url": "/v1/audio/speech",
         "body": {"model": "hibari", "input": "Good evening.", "voice": "heart", "response_format": "wav", "instructions": "Calm."}}

    A line that requests something else than the job makes is an error, so that all speech is as requested.
    Raises `input.bad_json`, `input.bad_line`, `input.empty_text`, and `input.unsupported`. Error messages use
    the keys of a batch line.

    Source: https://platform.openai.com/docs/api-reference/batch/request-input and .../audio/createSpeech.
    """
    request = decode_line(_decode_request, line, _BATCH_SHAPE, _BATCH_FAULTS)
    body = request.body
    check_example_id(request.custom_id, CUSTOM_ID)
    # Key, requested value, supported values, and advice.
    asked = (
        ("request", f"{request.method} {request.url}", (f"POST {URL}",), "No other request is supported."),
        # For a checkpoint folder, the last part of its path is also accepted.
        (
            "model",
            body.model,
            (card.name, card.name.rpartition("/")[2]),
            "Choose the job's model with --model.",
        ),
        ("response_format", body.response_format, (encoding, None), _FORMATS),
        ("speed", body.speed, (1, None), "Leave it out."),
        ("stream_format", body.stream_format, ("audio", None), "A batch writes whole files."),
    )
    for key, value, supported, advice in asked:
        if value not in supported:
            raise unsupported(
                f"The line has {key} {printable(str(value), 100)!r}, but this job has {supported[0]!r}.",
                advice,
            )
    if not is_visible(body.input):
        raise InputError(
            ErrorCode.INPUT_EMPTY_TEXT, "The `input` has no text to speak.", "Write the text in `input`."
        )
    if body.instructions and not card.capabilities.instruct:
        raise unsupported(
            "This model does not follow instructions.",
            "Leave `instructions` out, or submit with a --model that follows them.",
        )
    settings = {"voice": body.voice or "", "instruct": body.instructions or ""}
    return row_dialogue({"id": request.custom_id, "text": body.input, **settings})


def custom_id(line: bytes) -> str | None:
    """The `custom_id` of a batch line, even if the rest of the line is invalid."""
    try:
        found = msgspec.json.decode(decode_object(line)[CUSTOM_ID], type=str)
        check_example_id(found, CUSTOM_ID)
    except (*BAD_JSON, KeyError, InputError):
        return None
    return found


_GENERATION = ("voice", "language", "instruct", "seed", "reference_text")


def row_dialogue(
    values: Mapping[str, str],
    number: int = 0,
    voice_of: VoiceOf = None,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """Makes a dialogue from the fields of a row, as JSON; empty fields are ignored. `number`: makes the id if
    the row has none. `voice_of`: returns the voice of a speaker, for a row without a voice or a recording.
    `metadata`: the other keys of the dialogue. Raises `InputError`."""
    messages = [("user", "text", values["text"])]
    if audio := values.get("reference_audio"):
        messages.insert(0, ("user", "audio", audio))
    generation: dict[str, str | int] = {field: values[field] for field in _GENERATION if values.get(field)}
    if "seed" in generation:
        # `int` would also accept `1_000` and digits of other scripts.
        if not re.fullmatch(rf"\s*-?[0-9]{{1,{MAX_INTEGER_DIGITS}}}\s*", values["seed"]):
            raise InputError(
                ErrorCode.INPUT_BAD_GENERATION,
                f"The seed is {printable(values['seed'], 40)!r}.",
                "Write a whole number.",
            )
        generation["seed"] = seed = int(values["seed"])
        check_generation(Generation(seed=seed))
    if voice_of is not None and "voice" not in generation and not audio:
        speaker = values.get("speaker", "")
        if (voice := voice_of(speaker)) is None:
            message = "The row has no speaker."
            advice = "Give the row a speaker or a voice."
            if speaker:
                message = f"The speaker {printable(speaker, 40)!r} has no voice."
                advice = "Set one with --voice-for SPEAKER=VOICE, or one for all other speakers with --voice-for '*=VOICE'."
            raise InputError(ErrorCode.INPUT_UNKNOWN_VOICE, message, advice)
        generation["voice"] = voice
    named = chosen_id(values.get("example_id") or None, values.get("id") or None)
    made = {"example_id": named or f"line-{number}", "messages": messages}
    if generation:
        made["generation"] = generation
    return _encode(made | dict(metadata or {}))

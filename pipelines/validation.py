"""Validates dialogues, and converts each to a task for a speech model. Imports no model library, because
ingest validates every line."""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pipelines.errors import ErrorCode, InputError, input_too_long, unsupported
from pipelines.languages import language_of
from pipelines.recording import Recording
from pipelines.request import Capabilities, Generation, Message

# Visible ASCII, or letters and digits of any script without the invisible fillers that Unicode counts as
# letters.
_VISIBLE = re.compile("[!-~]|[^\\W_\u115f\u1160\u3164\uffa0]")
_INVISIBLE_SYMBOLS = frozenset("\u2800\u115f\u1160\u3164\uffa0")
_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zs", "Zl", "Zp", "Mn", "Me"})
#: OpenAI's voice names; each always selects the same voice of a model.
OPENAI_VOICES = (
    "alloy",
    "ash",
    "ballad",
    "cedar",
    "coral",
    "echo",
    "fable",
    "marin",
    "nova",
    "onyx",
    "sage",
    "shimmer",
    "verse",
)
_TINY = math.nextafter(0, 1)
_HUGE = sys.float_info.max
#: Minimum and maximum of each setting, and their description in the error.
_RANGES = {
    "seed": (0, 2**63 - 1, "a whole number from 0 to 2**63 - 1"),
    "top_p": (_TINY, 1, "above 0 and at most 1"),
    "max_tokens": (1, _HUGE, "1 or more"),
    **dict.fromkeys(("repetition_penalty", "max_seconds"), (_TINY, _HUGE, "above 0")),
    **dict.fromkeys(("temperature", "top_k", "cfg"), (0, _HUGE, "0 or more")),
    **dict.fromkeys(("text_temperature", "audio_temperature", "audio_top_k"), (0, _HUGE, "0 or more")),
}
#: Bounds of temperatures, penalties and scales within which float32 stays finite. Values beyond them would
#: have the same effect, but also harm other requests of the batch.
_MIN_SETTING = 1e-4
_MAX_SETTING = 1e4
#: A larger top_k is clamped to this.
MAX_TOP_K = 2**31 - 1
#: Tolerance in frames: seconds that are whole frames must not be rounded up.
_ROUNDING = 1e-6
#: Settings, the capability that they need, and two parts of the error: what this model lacks, and which model
#: to use.
_NEEDS = (
    (("reference_text",), "cloning", "cannot clone a voice", "that clones"),
    (("instruct",), "instruct", "takes no instructions", "that follows instructions"),
    (("cfg",), "guidance", "has no guidance", "with guidance"),
    (
        ("text_temperature", "audio_temperature", "audio_top_k", "max_tokens"),
        "text_out",
        "does not write text",
        "that writes text and audio",
    ),
    (
        ("temperature", "top_k", "top_p", "repetition_penalty"),
        "sampling",
        "does not sample",
        "that samples",
    ),
)

T = TypeVar("T")


class SpeechTask(msgspec.Struct, frozen=True):
    """The task that a model gets for one dialogue; voice and language are spelled as in its capabilities."""

    #: The text to speak, stripped. Empty only for a `multi_turn` model and audio.
    text: str
    #: The instruction; None without one, or for a model that takes none.
    instruct: str | None = None
    voice: str | None = None
    language: str | None = None
    #: The voices to clone: paths or keys at ingest, recordings or their bytes in a request.
    reference_audio: tuple[str | bytes | Recording, ...] = ()
    reference_text: str | None = None

    @property
    def references(self) -> list[tuple[Recording, str]]:
        """Every voice to clone, and its text ("" without one). Raises `InputError` (`input.audio_missing`) if
        one is not loaded."""
        text = self.reference_text or ""
        texts = text.split("\n") if len(self.reference_audio) > 1 else [text]
        found = list[tuple[Recording, str]]()
        for audio, words in zip(self.reference_audio, texts):
            if isinstance(audio, str):
                raise InputError(
                    ErrorCode.INPUT_AUDIO_MISSING,
                    "The reference audio was not loaded.",
                    "Give it as bytes of the encoded file.",
                )
            found.append((Recording.of(audio), words.strip()))
        return found

    @property
    def recording(self) -> Recording:
        """The first of `references`, for a task that has one."""
        return self.references[0][0]


def speech_task(
    messages: Sequence[Message], generation: Generation, capabilities: Capabilities, seed: int = 0
) -> SpeechTask:
    """The task of one dialogue for a model with these capabilities; `seed`: the seed of a request.

    The text of the single user turn is spoken, and its audio messages are the voices to clone. System text is
    the instruction if the model takes one; `generation.instruct` takes precedence. Assistant messages are
    ground truth and are skipped. For a `multi_turn` model the text is all user texts, one per line, and user
    audio stays in the dialogue.

    Raises `InputError` with an `input.*` code for everything that the model cannot do. Nothing is ignored
    silently, except system text for a model that takes no instructions.
    """
    check_generation(generation, seed)
    text, audio, system = _contents(messages, capabilities)
    if len(text) > capabilities.max_text_characters:
        raise too_long(text, capabilities)
    voice = generation.voice
    language = generation.language
    instruct = generation.instruct
    if instruct is None and capabilities.instruct:
        instruct = system
    _check_abilities(audio, generation, capabilities)
    return SpeechTask(
        text,
        instruct or None,
        None if voice is None else _voice(voice, capabilities),
        None if language is None else _language(language, capabilities.languages),
        tuple(audio),
        generation.reference_text,
    )


def too_long(text: str, capabilities: Capabilities) -> InputError:
    """The error of a text that is too long for one request (`input.too_long`)."""
    return input_too_long(
        f"The text has {len(text)} characters; this model takes at most {capabilities.max_text_characters}.",
        "Split it into several lines.",
    )


def check_generation(generation: Generation, seed: int = 0) -> None:
    """Raises `InputError` (`input.bad_generation`) for a setting, or a seed of a request, that is outside its
    range in `_RANGES`. The error names the setting."""
    for name, value in (("seed", seed), *((name, getattr(generation, name)) for name in _RANGES)):
        minimum, maximum, allowed = _RANGES[name]
        if value is not None and not minimum <= value <= maximum:
            raise InputError(
                ErrorCode.INPUT_BAD_GENERATION,
                f"`{name}` is {value!r}; it must be {allowed}.",
                "Correct the `generation` object.",
            )


def not_unicode() -> InputError:
    """The error for a text that is not valid Unicode."""
    return InputError(
        ErrorCode.INPUT_UNPRONOUNCEABLE,
        "The text holds half of a surrogate pair, which is not a character.",
        "Correct its encoding.",
    )


def check_unicode(text: str) -> None:
    """Raises `InputError` (`input.unpronounceable`) for a text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise not_unicode() from error


def control_token(name: str) -> InputError:
    """The error of a text that contains a control token (`input.unpronounceable`)."""
    return InputError(
        ErrorCode.INPUT_UNPRONOUNCEABLE,
        f"The text holds the control token {name}, which cannot be spoken.",
        "Remove it from the text.",
    )


def room_after(positions: int, held: int, setting: str = "a larger max_context", beyond: int = 0) -> int:
    """The number of tokens that fit after a prompt. Raises `InputError` (`input.too_long`) if there is no room for
    speech and its end.

    `positions`: length of the prompt; `held`: maximum positions of a sequence in the engine; `setting`: the setting
    that gives the engine more positions; `beyond`: tokens that need no position.
    """
    room = held - positions + beyond
    if room < 2:
        raise input_too_long(
            f"The prompt has {positions} positions; the engine holds {held}.",
            f"Shorten the text or the reference, or open the model with {setting}.",
        )
    return room


def frames_within(seconds: float, frames_per_second: float, maximum: int) -> int:
    """The number of frames of `seconds` of speech, rounded up and limited to 1 to `maximum`."""
    return max(math.ceil(min(seconds * frames_per_second - _ROUNDING, maximum)), 1)


def bounded(setting: float) -> float:
    """Clamps a temperature, penalty or scale for an engine to 1e-4 to 1e4; 0 stays 0."""
    return setting and min(max(setting, _MIN_SETTING), _MAX_SETTING)


def or_default(*settings: T | None) -> T:
    """The first of these settings that is not None."""
    return next(setting for setting in settings if setting is not None)


def is_visible(text: str) -> bool:
    """Whether `text` has a visible character; white space, control, format and filler characters are
    invisible."""
    return _VISIBLE.search(text) is not None or any(
        character not in _INVISIBLE_SYMBOLS and unicodedata.category(character) not in _INVISIBLE_CATEGORIES
        for character in text
    )


def _contents(
    messages: Sequence[Message], able: Capabilities
) -> tuple[str, list[str | bytes | Recording], str | None]:
    """The user's texts, one per line, the voices to clone, and the system text. Raises `InputError` for a
    dialogue without a user text or audio, and for several user turns if the model takes one."""
    written = list[str]()
    audio = list[str | bytes | Recording]()
    system = list[str]()
    turn_over = several = False
    takes_audio = able.audio_in or not able.multi_turn
    for message in messages:
        if message.role == "assistant":
            turn_over = not able.multi_turn and bool(written or audio)
        elif turn_over and message.role == "user":
            several = True
        elif message.modality == "text":
            if not isinstance(message.content, str):
                raise InputError(
                    ErrorCode.INPUT_BAD_LINE,
                    f"A {message.role} text message holds bytes.",
                    "Give its content as text.",
                )
            (system if message.role == "system" else written).append(message.content.strip())
        elif message.modality == "audio" and message.role == "user" and takes_audio:
            audio.append(message.content)
        else:
            raise InputError(
                ErrorCode.INPUT_BAD_MODALITY,
                f"This model cannot use a {message.role} message of modality {message.modality!r}.",
                "Remove the message, or use a model that takes it.",
            )
    if several or (not able.multi_turn and len(written) > 1):
        raise InputError(
            ErrorCode.INPUT_MULTI_TURN,
            "The dialogue has more than one user turn or text.",
            "Give each its own line.",
        )
    text = "\n".join(written)
    if not is_visible(text) and not (able.multi_turn and audio):
        raise InputError(
            ErrorCode.INPUT_EMPTY_TEXT, "The dialogue has no user text.", "Give the line a user text message."
        )
    return text, [] if able.multi_turn else audio, "\n".join(filter(is_visible, system)) or None


def _check_abilities(audio: Sequence[object], generation: Generation, able: Capabilities) -> None:
    if generation.roles is not None:
        raise unsupported("`roles` has no meaning here.", "Give the settings for the whole line.")
    if len(audio) > able.references:
        limit = "one audio message" if able.references == 1 else f"{able.references} audio messages"
        raise unsupported(f"The user turn has more than {limit}.", "Keep only the reference voices.")
    if audio and not able.cloning:
        raise unsupported(
            "This model cannot clone a voice.",
            "Remove the audio message beside the text, or use a model that clones.",
        )
    if not audio and able.needs_reference:
        raise InputError(
            ErrorCode.INPUT_AUDIO_MISSING,
            "This model needs a voice to clone.",
            "Name a stored voice, or add a user audio message.",
        )
    for names, ability, lacks, others in _NEEDS:
        for name in names:
            if getattr(generation, name) is not None and not getattr(able, ability):
                raise unsupported(f"This model {lacks}.", f"Remove `{name}`, or use a model {others}.")
    if generation.mode is not None and generation.mode not in able.modes:
        raise unsupported(
            f"This model has no mode {generation.mode!r}.", "Remove `mode`, or use a model that has it."
        )
    text = generation.reference_text
    lines = [text or ""] if len(audio) < 2 else (text or "").split("\n")
    message = advice = ""
    if text is not None and not audio:
        message = "The line has `reference_text` but no reference audio."
        advice = "Add the user audio it belongs to."
    elif audio and len(lines) != len(audio):
        message = (
            f"The line has {len(audio)} reference recordings, and {len(lines)} lines of `reference_text`."
        )
        advice = "Give one line of `reference_text` for each recording, in their order."
    elif audio and able.needs_reference_text and not all(map(is_visible, lines)):
        message = "This model needs the words of a recording, and one has no `reference_text`."
        advice = "Write the words of the recording into `generation.reference_text`."
    if message:
        raise InputError(ErrorCode.INPUT_REFERENCE_TEXT, message, advice)


def own_voice(asked: str, voices: tuple[str, ...]) -> str | None:
    """The model's voice with this name, ignoring case and surrounding white space, or its voice for a name of
    `OPENAI_VOICES`; None if the model has no such voice."""
    if asked in voices:
        return asked
    folded = asked.strip().casefold()
    for voice in voices:
        if voice.casefold() == folded:
            return voice
    if voices and asked in OPENAI_VOICES:
        return voices[OPENAI_VOICES.index(asked) % len(voices)]
    return None


def _voice(asked: str, able: Capabilities) -> str | None:
    """The model's voice; None if the name is one of OpenAI's and the model has no named voices. Raises
    `InputError` (`input.unknown_voice`)."""
    voice = own_voice(asked, able.voices)
    if voice is None and (able.voices or able.multi_turn or asked not in OPENAI_VOICES):
        raise _unknown(ErrorCode.INPUT_UNKNOWN_VOICE, "voice", asked, able.voices)
    return voice


def _language(asked: str, languages: tuple[str, ...]) -> str:
    if (language := language_of(asked, languages)) is not None:
        return language
    raise _unknown(ErrorCode.INPUT_UNKNOWN_LANGUAGE, "language", asked, languages)


def _unknown(code: ErrorCode, kind: str, asked: str, known: tuple[str, ...]) -> InputError:
    none = f"This model has none to choose from: remove `{kind}`."
    return InputError(
        code, f"Unknown {kind} {asked[:80]!r}.", f"Choose one of: {', '.join(known)}." if known else none
    )

"""The rules that turn a dialogue into one task for a speech model. Imports no model library: ingest calls
it for every line."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pipelines.errors import ErrorCode, InputError
from pipelines.languages import language_of
from pipelines.request import Capabilities, Generation, Message

# Visible ASCII, or letters and digits of any script without the fillers that Unicode counts as letters but
# nobody sees.
_VISIBLE = re.compile("[!-~]|[^\\W_\u115f\u1160\u3164\uffa0]")
_INVISIBLE_SYMBOLS = frozenset("\u2800\u115f\u1160\u3164\uffa0")
_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zs", "Zl", "Zp", "Mn", "Me"})
#: What clients of OpenAI call voices; each stands for the same voice of a model at all times.
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
_INFINITY = float("inf")
_MAX_SEED = 2**63 - 1
#: Where float32 stays finite and an int32 can count. Settings beyond say the same, and would harm others of
#: the batch.
_MIN_SETTING, _MAX_SETTING = 1e-4, 1e4
_MAX_TOP_K = 2**31 - 1
#: Of a frame: seconds that are whole frames must not become one more.
_ROUNDING = 1e-6
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
#: Settings of models that write text and audio.
_TWO_FOLD = ("text_temperature", "audio_temperature", "audio_top_k", "max_tokens")

T = TypeVar("T")


class SpeechTask(msgspec.Struct, frozen=True):
    """What a model is asked to do with one dialogue, with voice and language in the spelling of its
    capabilities."""

    #: What is spoken, without white space around it. Empty only where a `multi_turn` model is spoken to.
    text: str
    #: How it is spoken; None where the line says nothing or the model takes no instructions.
    instruct: str | None = None
    voice: str | None = None
    language: str | None = None
    #: The voice to clone: a path or key at ingest, the bytes of the encoded file in a request.
    reference_audio: str | bytes | None = None
    reference_text: str | None = None
    #: Further voices, for models that take several.
    more_audio: tuple[str | bytes, ...] = ()

    @property
    def recording(self) -> bytes:
        """The encoded file of the voice to clone. Raises `InputError` (`input.audio_missing`) where it was
        not loaded."""
        return _loaded(self.reference_audio)

    @property
    def references(self) -> list[tuple[bytes, str]]:
        """The encoded file of every voice to clone, and its text ("" where there is none). Raises as
        `recording`."""
        if self.reference_audio is None:
            return []
        texts = (
            [self.reference_text or ""] if not self.more_audio else (self.reference_text or "").split("\n")
        )
        return [
            (_loaded(audio), text.strip())
            for audio, text in zip((self.reference_audio, *self.more_audio), texts, strict=True)
        ]


def speech_task(
    messages: Sequence[Message], generation: Generation, capabilities: Capabilities
) -> SpeechTask:
    """The task of one dialogue for a model with these capabilities.

    The text of the one user turn is spoken; user audio in that turn is the voice to clone, or the voices;
    system text is the instruction where the model takes one, unless `generation.instruct` says otherwise;
    assistant messages are ground truth and skipped. For a model with `multi_turn` the text is all user
    texts, one a line, and user audio stays in the dialogue.

    Raises `InputError` with an `input.*` code for everything that the model cannot do. Nothing asked for
    is dropped in silence, apart from system text for a model that takes no instructions.
    """
    check_generation(generation)
    if capabilities.multi_turn:
        text, system = _whole_dialogue(messages, capabilities.audio_in)
        audio = []
    else:
        text, audio, system = _one_turn(messages, capabilities.references)
    if len(text) > capabilities.max_text_characters:
        raise InputError(
            ErrorCode.INPUT_TOO_LONG,
            f"The text has {len(text)} characters; this model takes at most {capabilities.max_text_characters}.",
            "Split it into several lines.",
        )
    voice, language = generation.voice, generation.language
    instruct = generation.instruct
    if instruct is None and capabilities.instruct:
        instruct = system
    _check_abilities(audio, generation, capabilities)
    return SpeechTask(
        text,
        instruct or None,
        None if voice is None else _voice(voice, capabilities),
        None if language is None else _language(language, capabilities.languages),
        audio[0] if audio else None,
        generation.reference_text,
        tuple(audio[1:]),
    )


def check_generation(generation: Generation) -> None:
    """Raises `InputError` (`input.bad_generation`) that names the first setting outside its range.

    Ranges: 0 <= seed < 2**63, temperature >= 0, top_k >= 0, 0 < top_p <= 1, repetition_penalty > 0, cfg >=
    0, max_seconds > 0, text_temperature and audio_temperature >= 0, audio_top_k >= 0, max_tokens > 0.
    """
    if (seed := generation.seed) is not None and not 0 <= seed < 2**63:
        raise _bad_setting("seed", seed, "a whole number from 0 to 2**63 - 1")
    if (temperature := generation.temperature) is not None and not 0 <= temperature < _INFINITY:
        raise _bad_setting("temperature", temperature, "0 or more")
    for name in ("top_k", "text_temperature", "audio_temperature", "audio_top_k"):
        if (value := getattr(generation, name)) is not None and not 0 <= value < _INFINITY:
            raise _bad_setting(name, value, "0 or more")
    if (tokens := generation.max_tokens) is not None and tokens < 1:
        raise _bad_setting("max_tokens", tokens, "1 or more")
    if (top_p := generation.top_p) is not None and not 0 < top_p <= 1:
        raise _bad_setting("top_p", top_p, "above 0 and at most 1")
    if (penalty := generation.repetition_penalty) is not None and not 0 < penalty < _INFINITY:
        raise _bad_setting("repetition_penalty", penalty, "above 0")
    if (cfg := generation.cfg) is not None and not 0 <= cfg < _INFINITY:
        raise _bad_setting("cfg", cfg, "0 or more")
    if (seconds := generation.max_seconds) is not None and not 0 < seconds < _INFINITY:
        raise _bad_setting("max_seconds", seconds, "above 0")


def check_seed(seed: int) -> None:
    """Raises `InputError` (`input.bad_generation`) for the seed of a request that is outside 0 <= seed <
    2**63."""
    if not 0 <= seed <= _MAX_SEED:
        raise InputError(
            ErrorCode.INPUT_BAD_GENERATION, f"The seed is {seed}.", "Give a whole number from 0 to 2**63 - 1."
        )


def no_character() -> InputError:
    """The error for a text that is no Unicode."""
    message = "The text holds half of a surrogate pair, which is not a character."
    return InputError(ErrorCode.INPUT_UNPRONOUNCEABLE, message, "Correct its encoding.")


def check_room(positions: int, held: int, room: int, setting: str) -> None:
    """Raises `InputError` (`input.too_long`) for a prompt that leaves no room for speech and its end.

    `positions` are those of the prompt, `held` those of the engine, `room` the tokens that fit behind the
    prompt; `setting` is what gives the engine more.
    """
    if room < 2:
        raise InputError(
            ErrorCode.INPUT_TOO_LONG,
            f"The prompt has {positions} positions; the engine holds {held}.",
            f"Shorten the text or the reference, or open the model with {setting}.",
        )


def frames_within(seconds: float, frames_per_second: float, most: int) -> int:
    """Frames of speech of at most `seconds`, rounded up: 1 to `most`, however long it is."""
    return max(math.ceil(min(seconds * frames_per_second - _ROUNDING, most)), 1)


def bounded(setting: float) -> float:
    """A temperature, penalty or scale as an engine takes it: 0, or 1e-4 to 1e4, whatever a request says."""
    return setting and min(max(setting, _MIN_SETTING), _MAX_SETTING)


def bounded_top_k(top_k: int) -> int:
    """A top_k as an engine takes it: at most 2**31 - 1."""
    return min(top_k, _MAX_TOP_K)


def either(asked: T | None, default: T) -> T:
    """What a request asks for, or else the model's own."""
    return default if asked is None else asked


def is_visible(text: str) -> bool:
    """Whether any character of `text` leaves a mark on paper; white space, control, format and filler
    characters do not."""
    return _VISIBLE.search(text) is not None or any(
        character not in _INVISIBLE_SYMBOLS and unicodedata.category(character) not in _INVISIBLE_CATEGORIES
        for character in text
    )


def _loaded(audio: str | bytes | None) -> bytes:
    if isinstance(audio, bytes):
        return audio
    raise InputError(
        ErrorCode.INPUT_AUDIO_MISSING,
        "The reference audio was not loaded.",
        "Give it as bytes of the encoded file.",
    )


def _one_turn(messages: Sequence[Message], references: int) -> tuple[str, list[str | bytes], str | None]:
    """The user's text, reference audio (so many at most) and the system text of a dialogue with one user
    turn."""
    text: str | None = None
    audio: list[str | bytes] = []
    system: str | None = None
    turn_over = False
    for message in messages:
        role = message.role
        if role == "assistant":
            turn_over = turn_over or text is not None or bool(audio)
        elif role == "system":
            system = _system_text(system, message)
        elif turn_over:
            raise InputError(
                ErrorCode.INPUT_MULTI_TURN,
                "The dialogue has more than one user turn.",
                "Give each turn its own line.",
            )
        elif message.modality == "text":
            if text is not None:
                raise InputError(
                    ErrorCode.INPUT_MULTI_TURN,
                    "The dialogue has more than one user text.",
                    "Give each text its own line.",
                )
            text = _text(message)
        elif message.modality == "audio":
            if len(audio) == references:
                most = "one audio message" if references == 1 else f"{references} audio messages"
                raise _unsupported(
                    f"The user turn has more than {most}", "Keep those that are the reference voices."
                )
            audio.append(message.content)
        else:
            raise _bad_modality(message)
    if text is None or not is_visible(text):
        raise InputError(
            ErrorCode.INPUT_EMPTY_TEXT,
            "The dialogue has no user text to speak.",
            "Give the line a user text message.",
        )
    return text.strip(), audio, system


def _whole_dialogue(messages: Sequence[Message], audio_in: bool) -> tuple[str, str | None]:
    """All user texts, one a line, and the system text; raises when the user neither writes nor speaks."""
    texts: list[str] = []
    system: str | None = None
    heard = False
    for message in messages:
        if message.role == "system":
            system = _system_text(system, message)
        elif message.role == "user":
            if message.modality == "text":
                texts.append(_text(message).strip())
            elif message.modality == "audio" and audio_in:
                heard = True
            else:
                raise _bad_modality(message)
    text = "\n".join(texts)
    if not heard and not is_visible(text):
        raise InputError(
            ErrorCode.INPUT_EMPTY_TEXT,
            "The dialogue has no user message to answer.",
            "Give the line a user message.",
        )
    return text, system


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    raise InputError(
        ErrorCode.INPUT_BAD_LINE, f"A {message.role} text message holds bytes.", "Give its content as text."
    )


def _system_text(earlier: str | None, message: Message) -> str | None:
    if message.modality != "text":
        raise _bad_modality(message)
    text = _text(message)
    if not is_visible(text):
        return earlier
    return text.strip() if earlier is None else f"{earlier}\n{text.strip()}"


def _check_abilities(
    audio: Sequence[str | bytes], generation: Generation, capabilities: Capabilities
) -> None:
    if generation.roles is not None:
        raise _unsupported("`roles` has no meaning here", "Say the settings for the whole line.")
    if audio and not capabilities.cloning:
        raise _unsupported(
            "This model cannot clone a voice",
            "Remove the audio message beside the text, or use a model that clones.",
        )
    if not audio and capabilities.needs_reference:
        advice = "Name a stored voice, or add a user audio message."
        raise InputError(ErrorCode.INPUT_AUDIO_MISSING, "This model needs a voice to clone.", advice)
    if generation.reference_text is not None:
        if not capabilities.cloning:
            raise _unsupported(
                "This model cannot clone a voice", "Remove `reference_text`, or use a model that clones."
            )
        if not audio:
            raise InputError(
                ErrorCode.INPUT_REFERENCE_TEXT,
                "The line has `reference_text` but no reference audio.",
                "Add the user audio it belongs to.",
            )
    _check_reference_text(len(audio), generation.reference_text, capabilities)
    if generation.instruct is not None and not capabilities.instruct:
        raise _unsupported(
            "This model takes no instructions", "Remove `instruct`, or use a model that follows instructions."
        )
    if generation.cfg is not None and not capabilities.guidance:
        raise _unsupported("This model has no guidance", "Remove `cfg`, or use a model with guidance.")
    if generation.mode is not None and generation.mode not in capabilities.modes:
        raise _unsupported(
            f"This model has no mode {generation.mode!r}", "Remove `mode`, or use a model that has it."
        )
    if not capabilities.text_out:
        for name in _TWO_FOLD:
            if getattr(generation, name) is not None:
                raise _unsupported(
                    "This model does not write text",
                    f"Remove `{name}`, or use a model that writes text and audio.",
                )
    if not capabilities.sampling:
        for name in _SAMPLING:
            if getattr(generation, name) is not None:
                raise _unsupported(
                    "This model does not sample", f"Remove `{name}`, or use a model that samples."
                )


def _check_reference_text(recordings: int, text: str | None, capabilities: Capabilities) -> None:
    lines = (text or "").split("\n")
    if recordings > 1 and len(lines) != recordings:
        message = (
            f"The line has {recordings} reference recordings, and {len(lines)} lines of `reference_text`."
        )
        raise InputError(
            ErrorCode.INPUT_REFERENCE_TEXT,
            message,
            "Give one line of `reference_text` for each recording, in their order.",
        )
    if (
        recordings
        and capabilities.needs_reference_text
        and not all(map(is_visible, lines if recordings > 1 else [text or ""]))
    ):
        message = "This model clones a voice by its words too, and a recording has no `reference_text`."
        raise InputError(
            ErrorCode.INPUT_REFERENCE_TEXT,
            message,
            "Say in `generation.reference_text` what the recording says.",
        )


def own_voice(asked: str, voices: tuple[str, ...]) -> str | None:
    """The voice of a model that is asked for, up to case and white space around it, or by one of
    `OPENAI_VOICES`; None: the model has none of this name."""
    if (voice := _named(asked, voices)) is not None or not voices or asked not in OPENAI_VOICES:
        return voice
    return voices[OPENAI_VOICES.index(asked) % len(voices)]


def _voice(asked: str, capabilities: Capabilities) -> str | None:
    """None for the model's own: a name of OpenAI's where there are no voices to choose from."""
    voices = capabilities.voices
    if (voice := own_voice(asked, voices)) is not None:
        return voice
    if not voices and not capabilities.multi_turn and asked in OPENAI_VOICES:
        return None
    advice = (
        f"Choose one of: {', '.join(voices)}."
        if voices
        else "This model has no named voices: remove `voice`."
    )
    raise InputError(ErrorCode.INPUT_UNKNOWN_VOICE, f"Unknown voice {asked[:80]!r}.", advice)


def _language(asked: str, languages: tuple[str, ...]) -> str:
    if (language := language_of(asked, languages)) is not None:
        return language
    advice = (
        f"Choose one of: {', '.join(languages)}."
        if languages
        else "This model does not let one choose: remove `language`."
    )
    raise InputError(ErrorCode.INPUT_UNKNOWN_LANGUAGE, f"Unknown language {asked[:80]!r}.", advice)


def _named(asked: str, names: tuple[str, ...]) -> str | None:
    """The name of the tuple that equals `asked` up to case and white space around it."""
    if asked in names:
        return asked
    folded = asked.strip().casefold()
    return next((name for name in names if name.casefold() == folded), None)


def _unsupported(what: str, advice: str) -> InputError:
    return InputError(ErrorCode.INPUT_UNSUPPORTED, f"{what}.", advice)


def _bad_modality(message: Message) -> InputError:
    return InputError(
        ErrorCode.INPUT_BAD_MODALITY,
        f"This model cannot use a {message.role} message of modality {message.modality!r}.",
        "Remove the message, or use a model that takes it.",
    )


def _bad_setting(name: str, value: float, allowed: str) -> InputError:
    return InputError(
        ErrorCode.INPUT_BAD_GENERATION,
        f"`{name}` is {value!r}; it must be {allowed}.",
        "Correct the `generation` object.",
    )

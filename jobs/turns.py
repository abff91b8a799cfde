"""The spoken turns of a dialogue: the text messages that become items, and the messages that each needs.

A spoken turn is one text message, identified by its place among the messages. Messages are (role, modality,
content).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, cast

from pipelines.request import Message, Modality, Role
from pipelines.validation import is_visible

#: `auto`: the assistant's texts without audio; if there are none, the user's. `answer`: the model's answer to
#: the whole dialogue.
Speak = Literal["auto", "user", "assistant", "all", "answer"]

Triple = tuple[Role, Modality, str]
_NO_KEYS: Mapping[int, str] = {}


def spoken_turns(messages: Sequence[Triple], speak: Speak) -> tuple[int, ...]:
    """The places of the texts that are spoken, in order; texts without a visible character are skipped."""
    user, assistant = _places(messages, "user"), _places(messages, "assistant")
    if speak == "auto":
        silent = [place for place in assistant if not _recordings(messages, place)]
        return tuple(silent or user)
    return tuple(sorted(([] if speak == "assistant" else user) + ([] if speak == "user" else assistant)))


def plain_turn(messages: Sequence[Triple], speak: Speak, max_characters: int) -> int | None:
    """The only spoken turn of a dialogue that has only text, as most have, if that turn is visible and not too long.
    None: any other dialogue, for `turns_and_recordings`."""
    places: dict[str, list[int]] = {"user": [], "assistant": [], "system": []}
    for place, (role, modality, _) in enumerate(messages):
        if modality != "text":
            return None
        places[role].append(place)
    user, assistant = places["user"], places["assistant"]
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
        audio = [place for place, message in enumerate(messages) if message[1] == "audio"]
        return None, [place for place in audio if messages[place][0] != "assistant"]
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

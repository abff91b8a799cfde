"""Checks which lines of an input become items: those that can be decoded, that the model supports, and whose
reference audio can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import msgspec

from jobs.dialogue import Dialogue, Speak, parse_line, plain_turn, turn_messages, turns_and_recordings
from jobs.formatting import printable
from jobs.input_records import Records
from jobs.ledger.records import JobSpec, RejectedLine
from jobs.source import BATCH_BYTES, BATCH_LINES, LineBatch, batches_of, line_too_long, rejected_line
from jobs.spoken_text import SpokenText
from jobs.voices import JobVoices, in_stored_voice
from pipelines.errors import ErrorCode, InputError
from pipelines.request import Generation, Message, SpokenRole
from pipelines.text_units import MAX_LONG_CHARACTERS, parts_of
from pipelines.validation import SpeechTask, own_voice, speech_task, too_long

#: Maximum number of bad lines, and its increase for each good one: a small compressed file can contain
#: billions.
MAX_REFUSED_LINES, MAX_REFUSED_LINES_EACH = 1_000_000, 10
#: Errors of a line that the job's settings do not cause.
_LINE_FAULTS = {ErrorCode.INPUT_AUDIO_MISSING, ErrorCode.INPUT_REFERENCE_TEXT}

#: Errors of a line with an unknown voice.
_VOICE_FAULTS = {ErrorCode.INPUT_UNKNOWN_VOICE, ErrorCode.INPUT_AUDIO_MISSING}

#: Maps the audio content of a line to its key in the store; raises `InputError`.
ReferenceKey = Callable[[str], str]

_NO_GENERATION = Generation()
_ROLES: tuple[SpokenRole, ...] = ("user", "assistant")


class GoodLine(msgspec.Struct, frozen=True, gc=False):
    """A line that becomes an item, or one item per spoken turn."""

    line: int
    example_id: str
    #: The line's JSON without white space around it.
    raw: bytes
    estimated_ms: int
    #: Place among the messages -> key of its audio in the store.
    references: Mapping[int, str] = {}
    #: Places of the messages that are spoken; None: the item is the whole dialogue.
    turns: tuple[int, ...] | None = None
    #: Number of its items.
    items: int = 1
    #: Place of a spoken message -> its text as it is spoken, if it is written otherwise.
    spoken: Mapping[int, str] = {}


class LineChecker:
    """Checks lines against the model and the spec of one job."""

    def __init__(self, voices: JobVoices, spec: JobSpec, id_key: str = "example_id") -> None:
        """`voices`: the voices that lines may name, with the stored ones. `id_key`: the name of the example's id in
        the input. Raises `InputError` if the model does not support the defaults of the spec."""
        card, defaults = voices.card, spec.generation
        self._able = self._capabilities = card.capabilities
        # A text that is too long is spoken in parts, whose audio is joined.
        if not spec.output and not self._able.multi_turn:
            longest = max(self._able.max_text_characters, MAX_LONG_CHARACTERS)
            self._capabilities = replace(self._able, max_text_characters=longest)
        self._voices = voices
        self._check_text = card.check_text
        self._spoken_text = SpokenText(spec) if spec.respells else None
        self._defaults = defaults
        self._speak: Speak = spec.speak
        self.id_key = id_key
        self._ms_per_character = card.seconds_per_character * 1000
        by_role = [defaults.of(role) for role in _ROLES if spec.speak in (role, "auto", "all")]
        # All roles are checked, because each may have settings that no line can correct.
        passed = [self._passes(generation) for generation in by_role or [defaults]]
        self._plain_lines_pass = all(passed) and bool(by_role) and not spec.respells

    def _passes(self, generation: Generation) -> bool:
        """Whether a line of plain text passes with these settings. Raises `InputError` for settings that no
        line can correct."""
        try:
            self._task([Message("user", "text", "a")], generation, None)
        except InputError as error:
            if error.code not in _LINE_FAULTS:
                raise
            return False
        return True

    def checked(
        self, records: Records, reference_key: ReferenceKey, after_line: int = 0
    ) -> Iterator[tuple[int, list[GoodLine], list[RejectedLine]]]:
        """Checks the records after line `after_line` in batches; yields the number of a batch's last line and
        its good and rejected lines. Raises `input.wrong_format` if too few lines are good."""
        left = MAX_REFUSED_LINES
        for batch in batches_of(records.lines(), BATCH_LINES, BATCH_BYTES, after_line):
            good, rejected = self.check(batch, reference_key)
            left += len(good) * MAX_REFUSED_LINES_EACH - len(rejected)
            if left < 0:
                message = (
                    f"More than {MAX_REFUSED_LINES:,} lines of the input are refused, and too few are good."
                )
                advice = f"Check the file. Line {rejected[-1].line}: {rejected[-1].message}"
                raise InputError(ErrorCode.INPUT_WRONG_FORMAT, message, advice)
            yield batch.first + len(batch.lines) - 1, good, rejected

    def check(
        self, batch: LineBatch, reference_key: ReferenceKey
    ) -> tuple[list[GoodLine], list[RejectedLine]]:
        """Checks the lines of a batch, in order. Blank lines are left out; of lines with the same example_id
        only the first is good.

        `reference_key` maps the audio content of a line to a key of the store, or raises `InputError`.
        """
        good: list[GoodLine] = []
        rejected: list[RejectedLine] = []
        seen: set[str] = set()
        for line_no, line in enumerate(batch.lines, batch.first):
            if isinstance(line, RejectedLine):
                rejected.append(line)
                continue
            if line is not None and not (line := line.strip()):
                continue
            example_id = None
            try:
                if line is None:
                    raise line_too_long()
                dialogue, line = parse_line(line)
                example_id = dialogue.example_id
                if example_id in seen:
                    raise duplicate(example_id, self.id_key)
                plain = None
                if self._plain_lines_pass and dialogue.generation is None:
                    plain = plain_turn(dialogue.messages, self._speak, self._able.max_text_characters)
                if plain is None:
                    # This takes three times as long.
                    good.append(self._accept(line_no, line, dialogue, reference_key))
                else:
                    text = dialogue.messages[plain][2]
                    if self._check_text is not None:
                        self._check_text(text)
                    estimated_ms = int(len(text) * self._ms_per_character)
                    good.append(GoodLine(line_no, example_id, line, estimated_ms, turns=(plain,)))
                seen.add(example_id)
            except InputError as error:
                rejected.append(rejected_line(line_no, error, example_id))
        return good, rejected

    def _accept(self, number: int, raw: bytes, dialogue: Dialogue, reference_key: ReferenceKey) -> GoodLine:
        """The line of any dialogue that can be spoken. Raises `InputError`."""
        messages, generation = dialogue.messages, dialogue.generation or _NO_GENERATION
        turns, recordings = turns_and_recordings(messages, self._speak)
        spoken: dict[int, str] = {}
        if turns is None:
            whole = generation.over(self._defaults)
            characters = self._spoken(speech_task(dialogue.typed_messages(), whole, self._capabilities))
        elif turns:
            more = len(turns) > 1
            characters = sum(self._characters(dialogue, generation, turn, more, spoken) for turn in turns)
        else:
            others = [message[1] for message in messages if message[1] not in ("text", "audio")]
            other = f", but a message of modality {others[0]!r}" if others else ""
            what = f"{self._speak} text" if self._speak in _ROLES else "text to speak"
            advice = "Add such a text message to the line, or choose another role with --speak."
            raise InputError(ErrorCode.INPUT_EMPTY_TEXT, f"The dialogue has no {what}{other}.", advice)
        references = {place: reference_key(messages[place][2]) for place in recordings}
        items = 1 if turns is None else len(turns)
        estimated_ms = int(characters * self._ms_per_character)
        return GoodLine(number, dialogue.example_id, raw, estimated_ms, references, turns, items, spoken)

    def _characters(
        self,
        dialogue: Dialogue,
        generation: Generation,
        turn: int,
        numbered: bool,
        spoken: dict[int, str],
    ) -> int:
        """The number of characters of a turn; its text is added to `spoken` if it is written otherwise. Raises
        `InputError`, with the place of the turn if `numbered`."""
        role = cast("SpokenRole", dialogue.messages[turn][0])
        try:
            own = generation.of(role)
            settings, text = own.over(self._defaults.of(role)), dialogue.messages[turn][2].strip()
            if self._spoken_text and (said := self._spoken_text.of(text, settings.language)) != text:
                spoken[turn] = said
            messages = turn_messages(dialogue.messages, turn, spoken=spoken.get(turn))
            return self._spoken(self._task(messages, settings, own.voice))
        except InputError as error:
            advice = error.advice
            if error.code is ErrorCode.INPUT_AUDIO_MISSING and role == "assistant":
                advice = "Add a system audio message with the assistant's voice, or speak the user's text with --speak user."
            where = f"Message {turn}: " if numbered else ""
            raise InputError(error.code, f"{where}{error.message}", advice) from None

    def _spoken(self, task: SpeechTask) -> int:
        """The number of characters of a text that the model can speak. Raises `InputError`."""
        for text in [part.text for part in parts_of(task.text, self._able)] or [task.text]:
            if len(text) > self._able.max_text_characters:
                raise too_long(text, self._able)
            if self._check_text is not None:
                self._check_text(text)
        return len(task.text)

    def _task(self, messages: Sequence[Message], generation: Generation, own: str | None) -> SpeechTask:
        """The task of a turn; `own`: the voice of its line. Raises `InputError`."""
        messages, settings = in_stored_voice(messages, generation, own, self._voices.frozen)
        try:
            return speech_task(messages, settings, self._capabilities)
        except InputError as error:
            if (
                error.code in _VOICE_FAULTS
                and settings.voice is not None
                and own_voice(settings.voice, self._capabilities.voices) is None
            ):
                raise self._voices.refusal(settings.voice) from None
            raise


def duplicate(example_id: str, key: str) -> InputError:
    """The error of a line with the example_id of an earlier line; `key`: the name of the id in the input."""
    message = f"An earlier line has the {key} {printable(example_id, 100)!r}."
    return InputError(ErrorCode.INPUT_DUPLICATE_ID, message, "Give every line a unique id.")


def duplicate_lines(lines: Sequence[GoodLine], key: str) -> list[RejectedLine]:
    """The rejections of lines whose ids occur in earlier lines."""
    return [rejected_line(line.line, duplicate(line.example_id, key), line.example_id) for line in lines]


def aborted_by(line: RejectedLine, outcome: str) -> InputError:
    """The error of an input that is refused because of one bad line; `outcome`: what happened to the other
    lines."""
    return InputError(
        line.code, f"Line {line.line}: {line.message}", f"{outcome}; `--on-error skip` leaves such lines out."
    )

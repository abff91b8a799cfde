"""What makes a line an item: it decodes, the model can do what it asks for, and its reference audio can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from jobs.dialogue import Dialogue, clean, parse_dialogue
from jobs.ledger.records import RejectedLine
from jobs.openai_batch import LineForm
from jobs.source import MAX_LINE_BYTES, LineBatch
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import ModelCard
from pipelines.request import Generation, Message
from pipelines.task import is_visible, speech_task

#: Faults of a line that the job's own settings cannot be blamed for.
_LINE_FAULTS = {ErrorCode.INPUT_AUDIO_MISSING, ErrorCode.INPUT_REFERENCE_TEXT}


_NO_REFERENCES: Mapping[int, str] = {}


class GoodLine(msgspec.Struct, frozen=True, gc=False):
    """A line that becomes an item."""

    line: int
    example_id: str
    #: The line's JSON without white space around it.
    raw: bytes
    estimated_ms: int
    #: Store keys of its audio, by place among the messages.
    references: Mapping[int, str]


class LineChecker:
    """Checks lines against one model and the defaults of one job."""

    def __init__(self, card: ModelCard, defaults: Generation, reference_key: Callable[[str], str], form: LineForm | None = None) -> None:
        """`reference_key` turns the audio content of a line into a key of the store, or raises `InputError`. `form`: how the
        lines are written, where they are no dialogues.

        Raises `InputError` when the defaults ask for what the model cannot do.
        """
        self._capabilities = card.capabilities
        self._max_characters = card.capabilities.max_text_characters
        self._defaults = defaults
        self._reference_key = reference_key
        self._form = form
        #: What lines call the id of an example.
        self.id_key = "example_id" if form is None else form.id_key
        self._ms_per_character = card.seconds_per_character * 1000
        try:
            speech_task([Message("user", "text", "a")], defaults, card.capabilities)
            self._plain_lines_pass = True
        except InputError as error:
            if error.code not in _LINE_FAULTS:
                raise
            self._plain_lines_pass = False

    def check(self, batch: LineBatch) -> tuple[list[GoodLine], list[RejectedLine]]:
        """The lines of a batch in order; blank ones are left out, and of lines with one example_id the first is good."""
        good: list[GoodLine] = []
        rejected: list[RejectedLine] = []
        seen: set[str] = set()
        ms_per_character = self._ms_per_character
        for line_no, line in enumerate(batch.lines, batch.first):
            if line is not None and not (line := line.strip()):
                continue
            example_id, references = None, _NO_REFERENCES
            try:
                if line is None:
                    raise _overlong()
                if self._form is not None:
                    line = self._form.dialogue(line)
                dialogue = parse_dialogue(line)
                example_id = dialogue.example_id
                if example_id in seen:
                    raise duplicate(example_id, self.id_key)
                if (characters := self._plain_characters(dialogue)) is None:
                    characters, references = self._accept(dialogue)
            except InputError as error:
                if example_id is None and line is not None and self._form is not None:
                    example_id = self._form.example_id(line)
                rejected.append(RejectedLine(line_no, error.code, clean(str(error)), example_id))
                continue
            seen.add(example_id)
            good.append(GoodLine(line_no, example_id, line, int(characters * ms_per_character), references))
        return good, rejected

    def _accept(self, dialogue: Dialogue) -> tuple[int, Mapping[int, str]]:
        """Characters to speak, and keys of the references. Raises `InputError`."""
        messages = dialogue.typed_messages()
        generation = self._defaults if dialogue.generation is None else dialogue.generation.over(self._defaults)
        task = speech_task(messages, generation, self._capabilities)
        references = {
            place: self._reference_key(content)
            for place, (role, modality, content) in enumerate(dialogue.messages)
            if modality == "audio" and role != "assistant"
        }
        return len(task.text), references

    def _plain_characters(self, dialogue: Dialogue) -> int | None:
        """The verdict of `_accept` at a third of its time for what most lines are, one user text that passes; None: ask there."""
        if dialogue.generation is not None or not self._plain_lines_pass:
            return None
        text = None
        for role, modality, content in dialogue.messages:
            if role == "assistant":
                continue
            if modality != "text":
                return None
            if role == "user":
                if text is not None:
                    return None
                text = content
        if not text or len(text) > self._max_characters:
            return None
        return len(text) if "!" <= text[0] <= "~" or is_visible(text) else None


def duplicate(example_id: str, key: str = "example_id") -> InputError:
    """The error of a line whose example_id an earlier line has; `key` is what the line calls it."""
    return InputError(
        ErrorCode.INPUT_DUPLICATE_ID, f"An earlier line has the {key} {clean(example_id, 100)!r}.", "Give every line its own."
    )


def _overlong() -> InputError:
    return InputError(
        ErrorCode.INPUT_TOO_LONG, f"The line is longer than {MAX_LINE_BYTES >> 20} MiB.", "Split its text into several lines."
    )

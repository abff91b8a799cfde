"""The spec of a job: checked against its model, frozen at submit, and identified by its hash. Its checker says which
lines of an input become items: those that can be decoded, that the model supports, and whose reference audio can be
read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import msgspec
from msgspec.structs import replace

from jobs.checks import ALIGNER, OF_ENGINES, Quality
from jobs.columns import FIELDS
from jobs.dialogue import (
    CUSTOM_ID,
    NO_GENERATION,
    Dialogue,
    Speak,
    parse_line,
    plain_turn,
    turn_messages,
    turns_and_recordings,
)
from jobs.formatting import printable
from jobs.input_records import ALL, SPEAKERS, Records, speakers_sha256
from jobs.job_options import SubmitOptions
from jobs.ledger.records import JobSpec, RejectedLine
from jobs.packs import map_ahead
from jobs.settings import Settings
from jobs.source import (
    BATCH_BYTES,
    BATCH_LINES,
    TABLES,
    AskedFormat,
    InputFormat,
    LineBatch,
    Source,
    batches_of,
    format_of,
    line_too_long,
    rejected_line,
)
from jobs.spoken_text import SpokenText, with_spoken_text
from jobs.voices import JobVoices, PoolFolder, in_stored_voice, names_of, voice_folder
from pipelines.audio_format import check_rate
from pipelines.errors import ErrorCode, InputError, invalid
from pipelines.languages import language_of
from pipelines.registry import ModelCard, describe
from pipelines.request import Generation, Message, SpokenRole
from pipelines.stored_voices import VoiceFolder
from pipelines.text_units import MAX_LONG_CHARACTERS, parts_of
from pipelines.validation import OPENAI_VOICES, SpeechTask, own_voice, speech_task, too_long

#: Maximum number of bad lines, and its increase for each good one: a small compressed file can contain
#: billions.
MAX_REFUSED_LINES, MAX_REFUSED_LINES_EACH = 1_000_000, 10
#: Threads that read recordings; more were slower on 16 cores.
_READERS = 4
#: Errors of a line that the job's settings do not cause.
_LINE_FAULTS = {ErrorCode.INPUT_AUDIO_MISSING, ErrorCode.INPUT_REFERENCE_TEXT}

#: Errors of a line with an unknown voice.
_VOICE_FAULTS = {ErrorCode.INPUT_UNKNOWN_VOICE, ErrorCode.INPUT_AUDIO_MISSING}

#: Maps the audio content of a line to its key in the store; raises `InputError`.
ReferenceKey = Callable[[str], str]

_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class ResolvedSpec:
    """A frozen spec with its voices and the checker of its lines. Made by `resolve`, once for a submit or a
    dry run."""

    spec: JobSpec
    #: `auto` until `of_input` recognizes the format.
    input_format: AskedFormat
    voices: JobVoices

    @property
    def card(self) -> ModelCard:
        return self.voices.card

    @cached_property
    def checker(self) -> LineChecker:
        id_key = CUSTOM_ID if self.input_format == "openai-batch" else "example_id"
        return LineChecker(self.voices, self.spec, id_key)

    def of_input(self, source: Source) -> ResolvedSpec:
        """The spec of a job of this input. It has the recognized format, the hash of the input's list of
        speakers, and the stored voices that its lines name.

        Raises `input.wrong_format`, and `input.unreadable` for a list of speakers that cannot be read.
        """
        found = format_of(source, self.input_format)
        _check_format(found, self.spec)
        spec = self.spec
        chosen = self.spec.reading or ALL
        by_speaker = chosen.voices is not None or (spec.pool and spec.pool.by_speaker)
        if found == "kaldi" and by_speaker:
            chosen = replace(chosen, speakers_sha256=speakers_sha256(source))
            spec = replace(spec, reading=chosen)
        voices = self.voices.with_lines(Records(source, found, spec, self.card))
        return ResolvedSpec(voices.in_spec(spec), found, voices)

    def records(self, source: Source) -> Records:
        """The records of an input whose format was recognized."""
        return Records(source, cast("InputFormat", self.input_format), self.spec, self.card)


def resolve_for(settings: Settings, spec: JobSpec | ResolvedSpec, options: SubmitOptions) -> ResolvedSpec:
    """Resolves a spec with the stored voices, and the recordings of the options. Raises the errors of `resolve`."""
    return resolve(spec, options.input_format, voice_folder(settings, options.recordings))


def resolve(
    spec: JobSpec | ResolvedSpec, input_format: AskedFormat = "dialogues", stored: VoiceFolder | None = None
) -> ResolvedSpec:
    """Checks a spec against its model and the stored voices; a resolved spec is returned unchanged.

    Raises `ModelError`, `config.invalid`, and `InputError` for settings that the model refuses.
    """
    if isinstance(spec, ResolvedSpec):
        return spec
    card = describe(spec.model)
    generation = _frozen_generation(spec.generation, card)
    _check_pool(spec, card, stored)
    abilities = card.capabilities
    has_one = len(abilities.voices) == 1 and not abilities.cloning and not abilities.multi_turn
    only = abilities.voices[0] if has_one and generation.voice is None and not spec.pool else None
    spec = replace(spec, generation=replace(generation, voice=generation.voice or only))
    names = [*names_of(spec.generation), *((spec.reading or ALL).voices or {}).values()]
    names += spec.pool.weights if spec.pool else ()
    voices = JobVoices(card, stored).with_names(names)
    for name in names:
        voices.check(name)
    frozen = voices.in_spec(with_spoken_text(frozen_spec(spec, card), card))
    _check_format(input_format, frozen)
    resolved = ResolvedSpec(frozen, input_format, voices)
    # The checker refuses settings that no line can correct.
    _ = resolved.checker
    return resolved


def _check_pool(spec: JobSpec, card: ModelCard, stored: VoiceFolder | None) -> None:
    """Raises `config.invalid` for a pool beside other voices of the job, for a model that answers, and for
    names that share a voice of the model."""
    if not spec.pool:
        return
    if spec.pool.by_speaker and spec.pool.balance:
        raise invalid(
            "A voice for each speaker cannot be balanced.", "Leave --balance out, or draw by dialogue."
        )
    if card.capabilities.multi_turn:
        raise invalid(f"The model {card.name} answers dialogues in its own voice.", "Leave --voices out.")
    if names_of(spec.generation) or (spec.reading or ALL).voices:
        raise invalid("The job has a pool of voices and another voice.", "Leave one of them out.")
    recordings = stored.recordings if isinstance(stored, PoolFolder) else {}
    found: dict[str, str] = {}
    for name in spec.pool.weights:
        if (own := own_voice(name, card.capabilities.voices)) is None:
            continue
        if name in recordings:
            raise invalid(
                f"The recording {name!r} of the pool has the name of a voice of the model {card.name}.",
                "Rename the recording, or give the voice of the model by its name alone.",
            )
        if own in found:
            raise invalid(
                f"{found[own]!r} and {name!r} are the same voice of the model {card.name}.",
                "Leave one of them out of the pool.",
            )
        found[own] = name


def _check_format(format: AskedFormat, spec: JobSpec) -> None:
    """Raises `config.invalid` for options that do not apply to inputs of this format."""
    if format == "openai-batch" and spec.speak == "assistant":
        raise invalid(
            "An OpenAI batch has only user turns; there is no assistant turn to speak.",
            "Leave `speak` out: the `input` is spoken.",
        )
    chosen = spec.reading or ALL
    tables = ("auto", *TABLES)
    if chosen.columns and format not in tables:
        raise invalid(
            "This input is not a table, and has no columns.",
            "For rows of JSON give --input-format rows, else leave --column out.",
        )
    if (chosen.voices or (spec.pool and spec.pool.by_speaker)) and format not in (*tables, "kaldi"):
        raise invalid(
            "This input names no speakers.",
            f"Speakers are in a column or key `speaker`, or in `{SPEAKERS}` beside Kaldi's `text`. Leave --voice-for and --voices-by out.",
        )


def _frozen_generation(generation: Generation, card: ModelCard) -> Generation:
    """Replaces language codes and OpenAI's voice names in the settings by the model's names. Raises
    `input.unknown_language`."""
    capabilities = card.capabilities
    voice = generation.voice
    language = generation.language
    if voice in OPENAI_VOICES and not capabilities.multi_turn:
        voice = own_voice(voice, capabilities.voices)
    if (
        language is not None
        and capabilities.languages
        and language.casefold() not in {name.casefold() for name in capabilities.languages}
    ):
        if (found := language_of(language, capabilities.languages)) is None:
            raise InputError(
                ErrorCode.INPUT_UNKNOWN_LANGUAGE,
                f"The model {card.name} has no language {printable(language, 80)!r}.",
                f"It has: {', '.join(capabilities.languages)}.",
            )
        language = found
    roles = generation.roles and {
        role: _frozen_generation(own, card) for role, own in generation.roles.items()
    }
    return replace(generation, voice=voice, language=language, roles=roles)


def frozen_spec(spec: JobSpec, card: ModelCard) -> JobSpec:
    """Adds the model's full name to the spec, and, unless given, the model's revision, its pace, the language
    of the ASR meter and the roles to speak.

    Raises `config.invalid` for options that exclude each other or do not apply to this model.
    """
    check_rate(spec.format, spec.sample_rate or card.sample_rate)
    speak = spec.speak
    chosen = spec.reading or ALL
    quality = spec.quality
    if spec.output and not card.capabilities.codes:
        raise invalid(
            f"The model {card.name} has no codec, so it gives no codes.",
            "Leave --output out, or use another model (`nightjar models`).",
        )
    if quality and (own := quality.bounds.keys() & OF_ENGINES) and not card.capabilities.codes:
        raise invalid(
            f"The model {card.name} has no codec, so nothing measures `{min(own)}`.",
            "Remove the bound, or use another model (`nightjar models`).",
        )
    if card.capabilities.multi_turn:
        if speak not in ("auto", "answer"):
            raise invalid(
                f"The model {card.name} answers a whole dialogue; it does not speak its turns.",
                "Leave `speak` out, or use a model that speaks one text.",
            )
        speak = "answer"
    aligned = quality is not None and ALIGNER in quality.meters
    if spec.timestamps is True and card.capabilities.word_times != "exact" and not aligned:
        raise invalid(
            f"The model {card.name} does not know when it says each word.",
            "Give the folder of an aligner with --qa-set meters.align.model=FOLDER.",
        )
    if chosen.limit is not None and chosen.sample is not None:
        raise invalid("A limit and a sample are both given.", "Use one of them.")
    if chosen.keep is not None and chosen.drop is not None:
        raise invalid("Names to keep and names to drop are both given.", "Use one of them.")
    for field in chosen.columns or ():
        if field not in FIELDS:
            raise invalid(f"Rows have no field {field[:40]!r}.", f"The fields are: {', '.join(FIELDS)}.")
    if quality is not None:
        if not quality.paces and card.pace is not None:
            # Later calibrations must not change this job.
            quality = replace(quality, paces=(card.pace,))
        languages = card.capabilities.languages
        asr = quality.meters.get("asr")
        if asr is not None and len(languages) == 1:
            # Without a language the meter detects that of each line.
            asr = {**asr, "language": asr.get("language", languages[0])}
            quality = replace(quality, meters={**quality.meters, "asr": asr})
    return replace(
        spec,
        model=card.name,
        model_revision=spec.model_revision or card.revision,
        quality=quality,
        speak=speak,
        reading=msgspec.UNSET if chosen == ALL else chosen,
    )


def spec_sha(spec: JobSpec) -> str:
    """Hex SHA-256 of the spec as JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()


def item_seed(
    job_seed: int, example_id: str, message_index: int, draw: int = 0, line_seed: int | None = None
) -> int:
    """The seed of all noise of one message, 0 <= seed < 2**63.

    `line_seed` is the line's own `generation.seed`: it is the seed of draw 0, and replaces the job's seed for
    later draws. Other seeds are the first 63 bits of BLAKE2b over the fields, each preceded by its length, so
    that different fields do not collide.
    """
    if line_seed is not None and draw == 0:
        return line_seed
    digest = hashlib.blake2b(digest_size=8, person=b"nightjar.seed")
    for field in (
        str(job_seed if line_seed is None else line_seed),
        example_id,
        str(message_index),
        str(draw),
    ):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(digest.digest(), "big") >> 1


#: In place of the index of a message, in the hash that draws the sample of the checks.
_SAMPLE = -1


def is_sampled(quality: Quality, job_seed: int, example_id: str) -> bool:
    """Whether meters measure the items of a dialogue. A larger share also has the items of a smaller one."""
    share = quality.sample
    return share is msgspec.UNSET or item_seed(job_seed, example_id, _SAMPLE) < share * 2**63


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
        card = voices.card
        defaults = spec.generation
        self._able = self._capabilities = card.capabilities
        # A text that is too long is spoken in parts, whose audio is joined.
        self._makes_codes = bool(spec.output)
        if not spec.output and not self._able.multi_turn:
            self._capabilities = dataclasses.replace(
                self._able, max_text_characters=max(self._able.max_text_characters, MAX_LONG_CHARACTERS)
            )
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
                raise InputError(
                    ErrorCode.INPUT_WRONG_FORMAT,
                    f"More than {MAX_REFUSED_LINES:,} lines of the input are refused, and too few are good.",
                    f"Check the file. Line {rejected[-1].line}: {rejected[-1].message}",
                )
            yield batch.first + len(batch.lines) - 1, good, rejected

    def check(
        self, batch: LineBatch, reference_key: ReferenceKey
    ) -> tuple[list[GoodLine], list[RejectedLine]]:
        """Checks the lines of a batch, in order. Blank lines are left out; of lines with the same example_id
        only the first may be good.

        `reference_key` maps the audio content of a line to a key of the store, or raises `InputError`. It is called on
        several threads, for lines that nothing else refuses.
        """
        good: list[GoodLine] = []
        rejected: list[RejectedLine] = []
        seen = set[str]()
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
                    good.append(self._accept(line_no, line, dialogue))
                else:
                    text = dialogue.messages[plain][2]
                    if self._check_text is not None:
                        self._check_text(text)
                    estimated_ms = int(len(text) * self._ms_per_character)
                    good.append(GoodLine(line_no, example_id, line, estimated_ms, turns=(plain,)))
                seen.add(example_id)
            except InputError as error:
                rejected.append(rejected_line(line_no, error, example_id))

        def read(line: GoodLine) -> GoodLine | RejectedLine:
            try:
                return replace(
                    line, references={place: reference_key(name) for place, name in line.references.items()}
                )
            except InputError as error:
                return rejected_line(line.line, error, line.example_id)

        if any(line.references for line in good):
            with ThreadPoolExecutor(_READERS) as readers:
                made = [one for _, one in map_ahead(partial(readers.submit, read), good, 2 * _READERS)]
            good = [line for line in made if isinstance(line, GoodLine)]
            rejected += [line for line in made if isinstance(line, RejectedLine)]
            rejected.sort()
        return good, rejected

    def _accept(self, number: int, raw: bytes, dialogue: Dialogue) -> GoodLine:
        """The line of any dialogue that can be spoken; its references are names, not keys yet. Raises `InputError`."""
        messages = dialogue.messages
        generation = dialogue.generation or NO_GENERATION
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
            raise InputError(
                ErrorCode.INPUT_EMPTY_TEXT,
                f"The dialogue has no {what}{other}.",
                "Add such a text message to the line, or choose another role with --speak.",
            )
        references = {place: messages[place][2] for place in recordings}
        items = 1 if turns is None else len(turns)
        estimated_ms = int(characters * self._ms_per_character)
        return GoodLine(number, dialogue.example_id, raw, estimated_ms, references, turns, items, spoken)

    def _characters(
        self, dialogue: Dialogue, generation: Generation, turn: int, numbered: bool, spoken: dict[int, str]
    ) -> int:
        """The number of characters of a turn; its text is added to `spoken` if it is written otherwise. Raises
        `InputError`, with the place of the turn if `numbered`."""
        role = cast("SpokenRole", dialogue.messages[turn][0])
        try:
            own = generation.of(role)
            settings = own.over(self._defaults.of(role))
            text = dialogue.messages[turn][2].strip()
            if self._spoken_text and (said := self._spoken_text.of(text, settings.language)) != text:
                spoken[turn] = said
            messages = turn_messages(dialogue.messages, turn, spoken=spoken.get(turn))
            return self._spoken(self._task(messages, settings, own.voice))
        except InputError as error:
            advice = error.advice
            if error.code is ErrorCode.INPUT_AUDIO_MISSING and role == "assistant":
                advice = "Add a system audio message with the assistant's voice, or speak the user's text with --speak user."
            if error.code is ErrorCode.INPUT_TOO_LONG and self._makes_codes:
                advice = f"{advice} A job with --output codes or both does not split texts: their parts are joined as audio, which has no codes."
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
    return InputError(
        ErrorCode.INPUT_DUPLICATE_ID,
        f"An earlier line has the {key} {printable(example_id, 100)!r}.",
        "Give every line a unique id.",
    )


def duplicate_lines(lines: Sequence[GoodLine], key: str) -> list[RejectedLine]:
    """The rejections of lines whose ids occur in earlier lines."""
    return [rejected_line(line.line, duplicate(line.example_id, key), line.example_id) for line in lines]


def aborted_by(line: RejectedLine, outcome: str) -> InputError:
    """The error of an input that is refused because of one bad line; `outcome`: what happened to the other
    lines."""
    return InputError(
        line.code, f"Line {line.line}: {line.message}", f"{outcome}; `--on-error skip` leaves such lines out."
    )

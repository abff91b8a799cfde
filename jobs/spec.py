"""The spec of a job: checked against its model, frozen at submit, and identified by its hash."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import msgspec
from msgspec.structs import replace

from jobs.checks import ALIGNER
from jobs.columns import FIELDS
from jobs.dialogue import CUSTOM_ID
from jobs.formatting import printable
from jobs.input_records import ALL, SPEAKERS, Records, speakers_sha256
from jobs.ledger.records import JobSpec
from jobs.line_check import LineChecker
from jobs.source import TABLES, AskedFormat, InputFormat, Source, format_of
from jobs.spoken_text import with_spoken_text
from jobs.voices import JobVoices, PoolFolder, names_of
from pipelines.audio_format import check_rate
from pipelines.errors import ErrorCode, InputError, invalid
from pipelines.languages import language_of
from pipelines.registry import ModelCard, describe
from pipelines.request import Generation
from pipelines.stored_voices import VoiceFolder
from pipelines.validation import OPENAI_VOICES, own_voice


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
        spec, chosen = self.spec, self.spec.reading or ALL
        by_speaker = chosen.voices is not None or (spec.pool and spec.pool.by_speaker)
        if found == "kaldi" and by_speaker:
            chosen = replace(chosen, speakers_sha256=speakers_sha256(source))
            spec = replace(spec, reading=chosen)
        voices = self.voices.with_lines(Records(source, found, spec, self.card))
        return ResolvedSpec(voices.in_spec(spec), found, voices)

    def records(self, source: Source) -> Records:
        """The records of an input whose format was recognized."""
        return Records(source, cast("InputFormat", self.input_format), self.spec, self.card)


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
    only = _only_voice(card) if generation.voice is None and not spec.pool else None
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
        message = "A voice for each speaker cannot be balanced."
        raise invalid(message, "Leave --balance out, or draw by dialogue.")
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
            message = f"The recording {name!r} of the pool has the name of a voice of the model {card.name}."
            raise invalid(message, "Rename the recording, or give the voice of the model by its name alone.")
        if own in found:
            message = f"{found[own]!r} and {name!r} are the same voice of the model {card.name}."
            raise invalid(message, "Leave one of them out of the pool.")
        found[own] = name


def _check_format(format: AskedFormat, spec: JobSpec) -> None:
    """Raises `config.invalid` for options that do not apply to inputs of this format."""
    if format == "openai-batch" and spec.speak == "assistant":
        message = "An OpenAI batch has only user turns; there is no assistant turn to speak."
        raise invalid(message, "Leave `speak` out: the `input` is spoken.")
    chosen, tables = spec.reading or ALL, ("auto", *TABLES)
    if chosen.columns and format not in tables:
        raise invalid("This input is not a table, and has no columns.", "Leave --column out.")
    if (chosen.voices or (spec.pool and spec.pool.by_speaker)) and format not in (*tables, "kaldi"):
        advice = f"Speakers are in a column or key `speaker`, or in `{SPEAKERS}` beside Kaldi's `text`. Leave --voice-for and --voices-by out."
        raise invalid("This input names no speakers.", advice)


def _frozen_generation(generation: Generation, card: ModelCard) -> Generation:
    """Replaces language codes and OpenAI's voice names in the settings by the model's names. Raises
    `input.unknown_language`."""
    capabilities, voice, language = card.capabilities, generation.voice, generation.language
    if voice in OPENAI_VOICES and not capabilities.multi_turn:
        voice = own_voice(voice, capabilities.voices)
    if (
        language is not None
        and capabilities.languages
        and language.casefold() not in {name.casefold() for name in capabilities.languages}
    ):
        if (found := language_of(language, capabilities.languages)) is None:
            message = f"The model {card.name} has no language {printable(language, 80)!r}."
            raise InputError(
                ErrorCode.INPUT_UNKNOWN_LANGUAGE, message, f"It has: {', '.join(capabilities.languages)}."
            )
        language = found
    roles = generation.roles and {
        role: _frozen_generation(own, card) for role, own in generation.roles.items()
    }
    return replace(generation, voice=voice, language=language, roles=roles)


def _only_voice(card: ModelCard) -> str | None:
    """The only voice of a model; None: it has several, or none."""
    capabilities = card.capabilities
    has_one = len(capabilities.voices) == 1 and not capabilities.cloning and not capabilities.multi_turn
    return capabilities.voices[0] if has_one else None


def frozen_spec(spec: JobSpec, card: ModelCard) -> JobSpec:
    """Adds the model's full name to the spec, and, unless given, the model's revision, its pace, the language
    of the ASR meter and the roles to speak.

    Raises `config.invalid` for options that exclude each other or do not apply to this model.
    """
    check_rate(spec.format, spec.sample_rate or card.sample_rate)
    speak, chosen, quality = spec.speak, spec.reading or ALL, spec.quality
    if spec.output and not card.capabilities.codes:
        message = f"The model {card.name} has no codec, so it gives no codes."
        raise invalid(message, "Leave --output out, or use another model (`nightjar models`).")
    if card.capabilities.multi_turn:
        if speak not in ("auto", "answer"):
            message = f"The model {card.name} answers a whole dialogue; it does not speak its turns."
            raise invalid(message, "Leave `speak` out, or use a model that speaks one text.")
        speak = "answer"
    aligned = quality is not None and ALIGNER in quality.meters
    if spec.timestamps is True and card.capabilities.word_times != "exact" and not aligned:
        message = f"The model {card.name} does not know when it says each word."
        raise invalid(message, "Give the folder of an aligner with --qa-set meters.align.model=FOLDER.")
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
        languages, asr = card.capabilities.languages, quality.meters.get("asr")
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

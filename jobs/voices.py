"""The voices of a job: those of its model, and stored voices, whose recordings become part of the job at
submit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from jobs.dialogue import BAD_JSON, spoken_text
from jobs.formatting import printable
from jobs.layout import references_prefix
from jobs.ledger.records import FrozenVoice, Job, JobSpec
from jobs.references import ReferenceAudio, checked_audio, put_reference
from jobs.store.base import ObjectStore
from jobs.voice_pool import PoolFolder, PoolRecording
from pipelines.errors import ErrorCode, InputError, nearest, unsupported
from pipelines.pronunciation import WholeWords
from pipelines.registry import ModelCard
from pipelines.request import Generation, Message, SynthesisRequest
from pipelines.stored_voices import StoredVoice, VoiceFolder, in_voice_of
from pipelines.validation import OPENAI_VOICES, own_voice

if TYPE_CHECKING:
    from jobs.input_records import Records
    from jobs.settings import Settings
    from jobs.shard_file import ShardLine


@dataclass(frozen=True)
class JobVoices:
    """The voices of a job by name. A voice of the model takes precedence over a stored one."""

    card: ModelCard
    folder: VoiceFolder | None = None
    #: Stored voices that the job uses.
    frozen: Mapping[str, FrozenVoice] = field(default_factory=dict[str, FrozenVoice])
    #: Errors of stored voices that cannot be used.
    unusable: Mapping[str, InputError] = field(default_factory=dict[str, InputError])

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of the stored voices, without names that the model has."""
        return [] if self.folder is None else [name for name in self.folder.names() if not self._is_own(name)]

    @property
    def can_clone(self) -> bool:
        capabilities = self.card.capabilities
        return capabilities.cloning and not capabilities.multi_turn

    def with_names(self, wanted: Iterable[str | None]) -> JobVoices:
        """Adds the stored voices with these names; other names are ignored."""
        if self.folder is None or not self.can_clone:
            return self
        frozen, unusable = dict(self.frozen), dict(self.unusable)
        for name in sorted(
            {name for name in wanted if name and not self._is_own(name)} - frozen.keys() - unusable.keys()
        ):
            try:
                if (found := _recorded(self.folder, name, self.card)) is not None:
                    frozen[name] = found[0]
            except InputError as error:
                unusable[name] = error
        return replace(self, frozen=frozen, unusable=unusable)

    def with_lines(self, records: Records) -> JobVoices:
        """Adds the stored voices that the lines of an input name. Raises `InputError` for an input that
        cannot be read."""
        return (
            self.with_names(_named_in(records, frozenset(self.names)))
            if self.can_clone and self.names
            else self
        )

    def in_spec(self, spec: JobSpec) -> JobSpec:
        """The spec with these stored voices."""
        return msgspec.structs.replace(spec, stored_voices=dict(self.frozen) or msgspec.UNSET)

    def get(self, name: str) -> StoredVoice:
        """Reads a stored voice. Raises `InputError` if it does not exist or the model cannot clone it."""
        voice = self.folder.get(name) if self.folder is not None and self.can_clone else None
        if voice is None:
            raise self.refusal(name)
        return voice

    def check(self, name: str | None) -> None:
        """Raises `InputError` for an unknown voice, if model or folder have any voices, and for a stored
        voice that cannot be used."""
        if name is None or self._is_own(name) or name in self.frozen or name in OPENAI_VOICES:
            return
        if name in self.unusable or self.card.capabilities.voices or self.names:
            raise self.refusal(name)

    def refusal(self, name: str) -> InputError:
        """The error of a voice that cannot be used."""
        if (known := self.unusable.get(name)) is not None:
            return known
        stored = self.names
        if name in stored:
            message = (
                f"{printable(name, 80)!r} is a stored voice, which the model {self.card.name} cannot clone."
            )
            return unsupported(message, "Use a model that clones voices, or a voice of this model.")
        voices = self.card.capabilities.voices
        has = f"It has: {', '.join(voices)}. " if voices else ""
        if self.can_clone and self.folder is not None:
            has += f"{nearest(name, stored)}`nightjar voices list` shows the stored voices."
        message = f"The model {self.card.name} has no voice {printable(name, 80)!r}."
        advice = has or "It has no named voices: remove `voice`."
        return InputError(ErrorCode.INPUT_UNKNOWN_VOICE, message, advice)

    def put(self, store: ObjectStore, job_id: str) -> None:
        """Puts the recordings into the store of a job. Raises `InputError` if one has changed since it was
        frozen."""
        for name, voice in self.frozen.items():
            found = None if self.folder is None else _recorded(self.folder, name, self.card)
            if found is None or found[0] != voice:
                message = f"The stored voice {name!r} was changed while the input was read."
                raise InputError(ErrorCode.INPUT_AUDIO_MISSING, message, "Submit it again.")
            put_reference(store, job_id, found[1])

    def _is_own(self, name: str) -> bool:
        return own_voice(name, self.card.capabilities.voices) is not None


def voice_folder(settings: Settings, recordings: Mapping[str, PoolRecording] | None = None) -> VoiceFolder:
    """The folder of stored voices that the settings name, which the server and the command line use too.
    `recordings`: those of a pool, which take precedence."""
    folder = settings.serve.voices_folder or settings.home / "voices"
    return PoolFolder(folder, recordings=recordings) if recordings else VoiceFolder(folder)


def names_of(generation: Generation) -> list[str]:
    """The names of the voices in the settings, including the settings of roles."""
    every = (generation, *(generation.roles or {}).values())
    return [one.voice for one in every if one.voice is not None]


def in_stored_voice(
    messages: Sequence[Message],
    generation: Generation,
    own: str | None,
    voices: Mapping[str, FrozenVoice],
    prefix: str = "",
) -> tuple[Sequence[Message], Generation]:
    """The messages and the settings of a turn, with its stored voice, if it has one. `prefix`: precedes the
    name of the recording.

    A recording of the line takes precedence over the job's voice. `own`: the voice of the line itself. Raises
    `input.unsupported` if the line has a stored voice and a recording.
    """
    if generation.voice is None or (voice := voices.get(generation.voice)) is None:
        return messages, generation
    if not any(message.modality == "audio" for message in messages):
        return in_voice_of(messages, generation, prefix + voice.recording, voice.text)
    if own is not None:
        message = f"The line has a recording and the stored voice {generation.voice!r}."
        raise unsupported(message, "Leave one of them out.")
    return messages, msgspec.structs.replace(generation, voice=None)


def item_request(
    line: ShardLine,
    generation: Generation,
    job: Job,
    request_id: str,
    seed: int,
    load: Callable[[str], bytes],
    words: WholeWords | None = None,
) -> SynthesisRequest:
    """The request of an item, with its stored voice, if it has one; `load` reads the recordings of users and
    of that voice by their keys in the store. Audio of other roles is not used. `words`: those of the job's
    lexicon that have phonemes."""
    messages, voices = line.messages, job.spec.stored_voices
    if voices and line.role is not None:
        own, prefix = line.generation.voice, references_prefix(job.id)
        messages, generation = in_stored_voice(messages, generation, own, voices, prefix)
    loaded = [
        msgspec.structs.replace(message, content=load(message.content))
        if message.role == "user" and message.modality == "audio" and isinstance(message.content, str)
        else message
        for message in messages
    ]
    return SynthesisRequest(
        request_id,
        tuple(loaded),
        generation,
        seed,
        timestamps=job.spec.timestamps is True,
        output=job.spec.output or "audio",
        pronunciations={} if words is None else words.found(spoken_text(messages)),
    )


def stored_voice_of(line: ShardLine, spec: JobSpec) -> str | None:
    """The name of the stored voice that speaks an item; None: another voice."""
    if not spec.stored_voices or any(message.modality == "audio" for message in line.messages):
        return None
    name = line.generation_over(spec.generation).voice
    return name if name in spec.stored_voices else None


def recording_keys(spec: JobSpec, job_id: str) -> set[str]:
    """Keys of the recordings of a job's stored voices."""
    return {references_prefix(job_id) + voice.recording for voice in (spec.stored_voices or {}).values()}


def _recorded(folder: VoiceFolder, name: str, card: ModelCard) -> tuple[FrozenVoice, ReferenceAudio] | None:
    """A stored voice for a job, with its recording; None: it does not exist. Raises `InputError` if it cannot
    be used."""
    if (voice := folder.get(name)) is None:
        return None
    audio = checked_audio(voice.recording, f"The stored voice {name!r}", card.check_reference)
    return FrozenVoice(f"{audio.sha256}.{audio.ext}", voice.text), audio


class _Line(msgspec.Struct, frozen=True):
    """The part of a dialogue that names voices."""

    generation: Generation = Generation()


_decode = msgspec.json.Decoder(_Line).decode


def _named_in(records: Records, known: frozenset[str]) -> set[str]:
    """The known voices that the lines of an input name; unreadable lines name none."""
    found: set[str] = set()
    for line in records.lines():
        # The word may be written with escapes.
        if not isinstance(line, bytes) or (b'"voice"' not in line and b"\\u" not in line):
            continue
        with suppress(*BAD_JSON):
            found.update(known.intersection(names_of(_decode(line).generation)))
    return found

"""The voices of a job: those of its model, stored voices, whose recordings become part of the job at submit, and
pools, from which each dialogue's roles, or each speaker of a table, get a voice."""

from __future__ import annotations

import csv
import hashlib
import heapq
import math
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from jobs.columns import file_rows
from jobs.dialogue import (
    BAD_JSON,
    NO_GENERATION,
    Dialogue,
    Speak,
    VoiceOf,
    parse_line,
    reference_places,
    spoken_text,
    spoken_turns,
)
from jobs.formatting import printable
from jobs.layout import references_prefix
from jobs.ledger.records import FrozenVoice, Job, JobSpec, VoicePool
from jobs.references import ReferenceAudio, checked_audio, put_reference, read_audio_file
from jobs.source import Record
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, InputError, invalid, nearest, unsupported
from pipelines.pronunciation import WholeWords
from pipelines.registry import ModelCard
from pipelines.request import Generation, Message, SpokenRole, SynthesisRequest
from pipelines.stored_voices import MAX_TEXT_CHARACTERS, StoredVoice, VoiceFolder, in_voice_of
from pipelines.validation import OPENAI_VOICES, own_voice

if TYPE_CHECKING:
    from jobs.input_records import Records
    from jobs.settings import Settings
    from jobs.shard_file import ShardLine

#: Maximum voices of a pool, characters of a name, and bytes of a file that lists voices.
MAX_POOL_VOICES, MAX_NAME_CHARACTERS, MAX_LIST_BYTES = 10_000, 200, 16 << 20
_SUFFIXES = {".wav", ".flac", ".ogg", ".mp3"}
#: The audio file of a voice, and its text, empty if unknown.
PoolRecording = tuple[Path, str]
_NOTHING = msgspec.Raw(b"null")
#: Decodes an object, but not the parts in it; None for `null`.
_decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode


@dataclass(frozen=True)
class PoolFolder(VoiceFolder):
    """Stored voices together with the recordings of a pool, which take precedence."""

    recordings: Mapping[str, PoolRecording] = field(default_factory=dict)

    def names(self) -> list[str]:
        return sorted({*self.recordings, *super().names()})

    def get(self, name: str) -> StoredVoice | None:
        if (found := self.recordings.get(name)) is None:
            return super().get(name)
        path, text = found
        return StoredVoice(name, read_audio_file(path).data, text)


@dataclass(frozen=True)
class JobVoices:
    """The voices of a job by name. A voice of the model takes precedence over a stored one."""

    card: ModelCard
    folder: VoiceFolder | None = None
    #: Stored voices that the job uses.
    frozen: Mapping[str, FrozenVoice] = field(default_factory=dict)
    #: Errors of stored voices that cannot be used.
    unusable: Mapping[str, InputError] = field(default_factory=dict)

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
        frozen = dict(self.frozen)
        unusable = dict(self.unusable)
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
        found = set[str]()
        known = frozenset(self.names if self.can_clone else ())
        for line in records.lines() if known else ():
            # The word may be written with escapes.
            if isinstance(line, bytes) and (b'"voice"' in line or b"\\u" in line):
                # An unreadable line names none.
                with suppress(*BAD_JSON):
                    found.update(known.intersection(names_of(_decode(line).generation)))
        return self.with_names(found)

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
            return unsupported(
                f"{printable(name, 80)!r} is a stored voice, which the model {self.card.name} cannot clone.",
                "Use a model that clones voices, or a voice of this model.",
            )
        voices = self.card.capabilities.voices
        has = f"It has: {', '.join(voices)}. " if voices else ""
        if self.can_clone and self.folder is not None:
            has += f"{nearest(name, stored)}`nightjar voices list` shows the stored voices."
        advice = has or "It has no named voices: remove `voice`."
        return InputError(
            ErrorCode.INPUT_UNKNOWN_VOICE,
            f"The model {self.card.name} has no voice {printable(name, 80)!r}.",
            advice,
        )

    def put(self, store: ObjectStore, job_id: str) -> None:
        """Puts the recordings into the store of a job. Raises `InputError` if one has changed since it was
        frozen."""
        for name, voice in self.frozen.items():
            found = None if self.folder is None else _recorded(self.folder, name, self.card)
            if found is None or found[0] != voice:
                raise InputError(
                    ErrorCode.INPUT_AUDIO_MISSING,
                    f"The stored voice {name!r} was changed while the input was read.",
                    "Submit it again.",
                )
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
        raise unsupported(
            f"The line has a recording and the stored voice {generation.voice!r}.", "Leave one of them out."
        )
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
    messages = line.messages
    voices = job.spec.stored_voices
    if voices and line.role is not None:
        own = line.generation.voice
        messages, generation = in_stored_voice(messages, generation, own, voices, references_prefix(job.id))
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

    generation: Generation = NO_GENERATION


_decode = msgspec.json.Decoder(_Line).decode


def read_pool(
    which: str | Path, *, balance: bool = False, by_speaker: bool = False
) -> tuple[VoicePool, dict[str, PoolRecording]]:
    """Reads `--voices`: a folder of recordings, a table of voices, or names such as `anna=2,ben`.

    Returns the pool, and its recordings by name. A recording's text is in the file
    of the same name with the ending `.txt`. A table (CSV, or TSV by its name) has a column `voice` or
    `recording`, and may have `text` and `weight`; paths start in its folder. Raises `config.invalid`.
    """
    path = Path(which)
    weights: dict[str, float] = {}
    recordings: dict[str, PoolRecording] = {}
    try:
        if os.path.isdir(which):
            rows = _of_folder(path)
        elif os.path.isfile(which):
            rows = _of_table(path)
        elif path.suffix in (".csv", ".tsv") or os.sep in str(which):
            raise _UnusableError("there is no such folder or file")
        else:
            rows = (
                ("", name.strip(), weight.strip() or "1", None, "")
                for name, _, weight in (one.partition("=") for one in str(which).split(","))
            )
        for where, name, weight, audio, text in rows:
            if name != name.strip() or printable(name, MAX_NAME_CHARACTERS) != name or not name:
                reason = f"'{printable(name, 80)}' cannot be the name of a voice: it must have 1 to {MAX_NAME_CHARACTERS} visible characters, without a space at an end"
                raise _UnusableError(reason)
            if name in weights:
                raise _UnusableError(f"the voice {name!r} occurs twice")
            weights[name] = _weight(weight)
            said = " ".join(text.split())
            if len(said) > MAX_TEXT_CHARACTERS:
                reason = (
                    f"the text of {printable(where, 80)} has more than {MAX_TEXT_CHARACTERS:,} characters"
                )
                raise _UnusableError(reason)
            if audio is not None:
                recordings[name] = audio, said
            if len(weights) > MAX_POOL_VOICES:
                raise _UnusableError(f"it has more than {MAX_POOL_VOICES:,} voices")
        if not weights:
            raise _UnusableError("it has no voice")
        if sum(weights.values()) == math.inf:
            raise _UnusableError("the sum of its weights is too large")
    except (_UnusableError, OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        why = reason if isinstance(error, _UnusableError) else f"it cannot be read ({reason})"
        raise invalid(
            f"The voices '{printable(str(which), 80)}' cannot be used: {why}.",
            "Give a folder of recordings, a CSV or TSV file of voices, or names such as anna=2,ben.",
        ) from error
    return VoicePool(weights, balance=balance, by_speaker=by_speaker), recordings


class _UnusableError(Exception):
    """Why voices cannot be used."""


#: Where a voice is given, its name, weight, audio file and text.
_Row = tuple[str, str, str, "Path | None", str]


def _of_folder(folder: Path) -> Iterator[_Row]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        text = path.with_suffix(".txt")
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if path.suffix.lower() in _SUFFIXES and not is_hidden and path.is_file():
            yield text.name, inside.with_suffix("").as_posix(), "1", path, _read(text)


def _read(path: Path) -> str:
    """The beginning of a text; empty if there is none."""
    if not path.is_file():
        return ""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(8 * MAX_TEXT_CHARACTERS)
    except UnicodeDecodeError as error:
        raise _UnusableError(f"the text {printable(path.name, 80)} is not UTF-8") from error


def _of_table(table: Path) -> Iterator[_Row]:
    if table.stat().st_size > MAX_LIST_BYTES:
        raise _UnusableError(f"it is larger than {MAX_LIST_BYTES >> 20} MiB")
    rows = file_rows(table)
    _, header = next(rows, (0, []))
    names = [name.strip() for name in header]
    if not {"voice", "recording"} & {*names}:
        raise _UnusableError("it has neither a column `voice` nor a column `recording`")
    for number, cells in rows:
        if not any(cells):
            continue
        where = f"line {number}"
        if len(cells) != len(names):
            raise _UnusableError(f"{where} has {len(cells)} fields, but the header has {len(names)}")
        row = defaultdict(str, zip(names, cells))
        recording = row["recording"]
        name = row["voice"].strip() or os.path.splitext(recording)[0]
        yield where, name, row["weight"] or "1", table.parent / recording if recording else None, row["text"]


def _weight(weight: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _UnusableError(f"{weight[:40]!r} is no weight: it must be a number above 0")
    return value


def voice_of_speaker(spec: JobSpec) -> VoiceOf:
    """The voices that a job gives speakers."""
    if spec.pool and spec.pool.by_speaker:
        draws = VoiceDraws(spec.pool, spec.seed)
        return lambda speaker: draws.of("speaker", speaker) if speaker else None
    voices = spec.reading.voices if spec.reading else None
    return None if voices is None else lambda speaker: voices.get(speaker) or voices.get("*")


class VoiceDraws:
    """The draws of a pool in one pass over an input; each pass draws the same voices.

    Without `balance` a draw depends on the seed and the key alone. With `balance` each draw takes the voice
    with the fewest characters for its weight so far, so draws depend on the order of the input too.
    """

    def __init__(self, pool: VoicePool, seed: int) -> None:
        self._seed = seed
        self._weights = pool.weights
        self._names = sorted(pool.weights)
        #: Sum of the weights up to and including each voice.
        self._ends = dict(zip(self._names, accumulate(pool.weights[name] for name in self._names)))
        #: With `balance`: a heap of (characters / weight, order among equal quotients, name).
        self._loads = [(0.0, self._unit("order", name), name) for name in self._names if pool.balance]
        heapq.heapify(self._loads)

    def of(self, *key: str, characters: int = 0, other: str | None = None) -> str:
        """The voice of a key, for a text with this number of characters. If the pool has several voices, it is not
        `other`."""
        if other not in self._weights or len(self._names) == 1:
            other = None
        if self._loads:
            first = heapq.heappop(self._loads)
            load, order, name = first
            if name == other:
                load, order, name = heapq.heappop(self._loads)
                heapq.heappush(self._loads, first)
            heapq.heappush(self._loads, (load + characters / self._weights[name], order, name))
            return name
        point = self._unit(*key)
        if other is None:
            point *= self._ends[self._names[-1]]
        else:
            # The weights of all voices form a line. The point is on it, outside the part of `other`.
            point *= self._ends[self._names[-1]] - self._weights[other]
            if point >= self._ends[other] - self._weights[other]:
                point += self._weights[other]
        at = bisect_right(self._names, point, key=self._ends.__getitem__)
        # Rounding may lead just beyond the last voice.
        rest = [name for name in self._names[at : at + 2] if name != other]
        return rest[0] if rest else next(name for name in reversed(self._names) if name != other)

    def _unit(self, *key: str) -> float:
        """A number x, 0 <= x < 1, computed from the seed and from each part of the key with its length."""
        digest = hashlib.blake2b(str(self._seed).encode(), digest_size=8, person=b"nightjar.voice")
        for part in key:
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return (int.from_bytes(digest.digest(), "big") >> 11) / 2**53

    def in_record(self, record: Record, speak: Speak) -> Record:
        """The record with a voice for each role that is spoken and has neither a voice nor a recording. The
        roles of a dialogue get different voices."""
        if not isinstance(record, bytes):
            return record
        try:
            dialogue, line = parse_line(record.strip())
        except InputError:
            return record
        own = dialogue.generation or NO_GENERATION
        if own.voice is not None:
            return record
        characters = Counter[SpokenRole]()
        cloned = set[SpokenRole]()
        for turn in spoken_turns(dialogue.messages, speak):
            role = cast("SpokenRole", dialogue.messages[turn][0])
            characters[role] += len(dialogue.messages[turn][2])
            if reference_places(dialogue.messages, turn):
                cloned.add(role)
        voices = {role: one.voice for role, one in (own.roles or {}).items() if one.voice is not None}
        drawn: dict[SpokenRole, str] = {}
        # The longest text first, so that with `balance` it goes to the voice with the least text.
        for role in sorted(
            characters.keys() - voices.keys() - cloned, key=lambda one: (-characters[one], one)
        ):
            other = next(iter((voices | drawn).values()), None)
            drawn[role] = self.of(dialogue.example_id, role, characters=characters[role], other=other)
        return _with_voices(line, dialogue, drawn) if drawn else record


def _with_voices(line: bytes, dialogue: Dialogue, voices: Mapping[SpokenRole, str]) -> bytes:
    """A line with the voices of its roles; its other parts keep their bytes."""
    roles = {role: {"voice": voice} for role, voice in voices.items()}
    if dialogue.generation is None and b'"generation"' not in line and b"\\u" not in line:
        return b'%b,"generation":{"roles":%b}}' % (line.rstrip()[:-1], msgspec.json.encode(roles))
    whole = _decode_parts(line)
    generation = _decode_parts(whole.get("generation", _NOTHING)) or {}
    before = _decode_parts(generation.get("roles", _NOTHING)) or {}
    merged = {
        role: {**(_decode_parts(before.get(role, _NOTHING)) or {}), **voice} for role, voice in roles.items()
    }
    return msgspec.json.encode({**whole, "generation": {**generation, "roles": {**before, **merged}}})

"""Whole dialogues as sounds: the turns of a dialogue, one after the other or overlapping, in one audio file.

    lhotse      train/cuts.000000.jsonl.gz  train/recordings.000000.jsonl.gz  train/supervisions.000000.jsonl.gz  train/000000/000000000-a2.wav ...
    shar        train/cuts.000000.jsonl.gz  train/recording.000000.tar
    nemo        train/cuts.000000.jsonl.gz  train/recording.000000.tar  train/target_audio.000000.tar
    webdataset  train/shard-000000.tar: 000000000-a2.wav  000000000-a2.json  000000000-a2.txt ...
    rttm        train/000000/000000000-a2.wav  train/000000/000000000-a2.rttm ...

The pause before a turn is drawn from the job's seed, the example id and the turn, so it does not depend on the
order or the parts of an export. It begins at the end of all turns so far; a negative one is an overlap. A turn
begins neither before the turn before it nor before its own role's last turn has ended.

Sources: lhotse 1.33, `lhotse.cut.MultiCut` and `SupervisionSet.from_rttm`. NVIDIA NeMo,
`nemo.collections.speechlm2.data.DuplexS2SDataset`: `cut.recording` is the input and `cut.target_audio` the
output of the model, both as long as the cut; the speakers of supervisions are `user` and `agent`. NIST, "The
2009 Rich Transcription evaluation plan", appendix A (RTTM). Stivers et al., "Universals and cultural variation
in turn-taking in conversation" (2009): the mean pause is 0.2 s.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import msgspec

from jobs.export.audio import FULL_SCALE, Conversion
from jobs.export.files import PartFiles
from jobs.export.folder_formats import kaldi_ids, recording, supervision, tar_file
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, Part, facts, item_metadata
from jobs.export.manifest import manifest_line
from jobs.ledger.records import Job, JobSpec
from jobs.spec import item_seed
from pipelines.audio_format import AudioFormat
from pipelines.errors import invalid
from pipelines.request import SpokenRole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from jobs.encoded_audio import EncodedAudio

MODES = ("mono", "stereo")
#: The roles of the two channels.
ROLES: tuple[SpokenRole, ...] = get_args(SpokenRole)
DEFAULT_GAPS = "normal(0.2,0.3)"
#: Maximum of each number of a distribution, in seconds.
MAX_GAP_SECONDS = 60.0
#: The amplitude from which the sum of two turns is limited.
KNEE = 0.8
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Gaps(NamedTuple):
    """A distribution of pauses in seconds: `normal` with its mean and its standard deviation, or `uniform` with
    its bounds."""

    kind: str
    first: float
    second: float

    def drawn(self, seed: int, example_id: str, turn: int) -> float:
        """Draws the pause before the turn with this message index. `seed`: the job's."""
        # No speech has the draw -1, so that pauses do not depend on its noise.
        unit = ((item_seed(seed, example_id, turn, -1) >> 11) + 0.5) / 2**52
        if self.kind == "normal":
            return self.first + self.second * NormalDist().inv_cdf(unit)
        return self.first + (self.second - self.first) * unit


def parse_gaps(text: str) -> Gaps:
    """Parses a text such as `normal(0.2,0.3)`, `uniform(-0.5,1)` or `0.4`. Raises `config.invalid`."""
    found = re.fullmatch(r"(normal|uniform)\((.+),(.+)\)", text.strip())
    kind, *numbers = found.groups() if found else ("uniform", text, text)
    try:
        gaps = Gaps(kind, *map(float, numbers))
    except ValueError:
        gaps = Gaps(kind, math.nan, math.nan)
    least = 0.0 if kind == "normal" else gaps.first
    if not (abs(gaps.first) <= MAX_GAP_SECONDS and least <= gaps.second <= MAX_GAP_SECONDS):
        raise invalid(
            f"The gaps {text[:80]!r} are no distribution of seconds.",
            f"Write normal(MEAN,DEVIATION), uniform(LOW,HIGH) or a number, each up to {MAX_GAP_SECONDS:g}, such as {DEFAULT_GAPS}.",
        )
    return gaps


class Turn(NamedTuple):
    """A turn in the sound of its dialogue."""

    item: AudioItem
    role: SpokenRole
    #: 0 or 1; in a mono sound 0.
    channel: int
    #: Position of its first sample, at the sample rate of the stored audio.
    start: int

    @property
    def end(self) -> int:
        return self.start + self.item.artifact.samples

    @property
    def start_seconds(self) -> float:
        return self.start / self.item.artifact.sample_rate

    @property
    def place(self) -> dict[str, Any]:
        """Its times in seconds and its channel, for tables."""
        end = self.end / self.item.artifact.sample_rate
        return {"start": round(self.start_seconds, 6), "end": round(end, 6), "channel": self.channel}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A dialogue with its sound."""

    turns: list[Turn]
    #: float32 [samples, channels], at the sample rate of the stored audio.
    samples: NDArray[np.float32]
    conversion: Conversion

    @property
    def id(self) -> str:
        return self.turns[0].item.example_id

    @property
    def name(self) -> str:
        """The name of its files, that of its first turn: ASCII, no dot, unique in the job."""
        return self.turns[0].item.name

    @property
    def extension(self) -> AudioFormat:
        return self.conversion.format or cast("AudioFormat", self.turns[0].item.extension)

    @property
    def file(self) -> str:
        return f"{self.name}.{self.extension}"

    @property
    def channels(self) -> list[int]:
        return list(range(self.samples.shape[1]))

    def encoded(self, channels: slice = slice(None)) -> EncodedAudio:
        """Encodes its sound, or some of its channels."""
        from jobs.encoded_audio import encoded
        from pipelines.audio import resample

        stored = self.turns[0].item.artifact.sample_rate
        rate = self.conversion.sample_rate or stored
        return encoded(resample(self.samples[:, channels], stored, rate), rate, self.extension)


@dataclass(frozen=True, slots=True)
class Sounds:
    """How the sounds of an export are made from the turns of dialogues."""

    #: `mono` or `stereo`, with a channel for each role.
    mode: str
    gaps: Gaps
    #: Applied to the whole sound.
    conversion: Conversion

    def turns(self, job: Job, items: Iterable[AudioItem]) -> list[Turn]:
        """Places the turns of a dialogue."""
        turns: list[Turn] = []
        ends = dict.fromkeys(ROLES, 0)
        for item in items:
            role, start = item_metadata(job, item).role, 0
            if turns:
                gap = self.gaps.drawn(job.spec.seed, item.example_id, item.message_index or 0)
                after = max(ends.values()) + round(gap * item.artifact.sample_rate)
                start = max(after, ends[role], turns[-1].start)
            turns.append(Turn(item, role, ROLES.index(role) if self.mode == "stereo" else 0, start))
            ends[role] = turns[-1].end
        return turns

    def conversations(self, job: Job, items: Iterable[tuple[AudioItem, bytes]]) -> Iterator[Conversation]:
        """Yields the dialogues with their sounds, one in memory at a time. `items`: with their stored audio."""
        import numpy as np
        import soundfile

        for _, pairs in groupby(items, lambda pair: pair[0].example_id):
            audio = {item.artifact.index: (item, data) for item, data in pairs}
            turns = self.turns(job, (item for item, _ in audio.values()))
            samples = np.zeros((max(turn.end for turn in turns), len(ROLES)), np.float32)
            for turn in turns:
                pcm, _ = soundfile.read(io.BytesIO(audio.pop(turn.item.artifact.index)[1]), dtype="int16")
                pcm = pcm[: turn.item.artifact.samples] * np.float32(1 / FULL_SCALE)
                samples[turn.start : turn.start + len(pcm), ROLES.index(turn.role)] = pcm
            yield Conversation(turns, mixed(samples) if self.mode == "mono" else samples, self.conversion)

    def manifest_lines(self, job: Job, items: Iterable[AudioItem]) -> Iterator[bytes]:
        """Yields the lines of the manifest: those of the turns, with their places in the sounds. `dialogue`
        is the name of the sound."""
        for _, dialogue in groupby(items, lambda item: item.example_id):
            turns = self.turns(job, dialogue)
            for turn in turns:
                line = _decode(manifest_line(job, turn.item, ""))
                speaker = item_metadata(job, turn.item).speaker
                yield (
                    _encode(line | turn.place | {"speaker": speaker, "dialogue": turns[0].item.name}) + b"\n"
                )


def mixed(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Adds two channels [samples, 2] to one [samples, 1].

    A sum above `KNEE` and above the louder of the two samples is pressed into the room that is left below 1
    by tanh. The result is a continuous function of both samples, so it has no clicks, and equals one of them
    where the other is 0.
    """
    import numpy as np

    total = samples.sum(axis=1, keepdims=True)
    at = np.flatnonzero((np.abs(total[:, 0]) > KNEE) & samples.all(axis=1))
    loud = np.abs(total[at])
    knee = np.maximum(np.abs(samples[at]).max(axis=1, keepdims=True), np.float32(KNEE))
    room = np.maximum(1 - knee, np.float32(1e-6))
    limited = knee + room * np.tanh(np.maximum(loud - knee, 0) / room)
    total[at] = np.copysign(np.minimum(loud, limited), total[at])
    return total


def _cut(id: str, job: Job, made: Conversation, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a cut of a whole recording, with a supervision for each turn."""
    channels = recorded["channel_ids"]
    several = len(channels) > 1
    return {
        "id": id,
        "start": 0.0,
        "duration": recorded["duration"],
        "channel": channels if several else 0,
        "supervisions": [
            supervision(turn.item.id, id, job, turn.item, turn.start_seconds, turn.channel if several else 0)
            for turn in made.turns
        ],
        "recording": recorded,
        "type": "MultiCut" if several else "MonoCut",
    }


def write_lhotse(part: Part, files: PartFiles, job: Job, dialogues: Iterator[Conversation]) -> None:
    """Writes manifests, and the audio files to a folder of the part."""
    number = f"{part.number:06d}"
    folder = f"{part.split}/{number}"
    beside = files.sibling_name(folder)
    kind = "url" if "://" in beside else "file"
    with (
        files.gzip(f"{part.split}/recordings.{number}.jsonl.gz") as recordings,
        files.gzip(f"{part.split}/supervisions.{number}.jsonl.gz") as supervisions,
        files.gzip(f"{part.split}/cuts.{number}.jsonl.gz") as cuts,
    ):
        for made in dialogues:
            audio = made.encoded()
            files.add(f"{folder}/{made.file}", audio.data)
            source = {"type": kind, "channels": made.channels, "source": f"{beside}/{made.file}"}
            cut = _cut(made.id, job, made, recording(made.id, source, audio.sample_rate, audio.samples))
            recordings.write(_encode(cut["recording"]) + b"\n")
            supervisions.writelines(_encode(turn) + b"\n" for turn in cut["supervisions"])
            cuts.write(_encode(cut) + b"\n")


def write_shar(
    fields: Mapping[str, slice], part: Part, files: PartFiles, job: Job, dialogues: Iterator[Conversation]
) -> None:
    """Writes one shard of an archive. `fields`: name of a field -> the channels of its recording. With a
    second field the speakers are `user` and `agent`, as NeMo expects."""
    number = f"{part.number:06d}"
    with ExitStack() as ended:
        cuts = ended.enter_context(files.gzip(f"{part.split}/cuts.{number}.jsonl.gz"))
        tars = {
            field: ended.enter_context(tar_file(files.open(f"{part.split}/{field}.{number}.tar")))
            for field in fields
        }
        for made in dialogues:
            recorded: dict[str, dict[str, Any]] = {}
            for field, channels in fields.items():
                audio = made.encoded(channels)
                source = {
                    "type": "shar",
                    "channels": made.channels[: len(made.channels[channels])],
                    "source": "",
                }
                recorded[field] = recording(made.name, source, audio.sample_rate, audio.samples)
                tars[field](made.file, audio.data)
                tars[field](f"{made.name}.json", _encode(recorded[field]) + b"\n")
            cut = _cut(made.name, job, made, recorded.pop("recording"))
            if recorded:
                for turn, spoken in zip(made.turns, cut["supervisions"], strict=True):
                    spoken["speaker"] = "user" if turn.role == "user" else "agent"
                cut["custom"] = recorded
            cuts.write(_encode(cut) + b"\n")


def write_webdataset(part: Part, files: PartFiles, job: Job, dialogues: Iterator[Conversation]) -> None:
    """Writes one tar file."""
    with tar_file(files.open(f"{part.split}/shard-{part.number:06d}.tar")) as add:
        for made in dialogues:
            audio = made.encoded()
            turns = [turn.place | facts(job, turn.item) for turn in made.turns]
            about = {
                "example_id": made.id,
                "sample_rate": audio.sample_rate,
                "samples": audio.samples,
                "duration": round(audio.samples / audio.sample_rate, 6),
                "channels": ROLES if len(made.channels) > 1 else ["mix"],
                "turns": turns,
            }
            add(made.file, audio.data)
            add(f"{made.name}.json", _encode(about))
            add(f"{made.name}.txt", "\n".join(turn["text"] for turn in turns).encode())


def write_rttm(part: Part, files: PartFiles, job: Job, dialogues: Iterator[Conversation]) -> None:
    """Writes for each dialogue its audio and its turns; channels are counted from 1."""
    for made in dialogues:
        folder = f"{part.split}/{part.number:06d}"
        lines = [
            f"SPEAKER {made.name} {turn.channel + 1} {turn.start_seconds:.6f} {turn.item.seconds:.6f}"
            f" <NA> <NA> {kaldi_ids(item_metadata(job, turn.item).speaker, '')[0]} <NA> <NA>\n"
            for turn in made.turns
        ]
        files.add(f"{folder}/{made.file}", made.encoded().data)
        files.add(f"{folder}/{made.name}.rttm", "".join(lines).encode())


_WRITERS: dict[str, Callable[[Part, PartFiles, Job, Iterator[Conversation]], None]] = {
    "lhotse": write_lhotse,
    "nemo": partial(write_shar, {"recording": slice(0, 1), "target_audio": slice(1, 2)}),
    "rttm": write_rttm,
    "shar": partial(write_shar, {"recording": slice(None)}),
    "webdataset": write_webdataset,
}


def of_dialogues(
    format: ExportFormat, mode: str | None, gaps: str | None, conversion: Conversion, spec: JobSpec
) -> ExportFormat:
    """The format for an export of dialogues as sounds, or with neither mode nor gaps the format itself. `spec`:
    the job's.

    Raises `config.invalid` for a format, a mode or gaps that cannot be used.
    """
    if mode is None and gaps is None and format.sounds is None:
        return format
    mode = mode or (format.sounds and format.sounds.mode)
    duplex = format.name == "nemo"
    refused = (
        (
            mode is None,
            "Gaps are pauses in the sounds of dialogues.",
            f"Add --dialogues {' or '.join(MODES)}.",
        ),
        (mode not in MODES, f"The sound {str(mode)[:40]!r} is unknown.", f"Use one of: {', '.join(MODES)}."),
        (
            format.name not in _WRITERS,
            f"The format {format.name} has no sounds of dialogues.",
            f"Use one of: {', '.join(_WRITERS)}.",
        ),
        (
            duplex and mode == "mono",
            "Dialogues in NeMo's layout have a source and a target.",
            "Use --dialogues stereo.",
        ),
        (
            mode == "stereo" and spec.speak != "all",
            "This job speaks only one role of its dialogues, so the channel of the other one would be silent.",
            "Submit it with --speak all, or use --dialogues mono.",
        ),
    )
    for wrong, message, advice in refused:
        if wrong:
            raise invalid(message, advice)
    return _with_sounds(format, Sounds(cast("str", mode), parse_gaps(gaps or DEFAULT_GAPS), conversion))


def _with_sounds(format: ExportFormat, sounds: Sounds) -> ExportFormat:
    def write(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
        _WRITERS[format.name](part, files, job, sounds.conversations(job, items))

    return replace(
        format, item_line=None, write_part=write, embeds_audio=True, whole_dialogues=True, sounds=sounds
    )


RTTM = _with_sounds(
    ExportFormat(name="rttm", summary="sounds of dialogues, with their turns in RTTM"),
    Sounds("mono", parse_gaps(DEFAULT_GAPS), Conversion()),
)

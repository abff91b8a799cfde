"""Whole dialogues as sounds: the turns of a dialogue, one after the other or overlapping, in one audio file.

    lhotse      train/cuts.jsonl.gz  train/recordings.jsonl.gz  train/supervisions.jsonl.gz  train/audio/000000000-a2.wav ...
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

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec

from jobs.export.audio import Conversion, decoded
from jobs.export.dataset import PartFiles
from jobs.export.files import json_line
from jobs.export.folder_formats import (
    SHAR_SOURCE,
    archive,
    cut_of,
    kaldi_ids,
    write_lhotse,
    write_shar,
    write_webdataset,
)
from jobs.export.formats import ExportFormat, ExportOptions
from jobs.export.items import AudioItem, Loaded, Located, Part, Place, item_metadata
from jobs.ledger.records import Job
from jobs.spec import item_seed
from pipelines.errors import invalid
from pipelines.request import SpokenRole

if TYPE_CHECKING:
    from pipelines.audio import Samples

MODES = ("mono", "stereo")
#: The roles of the two channels.
ROLES: tuple[SpokenRole, ...] = get_args(SpokenRole)
DEFAULT_GAPS = "normal(0.2,0.3)"
#: Maximum of each number of a distribution, in seconds.
MAX_GAP_SECONDS = 60
#: The amplitude from which the sum of two turns is limited.
KNEE = 0.8


class Gaps(NamedTuple):
    """A distribution of pauses in seconds: `normal` with its mean and its standard deviation, or `uniform` with
    its bounds."""

    kind: str
    first: float
    second: float

    def drawn(self, seed: int, example_id: str, turn: int) -> float:
        """Draws the pause before the turn with this message index. `seed`: the job's."""
        # No speech has the draw -1, so that pauses do not depend on its noise.
        random = Random(item_seed(seed, example_id, turn, -1))
        return (random.gauss if self.kind == "normal" else random.uniform)(self.first, self.second)


def parse_gaps(text: str) -> Gaps:
    """Parses a text such as `normal(0.2,0.3)`, `uniform(-0.5,1)` or `0.4`. Raises `config.invalid`."""
    found = re.fullmatch(r"(normal|uniform)\((.+),(.+)\)", text.strip())
    kind, *numbers = found.groups() if found else ("uniform", text, text)
    with suppress(ValueError):
        gaps = Gaps(kind, *map(float, numbers))
        least = 0 if kind == "normal" else gaps.first
        if abs(gaps.first) <= MAX_GAP_SECONDS and least <= gaps.second <= MAX_GAP_SECONDS:
            return gaps
    raise invalid(
        f"The gaps {text[:80]!r} are no distribution of seconds.",
        f"Write normal(MEAN,DEVIATION), uniform(LOW,HIGH) or a number, each up to {MAX_GAP_SECONDS}, such as {DEFAULT_GAPS}.",
    )


class Sounds(NamedTuple):
    """How the sounds of an export are made from the turns of dialogues."""

    #: `mono`, or `stereo` with a channel for each role.
    mode: str
    gaps: Gaps
    #: Of the whole sound.
    conversion: Conversion
    #: Whether each channel is a file of its own.
    apart: bool

    def placed(self, items: Iterable[AudioItem]) -> Iterator[AudioItem]:
        """Yields the turns with their places in the sounds, from whose start the times of words then count."""
        for _, dialogue in groupby(items, lambda item: item.example_id):
            ends = dict.fromkeys(ROLES, 0)
            first = 0
            name = ""
            for item in dialogue:
                rate = item.artifact.sample_rate
                role = item_metadata(item.job, item).role
                if name:
                    # A dataset of several jobs puts the job's id before that of the example.
                    gap = self.gaps.drawn(
                        item.job.spec.seed,
                        item.example_id.removeprefix(f"{item.job.id}-"),
                        item.message_index or 0,
                    )
                    first = max(first, ends[role], max(ends.values()) + round(gap * rate))
                name = name or item.name
                ends[role] = first + item.artifact.samples
                channel = ROLES.index(role) if self.mode == "stereo" else 0
                place = Place(round(first / rate, 6), round(ends[role] / rate, 6), channel, name)
                words, phonemes = (
                    tuple([one.moved(place.start) for one in said]) for said in (item.words, item.phonemes)
                )
                yield msgspec.structs.replace(item, place=place, words=words, phonemes=phonemes)

    def dialogues(self, items: Iterable[tuple[AudioItem, Any]]) -> Iterator[tuple[AudioItem, Any]]:
        """Yields each dialogue as an item with its sound, or with the files of its channels; one is in memory at
        a time. `items`: with their stored audio."""
        import numpy as np

        for _, pairs in groupby(items, lambda pair: pair[0].example_id):
            found, files = zip(*pairs, strict=True)
            turns = tuple(self.placed(found))
            rate = found[0].artifact.sample_rate
            end = max(turn.place.end for turn in turns)
            samples = np.zeros((round(end * rate), len(ROLES)), np.float32)
            for turn, file in zip(turns, files, strict=True):
                pcm = decoded(file)[: turn.artifact.samples]
                first = round(turn.place.start * rate)
                samples[first : first + len(pcm), ROLES.index(item_metadata(turn.job, turn).role)] = pcm
            if self.mode == "mono":
                samples = mixed(samples)
            channels = 1 if self.apart else samples.shape[1]
            whole = msgspec.structs.replace(found[0], id=found[0].example_id, turns=turns, channels=channels)
            if self.apart:
                made = [self.conversion.encoded(whole, samples[:, channel]) for channel in range(len(ROLES))]
                yield made[0][0], [audio for _, audio in made]
            else:
                yield self.conversion.encoded(whole, samples)


def mixed(samples: Samples) -> Samples:
    """Adds two channels [samples, 2] to one [samples, 1].

    What a sum exceeds `KNEE` and the louder of its two samples by is pressed into the room below 1, by tanh.
    The result is a continuous function of both samples, so it has no clicks, and is one of them where the
    other is 0.
    """
    import numpy as np

    total = samples.sum(axis=1)
    at = np.flatnonzero(np.abs(total) > KNEE)
    knee = np.abs(samples[at]).max(axis=1).clip(KNEE)
    over = (np.abs(total[at]) - knee).clip(0)
    room = (1 - knee).clip(1e-6)
    total[at] -= np.copysign(over - room * np.tanh(over / room), total[at])
    return total[:, None]


def write_manifests(part: Part, files: PartFiles, job: Job, dialogues: Iterator[Loaded]) -> None:
    """Writes Lhotse's manifests, and the audio files to a folder beside them."""
    folder = f"{part.split}/audio"

    def located() -> Iterator[Located]:
        for item, audio in dialogues:
            name = f"{item.name}.{item.extension}"
            files.add(f"{folder}/{name}", audio)
            yield item, f"{files.sibling_name(folder)}/{name}"

    write_lhotse(part, files, job, located())


def write_duplex(
    part: Part, files: PartFiles, job: Job, dialogues: Iterator[tuple[AudioItem, list[bytes]]]
) -> None:
    """Writes one shard of Lhotse's archives, with a recording for each role."""
    with archive(part, files) as (add, cuts):
        for item, audio in dialogues:
            cut = cut_of(item.name, item, SHAR_SOURCE)
            for spoken in cut["supervisions"]:
                role = spoken["custom"]["role"]
                spoken["speaker"] = role if role == "user" else "agent"
            for field, data in zip(("recording", "target_audio"), audio, strict=True):
                add(field, f"{item.name}.{item.extension}", data, cut["recording"])
            cuts.write(json_line(cut | {"custom": {"target_audio": cut["recording"]}}))


def write_rttm(part: Part, files: PartFiles, job: Job, dialogues: Iterator[Loaded]) -> None:
    """Writes for each dialogue its audio and its turns. Channels are counted from 1."""
    for item, audio in dialogues:
        name = f"{part.split}/{part.number:06d}/{item.name}"
        lines = [
            f"SPEAKER {item.name} {turn.place.channel + 1} {turn.place.start:.6f} {turn.seconds:.6f}"
            f" <NA> <NA> {kaldi_ids(item_metadata(job, turn).speaker, '')[0]} <NA> <NA>\n"
            for turn in item.turns
        ]
        files.add(f"{name}.{item.extension}", audio)
        files.add(f"{name}.rttm", "".join(lines).encode())


_WRITERS = {
    "lhotse": write_manifests,
    "nemo": write_duplex,
    "rttm": write_rttm,
    "shar": write_shar,
    "webdataset": write_webdataset,
}


def of_dialogues(format: ExportFormat, options: ExportOptions, speak: str = "all") -> ExportFormat:
    """The format for an export of dialogues as sounds, or with neither mode nor gaps the format itself. `speak`:
    the job's.

    Raises `config.invalid` for a format, a mode or gaps that cannot be used.
    """
    mode = options.dialogues or ("mono" if format.sounds else None)
    if mode is None and options.gaps is None:
        return format
    duplex = format.name == "nemo"
    refused = (
        (
            mode not in MODES,
            "The channels of the sounds are not given.",
            f"Add --dialogues {' or '.join(MODES)}.",
        ),
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
            mode == "stereo" and speak != "all",
            "This job speaks only one role of its dialogues, so the channel of the other one would be silent.",
            "Submit it with --speak all, or use --dialogues mono.",
        ),
    )
    for wrong, message, advice in refused:
        if wrong:
            raise invalid(message, advice)
    made = Sounds(str(mode), parse_gaps(options.gaps or DEFAULT_GAPS), options.conversion, duplex)
    return replace(
        format,
        item_line=None,
        write_part=_WRITERS[format.name],
        embeds_audio=True,
        one_part=format.name == "lhotse",
        whole_dialogues=True,
        sounds=made,
        codes=False,
    )


RTTM = of_dialogues(
    ExportFormat(name="rttm", summary="sounds of dialogues, with their turns in RTTM"),
    ExportOptions(dialogues="mono"),
)

"""The interface of export formats, and their registry.

A format is one `ExportFormat` object, with one line in `BUILT_IN`. Another package adds a format through the
entry point group `nightjar.exports`:

    [project.entry-points."nightjar.exports"]
    my-format = "my_package.my_format:FORMAT"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from jobs.export.audio import Conversion
from jobs.formatting import is_address
from jobs.store import is_remote
from pipelines.audio_format import AUDIO_FORMATS
from pipelines.errors import ConfigError, ErrorCode, invalid, missing_library

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.export.conversation import Sounds
    from jobs.export.dataset import PartFiles
    from jobs.export.items import AudioItem, Located, Part, Plan, Splits
    from jobs.ledger.records import ItemRow, Job, JobSpec, RejectedLine
    from jobs.where import Where

ENTRY_POINT_GROUP = "nightjar.exports"
#: Maximum size of the audio in one file of a dataset: a compromise between few files and little repeated work
#: after a stop.
PART_BYTES = 500_000_000
#: Name of a format -> the object that declares it, written as the value of an entry point.
BUILT_IN = {
    "espnet": "jobs.export.line_formats:ESPNET",
    "jsonl": "jobs.export.code_formats:JSONL",
    "interleaved": "jobs.export.code_formats:INTERLEAVED",
    "manifest": "jobs.export.manifest:MANIFEST",
    "nemo": "jobs.export.line_formats:NEMO",
    "openai-batch": "jobs.export.line_formats:OPENAI_BATCH",
    "openai-batch-errors": "jobs.export.line_formats:OPENAI_BATCH_ERRORS",
    "espnet-dataset": "jobs.export.folder_formats:ESPNET_DATASET",
    "espnet-codes": "jobs.export.code_formats:ESPNET_CODES",
    "kaldi": "jobs.export.folder_formats:KALDI",
    "lhotse": "jobs.export.folder_formats:LHOTSE",
    "shar": "jobs.export.folder_formats:SHAR",
    "webdataset": "jobs.export.folder_formats:WEBDATASET",
    "rttm": "jobs.export.conversation:RTTM",
    "parquet": "jobs.export.table_formats:PARQUET",
    "audiofolder": "jobs.export.table_formats:AUDIOFOLDER",
    "ljspeech": "jobs.export.folder_formats:LJSPEECH",
    "ctm": "jobs.export.line_formats:CTM",
    "textgrid": "jobs.export.line_formats:TEXTGRID",
    "srt": "jobs.export.line_formats:SRT",
    "vtt": "jobs.export.line_formats:VTT",
}


class ExportOptions(NamedTuple):
    """The options of an export."""

    #: With splits, every format is a folder.
    splits: Splits | None = None
    #: Audio is named by the absolute local path `audio_root/<key>`, and copied there from the store if the file is
    #: missing. Audio in packs requires it.
    audio_root: Path | None = None
    #: Formats that contain the audio begin a new file before the stored size of its audio exceeds this.
    part_bytes: int = PART_BYTES
    #: Audio in a folder store is named by its absolute path.
    absolute: bool = False
    #: `wav`, `flac`, `mp3` or `opus`, and a rate in Hz, to which audio that the export contains or copies is converted.
    audio_format: str | None = None
    sample_rate: int | None = None
    #: Only items that match this are written; in a format of dialogues, dialogues of which one item matches.
    where: Where | None = None
    #: Of the items with the same text and voice (in a format of dialogues: of equal dialogues) the first one is written.
    unique: bool = False
    #: The license of the dataset in its card, such as `apache-2.0`.
    license: str | None = None
    #: `mono` or `stereo`: the export contains one sound for each dialogue, whose pauses are drawn from `gaps`. See
    #: `jobs.export.conversation`.
    dialogues: str | None = None
    gaps: str | None = None
    #: See `jobs.export.code_formats.interleaved`.
    interleave: str | None = None
    tokenizer: str | None = None

    @property
    def conversion(self) -> Conversion:
        return Conversion(self.audio_format, self.sample_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format. Exactly one of `item_line`, `dialogue_line`, `failure_line` and `write_part` is set.

    Formats of lines are one file; with splits they are a folder with one file per split (`train.jsonl`).
    Lines end with a newline.
    """

    name: str
    #: A few words for help texts.
    summary: str
    #: Makes the line of an item, from the path or address of its audio.
    item_line: Callable[[Job, AudioItem, str], bytes] | None = None
    #: Makes the line of a dialogue with all its items.
    dialogue_line: Callable[[Job, Sequence[Located]], bytes] | None = None
    #: With `dialogue_line`: makes the line of a dialogue whose answer is text without audio.
    text_line: Callable[[msgspec.Raw, str], bytes] | None = None
    #: Makes the line of a failed item or of a refused input line. Such a format is always one file.
    failure_line: Callable[[Job, ItemRow | RejectedLine], bytes] | None = None
    #: Writes the files of one part, from each item with the bytes of its audio if `embeds_audio`, else with
    #: the path or address of its audio.
    write_part: Callable[[Part, PartFiles, Job, Iterator[tuple[AudioItem, Any]]], None] | None = None
    #: The files contain the audio. A part then ends before its audio exceeds the maximum size of a part.
    embeds_audio: bool = False
    #: A split of any size is one part, because one of its files has a line for each item.
    one_part: bool = False
    #: Its lines contain the path or address of the audio. Ignored if the files contain the audio.
    names_audio: bool = True
    #: Audio formats that readers of the format can open.
    audio_formats: tuple[str, ...] = AUDIO_FORMATS
    #: Contains the codes of a job, beside or instead of its audio; needs them.
    codes: bool = False
    needs_codes: bool = False
    #: Identifies the options that made this format of another one.
    variant: str = ""
    #: Readers of the format open audio by local paths only.
    local_audio: bool = False
    #: The files refer to each other by local paths.
    local_folder: bool = False
    #: The job must have the times of words.
    needs_words: bool = False
    #: A dialogue is left out unless all its spoken turns have audio.
    whole_dialogues: bool = False
    #: Its audio are the sounds of whole dialogues.
    sounds: Sounds | None = None
    #: What must be equal in all jobs of a dataset, because readers of the format expect it.
    equal: tuple[Literal["audio format", "sample rate"], ...] = ()
    #: The pattern of the files of a split, by which the Hugging Face hub loads them.
    data_files: str | None = None
    #: Makes the README.md of the dataset instead of `jobs.export.card`.
    card: Callable[[Job, Plan], bytes] | None = None
    #: Its columns have types, so the columns of items have `metadata`.
    typed: bool = False
    #: A library of the extra `export` that writing needs.
    library: str | None = None

    def one_file(self, splits: Splits | str | None) -> bool:
        """Whether an export is one file rather than a folder, with these splits or None."""
        return self.failure_line is not None or (self.write_part is None and splits is None)

    def check(self, to: str, store_url: str, spec: JobSpec, options: ExportOptions) -> None:
        """Raises `config.invalid` for a destination, a store, audio or a filter that this format does not
        support, `config.missing_library` if a library for writing is not installed. `spec`: the job's."""
        if self.library is not None and find_spec(self.library) is None:
            raise missing_library(f"The format {self.name}", self.library, "export")
        made = options.audio_format or spec.format
        conversion = options.conversion
        audio_root = options.audio_root
        failures = self.failure_line is not None
        file = self.one_file(options.splits)
        only_codes = spec.output == "codes" and self.codes
        named = self.names_audio and not self.embeds_audio and not failures and not only_codes
        to_root = "Give a folder for the audio with --audio-root"
        refused = (
            (
                is_address(to) and not is_remote(to),
                f"Exports cannot be written to {to[:300]!r}.",
                "Give a local path, or s3://BUCKET/PREFIX.",
            ),
            (
                options.where is not None and failures,
                f"The format {self.name} lists failures, to which filters do not apply.",
                "Leave the filter out.",
            ),
            (
                spec.output == "codes" and not self.codes and not failures,
                f"The format {self.name} needs audio, and the job has codes alone.",
                "Make their audio with `nightjar decode`, or use a format that contains codes, such as webdataset, parquet or lhotse.",
            ),
            (
                self.needs_codes and not spec.output,
                f"The format {self.name} needs codes, and the job has audio alone.",
                "Make the job with `--output codes` or `--output both`.",
            ),
            (
                conversion and only_codes,
                "Codes have no audio format and no sample rate.",
                "Leave --audio-format and --sample-rate out; `nightjar decode` makes audio.",
            ),
            (
                options.unique and failures,
                f"The format {self.name} lists failures, which are no duplicates.",
                "Leave --unique out.",
            ),
            (
                options.license is not None and file,
                f"The format {self.name} is one file, without a card.",
                "Leave --license out, or use a format of a folder.",
            ),
            (
                spec.pack is True and audio_root is None and named,
                f"The format {self.name} names audio by its path, and audio in packs, as in this job, has no path.",
                f"{to_root}, or use a format that contains the audio, such as webdataset or parquet.",
            ),
            (
                conversion and not named and not self.embeds_audio,
                f"The format {self.name} contains no audio.",
                "Leave --audio-format and --sample-rate out.",
            ),
            (
                conversion and not self.embeds_audio and audio_root is None,
                f"The format {self.name} names the audio in the store, which cannot be converted.",
                "Give a folder for converted copies with --audio-root.",
            ),
            (
                self.needs_words and spec.timestamps is not True,
                f"The format {self.name} has the times of words, and this job has none.",
                "Run the job with --timestamps.",
            ),
            (
                made not in self.audio_formats and not only_codes,
                f"Readers of {self.name} open {' and '.join(self.audio_formats)}, and the audio would be {made}.",
                f"Add --audio-format {self.audio_formats[0]}{'' if self.embeds_audio else ' and --audio-root'}.",
            ),
            (
                file and (options.splits is not None or is_remote(to)),
                f"The format {self.name} is one file.",
                "Give a local file, and no splits.",
            ),
            (
                not file and to in ("", "-"),
                f"The format {self.name} is a folder.",
                "Give a folder with --to.",
            ),
            (
                self.local_folder and is_remote(to),
                f"The files of {self.name} refer to each other by local paths.",
                "Export to a local folder.",
            ),
            (
                self.embeds_audio and audio_root is not None,
                f"The files of {self.name} contain the audio.",
                "Leave --audio-root out.",
            ),
            (
                self.local_audio and not only_codes and audio_root is None and is_remote(store_url),
                f"Readers of {self.name} open local files.",
                f"{to_root}.",
            ),
        )
        for wrong, message, advice in refused:
            if wrong:
                raise invalid(message, advice)

    def lines(self, items: Iterable[Located]) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of a format of lines, each with the number of its items."""
        if self.dialogue_line is not None:
            for _, dialogue in groupby(items, key=lambda pair: pair[0].example_id):
                pairs = list(dialogue)
                yield len(pairs), self.dialogue_line(pairs[0][0].job, pairs)
        elif self.item_line is not None:
            for item, where in items:
                yield 1, self.item_line(item.job, item, where)

    def write(self, part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, Any]]) -> None:
        """Writes the files of one part of a folder."""
        if self.write_part is not None:
            self.write_part(part, files, job, items)
            return
        name = f"{part.split}.jsonl"
        file = files.open(name)
        for _, line in self.lines(((item, files.audio_name(name, where)) for item, where in items)):
            file.write(line)


def format_names() -> list[str]:
    """The names of all formats: the built-in ones, then those of other packages."""
    added = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return [*BUILT_IN, *sorted(added - BUILT_IN.keys())]


def find_format(name: str) -> ExportFormat:
    """Finds a format by its name. Raises `config.invalid` for an unknown one, `config.missing_library` for
    one that does not load."""
    built_in = [EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP)] if name in BUILT_IN else []
    for entry in built_in or entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            found = entry.load()
        except (ImportError, AttributeError) as error:
            raise _broken(entry, f"does not load: {error}") from error
        if not isinstance(found, ExportFormat) or found.name != name:
            raise _broken(entry, f"is not an ExportFormat with the name {name!r}")
        return found
    raise invalid(f"The format {name[:40]!r} is unknown.", f"Use one of: {', '.join(format_names())}.")


def describe_formats() -> str:
    """Describes the formats for help texts: those of one file, then those of a folder."""
    files: list[str] = []
    folders: list[str] = []
    for name in format_names():
        try:
            found = find_format(name)
        except ConfigError as error:
            folders.append(f"{name} ({error.message})")
            continue
        (files if found.one_file(None) else folders).append(f"{name} ({found.summary})")
    return f"Format of the dataset. Formats of one file: {', '.join(files)}. Formats of a folder: {', '.join(folders)}."


def _broken(entry: EntryPoint, reason: str) -> ConfigError:
    return ConfigError(
        ErrorCode.CONFIG_MISSING_LIBRARY,
        f"The export format {entry.name!r} is registered as {entry.value!r}, which {reason}.",
        "Install its requirements, or uninstall the package that registers it.",
    )

"""Formats that are folders: of Kaldi, Lhotse, ESPnet SpeechLM, LJ Speech, and WebDataset's tar files.

    kaldi           train/wav.scp  train/text  train/utt2spk  train/spk2utt  train/utt2dur  train/reco2dur
    lhotse          train/recordings.jsonl.gz  train/supervisions.jsonl.gz  train/cuts.jsonl.gz
    shar            train/cuts.000000.jsonl.gz  train/recording.000000.tar
    espnet-dataset  train/audio_text.json  train/dialogue.json  train/text.jsonl  train/dialogue.jsonl  train/audio/cuts.jsonl.gz ...
    ljspeech        train/metadata.csv  train/wavs/000000000-utt1.wav
    webdataset      train/shard-000000.tar: 000000000-utt1.wav  000000000-utt1.json  000000000-utt1.txt  000000001-utt2.wav  ...

Sources: https://kaldi-asr.org/doc/data_prep.html and `utils/validate_data_dir.sh`: all files are sorted in
the C locale by their first field, and their order by utterance is also their order by speaker. lhotse 1.33,
`lhotse.audio.Recording`, `lhotse.supervision.SupervisionSegment`, `lhotse.cut.MonoCut` and `lhotse.shar`,
whose archives contain for each cut its audio and then its recording as JSON.
https://keithito.com/LJ-Speech-Dataset, and `torchaudio.datasets.LJSPEECH`, which reads `csv.reader(metadata,
delimiter="|", quoting=csv.QUOTE_NONE)` and then `wavs/<first field>.wav`.
https://github.com/webdataset/webdataset: the part of a file name before the first dot is the key of an
example.
"""

from __future__ import annotations

import re
import shlex
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from gzip import GzipFile
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import msgspec

from jobs.export.dataset import PartFiles
from jobs.export.files import json_line
from jobs.export.formats import ExportFormat
from jobs.export.items import (
    ORIGIN,
    AudioItem,
    Loaded,
    Located,
    Part,
    facts,
    item_metadata,
    picked,
)
from jobs.export.line_formats import espnet_line, one_line
from jobs.formatting import JsonObject
from jobs.ledger.records import Job
from pipelines.errors import invalid

#: Rows of a table that are read at once.
_BATCH = 100


def kaldi_ids(speaker: str, id: str) -> tuple[str, str]:
    """The names of a speaker and of an utterance: unique, without white space. Sorted utterances are also
    sorted by speaker."""
    # A speaker's name is followed by a space or, in an utterance's name, by `-`: both sort before every
    # character that is kept here.
    own = _escaped(rb"[^A-Za-z0-9._]", speaker)
    return own, f"{own}-{_escaped(rb'[^A-Za-z0-9._-]', id)}"


def _escaped(pattern: bytes, text: str) -> str:
    """Replaces each match by `~` and its code in hexadecimal."""
    return re.sub(pattern, lambda found: b"~%02X" % found[0][0], text.encode()).decode()


def write_kaldi(part: Part, files: PartFiles, job: Job, items: Iterator[Located]) -> None:
    """Writes a data directory. Raises `config.invalid` for audio whose path Kaldi cannot read."""
    lines = files.sorted_lines()
    for item, where in items:
        known = item_metadata(job, item)
        speaker, utterance = kaldi_ids(known.speaker, item.id)
        audio = files.audio_name(f"{part.split}/wav.scp", where)
        if "\n" in audio or "\r" in audio or audio != audio.strip():
            raise invalid(f"Kaldi cannot read the path {audio[:200]!r}.", "Give another --audio-root.")
        if item.extension == "flac":
            # A command, because Kaldi does not read FLAC.
            audio = f"flac -c -d -s {shlex.quote(audio)} |"
        lines.add(
            b"%b\t%b"
            % (utterance.encode(), json_line((speaker, audio, one_line(known.text), f"{item.seconds:.6f}")))
        )
    names = "wav.scp", "text", "utt2spk", "utt2dur", "reco2dur"
    tables = [files.open(f"{part.split}/{name}") for name in names]
    utterances = files.open(f"{part.split}/spk2utt")
    decode = msgspec.json.Decoder(tuple[str, str, str, str]).decode
    split = ((utterance, *decode(rest)) for utterance, _, rest in (line.partition(b"\t") for line in lines))
    for speaker, group in groupby(split, lambda row: row[1]):
        utterances.write(speaker.encode())
        for utterance, _, audio, text, seconds in group:
            for file, value in zip(tables, (audio, text, speaker, seconds, seconds), strict=True):
                file.write(b"%b %b" % (utterance, value.encode()) if value else utterance)
                file.write(b"\n")
            utterances.write(b" " + utterance)
        utterances.write(b"\n")


def write_lhotse(part: Part, files: PartFiles, job: Job, items: Iterator[Located]) -> None:
    """Writes manifests with the ids of the items, and the codes of each item to a file."""
    folder = part.split
    beside = files.sibling_name(f"{folder}/codes")
    with (
        files.gzip(f"{folder}/recordings.jsonl.gz") as recordings,
        files.gzip(f"{folder}/supervisions.jsonl.gz") as supervisions,
        files.gzip(f"{folder}/cuts.jsonl.gz") as cuts,
    ):
        for item, where in items:
            named = files.audio_name(f"{folder}/cuts.jsonl.gz", where)
            source = {"type": "url" if "://" in where else "file", "channels": [0], "source": named}
            place = {"storage_type": "numpy_files", "storage_path": beside, "storage_key": f"{item.name}.npy"}
            cut = cut_of(item.id, item, source, place)
            if item.codes is not None:
                files.add(f"{folder}/codes/{item.name}.npy", npy(item.codes.codes))
            if not item.is_codes:
                recordings.write(json_line(cut["recording"]))
            supervisions.writelines(json_line(spoken) for spoken in cut["supervisions"])
            cuts.write(json_line(cut))


#: The source of a recording in an archive, and the place of codes.
SHAR_SOURCE = {"type": "shar", "channels": [0], "source": ""}
_SHAR_ARRAY = {"storage_type": "shar", "storage_path": "", "storage_key": ""}


def write_shar(part: Part, files: PartFiles, job: Job, items: Iterator[Loaded]) -> None:
    """Writes one shard of an archive. Ids are the names of the audio in the store, because they name members
    of a tar file."""
    with archive(part, files) as (add, cuts):
        for item, audio in items:
            cut = cut_of(item.name, item, SHAR_SOURCE)
            if not item.is_codes:
                add("recording", f"{item.name}.{item.extension}", audio, cut["recording"])
            if item.codes is not None:
                add("codes", f"{item.name}.npy", npy(item.codes.codes), cut["custom"]["codes"])
            cuts.write(json_line(cut))


@contextmanager
def archive(
    part: Part, files: PartFiles
) -> Generator[tuple[Callable[[str, str, bytes, object], None], GzipFile]]:
    """Opens one shard of an archive; yields the function that adds the file of a field of a cut, and the file of
    the cuts."""
    number = f"{part.number:06d}"
    with ExitStack() as ended:
        tars: dict[str, Callable[[str, bytes], None]] = {}

        def add(field: str, name: str, data: bytes, about: object) -> None:
            if field not in tars:
                tars[field] = ended.enter_context(tar_file(files.open(f"{part.split}/{field}.{number}.tar")))
            tars[field](name, data)
            tars[field](f"{name.partition('.')[0]}.json", json_line(about))

        yield add, ended.enter_context(files.gzip(f"{part.split}/cuts.{number}.jsonl.gz"))


def npy(codes: Any) -> bytes:
    """Codes as NumPy's file of one array."""
    import numpy as np

    file = BytesIO()
    np.save(file, codes)
    return file.getvalue()


def cut_of(id: str, item: AudioItem, source: JsonObject, place: dict[str, str] = _SHAR_ARRAY) -> JsonObject:
    """The JSON of a cut with its recording, if it has audio, and a supervision for each turn in it. `place`:
    where its codes are."""
    channels = [*range(item.channels)]
    recording = {
        "id": id,
        "sources": [source | {"channels": channels}],
        "sampling_rate": item.artifact.sample_rate,
        "num_samples": item.artifact.samples,
        "duration": item.seconds,
        "channel_ids": channels,
    }
    spoken = [_supervision(turn.id, id, turn, item.channels) for turn in item.turns]
    sounds: JsonObject = {} if item.is_codes else {"recording": recording}
    if (codes := item.codes) is not None:
        array = place | {"shape": list(codes.codes.shape)}
        shift = {"temporal_dim": 0, "frame_shift": 1 / codes.codec.frame_rate, "start": 0.0}
        sounds["custom"] = {"codes": {"array": array, **shift}}
    return {
        "id": id,
        "start": 0.0,
        "duration": item.seconds,
        "channel": channels if item.channels > 1 else 0,
        "supervisions": spoken or [_supervision(id, id, item, 1)],
        **sounds,
        "type": "MultiCut" if item.channels > 1 else "MonoCut",
    }


def _supervision(id: str, recording_id: str, item: AudioItem, channels: int) -> JsonObject:
    """The JSON of a supervision of a recording with this number of channels."""
    about = facts(item)
    span = {"start": item.place.start, "duration": item.seconds, "channel": item.place.channel % channels}
    made = {"id": id, "recording_id": recording_id, **span, "text": about["text"]}
    if about["language"] is not None:
        made["language"] = about["language"]
    made["speaker"] = about["speaker"]
    own = picked(about, "example_id", "role", "message_index", "sha256", "spec_sha", *ORIGIN)
    if own.pop("words", None) is not None:
        made["alignment"] = {
            name: [(one.text, one.start_s, round(one.end_s - one.start_s, 4), None) for one in said]
            for name, said in (("word", item.words), ("phone", item.phonemes))
            if said
        }
    made["custom"] = own
    return made


def write_espnet_dataset(part: Part, files: PartFiles, job: Job, items: Iterator[Located]) -> None:
    """Writes the dataset of one split, in one pass over its items."""
    turns = files.sorted_lines()
    examples = files.sorted_lines()
    name = f"{part.split}/dialogue.jsonl"
    texts = files.open(f"{part.split}/text.jsonl")
    dialogues = files.open(name)

    def written() -> Generator[Located]:
        for _, group in groupby(items, key=lambda pair: pair[0].example_id):
            dialogue = list(group)
            located = [(item, files.audio_name(name, where)) for item, where in dialogue]
            dialogues.write(espnet_line(job, located))
            examples.add(_sample(dialogue[0][0].example_id))
            for item, where in dialogue:
                texts.write(json_line({"id": item.id, "text": item_metadata(job, item).text}))
                turns.add(_sample(item.id))
                yield item, where

    def entry(name: str, file: str, reader: str) -> dict[str, str]:
        return {"name": name, "path": files.sibling_name(f"{part.split}/{file}"), "reader": reader}

    write_lhotse(part._replace(split=f"{part.split}/audio"), files, job, written())
    spoken = [entry("audio1", "audio", "lhotse_audio"), entry("text1", "text.jsonl", "text")]
    _write_dataset(files.open(f"{part.split}/audio_text.json"), spoken, turns)
    _write_dataset(
        files.open(f"{part.split}/dialogue.json"),
        [entry("dialogue1", "dialogue.jsonl", "dialogue")],
        examples,
    )


def _sample(id: str) -> bytes:
    """The line by which an id is sorted: its JSON without the closing quote, because `a"` would sort after
    `a b"`."""
    return json_line(id)[:-2] + b"\n"


def _write_dataset(file: IO[bytes], entries: list[dict[str, str]], samples: Iterable[bytes]) -> None:
    file.write(b'{"data_entry":%b,"samples":[' % msgspec.json.encode(entries))
    for number, sample in enumerate(samples):
        file.write(b'%b\n%b"' % (b"," if number else b"", sample[:-1]))
    file.write(b"\n]}\n")


def write_ljspeech(part: Part, files: PartFiles, job: Job, items: Iterator[Loaded]) -> None:
    """Writes the audio of a split and its table. A row has an item's name and twice its text, because there
    is no normalized text for the third field. Readers ignore quotes, so `|` in a text becomes a space."""
    table = files.open(f"{part.split}/metadata.csv")
    for item, audio in items:
        files.add(f"{part.split}/wavs/{item.name}.wav", audio)
        text = one_line(item_metadata(job, item).text, "|")
        table.write(f"{item.name}|{text}|{text}\n".encode())


@contextmanager
def tar_file(file: IO[bytes]) -> Generator[Callable[[str, bytes], None]]:
    """Opens a tar archive in `file`; yields the function that adds a member. Equal members give equal bytes:
    user 0, dated 1970."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
            # The archive would keep every member in memory.
            archive.members = []  # type: ignore[attr-defined]

        yield add


#: The errors of a damaged export.
READ_ERRORS = OSError, tarfile.TarError, LookupError, TypeError, ValueError, msgspec.MsgspecError


def read_examples(path: Path) -> Iterator[tuple[str, dict[str, bytes], JsonObject | None]]:
    """Yields the items of a WebDataset's tar file: the name of each and its files by their extension, and None; or of
    a table: their rows without the audio."""
    if path.suffix == ".tar":
        with tarfile.open(path, "r|") as archive:
            members = ((member.name.partition("."), archive.extractfile(member)) for member in archive)
            for name, group in groupby(members, key=lambda one: one[0][0]):
                yield name, {extension: file.read() for (_, _, extension), file in group if file}, None
        return
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        columns = [name for name in table.schema_arrow.names if name != "audio"]
        for batch in table.iter_batches(_BATCH, columns=columns):
            yield from (("", {}, row) for row in batch.to_pylist())


def write_webdataset(part: Part, files: PartFiles, job: Job, items: Iterator[Loaded]) -> None:
    """Writes one tar file."""
    with tar_file(files.open(f"{part.split}/shard-{part.number:06d}.tar")) as add:
        for item, audio in items:
            about = facts(item)
            if not item.is_codes:
                add(f"{item.name}.{item.extension}", audio)
            if item.codes is not None:
                add(f"{item.name}.codes.npy", npy(item.codes.codes))
            add(f"{item.name}.json", msgspec.json.encode(about))
            add(f"{item.name}.txt", about["text"].encode())


KALDI = ExportFormat(
    name="kaldi",
    summary="a Kaldi data directory",
    write_part=write_kaldi,
    equal=("sample rate",),
    audio_formats=("wav", "flac"),
    local_audio=True,
)
LHOTSE = ExportFormat(
    name="lhotse", summary="Lhotse's recordings, supervisions and cuts", write_part=write_lhotse, codes=True
)
SHAR = ExportFormat(
    name="shar", summary="Lhotse's tar archives", write_part=write_shar, embeds_audio=True, codes=True
)
ESPNET_DATASET = ExportFormat(
    name="espnet-dataset",
    summary="a dataset for ESPnet SpeechLM",
    write_part=write_espnet_dataset,
    local_audio=True,
    local_folder=True,
    whole_dialogues=True,
)
LJSPEECH = ExportFormat(
    name="ljspeech",
    summary="WAV files and metadata.csv, as in LJ Speech",
    write_part=write_ljspeech,
    embeds_audio=True,
    one_part=True,
    audio_formats=("wav",),
    equal=("sample rate",),
)
WEBDATASET = ExportFormat(
    name="webdataset",
    summary="tar files of audio, JSON and text",
    write_part=write_webdataset,
    embeds_audio=True,
    codes=True,
    equal=("audio format",),
    data_files="{}/*.tar",
)

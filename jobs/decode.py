"""Decodes the codes of a job, or of an export, to audio files: the ones that the job would have stored, if it had made
audio in the same mode.

    manifest.jsonl                     a line for each file, with its name as `audio_filepath`
    decode.json                        what is decoded here
    audio/00000/000000000-utt1.wav

A decoding that was stopped continues, because files appear complete, and those that exist are kept. Files of another
job may have the same names, so a folder is of one job or export.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from jobs.codes import StoredCodes, codec_of
from jobs.export.audio import AudioReader
from jobs.export.dataset import END, read_export
from jobs.export.files import json_line, output
from jobs.export.folder_formats import READ_ERRORS, read_examples
from jobs.export.items import audio_items, facts
from jobs.formatting import JsonObject
from jobs.layout import slug
from jobs.ledger.records import Job, JobSpec
from jobs.packs import map_ahead
from jobs.store import ObjectStore, StoredJob
from jobs.store.base import sha256_of
from pipelines.errors import NightjarError, invalid
from pipelines.registry import describe, open_decoder
from pipelines.request import CodecIdentity

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings
    from pipelines.results import StageDecoder

#: Maximum utterances in the decoder at once.
_AHEAD = 512
#: Format of an export with codes -> pattern of its files.
_FILES = {"webdataset": "*/*.tar", "parquet": "data/*.parquet"}


class CodedItem(NamedTuple):
    """An item with codes. `name`: of its file; `about`: its facts in an export."""

    name: str
    about: JsonObject
    codes: StoredCodes


def items_of_job(ledger: Ledger, store: ObjectStore, job: Job) -> Iterator[CodedItem]:
    """The items of a job, in order. Raises `config.invalid` for a job without codes."""
    if not job.spec.output:
        raise invalid(f"The job {job.id} has no codes.", "Its audio is in the store; export it.")
    for item, _ in AudioReader(store, codes=True).located(audio_items(ledger, store, job.id)):
        yield CodedItem(item.name, facts(item), cast("StoredCodes", item.codes))


def items_of_export(folder: Path) -> Iterator[CodedItem]:
    """The items of a finished export with codes, in order. Raises `config.invalid` for another folder."""
    finished, paths = read_export(folder, *_FILES.values())
    made_in = finished.identity.format
    if made_in not in _FILES:
        raise invalid(
            f"Codes in the format {made_in} cannot be decoded.",
            f"Export to {' or '.join(_FILES)}, or decode the job.",
        )
    import numpy as np

    try:
        for _, files, row in chain.from_iterable(map(read_examples, paths)):
            about = json.loads(files["json"]) if row is None else row
            if (codes := about.pop("codes", None)) is None and "codes.npy" in files:
                codes = np.load(io.BytesIO(files["codes.npy"]), allow_pickle=False)
            if codes is None:
                raise invalid(f"The export {folder} has no codes.", "Export a job with codes.")
            voice = about["voice_codes"] and np.asarray(about["voice_codes"], np.int16)
            stored = StoredCodes(
                np.asarray(codes, np.int16), voice, msgspec.convert(about["codec"], CodecIdentity)
            )
            yield CodedItem(f"{about['index']:09d}-{slug(about['example_id'])}", about, stored)
    except READ_ERRORS as error:
        raise invalid(
            f"The export {folder} is damaged: {type(error).__name__}: {error}.", "Export again."
        ) from error


def decode_source(
    settings: Settings, source: StoredJob | Path, to: Path, model: str | None
) -> tuple[int, int]:
    """Decodes a job, or an export in a folder, with the decoder of a model; None: of the one that made the codes.
    Returns as `decode` does, whose errors it raises."""
    if isinstance(source, Path):
        spec = JobSpec("")
        items = items_of_export(source)
    else:
        spec = source.job.spec
        items = items_of_job(*source)
    if (first := next(items, None)) is None:
        return 0, 0
    chosen = model or first.about["model"]
    # An export made again may have other items.
    identity = sha256_of((source / END).read_bytes()) if isinstance(source, Path) else source.job.id
    with closing(open_decoder(chosen, **settings.engine_options(describe(chosen)))) as decoder:
        return decode(chain([first], items), decoder, chosen, to.absolute(), spec, identity)


def decode(
    items: Iterable[CodedItem], decoder: StageDecoder, model: str, to: Path, spec: JobSpec, source: str
) -> tuple[int, int]:
    """Decodes items with the decoder of a model, to a folder, in the format and at the rate of a job's spec. Returns
    the number of items, and of those that existed. `source`: identifies the job or the export.

    Raises `config.invalid` for codes of another codec and for the folder of another source, and the errors of the
    decoder.
    """
    # Imported here, because these take half a second.
    import soundfile

    from jobs.encoded_audio import encoded_audio

    # Notes what is decoded in the folder.
    note = json_line({"source": source})
    claim = to / "decode.json"
    if claim.is_file() and claim.read_bytes() != note:
        raise invalid(
            f"{str(to)!r} has the audio of another job or export.", "Give another folder with --to."
        )
    with output(str(claim)) as file:
        file.write(note)
    codec = codec_of(model)
    done = 0
    kept = 0

    def place(item: CodedItem) -> str:
        """The name of an item's file in the folder."""
        return f"audio/{item.about['index'] // 10_000:05d}/{item.name}.{spec.format}"

    def started(item: CodedItem) -> Future[Any]:
        """The samples of an item, or an error; None if its file exists."""
        if item.codes.codec != codec:
            raise invalid(
                f"The codes of {item.about['example_id']!r:.100} are of another codec than that of {model}.",
                "Give the model that made them with --model.",
            )
        samples = Future[Any]()
        if (to / place(item)).is_file():
            samples.set_result(None)
        else:
            decoder.decode(item.codes.codes, item.codes.voice_codes, samples.set_result)
        return samples

    with output(str(to / "manifest.jsonl")) as manifest:
        for item, samples in map_ahead(started, items, _AHEAD):
            if isinstance(samples, NightjarError):
                raise samples
            path = to / place(item)
            done += 1
            if samples is None:
                kept += 1
            else:
                made = encoded_audio(samples, decoder.sample_rate, spec.format, spec.sample_rate)
                with output(str(path)) as file:
                    file.write(made.data)
            data = path.read_bytes()
            try:
                info = soundfile.info(io.BytesIO(data))
            except soundfile.LibsndfileError:
                raise invalid(f"{str(path)!r} was changed.", "Remove it, then repeat the command.") from None
            facts = {"sample_rate": info.samplerate, "samples": info.frames, "sha256": sha256_of(data)}
            about = {"audio_filepath": place(item)} | item.about | facts
            about["duration"] = round(info.frames / info.samplerate, 6)
            del about["codec"], about["voice_codes"]
            manifest.write(json_line(about))
    return done, kept

"""Writes a second dataset from an export: the same speech with another speed, in rooms, with noise, in a narrower
band or after a codec. The export stays as it is.

    webdataset     train/shard-000000.tar: as in the export, with `augment` in each .json; train/shard-000000.jsonl
    audiofolder    data/train/00000/metadata.parquet  data/train/00000/000000000-utt1.wav ...

What happens to an item is drawn from the seed and the item's id alone, so it depends neither on the order nor on
other items. Effects follow each other as in the world: speed, room, noise, band, codec. The audio keeps its
length (but for the speed), its sample rate and its format.

Sources: Ko et al., "Audio augmentation for speech recognition" (2015): speed by resampling. Ko et al., "A study on
data augmentation of reverberant speech" (2017): the impulse response begins at its direct path. ITU-T G.711:
mu-law at 8 kHz.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec

from jobs.export.audio import AudioNames, decoded
from jobs.export.dataset import Dataset, Identity, PartFiles, open_destination, read_export
from jobs.export.files import json_line
from jobs.export.folder_formats import READ_ERRORS, read_examples, tar_file
from jobs.export.items import LeftOut
from jobs.export.table_formats import Type, arrow_type
from jobs.formatting import JsonObject
from jobs.store.base import sha256_of
from pipelines.audio_format import AUDIO_FORMATS
from pipelines.errors import invalid

if TYPE_CHECKING:
    from jobs.settings import S3Settings
    from pipelines.audio import Samples

#: Incremented when the same effects give other bytes.
VERSION = 2
#: Name of a codec -> the rate at which it works in Hz, and its names in libsndfile.
_CODECS = {
    "mp3": (48_000, "MPEG_LAYER_III", "MP3"),
    "opus": (48_000, "OPUS", "OGG"),
    "mulaw": (8_000, "ULAW", "WAV"),
}
#: Order of the filters that limit the band.
_ORDER = 5
_EXTENSIONS = {f".{name}" for name in (*AUDIO_FORMATS, "ogg")}
#: The fields of a recipe, with their types in tables.
_RECIPE: Type = {
    "seed": "int64",
    **dict.fromkeys(("speed", "noise_at", "snr_db"), "float64"),
    **dict.fromkeys(("room", "noise", "band_hz", "codec", "clean_sha256"), "string"),
}
_Factor = Annotated[float, msgspec.Meta(ge=0.1, le=10)]
_Hertz = Annotated[float, msgspec.Meta(ge=0)]
_Decibels = Annotated[float, msgspec.Meta(ge=-100, le=100)]


def parse_range(text: str) -> list[float]:
    """The numbers of a range such as `5..20`; of a number, twice this. Raises `config.invalid`."""
    with suppress(ValueError):
        ends = sorted(map(float, text.split("..")))
        if len(ends) <= 2 and all(map(math.isfinite, ends)):
            return [ends[0], ends[-1]]
    raise invalid(f"{text[:40]!r} is not a range.", "Write a number, or LOW..HIGH such as 5..20.")


class Effects(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens to the items of a dataset; None: nothing of that kind."""

    seed: int = 0
    #: Factor of the speed, which also changes the pitch.
    speed: tuple[_Factor, _Factor] | None = None
    #: Folder of impulse responses.
    room: Path | None = None
    #: Folder of recordings of noise.
    noise: Path | None = None
    #: Of the speech to the noise, in dB.
    snr: tuple[_Decibels, _Decibels] = (5, 20)
    #: The lowest and the highest frequency that are left, in Hz.
    band: tuple[_Hertz, _Hertz] | None = None
    #: One of these is drawn.
    codecs: tuple[Literal["mp3", "opus", "mulaw"], ...] = ()

    def recipe(self, id: str) -> JsonObject:
        """Draws what happens to an item, with a null for what does not."""

        def unit(name: str) -> float:
            return Random(f"{self.seed}/{name}/{id}").random()

        def within(name: str, bounds: tuple[float, float] | None) -> float | None:
            return bounds and round(bounds[0] + (bounds[1] - bounds[0]) * unit(name), 4)

        def one(name: str, choices: Sequence[str]) -> str | None:
            return choices[int(unit(name) * len(choices))] if choices else None

        return {
            "seed": self.seed,
            "speed": within("speed", self.speed),
            "room": one("room", sounds(self.room)),
            "noise": one("noise", sounds(self.noise)),
            "noise_at": within("noise_at", self.noise and (0, 1)),
            "snr_db": within("snr", self.noise and self.snr),
            "band_hz": self.band and "{:g}..{:g}".format(*self.band),
            "codec": one("codec", self.codecs),
        }

    def applied(self, recipe: JsonObject, samples: Any, rate: int) -> Samples:
        """Applies a recipe to samples, [samples, channels]."""
        import numpy as np
        import soxr
        from scipy import signal

        if recipe["speed"]:
            samples = soxr.resample(samples, rate * recipe["speed"], rate)
        if self.room and recipe["room"]:
            response = _read(self.room / recipe["room"], rate)
            response = response[int(np.abs(response).argmax()) :]
            response /= math.sqrt(np.sum(response**2)) or 1
            samples = signal.oaconvolve(samples, response[:, None], axes=0)[: len(samples)]
        if self.noise and recipe["noise"]:
            noise = _read(self.noise / recipe["noise"], rate, len(samples), recipe["noise_at"])
            wanted = np.mean(samples**2) / 10 ** (recipe["snr_db"] / 10)
            samples = samples + noise[:, None] * math.sqrt(wanted / (np.mean(noise**2) or 1))
        if recipe["band_hz"]:
            edges = np.clip(parse_range(recipe["band_hz"]), 1, rate / 2 - 1)
            if edges[0] == edges[1]:
                raise invalid(f"{recipe['band_hz']} Hz is no band at {rate} Hz.", "Give a wider --band.")
            band = signal.butter(_ORDER, edges, "bandpass", fs=rate, output="sos")
            samples = signal.sosfilt(band, samples, axis=0)
        if recipe["codec"]:
            samples = _coded(np.asarray(samples, np.float32), rate, recipe["codec"])
        # Sums may be louder than a file can hold.
        return np.asarray(samples / max(1.0, float(np.abs(samples).max(initial=0))), np.float32)


@cache
def sounds(folder: Path | None) -> list[str]:
    """The audio files below a folder, sorted. Raises `config.invalid` if there is none."""
    if folder is None:
        return []
    found = [path for path in folder.rglob("*") if path.suffix.lower() in _EXTENSIONS and path.is_file()]
    if not found:
        raise invalid(f"There are no audio files in {str(folder)!r}.", "Give a folder of WAV or FLAC files.")
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _read(path: Path, rate: int, samples: int = 0, at: float = 0) -> Samples:
    """The mean of the channels of a file, at a rate, float32 [samples]. `samples`: length of a section, 0: the
    whole file; `at`: its place in the file, from 0 to 1; a short file repeats."""
    import numpy as np
    import soundfile
    import soxr

    try:
        with soundfile.SoundFile(path) as file:
            needed = math.ceil(samples * file.samplerate / rate) + 1 if samples else file.frames
            file.seek(int(at * max(0, file.frames - needed)))
            heard = file.read(needed, "float32", always_2d=True).mean(axis=1)
    except soundfile.LibsndfileError:
        raise invalid(f"{str(path)!r} is not an audio file.", "Remove it from the folder.") from None
    # A section may be silent.
    if not (len(heard) if samples else heard.any()):
        raise invalid(f"{str(path)!r} is silent.", "Remove it from the folder.")
    found = soxr.resample(heard, file.samplerate, rate)
    if len(found) < samples:
        found = np.roll(found, -int(at * len(found)))
    return np.resize(found, samples or len(found))


def _coded(samples: Samples, rate: int, codec: str) -> Samples:
    """Samples after a codec, as many as before."""
    import numpy as np
    import soundfile

    from pipelines.audio import resample

    own, coding, container = _CODECS[codec]
    file = io.BytesIO()
    soundfile.write(file, resample(samples, rate, own), own, coding, format=container)
    file.seek(0)
    heard = cast("Samples", soundfile.read(file, dtype="float32", always_2d=True)[0])
    made = resample(heard, own, rate)[: len(samples)]
    return np.pad(made, ((0, len(samples) - len(made)), (0, 0)))


def augment(source: Path, to: str, *, s3: S3Settings | None = None, **given: Any) -> None:
    """Writes the augmented dataset of the export `source`, which stays as it is, to `to`, a folder or an
    `s3://` prefix. `given`: the fields of `Effects`, with ranges also as texts or numbers. The same call continues
    after a stop.

    Raises `config.invalid` for effects, an export or a destination that cannot be used, and `store.full`.
    """
    for name in given.keys() & {"speed", "snr", "band"}:
        if (ends := given[name]) is not None:
            text = "..".join(map(str, ends)) if isinstance(ends, list | tuple) else str(ends)
            given[name] = parse_range(text)
    try:
        effects = msgspec.convert(given, Effects)
    except msgspec.ValidationError as error:
        raise invalid(f"An effect is impossible: {error}.", "Give another value.") from None
    if not any(effects.recipe("")[name] for name in ("speed", "room", "noise", "band_hz", "codec")):
        raise invalid("No effect is chosen.", "Give --speed, --room, --noise, --band or --codec.")
    made, parts = read_export(source, "*/*.tar", "data/*/*/metadata.parquet")
    if not parts:
        raise invalid(
            f"{str(source)!r} is not an export that can be augmented.",
            "Give the folder of a finished export as webdataset or audiofolder.",
        )
    new = Path(to).absolute()
    old = source.absolute()
    if new in (old, *old.parents) or old in new.parents:
        raise invalid(
            "The export and the new dataset cannot be in one folder.", "Give another one with --to."
        )
    plan = parts, made, effects, sounds(effects.room), sounds(effects.noise)
    digest = sha256_of(msgspec.json.encode(plan, enc_hook=str))
    identity = Identity(str(old), "augment", VERSION, digest, (), 0, "")
    with open_destination(to, s3) as destination:
        dataset = Dataset(destination, identity, AudioNames((), None))
        if dataset.begin():
            return
        for number, path in enumerate(parts):
            dataset.add(f"{number:05d}", partial(_write, path, path.relative_to(source).as_posix(), effects))
        dataset.add("common", partial(_write_common, source, effects), again=True)
        dataset.finish({}, LeftOut())


def _write_common(source: Path, effects: Effects, files: PartFiles) -> None:
    """Writes the provenance and the card, if the export has them."""
    for name in ("README.md", "provenance.json"):
        if (path := source / name).is_file():
            data = path.read_bytes()
            files.add(name, _card(data.decode(), effects) if name == "README.md" else data)


def _card(card: str, effects: Effects) -> bytes:
    """The card of the new dataset, which has the hub's fields from the card of the export."""
    fields = card.partition("\n---\n")[0].replace('pretty_name: "', 'pretty_name: "Augmented ', 1)
    ranges = msgspec.json.format(msgspec.json.encode(effects, enc_hook=lambda folder: folder.name), indent=2)
    return f"""{fields}
---

# Augmented speech

Made by `nightjar augment` from an export of Nightjar. That export has the clean speech, and a card with its hours, its voices and
its jobs. What was done to an example is in its `augment`, with the SHA-256 of its clean audio. It was drawn from these effects, where
null is none; `snr` (dB) is that of the noise:

```json
{ranges.decode()}
```
""".encode()


def _examples(path: Path) -> Iterator[tuple[str, dict[str, bytes], JsonObject]]:
    """Yields the name of each item of a tar file or a table, its files by extension, and what is said about it."""
    try:
        for name, members, row in read_examples(path):
            if row is None:
                yield name, members, msgspec.json.decode(members["json"])
            else:
                # The audio of an export is beside its table.
                audio = path.parent / Path(row["file_name"]).name
                yield audio.stem, {audio.suffix[1:]: audio.read_bytes()}, row
    except READ_ERRORS as error:
        raise invalid(f"{str(path)!r} cannot be read: {error}.", "Export it again.") from error


def _write(path: Path, name: str, effects: Effects, files: PartFiles) -> None:
    """Writes a part, whose file has this name: the audio, and a table or a file of lines with the recipes."""
    told: list[JsonObject] = []
    tar = path.suffix == ".tar"
    folder = "" if tar else name.removesuffix(path.name)
    with tar_file(files.open(name)) if tar else nullcontext(files.add) as add:
        for item, members, about in _examples(path):
            audio = _augmented(item, members, about, effects)
            told.append({"audio_filepath": f"{item}.{audio}", **about})
            for extension, data in members.items():
                add(f"{folder}{item}.{extension}", data)
    if tar:
        files.open(f"{name[:-4]}.jsonl").writelines(json_line(one) for one in told)
        return
    import pyarrow
    from pyarrow import parquet

    schema = parquet.read_schema(path).append(pyarrow.field("augment", arrow_type(_RECIPE)))
    parquet.write_table(pyarrow.Table.from_pylist(told, schema), files.open(name), compression="zstd")


def _augmented(name: str, members: dict[str, bytes], about: JsonObject, effects: Effects) -> str:
    """Augments the files of an item and what is said about it, in place. Returns the extension of its audio."""
    import soundfile

    from jobs.encoded_audio import encoded_audio

    extension = next((one for one in members if one in AUDIO_FORMATS), "")
    # An item is known by its dialogue and turn, or by its name in the export.
    recipe = effects.recipe(f"{about.get('example_id', name)}/{about.get('message_index')}")
    try:
        data = members[extension]
        clean = decoded(data)
        rate = soundfile.info(io.BytesIO(data)).samplerate
    except (KeyError, soundfile.LibsndfileError):
        raise invalid(f"{name!r} has no audio that can be read.", "Export again, with audio.") from None
    made = encoded_audio(effects.applied(recipe, clean.reshape(len(clean), -1), rate), rate, extension)
    known = {
        "sha256": sha256_of(made.data),
        "bytes": len(made.data),
        "samples": made.samples,
        "duration": round(made.samples / rate, 6),
        "augment": recipe | {"clean_sha256": about.get("sha256")},
    }
    speed = recipe["speed"] or 1
    for turn in (about, *about.get("turns", ())):
        turn |= {name: round(turn[name] / speed, 6) for name in ("start", "end") if name in turn}
        for word in turn.get("words") or ():
            for place in ("start_s", "end_s") if isinstance(word, dict) else (1, 2):
                word[place] = round(word[place] / speed, 4)
    about |= {name: value for name, value in known.items() if name in about or name == "augment"}
    members[extension] = made.data
    if "json" in members:
        members["json"] = msgspec.json.encode(about)
    return extension

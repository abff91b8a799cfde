"""Writes a second dataset from an export: the same speech with another speed, in rooms, with noise, in a narrower
band or after a codec. The export stays as it is.

    webdataset             train/shard-000000.tar: as in the export, with `augment` in each .json
    audiofolder            data/train/00000/metadata.parquet  data/train/00000/000000000-utt1.wav ...
    a file of JSON lines   train/00000/metadata.jsonl  train/00000/000000000.wav ...

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
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from hashlib import blake2b
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import msgspec

from jobs.export.audio import AudioNames, decoded
from jobs.export.export import Finished, Identity, begin, finish, written_part
from jobs.export.files import RECORDS, PartFiles, WrittenFile, open_destination
from jobs.export.folder_formats import tar_file
from jobs.store.base import sha256_of
from pipelines.audio_format import AUDIO_FORMATS, AudioFormat, holds_rate
from pipelines.errors import invalid

if TYPE_CHECKING:
    import numpy as np
    import soundfile
    from numpy.typing import NDArray

    from jobs.settings import S3Settings

    Samples = NDArray[np.float32]

#: Incremented when the same effects give other bytes.
VERSION = 1
_MU_LAW_RATE = 8_000
#: The rate at which a codec works that does not have the rate of the audio, in Hz.
_CODEC_RATE = 16_000
#: Order of the filters that limit the band.
_ORDER = 5
#: Lines of a file that are one part.
_PART_LINES = 1000
_EXTENSIONS = {f".{name}" for name in (*AUDIO_FORMATS, "ogg")}


#: The fields of a recipe, with their types in tables.
_RECIPE = {
    "seed": "int64",
    **dict.fromkeys(("speed", "noise_at", "snr_db"), "float64"),
    **dict.fromkeys(("room", "noise", "band_hz", "codec", "clean_sha256"), "string"),
}
_encode = msgspec.json.Encoder().encode


_Factor = Annotated[float, msgspec.Meta(ge=0.1, le=10)]
_Hertz = Annotated[float, msgspec.Meta(ge=0)]


def parse_range(text: str) -> list[float]:
    """The numbers of a range such as `5..20`; of a number, twice this. Raises `config.invalid`."""
    try:
        low, high = sorted(map(float, (text.split("..") * 2)[:2]))
    except ValueError:
        raise invalid(
            f"{text[:40]!r} is not a range.", "Write a number, or LOW..HIGH such as 5..20."
        ) from None
    return [low, high]


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the items of a dataset; None: nothing of that kind."""

    seed: int = 0
    #: Factor of the speed, which also changes the pitch.
    speed: tuple[_Factor, _Factor] | None = None
    #: Folder of impulse responses.
    room: Path | None = None
    #: Folder of recordings of noise.
    noise: Path | None = None
    #: Of the speech to the noise, in dB.
    snr: tuple[float, float] = (5, 20)
    #: The lowest and the highest frequency that are left, in Hz.
    band: tuple[_Hertz, _Hertz] | None = None
    #: One of these is drawn.
    codecs: tuple[Literal["mp3", "opus", "mulaw"], ...] = ()

    def recipe(self, id: str) -> dict[str, Any]:
        """Draws what happens to an item, with a null for what does not."""

        def unit(name: str) -> float:
            digest = blake2b(f"{self.seed}/{name}/{id}".encode(), digest_size=7).digest()
            return int.from_bytes(digest, "big") / 2**56

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

    def applied(self, recipe: dict[str, Any], samples: Any, rate: int) -> Samples:
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
            noise = _noise(self.noise / recipe["noise"], rate, len(samples), recipe["noise_at"])
            wanted = np.mean(samples**2) / 10 ** (recipe["snr_db"] / 10)
            samples = samples + noise[:, None] * math.sqrt(wanted / (np.mean(noise**2) or 1))
        if recipe["band_hz"]:
            for edge, kind in zip(parse_range(recipe["band_hz"]), ("highpass", "lowpass"), strict=True):
                if 0 < edge < rate / 2:
                    band = signal.butter(_ORDER, edge, kind, fs=rate, output="sos")
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


def _noise(path: Path, rate: int, samples: int, at: float) -> Samples:
    """A section of noise, float32 [samples]. `at`: its place in the file, from 0 to 1; a short file repeats."""
    import numpy as np

    with _opened(path) as file:
        needed = math.ceil(samples * file.samplerate / rate) + 1
        start = int(at * max(0, file.frames - needed))
    found = _read(path, rate, start, needed)
    if len(found) < samples:
        found = np.roll(found, -int(at * len(found)))
    return np.resize(found, samples)


def _read(path: Path, rate: int, start: int = 0, frames: int = -1) -> Samples:
    """The mean of the channels of a file, at a rate, float32 [samples]."""
    import soxr

    with _opened(path) as file:
        file.seek(start)
        return soxr.resample(file.read(frames, "float32", always_2d=True).mean(axis=1), file.samplerate, rate)


def _opened(path: Path) -> soundfile.SoundFile:
    import soundfile

    try:
        return soundfile.SoundFile(path)
    except soundfile.LibsndfileError:
        raise invalid(f"{str(path)!r} is not an audio file.", "Remove it from the folder.") from None


def _coded(samples: Samples, rate: int, codec: str) -> Samples:
    """Samples after a codec, as many as before."""
    import numpy as np
    import soundfile

    from pipelines.audio import encode, resample

    own = _MU_LAW_RATE if codec == "mulaw" else rate if holds_rate(codec, rate) else _CODEC_RATE
    inside = resample(samples, rate, own)
    if codec == "mulaw":
        file = io.BytesIO()
        soundfile.write(file, inside, own, "ULAW", format="WAV")
    else:
        file = io.BytesIO(encode(inside, own, cast("AudioFormat", codec)))
    file.seek(0)
    decoded = cast("Samples", soundfile.read(file, dtype="float32", always_2d=True)[0])
    made = resample(decoded, own, rate)[: len(samples)]
    return np.pad(made, ((0, len(samples) - len(made)), (0, 0)))


class Sample(NamedTuple):
    """An item of an export."""

    #: Unique in its part.
    name: str
    extension: str
    audio: bytes
    #: What the export says about it.
    about: dict[str, Any]
    #: Other files of it in an archive, by their extension.
    others: Mapping[str, bytes]


class SourcePart(NamedTuple):
    """A part of an export."""

    #: Its name in the new dataset: that of a tar file, or of a folder.
    name: str
    #: Of its file.
    bytes: int
    read: Callable[[], Iterator[Sample]]
    #: The schema of its table.
    schema: Any = None


def _of_tar(path: Path) -> Iterator[Sample]:
    with tarfile.open(path) as archive:
        members = ((member.name.partition("."), archive.extractfile(member)) for member in archive)
        for name, group in groupby(members, key=lambda one: one[0][0]):
            files = {extension: file.read() for (_, _, extension), file in group if file is not None}
            extension = next((one for one in files if one in AUDIO_FORMATS), None)
            if extension is None or "json" not in files:
                raise invalid(f"{name!r} in {str(path)!r} is not an example with audio.", _KINDS)
            audio, about = files.pop(extension), msgspec.json.decode(files.pop("json"))
            yield Sample(name, extension, audio, about, files)


def _of_table(path: Path) -> Iterator[Sample]:
    from pyarrow import parquet

    for batch in parquet.ParquetFile(path).iter_batches(_PART_LINES):
        for row in batch.to_pylist():
            audio = path.parent / row.pop("file_name")
            yield Sample(audio.stem, audio.suffix[1:], audio.read_bytes(), row, {})


def _of_lines(path: Path, root: Path | None, first: int) -> Iterator[Sample]:
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, first, first + _PART_LINES), first):
            about = msgspec.json.decode(line, type=dict[str, Any])
            place = about.pop("audio_filepath", None) or (root and about.get("key"))
            if not isinstance(place, str) or about.get("pack"):
                message = f"Line {number + 1} of {str(path)!r} does not say where its audio is."
                advice = "Export as nemo or webdataset, or give the folder of the store with --audio-root."
                raise invalid(message, advice)
            audio = (root or path.parent) / place
            yield Sample(f"{number:09d}", audio.suffix[1:], audio.read_bytes(), about, {})


_KINDS = "Give an export as webdataset or audiofolder, or a file of the formats nemo or manifest."


def _parts(source: Path, root: Path | None) -> Iterator[SourcePart]:
    """The parts of an export."""
    for path in sorted(source.glob("*/*.tar")):
        yield SourcePart(path.relative_to(source).as_posix(), path.stat().st_size, partial(_of_tar, path))
    for path in sorted(source.glob("data/*/*/metadata.parquet")):
        from pyarrow import parquet

        name, read = path.parent.relative_to(source).as_posix(), partial(_of_table, path)
        yield SourcePart(name, path.stat().st_size, read, parquet.read_schema(path))
    for path in [source] if source.is_file() else sorted(source.glob("*.jsonl")):
        with path.open("rb") as file:
            lines = sum(1 for _ in file)
        split = "train" if source.is_file() else path.stem
        for first in range(0, lines, _PART_LINES):
            name, read = f"{split}/{first // _PART_LINES:05d}", partial(_of_lines, path, root, first)
            yield SourcePart(name, path.stat().st_size, read)


def augment(
    source: Path,
    to: str,
    *,
    audio_root: Path | None = None,
    s3: S3Settings | None = None,
    **given: Any,
) -> None:
    """Writes the augmented dataset of the export `source`, which stays as it is, to `to`, a folder or an
    `s3://` prefix. `given`: the fields of `Effects`. The same call continues after a stop. `audio_root`: the
    folder of the store whose keys a manifest names.

    Raises `config.invalid` for effects, an export or a destination that cannot be used, and `store.full`.
    """
    try:
        effects = msgspec.convert(given, Effects)
    except msgspec.ValidationError as error:
        raise invalid(f"An effect is impossible: {error}.", "Give another value.") from None
    if not any(effects.recipe("")[name] for name in ("speed", "room", "noise", "band_hz", "codec")):
        raise invalid("No effect is chosen.", "Give --speed, --room, --noise, --band or --codec.")
    parts = list(_parts(source, audio_root))
    if not parts:
        raise invalid(f"{str(source)!r} is not an export that can be augmented.", _KINDS)
    new, old = Path(to).absolute(), source.absolute()
    if new == old or new in old.parents or old in new.parents:
        raise invalid(
            "The export and the new dataset cannot be in one folder.", "Give another one with --to."
        )
    summary = source / "export.json"
    found = [part[:2] for part in parts], summary.read_bytes() if summary.is_file() else b""
    plan = found, effects, sounds(effects.room), sounds(effects.noise)
    digest = sha256_of(msgspec.json.encode(plan, enc_hook=str))
    identity = Identity(str(old), "augment", VERSION, digest, (), 0, "")
    with open_destination(to, s3) as destination:
        if begin(destination, identity, ()):
            return
        at, names, files = destination.sizes(), AudioNames((), None), list[WrittenFile]()
        for number, part in enumerate(parts):
            record = f"{RECORDS}/{number:05d}.json"
            written = written_part(destination, at, record)
            if written is None:
                with PartFiles(destination, names) as part_files:
                    _write(part, part_files, effects)
                    written = part_files.publish(record)
            files += written
        with PartFiles(destination, names) as common:
            for name in ("README.md", "provenance.json"):
                if (source / name).is_file():
                    common.add(name, (source / name).read_bytes())
            files += common.publish(f"{RECORDS}/common.json")
        finish(destination, Finished(identity, {}, 0, files))


def _readable(part: SourcePart) -> Iterator[Sample]:
    try:
        yield from part.read()
    except (OSError, tarfile.TarError, msgspec.MsgspecError) as error:
        message = f"{part.name!r} of the export cannot be read: {error}."
        raise invalid(message, "Export it again.") from error


def _write(part: SourcePart, files: PartFiles, effects: Effects) -> None:
    """Writes a part: its audio, and a table or a file of lines with the recipes."""
    archive = part.name.endswith(".tar")
    folder = part.name.removesuffix(".tar")
    told: list[dict[str, Any]] = []
    with ExitStack() as ended:
        add = ended.enter_context(tar_file(files.open(part.name))) if archive else None
        for sample in _readable(part):
            audio, about = _augmented(sample, effects)
            name = f"{sample.name}.{sample.extension}"
            told.append({"file_name": name, "audio_filepath": name, **about})
            if add is None:
                files.add(f"{folder}/{name}", audio)
                continue
            for extension, data in {sample.extension: audio, "json": _encode(about), **sample.others}.items():
                add(f"{sample.name}.{extension}", data)
    if part.schema is None:
        lines = files.open(f"{folder}.jsonl" if archive else f"{folder}/metadata.jsonl")
        lines.writelines(_encode(one) + b"\n" for one in told)
        return
    import pyarrow
    from pyarrow import parquet

    recipe = pyarrow.struct([(name, pyarrow.type_for_alias(dtype)) for name, dtype in _RECIPE.items()])
    table = pyarrow.Table.from_pylist(told, part.schema.append(pyarrow.field("augment", recipe)))
    parquet.write_table(table, files.open(f"{folder}/metadata.parquet"), compression="zstd")


def _augmented(sample: Sample, effects: Effects) -> tuple[bytes, dict[str, Any]]:
    """Makes the audio of an item and what is said about it."""
    import soundfile

    from jobs.encoded_audio import encoded

    about = sample.about
    # An item is known by its dialogue and turn, or by its name in the export.
    recipe = effects.recipe(f"{about.get('example_id', sample.name)}/{about.get('message_index')}")
    try:
        clean, rate = decoded(sample.audio), soundfile.info(io.BytesIO(sample.audio)).samplerate
    except soundfile.LibsndfileError:
        raise invalid(f"The audio of {sample.name!r} cannot be read.", "Export again.") from None
    samples = effects.applied(recipe, clean.reshape(len(clean), -1), rate)
    made = encoded(samples, rate, cast("AudioFormat", sample.extension))
    known = {
        "sha256": sha256_of(made.data),
        "bytes": len(made.data),
        "samples": made.samples,
        "duration": round(made.samples / rate, 6),
    }
    speed, clean_sha256 = recipe["speed"] or 1, about.get("sha256")
    for turn in (about, *about.get("turns", ())):
        turn |= {name: round(turn[name] / speed, 6) for name in ("start", "end") if name in turn}
        for word in turn.get("words") or ():
            for place in ("start_s", "end_s") if isinstance(word, dict) else (1, 2):
                word[place] = round(word[place] / speed, 4)
    about |= {name: value for name, value in known.items() if name in about}
    return made.data, {**about, "augment": {**recipe, "clean_sha256": clean_sha256}}

"""Decodes, encodes, resamples, normalizes (ITU-R BS.1770-4) and trims audio, and detects silence."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import struct
import zlib
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from pipelines.audio_format import AUDIO_FORMATS, AudioFormat, check_rate
from pipelines.errors import ErrorCode, InputError, SynthesisError, input_too_long, invalid
from pipelines.ipc import share

if TYPE_CHECKING:
    from pipelines.request import FloatArray, Speech

#: float32 [samples], mono unless it is said otherwise.
Samples = NDArray[np.float32]
NO_SAMPLES: Samples = np.zeros(0, np.float32)

#: Target loudness of all audio that Nightjar writes, in LUFS (EBU R 128), and the maximum peak that reaching
#: it may cause.
TARGET_LUFS = -23.0
PEAK_LIMIT = 0.97

#: Limits of what a file's header may claim: a FLAC file of silence becomes a thousand times larger when it is
#: decoded.
MAX_SAMPLE_RATE = 192_000
RATES = range(1_000, MAX_SAMPLE_RATE + 1)
MAX_CHANNELS = 8
#: Frames x channels: a minute of 8 channels at 192 kHz, or an hour of one channel at 24 kHz.
MAX_SAMPLES = 60 * MAX_SAMPLE_RATE * MAX_CHANNELS
#: Frames x channels that are decoded at a time.
BLOCK_SAMPLES = 1 << 18
_BLOCK_SECONDS = 0.4
_HOPS_PER_BLOCK = 4
_ABSOLUTE_GATE_LUFS = -70.0
_RELATIVE_GATE_LU = -10.0
_OFFSET_LUFS = -0.691
#: The filters of the K-weighting: gain (dB), frequency (Hz) and Q of the high shelf; frequency and Q of the
#: high pass.
_SHELF_DB = 4.0
_SHELF_HZ = 1500.0
_SHELF_Q = math.sqrt(0.5)
_PASS_HZ = 38.0
_PASS_Q = 0.5
#: Number of samples that a filter processes at a time.
_FILTERED_SAMPLES = 1 << 15
_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_MAX_WAV_SAMPLES = (2**32 - 1 - _WAV_HEADER.size) // 2

#: Container and coding of the formats that libsndfile writes, by libsndfile's names.
CONTAINERS = {
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
}
#: Positions in an Ogg page of the stream number, the checksum, and the number of segments.
_OGG_SERIAL = slice(14, 18)
_OGG_CHECKSUM = slice(22, 26)
_OGG_SEGMENTS = 26
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def decode(
    data: bytes,
    sample_rate: int | None = None,
    *,
    max_seconds: float = 600.0,
    channel: int | None = None,
    quality: Literal["HQ", "VHQ"] = "HQ",
) -> tuple[Samples, int]:
    """Mono samples (float32 [samples]) and their rate in Hz, from a WAV, FLAC, OGG, MP3 or AIFF file.

    Averages the channels, or takes only the one with the index `channel`. Resamples to `sample_rate`, if
    given, with soxr in this `quality`; VHQ is for models whose reference implementation uses it. Decodes in
    blocks, and never more than `max_seconds` and `MAX_SAMPLES`, whatever length the header claims. Raises
    `InputError`: `input.audio_unreadable` for data that is not audio, is empty, holds values that are not
    numbers, has a rate outside `RATES`, or has more than `MAX_CHANNELS`; `input.too_long` for more than
    `max_seconds` or `MAX_SAMPLES`.
    """
    blocks = list[Samples]()
    with _opened(data, max_seconds) as file:
        rate = file.samplerate
        left = min(int(max_seconds * rate), MAX_SAMPLES // file.channels)
        # An MP3 is one block: soundfile seeks after each block, and libmpg123 then restarts within the file
        # and prints warnings to standard error.
        size = file.frames if file.format == "MP3" else BLOCK_SAMPLES // file.channels
        while len(block := np.asarray(file.read(size, dtype="float32", always_2d=True), np.float32)):
            left -= len(block)
            if left < 0:
                raise _too_long(max_seconds)
            if file.channels == 1:
                blocks.append(block.reshape(-1))
            elif channel is None:
                blocks.append(block.mean(axis=1, dtype=np.float32))
            else:
                blocks.append(block[:, channel].copy())
    if not blocks:
        raise unreadable("The audio is empty.")
    mono = np.concatenate(blocks) if len(blocks) > 1 else blocks[0]
    # The sum is finite only if all samples are, and takes a tenth of the time of a check of each sample.
    if not math.isfinite(float(mono.sum(dtype=np.float64))):
        raise unreadable("The audio holds values that are not numbers.")
    if sample_rate is not None and sample_rate != rate:
        mono = soxr.resample(mono, rate, sample_rate, quality=quality)
        rate = sample_rate
    return np.ascontiguousarray(mono, dtype=np.float32), rate


def read_header(data: bytes, max_seconds: float) -> soundfile.SoundFile:
    """Reads the header of an encoded file: the returned file is closed, but has `format`, `frames`,
    `channels` and `samplerate`. Raises `InputError` like `decode` if the header is invalid or exceeds its
    limits."""
    with _opened(data, max_seconds) as file:
        return file


@contextmanager
def _opened(data: bytes, max_seconds: float) -> Generator[soundfile.SoundFile]:
    """libsndfile reads the descriptor of a file in memory without the GIL, for which it waits a hundred times if
    it reads a Python object, as it does if no descriptor is free."""
    memory: int | io.BytesIO
    try:
        with ExitStack() as stack:
            try:
                memory = share(data)
                stack.callback(os.close, memory)
                os.lseek(memory, 0, os.SEEK_SET)
            except OSError:
                memory = io.BytesIO(data)
            file = stack.enter_context(soundfile.SoundFile(memory, closefd=False))
            rate = file.samplerate
            frames = file.frames
            channels = file.channels
            if rate not in RATES or not 0 < channels <= MAX_CHANNELS:
                raise unreadable(
                    f"The audio has {channels} channels at {rate} Hz; 1 to {MAX_CHANNELS} channels at {RATES[0]} to {MAX_SAMPLE_RATE} Hz are supported."
                )
            if frames > max_seconds * rate or frames * channels > MAX_SAMPLES:
                raise _too_long(max_seconds)
            yield file
    except (soundfile.SoundFileError, ValueError, TypeError) as error:
        raise unreadable("The audio cannot be read.") from error


def encode(samples: Samples, sample_rate: int, audio_format: AudioFormat) -> bytes:
    """Encodes samples, [samples] or [samples, channels], as a file; values outside [-1, 1] are clipped. `wav`
    and `flac` hold 16-bit PCM.

    Equal samples give equal bytes as long as the version of libsndfile and its encoders is the same. A reader
    gets as many samples as were written, since MP3 and Opus files record what the encoder added. Raises
    `SynthesisError` (`synth.nan`) for samples that are not numbers, `ConfigError` for an unknown format, for
    a sample rate that the format does not support, or for more audio than fits into a WAV file.
    """
    pcm = to_pcm(samples)
    file = io.BytesIO()
    encode_pcm([pcm], len(pcm), sample_rate, audio_format, file, pcm[:1].size or 1)
    return file.getvalue()


def to_pcm(samples: Samples) -> NDArray[np.int16]:
    """Converts samples of any shape to 16-bit PCM; values outside [-1, 1] are clipped. Raises `SynthesisError`
    (`synth.nan`) for samples that are not numbers."""
    # Each call of NumPy may switch to another thread, so clipping, which most speech does not need, is
    # skipped if possible.
    highest = peak(samples)
    if not math.isfinite(highest):
        raise SynthesisError(
            ErrorCode.SYNTH_NAN,
            "The speech holds values that are not numbers.",
            "Try again, or report the model.",
        )
    if highest > 1:
        samples = np.clip(samples, np.float32(-1), np.float32(1))
    scaled = samples * np.float32(32767)
    np.rint(scaled, out=scaled)
    return scaled.astype("<i2")


def encode_pcm(
    blocks: Iterable[NDArray[np.int16]],
    samples: int,
    sample_rate: int,
    audio_format: AudioFormat,
    file: BinaryIO,
    channels: int = 1,
) -> None:
    """Encodes `samples` samples of 16-bit PCM, which come in blocks, [samples] or [samples, channels], into an
    empty file. Raises `ConfigError` like `encode`."""
    if audio_format == "wav":
        if samples * channels > _MAX_WAV_SAMPLES:
            raise invalid("The speech does not fit into a WAV file of 4 GiB.", "Use flac.")
        file.write(wav_header(sample_rate, 2 * samples * channels, channels=channels))
        file.writelines(block.data for block in blocks)
        return
    if audio_format not in CONTAINERS:
        raise invalid(
            f"Unknown audio format {audio_format!r}.", f"Choose one of: {', '.join(AUDIO_FORMATS)}."
        )
    check_rate(audio_format, sample_rate)
    container, coding = CONTAINERS[audio_format]
    with soundfile.SoundFile(file, "w", sample_rate, channels, coding, format=container) as written:
        for block in blocks:
            written.write(block)
    if container == "OGG":
        file.seek(0)
        data = _with_hashed_serial(file.read())
        file.seek(0)
        file.write(data)


def wav_header(
    sample_rate: int, data_bytes: int | None, tag: int = 1, width: int = 2, channels: int = 1
) -> bytes:
    """The header of a WAV file with this format tag and bytes per sample. `data_bytes` None: a stream of
    unknown length, which players read to its end."""
    riff, data = (data_bytes + 36, data_bytes) if data_bytes is not None else (0xFFFFFFFF, 0xFFFFFFFF)
    frame_bytes = width * channels
    facts = (16, tag, channels, sample_rate, frame_bytes * sample_rate, frame_bytes, 8 * width)
    return _WAV_HEADER.pack(b"RIFF", riff, b"WAVE", b"fmt ", *facts, b"data", data)


def resample(samples: Samples, sample_rate: int, wanted: int) -> Samples:
    """Resamples samples, [samples] or [samples, channels], to the rate `wanted` in Hz, with soxr in high quality (HQ: 20 bits,
    while files have 16).

    The filter may overshoot: if the new peak exceeds both the former peak and `PEAK_LIMIT`, all samples are
    scaled down to the higher one of these. If the rates are equal, the samples are returned unchanged.
    """
    if sample_rate == wanted or not len(samples):
        return samples
    made: Samples = soxr.resample(samples, sample_rate, wanted, quality="HQ")
    limit = max(peak(samples), PEAK_LIMIT)
    after = peak(made)
    return made * np.float32(limit / after) if after > limit else made


def loudness(samples: Samples, sample_rate: int) -> float:
    """Integrated loudness in LUFS of mono samples [samples]; -inf for silence.

    Follows ITU-R BS.1770-4 as pyloudnorm does: K-weighting, blocks of 400 ms that overlap by 75 %, and gates
    at -70 LUFS and at 10 LU below the level after the first gate. The last block may lack up to half a hop.
    Audio shorter than a block is one block.
    """
    if len(samples) == 0:
        return -math.inf
    power = np.square(_filtered(*_k_weighting(sample_rate), samples))
    hop = _BLOCK_SECONDS / _HOPS_PER_BLOCK * sample_rate
    if len(samples) < _HOPS_PER_BLOCK * hop:
        blocks = np.array([power.mean()])
    else:
        hops = round((len(samples) / sample_rate - _BLOCK_SECONDS) / (hop / sample_rate)) + _HOPS_PER_BLOCK
        bounds = (np.arange(hops + 1) * hop).astype(np.intp)
        sums = np.add.reduceat(power[: bounds[-1]], bounds[:-1])
        blocks = np.convolve(sums, np.ones(_HOPS_PER_BLOCK), "valid") / (_BLOCK_SECONDS * sample_rate)
    blocks = blocks[blocks >= 10 ** ((_ABSOLUTE_GATE_LUFS - _OFFSET_LUFS) / 10)]
    if len(blocks) == 0:
        return -math.inf
    blocks = blocks[blocks > blocks.mean() * 10 ** (_RELATIVE_GATE_LU / 10)]
    return _OFFSET_LUFS + 10 * math.log10(blocks.mean())


def normalize_loudness(samples: Samples, sample_rate: int) -> tuple[Samples, float]:
    """Scales samples [samples] to `TARGET_LUFS`, or to a peak of `PEAK_LIMIT` if the target would exceed it.
    Returns them and their loudness in LUFS.

    All samples get the same gain. Silence is returned unchanged, with a loudness of -inf.
    """
    before = loudness(samples, sample_rate)
    if before == -math.inf:
        return samples, before
    gain = min(10 ** ((TARGET_LUFS - before) / 20), PEAK_LIMIT / peak(samples))
    return samples * np.float32(gain), before + 20 * math.log10(gain)


@lru_cache(maxsize=16)
def _k_weighting(sample_rate: int) -> tuple[FloatArray, FloatArray]:
    """Numerator and denominator of the K-weighting as one filter, each [5]: a single pass takes a third of
    the time of two.

    Its stages are a high shelf and a high pass, as defined in the Audio EQ Cookbook of R. Bristow-Johnson.
    """
    cosine, width = _angle(_SHELF_HZ, _SHELF_Q, sample_rate)
    gain = 10 ** (_SHELF_DB / 40)
    more = gain + 1
    edge = 2 * math.sqrt(gain) * width

    def polynomial(less: float) -> FloatArray:
        middle = more + less * cosine
        return np.array([middle + edge, -2 * (less + more * cosine), middle - edge])

    shelf = gain * polynomial(gain - 1)
    below_shelf = polynomial(1 - gain)
    turn, spread = _angle(_PASS_HZ, _PASS_Q, sample_rate)
    high_pass = (1 + turn) / 2 * np.array([1.0, -2.0, 1.0])
    below_pass = np.array([1 + spread, -2 * turn, 1 - spread])
    numerator = np.convolve(shelf, high_pass)
    denominator = np.convolve(below_shelf, below_pass)
    return numerator / denominator[0], denominator / denominator[0]


def _angle(hz: float, quality: float, sample_rate: int) -> tuple[float, float]:
    """The cosine of a filter's angular frequency, and the cookbook's alpha: the sine divided by twice the
    quality."""
    angle = 2 * math.pi * hz / sample_rate
    return math.cos(angle), math.sin(angle) / (2 * quality)


def _filtered(numerator: FloatArray, denominator: FloatArray, samples: Samples) -> NDArray[np.floating[Any]]:
    """Applies a recursive filter, which is initially at rest and whose denominator begins with 1, to
    `samples` [samples].

    The output is the solution of a triangular linear system with a narrow band, which BLAS solves a block at
    a time. `scipy.signal` has a function for such filters, but takes half a second to import.
    """
    from scipy.linalg.blas import get_blas_funcs

    solved: Any = get_blas_funcs("tbsv", dtype=np.float64)
    order = len(denominator) - 1
    found = np.convolve(samples.astype(np.float64), numerator)[: len(samples)]
    band = np.asfortranarray(np.repeat(denominator[:, None], min(len(found), _FILTERED_SAMPLES), axis=1))
    for begin in range(0, len(found), _FILTERED_SAMPLES):
        piece = found[begin : begin + _FILTERED_SAMPLES]
        for at in range(min(order, begin, len(piece))):
            piece[at] -= denominator[:at:-1] @ found[begin + at - order : begin]
        piece[:] = solved(order, band[:, : len(piece)], piece, lower=1, diag=1)
    return found


def _with_hashed_serial(data: bytes) -> bytes:
    """Replaces the stream number of an Ogg file, which libsndfile chooses at random, with a hash of its
    content, so that equal speech gives equal files.

    The number must differ between files with different content, because joined files keep their numbers (RFC
    3533, section 4).
    """
    pages = list[bytearray]()
    end = 0
    while end < len(data):
        begin = end
        table = end + _OGG_SEGMENTS + 1
        sizes = data[table : table + data[table - 1]]
        end = table + len(sizes) + sum(sizes)
        pages.append(bytearray(data[begin:end]))
        pages[-1][_OGG_SERIAL] = pages[-1][_OGG_CHECKSUM] = bytes(4)
    serial = struct.pack("<I", zlib.crc32(b"".join(pages)))
    for page in pages:
        page[_OGG_SERIAL] = serial
        # Ogg's CRC-32: zlib's polynomial with reversed bits in each byte, starting at 0, without inversion.
        register = zlib.crc32(page.translate(_REVERSED_BITS), 0xFFFFFFFF) ^ 0xFFFFFFFF
        page[_OGG_CHECKSUM] = struct.pack("<I", int(f"{register:032b}"[::-1], 2))
    return b"".join(pages)


def peak(samples: Samples) -> float:
    """The largest amplitude of samples [samples]; 0 if there are none."""
    # Two passes that only read take less time than one that writes.
    return max(float(samples.max(initial=0.0)), -float(samples.min(initial=0.0)))


def unreadable(message: str, advice: str = "Give a WAV, FLAC, OGG or MP3 file.") -> InputError:
    """The error for data that is not usable audio (`input.audio_unreadable`)."""
    return InputError(ErrorCode.INPUT_AUDIO_UNREADABLE, message, advice)


def _too_long(max_seconds: float) -> InputError:
    return input_too_long(
        f"The audio is longer than {max_seconds:g} seconds, or has more than {MAX_SAMPLES:,} samples in all its channels.",
        "Cut it, or give it with one channel and a lower rate.",
    )


#: Length in seconds of the frames in which silence is detected.
FRAME_SECONDS = 0.02
#: A frame is silent if it is 40 dB below the loudest one, or below -60 dBFS.
_RELATIVE_POWER = 1e-4
_MIN_POWER = 1e-6


def frame_powers(samples: Samples, sample_rate: int) -> NDArray[np.float32]:
    """The mean square of each complete frame of 20 ms, [frames]; of all samples [samples] if they are shorter
    than a frame."""
    length = max(1, int(FRAME_SECONDS * sample_rate))
    count = len(samples) // length
    framed = samples[: count * length].reshape(count, length) if count else samples.reshape(1, -1)
    return np.vecdot(framed, framed) / np.float32(framed.shape[1])


def sound_floor(loudest: float) -> float:
    """The power above which a frame has sound, in speech whose loudest frame has that power."""
    return max(loudest * _RELATIVE_POWER, _MIN_POWER)


def activity(powers: NDArray[np.float32]) -> tuple[int, int, float]:
    """Returns (number of frames with sound, longest run of silent frames between two of them, mean power of
    the frames with sound) for the result of `frame_powers`, [frames].
    """
    active = powers > np.float64(sound_floor(float(powers.max())))
    sounding = int(np.count_nonzero(active))
    power = float(powers[active].mean(dtype=np.float64)) if sounding else 0.0
    return sounding, longest_pause(active), power


def longest_pause(active: NDArray[np.bool_]) -> int:
    """Length in frames of the longest silence between two sounds. `active`: bool [frames], whether a frame has sound."""
    return int(np.diff(np.flatnonzero(active)).max(initial=1)) - 1


def trim_silence(speech: Speech, keep_ms: int) -> Speech:
    """The speech with at most `keep_ms` of silence at each end, and its words at their new times; unchanged if
    all is silent."""
    samples = speech.samples
    rate = speech.sample_rate
    if len(samples) == 0:
        return speech
    powers = frame_powers(samples, rate)
    active = np.flatnonzero(powers > sound_floor(float(powers.max())))
    if len(active) == 0:
        return speech
    length = max(1, int(FRAME_SECONDS * rate))
    keep = keep_ms * rate // 1000
    begin = max(0, int(active[0]) * length - keep)
    samples = samples[begin : (int(active[-1]) + 1) * length + keep]
    words, phonemes = (
        tuple([word.moved(-begin / rate, len(samples) / rate) for word in said])
        for said in (speech.words, speech.phonemes)
    )
    return dataclasses.replace(speech, samples=samples, words=words, phonemes=phonemes)


#: Constants of SparkTTS's volume normalization (utils/audio.py, `audio_volume_normalize`).
_QUIET_PEAK = 0.1
_PEAK_FLOOR = 1e-3
_AUDIBLE = 0.01
_MIN_AUDIBLE = 10
_LOUDNESS = 0.2
_GAINS = (0.1, 10.0)


def normalize_volume(samples: NDArray[np.floating]) -> NDArray[np.floating]:
    """Scales samples [n] so that the mean of their loud part (percentiles 90 to 99 of audible samples) is 0.2,
    with a peak of up to 1."""
    levels = np.sort(np.abs(samples))
    if levels[-1] < _QUIET_PEAK:
        samples = samples / max(levels[-1], _PEAK_FLOOR) * _QUIET_PEAK
    levels = levels[levels > _AUDIBLE]
    if len(levels) <= _MIN_AUDIBLE:
        return samples
    loud = np.mean(levels[int(0.9 * len(levels)) : int(0.99 * len(levels))])
    samples = samples * np.clip(_LOUDNESS / loud, *_GAINS)
    peak = np.max(np.abs(samples))
    return samples / peak if peak > 1 else samples

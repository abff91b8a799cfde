"""Decoding, encoding and loudness."""

from __future__ import annotations

import io
import math
import os
import random
import resource
import wave

import numpy as np
import pyloudnorm
import pytest
import soundfile
from numpy.typing import NDArray
from scipy.signal import lfilter

from pipelines import audio
from pipelines.audio import (
    BLOCK_SAMPLES,
    MAX_CHANNELS,
    MAX_SAMPLES,
    RATES,
    decode,
    encode,
    loudness,
    normalize_loudness,
    read_header,
)
from pipelines.errors import ConfigError, ErrorCode, InputError, SynthesisError

RATE = 24_000


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0, level: float = 0.25) -> NDArray[np.float32]:
    return (level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def speech_like(seconds: float, rate: int = RATE) -> NDArray[np.float32]:
    noise = np.random.default_rng(1).standard_normal(round(seconds * rate))
    bursts = 0.6 + 0.5 * np.sin(2 * np.pi * 1.3 * np.arange(len(noise)) / rate)
    return (0.1 * noise * np.maximum(bursts, 0)).astype(np.float32)


def file_bytes(
    samples: NDArray[np.float32], rate: int, file_format: str, subtype: str | None = None
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=file_format, subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("file_format", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("AIFF", "PCM_16")]
)
def test_decode_keeps_samples(file_format: str, subtype: str) -> None:
    samples, rate = decode(file_bytes(tone(0.5), RATE, file_format, subtype))
    assert rate == RATE
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, tone(0.5), atol=2**-15)


@pytest.mark.parametrize("file_format", ["WAV", "FLAC", "OGG", "MP3"])
def test_decode_needs_no_free_descriptor(file_format: str) -> None:
    data = file_bytes(tone(0.5), RATE, file_format)
    expected, _ = decode(data)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        samples, rate = decode(data)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert rate == RATE
    np.testing.assert_array_equal(samples, expected)


@pytest.mark.parametrize("file_format", ["OGG", "MP3"])
def test_decode_reads_lossy_files(file_format: str) -> None:
    samples, rate = decode(file_bytes(tone(1.0), RATE, file_format))
    assert rate == RATE
    assert abs(len(samples) - RATE) < 3000
    assert loudness(samples, rate) == pytest.approx(loudness(tone(1.0), RATE), abs=0.5)


def test_decode_averages_channels() -> None:
    both = np.stack([tone(0.2), np.zeros_like(tone(0.2))], axis=1)
    samples, _ = decode(file_bytes(both, RATE, "WAV", "FLOAT"))
    np.testing.assert_allclose(samples, tone(0.2) / 2, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_decode_resamples(rate: int) -> None:
    samples, found = decode(file_bytes(tone(1.0, rate), rate, "WAV", "FLOAT"), RATE)
    assert (found, len(samples)) == (RATE, RATE)
    np.testing.assert_allclose(samples[2000:-2000], tone(1.0)[2000:-2000], atol=2e-3)


def test_what_is_no_audio_is_refused() -> None:
    wav = encode(tone(0.1), RATE, "wav")
    nan = np.full(100, np.nan, np.float32)
    empty = np.zeros(0, np.float32)
    for data in (
        b"",
        b"RIFF",
        b"<html>",
        wav[:20],
        file_bytes(nan, RATE, "WAV", "FLOAT"),
        file_bytes(empty, RATE, "WAV", "PCM_16"),
    ):
        with pytest.raises(InputError) as caught:
            decode(data)
        assert caught.value.code is ErrorCode.INPUT_AUDIO_UNREADABLE


def test_damaged_files_are_refused_or_read_never_worse() -> None:
    chance = random.Random(5)
    for original in (
        encode(tone(0.05), RATE, "wav"),
        encode(tone(0.05), RATE, "flac"),
        file_bytes(tone(0.05), RATE, "OGG"),
    ):
        for _ in range(150):
            data = bytearray(original[: chance.randrange(1, len(original) + 1)])
            for _ in range(chance.randrange(8)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            try:
                samples, _ = decode(bytes(data), RATE)
            except InputError:
                continue
            assert len(samples) > 0


class Decoded:
    """Counts what is decoded, frames x channels: the largest block, and all together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest = self.all = 0
        read = soundfile.SoundFile.read

        def counted(file: soundfile.SoundFile, *given: object, **named: object) -> NDArray[np.float32]:
            block = read(file, *given, **named)
            self.largest = max(self.largest, block.size)
            self.all += block.size
            return block

        monkeypatch.setattr(soundfile.SoundFile, "read", counted)


@pytest.mark.parametrize(
    ("seconds", "rate", "channels", "code"),
    [
        (0.01, RATES[-1] + 1, 1, ErrorCode.INPUT_AUDIO_UNREADABLE),
        (0.01, 655_350, 1, ErrorCode.INPUT_AUDIO_UNREADABLE),
        (0.01, RATE, MAX_CHANNELS + 1, ErrorCode.INPUT_AUDIO_UNREADABLE),
        (60.01, 8_000, 1, ErrorCode.INPUT_TOO_LONG),
        (60.0, 1_000, 8, None),
        (0.01, RATES[-1], 8, None),
    ],
)
def test_what_a_file_claims_is_bounded_before_it_is_decoded(
    seconds: float, rate: int, channels: int, code: ErrorCode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = np.zeros((round(seconds * rate), channels), np.float32)
    data = file_bytes(silence, rate, "WAV", "PCM_16")
    decoded = Decoded(monkeypatch)
    if code is None:
        assert read_header(data, 60.0).frames == len(silence)
        assert (decoded.all, len(decode(data, max_seconds=60.0)[0])) == (0, len(silence))
        return
    for read in (read_header, lambda data, limit: decode(data, max_seconds=limit)):
        with pytest.raises(InputError) as caught:
            read(data, 60.0)
        assert caught.value.code is code
    assert decoded.all == 0


def test_many_samples_of_a_small_file_are_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    wav = bytearray(file_bytes(np.zeros((100, 8), np.float32), 192_000, "FLAC", "PCM_16"))
    # The total of frames stands in the last 36 bits of the first 18 of STREAMINFO's bytes, behind `fLaC` and
    # a header of 4.
    frames = MAX_SAMPLES // 8 + 1
    wav[8 + 13] = wav[8 + 13] & 0xF0 | frames >> 32
    wav[8 + 14 : 8 + 18] = (frames & 0xFFFFFFFF).to_bytes(4, "big")
    decoded = Decoded(monkeypatch)
    with pytest.raises(InputError) as caught:
        decode(bytes(wav), max_seconds=600.0)
    assert (caught.value.code, decoded.all) == (ErrorCode.INPUT_TOO_LONG, 0)


def test_a_file_is_decoded_in_blocks_and_no_further_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = np.stack([speech_like(4.0, 48_000) * level for level in (1, 0.5, -0.25)], axis=1)
    data = file_bytes(sound, 48_000, "FLAC", "PCM_24")
    whole, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    decoded = Decoded(monkeypatch)
    np.testing.assert_array_equal(decode(data)[0], whole.mean(axis=1, dtype=np.float32))
    assert decoded.largest <= BLOCK_SAMPLES < sound.size
    # What claims nothing of its length is read no further than a block beyond its bound.
    unknown = bytearray(data)
    unknown[8 + 13] &= 0xF0
    unknown[8 + 14 : 8 + 18] = bytes(4)
    decoded.all = 0
    with pytest.raises(InputError) as caught:
        decode(bytes(unknown), max_seconds=0.5)
    assert (caught.value.code, decoded.all <= BLOCK_SAMPLES) == (ErrorCode.INPUT_TOO_LONG, True)


def test_long_audio_is_refused_by_what_is_read_and_by_what_is_claimed() -> None:
    with pytest.raises(InputError) as caught:
        decode(encode(tone(2.0), RATE, "flac"), max_seconds=1.0)
    assert caught.value.code is ErrorCode.INPUT_TOO_LONG
    assert len(decode(encode(tone(2.0), RATE, "flac"), max_seconds=2.0)[0]) == 2 * RATE


def test_wav_is_what_the_standard_library_reads() -> None:
    with wave.open(io.BytesIO(encode(tone(0.3), RATE, "wav"))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        pcm = np.frombuffer(file.readframes(RATE), "<i2")
    np.testing.assert_array_equal(pcm, np.rint(tone(0.3) * np.float32(32767)))


@pytest.mark.parametrize("audio_format", ["wav", "flac"])
def test_encode_clips_and_repeats_itself(audio_format: str) -> None:
    samples = np.array([0, 1, -1, 1.5, -7, 0.5], np.float32)
    data = encode(samples, RATE, audio_format)  # type: ignore[arg-type]
    assert data == encode(samples.copy(), RATE, audio_format)  # type: ignore[arg-type]
    found = soundfile.read(io.BytesIO(data), dtype="int16")[0]
    assert found.tolist() == [0, 32767, -32767, 32767, -32767, 16384]
    assert samples[3] == 1.5


def test_encode_refuses_what_is_not_a_number_and_what_it_does_not_know() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(SynthesisError) as caught:
            encode(np.array([0, bad], np.float32), RATE, "wav")
        assert caught.value.code is ErrorCode.SYNTH_NAN
    with pytest.raises(ConfigError, match="wav, flac"):
        encode(tone(0.1), RATE, "mp4")  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [16_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("seconds", [0.4, 0.43, 0.46, 1.0, 1.075, 7.3])
def test_loudness_is_that_of_pyloudnorm(rate: int, seconds: float) -> None:
    samples = speech_like(seconds, rate)
    samples[-len(samples) // 4 :] *= 0.1
    assert loudness(samples, rate) == pytest.approx(
        pyloudnorm.Meter(rate).integrated_loudness(samples), abs=0.01
    )


@pytest.mark.parametrize("rate", [8_000, 24_000, 192_000])
@pytest.mark.parametrize("samples", [1, 4, 1 << 15, (1 << 15) + 3, 100_000])
def test_the_filter_of_loudness_is_that_of_scipy(rate: int, samples: int) -> None:
    """With the stages of pyloudnorm, across the blocks that it runs in."""
    numerator = denominator = np.ones(1)
    for stage in pyloudnorm.Meter(rate)._filters.values():
        numerator, denominator = (
            np.convolve(numerator, stage.passband_gain * stage.b),
            np.convolve(denominator, stage.a),
        )
    noise = np.random.default_rng(samples).standard_normal(samples).astype(np.float32)
    made = audio._filtered(*audio._k_weighting(rate), noise)
    assert made == pytest.approx(lfilter(numerator, denominator, noise), abs=1e-6)


def test_loudness_of_the_reference_tone() -> None:
    # BS.1770-4: a full-scale sine of 997 Hz in one front channel has -3.01 LUFS; EBU Tech 3341 allows 0.1 LU.
    assert loudness(tone(5, 48_000, 997, 1.0), 48_000) == pytest.approx(-3.01, abs=0.1)


def test_gates_ignore_pauses() -> None:
    pause = np.zeros(5 * RATE, np.float32)
    assert loudness(np.concatenate([tone(5), pause]), RATE) == pytest.approx(loudness(tone(5), RATE), abs=0.3)


@pytest.mark.parametrize("seconds", [0.05, 0.399, 0.4, 3.0])
def test_normalize_reaches_the_target(seconds: float) -> None:
    samples, lufs = normalize_loudness(tone(seconds, level=0.01), RATE)
    assert lufs == pytest.approx(-23.0, abs=1e-6)
    assert loudness(samples, RATE) == pytest.approx(-23.0, abs=0.01)
    assert samples.dtype == np.float32


def test_normalize_stops_at_the_peak() -> None:
    clicks = tone(2.0, level=0.001)
    clicks[::8000] = 0.5
    samples, lufs = normalize_loudness(clicks, RATE)
    assert float(np.abs(samples).max()) == pytest.approx(0.97)
    assert lufs < -23
    assert loudness(samples, RATE) == pytest.approx(lufs, abs=0.01)


@pytest.mark.parametrize("length", [0, 10, 48_000])
def test_silence_stays_silence(length: int) -> None:
    samples, lufs = normalize_loudness(np.zeros(length, np.float32), RATE)
    assert lufs == -math.inf
    assert len(samples) == length
    assert not samples.any()

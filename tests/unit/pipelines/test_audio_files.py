"""Encoded files: what a reader gets from them, equal bytes for equal samples, and the rates that formats
hold."""

from __future__ import annotations

import io
import struct
from itertools import pairwise

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from pipelines.audio import BLOCK_SAMPLES, PEAK_LIMIT, decode, encode, loudness, resample
from pipelines.audio_format import AUDIO_FORMATS, CONTENT_TYPES, RATES_OF, AudioFormat, check_rate, holds_rate
from pipelines.errors import ConfigError, ErrorCode
from pipelines.serving.encoding import whole_file

LENGTHS = (1, 100, 1151, 1152, 1153, 4801)


def speech_like(samples: int, rate: int) -> NDArray[np.float32]:
    times = np.arange(samples) / rate
    voiced = sum(
        np.sin(2 * np.pi * hertz * times) / place for place, hertz in enumerate((140, 280, 560, 1120), 1)
    )
    return (
        0.1 * voiced * (1 + np.sin(9 * times)) + 0.005 * np.random.default_rng(3).standard_normal(samples)
    ).astype(np.float32)


@pytest.mark.parametrize(
    ("audio_format", "rate"), [(name, rate) for name, rates in RATES_OF.items() for rate in rates]
)
def test_a_reader_of_a_lossy_file_gets_as_many_samples_as_were_written_in_their_places(
    audio_format: AudioFormat, rate: int
) -> None:
    for length in LENGTHS:
        data = encode(speech_like(length, rate), rate, audio_format)
        samples, found = soundfile.read(io.BytesIO(data), dtype="float32")
        assert (len(samples), found, soundfile.info(io.BytesIO(data)).frames) == (length, rate, length)
    written = speech_like(rate, rate)
    samples, _ = decode(encode(written, rate, audio_format))
    near = slice(rate // 4, -rate // 4)
    likeness = {
        shift: float(np.corrcoef(written[near], np.roll(samples, shift)[near])[0, 1])
        for shift in range(-20, 21)
    }
    assert max(likeness, key=lambda shift: likeness[shift]) in range(-2, 3), (
        "what the encoder adds is not in front"
    )
    assert max(likeness.values()) > 0.95
    assert loudness(samples, rate) == pytest.approx(loudness(written, rate), abs=0.5)


@pytest.mark.parametrize("audio_format", AUDIO_FORMATS)
def test_equal_samples_give_equal_bytes(audio_format: AudioFormat) -> None:
    samples = speech_like(30_000, 24_000)
    data = encode(samples, 24_000, audio_format)
    encode(samples[:999], 24_000, audio_format)
    assert encode(samples.copy(), 24_000, audio_format) == data == whole_file(samples, 24_000, audio_format)


def test_streams_of_opus_have_numbers_of_their_own_and_right_checksums() -> None:
    files = [encode(speech_like(length, 16_000), 16_000, "opus") for length in (16_000, 16_001, 90_000)]
    assert len({data[14:18] for data in files}) == len(files)
    for data in files:
        begins = [place for place in range(len(data)) if data[place : place + 4] == b"OggS"]
        assert len(begins) >= 3
        for begin, end in pairwise([*begins, len(data)]):
            page = bytearray(data[begin:end])
            said, page[22:26] = struct.unpack_from("<I", page, 22)[0], bytes(4)
            assert (page[14:18], checksum(page)) == (data[14:18], said)


def checksum(page: bytearray) -> int:
    """CRC-32 of RFC 3533, section 6, bit by bit."""
    register = 0
    for byte in page:
        register ^= byte << 24
        for _ in range(8):
            register = (register << 1 ^ (0x04C11DB7 if register & 1 << 31 else 0)) & 0xFFFFFFFF
    return register


@pytest.mark.parametrize(
    ("audio_format", "rate"), [("opus", 22_050), ("opus", 44_100), ("mp3", 13_000), ("mp3", 96_000)]
)
def test_a_rate_that_a_format_does_not_hold_is_refused_with_those_that_it_holds(
    audio_format: AudioFormat, rate: int
) -> None:
    for refused in (
        lambda: check_rate(audio_format, rate),
        lambda: encode(np.zeros(100, np.float32), rate, audio_format),
    ):
        with pytest.raises(ConfigError, match=f"{audio_format} has no sample rate of {rate} Hz") as caught:
            refused()
        assert caught.value.code is ErrorCode.CONFIG_INVALID
        assert "24000 or 48000 Hz" in caught.value.advice or "44100 or 48000 Hz" in caught.value.advice
    assert (
        len(soundfile.read(io.BytesIO(whole_file(speech_like(rate, rate), rate, audio_format)))[0]) == 48_000
    )
    assert holds_rate("wav", rate)
    assert holds_rate("flac", rate)


@pytest.mark.parametrize("wanted", [8_000, 11_025, 16_000, 44_100, 48_000])
def test_another_rate_keeps_the_sound_and_its_length(wanted: int) -> None:
    tone = (0.25 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000)).astype(np.float32)
    found = resample(tone, 24_000, wanted)
    expected = 0.25 * np.sin(2 * np.pi * 440 * np.arange(wanted) / wanted)
    assert (len(found), found.dtype) == (wanted, np.float32)
    np.testing.assert_allclose(
        found[wanted // 10 : -wanted // 10], expected[wanted // 10 : -wanted // 10], atol=1e-4
    )
    assert resample(tone, 24_000, 24_000) is tone


def test_another_rate_raises_no_peak_above_the_limit() -> None:
    square = np.where(np.arange(24_000) // 30 % 2, 1, -1).astype(np.float32)
    for level in (0.5, 0.96, 1.0):
        found = resample(square * np.float32(level), 24_000, 16_000)
        assert float(np.abs(found).max()) <= max(level, PEAK_LIMIT) + 1e-6
        assert loudness(found, 16_000) == pytest.approx(loudness(square * np.float32(level), 24_000), abs=2)
    assert float(np.abs(resample(square * np.float32(0.5), 24_000, 16_000)).max()) > 0.5, (
        "a filter overshoots"
    )


def test_formats_have_media_types() -> None:
    assert set(CONTENT_TYPES) == set(AUDIO_FORMATS)


def test_a_long_mp3_is_read_without_a_word_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """The decoder complains of places that it is sent to within a file."""
    rate = 24_000
    samples, found = decode(encode(speech_like(BLOCK_SAMPLES + 70_000, rate), rate, "mp3"))
    assert (len(samples), found) == (BLOCK_SAMPLES + 70_000, rate)
    assert capfd.readouterr().err == ""

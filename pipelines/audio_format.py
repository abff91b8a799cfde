"""Formats of encoded audio: their names, the sample rates that they support, and their media types. Imports
no audio library."""

from __future__ import annotations

from typing import Literal, get_args

from pipelines.errors import invalid

AudioFormat = Literal["wav", "flac", "mp3", "opus"]
#: Each name is also the extension of the format's files.
AUDIO_FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
CONTENT_TYPES = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}
#: The only sample rates of MPEG layer III and of Opus, in Hz. The other formats support every rate.
RATES_OF = {
    "mp3": (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    "opus": (8_000, 12_000, 16_000, 24_000, 48_000),
}
#: Lossy formats: a reader gets other samples than were written.
LOSSY: frozenset[str] = frozenset({"mp3", "opus"})


def holds_rate(audio_format: str, sample_rate: int) -> bool:
    """Whether files of a format can have a sample rate."""
    return sample_rate in RATES_OF.get(audio_format, (sample_rate,))


def check_rate(audio_format: str, sample_rate: int) -> None:
    """Raises `config.invalid` for a sample rate in Hz that files of a format cannot have."""
    if not holds_rate(audio_format, sample_rate):
        *first, last = map(str, RATES_OF[audio_format])
        raise invalid(
            f"The format {audio_format} has no sample rate of {sample_rate} Hz.",
            f"Use a sample rate of {', '.join(first)} or {last} Hz, or the format flac.",
        )

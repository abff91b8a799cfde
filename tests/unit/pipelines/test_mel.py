"""The log-mel front end: filters of Slaney's scale, and where a tone shows up."""

from __future__ import annotations

import math

import pytest
import torch

from pipelines.qwen3_tts.speaker import log_mel, mel_bands


def mel_of(samples: torch.Tensor) -> torch.Tensor:
    """The log-mel spectrogram of one recording, [n] -> [n // 256, bands]."""
    (mel,), (frames,) = log_mel(samples[None], torch.tensor([len(samples)]), 24_000, 128)
    return mel.T[: int(frames)]


def centres(bands: int = 128) -> torch.Tensor:
    """Centre frequencies in Hz from the definition: linear below 1 kHz, 27 steps per factor of 6.4 above."""

    def hz(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1000 * math.exp(math.log(6.4) / 27 * (mel - 15))

    top = 15 + 27 * math.log(12) / math.log(6.4)
    return torch.tensor([hz(top * (i + 1) / (bands + 1)) for i in range(bands)])


def test_filters_have_equal_area_and_the_right_centres() -> None:
    filters = mel_bands(128, 24_000, torch.device("cpu"))
    assert filters.shape == (128, 513)
    assert (filters >= 0).all()
    wide = filters[40:]  # narrower ones catch too few bins for a sum to be their area
    areas = wide.sum(1) * 24_000 / 1024
    torch.testing.assert_close(areas, torch.ones_like(areas), atol=0.12, rtol=0)
    peaks = filters.argmax(1) * 24_000 / 1024
    assert (peaks - centres()).abs().max() < 24_000 / 1024


@pytest.mark.parametrize("hz", [300.0, 1000.0, 4000.0, 9000.0])
def test_a_tone_lands_in_its_band(hz: float) -> None:
    tone = 0.5 * torch.sin(2 * math.pi * hz * torch.arange(24_000) / 24_000)
    mel = mel_of(tone)
    assert mel.shape == (24_000 // 256, 128)
    band = int(mel[40].argmax())
    assert abs(band - int((centres() - hz).abs().argmin())) <= 1


def test_silence_is_finite_and_frames_follow_the_hop() -> None:
    assert torch.isfinite(mel_of(torch.zeros(24_000))).all()
    assert [len(mel_of(torch.zeros(n))) for n in (512, 767, 768, 24_000)] == [2, 2, 3, 93]

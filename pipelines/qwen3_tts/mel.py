"""Log-mel spectrogram of the speaker encoder's front end."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

N_FFT = 1024
HOP = 256
FMIN_HZ = 0.0
FMAX_HZ = 12_000.0
MAGNITUDE_FLOOR = 1e-9
MEL_FLOOR = 1e-5

_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27.0


def log_mel(samples: Tensor, sample_rate: int = 24_000, bands: int = 128) -> Tensor:
    """Log-mel spectrogram of mono audio, float32 on the CPU: samples [n] -> [n // 256, bands].

    n_fft = window = 1024 (periodic Hann), hop 256, 384 samples reflected at both ends, natural logarithm of mel magnitudes floored at
    1e-5. Needs more than 384 samples. Source: the reference's `mel_spectrogram`, whose filters are librosa's defaults.
    """
    border = (N_FFT - HOP) // 2
    audio = pad(samples.detach().to("cpu", torch.float32)[None, None], (border, border), mode="reflect")[0]
    window = torch.hann_window(N_FFT)
    spectrum = torch.stft(audio, N_FFT, hop_length=HOP, win_length=N_FFT, window=window, center=False, return_complex=True)
    magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + MAGNITUDE_FLOOR)
    mel = torch.matmul(slaney_filters(sample_rate, bands), magnitude)[0]
    return mel.clamp(min=MEL_FLOOR).log().T


@lru_cache(maxsize=4)
def slaney_filters(sample_rate: int, bands: int) -> Tensor:
    """Triangular mel filters of equal area on Slaney's mel scale (Auditory Toolbox, 1998): float32 [bands, N_FFT // 2 + 1]."""
    low, high = _hz_to_mel(FMIN_HZ), _hz_to_mel(FMAX_HZ)
    edges = _mel_to_hz(torch.linspace(low, high, bands + 2, dtype=torch.float64))
    bins = torch.linspace(0.0, sample_rate / 2.0, N_FFT // 2 + 1, dtype=torch.float64)
    widths = edges.diff()
    ramps = edges[:, None] - bins[None, :]
    rising = -ramps[:-2] / widths[:-1, None]
    falling = ramps[2:] / widths[1:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]).float()


def _hz_to_mel(hz: float) -> float:
    return hz / _LINEAR_HZ_PER_MEL if hz < _BREAK_HZ else _BREAK_MEL + math.log(hz / _BREAK_HZ) / _LOG_STEP


def _mel_to_hz(mel: Tensor) -> Tensor:
    return torch.where(mel < _BREAK_MEL, mel * _LINEAR_HZ_PER_MEL, _BREAK_HZ * torch.exp(_LOG_STEP * (mel - _BREAK_MEL)))

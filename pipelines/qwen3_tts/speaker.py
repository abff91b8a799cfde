"""Voices of the Base checkpoints: a recording to one vector of the talker's width (ECAPA-TDNN) and, to clone in context, to codes."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv1d, pad, relu, softmax

from kernels.registry import on_device
from pipelines.codec.decoder import CodecState
from pipelines.errors import ErrorCode, InputError
from pipelines.nn.checkpoint import Checkpoint, Loader, TensorSource, device_name, type_name
from pipelines.qwen3_tts.codec import Codec
from pipelines.qwen3_tts.codec_config import CodecConfig, SpeakerEncoderConfig
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.recording import RecordingCache, decode_recording, read_recording
from pipelines.recording_files import RecordingFiles

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


PREFIX = "speaker_encoder."
VARIANCE_FLOOR = 1e-12
#: Of how recordings are read and encoded; a higher one leaves kept voices of the one before unused.
_REVISION = 1


class SpeakerEncoder:
    """ECAPA-TDNN (Desplanques et al. 2020, arXiv 2005.07143) over log-mel frames.

    Takes the tensors `speaker_encoder.*` of the main checkpoint from `source`.
    """

    def __init__(
        self, config: SpeakerEncoderConfig, source: TensorSource, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.sample_rate = config.sample_rate
        channels, kernels, dilations = config.enc_channels, config.enc_kernel_sizes, config.enc_dilations
        load = Loader(source, PREFIX, dtype, self.device)
        self._first = _Conv(load.at("blocks.0.conv."), config.mel_dim, channels[0], kernels[0], dilations[0])
        self._blocks = [
            _SeRes2Net(load.at(f"blocks.{i}."), config, channels[i], kernels[i], dilations[i]) for i in range(1, len(channels) - 1)
        ]
        self._mfa = _Conv(load.at("mfa.conv."), channels[-1], channels[-1], kernels[-1], dilations[-1])
        self._attend = _Conv(load.at("asp.tdnn.conv."), 3 * channels[-1], config.enc_attention_channels)
        self._scores = _Conv(load.at("asp.conv."), config.enc_attention_channels, channels[-1])
        self._out = _Conv(load.at("fc."), 2 * channels[-1], config.enc_dim)
        reach = max((kernel - 1) * dilation // 2 for kernel, dilation in zip(kernels, dilations))
        self.least_samples = max((N_FFT - HOP) // 2, HOP * reach + HOP - 1) + 1

    @torch.inference_mode()
    def embed(self, samples: Tensor) -> Tensor:
        """The speaker vector of mono audio at `sample_rate`: samples float32 [n] -> [enc_dim] in the encoder's dtype.

        Raises `InputError` (`input.reference_length`) when the audio is shorter than the network's own reach (about 50 ms).
        """
        if samples.dim() != 1 or samples.numel() < self.least_samples:
            raise InputError(
                ErrorCode.INPUT_REFERENCE_LENGTH,
                f"The reference audio has {samples.numel()} samples at {self.sample_rate} Hz; a speaker vector needs {self.least_samples}.",
                "Give a recording of at least a second.",
            )
        return self.embed_mel(log_mel(samples, self.sample_rate, self.config.mel_dim))

    @torch.inference_mode()
    def embed_mel(self, mel: Tensor) -> Tensor:
        """The speaker vector of log-mel frames: [T, mel_dim] -> [enc_dim]."""
        x = relu(self._first(mel.to(self.device, self.dtype).T[None]))
        outputs: list[Tensor] = []
        for block in self._blocks:
            x = block(x)
            outputs.append(x)
        x = relu(self._mfa(torch.cat(outputs, dim=1)))
        return self._out(self._pool(x))[0, :, 0]

    def _pool(self, x: Tensor) -> Tensor:
        """Attentive statistics pooling: [1, C, T] -> [1, 2 * C, 1]."""
        frames = x.shape[2]
        uniform = x.new_full((1, 1, frames), 1.0) / frames
        mean, deviation = _statistics(x, uniform)
        context = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        weights = softmax(self._scores(torch.tanh(relu(self._attend(context)))), dim=2)
        return torch.cat(_statistics(x, weights), dim=1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(VARIANCE_FLOOR).sqrt()


class _Conv:
    """Convolution that keeps the length by reflecting its input at both ends: [B, Cin, T] -> [B, Cout, T]."""

    def __init__(self, load: Loader, channels_in: int, channels_out: int, kernel: int = 1, dilation: int = 1) -> None:
        self.weight = load("weight", channels_out, channels_in, kernel)
        self.bias = load("bias", channels_out)
        self.dilation = dilation
        self.border = (kernel - 1) * dilation // 2

    def __call__(self, x: Tensor) -> Tensor:
        padded = pad(x, (self.border, self.border), mode="reflect") if self.border else x
        return conv1d(padded, self.weight, self.bias, dilation=self.dilation)


class _SeRes2Net:
    """1x1, Res2Net over `enc_res2net_scale` channel groups, 1x1, squeeze and excitation, residual."""

    def __init__(self, load: Loader, config: SpeakerEncoderConfig, channels: int, kernel: int, dilation: int) -> None:
        self.scale = config.enc_res2net_scale
        group = channels // self.scale
        self.before = _Conv(load.at("tdnn1.conv."), channels, channels)
        self.groups = [_Conv(load.at(f"res2net_block.blocks.{i}.conv."), group, group, kernel, dilation) for i in range(self.scale - 1)]
        self.after = _Conv(load.at("tdnn2.conv."), channels, channels)
        self.squeeze = _Conv(load.at("se_block.conv1."), channels, config.enc_se_channels)
        self.excite = _Conv(load.at("se_block.conv2."), config.enc_se_channels, channels)

    def __call__(self, x: Tensor) -> Tensor:
        hidden = relu(self.after(self._res2net(relu(self.before(x)))))
        gate = torch.sigmoid(self.excite(relu(self.squeeze(hidden.mean(dim=2, keepdim=True)))))
        return hidden * gate + x

    def _res2net(self, x: Tensor) -> Tensor:
        first, *parts = x.chunk(self.scale, dim=1)
        outputs, previous = [first], None
        for conv, part in zip(self.groups, parts):
            previous = relu(conv(part if previous is None else part + previous))
            outputs.append(previous)
        return torch.cat(outputs, dim=1)


@dataclass(frozen=True, slots=True)
class PreparedVoice:
    """A recording as the model hears it. `codes` and `codec_state` (the decoder after those codes) only for cloning in context."""

    #: float32 [talker hidden].
    vector: NDArray[np.float32]
    #: int64 [frames, codebooks].
    codes: NDArray[np.int64] | None = None
    codec_state: CodecState | None = None


class VoiceCache:
    """Prepares reference recordings, and keeps the last ones by their content: in memory, and with `files` on disk."""

    def __init__(self, speaker: SpeakerEncoder, codec: Codec, files: RecordingFiles | None = None, capacity: int = 256) -> None:
        self._speaker = speaker
        self._codec = codec
        self._files = files
        self._kept: RecordingCache[PreparedVoice] = RecordingCache(capacity)

    def prepare(self, recording: bytes, in_context: bool) -> PreparedVoice:
        """The voice of an encoded audio file within the bounds of `pipelines.audio`; `in_context` also makes its codes.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) when the device has no room for it.
        """
        return self._kept.get(recording, in_context, lambda: self._make(recording, in_context))

    @torch.inference_mode()
    def _make(self, recording: bytes, in_context: bool) -> PreparedVoice:
        def encode() -> dict[str, NDArray[Any]]:
            with on_device(self._codec.decoder.device):
                return self._encode(recording, in_context)

        variant = "in context" if in_context else "vector"
        found = encode() if self._files is None else self._files.get(recording, variant, encode, lambda kept: self._fits(kept, in_context))
        vector = found["vector"].astype(np.float32)
        if not in_context:
            return PreparedVoice(vector)
        codes = found["codes"].astype(np.int64)
        state = self._codec.decoder.new_state()
        with on_device(self._codec.decoder.device):
            self._codec.decoder.decode_chunk([state], [torch.from_numpy(codes).to(self._codec.encoder.device)])
        return PreparedVoice(vector, codes, state)

    @torch.inference_mode()
    def _encode(self, recording: bytes, in_context: bool) -> dict[str, NDArray[Any]]:
        """`vector`: float32 [talker hidden]; in context `codes` too: int64 [frames, codebooks]."""
        samples = read_recording(recording, self._speaker.sample_rate)
        vector = self._speaker.embed(torch.from_numpy(samples)).float().cpu().numpy()
        if not in_context:
            return {"vector": vector}
        if self._codec.encoder.sample_rate != self._speaker.sample_rate:
            samples, _ = decode_recording(recording, self._codec.encoder.sample_rate)
        return {"vector": vector, "codes": self._codec.encoder.encode(torch.from_numpy(samples)).cpu().numpy()}

    def _fits(self, kept: dict[str, NDArray[Any]], in_context: bool) -> bool:
        """Whether kept arrays are a voice of this model."""
        if kept["vector"].shape != (self._speaker.config.enc_dim,) or not np.isfinite(kept["vector"]).all():
            return False
        codes = kept["codes"] if in_context else np.zeros((1, self._codec.encoder.codebooks), np.int64)
        sized = codes.ndim == 2 and len(codes) > 0 and codes.shape[1] == self._codec.encoder.codebooks
        return sized and int(codes.min()) >= 0 and int(codes.max()) < self._codec.encoder.config.codebook_size


def voice_identity(config: Qwen3TTSConfig, codec: CodecConfig, device: torch.device, dtype: torch.dtype) -> str:
    """What a prepared voice depends on besides its recording: the weights and sizes of both encoders, and what they run on.

    Reads their weights from the checkpoint. Raises `ModelError` as `Checkpoint`.
    """
    digest = hashlib.sha256(repr((_REVISION, config.speaker_encoder, codec)).encode())
    digest.update(repr((device_name(device), type_name(dtype), torch.__version__)).encode())
    for folder, prefix in ((config.folder, PREFIX), (config.folder / "speech_tokenizer", "encoder.")):
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.update_digest(digest, prefix)
    return digest.hexdigest()

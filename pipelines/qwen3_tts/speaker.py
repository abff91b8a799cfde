"""Voices of the Base checkpoints: a recording to one vector of the talker's width (ECAPA-TDNN) and, to
clone in context, to codes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad, relu, softmax

from kernels.registry import on_device
from pipelines.codec.decoder import CodecState
from pipelines.errors import ErrorCode, InputError
from pipelines.nn.checkpoint import Checkpoint, TensorSource, device_name, fill_module, type_name
from pipelines.nn.speaker import Ecapa, EcapaConfig, mel_bands
from pipelines.qwen3_tts.codec import Codec
from pipelines.qwen3_tts.config import CodecConfig, Qwen3TTSConfig, SpeakerEncoderConfig
from pipelines.recording import RecordingCache, RecordingFiles, decode_recording, read_recording

N_FFT = 1024
HOP = 256
FMIN_HZ = 0.0
FMAX_HZ = 12_000.0
MAGNITUDE_FLOOR = 1e-9
MEL_FLOOR = 1e-5


def log_mel(samples: Tensor, sample_rate: int = 24_000, bands: int = 128) -> Tensor:
    """Log-mel spectrogram of mono audio, float32 on the CPU: samples [n] -> [n // 256, bands].

    n_fft = window = 1024 (periodic Hann), hop 256, 384 samples reflected at both ends, natural logarithm
    of mel magnitudes floored at 1e-5. Needs more than 384 samples. Source: the reference's
    `mel_spectrogram`, whose filters are librosa's defaults.
    """
    border = (N_FFT - HOP) // 2
    audio = pad(samples.detach().to("cpu", torch.float32)[None, None], (border, border), mode="reflect")[0]
    window = torch.hann_window(N_FFT)
    spectrum = torch.stft(
        audio, N_FFT, hop_length=HOP, win_length=N_FFT, window=window, center=False, return_complex=True
    )
    magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + MAGNITUDE_FLOOR)
    filters = mel_bands(N_FFT, bands, FMIN_HZ, FMAX_HZ, sample_rate).T.contiguous()
    return torch.matmul(filters, magnitude)[0].clamp(min=MEL_FLOOR).log().T


PREFIX = "speaker_encoder."
VARIANCE_FLOOR = 1e-12
#: Of how recordings are read and encoded; a higher one leaves kept voices of the one before unused.
_REVISION = 1


#: Where the published network has other names than ours.
_PUBLISHED = {
    "ecapa.first": "blocks.0",
    r"ecapa.blocks.(\d+)": lambda found: f"blocks.{int(found[1]) + 1}",
    r"\.before": ".tdnn1",
    r"\.groups": ".res2net_block.blocks",
    r"\.after": ".tdnn2",
    r"\.squeeze": ".se_block.conv1",
    r"\.excite": ".se_block.conv2",
    r"ecapa.last": "mfa.conv",
    r"attend": "asp.tdnn.conv",
    r"scores": "asp.conv",
}


class SpeakerEncoder(nn.Module):
    """ECAPA-TDNN over log-mel frames, with attentive statistics pooling.

    Takes the tensors `speaker_encoder.*` of the main checkpoint from `source`.
    """

    def __init__(
        self,
        config: SpeakerEncoderConfig,
        source: TensorSource,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.sample_rate = config.sample_rate
        sizes = EcapaConfig(
            config.mel_dim, config.enc_channels, config.enc_kernel_sizes, config.enc_dilations, config.enc_res2net_scale,
            config.enc_se_channels, speechbrain=True,
        )  # fmt: skip
        wide, narrow = config.enc_channels[-1], config.enc_attention_channels
        with torch.device("meta"):
            self.ecapa = Ecapa(sizes)
            self.attend, self.scores = nn.Conv1d(3 * wide, narrow, 1), nn.Conv1d(narrow, wide, 1)
            self.fc = nn.Conv1d(2 * wide, config.enc_dim, 1)
        fill_module(self, source, PREFIX, self.device, dtype, _PUBLISHED)
        reach = max(
            (kernel - 1) * dilation // 2
            for kernel, dilation in zip(config.enc_kernel_sizes, config.enc_dilations)
        )
        self.least_samples = max((N_FFT - HOP) // 2, HOP * reach + HOP - 1) + 1

    @torch.inference_mode()
    def embed(self, samples: Tensor) -> Tensor:
        """The speaker vector of mono audio at `sample_rate`: samples float32 [n] -> [enc_dim] in the
        encoder's dtype.

        Raises `InputError` (`input.reference_length`) when the audio is shorter than the network's own
        reach (about 50 ms).
        """
        if samples.dim() != 1 or samples.numel() < self.least_samples:
            raise InputError(
                ErrorCode.INPUT_REFERENCE_LENGTH,
                f"The reference audio has {samples.numel()} samples at {self.sample_rate} Hz; a speaker vector needs {self.least_samples}.",
                "Give a recording of at least a second.",
            )
        mel = log_mel(samples, self.sample_rate, self.config.mel_dim).to(self.device, self.dtype)
        return self.fc(self._pool(self.ecapa(mel.T[None])))[0, :, 0]

    def _pool(self, x: Tensor) -> Tensor:
        """Attentive statistics pooling: [1, C, T] -> [1, 2 * C, 1]."""
        frames = x.shape[2]
        uniform = x.new_full((1, 1, frames), 1.0) / frames
        mean, deviation = _statistics(x, uniform)
        context = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        weights = softmax(self.scores(torch.tanh(relu(self.attend(context)))), dim=2)
        return torch.cat(_statistics(x, weights), dim=1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(VARIANCE_FLOOR).sqrt()


@dataclass(frozen=True, slots=True)
class PreparedVoice:
    """A recording as the model hears it. `codes` and `codec_state` (the decoder after those codes) only
    for cloning in context."""

    #: float32 [talker hidden].
    vector: NDArray[np.float32]
    #: int64 [frames, codebooks].
    codes: NDArray[np.int64] | None = None
    codec_state: CodecState | None = None


class VoiceCache:
    """Prepares reference recordings, and keeps the last ones by their content: in memory, and with `files`
    on disk."""

    def __init__(
        self, speaker: SpeakerEncoder, codec: Codec, files: RecordingFiles | None = None, capacity: int = 256
    ) -> None:
        assert codec.encoder is not None
        self._speaker = speaker
        self._encoder, self._decoder = codec.encoder, codec.decoder
        self._files = files
        self._kept: RecordingCache[PreparedVoice] = RecordingCache(capacity)

    def prepare(self, recording: bytes, in_context: bool) -> PreparedVoice:
        """The voice of an encoded audio file within the bounds of `pipelines.audio`; `in_context` also
        makes its codes.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) when the device has no room for it.
        """
        return self._kept.get(recording, in_context, lambda: self._make(recording, in_context))

    @torch.inference_mode()
    def _make(self, recording: bytes, in_context: bool) -> PreparedVoice:
        encode = partial(self._encode, recording, in_context)
        variant = "in context" if in_context else "vector"
        with on_device(self._decoder.device):
            found: dict[str, Any] = self._files.get(recording, variant, encode) if self._files else encode()
            vector, codes = found["vector"], found.get("codes")
            if codes is None:
                return PreparedVoice(vector)
            state = self._decoder.new_state()
            self._decoder.decode_chunk([state], [torch.from_numpy(codes).to(self._encoder.device)])
        return PreparedVoice(vector, codes, state)

    @torch.inference_mode()
    def _encode(self, recording: bytes, in_context: bool) -> dict[str, NDArray[Any]]:
        """`vector`: float32 [talker hidden]; in context `codes` too: int64 [frames, codebooks]."""
        samples = read_recording(recording, self._speaker.sample_rate)
        found = {"vector": self._speaker.embed(torch.from_numpy(samples)).float().cpu().numpy()}
        if in_context:
            if self._encoder.sample_rate != self._speaker.sample_rate:
                samples, _ = decode_recording(recording, self._encoder.sample_rate)
            found["codes"] = self._encoder.encode(torch.from_numpy(samples)).cpu().numpy()
        return found


def voice_identity(
    config: Qwen3TTSConfig, codec: CodecConfig, device: torch.device, dtype: torch.dtype
) -> str:
    """What a prepared voice depends on besides its recording: the weights and sizes of both encoders, and
    what they run on.

    Reads their weights from the checkpoint. Raises `ModelError` as `Checkpoint`.
    """
    digest = hashlib.sha256(repr((_REVISION, config.speaker_encoder, codec)).encode())
    digest.update(repr((device_name(device), type_name(dtype), torch.__version__)).encode())
    for folder, prefix in ((config.folder, PREFIX), (config.folder / "speech_tokenizer", "encoder.")):
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.update_digest(digest, prefix)
    return digest.hexdigest()

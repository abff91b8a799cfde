"""Voices of the Base checkpoints: encodes a recording to a vector of the talker's width and, to clone in
context, to codes. Both encoders are networks of transformers, which take seconds to import."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.audio_utils import mel_filter_bank
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import (
    MimiConv1d,
    MimiEncoder,
    MimiSplitResidualVectorQuantizer,
    MimiTransformerModel,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from kernels.registry import on_device
from pipelines.codec.decoder import CodecState
from pipelines.nn.checkpoint import Checkpoint, TensorSource, device_name, fill_module, type_name
from pipelines.qwen3_tts.codec import Codec
from pipelines.qwen3_tts.config import CodecConfig, Qwen3TTSConfig, SpeakerEncoderConfig
from pipelines.recording import Recording, RecordingCache, RecordingFiles

N_FFT = 1024
HOP = 256
FMIN_HZ = 0.0
FMAX_HZ = 12_000.0
MAGNITUDE_FLOOR = 1e-9
MEL_FLOOR = 1e-5


@lru_cache(maxsize=4)
def mel_bands(bands: int, sample_rate: int) -> Tensor:
    """Triangular filters of equal area on Slaney's mel scale (Auditory Toolbox, 1998): float32 [bands, n_fft //
    2 + 1]."""
    filters = mel_filter_bank(
        N_FFT // 2 + 1, bands, FMIN_HZ, FMAX_HZ, sample_rate, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(filters).float().T.contiguous()


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
    return torch.matmul(mel_bands(bands, sample_rate), magnitude)[0].clamp(min=MEL_FLOOR).log().T


PREFIX = "speaker_encoder."
#: Version of the code that reads and encodes recordings. Voices that another version has cached are not used.
_REVISION = 2
#: Bytes of the voices that are kept in memory.
_KEPT_BYTES = 512 << 20


class SpeakerEncoder(ECAPA_TimeDelayNet):
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
        with torch.device("meta"):
            super().__init__(config)  # pyright: ignore[reportArgumentType]  # it has the keys that are read
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        fill_module(self, source, PREFIX, self.device, dtype)

    @torch.inference_mode()
    def embed(self, samples: Tensor) -> Tensor:
        """The speaker vector of mono audio at the config's rate: samples float32 [n] of an accepted recording
        -> [enc_dim] in the encoder's dtype."""
        mel = log_mel(samples, self.config.sample_rate, self.config.mel_dim)
        return self(mel.to(self.device, self.dtype)[None])[0]


#: The reference (transformers 4.57) attends to the whole past: it does not apply the config's sliding_window.
_WHOLE_PAST = 1 << 30


class CodecEncoder(nn.Module):
    """Turns mono audio into codes, `encode_downsample_rate` samples for each frame: the encoder of
    transformers' Mimi (Kyutai). Runs in float32, because a rounding error can change a code."""

    def __init__(self, config: CodecConfig, source: TensorSource, device: torch.device | str = "cpu") -> None:
        super().__init__()
        chosen: dict[str, Any] = {"sliding_window": _WHOLE_PAST, "attn_implementation": "sdpa"}
        sizes = MimiConfig(**config.encoder | chosen)
        self.device = torch.device(device)
        self.sample_rate = config.input_sample_rate
        self.samples_per_frame = config.encode_downsample_rate
        self.codebooks = config.encoder_valid_num_quantizers
        self.codebook_size = sizes.codebook_size
        kernel = 2 * int(sizes.encodec_frame_rate / sizes.frame_rate)
        self.encoder, self.encoder_transformer = MimiEncoder(sizes), MimiTransformerModel(sizes)
        self.downsample = MimiConv1d(
            sizes, sizes.hidden_size, sizes.hidden_size, kernel, 2, bias=False, pad_mode="replicate"
        )
        self.quantizer = MimiSplitResidualVectorQuantizer(sizes)
        fill_module(self, source, "encoder.", self.device)
        self.to(self.device)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """Encodes mono audio at `sample_rate`: samples float32 [n] -> codes int64 [ceil(n /
        samples_per_frame), codebooks]."""
        steps = self.encoder(samples.to(self.device, torch.float32)[None, None])
        steps = self.downsample(self.encoder_transformer(steps.transpose(1, 2))[0].transpose(1, 2))
        codes = self.quantizer.encode(steps, self.codebooks)
        return codes[:, 0, : -(-samples.numel() // self.samples_per_frame)].T.contiguous()


@dataclass(frozen=True, slots=True)
class PreparedVoice:
    """A recording encoded for the model. `codes`, and `codec_state` (the decoder's state after them), are set
    only for cloning in context."""

    #: float32 [talker hidden].
    vector: NDArray[np.float32]
    #: int64 [frames, codebooks].
    codes: NDArray[np.int64] | None = None
    codec_state: CodecState | None = None


def _size(voice: PreparedVoice) -> int:
    """The bytes of a voice, most of which are the state's."""
    codes = 0 if voice.codes is None else voice.codes.nbytes
    values = voice.codec_state and voice.codec_state.values
    return voice.vector.nbytes + codes + (0 if values is None else values.nbytes)


class VoiceCache:
    """Prepares reference recordings and caches them by content, in memory and in a folder if there is one."""

    def __init__(
        self,
        config: Qwen3TTSConfig,
        speaker: SpeakerEncoder,
        codec: Codec,
        folder: str | None = None,
        folder_bytes: int = 0,
    ) -> None:
        assert codec.encoder is not None
        self._config, self._codec_config = config, codec.config
        self._speaker = speaker
        self._encoder, self._decoder = codec.encoder, codec.decoder
        self._files = None if folder is None else RecordingFiles(Path(folder), folder_bytes, self._identity())
        self._kept: RecordingCache[PreparedVoice] = RecordingCache(_KEPT_BYTES, _size)

    def prepare(self, recording: Recording, in_context: bool) -> PreparedVoice:
        """The voice of an audio file within the limits of `pipelines.audio`; `in_context`: also its codes.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) if the device has too little memory.
        """
        return self._kept.get(recording, in_context, lambda: self._make(recording, in_context))

    @torch.inference_mode()
    def _make(self, recording: Recording, in_context: bool) -> PreparedVoice:
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
    def _encode(self, recording: Recording, in_context: bool) -> dict[str, NDArray[Any]]:
        """`vector`: float32 [talker hidden]; in context `codes` too: int64 [frames, codebooks]."""
        rate = self._speaker.config.sample_rate
        samples, _ = recording.read(rate)
        found = {"vector": self._speaker.embed(torch.from_numpy(samples)).float().cpu().numpy()}
        if in_context:
            if self._encoder.sample_rate != rate:
                samples, _ = recording.read(self._encoder.sample_rate)
            found["codes"] = self._encoder.encode(torch.from_numpy(samples)).cpu().numpy()
        return found

    def _identity(self) -> str:
        """A digest of everything that a prepared voice depends on besides its recording: the weights, sizes,
        device and type of both encoders.

        Reads their weights from the checkpoint. Raises `ModelError` like `Checkpoint`.
        """
        speaker, folder = self._speaker, self._config.folder
        sizes = _REVISION, speaker.config, self._codec_config
        device = device_name(speaker.device), type_name(speaker.dtype), torch.__version__
        digest = hashlib.sha256(repr((sizes, device)).encode())
        for place, prefix in ((folder, PREFIX), (folder / "speech_tokenizer", "encoder.")):
            with Checkpoint.open(place) as checkpoint:
                checkpoint.update_digest(digest, prefix)
        return digest.hexdigest()

"""Voices of the Base checkpoints: encodes a recording to a vector of the talker's width and, to clone in
context, to codes. Both encoders are networks of transformers, which take seconds to import."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import conv1d, elu_, pad
from transformers.audio_utils import mel_filter_bank
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import (
    MimiConv1d,
    MimiEncoder,
    MimiResnetBlock,
    MimiSplitResidualVectorQuantizer,
    MimiTransformerModel,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from pipelines.codec.encoding import EXACT, BatchEncoder, Encoding
from pipelines.codec.states import CodecState
from pipelines.nn.checkpoint import Checkpoint, TensorSource, device_name, fill_module, type_name
from pipelines.qwen3_tts.codec import Codec
from pipelines.qwen3_tts.config import CodecConfig, Qwen3TTSConfig, SpeakerEncoderConfig
from pipelines.recording import KEPT_BYTES, Recording, RecordingCache, RecordingFiles
from pipelines.request import IntArray

N_FFT = 1024
HOP = 256
FMIN_HZ = 0.0
FMAX_HZ = 12_000.0
MAGNITUDE_FLOOR = 1e-9
MEL_FLOOR = 1e-5
STATISTICS_FLOOR = 1e-12
_CPU = torch.device("cpu")


@lru_cache(maxsize=4)
def mel_bands(bands: int, sample_rate: int, device: torch.device = _CPU) -> Tensor:
    """Triangular filters of equal area on Slaney's mel scale (Auditory Toolbox, 1998): float32 [bands, n_fft //
    2 + 1]."""
    filters = mel_filter_bank(
        N_FFT // 2 + 1, bands, FMIN_HZ, FMAX_HZ, sample_rate, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(filters).float().T.contiguous().to(device)


def reflected(x: Tensor, lengths: Tensor, left: int, right: int) -> Tensor:
    """Each row with `left` and `right` steps reflected at its own ends: x [B, C, T], lengths [B] -> [B, C,
    left + T + right]. What follows a row's reflection is finite and undefined."""
    steps = torch.arange(-left, x.shape[2] + right, device=x.device).abs()
    last = lengths[:, None, None] - 1
    return x.gather(2, (last - (last - steps).abs()).clamp(min=0).expand(-1, x.shape[1], -1))


def log_mel(
    samples: Tensor, lengths: Tensor, sample_rate: int = 24_000, bands: int = 128
) -> tuple[Tensor, Tensor]:
    """Log-mel spectrograms of mono audio in float32: samples [B, n], of which each row has `lengths` [B] -> [B,
    bands, n // 256], and the frames of each row [B].

    n_fft = window = 1024 (periodic Hann), hop 256, 384 samples reflected at both ends, natural logarithm
    of mel magnitudes floored at 1e-5. Needs more than 384 samples. Source: the reference's
    `mel_spectrogram`, whose filters are librosa's defaults.
    """
    border = (N_FFT - HOP) // 2
    audio = reflected(samples.float()[:, None], lengths, border, border)[:, 0]
    window = torch.hann_window(N_FFT, device=audio.device)
    spectrum = torch.stft(
        audio, N_FFT, hop_length=HOP, win_length=N_FFT, window=window, center=False, return_complex=True
    )
    magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + MAGNITUDE_FLOOR)
    found = torch.matmul(mel_bands(bands, sample_rate, audio.device), magnitude)
    return found.clamp(min=MEL_FLOOR).log(), lengths // HOP


PREFIX = "speaker_encoder."
#: Version of the code that reads and encodes recordings. Voices that another version has cached are not used.
_REVISION = 4
#: On a GPU: lengths in seconds that recordings are padded to, and maximum seconds and rows of their batches.
_PADDED_SECONDS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 22, 32, 60)
_BATCH_SECONDS, _BATCH_ROWS = 60, 4


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
    @EXACT
    def embed(self, samples: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The speaker vectors of mono audio at the config's rate: samples float32 [B, n] of accepted recordings,
        each of its length ([B]; None: n) and then padded -> [B, enc_dim] in the encoder's dtype.

        A row's vector does not depend on its padding.
        """
        samples, lengths = _rows(samples, lengths, self.device)
        mel, frames = log_mel(samples, lengths, self.config.sample_rate, self.config.mel_dim)
        mel = mel.to(self.dtype)
        # The forward pass of transformers, for rows of different lengths.
        inside = (torch.arange(mel.shape[2], device=mel.device) < frames[:, None])[:, None]
        blocks: list[Any] = [*self.blocks]
        x, found = _delayed(blocks[0], mel, frames), []
        for block in blocks[1:]:
            parts = _delayed(block.tdnn1, x, frames).chunk(block.res2net_block.scale, dim=1)
            made = [parts[0]]
            for inner, part in zip(block.res2net_block.blocks, parts[1:]):
                made.append(_delayed(inner, part if len(made) == 1 else part + made[-1], frames))
            hidden = _delayed(block.tdnn2, torch.cat(made, dim=1), frames)
            mean = (hidden * inside).sum(2, keepdim=True, dtype=torch.float32) / frames[:, None, None]
            gate = block.se_block.conv2(block.se_block.conv1(mean.to(hidden.dtype)).relu()).sigmoid()
            x = hidden * gate + x
            found.append(x)
        x = _delayed(self.mfa, torch.cat(found, dim=1), frames)
        mean, deviation = _statistics(x, (inside / frames[:, None, None]).to(x.dtype))
        around = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        scores = self.asp.conv(_delayed(self.asp.tdnn, around, frames).tanh())
        shares = scores.masked_fill(~inside, -torch.inf).softmax(dim=2)
        return self.fc(torch.cat(_statistics(x, shares), dim=1)).squeeze(2)


def _rows(samples: Tensor, lengths: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of samples and their lengths on the device."""
    samples = samples.to(device, torch.float32)
    if lengths is None:
        lengths = torch.full((len(samples),), samples.shape[1], device=device)
    return samples, lengths


def _delayed(block: Any, x: Tensor, frames: Tensor) -> Tensor:
    """A TimeDelayNetBlock, whose convolution reflects each row at its own ends."""
    reach = block.conv.dilation[0] * (block.conv.kernel_size[0] - 1)
    x = reflected(x, frames, reach // 2, reach - reach // 2) if reach else x
    return conv1d(x, block.conv.weight, block.conv.bias, dilation=block.conv.dilation).relu()


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over the steps: x [B, C, T] -> [B, C, 1] each."""
    mean = (weights * x).sum(2, keepdim=True)
    square = (weights * (x - mean).square()).sum(2, keepdim=True)
    return mean, square.clamp(min=STATISTICS_FLOOR).sqrt()


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
        #: The number of layers up to the second convolution with a stride.
        self._first = 1 + 2 * (sizes.num_residual_layers + 2)
        fill_module(self, source, "encoder.", self.device)
        self.to(self.device)

    @torch.inference_mode()
    @EXACT
    def encode(self, samples: Tensor, lengths: Tensor | None = None, rows: int = 1) -> Tensor:
        """Encodes mono audio at `sample_rate`: samples float32 [B, n], each of its length ([B]; None: n) and
        then padded -> codes int64 [B, ceil(n / samples_per_frame), codebooks].

        A row's codes do not depend on its padding; they are undefined after its last frame. `rows`: minimum of
        the rows that are computed together, so that rounding does not depend on their number.
        """
        count = len(samples)
        samples, lengths = _rows(samples, lengths, self.device)
        x = pad(samples, (0, -samples.shape[1] % self.samples_per_frame))[:, None]
        # The first levels of each row alone, since they take almost all memory.
        first, rest = self.encoder.layers[: self._first], self.encoder.layers[self._first :]
        alone = [self._convolved(row, length, first) for row, length in zip(x.split(1), lengths.split(1))]
        x, ends = (torch.cat(parts) for parts in zip(*alone))
        x, ends = pad(x, (0, 0, 0, 0, 0, max(rows - count, 0))), pad(ends, (0, max(rows - count, 0)))
        x, ends = self._convolved(x, ends, rest)
        x = x.transpose(1, 2)
        turns = self.encoder_transformer.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.encoder_transformer.layers:
            x = layer(x, position_embeddings=turns)[0]
        # The last convolution repeats a row's first and last step instead of zeros.
        steps = torch.arange(-_left(self.downsample), x.shape[1], device=x.device)
        steps = steps.minimum(ends[:, None] - 1).clamp(min=0)[:, None]
        x = x.transpose(1, 2)
        x = self.downsample.conv(x.gather(2, steps.expand(-1, x.shape[1], -1)))
        return self.quantizer.encode(x, self.codebooks).permute(1, 2, 0)[:count].contiguous()

    def _convolved(self, x: Tensor, ends: Tensor, layers: Iterable[Any]) -> tuple[Tensor, Tensor]:
        """Runs layers of the encoder: x [B, C, T] and the steps of each row [B], before and after them.

        The layers are causal, so only convolutions with a stride read what follows a row: zeros.
        """
        activate = False
        for layer in layers:
            if isinstance(layer, MimiResnetBlock):
                wide, narrow = cast("Sequence[Any]", layer.block)[1::2]
                hidden = narrow.conv(elu_(wide.conv(_padded(x, _left(wide), activate=True))))
                x = hidden.add_(getattr(layer.shortcut, "conv", layer.shortcut)(x))
            elif isinstance(layer, MimiConv1d):
                left, stride = _left(layer), layer.conv.stride[0]
                x = _padded(x, left, stride - 1, activate)
                if stride > 1:
                    after = ends[:, None, None] + torch.arange(left, left + stride - 1, device=x.device)
                    x.scatter_(2, after.expand(-1, x.shape[1], -1), 0)
                    ends = -(-ends // stride)
                x, activate = layer.conv(x), False
            else:
                activate = True
        return x, ends


def _left(layer: MimiConv1d) -> int:
    """The steps before its input that a convolution reads."""
    conv = layer.conv
    return (conv.kernel_size[0] - 1) * conv.dilation[0] + 1 - conv.stride[0]


def _padded(x: Tensor, left: int, right: int = 0, activate: bool = False) -> Tensor:
    """x [B, C, T], or the ELU of it, between zeros: [B, C, left + T + right]. One pass over it."""
    end = left + x.shape[2]
    made = x.new_empty(*x.shape[:2], end + right)
    made[..., :left], made[..., end:], inside = 0, 0, made[..., left:end]
    if activate:
        torch.ops.aten.elu.out(x, out=inside)
    else:
        inside.copy_(x)
    return made


class PreparedVoice(NamedTuple):
    """A recording encoded for the model. `codes`, and `codec_state` (the decoder's state after them), are set
    only for cloning in context, the state only if there is a decoder."""

    #: float32 [talker hidden].
    vector: NDArray[np.float32]
    #: int64 [frames, codebooks].
    codes: IntArray | None = None
    codec_state: CodecState | None = None


def _bucket(sample_rate: int, samples: int) -> int:
    """The padded length of a recording, in samples."""
    return next(seconds * sample_rate for seconds in _PADDED_SECONDS if seconds * sample_rate >= samples)


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
        self._kept: RecordingCache[PreparedVoice] = RecordingCache(
            KEPT_BYTES, lambda voice: voice.vector.nbytes + (0 if voice.codes is None else voice.codes.nbytes)
        )
        self.batches = BatchEncoder(speaker.device)
        rate = speaker.config.sample_rate
        self.vectors = Encoding(
            lambda *rows: speaker.embed(*rows).float(),
            _BATCH_SECONDS * rate,
            partial(_bucket, rate),
            _BATCH_ROWS,
        )
        rate = self._encoder.sample_rate
        self.codes = Encoding(
            self._encode_rows, _BATCH_SECONDS * rate, partial(_bucket, rate), _BATCH_ROWS, fills=True
        )

    def prepare(self, recording: Recording, in_context: bool) -> PreparedVoice:
        """The voice of an audio file within the limits of `pipelines.audio`; `in_context`: also its codes.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) if the device has too little memory.
        """
        return self._kept.get(recording, in_context, lambda: self._make(recording, in_context))

    def _make(self, recording: Recording, in_context: bool) -> PreparedVoice:
        encode = partial(self._encode, recording, in_context)
        variant = "in context" if in_context else "vector"
        found: dict[str, Any] = self._files.get(recording, variant, encode) if self._files else encode()
        vector, codes = found["vector"], found.get("codes")
        if codes is None:
            return PreparedVoice(vector)
        decoder = self._decoder
        return PreparedVoice(vector, codes, decoder and decoder.state_after(torch.from_numpy(codes)))

    def _encode(self, recording: Recording, in_context: bool) -> dict[str, NDArray[Any]]:
        """`vector`: float32 [talker hidden]; in context `codes` too: int64 [frames, codebooks]."""
        rate, encoder = self._speaker.config.sample_rate, self._encoder
        samples, _ = recording.read(rate)
        # Copies, because a result is a view of the memory of its whole batch.
        found = {"vector": self.batches(self.vectors, samples).numpy().copy()}
        if in_context:
            if encoder.sample_rate != rate:
                samples, _ = recording.read(encoder.sample_rate)
            frames = -(-len(samples) // encoder.samples_per_frame)
            found["codes"] = self.batches(self.codes, samples)[:frames].numpy().copy()
        return found

    def _encode_rows(self, samples: Tensor, lengths: Tensor | None) -> Tensor:
        rows = 1 if lengths is None else self.codes.rows(samples.shape[1])
        return self._encoder.encode(samples, lengths, rows)

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
            with Checkpoint(place) as checkpoint:
                checkpoint.update_digest(digest, prefix)
        return digest.hexdigest()

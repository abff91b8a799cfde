"""Voices of the Base checkpoints: encodes a recording to a vector of the talker's width and, to clone in
context, to codes. The networks are those of transformers, which takes seconds to import."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import (
    conv1d,
    elu_,
    embedding,
    gelu,
    layer_norm,
    linear,
    pad,
    scaled_dot_product_attention,
)

from kernels.layers import rope
from pipelines.audio import resample
from pipelines.codec.encoding import EXACT, BatchEncoder, Encoding, mel_filters
from pipelines.codec.states import CodecState
from pipelines.nn.checkpoint import Checkpoint, Loader, TensorSource, device_name, type_name
from pipelines.qwen3_tts.codec import USAGE_FLOOR, Codec
from pipelines.qwen3_tts.config import CodecConfig, CodecEncoderConfig, Qwen3TTSConfig, SpeakerEncoderConfig
from pipelines.recording import (
    KEPT_BYTES,
    MAX_REFERENCE_SECONDS,
    Reading,
    Recording,
    RecordingCache,
    RecordingFiles,
)
from pipelines.request import IntArray, Samples, SpeakerVector

N_FFT = 1024
HOP = 256
FMIN_HZ = 0.0
FMAX_HZ = 12_000.0
MAGNITUDE_FLOOR = 1e-9
MEL_FLOOR = 1e-5
STATISTICS_FLOOR = 1e-12


@lru_cache(maxsize=4)
def mel_bands(bands: int, sample_rate: int, device: torch.device) -> Tensor:
    """The filters of `log_mel`: float32 [bands, n_fft // 2 + 1]."""
    return mel_filters(N_FFT // 2 + 1, bands, FMIN_HZ, FMAX_HZ, sample_rate).T.contiguous().to(device)


def reflected(x: Tensor, lengths: Tensor, left: int, right: int) -> Tensor:
    """Each row with `left` and `right` steps reflected at its own ends: x [B, C, T], lengths [B] -> [B, C,
    left + T + right]. What follows a row's reflection is finite and undefined."""
    steps = torch.arange(-left, x.shape[2] + right, device=x.device).abs()
    last = lengths[:, None, None] - 1
    return x.gather(2, (last - (last - steps).abs()).clamp(min=0).expand(-1, x.shape[1], -1))


def log_mel(samples: Tensor, lengths: Tensor, sample_rate: int, bands: int) -> tuple[Tensor, Tensor]:
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
_REVISION = 5
#: On a GPU: lengths in seconds that recordings are padded to, and maximum seconds and rows of their batches.
_PADDED_SECONDS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 22, 32, 60)
_BATCH_SECONDS = 60
_BATCH_ROWS = 8


class Conv(NamedTuple):
    """A convolution over time."""

    #: [out, in, kernel].
    weight: Tensor
    bias: Tensor | None
    stride: int = 1
    dilation: int = 1

    @property
    def left(self) -> int:
        """The steps before its input that it reads, if it is causal."""
        return (self.weight.shape[2] - 1) * self.dilation + 1 - self.stride

    def __call__(self, x: Tensor) -> Tensor:
        """x: [B, in, T] -> [B, out, (T - 1 - (kernel - 1) * dilation) // stride + 1]."""
        return conv1d(x, self.weight, self.bias, self.stride, dilation=self.dilation)


def _conv(
    load: Loader, name: str, out: int, into: int, kernel: int = 1, dilation: int = 1, stride: int = 1
) -> Conv:
    return Conv(load(f"{name}.weight", out, into, kernel), load(f"{name}.bias", out), stride, dilation)


class SpeakerEncoder:
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
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        conv = partial(_conv, Loader(source, PREFIX, dtype, self.device))
        inner = config.enc_se_channels
        attention = config.enc_attention_channels
        (into, *first), *middle, (wide, *last) = zip(
            config.enc_channels, config.enc_kernel_sizes, config.enc_dilations
        )
        self._first = conv("blocks.0.conv", into, config.mel_dim, *first)
        #: Of each block: the convolutions of its Res2Net, those around it, and those of squeeze and excitation.
        self._blocks = list[tuple[list[Conv], Conv, Conv, Conv, Conv]]()
        for number, (out, *sizes) in enumerate(middle, 1):
            at = f"blocks.{number}."
            part = out // config.enc_res2net_scale
            inside = [
                conv(f"{at}res2net_block.blocks.{i}.conv", part, part, *sizes)
                for i in range(config.enc_res2net_scale - 1)
            ]
            around = conv(f"{at}tdnn1.conv", out, into), conv(f"{at}tdnn2.conv", out, out)
            gate = conv(f"{at}se_block.conv1", inner, out), conv(f"{at}se_block.conv2", out, inner)
            self._blocks.append((inside, *around, *gate))
            into = out
        self._mfa = conv("mfa.conv", wide, wide, *last)
        self._tdnn = conv("asp.tdnn.conv", attention, 3 * wide)
        self._scores = conv("asp.conv", wide, attention)
        self._fc = conv("fc", config.enc_dim, 2 * wide)

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
        inside = (torch.arange(mel.shape[2], device=mel.device) < frames[:, None])[:, None]
        x = _delayed(self._first, mel, frames)
        found = []
        for inner, before, after, squeeze, excite in self._blocks:
            parts = _delayed(before, x, frames).chunk(len(inner) + 1, dim=1)
            made = [parts[0]]
            for conv, part in zip(inner, parts[1:]):
                made.append(_delayed(conv, part if len(made) == 1 else part + made[-1], frames))
            hidden = _delayed(after, torch.cat(made, dim=1), frames)
            mean = (hidden * inside).sum(2, keepdim=True, dtype=torch.float32) / frames[:, None, None]
            x = hidden * excite(squeeze(mean.to(hidden.dtype)).relu()).sigmoid() + x
            found.append(x)
        x = _delayed(self._mfa, torch.cat(found, dim=1), frames)
        mean, deviation = _statistics(x, (inside / frames[:, None, None]).to(x.dtype))
        around = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        scores = self._scores(_delayed(self._tdnn, around, frames).tanh())
        shares = scores.masked_fill(~inside, -torch.inf).softmax(dim=2)
        return self._fc(torch.cat(_statistics(x, shares), dim=1)).squeeze(2)


def open_speaker_encoder(folder: Path, device: str) -> SpeakerVector:
    """Loads the speaker encoder of a Base checkpoint alone. It hears the first minute of speech."""
    config = Qwen3TTSConfig.from_folder(folder)
    with Checkpoint(folder) as checkpoint:
        encoder = SpeakerEncoder(config.speaker_encoder, checkpoint, device)

    def vector(samples: Samples, sample_rate: int) -> Samples:
        heard = samples[: int(MAX_REFERENCE_SECONDS * sample_rate)]
        (made,) = encoder.embed(torch.tensor(resample(heard, sample_rate, encoder.config.sample_rate))[None])
        return (made / made.norm()).numpy(force=True)

    return vector


def _rows(samples: Tensor, lengths: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of samples and their lengths on the device."""
    samples = samples.to(device, torch.float32)
    if lengths is None:
        lengths = torch.full((len(samples),), samples.shape[1], device=device)
    return samples, lengths


def _delayed(conv: Conv, x: Tensor, frames: Tensor) -> Tensor:
    """The ReLU of a convolution that reflects each row at its own ends."""
    reach = conv.dilation * (conv.weight.shape[2] - 1)
    return conv(reflected(x, frames, reach // 2, reach - reach // 2) if reach else x).relu()


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over the steps: x [B, C, T] -> [B, C, 1] each."""
    mean = (weights * x).sum(2, keepdim=True)
    return mean, (weights * (x - mean).square()).sum(2, keepdim=True).clamp(min=STATISTICS_FLOOR).sqrt()


class EncoderLayer:
    """A layer of the codec encoder's transformer."""

    def __init__(self, load: Loader, sizes: CodecEncoderConfig) -> None:
        self._sizes = sizes
        width = sizes.hidden_size
        heads = sizes.num_attention_heads * sizes.head_dim
        self._norms = [
            [load(f"{name}_layernorm.{part}", width) for part in ("weight", "bias")]
            for name in ("input", "post_attention")
        ]
        self._scales = [load(f"{name}_layer_scale.scale", width) for name in ("self_attn", "mlp")]
        self._qkv = [load(f"self_attn.{name}_proj.weight", heads, width) for name in "qkv"]
        self._out = load("self_attn.o_proj.weight", width, heads)
        self._up = load("mlp.fc1.weight", sizes.intermediate_size, width)
        self._down = load("mlp.fc2.weight", width, sizes.intermediate_size)

    def __call__(self, x: Tensor, turns: Tensor) -> Tensor:
        """x: [B, T, hidden] -> [B, T, hidden]; turns: [T, head_dim], see `kernels.layers.rope`."""

        def normed(number: int) -> Tensor:
            return layer_norm(x, x.shape[2:], *self._norms[number], eps=self._sizes.norm_eps)

        split = -1, self._sizes.head_dim
        query, key, value = (linear(normed(0), one).unflatten(2, split) for one in self._qkv)
        turned = rope(query, turns), rope(key, turns), value
        query, key, value = (one.transpose(1, 2) for one in turned)
        # As in the reference (transformers 4.57), to the whole past: the config's sliding_window is not applied.
        attended = scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)
        x = x + self._scales[0] * linear(attended.transpose(1, 2).flatten(2), self._out)
        return x + self._scales[1] * linear(gelu(linear(normed(1), self._up)), self._down)


class Quantizer:
    """A residual vector quantizer (Zeghidour et al., 2021)."""

    def __init__(self, load: Loader, sizes: CodecEncoderConfig, count: int) -> None:
        width = sizes.codebook_dim
        codes = sizes.codebook_size
        self._entry = Conv(load("input_proj.weight", width, sizes.hidden_size, 1), None)
        load("output_proj.weight", sizes.hidden_size, width, 1)  # in the file, but only decoding uses it
        #: A codebook for each step: [codes, width].
        self._books = list[Tensor]()
        for number in range(count):
            book = load.at(f"layers.{number}.codebook.")
            book("initialized", 1)  # only training uses it
            usage = book("cluster_usage", codes).clamp(min=USAGE_FLOOR)
            self._books.append(book("embed_sum", codes, width) / usage[:, None])

    def __call__(self, x: Tensor, count: int) -> list[Tensor]:
        """The codes of the first codebooks: x [B, hidden, T] -> int64 [B, T] each."""
        x = self._entry(x).transpose(1, 2)
        made = []
        for book in self._books[:count]:
            made.append(torch.cdist(x.flatten(0, 1)[None], book[None])[0].argmin(1).view(x.shape[:2]))
            x = x - embedding(made[-1], book)
        return made


class CodecEncoder:
    """Turns mono audio into codes, `encode_downsample_rate` samples for each frame: the encoder of Mimi (Kyutai)
    as in transformers. Runs in float32, because a rounding error can change a code."""

    def __init__(self, config: CodecConfig, source: TensorSource, device: torch.device | str) -> None:
        sizes = config.encoder
        load = Loader(source, "encoder.", torch.float32, torch.device(device))
        self.device = load.device
        self.sample_rate = config.input_sample_rate
        self.samples_per_frame = config.encode_downsample_rate
        self.codebooks = config.encoder_valid_num_quantizers
        self.codebook_size = sizes.codebook_size
        width = sizes.hidden_size
        self._layers = _encoder_layers(load.at("encoder.layers."), sizes)
        #: The number of layers up to the second convolution with a stride.
        self._first = 1 + 2 * (sizes.num_residual_layers + 1)
        self._transformer = [
            EncoderLayer(load.at(f"encoder_transformer.layers.{i}."), sizes)
            for i in range(sizes.num_hidden_layers)
        ]
        stride = self.samples_per_frame // math.prod(sizes.upsampling_ratios)
        self._downsample = Conv(load("downsample.conv.weight", width, width, 2 * stride), None, stride)
        semantic = sizes.num_semantic_quantizers
        self._quantizers = [
            Quantizer(load.at(f"quantizer.{name}_residual_vector_quantizer."), sizes, count)
            for name, count in (("semantic", semantic), ("acoustic", sizes.num_quantizers - semantic))
        ]
        exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
        self._frequencies = (1.0 / sizes.rope_theta**exponents).to(self.device)

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
        first = self._layers[: self._first]
        rest = self._layers[self._first :]
        alone = [_convolved(row, length, first) for row, length in zip(x.split(1), lengths.split(1))]
        x, ends = (torch.cat(parts) for parts in zip(*alone))
        x = pad(x, (0, 0, 0, 0, 0, max(rows - count, 0)))
        ends = pad(ends, (0, max(rows - count, 0)))
        x, ends = _convolved(x, ends, rest)
        x = x.transpose(1, 2)
        angles = torch.arange(x.shape[1], device=x.device)[:, None].float() * self._frequencies
        turns = torch.cat((angles.cos(), angles.sin()), dim=1)
        for layer in self._transformer:
            x = layer(x, turns)
        # The last convolution repeats a row's first and last step instead of zeros.
        steps = torch.arange(-self._downsample.left, x.shape[1], device=x.device)
        steps = steps.minimum(ends[:, None] - 1).clamp(min=0)[:, None]
        x = x.transpose(1, 2)
        x = self._downsample(x.gather(2, steps.expand(-1, x.shape[1], -1)))
        semantic, acoustic = self._quantizers
        codes = semantic(x, self.codebooks)
        codes += acoustic(x, self.codebooks - len(codes))
        return torch.stack(codes, dim=2)[:count].contiguous()


#: A layer of the encoder: a convolution, or the wide and the narrow one of a residual block.
Layer = Conv | tuple[Conv, Conv]


def _encoder_layers(load: Loader, sizes: CodecEncoderConfig) -> list[Layer]:
    width = sizes.num_filters
    place = 1
    layers: list[Layer] = [_conv(load, "0.conv", width, 1, sizes.kernel_size)]
    for ratio in reversed(sizes.upsampling_ratios):
        for number in range(sizes.num_residual_layers):
            inner = width // sizes.compress
            dilation = sizes.dilation_growth_rate**number
            wide = _conv(load, f"{place}.block.1.conv", inner, width, sizes.residual_kernel_size, dilation)
            layers.append((wide, _conv(load, f"{place}.block.3.conv", width, inner)))
            place += 1
        # An activation has a place of its own.
        layers.append(_conv(load, f"{place + 1}.conv", 2 * width, width, 2 * ratio, stride=ratio))
        width = 2 * width
        place = place + 2
    return [*layers, _conv(load, f"{place + 1}.conv", sizes.hidden_size, width, sizes.last_kernel_size)]


def _convolved(x: Tensor, ends: Tensor, layers: Iterable[Layer]) -> tuple[Tensor, Tensor]:
    """Runs layers of the encoder: x [B, C, T] and the steps of each row [B], before and after them.

    The layers are causal, so only convolutions with a stride read what follows a row: zeros.
    """
    for layer in layers:
        if not isinstance(layer, Conv):
            wide, narrow = layer
            x = narrow(elu_(wide(_padded(x, wide.left)))).add_(x)
            continue
        left = layer.left
        stride = layer.stride
        # The first one reads the audio itself.
        x = _padded(x, left, stride - 1, activate=x.shape[1] > 1)
        if stride > 1:
            after = ends[:, None, None] + torch.arange(left, left + stride - 1, device=x.device)
            x.scatter_(2, after.expand(-1, x.shape[1], -1), 0)
            ends = -(-ends // stride)
        x = layer(x)
    return x, ends


def _padded(x: Tensor, left: int, right: int = 0, activate: bool = True) -> Tensor:
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
        folder: str | None,
        folder_bytes: int,
    ) -> None:
        assert codec.encoder is not None
        self._config = config
        self._codec_config = codec.config
        self._speaker = speaker
        self._encoder = codec.encoder
        self._decoder = codec.decoder
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

    def prepare(self, recording: Recording, in_context: bool, patience: float = 0.0) -> PreparedVoice:
        """The voice of an audio file within the limits of `pipelines.audio`; `in_context`: also its codes;
        `patience`: seconds that it may wait for others to be encoded with.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) if the device has too little memory.
        """
        encode = partial(self._encode, recording, in_context, patience)

        def make() -> PreparedVoice:
            variant = "in context" if in_context else "vector"
            found: dict[str, Any] = self._files.get(recording, variant, encode) if self._files else encode()
            vector = found["vector"]
            codes = found.get("codes")
            if codes is None:
                return PreparedVoice(vector)
            decoder = self._decoder
            return PreparedVoice(vector, codes, decoder and decoder.state_after(torch.from_numpy(codes)))

        return self._kept.get(recording, in_context, make)

    def _encode(self, recording: Recording, in_context: bool, patience: float) -> dict[str, NDArray[Any]]:
        """`vector`: float32 [talker hidden]; in context `codes` too: int64 [frames, codebooks]."""
        rate = self._speaker.config.sample_rate
        encoder = self._encoder
        samples, _ = recording.read(Reading(rate))
        made = {"vector": self.batches(self.vectors, samples, patience)}
        frames = None
        if in_context:
            if encoder.sample_rate != rate:
                samples, _ = recording.read(Reading(encoder.sample_rate))
            frames = -(-len(samples) // encoder.samples_per_frame)
            made["codes"] = self.batches(self.codes, samples, patience)
        # Copies, because a result is a view of the memory of its whole batch.
        found = {name: one.result().numpy() for name, one in made.items()}
        return {name: (one[:frames] if name == "codes" else one).copy() for name, one in found.items()}

    def _encode_rows(self, samples: Tensor, lengths: Tensor | None) -> Tensor:
        rows = 1 if lengths is None else self.codes.rows(samples.shape[1])
        return self._encoder.encode(samples, lengths, rows)

    def _identity(self) -> str:
        """A digest of everything that a prepared voice depends on besides its recording: the weights, sizes,
        device and type of both encoders.

        Reads their weights from the checkpoint. Raises `ModelError` like `Checkpoint`.
        """
        speaker = self._speaker
        folder = self._config.folder
        sizes = _REVISION, speaker.config, self._codec_config
        device = device_name(speaker.device), type_name(speaker.dtype), torch.__version__
        digest = hashlib.sha256(repr((sizes, device)).encode())
        for place, prefix in ((folder, PREFIX), (folder / "speech_tokenizer", "encoder.")):
            with Checkpoint(place) as checkpoint:
                checkpoint.update_digest(digest, prefix)
        return digest.hexdigest()

"""The causal 44.1 kHz codec. It encodes recordings, always in float32, and decodes codes to a waveform, as
whole utterances or chunk by chunk."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, embedding, linear, normalize, pad

from kernels.codec_ops import snake_beta
from pipelines.audio import Samples
from pipelines.codec.blocks import (
    RESIDUAL_DILATIONS,
    BlockLoader,
    CausalConv,
    ConvNeXt,
    ConvStack,
    Past,
    ResidualUnit,
    Snake,
    StateLayout,
    UpsampleLayer,
    WindowTransformer,
)
from pipelines.codec.decoder import CausalDecoder
from pipelines.codec.encoding import BatchEncoder, Encoding
from pipelines.codec.fused import FusedStack, uses_fused_ops
from pipelines.fish_speech.config import CODEC_WEIGHTS, CodecConfig, CodecStackConfig, FishConfig
from pipelines.fish_speech.model import take_stack
from pipelines.nn.checkpoint import TensorSource, TensorTable, read_pickle, shown, take_normed
from pipelines.recording import KEPT_BYTES, Reading, Recording, RecordingCache
from pipelines.request import IntArray

log = logging.getLogger(__name__)

STEM_KERNEL = 7
HEAD_KERNEL = 3
#: Tensors that are not needed: buffers of older files of the codec, and tensors for its training.
_UNUSED = ("*freqs_cis*", "*causal_mask*", "*cluster_size*", "discriminator*")
#: Tensors of the decoder alone.
_OF_DECODER = ("decoder.*", "quantizer.post_module.*", "quantizer.upsample.*")
_SNAKE_EPS = 1e-9


def open_codec(folder: Path) -> TensorTable:
    """The tensors of the folder's codec: flat, under `state_dict` or `generator`, or with `generator.` in
    their names.

    Raises `ModelError` (`model.bad_checkpoint`) that names the file.
    """
    path = folder / CODEC_WEIGHTS
    tensors = read_pickle(path, ("state_dict", "generator"))
    inside = {
        name.rpartition("generator.")[2]: tensor for name, tensor in tensors.items() if "generator." in name
    }
    found = inside or tensors
    return TensorTable(path, found, found.__getitem__)


class CodecLoader(BlockLoader):
    """Loads the codec's tensors: weight norms are folded into convolutions; snakes have one parameter per
    channel."""

    unit_names = "block.0.", "block.1.conv.", "block.2.", "block.3.conv."
    scale_names = "attention_layer_scale.gamma", "ffn_layer_scale.gamma"

    def kernel(self, *shape: int) -> Tensor:
        return take_normed(self.source, self.prefix, shape).to(self.device, self.dtype)

    def snake(self, channels: int) -> Snake:
        frequency = self("alpha", 1, channels, 1).float().flatten()
        return Snake(frequency, 1.0 / (frequency + _SNAKE_EPS))


def window_transformer(load: CodecLoader, layout: StateLayout, config: CodecStackConfig) -> WindowTransformer:
    """One of the codec's transformers: [B, T, dim] -> [B, T, dim]."""
    stack = take_stack(load, config)
    return WindowTransformer(
        load,
        layout,
        stack,
        config,
        config.window,
        lambda exponents: 1.0 / config.rope_theta**exponents,
        rounded=True,
    )


class EncoderBlock:
    """Three residual units, a strided convolution, and in the last block a transformer: [B, T, Cin] -> [B,
    T / rate, 2 * Cin]."""

    def __init__(
        self, load: CodecLoader, layout: StateLayout, channels: int, rate: int, stack: CodecStackConfig | None
    ) -> None:
        self.units = [
            ResidualUnit(load.at(f"block.{i}."), layout, channels, dilation)
            for i, dilation in enumerate(RESIDUAL_DILATIONS)
        ]
        self.snake = load.at("block.3.").snake(channels)
        self.conv = CausalConv(load.at("block.4.conv."), layout, channels, 2 * channels, 2 * rate, rate)
        self.transformer = None if stack is None else window_transformer(load.at("block.5."), layout, stack)

    def __call__(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x, None)
        x = self.conv(snake_beta(x, *self.snake), None)
        return x if self.transformer is None else self.transformer(x, None)


class Codebook:
    """A factorized codebook, which compares the directions of vectors in few dimensions (Yu et al., 2022)."""

    def __init__(self, load: CodecLoader, config: CodecConfig, codes: int) -> None:
        self.into = load.at("in_proj.").kernel(config.codebook_dim, config.latent, 1).squeeze(2)
        self.into_bias = load("in_proj.bias", config.codebook_dim)
        self.out = load.at("out_proj.").kernel(config.latent, config.codebook_dim, 1).squeeze(2)
        self.out_bias = load("out_proj.bias", config.latent)
        self.codes = load("codebook.weight", codes, config.codebook_dim)
        self.directions = normalize(self.codes, dim=-1)

    def choose(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z: [B, T, latent] -> codes int64 [B, T], and their vectors [B, T, latent]."""
        inner = normalize(linear(z, self.into, self.into_bias), dim=-1)
        squares = inner.square().sum(-1, keepdim=True) + self.directions.square().sum(-1)
        codes = (squares - 2 * inner @ self.directions.T).argmin(-1)
        return codes, linear(self.codes[codes], self.out, self.out_bias)

    def table(self) -> Tensor:
        """The vectors of all codes: [codes, latent]."""
        return linear(self.codes, self.out, self.out_bias)


class CodecEncoder:
    """Encodes recordings to codes; each frame has `samples_per_frame` samples."""

    def __init__(
        self, config: CodecConfig, source: TensorSource, codebooks: Sequence[Codebook], device: torch.device
    ) -> None:
        load = CodecLoader(source, "", torch.float32, device)
        layout = StateLayout()
        self.config = config
        self.device = device
        self.codebooks = codebooks
        encoder = load.at("encoder.")
        width = config.encoder_dim
        self._stem = CausalConv(encoder.at("block.0.conv."), layout, 1, width, STEM_KERNEL)
        self._blocks = [
            EncoderBlock(encoder.at(f"block.{i + 1}."), layout, width << i, rate, stack)
            for i, (rate, stack) in enumerate(zip(config.encoder_rates, config.encoder_stacks))
        ]
        last = len(self._blocks) + 1
        self._snake = encoder.at(f"block.{last}.").snake(config.latent)
        self._head = CausalConv(
            encoder.at(f"block.{last + 1}.conv."), layout, config.latent, config.latent, HEAD_KERNEL
        )
        self._down = [
            (
                CausalConv(
                    load.at(f"quantizer.downsample.{i}.0.conv."),
                    layout,
                    config.latent,
                    config.latent,
                    factor,
                    factor,
                ),
                ConvNeXt(load.at(f"quantizer.downsample.{i}.1."), layout, config.latent),
            )
            for i, factor in enumerate(config.downsample)
        ]
        self._pre = window_transformer(load.at("quantizer.pre_module."), layout, config.pre)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """float32 [B, samples] at the codec's rate -> int64 [B, frames, codebooks]; the last frame is padded
        with silence. Frames do not depend on later samples, such as those that pad a row."""
        z = self.latents(self.features(samples))
        codes = list[Tensor]()
        # Each codebook quantizes the residual of those before it.
        for codebook in self.codebooks:
            chosen, found = codebook.choose(z)
            codes.append(chosen)
            z = z - found
        return torch.stack(codes, dim=-1)

    def features(self, samples: Tensor) -> Tensor:
        """float32 [B, samples] -> the input of the quantizer, [B, steps, latent]."""
        size = self.config.samples_per_frame
        x = pad(samples.to(self.device, torch.float32), (0, -samples.shape[1] % size))[:, :, None]
        x = self._stem(x, None)
        for block in self._blocks:
            x = block(x)
        return self._head(snake_beta(x, *self._snake), None)

    def downsampled(self, x: Tensor) -> Tensor:
        """[B, steps, latent] -> [B, frames, latent]."""
        for conv, block in self._down:
            x = block(conv(x, None), None)
        return x

    def latents(self, x: Tensor) -> Tensor:
        """[B, steps, latent] -> the vectors from which codes are chosen, [B, frames, latent]."""
        return self._pre(self.downsampled(x), None)


#: Zero crossings of the resampling filter on either side, and its cutoff as a share of the lower Nyquist
#: frequency.
_ZEROS = 6
_ROLLOFF = 0.99
#: Maximum number of cached filter banks, and of values in one of them: rates with a small common divisor
#: would need gigabytes.
_FILTERS = 16
_MAX_VALUES = 1 << 22


#: Maximum seconds of recordings, with their padding, of a batch on a GPU.
_BATCH_SECONDS = 24


class ReferenceEncoder:
    """Encodes recordings to codes, in batches. Caches the most recent ones by content."""

    def __init__(self, encoder: CodecEncoder) -> None:
        self._encoder = encoder
        self._batches = BatchEncoder(encoder.device)
        steps = _BATCH_SECONDS * encoder.config.sample_rate
        self._encoding = Encoding(lambda samples, _: encoder.encode(samples), steps)
        self._cache: RecordingCache[IntArray] = RecordingCache(KEPT_BYTES, lambda codes: codes.nbytes)

    def prepare(self, recording: Recording) -> IntArray:
        """The codes, int64 [frames, codebooks], of an audio file within the limits of `pipelines.audio`.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) if the device has too little memory.
        """
        return self._cache.get(recording, None, lambda: self.encode(self.read(recording).numpy()))

    def encode(self, samples: Samples) -> IntArray:
        """The codes, int64 [frames, codebooks], of samples at the codec's rate."""
        frames = -(-len(samples) // self._encoder.config.samples_per_frame)
        return self._batches(self._encoding, samples).result()[:frames].clone().numpy()

    def read(self, recording: Recording) -> Tensor:
        """float32 [samples] at the codec's rate: channels averaged, resampled on the device. Raises
        `InputError` as `prepare`."""
        samples, rate = recording.read()
        wanted = self._encoder.config.sample_rate
        if math.lcm(rate, wanted) // math.gcd(rate, wanted) > _MAX_VALUES:
            samples, rate = recording.read(Reading(wanted, quality="VHQ"))
        return resample(torch.from_numpy(samples).to(self._encoder.device), rate, wanted).cpu()


def resample(samples: Tensor, rate: int, wanted: int) -> Tensor:
    """float32 [samples] at `rate` Hz -> at `wanted` Hz, by a windowed sinc (Hann), as torchaudio does by
    default (Smith, 1984)."""
    if rate == wanted:
        return samples
    shared = math.gcd(rate, wanted)
    old = rate // shared
    new = wanted // shared
    filters, width = _filters(old, new)
    padded = pad(samples, (width, width + old))[None, None]
    out = conv1d(padded, filters.to(samples.device), stride=old)[0].T.reshape(-1)
    return out[: math.ceil(new * len(samples) / old)]


@lru_cache(maxsize=_FILTERS)
def _filters(old: int, new: int) -> tuple[Tensor, int]:
    """One filter for each phase of the output, float32 [new, 1, taps], and the number of earlier samples that
    they read."""
    cutoff = min(old, new) * _ROLLOFF
    width = math.ceil(_ZEROS * old / cutoff)
    taps = torch.arange(-width, width + old, dtype=torch.float64) / old
    phases = torch.arange(0, -new, -1, dtype=torch.float64) / new
    at = ((phases[:, None] + taps) * cutoff).clamp(-_ZEROS, _ZEROS)
    window = torch.cos(at * math.pi / _ZEROS / 2) ** 2
    filters = torch.sinc(at) * window * (cutoff / old)
    return filters[:, None].float(), width


class CodecDecoder(CausalDecoder):
    """Decodes codes [frames, codebooks] to 44.1 kHz audio. Codes above the last one of their codebook are
    read as the last one, as in the published model.

    `fused`: see `pipelines.codec.fused.uses_fused_ops`; `reproducible`: see `CausalDecoder`.
    """

    def __init__(
        self,
        config: CodecConfig,
        source: TensorSource,
        codebooks: Sequence[Codebook],
        device: torch.device,
        dtype: torch.dtype,
        fused: bool | None = None,
        reproducible: bool = False,
    ) -> None:
        super().__init__(device, dtype, config.codebooks, config.samples_per_frame, None, reproducible)
        self.config = config
        load = CodecLoader(source, "quantizer.", dtype, device)
        layout = StateLayout()
        self._table = torch.cat([codebook.table() for codebook in codebooks]).to(dtype)
        sizes = torch.tensor(config.codes)
        self._offsets = (sizes.cumsum(0) - sizes).to(device)
        self._last = (sizes - 1).to(device)
        self.post = window_transformer(load.at("post_module."), layout, config.post)
        self.upsample = [
            UpsampleLayer(load.at(f"upsample.{i}."), layout, config.latent, factor)
            for i, factor in enumerate(reversed(config.downsample))
        ]
        model = CodecLoader(source, "decoder.model.", dtype, device)
        stack = ConvStack(model, layout, config.latent, config.decoder_dim, config.decoder_rates, tanh=True)
        self._stack = FusedStack(stack) if uses_fused_ops(device, dtype, fused) else stack
        self.skips_padding = self._stack.skips_padding
        self.state_size = layout.size

    def latents(self, codes: Tensor) -> Tensor:
        """int64 [B, T, codebooks] -> [B, T, latent], the sums of the codes' vectors."""
        return embedding(torch.minimum(codes.long(), self._last) + self._offsets, self._table).sum(dim=2)

    def run(self, codes: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        x = self.post(self.latents(codes), past)
        for layer in self.upsample:
            x = layer(x, past)
        return self._stack(x, past, lengths)


class Codec(NamedTuple):
    """The decoder and the encoder of the codec; the decoder is None if it is not needed."""

    decoder: CodecDecoder | None
    encoder: CodecEncoder


def load_codec(
    config: FishConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    reproducible: bool = False,
    decodes: bool = True,
) -> Codec:
    """Loads the folder's codec, its decoder only with `decodes`. The decoder runs in `dtype`, the encoder in float32; `reproducible`: see
    `CausalDecoder`.

    Raises `ModelError` (`model.bad_checkpoint`) that names the wrong tensor or file.
    """
    table = open_codec(config.folder)
    codec = codec_from(
        config.codec, table, torch.device(device), dtype, reproducible=reproducible, decodes=decodes
    )
    table.ignore(*_UNUSED, *([] if decodes else _OF_DECODER))
    # Older files of the codec have more tensors.
    if extra := table.left():
        log.warning("%s has tensors that the codec does not use: %s", table.place, shown(extra))
    return codec


def codec_from(
    config: CodecConfig,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool | None = None,
    reproducible: bool = False,
    decodes: bool = True,
) -> Codec:
    """Builds the codec from any source of tensors; `fused`, `reproducible`: see `CodecDecoder`. Raises as the
    source does."""
    load = CodecLoader(source, "quantizer.", torch.float32, device)
    places = [
        "semantic_quantizer.quantizers.0.",
        *(f"quantizer.quantizers.{i}." for i in range(config.residual_codebooks)),
    ]
    codebooks = [Codebook(load.at(place), config, size) for place, size in zip(places, config.codes)]
    decoder = None
    if decodes:
        decoder = CodecDecoder(config, source, codebooks, device, dtype, fused, reproducible)
    return Codec(decoder, CodecEncoder(config, source, codebooks, device))

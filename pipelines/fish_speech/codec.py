"""The causal 44.1 kHz codec: recordings to codes, codes to a waveform; whole utterances or chunk by chunk, with equal results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

import kernels.codec_ops  # noqa: F401  (registers the ops)
from kernels.registry import to_device
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.fish_speech.codec_blocks import (
    CausalConv,
    ConvNeXt,
    Loader,
    Past,
    Repeat,
    Snake,
    StateLayout,
    UpsampleBlock,
    WindowTransformer,
)
from pipelines.fish_speech.codec_encoder import Codebook, CodecEncoder
from pipelines.fish_speech.config import CodecConfig, FishConfig
from pipelines.fish_speech.weights import TensorSource, open_codec
from pipelines.nn.codec_fused import FusedStack, codec_kernels

STACK_KERNEL = 7
#: Frames of one pass of the decoder, and of all rows of a pass: what bounds its memory.
PASS_FRAMES, BATCH_FRAMES = 512, 4096
#: On a GPU lengths are rounded up to multiples of this, so that convolutions meet few shapes.
LENGTH_STEP = 16


@dataclass(slots=True)
class CodecState:
    """What the decoder remembers of one stream.

    `values`: [size] flat histories of all convolutions and the last keys and values of all layers; `frames`: frames decoded so far.
    """

    values: Tensor
    frames: int


class ConvStack:
    """From the upsampled latents to the waveform: [B, T, latent] -> float32 [B, T * rates] in [-1, 1]."""

    def __init__(self, load: Loader, layout: StateLayout, config: CodecConfig) -> None:
        widths = [config.decoder_dim >> i for i in range(len(config.decoder_rates) + 1)]
        last = len(widths)
        self.stem = CausalConv(load.at("0.conv."), layout, config.latent, config.decoder_dim, STACK_KERNEL)
        self.blocks = [UpsampleBlock(load.at(f"{i + 1}."), layout, widths[i], rate) for i, rate in enumerate(config.decoder_rates)]
        self.snake = Snake(load.at(f"{last}."), widths[-1])
        self.head = CausalConv(load.at(f"{last + 1}.conv."), layout, widths[-1], 1, STACK_KERNEL)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        x = self.stem(x, past)
        for block in self.blocks:
            x = block(x, past)
        return torch.tanh(self.head(self.snake(x), past).squeeze(2).float())


class FusedConvStack:
    """The same on fused ops, which have kernels on a GPU. What it keeps of the past is its own."""

    #: The fused head cuts off at 1, and tanh is 1 long before this: a power of two, so that scaling changes no digit.
    _HEADROOM = 64.0

    def __init__(self, stack: ConvStack) -> None:
        stack.head.weight, stack.head.bias = stack.head.weight / self._HEADROOM, stack.head.bias / self._HEADROOM
        self._stack = FusedStack(stack)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        return torch.tanh(self._stack(x, past) * self._HEADROOM)


class CodecDecoder:
    """Turns codes [frames, codebooks] into audio, `samples_per_frame` samples a frame, strictly causal.

    On a CPU every utterance is decoded by itself, so that its samples do not depend on its neighbours, bit for bit. On a GPU
    utterances of like length share a batch, padded on the right, which no sample inside can see. `fused` runs the convolution stack
    on fused ops; by default it does in bfloat16 on a GPU, where they have kernels.
    """

    def __init__(
        self,
        config: CodecConfig,
        source: TensorSource,
        codebooks: Sequence[Codebook],
        device: torch.device,
        dtype: torch.dtype,
        fused: bool | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.samples_per_frame = config.samples_per_frame
        load, layout = Loader(source, "quantizer.", dtype, device), StateLayout()
        self.codebooks = codebooks
        self._table = torch.cat([codebook.table() for codebook in codebooks]).to(dtype)
        sizes = torch.tensor([config.semantic_codes] + [config.residual_codes] * config.residual_codebooks)
        self._offsets, self._last = (sizes.cumsum(0) - sizes).to(device), (sizes - 1).to(device)
        self._post = WindowTransformer(load.at("post_module."), layout, config.post)
        self._upsample = [
            (
                Repeat(load.at(f"upsample.{i}.0.conv."), config.latent, factor),
                ConvNeXt(load.at(f"upsample.{i}.1."), layout, config.latent),
            )
            for i, factor in enumerate(reversed(config.downsample))
        ]
        stack = ConvStack(Loader(source, "decoder.model.", dtype, device), layout, config)
        if fused is None:
            fused = device.type == "cuda" and dtype == torch.bfloat16 and codec_kernels()
        elif fused and device.type == "cuda":
            import_module("kernels.codec_launch")  # gives the fused ops their kernels
        self._stack = FusedConvStack(stack) if fused else stack
        self.state_size = layout.size

    def new_state(self) -> CodecState:
        """The state before the first frame of a stream."""
        return CodecState(torch.zeros(self.state_size, dtype=self.dtype, device=self.device), 0)

    @torch.inference_mode()
    def decode(self, codes: Sequence[Tensor], states: Sequence[CodecState] | None = None) -> list[Tensor]:
        """Decodes whole utterances.

        codes: one [frames, codebooks] of integers each, lengths may differ; codes beyond a codebook stand for its last one, as in the
        published model. `states` are where the utterances start; they are read, not changed. Returns float32
        [frames * samples_per_frame] each, in [-1, 1]. Raises `SynthesisError` (`synth.engine`) on codes of another shape or below 0.
        """
        for item in codes:
            self._check(item)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        for indices in self._batches([len(item) for item in codes]):
            starts = None if states is None else [states[i] for i in indices]
            if starts is not None and not any(start.frames for start in starts):
                starts = None  # a fresh state takes the same path as none, so that the samples are the same to the last bit
            decoded = self._decode_padded([codes[i] for i in indices], starts)
            for i, wave in zip(indices, decoded):
                waves[i] = wave[: len(codes[i]) * self.samples_per_frame]
        return waves

    @torch.inference_mode()
    def decode_chunk(self, states: Sequence[CodecState], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decodes the next frames of several streams and moves their states on.

        codes: one [n, codebooks] each, n may differ. Whatever the chunks, their concatenation equals `decode` up to rounding.
        Returns float32 [n * samples_per_frame] each. Raises as `decode`.
        """
        for item in codes:
            self._check(item)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        order = sorted(range(len(codes)), key=lambda i: len(codes[i]))
        for frames, same in groupby(order, key=lambda i: len(codes[i])):
            for indices in self._rows(list(same), frames):
                past = self._past([states[i] for i in indices])
                decoded = self._run(torch.stack([codes[i].to(self.device) for i in indices]), past)
                for row, i in enumerate(indices):
                    states[i].values = past.after[row].clone() if len(indices) > 1 else past.after[row]
                    states[i].frames += frames
                    waves[i] = decoded[row]
        return waves

    def latents(self, codes: Tensor) -> Tensor:
        """int64 [B, T, codebooks] -> [B, T, latent], what the codes stand for together."""
        return embedding(torch.minimum(codes.long(), self._last) + self._offsets, self._table).sum(dim=2)

    def transformed(self, x: Tensor, past: Past | None = None) -> Tensor:
        """[B, T, latent] -> [B, T, latent] behind the quantizer's transformer."""
        return self._post(x, past)

    def upsampled(self, x: Tensor, past: Past | None = None) -> Tensor:
        """[B, T, latent] -> [B, T * 4 in the published codec, latent]."""
        for repeat, convnext in self._upsample:
            x = convnext(repeat(x), past)
        return x

    def _check(self, codes: Tensor) -> None:
        count = self.config.codebooks
        if codes.dim() != 2 or codes.shape[1] != count or codes.is_floating_point():
            raise SynthesisError(
                ErrorCode.SYNTH_ENGINE,
                f"The codec got codes of shape {list(codes.shape)} and type {codes.dtype}, not [frames, {count}] integers.",
            )
        # On a GPU this test would make the host wait for the device; there codes come from samplers that cannot go below 0.
        if not codes.is_cuda and codes.numel() and int(codes.min()) < 0:
            raise SynthesisError(ErrorCode.SYNTH_ENGINE, f"The codec got the code {int(codes.min())}.")

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Groups utterances that are decoded together; like lengths go together."""
        order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
        if self.device.type == "cpu":
            return [[i] for i in order]
        batches: list[list[int]] = []
        for i in order:
            widest = _round_up(lengths[batches[-1][0]]) if batches else 0
            if batches and _round_up(lengths[i]) * 3 > widest * 2 and (len(batches[-1]) + 1) * min(widest, PASS_FRAMES) <= BATCH_FRAMES:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _rows(self, indices: list[int], frames: int) -> list[list[int]]:
        """Splits streams with chunks of one length into batches."""
        if not frames:
            return []
        rows = 1 if self.device.type == "cpu" else max(1, BATCH_FRAMES // frames)
        return [indices[start : start + rows] for start in range(0, len(indices), rows)]

    def _past(self, states: Sequence[CodecState]) -> Past:
        positions = torch.tensor([state.frames for state in states], device=self.device)
        return Past(torch.stack([state.values for state in states]), positions)

    def _decode_padded(self, codes: Sequence[Tensor], states: Sequence[CodecState] | None) -> Tensor:
        """[B] utterances -> [B, samples of the longest one, rounded up]; memory is bounded by going through long ones in passes."""
        longest = max(len(item) for item in codes)
        padded = longest if self.device.type == "cpu" else _round_up(longest)
        batch = torch.stack([pad(item, (0, 0, 0, padded - len(item))) for item in codes])
        batch = to_device(batch, self.device) if batch.device.type == "cpu" else batch
        if states is None and padded <= PASS_FRAMES:
            return self._run(batch, None)
        past = self._past(states if states is not None else [self.new_state() for _ in codes])
        waves: list[Tensor] = []
        for part in batch.split(PASS_FRAMES, dim=1):
            waves.append(self._run(part, past))
            past = Past(past.after, past.positions + part.shape[1])
        return torch.cat(waves, dim=1)

    def _run(self, codes: Tensor, past: Past | None) -> Tensor:
        """One pass: [B, T, codebooks] -> float32 [B, T * samples_per_frame]."""
        return self._stack(self.upsampled(self.transformed(self.latents(codes), past), past), past)


def _round_up(frames: int) -> int:
    return -(-frames // LENGTH_STEP) * LENGTH_STEP


@dataclass(frozen=True, slots=True)
class Codec:
    """Both halves of the codec."""

    config: CodecConfig
    decoder: CodecDecoder
    encoder: CodecEncoder


def load_codec(config: FishConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Codec:
    """Loads the folder's codec. The decoder runs in `dtype`, the encoder in float32.

    Raises `ModelError` (`model.bad_checkpoint`) that names the tensor or file at fault.
    """
    table = open_codec(config.folder)
    codec = codec_from(config.codec, table, torch.device(device), dtype)
    table.finish()
    return codec


def codec_from(config: CodecConfig, source: TensorSource, device: torch.device, dtype: torch.dtype, fused: bool | None = None) -> Codec:
    """Builds the codec from any source of tensors; `fused` as for `CodecDecoder`. Raises as the source does."""
    load = Loader(source, "quantizer.", torch.float32, device)
    places = ["semantic_quantizer.quantizers.0.", *(f"quantizer.quantizers.{i}." for i in range(config.residual_codebooks))]
    sizes = [config.semantic_codes] + [config.residual_codes] * config.residual_codebooks
    codebooks = [Codebook(load.at(place), config, size) for place, size in zip(places, sizes)]
    return Codec(config, CodecDecoder(config, source, codebooks, device, dtype, fused), CodecEncoder(config, source, codebooks, device))

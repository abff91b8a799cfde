"""The 12 Hz codec of Qwen3-TTS. Its decoder gives equal results for whole utterances and for their chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from kernels.codec_ops import snake_parameters
from pipelines.codec.blocks import (
    CONVNEXT_KERNEL,
    RESIDUAL_DILATIONS,
    RESIDUAL_KERNEL,
    STACK_KERNEL,
    BlockLoader,
    CausalConv,
    ConvStack,
    Past,
    PastOfEnds,
    Snake,
    StateLayout,
    UpsampleLayer,
    WindowTransformer,
)
from pipelines.codec.decoder import CausalDecoder
from pipelines.codec.fused import FusedFront, FusedStack, uses_fused_ops
from pipelines.nn.checkpoint import Checkpoint, Loader, TensorSource, take_stack
from pipelines.qwen3_tts.config import CodecConfig, CodecDecoderConfig

if TYPE_CHECKING:
    from pipelines.qwen3_tts.speaker import CodecEncoder

PRE_CONV_KERNEL = 3
#: Minimum of `cluster_usage`, which is a divisor.
USAGE_FLOOR = 1e-5


class CodecLoader(BlockLoader):
    """Loads the decoder's tensors: plain convolutions, and SnakeBeta, whose parameters are stored as
    logarithms."""

    unit_names = "act1.", "conv1.conv.", "act2.", "conv2.conv."
    scale_names = "self_attn_layer_scale.scale", "mlp_layer_scale.scale"

    def kernel(self, *shape: int) -> Tensor:
        return self("weight", *shape)

    def snake(self, channels: int) -> Snake:
        wide = self.float()
        return Snake(*snake_parameters(wide("alpha", channels), wide("beta", channels)))


def _transformer(load: CodecLoader, layout: StateLayout, config: CodecDecoderConfig) -> WindowTransformer:
    """The decoder's transformer at frame rate: [B, T, hidden] -> [B, T, hidden]."""
    shape = config.stack
    stack = take_stack(load, shape, head_norm=False)
    return WindowTransformer(
        load, layout, stack, shape, config.sliding_window, lambda exponents: shape.rope_theta**-exponents
    )


class CodecDecoder(CausalDecoder):
    """Decodes codes [frames, codebooks] to 24 kHz audio.

    `fused`: see `pipelines.codec.fused.uses_fused_ops`. `fused_front`: whether the layers before the
    convolution stack run on fused ops too.
    """

    def __init__(
        self,
        config: CodecDecoderConfig,
        source: TensorSource,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        fused: bool | None = None,
        reproducible: bool = False,
        fused_front: bool = False,
    ) -> None:
        super().__init__(
            device,
            dtype,
            config.num_quantizers,
            config.samples_per_frame,
            config.codebook_size - 1,
            reproducible,
        )
        self.config = config
        layout = StateLayout()
        latent = config.latent_dim
        load = CodecLoader(source, "decoder.", dtype, self.device)
        self._table = _code_table(config, load.at("quantizer.").float()).to(dtype)
        self._offsets = torch.arange(config.num_quantizers, device=self.device) * config.codebook_size
        self._pre_conv = CausalConv(
            load.at("pre_conv.conv."), layout, config.codebook_dim, latent, PRE_CONV_KERNEL
        )
        inside = load.at("pre_transformer.")
        hidden = config.stack.hidden
        self._entry = inside("input_proj.weight", hidden, latent), inside("input_proj.bias", hidden)
        self._exit = inside("output_proj.weight", latent, hidden), inside("output_proj.bias", latent)
        self._transformer = _transformer(inside, layout, config)
        self._upsample = [
            UpsampleLayer(load.at(f"upsample.{i}."), layout, latent, factor)
            for i, factor in enumerate(config.upsampling_ratios)
        ]
        parts = self._pre_conv, self._entry, self._transformer, self._exit, self._upsample
        self._front = FusedFront(*parts) if fused_front else None
        stack = ConvStack(
            load.at("decoder."), layout, latent, config.decoder_dim, config.upsample_rates, tanh=False
        )
        self._stack = FusedStack(stack) if uses_fused_ops(self.device, dtype, fused) else stack
        self.skips_padding = self._stack.skips_padding
        self.state_size = layout.size
        self.reach = _reach(config)

    @torch.inference_mode()
    def states_after(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """See `CausalDecoder.states_after`. The convolutions only run on the last frames of each row."""
        ends = lengths - self.reach
        past = PastOfEnds(self.state_size, ends, self.dtype)
        earlier = codes[:, : max(codes.shape[1] - self.reach, 1)].long() + self._offsets
        earlier = embedding(earlier, self._table).sum(dim=2)
        self._transformer(linear(self._pre_conv(earlier, past), *self._entry), past)
        last = ends[:, None] + torch.arange(self.reach, device=ends.device)
        past = Past(past.after, ends)
        self.run(codes.gather(1, last[..., None].expand(-1, -1, codes.shape[2])), past)
        return past.after

    def run(self, codes: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        x = embedding(codes.long() + self._offsets, self._table).sum(dim=2)
        if self._front is not None:
            return self._stack(self._front(x, past), past, lengths)
        x = linear(self._transformer(linear(self._pre_conv(x, past), *self._entry), past), *self._exit)
        for layer in self._upsample:
            x = layer(x, past)
        return self._stack(x, past, lengths)


def _reach(config: CodecDecoderConfig) -> int:
    """Frames after which the states of the convolutions that follow the transformer do not depend on earlier
    ones."""
    rate = 1
    frames = 0.0
    for factor in config.upsampling_ratios:
        rate *= factor
        frames += (CONVNEXT_KERNEL - 1) / rate
    frames += (STACK_KERNEL - 1) / rate
    for factor in config.upsample_rates:
        frames += 1 / rate
        rate *= factor
        frames += (RESIDUAL_KERNEL - 1) * sum(RESIDUAL_DILATIONS) / rate
    return math.ceil(frames + (STACK_KERNEL - 1) / rate)


def _code_table(config: CodecDecoderConfig, load: Loader) -> Tensor:
    """Every code's contribution to the decoder's input: [codebooks * codebook_size, codebook_dim].

    A code's vector is embedding_sum / cluster_usage; since projection is linear, projecting the table
    equals projecting the sums.
    """
    size = config.codebook_size
    width = config.codebook_dim // 2
    dim = config.codebook_dim
    tables = list[Tensor]()
    for name, layers in (("rvq_first", 1), ("rvq_rest", config.num_quantizers - 1)):
        load(f"{name}.input_proj.weight", width, dim, 1)  # in the file, but only encoding uses it
        projection = load(f"{name}.output_proj.weight", dim, width, 1).squeeze(2)
        for i in range(layers):
            codebook = load.at(f"{name}.vq.layers.{i}._codebook.")
            usage = codebook("cluster_usage", size).clamp(min=USAGE_FLOOR)
            tables.append(linear(codebook("embedding_sum", size, width) / usage[:, None], projection))
    return torch.cat(tables)


class Codec(NamedTuple):
    """Both halves of the 12 Hz codec; each is None if it is not needed."""

    config: CodecConfig
    decoder: CodecDecoder | None
    encoder: CodecEncoder | None


def fuses_front(device: torch.device | str, dtype: torch.dtype, reproducible: bool, codec_rows: int) -> bool:
    """Whether the layers before the convolutions run on fused ops: on a GPU in bfloat16, where that is
    faster.

    Gathered batches of a `reproducible` decoder use the plain modules, because tests showed that their bits
    do not depend on the batch.
    """
    return (
        torch.device(device).type == "cuda"
        and dtype == torch.bfloat16
        and (not reproducible or codec_rows > 0)
    )


def load_codec(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    reproducible: bool = False,
    fused_front: bool = False,
    encodes: bool = True,
    decodes: bool = True,
) -> Codec:
    """Loads a `speech_tokenizer` folder: with `encodes` its encoder, with `decodes` its decoder.

    The decoder runs in `dtype`; the encoder always in float32, because a rounding error can change a code.

    Raises `ModelError` (`model.bad_checkpoint`) with the name of a tensor or file that is missing, unknown or
    has another shape.
    """
    config = CodecConfig.load(folder)
    with Checkpoint(folder) as checkpoint:
        decoder = encoder = None
        if decodes:
            decoder = CodecDecoder(
                config.decoder, checkpoint, device, dtype, reproducible=reproducible, fused_front=fused_front
            )
        else:
            checkpoint.ignore("decoder.*")
        if encodes:
            from pipelines.qwen3_tts.speaker import CodecEncoder  # it imports this module

            encoder = CodecEncoder(config, checkpoint, device)
        else:
            checkpoint.ignore("encoder.*")
        checkpoint.ignore("*rotary_emb*")
        checkpoint.finish()
    return Codec(config, decoder, encoder)

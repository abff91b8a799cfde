"""What stands in front of a codec's convolution stack, on fused ops: five kernels a layer of the transformer, three a ConvNeXt block.

Linear maps that follow each other are one, and scales stand in the weights beside them: the function is the same, and its states are those
of the plain modules.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kernels.codec_ops import GELU, PLAIN, SWIGLU
from pipelines.codec.blocks import CONVNEXT_EPS, CausalConv, ConvNeXt, Past, UpsampleLayers
from pipelines.codec.fused import codec_kernels, tap_major
from pipelines.codec.transformer import TransformerLayer, WindowTransformer

_ops = torch.ops.nightjar

#: Weight [out, in] and bias of a linear map.
Linear = tuple[Tensor, Tensor]


class _Layer:
    """A transformer layer: norm and projection, attention, output, norm and SwiGLU, output. The norms and layer scales are folded in."""

    def __init__(self, layer: TransformerLayer, window: int) -> None:
        weights = layer.weights
        self._eps, self._span, self._window = layer.eps, layer.span, window
        self._kv_heads = layer.kv_width // layer.head_dim
        self._heads = len(weights.qkv) // layer.head_dim - 2 * self._kv_heads
        self._qkv = _packed(weights.qkv.float() * weights.norm1.float(), weights.qkv.dtype)
        self._out = _packed(weights.scale1.float()[:, None] * weights.out.float(), weights.out.dtype)
        self._gate_up = _packed(weights.gate_up.float() * weights.norm2.float(), weights.gate_up.dtype)
        self._down = _packed(weights.scale2.float()[:, None] * weights.down.float(), weights.down.dtype)

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, past: Past | None) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim]; cosine, sine: float32 [B or 1, T, head_dim / 2]."""
        before = kept = positions = None
        if past is not None:
            at = slice(self._span.offset, self._span.end)
            before, kept, positions = past.before[:, at], past.after[:, at], past.positions
        qkv = _ops.codec_product(x, self._qkv, None, None, self._eps, PLAIN)
        heard = _ops.codec_window_attention(qkv, before, kept, positions, cosine, sine, self._heads, self._kv_heads, self._window)
        x = _ops.codec_product(heard, self._out, None, x, None, PLAIN)
        inner = _ops.codec_product(x, self._gate_up, None, None, self._eps, SWIGLU)
        return _ops.codec_product(inner, self._down, None, x, None, PLAIN)


class _ConvNeXt:
    """A ConvNeXt block: convolution and norm, wide product, narrow product."""

    def __init__(self, block: ConvNeXt) -> None:
        conv, dtype = block.depthwise, block.wide_weight.dtype
        self._span, self._taps, self._bias = conv.span, conv.weight[:, 0].T.float().contiguous(), conv.bias.float()
        wide, gamma = block.wide_weight.float(), block.gamma.float()
        self._wide = _packed(wide * block.norm_weight.float(), dtype)
        self._wide_bias = block.wide_bias.float() + wide @ block.norm_bias.float()
        self._narrow = _packed(gamma[:, None] * block.narrow_weight.float(), dtype)
        self._narrow_bias = gamma * block.narrow_bias.float()

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self._span, x)
        hidden = _ops.codec_depthwise_norm(x, history, self._taps, self._bias, CONVNEXT_EPS)
        hidden = _ops.codec_product(hidden, self._wide, self._wide_bias, None, None, GELU)
        return _ops.codec_product(hidden, self._narrow, self._narrow_bias, x, None, PLAIN)


class FusedFront:
    """From the sums of codebook vectors to upsampled latents: [B, T, codebook_dim] -> [B, T * factors, latent].

    The entry is folded into the convolution before it; the last norm and the exit are folded into the first repetition.
    """

    def __init__(self, conv: CausalConv, entry: Linear, transformer: WindowTransformer, exit_: Linear, upsample: UpsampleLayers) -> None:
        """`conv`, then the linear map `entry`, the transformer, the linear map `exit_`, and at least one upsampling."""
        dtype, (into, into_bias), (out, out_bias) = conv.weight.dtype, entry, exit_
        self._conv_span, self._conv_taps = conv.span, conv.weight.shape[2]
        self._conv = tap_major(torch.einsum("hl,ldk->hdk", into.float(), conv.weight.float())).to(dtype)
        self._conv_bias = into.float() @ conv.bias.float() + into_bias.float()
        self._layers = [_Layer(layer, transformer.window) for layer in transformer.layers]
        self._eps, self._rotary = transformer.eps, transformer.rotary
        first = upsample.layers[0][0]
        wide = first.weight.float()
        exits = _packed(wide @ (out.float() * transformer.norm.float()), dtype), first.bias.float() + wide @ out_bias.float()
        repeats = [exits, *((_packed(repeat.weight, dtype), repeat.bias.float()) for repeat, _ in upsample.layers[1:])]
        self._upsample = [(repeat.factor, *made, _ConvNeXt(block)) for made, (repeat, block) in zip(repeats, upsample.layers)]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        steps, lead, positions = x.shape[1], 0, torch.arange(x.shape[1], device=x.device)[None]
        if past is not None:
            lead, positions = self._conv_span.steps, past.positions[:, None] + positions
            x = torch.cat((past.swap(self._conv_span, x), x), dim=1)
        hidden = x.new_empty(len(x), steps, len(self._conv_bias))
        _ops.codec_active_conv(x, lead, self._conv, self._conv_bias, self._conv_taps, 1, None, hidden, None, 0, None, None)
        cosine, sine = (table[:, 0].chunk(2, dim=-1)[0].contiguous() for table in self._rotary(positions, torch.float32))
        for layer in self._layers:
            hidden = layer(hidden, cosine, sine, past)
        eps: float | None = self._eps
        for factor, weight, bias, block in self._upsample:
            rows, steps, _ = hidden.shape
            hidden = block(_ops.codec_product(hidden, weight, bias, None, eps, PLAIN).view(rows, steps * factor, -1), past)
            eps = None
        return hidden


def prepared_front(
    conv: CausalConv, entry: Linear, transformer: WindowTransformer, exit_: Linear, upsample: UpsampleLayers, device: torch.device
) -> FusedFront:
    """The front on fused ops, which have kernels on a GPU with Triton in bfloat16 and run as their twins elsewhere."""
    if device.type == "cuda" and codec_kernels():
        import_module("kernels.codec_front_triton")
    return FusedFront(conv, entry, transformer, exit_, upsample)


def _packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A linear map's weight [out, in] as [in, out]."""
    return weight.T.to(dtype).contiguous()

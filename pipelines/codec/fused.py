"""Codecs on fused ops: the `ConvStack`, and the front before it.

In the stack each op applies the snake activation of the next op, so that every value is activated once. It
does the arithmetic of the plain stack in the same order of rounding, but its stream states hold activated
inputs, so they are not interchangeable with the plain stack's.

The front has five kernels for each layer of the transformer and three for each ConvNeXt block. Consecutive
linear maps are merged, and scales are folded into weights: the function is the same, and its states are those
of the plain modules.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import codec_cuda
from kernels.codec_ops import GELU, PLAIN, SWIGLU
from kernels.registry import to_device
from kernels.toolchain import TRITON_ADVICE, triton_fault
from pipelines.codec.blocks import (
    CONVNEXT_EPS,
    CausalConv,
    ConvNeXt,
    ConvStack,
    Past,
    Snake,
    StateSpan,
    TransformerLayer,
    UpsampleBlock,
    UpsampleLayer,
    WindowTransformer,
)

log = logging.getLogger(__name__)

#: Maximum number of channels for which one program of a kernel holds all channels of a step, so that a
#: residual unit is one kernel.
WIDEST_UNIT = 192
#: The fused head clamps its results to [-1, 1]. If tanh follows, the head's weights are therefore divided by
#: this, and its results are multiplied by it. Tanh reaches 1 far below this value, and a power of two changes
#: no digits.
HEADROOM = 64.0

_ops = torch.ops.nightjar

#: Weight [out, in] and bias of a linear map.
Linear = tuple[Tensor, Tensor]


class Reader(NamedTuple):
    """The op that reads an activated result: its snake, which the op before it applies, and the other steps that it
    reads: the past ones in `span` if it is causal, or `margin` steps of zeros on either side if it is centred."""

    snake: Snake
    span: StateSpan | None = None
    margin: int = 0

    def buffer(self, like: Tensor, steps: int, past: Past | None) -> tuple[Tensor, int, int]:
        """An input of so many steps that are still to be written, [B, lead + steps, channels], its lead, and the
        number of values before its first step."""
        channels = len(self.snake.gain)
        margin = self.margin
        if past is None or self.span is None:
            return margined(like, steps, channels, margin), 2 * margin, margin * channels
        lead = self.span.steps
        buffer = like.new_empty(len(like), lead + steps, channels)
        buffer[:, :lead] = self.span.of(past.before)
        return buffer, lead, lead * channels

    def settle(self, a: Tensor, past: Past | None) -> Tensor:
        """Stores the last steps of a complete input for the next chunk; returns the input."""
        if past is not None and self.span is not None:
            self.span.of(past.after).copy_(a[:, a.shape[1] - self.span.steps :])
        return a


class FusedUnit:
    """A residual unit: one kernel, or one for each convolution if it has too many channels. `after` reads its
    result."""

    def __init__(self, wide: Linear, narrow: Linear, dilation: int, inner: Snake, after: Reader) -> None:
        """`wide`: weight [C, C, taps] and bias of the dilated convolution; `narrow`: weight [C, C] and bias; both
        with the output channel first. `inner`: the snake between them."""
        weight1, bias1 = wide
        weight2, bias2 = narrow
        self._dilation = dilation
        self._inner = inner
        self.after = after
        self._taps = weight1.shape[2]
        self._whole = len(bias1) <= WIDEST_UNIT
        self._first = tap_major(weight1), bias1.float()
        self._second = weight2.T.contiguous(), bias2.float()
        self._packed = codec_cuda.chosen(self._first[0], self._second[0], self._dilation)

    def __call__(
        self, a: Tensor, lead: int, x: Tensor, into: tuple[Tensor | None, Tensor, int], **stop: Any
    ) -> None:
        """See `kernels.codec_ops.codec_active_unit`. `a`: [B, lead + T, C], the history and then snake(x); `x`:
        [B, T, C]; `into`: raw, active and active_lead; `stop`: ends and open_ends."""
        after = (*into, *self.after.snake)
        if self._whole:
            _ops.codec_active_unit(
                a, lead, x, *self._first, *self._inner, *self._second, self._dilation, *after, **stop, packed=self._packed
            )  # fmt: skip
            return
        hidden = torch.empty_like(x)
        _ops.codec_active_conv(
            a, lead, *self._first, self._taps, self._dilation, None, None, hidden, 0, *self._inner, **stop
        )
        _ops.codec_active_conv(hidden, 0, *self._second, 1, 1, x, *after, **stop)


#: The arguments of a `FusedUnit` except its reader.
UnitParts = tuple[Linear, Linear, int, Snake]


class FusedBlock:
    """A transposed convolution, which is a convolution of few taps, and residual units, all of them causal or all
    centred."""

    def __init__(self, up: Linear, rate: int, units: Sequence[UnitParts], readers: Sequence[Reader]) -> None:
        """`up`: weight [taps * Cin, rate * Cout] and bias [Cout]; `readers`: one of each unit's input, and the one
        of the result."""
        self.rate = rate
        self._first = readers[0]
        # Each step of the transposed convolution becomes `rate` steps of the first unit.
        self._weight = up[0]
        self._bias = up[1].float().repeat(rate)
        self._snake = [values.repeat(rate) for values in self._first.snake]
        self._units = [FusedUnit(*parts, after) for parts, after in zip(units, readers[1:])]
        # Only a causal op never reads what follows the end of a row.
        self._open_ends = not self._first.margin

    def __call__(
        self, a: Tensor, lead: int, past: Past | None, before: Tensor | None, ends: Tensor | None
    ) -> tuple[Tensor, int]:
        """Activated [B, lead + T, Cin] -> the next op's activated input and its lead (the steps in it that are not
        new); `before`, `ends`: where the rows end in the block's input and its output."""
        steps = (a.shape[1] - lead) * self.rate
        reader = self._first
        x = a.new_empty(len(a), steps, len(reader.snake.gain))
        following, ahead, offset = reader.buffer(a, steps, past)
        taps = len(self._weight) // a.shape[2]
        into = (x, following, offset, *self._snake)
        _ops.codec_active_conv(
            a, lead, self._weight, self._bias, taps, 1, None, *into, ends=before, open_ends=self._open_ends
        )
        for unit in self._units:
            a = reader.settle(following, past)
            lead = ahead
            reader = unit.after
            following, ahead, offset = reader.buffer(a, steps, past)
            raw = None if unit is self._units[-1] else torch.empty_like(x)
            unit(a, lead, x, (raw, following, offset), ends=ends, open_ends=self._open_ends)
            x = x if raw is None else raw
        return reader.settle(following, past), ahead


def _causal_block(block: UpsampleBlock, after: Reader) -> FusedBlock:
    readers = [*(Reader(unit.first, unit.span) for unit in block.units), after]
    units = [(unit.wide, unit.narrow, unit.dilation, unit.second) for unit in block.units]
    return FusedBlock((block.weight, block.bias), block.rate, units, readers)


class FusedStack:
    """From upsampled latents to the waveform, like the plain stack: [B, T, latent] -> float32 [B, T * rates]
    in [-1, 1]."""

    skips_padding = True

    def __init__(self, stack: ConvStack) -> None:
        stem = stack.stem
        head = stack.head
        self._stem_span = stem.span
        self._stem = tap_major(stem.weight), stem.bias.float(), stem.weight.shape[2], 1, None
        readers = [Reader(part.snake, part.span) for part in stack.blocks] + [Reader(stack.snake, head.span)]
        self._entry = readers[0]
        self._blocks = [_causal_block(block, after) for block, after in zip(stack.blocks, readers[1:])]
        rates = [block.rate for block in stack.blocks]
        #: Number of samples for each step of each block's input, and of the head's input.
        self._step_samples = [*accumulate(rates[::-1], mul, initial=1)][::-1]
        self._tanh = stack.tanh
        weight, bias = (
            (head.weight / HEADROOM, head.bias / HEADROOM) if stack.tanh else (head.weight, head.bias)
        )
        self._head = weight[0].T.contiguous(), bias.float()

    def __call__(self, x: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        """`lengths`: the number of samples that are needed of each row. Later samples are undefined, since
        their tiles are skipped."""
        lead = 0
        ends = self._ends(lengths, x.device)
        if past is not None:
            lead = self._stem_span.steps
            x = self._stem_span.extended(x, past)
        entry = self._entry
        a, ahead, offset = entry.buffer(x, x.shape[1] - lead, past)
        into = (None, a, offset, *entry.snake)
        _ops.codec_active_conv(x, lead, *self._stem, *into, ends=ends[0], open_ends=True)
        a = entry.settle(a, past)
        for block, before, after in zip(self._blocks, ends, ends[1:]):
            a, ahead = block(a, ahead, past, before, after)
        samples = _ops.codec_head(a, ahead, *self._head, ends=ends[-1])
        return torch.tanh(samples * HEADROOM) if self._tanh else samples

    def _ends(self, lengths: Sequence[int] | None, device: torch.device) -> Sequence[Tensor | None]:
        """Where rows with these numbers of samples end: int32 [B] for the input of each block and of the head,
        counted in the steps of that input. All are sent in one copy."""
        if lengths is None:
            return [None] * len(self._step_samples)
        # Each row of the table starts at a multiple of 16 bytes; Triton would compile another kernel for
        # other pointers.
        table = np.zeros((len(self._step_samples), -(-len(lengths) // 4) * 4), np.int32)
        table[:, : len(lengths)] = -(-np.array(lengths) // np.array(self._step_samples)[:, None])
        return to_device(table, device)[:, : len(lengths)].unbind()


def uses_fused_ops(device: torch.device, dtype: torch.dtype, fused: bool | None) -> bool:
    """Whether a codec runs on fused ops, whose kernels are then loaded on a GPU. `fused` None: in bfloat16 on a
    GPU, if the kernels can be made."""
    on_gpu = device.type == "cuda"
    if fused is None:
        return on_gpu and dtype == torch.bfloat16 and codec_kernels()
    if fused and on_gpu:
        import_module("kernels.codec_launch")
    return fused


def tap_major(weight: Tensor) -> Tensor:
    """A convolution's weight [Cout, Cin, k] as [k * Cin, Cout]."""
    return weight.permute(2, 1, 0).reshape(-1, weight.shape[0]).contiguous()


def margined(like: Tensor, steps: int, channels: int, margin: int) -> Tensor:
    """[B, margin + steps + margin, channels] with zero margins and uninitialized steps."""
    made = like.new_empty(len(like), steps + 2 * margin, channels)
    if margin:
        made[:, :margin], made[:, margin + steps :] = 0, 0
    return made


@cache
def codec_kernels() -> bool:
    """Loads the kernels of the fused ops of codecs for the current CUDA device.

    Returns False, with one warning, if Triton cannot make them: codecs then run as single PyTorch ops.
    """
    fault = triton_fault()
    if fault is None:
        import_module("kernels.codec_launch")
        return True
    log.warning(
        "%s Codecs run as single PyTorch ops instead of fused kernels, which is slower. %s",
        fault,
        TRITON_ADVICE,
    )
    return False


class _Layer:
    """A transformer layer: norm and projection, attention, output, norm and SwiGLU, output. The norms' weights
    and layer scales are folded into the products."""

    def __init__(self, layer: TransformerLayer, window: int) -> None:
        weights = layer.weights
        dtype = layer.weights.qkv.dtype
        shape = layer.shape
        self._eps = shape.eps
        self._span = layer.span
        self._sizes = shape.heads, shape.kv_heads, window
        self._qkv = _packed(weights.qkv.float() * weights.input_norm.float(), dtype)
        self._out = _packed(layer.attention_scale.float()[:, None] * weights.o.float(), dtype)
        self._gate_up = _packed(weights.gate_up.float() * weights.post_norm.float(), dtype)
        self._down = _packed(layer.mlp_scale.float()[:, None] * weights.down.float(), dtype)

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, past: Past | None) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim]; cosine, sine: float32 [B or 1, T, head_dim / 2]."""
        before = kept = positions = None
        if past is not None:
            at = self._span.at
            before = past.before[:, at]
            kept = past.after[:, at]
            positions = past.positions
        qkv = _ops.codec_product(x, self._qkv, None, None, self._eps, PLAIN)
        attended = _ops.codec_window_attention(qkv, before, kept, positions, cosine, sine, *self._sizes)
        x = _ops.codec_product(attended, self._out, None, x, None, PLAIN)
        inner = _ops.codec_product(x, self._gate_up, None, None, self._eps, SWIGLU)
        return _ops.codec_product(inner, self._down, None, x, None, PLAIN)


class _ConvNeXt:
    """A ConvNeXt block: convolution and norm, wide product, narrow product."""

    def __init__(self, block: ConvNeXt) -> None:
        conv = block.depthwise
        gamma = block.gamma.float()
        dtype = block.gamma.dtype
        norm, norm_bias = (values.float() for values in block.norm)
        wide, wide_bias = (values.float() for values in block.wide)
        narrow, narrow_bias = (values.float() for values in block.narrow)
        self._span = conv.span
        self._taps = conv.weight[:, 0].T.float().contiguous()
        self._bias = conv.bias.float()
        self._wide = _packed(wide * norm, dtype)
        self._wide_bias = wide_bias + wide @ norm_bias
        self._narrow = _packed(gamma[:, None] * narrow, dtype)
        self._narrow_bias = gamma * narrow_bias

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self._span, x)
        hidden = _ops.codec_depthwise_norm(x, history, self._taps, self._bias, CONVNEXT_EPS)
        hidden = _ops.codec_product(hidden, self._wide, self._wide_bias, None, None, GELU)
        return _ops.codec_product(hidden, self._narrow, self._narrow_bias, x, None, PLAIN)


class FusedFront:
    """From the sums of codebook vectors to upsampled latents: [B, T, codebook_dim] -> [B, T * factors,
    latent].

    The entry is folded into the convolution before it; the last norm and the exit are folded into the first
    repetition. The ops have kernels on a GPU with Triton in bfloat16, and run as PyTorch ops otherwise.
    """

    def __init__(
        self,
        conv: CausalConv,
        entry: Linear,
        transformer: WindowTransformer,
        exit_: Linear,
        upsample: Sequence[UpsampleLayer],
    ) -> None:
        """The modules in their order: `conv`, the linear map `entry`, the transformer, the linear map
        `exit_`, and at least one upsampling."""
        if conv.weight.is_cuda and codec_kernels():
            import_module("kernels.codec_front_triton")
        dtype = conv.weight.dtype
        into, into_bias = entry
        out, out_bias = exit_
        self._conv_span = conv.span
        self._conv_taps = conv.weight.shape[2]
        self._conv = tap_major(torch.einsum("hl,ldk->hdk", into.float(), conv.weight.float())).to(dtype)
        self._conv_bias = into.float() @ conv.bias.float() + into_bias.float()
        self._layers = [_Layer(layer, transformer.window) for layer in transformer.layers]
        self._eps = transformer.eps
        self._turns = transformer.turns
        first = upsample[0]
        wide = first.weight.float()
        exits = (
            _packed(wide @ (out.float() * transformer.norm.float()), dtype),
            first.bias.float() + wide @ out_bias.float(),
        )
        repeats = [exits, *((_packed(layer.weight, dtype), layer.bias.float()) for layer in upsample[1:])]
        self._upsample = [
            (layer.factor, *made, _ConvNeXt(layer.block)) for made, layer in zip(repeats, upsample)
        ]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        steps = x.shape[1]
        lead = 0
        positions = torch.arange(x.shape[1], device=x.device)[None]
        if past is not None:
            lead = self._conv_span.steps
            positions = past.positions[:, None] + positions
            x = self._conv_span.extended(x, past)
        hidden = x.new_empty(len(x), steps, len(self._conv_bias))
        _ops.codec_active_conv(
            x, lead, self._conv, self._conv_bias, self._conv_taps, 1, None, hidden, None, 0, None, None
        )
        cosine, sine = (half.contiguous() for half in self._turns(positions).chunk(2, dim=-1))
        for layer in self._layers:
            hidden = layer(hidden, cosine, sine, past)
        eps: float | None = self._eps
        for factor, weight, bias, block in self._upsample:
            rows, steps, _ = hidden.shape
            hidden = block(
                _ops.codec_product(hidden, weight, bias, None, eps, PLAIN).view(rows, steps * factor, -1),
                past,
            )
            eps = None
        return hidden


def _packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A linear map's weight [out, in] as [in, out]."""
    return weight.T.to(dtype).contiguous()

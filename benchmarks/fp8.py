"""Products and convolutions in fp8, emulated on any device, and how far they move logits.

The values of weights are those of `float8_e4m3fn` with one scale for each block of 128 x 128, the values of
activations those with one scale for each row and 128 columns. Their product is computed in float32 and rounded to the
activations' type, as a kernel would do it whose sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear, pad
from torch.overrides import TorchFunctionMode

from benchmarks.common import Row

BLOCK = 128
#: The largest value of `float8_e4m3fn`.
LARGEST = 448.0
#: A part may have this times bfloat16's error.
LIMIT = 2.0
#: Number of the likeliest codes that are compared: the default of `SamplingParams.top_k`.
TOP = 50


def in_fp8(x: Tensor, rows: int) -> Tensor:
    """The values of a matrix in fp8 with one scale for each block of `rows` rows and 128 columns. x: [m, n] ->
    float32 [m, n]."""
    m, n = x.shape
    blocks = pad(x.float(), (0, -n % BLOCK, 0, -m % rows)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    values = (blocks / scales).to(torch.float8_e4m3fn).float() * scales
    return values.flatten(2).flatten(0, 1)[:m, :n]


class Fp8(TorchFunctionMode):
    """Inside of it, products [out, in] and convolutions [out, in, taps] with these weights are computed in fp8."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        #: The values in fp8 by the address of a weight; each tap of a convolution is a matrix.
        self._values = {
            weight.data_ptr(): in_fp8(weight, BLOCK)
            if weight.dim() == 2
            else torch.stack([in_fp8(tap, BLOCK) for tap in weight.unbind(2)], 2)
            for weight in weights
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._values.get(args[1].data_ptr()) if func in (linear, conv1d) else None
        if found is None:
            return func(*args, **(kwargs or {}))
        x: Tensor = args[0]
        bias: Tensor | None = args[2] if len(args) > 2 else None
        steps = x.transpose(1, 2) if func is conv1d else x
        values = in_fp8(steps.flatten(0, -2), 1).view(steps.shape)
        values = values.transpose(1, 2) if func is conv1d else values
        return func(values, found, None if bias is None else bias.float(), **(kwargs or {})).to(x.dtype)


def divergence(exact: Tensor, found: Tensor) -> Tensor:
    """Kullback-Leibler divergence from the exact distribution, of logits [..., codes] -> float64 [...]."""
    wanted = exact.double().log_softmax(-1)
    return (wanted.exp() * (wanted - found.double().log_softmax(-1))).sum(-1)


def error_of(found: Tensor, exact: Tensor) -> float:
    """Relative error."""
    return ((found.float() - exact).norm() / exact.norm()).item()


def compared(exact: Sequence[Tensor], found: Sequence[Tensor]) -> Row:
    """Of the logits of code 0 and of the other codes: mean divergence, the share of the likeliest codes that both have, and
    relative error."""
    row: Row = {}
    for name, one, other in zip(("first", "residual"), exact, found, strict=True):
        best, same = (each.topk(min(TOP, one.shape[-1])).indices for each in (one, other))
        row[f"{name}_kl"] = divergence(one, other).mean().item()
        row[f"{name}_top50"] = (best[..., None] == same[..., None, :]).any(-1).float().mean().item()
        row[f"{name}_error"] = error_of(other, one)
    return row


def judged(row: Row, own: Row) -> Row:
    """The row with its errors as multiples of bfloat16's own. Relative errors decide, which is the milder measure: divergence
    grows with their square."""
    row |= {f"{name}_times": row[name] / own[name] for name in own if name.endswith(("_kl", "_error"))}
    return row | {"within_twice": worst(row) <= LIMIT}


def worst(row: Row) -> float:
    """The largest of a row's relative errors, in multiples of bfloat16's own."""
    return max(value for name, value in row.items() if name.endswith("_error_times"))

"""The registered ops: each runs its PyTorch version on a CPU, and its schema names what it writes."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.attention
import kernels.layers
from kernels.registry import NAMESPACE, TWINS

for path in Path(kernels.__file__).parent.glob("*.py"):
    if re.search(r"^@op\(", path.read_text(), re.MULTILINE):
        import_module(f"kernels.{path.stem}")

torch.manual_seed(0)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


#: An activated input, then the weight, bias and snake of a product with it.
ACTIVATED, PARAMETERS = torch.randn(2, 9, 4), (ones(6), ones(6))
#: Arguments of each registered op, with all its optional tensors.
SAMPLES: dict[str, tuple[object, ...]] = {
    "codec_active_conv": (
        ACTIVATED,
        2,
        torch.randn(3 * 4, 6),
        ones(6),
        3,
        1,
        torch.randn(2, 7, 6),
        torch.zeros(2, 7, 6),
        torch.zeros(2, 8, 6),
        6,
        *PARAMETERS,
    ),
    "codec_active_unit": (
        ACTIVATED,
        2,
        torch.randn(2, 7, 4),
        torch.randn(3 * 4, 4),
        *(ones(4) for _ in range(3)),
        torch.randn(4, 4),
        ones(4),
        1,
        torch.zeros(2, 7, 4),
        torch.zeros(2, 8, 4),
        4,
        ones(4),
        ones(4),
    ),
    "codec_head": (ACTIVATED, 2, torch.randn(3, 4), ones(1)),
    "codec_product": (torch.randn(2, 5, 8), torch.randn(8, 6), ones(6), torch.randn(2, 5, 6), 1e-6, 2),
    "codec_window_attention": (
        torch.randn(2, 5, (2 + 2) * 8),
        torch.randn(2, 3 * 2 * 8),
        torch.zeros(2, 3 * 2 * 8),
        torch.tensor([0, 2]),
        ones(1, 5, 4),
        ones(1, 5, 4),
        2,
        1,
        4,
    ),
    "codec_depthwise_norm": (torch.randn(2, 5, 6), torch.randn(2, 2, 6), torch.randn(3, 6), ones(6), 1e-6),
}


def attention_arguments(*rest: object) -> tuple[object, ...]:
    return torch.randn(5, 4, 16), torch.randn(6, 2, 8, 16), torch.randn(6, 2, 8, 16), *rest


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_registered_op_is_its_twin(name: str) -> None:
    op = getattr(getattr(torch.ops, NAMESPACE), name)
    mine, theirs = (clone(SAMPLES[name]) for _ in range(2))
    torch.testing.assert_close(op(*mine), TWINS[name](*theirs), rtol=0, atol=0)
    torch.testing.assert_close(
        [x for x in mine if isinstance(x, Tensor)],
        [x for x in theirs if isinstance(x, Tensor)],
        rtol=0,
        atol=0,
    )
    torch.library.opcheck(op, clone(SAMPLES[name]), test_utils=("test_schema",))


def clone(arguments: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)


def test_every_op_has_a_sample() -> None:
    assert {*SAMPLES} == {*TWINS}


def test_decode_attention_against_float64() -> None:
    table, lengths = torch.randint(1, 6, (5, 3)), torch.tensor([1, 9, 24, 0, 3])
    q, k, v, longest, scale = attention_arguments(24, 0.25)
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)  # noqa: PT018
    got = kernels.attention.paged_decode_attention(q, k, v, table, lengths, longest, scale)  # type: ignore[arg-type]
    for row, length in enumerate(lengths.tolist()):
        if length:
            keys, values = (
                cache[table[row]].transpose(0, 1).flatten(1, 2)[:, :length].double() for cache in (k, v)
            )
            keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
            scores = (keys @ q[row].double()[:, :, None])[:, :, 0] * scale  # type: ignore[operator]
            want = (scores.softmax(-1)[:, None] @ values)[:, 0].flatten()
            torch.testing.assert_close(got[row].double(), want, rtol=1e-5, atol=1e-6)
    together = kernels.attention.rows_together(q, k, v, table, lengths, longest, scale)  # type: ignore[arg-type]
    torch.testing.assert_close(together[lengths > 0], got[lengths > 0], rtol=1e-5, atol=1e-6)
    assert torch.isfinite(together).all()


def test_prefill_in_chunks_is_prefill_in_one() -> None:
    q, k, v = torch.randn(20, 4, 16), torch.randn(6, 2, 8, 16), torch.randn(6, 2, 8, 16)
    table = torch.tensor([[2, 5, 1]])
    whole = kernels.attention.paged_prefill_attention(q, k, v, table, [20], [20], 0.25)
    parts = [
        kernels.attention.paged_prefill_attention(q[start:end], k, v, table, [end - start], [end], 0.25)
        for start, end in ((0, 8), (8, 11), (11, 20))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)


def test_rope_keeps_lengths_and_relative_angles() -> None:
    table = kernels.layers.rope_table(64, 16, 1e4, torch.float32, "cpu")
    x = torch.randn(1, 2, 16)
    here, there = (kernels.layers.rope(x, table[at : at + 1]) for at in (3, 13))
    torch.testing.assert_close(here.norm(dim=-1), x.norm(dim=-1))
    y = torch.randn(1, 2, 16)
    near, far = (kernels.layers.rope(y, table[at : at + 1]) for at in (5, 15))
    torch.testing.assert_close((here * near).sum(-1), (there * far).sum(-1), rtol=1e-4, atol=1e-4)

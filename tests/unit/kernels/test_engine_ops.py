"""The registered ops: each is its twin, and its schema tells the truth about what it writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels.attention
import kernels.layers
import kernels.sampler
from kernels.registry import NAMESPACE, TWINS

torch.manual_seed(0)


def qkv_arguments() -> tuple[object, ...]:
    caches = torch.zeros(2, 4, 2, 8, 16)
    return (
        torch.randn(3, (4 + 2 * 2) * 16),
        torch.randn(16),
        torch.randn(16),
        1e-6,
        kernels.layers.rope_table(32, 16, 1e4, torch.float32, "cpu"),
        torch.tensor([5, 0, 9]),
        caches[0].clone(),
        caches[1].clone(),
        torch.tensor([1, 2, 3]),
        torch.tensor([5, 0, 1]),
    )


def attention_arguments(*rest: object) -> tuple[object, ...]:
    return torch.randn(5, 4, 16), torch.randn(6, 2, 8, 16), torch.randn(6, 2, 8, 16), *rest


SAMPLES: dict[str, tuple[object, ...]] = {
    "rms_norm": (torch.randn(3, 8), torch.randn(8), 1e-6),
    "swiglu": (torch.randn(3, 8),),
    "qk_norm_rope_append": qkv_arguments(),
    "codec_embedding_sum": (torch.randint(0, 4, (3, 2)), torch.randn(8, 5), torch.tensor([0, 4])),
    "paged_decode_attention": attention_arguments(
        torch.randint(1, 6, (5, 3)), torch.tensor([1, 9, 24, 0, 3]), 24, 0.25
    ),
    "paged_prefill_attention": attention_arguments(torch.tensor([[1, 2], [3, 4]]), [2, 3], [10, 3], 0.25),
    "frame_noise": (torch.tensor([1, 2]), torch.tensor([0, 5]), 4),
    "process_first": (
        torch.randn(2, 9),
        torch.rand(2, 9) < 0.5,
        torch.ones(2),
        torch.tensor([True, False]),
        [7],
        6,
    ),
    "sample": (
        torch.randn(2, 9),
        torch.tensor([1 << 31, 5]),
        torch.ones(2),
        torch.tensor([3, 0]),
        torch.ones(2),
        torch.zeros(2, dtype=torch.bool),
        3,
        False,
        False,
    ),
}


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


def test_decode_attention_against_float64() -> None:
    q, k, v, table, lengths, longest, scale = SAMPLES["paged_decode_attention"]
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)  # noqa: PT018
    assert isinstance(table, Tensor) and isinstance(lengths, Tensor)  # noqa: PT018
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

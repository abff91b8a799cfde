"""Qwen3-TTS on a CUDA device: the golden folder in float32 and bfloat16, the same draws as on CPU,
full-size models."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.checkpoint import dummy_model
from kernels.attention import paged_decode_attention
from kernels.sampler import draw, frame_noise, token_weights
from tests.conformance.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_tts"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("folder", "dtype"), [(GOLDEN, "float32"), (GOLDEN, "bfloat16"), (GOLDEN / "thetas", "float32")]
)
def test_conformance(folder: Path, dtype: str) -> None:
    assert main(["qwen3_tts", str(folder), "--device", "cuda", "--dtype", dtype]) == 0


def test_noise_is_the_same_bits_as_on_cpu() -> None:
    seeds = torch.randint(0, 2**62, (512,), generator=torch.Generator().manual_seed(0))
    frames = torch.arange(512)
    assert torch.equal(frame_noise(seeds.cuda(), frames.cuda(), 16).cpu(), frame_noise(seeds, frames, 16))


def test_draws_are_those_of_the_cpu() -> None:
    """Weights may differ by the rounding of exp; the tokens drawn must be the same but for that."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 3072, generator=generator) * 2
    rows = len(logits)
    settings = torch.full((rows,), 0.9), torch.full((rows,), 50), torch.ones(rows)
    random_words = frame_noise(torch.arange(rows), torch.zeros(rows, dtype=torch.int64), 1)[:, 0]
    here = draw(token_weights(logits, *settings, 50, False), random_words)
    there = draw(
        token_weights(logits.cuda(), *(setting.cuda() for setting in settings), 50, False),
        random_words.cuda(),
    ).cpu()
    assert int((here != there).sum()) <= 1


def test_decode_attention_is_that_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((40, 16, 128), (300, 8, 64, 128), (300, 8, 64, 128))
    )
    table = torch.randperm(299, generator=generator)[:280].view(40, 7) + 1
    lengths = torch.randint(1, 449, (40,), generator=generator)
    longest = int(lengths.max())
    here = paged_decode_attention(q, k, v, table, lengths, longest, 128**-0.5)
    there = paged_decode_attention(*(x.cuda() for x in (q, k, v, table, lengths)), longest, 128**-0.5).cpu()
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


def test_a_mix_on_the_gpu_says_what_each_says_alone_when_greedy() -> None:
    """Float32 with TF32 off: rounding differs between batch sizes, choices with a clear margin do not."""
    assert main(["qwen3_tts", str(GOLDEN), "--device", "cuda", "--only", "in one mix"]) == 0


def test_full_size_bfloat16_is_close_to_float32() -> None:
    """Teacher-forced logits of the 0.6B shapes: the bfloat16 error is that of the type, not of a wrong op."""
    from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
    from tests.conformance.qwen3_tts import forced_frames

    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    narrow = dummy_model("0b6", device, torch.bfloat16)
    wide = dummy_model("0b6", device, torch.float32)
    rng = random.Random(0)
    body = [rng.randrange(150_000) for _ in range(30)]
    prompt = build_prompt(
        wide.config, TokenizedTask([151644, 77091, 198], body, language="english", speaker="ryan")
    )
    codes = np.random.default_rng(0).integers(0, 2048, (6, 16))
    ours, exact = (forced_frames(model, prompt, codes) for model in (narrow, wide))
    for got, want in zip(ours, exact):
        for mine, theirs in (
            (got.first_logits, want.first_logits),
            (got.residual_logits, want.residual_logits),
        ):
            error = float((mine - theirs).norm() / theirs.norm())
            assert error < 0.1, f"relative error {error:.3f}"

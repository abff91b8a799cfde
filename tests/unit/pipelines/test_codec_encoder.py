"""The codec encoder: frame counts, causality, and what it refuses (its codes are checked against the
golden folder)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipelines.qwen3_tts.codec import load_codec
from pipelines.qwen3_tts.speaker import CodecEncoder

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"


@lru_cache(maxsize=1)
def encoder() -> CodecEncoder:
    torch.set_num_threads(1)
    found = load_codec(FOLDER).encoder
    assert found is not None
    return found


def encode(samples: Tensor) -> Tensor:
    return encoder().encode(samples[None])[0]


def noise(samples: int) -> Tensor:
    return 0.2 * torch.randn(samples, generator=torch.Generator().manual_seed(samples))


@pytest.mark.parametrize("samples", [1, 959, 1919, 1920, 1921, 3840, 24_001])
def test_frame_count_is_the_ceiling(samples: int) -> None:
    codes = encode(noise(samples))
    assert codes.shape == (-(-samples // 1920), 16)
    assert codes.dtype == torch.int64
    assert int(codes.min()) >= 0
    assert int(codes.max()) < encoder().codebook_size


def test_encoding_is_causal_and_repeatable() -> None:
    """Later audio leaves earlier frames alone."""
    audio = noise(1920 * 12)
    codes = encode(audio)
    assert torch.equal(codes, encode(audio))
    changed = audio.clone()
    changed[1920 * 8 :] = 0.9
    assert torch.equal(encode(changed)[:8], codes[:8])
    assert not torch.equal(encode(changed)[8:], codes[8:])


LENGTHS = [12_000, 13_439, 13_440, 13_441, 15_359, 57_600, 57_601, 90_123, 95_999, 96_000]


@pytest.mark.parametrize("start", [0, 5])
def test_a_row_has_the_codes_that_it_has_alone(start: int) -> None:
    rows = [noise(samples) for samples in LENGTHS[start : start + 5]]
    padded = torch.full((5, 96_000), 0.7)
    for place, row in zip(padded, rows):
        place[: len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])
    codes = encoder().encode(padded, lengths)
    assert torch.equal(encoder().encode(padded[:2], lengths[:2], rows=5), codes[:2])
    for made, row in zip(codes, rows):
        alone = encode(row)
        assert torch.equal(made[: len(alone)], alone)

"""The speaker encoder: shape, limits and strict loading (its values are checked against the golden
folder)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.errors import ModelError
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.config import Qwen3TTSConfig, SpeakerEncoderConfig
from pipelines.qwen3_tts.speaker import PREFIX, SpeakerEncoder
from pipelines.recording import MIN_SECONDS

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base"


def config(**changes: Any) -> SpeakerEncoderConfig:
    return replace(Qwen3TTSConfig.from_folder(FOLDER).speaker_encoder, **changes)


@pytest.fixture(scope="module")
def encoder() -> SpeakerEncoder:
    torch.set_num_threads(1)
    with Checkpoint(FOLDER) as source:
        built = SpeakerEncoder(config(), source)
        assert not [name for name in source.left() if name.startswith(PREFIX)]
    return built


def test_the_shortest_recording_that_may_be_cloned_has_a_vector(encoder: SpeakerEncoder) -> None:
    samples = int(MIN_SECONDS * encoder.config.sample_rate)
    vector = encoder.embed(0.1 * torch.randn(1, samples, generator=torch.Generator().manual_seed(0)))[0]
    assert vector.shape == (encoder.config.enc_dim,)
    assert torch.isfinite(vector).all()


def test_silence_and_repetition(encoder: SpeakerEncoder) -> None:
    (silent,) = encoder.embed(torch.zeros(1, 24_000))
    assert torch.isfinite(silent).all()
    assert torch.equal(silent, encoder.embed(torch.zeros(1, 24_000))[0])


def test_bfloat16_is_near(encoder: SpeakerEncoder) -> None:
    with Checkpoint(FOLDER) as source:
        low = SpeakerEncoder(config(), source, dtype=torch.bfloat16)
    audio = 0.1 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(1))
    vector, exact = low.embed(audio)[0], encoder.embed(audio)[0]
    assert vector.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(vector.float(), exact, dim=0) > 0.99


def test_a_row_has_the_vector_that_it_has_alone(encoder: SpeakerEncoder) -> None:
    padded = 0.1 * torch.randn(5, 48_000, generator=torch.Generator().manual_seed(2))
    lengths = [12_000, 12_031, 24_064, 47_999, 48_000]
    alone = [encoder.embed(row[None, :length])[0] for row, length in zip(padded, lengths)]
    vectors = encoder.embed(padded, torch.tensor(lengths))
    torch.testing.assert_close(vectors, torch.stack(alone), rtol=1e-5, atol=1e-5)
    other = padded.clone()
    other[0, 12_000:], other[1:] = 0.9, -0.3
    assert torch.equal(encoder.embed(other, torch.tensor(lengths))[0], vectors[0])


def test_a_config_that_does_not_fit_the_weights_names_the_tensor() -> None:
    with Checkpoint(FOLDER) as source, pytest.raises(ModelError, match=r"speaker_encoder\.fc\.weight"):
        SpeakerEncoder(config(enc_dim=41), source)
    with Checkpoint(FOLDER) as source, pytest.raises(ModelError, match=r"speaker_encoder\.blocks\.4"):
        SpeakerEncoder(
            config(
                enc_channels=(32, 32, 32, 32, 32, 128),
                enc_kernel_sizes=(5, 3, 3, 3, 3, 1),
                enc_dilations=(1, 2, 3, 4, 5, 1),
            ),
            source,
        )

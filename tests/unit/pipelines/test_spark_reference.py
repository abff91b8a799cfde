"""Recordings to clone: rows of a padded batch have the tokens that they have alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.wav2vec2.configuration_wav2vec2 import Wav2Vec2Config
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Model

from pipelines.spark_tts.bicodec import Tokenizer, load_bicodec
from pipelines.spark_tts.config import WAV2VEC2, SparkConfig
from pipelines.spark_tts.reference import SemanticFeatures, semantic_tokens
from tests.support.vllm_kit import checkpoint

CPU = torch.device("cpu")
#: At the edges of a step (400 + 320 n samples), and others.
LENGTHS = (8000, 8079, 8080, 8081, 12_345, 16_000, 31_999, 48_000)


@pytest.fixture(scope="module")
def parts() -> tuple[Tokenizer, SemanticFeatures]:
    torch.set_num_threads(1)
    config = SparkConfig.from_folder(checkpoint())
    return load_bicodec(config, CPU)[0], SemanticFeatures(config.folder / WAV2VEC2, CPU)


def recordings(features: SemanticFeatures, seed: int = 0) -> list[Tensor]:
    dice = np.random.default_rng(seed)
    return [
        torch.from_numpy(features.values(dice.normal(0.1, 0.2, length).astype(np.float32)))
        for length in LENGTHS
    ]


def check_batch(tokenizer: Tokenizer, features: SemanticFeatures, width: int) -> None:
    rows, lengths = recordings(features), torch.tensor(LENGTHS)
    alone = [semantic_tokens(tokenizer, features, row[None], None)[0] for row in rows]
    batch = torch.stack([pad(row, (0, width - len(row)), value=7.0) for row in rows])
    together = semantic_tokens(tokenizer, features, batch, lengths)
    for tokens, found, length in zip(alone, together, LENGTHS):
        assert len(tokens) == features.steps(length) == (length - 400) // 320 + 1
        assert torch.equal(found[: len(tokens)], tokens)
    assert len(torch.cat(alone).unique()) > 100, "nothing was compared"


@pytest.mark.parametrize("width", [48_000, 49_152, 65_537])
def test_padded_rows_have_the_tokens_that_they_have_alone(
    parts: tuple[Tokenizer, SemanticFeatures], width: int
) -> None:
    check_batch(*parts, width)


@pytest.mark.parametrize("stable", [True, False])
def test_states_are_those_of_transformers(stable: bool) -> None:
    """Those before the last layer, to whose output some versions apply the final norm."""
    torch.manual_seed(0)
    sizes = Wav2Vec2Config(
        hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
        conv_dim=(24,) * 7, num_conv_pos_embedding_groups=4, feat_extract_norm="layer",
        do_stable_layer_norm=stable, conv_bias=True,
    )  # fmt: skip
    features = SemanticFeatures.__new__(SemanticFeatures)
    features.model, features.device = Wav2Vec2Model(sizes).eval(), CPU
    values = torch.randn(2, 9000)
    with torch.inference_mode():
        wanted = features.model(values, output_hidden_states=True).hidden_states
    for state, want in zip(features.states(values), wanted[:-1]):
        torch.testing.assert_close(state, want)

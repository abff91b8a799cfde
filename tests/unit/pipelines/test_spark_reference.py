"""Recordings to clone: rows of a padded batch have the tokens that they have alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from transformers.models.wav2vec2.configuration_wav2vec2 import Wav2Vec2Config
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Model

from pipelines.spark_tts.bicodec import load_bicodec
from pipelines.spark_tts.config import WAV2VEC2, SparkConfig
from pipelines.spark_tts.reference import ReferenceEncoder, SemanticFeatures
from tests.support.vllm_kit import checkpoint

CPU = torch.device("cpu")
#: At the edges of a step (400 + 320 n samples), and others.
LENGTHS = (8000, 8079, 8080, 8081, 12_345, 16_000, 31_999, 48_000)


@pytest.fixture(scope="module")
def references() -> ReferenceEncoder:
    torch.set_num_threads(1)
    config = SparkConfig.from_folder(checkpoint())
    features = SemanticFeatures(config.folder / WAV2VEC2, CPU)
    return ReferenceEncoder(config, load_bicodec(config, CPU)[0], features)


@pytest.mark.parametrize("width", [48_000, 49_152, 65_537])
def test_padded_rows_have_the_tokens_that_they_have_alone(references: ReferenceEncoder, width: int) -> None:
    dice, features = np.random.default_rng(width), references.features
    rows = [dice.normal(0.1, 0.2, length).astype(np.float32) for length in LENGTHS]
    values = [torch.from_numpy(features.values(row)) for row in rows]
    batch = torch.stack([pad(row, (0, width - len(row)), value=7.0) for row in values])
    together = references.semantic_tokens(batch, torch.tensor(LENGTHS))
    alone = [references.encode(row).semantic for row in rows]
    for tokens, found, length in zip(alone, together, LENGTHS):
        assert len(tokens) == features.steps(length) == (length - 400) // 320 + 1
        assert tuple(found[: len(tokens)].tolist()) == tokens
    assert len({token for tokens in alone for token in tokens}) > 100, "nothing was compared"


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


def test_recordings_are_padded_only_where_that_changes_nothing(references: ReferenceEncoder) -> None:
    """A group norm is over all steps, so rows of a batch must be of one length."""
    features = references.features
    assert features.takes_padding
    assert references.semantic.bucket(8001) == 8192
    other = SemanticFeatures.__new__(SemanticFeatures)
    other.device, other.model = CPU, Wav2Vec2Model(Wav2Vec2Config(num_hidden_layers=1, hidden_size=16 * 3))
    grouped = ReferenceEncoder(references.config, references.tokenizer, other)
    assert grouped.semantic.bucket(8001) == 8001
    # The clip of a voice is never padded.
    assert references.clips.bucket(96_000) == 96_000

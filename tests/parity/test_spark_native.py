"""The speech LM of SparkTTS on our own engine against transformers' Qwen2, at sizes and with heads that no
golden folder has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipelines.spark_tts.config import LLM, SparkConfig
from pipelines.spark_tts.language_model import Drawable, SparkModel, load_weights
from pipelines.spark_tts.prompt import Vocabulary
from tests.conformance.spark_native import forced_frames
from tests.support.vllm_kit import checkpoint

#: Of values up to about 10.
LIMIT = 2e-4
#: Heads in groups of seven as published, a head for each key, one key for all; tied and not, and another base
#: of the rope.
SIZES: tuple[dict[str, Any], ...] = (
    {
        "hidden_size": 56,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    },
    {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
    },
    {
        "hidden_size": 112,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
    },
)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes['num_attention_heads']} heads")
@torch.inference_mode()
def test_states_and_logits_are_those_of_transformers(sizes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(sizes["hidden_size"])
    folder = shutil.copytree(
        checkpoint(), tmp_path / "checkpoint", ignore=shutil.ignore_patterns("wav2vec2*")
    )
    stored = json.loads((folder / LLM / "config.json").read_text())
    oracle = Qwen2ForCausalLM(
        Qwen2Config(**(stored | {"intermediate_size": 96, "torch_dtype": "float32"} | sizes))
    ).eval()
    for parameter in oracle.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    oracle.save_pretrained(folder / LLM)

    config = SparkConfig.from_folder(folder)
    vocabulary = Vocabulary.from_folder(
        folder / LLM, config.bicodec.codebook_size, config.bicodec.global_codes
    )
    drawable = Drawable.of(vocabulary, config.lm)
    model = SparkModel(
        config.lm, load_weights(config, drawable, torch.float32, torch.device("cpu")), drawable, 256
    )
    dice = np.random.default_rng(1)
    prompt, codes = dice.integers(0, config.lm.vocab, 70), dice.integers(0, len(drawable.ids), 20)
    outputs = forced_frames(model, prompt, codes)
    ids = torch.from_numpy(np.concatenate((prompt, drawable.ids[codes[:-1]])))[None]
    wanted = oracle.model(ids).last_hidden_state[0, len(prompt) - 1 :]
    hidden = torch.cat([one.hidden for one in outputs])
    assert float((hidden - wanted).abs().max()) < LIMIT
    logits = torch.cat([one.first_logits for one in outputs])[:, : len(drawable.ids)]
    assert float((logits - oracle.lm_head(wanted)[:, drawable.ids]).abs().max()) < LIMIT

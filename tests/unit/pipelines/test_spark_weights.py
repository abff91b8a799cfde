"""The speech LM of SparkTTS as our engine takes it: what can be drawn, its head, and tensors at fault by
name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.sampler import process_first
from pipelines.errors import ErrorCode, ModelError
from pipelines.spark_tts.config import LLM, SparkConfig
from pipelines.spark_tts.language_model import ROW_STEP, Drawable, LmWeights, SparkModel, load_weights
from pipelines.spark_tts.prompt import Vocabulary
from tests.support.vllm_kit import checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of LLM/ and of the configs."""
    ignored = shutil.ignore_patterns("wav2vec2*", "model.safetensors.gz")
    return shutil.copytree(
        checkpoint(), tmp_path / "checkpoint", copy_function=shutil.copyfile, ignore=ignored
    )


def drawable_of(folder: Path) -> tuple[SparkConfig, Vocabulary, Drawable]:
    config = SparkConfig.from_folder(folder)
    vocabulary = Vocabulary.from_folder(
        folder / LLM, config.bicodec.codebook_size, config.bicodec.global_codes
    )
    return config, vocabulary, Drawable.of(vocabulary, config.lm)


def weights_of(folder: Path) -> LmWeights:
    config, _, drawable = drawable_of(folder)
    return load_weights(config, drawable, torch.float32, CPU)


def test_everything_but_text_can_be_drawn_and_two_codes_end_it() -> None:
    config, vocabulary, drawable = drawable_of(checkpoint())
    added = json.loads((checkpoint() / LLM / "tokenizer.json").read_text())["added_tokens"]
    assert drawable.ids.tolist() == sorted({one["id"] for one in added})
    assert {int(drawable.ids[end]) for end in drawable.ends} == {
        config.lm.eos_token_id,
        vocabulary.controls["end_semantic_token"],
    }
    assert drawable.rows % ROW_STEP == 0
    assert 0 <= drawable.rows - len(drawable.ids) < ROW_STEP


def test_a_tied_head_is_the_embeddings_of_what_can_be_drawn(folder: Path) -> None:
    _, _, drawable = drawable_of(folder)
    weights = weights_of(folder)
    assert weights.head is weights.codes
    assert torch.equal(weights.codes[: len(drawable.ids)], weights.table[torch.from_numpy(drawable.ids)])
    assert not weights.codes[len(drawable.ids) :].any()


def test_a_head_of_its_own_is_read(folder: Path) -> None:
    path, config = folder / LLM / "model.safetensors", folder / LLM / "config.json"
    tensors = load_file(path)
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    save_file(tensors, path)
    assert weights_of(folder).head.equal(weights_of(folder).codes), "tied: it is a copy that nobody needs"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    weights = weights_of(folder)
    assert weights.head.equal(-weights.codes)


@pytest.mark.parametrize("fault", ["missing", "extra"])
def test_a_tensor_at_fault_is_named(folder: Path, fault: str) -> None:
    path, name = folder / LLM / "model.safetensors", "model.layers.1.self_attn.k_proj.bias"
    tensors = load_file(path)
    if fault == "missing":
        del tensors[name]
    else:
        name += ".twice"
        tensors[name] = torch.zeros(3)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        weights_of(folder)


def test_an_id_that_the_lm_does_not_know_is_refused() -> None:
    config, vocabulary, drawable = drawable_of(checkpoint())
    last = int(drawable.ids[-1])
    Drawable.of(vocabulary, replace(config.lm, vocab=last + 1))
    with pytest.raises(ModelError, match=f"has the id {last}, but the LM knows {last} ids") as caught:
        Drawable.of(vocabulary, replace(config.lm, vocab=last))
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT


def test_rows_that_fill_the_head_up_are_never_drawn() -> None:
    """However unlikely everything else is: their logits are zero, and all others below it."""
    config, _, drawable = drawable_of(checkpoint())
    weights = weights_of(checkpoint())
    rules = SparkModel(config.lm, weights, drawable, 64).tensors.draw
    logits = torch.full((1, drawable.rows), -5.0)
    logits[0, len(drawable.ids) :] = 0.0
    seen = torch.zeros_like(logits, dtype=torch.bool)
    processed = process_first(
        logits, seen, torch.ones(1), torch.zeros(1, dtype=torch.bool), rules.ends, rules.suppress_from
    )
    assert processed[0, len(drawable.ids) :].max() == -torch.inf
    assert processed[0, : len(drawable.ids)].min() == -5.0

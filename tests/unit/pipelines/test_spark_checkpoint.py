"""What a SparkTTS folder says, and that a damaged one is refused by the name of what is wrong."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.errors import ErrorCode, ModelError
from pipelines.registry import describe
from pipelines.spark_tts.bicodec import load_bicodec
from pipelines.spark_tts.config import SparkConfig
from pipelines.spark_tts.language_model import Drawable, load_weights
from pipelines.spark_tts.prompt import Vocabulary
from pipelines.spark_tts.reference import SemanticFeatures
from tests.support.vllm_kit import checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint(), tmp_path / "checkpoint", copy_function=shutil.copyfile)


def test_the_registry_recognises_the_folder_without_torch() -> None:
    code = f"""
import sys
from pipelines.registry import describe
card = describe({str(checkpoint())!r})
assert (card.family, card.engines, card.sample_rate) == ("spark_tts", ("native", "vllm"), 16000), card
assert card.engine in card.engines
assert card.capabilities.cloning and card.capabilities.streaming and "female/high/moderate" in card.capabilities.voices
assert len(card.capabilities.voices) == 50 and card.revision
assert not {{"torch", "vllm", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_the_revision_follows_the_weights(folder: Path) -> None:
    before = describe(str(folder)).revision
    path = folder / "LLM" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, path)
    assert describe(str(folder)).revision != before


def test_sizes_come_from_the_configs() -> None:
    config = SparkConfig.from_folder(checkpoint())
    assert (config.bicodec.samples_per_token, config.tokens_per_second, config.clip_samples) == (
        320,
        50,
        96_000,
    )
    assert (config.bicodec.speaker.token_num, config.bicodec.global_codes, config.bicodec.codebook_size) == (
        16,
        4096,
        2048,
    )
    assert (config.lm.head_dim, config.lm.eos_token_id, config.lm.tie_word_embeddings) == (12, 402, True)


def edit_yaml(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "BiCodec" / "config.yaml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


def edit_lm(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "LLM" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda folder: (folder / "config.yaml").unlink(), "config.yaml is missing"),
        (lambda folder: (folder / "config.yaml").write_text("[1, 2"), "cannot be read"),
        (lambda folder: (folder / "config.yaml").write_text("- 1"), "table of keys"),
        (
            lambda folder: (folder / "config.yaml").write_text("sample_rate: 16000"),
            "latent_hop_length is missing",
        ),
        (edit_yaml("audio_tokenizer:", "tokenizer:"), "audio_tokenizer is missing"),
        (edit_yaml("  - 8\n", "  - 7\n"), "kernel_sizes do not fit"),
        (edit_yaml("fsq_num_quantizers: 1", "fsq_num_quantizers: 2"), "fsq_num_quantizers is 2"),
        (edit_yaml("fsq_levels:\n    - 4", "fsq_levels:\n    - 5"), "fsq_levels must be even"),
        (edit_yaml("token_num: 16", "token_num: many"), "token_num must be a whole number"),
        (edit_yaml("sample_ratios:\n    - 1", "sample_ratios:\n    - 2"), "sample_ratios is"),
        (edit_yaml("condition_dim: 40", "condition_dim: 41"), "condition_dim is 41; only 40"),
        (edit_lm(model_type="llama"), "only 'qwen2'"),
        (edit_lm(use_sliding_window=True), "use_sliding_window is True"),
        (edit_lm(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (edit_lm(num_attention_heads=0), "num_attention_heads must be a whole number above 0"),
        (edit_lm(num_attention_heads=7), "must be a multiple of num_key_value_heads"),
        (edit_lm(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling asks for a scaled rope"),
        (
            edit_lm(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
            "rope_scaling asks for a scaled rope",
        ),
        (edit_lm(rope_theta=-1), "rope_theta must be a number above 0"),
        (edit_lm(eos_token_id=[402, 5]), "eos_token_id must be a whole number"),
    ],
)
def test_a_config_at_fault_is_named(folder: Path, edit: Callable[[Path], None], named: str) -> None:
    edit(folder)
    with pytest.raises(ModelError, match=named) as caught:
        SparkConfig.from_folder(folder)
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT


@pytest.mark.parametrize("part", ["LLM", "BiCodec"])
@pytest.mark.parametrize("fault", ["missing", "extra"])
def test_a_tensor_at_fault_is_named(folder: Path, part: str, fault: str) -> None:
    path = folder / part / "model.safetensors"
    weights = load_file(path)
    name = {"LLM": "model.layers.1.mlp.up_proj.weight", "BiCodec": "prenet.linear_pre.weight"}[part]
    if fault == "missing":
        del weights[name]
    else:
        name = f"{name}.twice"
        weights[name] = torch.zeros(3)
    save_file(weights, path)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        config = SparkConfig.from_folder(folder)
        load_weights(config, Drawable(np.zeros(0, np.int64), ()), torch.float32, "meta")
        load_bicodec(config, CPU)


def test_a_misshapen_weight_norm_is_named(folder: Path) -> None:
    path = folder / "BiCodec" / "model.safetensors"
    weights = load_file(path)
    weights["decoder.model.0.weight_g"] = torch.ones(3, 1, 1)
    save_file(weights, path)
    with pytest.raises(ModelError, match=r"decoder\.model\.0\.weight_g"):
        load_bicodec(SparkConfig.from_folder(folder), CPU)


class TestFeatures:
    def test_safetensors_and_the_published_pickle_give_the_same(self, folder: Path) -> None:
        place = folder / "wav2vec2-large-xlsr-53"
        values = torch.randn(1, 8000, generator=torch.Generator().manual_seed(0))
        before = SemanticFeatures(place, CPU)(values)
        path = place / "pytorch_model.bin"
        save_file(
            {name: tensor.contiguous() for name, tensor in torch.load(path, weights_only=True).items()},
            place / "model.safetensors",
        )
        path.unlink()
        assert torch.equal(SemanticFeatures(place, CPU)(values), before)

    def test_code_in_the_pickle_is_never_run(self, folder: Path) -> None:
        place = folder / "wav2vec2-large-xlsr-53"
        witness = folder / "ran"

        class Bomb:
            def __reduce__(self) -> tuple[object, ...]:
                return Path.touch, (witness,)

        with (place / "pytorch_model.bin").open("wb") as file:
            pickle.dump({"wav2vec2.masked_spec_embed": Bomb()}, file)
        with pytest.raises(ModelError, match="cannot be read as tensors"):
            SemanticFeatures(place, CPU)
        assert not witness.exists()

    @pytest.mark.parametrize("fault", ["missing", "extra", "shape", "no file", "few layers"])
    def test_what_is_wrong_is_named(self, folder: Path, fault: str) -> None:
        place = folder / "wav2vec2-large-xlsr-53"
        path = place / "pytorch_model.bin"
        tensors = torch.load(path, weights_only=True)
        name = "wav2vec2.encoder.layers.3.attention.k_proj.weight"
        if fault == "missing":
            del tensors[name]
        elif fault == "extra":
            name = "wav2vec2.encoder.layers.30.attention.k_proj.weight"
            tensors[name] = torch.zeros(1)
        elif fault == "shape":
            tensors[name] = torch.zeros(1)
        torch.save(tensors, path)
        if fault == "no file":
            path.unlink()
            name = "neither model.safetensors nor"
        elif fault == "few layers":
            config = json.loads((place / "config.json").read_text())
            (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 15}))
            name = "num_hidden_layers must be 16 or more"
        with pytest.raises(ModelError, match=name.replace(".", r"\.")):
            SemanticFeatures(place, CPU)


@pytest.mark.parametrize(
    ("token", "other", "named"),
    [
        ("bicodec_semantic_2047", "bicodec_semantic_9999", "bicodec_semantic_2047"),
        ("bicodec_semantic_5", "bicodec_semantic_9999", "bicodec_semantic_5"),
        ("speed_label_3", "speed_label_9", "speed_label_3"),
        ("end_semantic_token", "end_semantic", "end_semantic_token"),
    ],
)
def test_a_vocabulary_that_lacks_a_token_is_refused(folder: Path, token: str, other: str, named: str) -> None:
    path = folder / "LLM" / "tokenizer.json"
    path.write_text(path.read_text().replace(f'"<|{token}|>"', f'"<|{other}|>"'))
    with pytest.raises(ModelError, match=named):
        Vocabulary.from_folder(folder / "LLM", 2048, 4096)


def test_codes_out_of_order_are_refused(folder: Path) -> None:
    path = folder / "LLM" / "tokenizer.json"
    text = (
        path.read_text()
        .replace('"<|bicodec_semantic_5|>"', '"?"')
        .replace('"<|bicodec_semantic_6|>"', '"<|bicodec_semantic_5|>"')
    )
    path.write_text(text.replace('"?"', '"<|bicodec_semantic_6|>"'))
    with pytest.raises(ModelError, match="do not follow one another"):
        Vocabulary.from_folder(folder / "LLM", 2048, 4096)

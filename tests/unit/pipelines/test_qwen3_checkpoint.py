"""Qwen3-TTS folders: what is read from the configs, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.errors import ConfigError, ErrorCode, ModelError
from pipelines.qwen3_tts.config import Qwen3TTSConfig, describe
from pipelines.qwen3_tts.pipeline import open_pipeline
from pipelines.qwen3_tts.prompt import TextTokenizer
from tests.support.qwen3_golden import GOLDEN, KINDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "checkpoint-base", tmp_path / "checkpoint")


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("kind", KINDS)
def test_published_shapes_come_from_the_config(kind: str) -> None:
    raw = json.loads((GOLDEN / f"checkpoint-{kind}" / "config.json").read_text())
    config = Qwen3TTSConfig.from_folder(GOLDEN / f"checkpoint-{kind}")
    talker = raw["talker_config"]
    assert config.talker.head_dim == talker["head_dim"]
    assert config.ids.codec_eos_token_id == talker["codec_eos_token_id"]
    assert config.predictor.rope_theta == talker["code_predictor_config"]["rope_theta"]
    assert config.needs_projection == (
        talker["hidden_size"] != talker["code_predictor_config"]["hidden_size"]
    )
    assert not any("dialect" in name for name in config.spoken_languages)


def test_describe_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from pipelines.qwen3_tts.config import describe; "
        f"card = describe(Path({str(GOLDEN / 'checkpoint-custom')!r})); "
        "assert 'ryan' in card.capabilities.voices; assert card.sample_rate == 24000; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_model_that_clones_is_opened_without_transformers() -> None:
    """Which takes seconds to import, with a compiler and libraries of metrics; on a GPU, the codec's needs are found too."""
    code = (
        "import sys; from pathlib import Path; from pipelines.qwen3_tts.config import *; from torch import float32; "
        "from pipelines.qwen3_tts.pipeline import codec_needs, open_pipeline; "
        f"folder = Path({str(GOLDEN / 'checkpoint-base')!r}); assert open_pipeline(folder).capabilities.cloning; "
        "codec_needs(CodecConfig.load(folder / 'speech_tokenizer').decoder, float32, True, 8); "
        "sys.exit(str({'transformers', 'torch._dynamo', 'scipy', 'sympy'} & set(sys.modules) or '') or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_cards_tell_modes_apart() -> None:
    base, custom, design = (describe(GOLDEN / f"checkpoint-{kind}").capabilities for kind in KINDS)
    assert (base.cloning, base.needs_reference, base.instruct, base.voices) == (True, True, False, ())
    assert (custom.cloning, custom.instruct, len(custom.voices)) == (False, True, 9)
    assert (design.cloning, design.instruct, design.voices) == (False, True, ())


def test_revision_follows_the_weights(folder: Path) -> None:
    before = describe(folder).revision
    weights = load_file(folder / "model.safetensors")
    first = sorted(weights)[0]
    weights[first] = weights[first] + 1
    save_file(weights, folder / "model.safetensors")
    assert describe(folder).revision != before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("talker_config"), "talker_config is missing"),
        (lambda c: c["talker_config"].pop("head_dim"), r"talker_config\.head_dim is missing"),
        (lambda c: c["talker_config"].update(head_dim="128"), "head_dim must be a whole number"),
        (
            lambda c: c["talker_config"]["code_predictor_config"].pop("hidden_size"),
            r"code_predictor_config\.hidden_size is missing",
        ),
        (lambda c: c.update(tts_model_type="singer"), "tts_model_type is 'singer'"),
        (lambda c: c.update(tokenizer_type="qwen3_tts_tokenizer_25hz"), "tokenizer_type"),
        (lambda c: c["talker_config"].update(hidden_act="gelu"), "hidden_act"),
        (lambda c: c["talker_config"].update(attention_bias=True), "attention_bias"),
        (lambda c: c["talker_config"].update(rope_scaling={"rope_type": "yarn"}), "rope_scaling"),
        (lambda c: c["talker_config"].update(num_code_groups=8), "num_code_groups"),
        (lambda c: c["talker_config"].update(spk_id={"ann": 99999}), "the id of ann"),
        (
            lambda c: c["talker_config"].update(num_key_value_heads=0),
            "num_key_value_heads must be a whole number above 0",
        ),
        (lambda c: c["talker_config"].update(rope_theta=-1), "rope_theta"),
        (lambda c: c["talker_config"].update(codec_pad_id=99999), "the id of codec_pad_id"),
        (lambda c: c.update(tts_pad_token_id=99999), "tts_pad"),
    ],
)
def test_a_wrong_config_is_named(folder: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    edit(folder, change)
    with pytest.raises(ModelError, match=words) as caught:
        describe(folder)
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("top_p", float("nan")), ("top_k", -1), ("do_sample", 3)]
)
def test_a_wrong_generation_config_is_named(folder: Path, key: str, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key}"):
        describe(folder)


def test_settings_that_are_null_or_absent_are_the_published_ones(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        '{"temperature": null, "top_k": 7, "subtalker_dosample": null}'
    )
    sampling = Qwen3TTSConfig.from_folder(folder).sampling
    assert (sampling.temperature, sampling.top_k, sampling.predictor_do_sample) == (0.9, 7, True)


def test_a_foreign_tokenizer_is_refused(folder: Path) -> None:
    shutil.copy(GOLDEN / "checkpoint-custom" / "tokenizer.json", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["far"] = 900
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="text_vocab_size"):
        open_pipeline(folder, slots=1, pages=4)


def test_a_config_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        describe(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("talker.codec_head.weight", "drop", "codec_head.weight is missing"),
        ("talker.code_predictor.lm_head.3.weight", "cut", r"lm_head\.3\.weight has shape"),
        ("talker.model.layers.9.mlp.up_proj.weight", "add", r"layers\.9\.mlp\.up_proj\.weight"),
        ("speaker_encoder.fc.weight", "drop", r"speaker_encoder\.fc\.weight is missing"),
        ("speaker_encoder.extra.weight", "add", r"speaker_encoder\.extra\.weight"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, name: str, change: str, words: str) -> None:
    weights = load_file(folder / "model.safetensors")
    if change == "drop":
        del weights[name]
    elif change == "cut":
        weights[name] = weights[name][:-1].contiguous()
    else:
        weights[name] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=words) as caught:
        open_pipeline(folder)
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT


def test_stored_rope_buffers_are_ignored(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "talker.model.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    open_pipeline(folder, slots=1, pages=4).close()


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        open_pipeline(folder)


def test_a_foreign_codec_is_refused(folder: Path) -> None:
    path = folder / "speech_tokenizer" / "config.json"
    values = json.loads(path.read_text())
    values["decoder_config"]["num_quantizers"] = 8
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError):
        open_pipeline(folder)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="'batch'"):
        open_pipeline(GOLDEN / "checkpoint-base", batch=3)


def test_tokenizer_is_the_same_from_both_kinds_of_files(tmp_path: Path) -> None:
    source = GOLDEN / "checkpoint-custom"
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    from_parts, from_one = TextTokenizer.from_folder(tmp_path), TextTokenizer.from_folder(source)
    for text in (
        "Hello, world!",
        "  two  spaces\n\nlines",
        "今天 天气",
        "I'll've 123 x=y",
        "é e\u0301 <|im_start|> \U0001f600",
    ):
        assert from_parts.target(text) == from_one.target(text)


def test_a_tokenizer_is_read_again_only_when_its_files_have_changed(folder: Path) -> None:
    first = TextTokenizer.from_folder(folder)
    assert TextTokenizer.from_folder(folder) is first
    added = folder / "tokenizer_config.json"
    values = json.loads(added.read_text())
    last = max(values["added_tokens_decoder"], key=int)
    values["added_tokens_decoder"][str(int(last) + 1)] = {"content": "<|more|>", "special": True}
    added.write_text(json.dumps(values))
    changed = TextTokenizer.from_folder(folder)
    assert changed.vocabulary == first.vocabulary + 1
    assert changed.encode("<|more|>") == [int(last) + 1]


def test_a_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "vocab.json").write_text("[]")
    with pytest.raises(ModelError, match=r"vocab\.json"):
        TextTokenizer.from_folder(folder)


def test_a_text_that_starts_with_a_line_break_keeps_the_role() -> None:
    role, body = TextTokenizer.from_folder(GOLDEN / "checkpoint-base").target("\n\nHi")
    assert len(role) == 3
    assert body

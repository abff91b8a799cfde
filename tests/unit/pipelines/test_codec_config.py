"""Codec configs are read from the checkpoint; what is missing or cannot be run is refused by key."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers.models.mimi.configuration_mimi import MimiConfig

from pipelines.errors import ErrorCode, ModelError
from pipelines.qwen3_tts.config import CodecConfig, Qwen3TTSConfig, SpeakerEncoderConfig

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_tts"


def published(**changes: Any) -> dict[str, Any]:
    """The golden config with keys changed; a dotted key names a nested one, None removes it."""
    config = json.loads((GOLDEN / "checkpoint-base" / "speech_tokenizer" / "config.json").read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        place = config[section] if section else config
        if value is None:
            del place[name]
        else:
            place[name] = value
    return config


def load(folder: Path, config: dict[str, Any]) -> CodecConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return CodecConfig.load(folder)


def test_golden_config(tmp_path: Path) -> None:
    config = load(tmp_path, published())
    assert config.decoder.samples_per_frame == config.decode_upsample_rate == 1920
    assert config.decoder.sliding_window == 8
    assert config.encoder.num_quantizers == 20


def test_a_bare_encoder_section_means_mimi(tmp_path: Path) -> None:
    ours = load(tmp_path, published(encoder_config={}, encoder_valid_num_quantizers=32)).encoder
    sizes: Any = MimiConfig()
    assert ours.rope_theta == sizes.rope_parameters["rope_theta"]
    for name, value in asdict(ours).items():
        if name != "rope_theta":
            wanted = getattr(sizes, name)
            assert value == (tuple(wanted) if isinstance(value, tuple) else wanted), name


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"decoder_config__head_dim": None}, "head_dim"),
        ({"decoder_config__codebook_dim": None}, "codebook_dim"),
        ({"decoder_config__sliding_window": "8"}, "sliding_window"),
        ({"decoder_config__upsample_rates": []}, "upsample_rates"),
        ({"decoder_config__upsample_rates": [8, 5, 4, 2]}, "decode_upsample_rate"),
        ({"decoder_config__hidden_act": "relu"}, "hidden_act"),
        ({"decoder_config__num_semantic_quantizers": 2}, "num_semantic_quantizers"),
        ({"decoder_config__rope_theta": float("nan")}, "rope_theta"),
        ({"decoder_config__decoder_dim": 40}, "decoder_dim"),
        ({"decoder_config__num_key_value_heads": 3}, "num_key_value_heads"),
        ({"encoder_config__use_causal_conv": False}, "use_causal_conv"),
        ({"encoder_config__pad_mode": "reflect"}, "pad_mode"),
        ({"encoder_config__use_conv_shortcut": True}, "use_conv_shortcut"),
        ({"encoder_valid_num_quantizers": 21}, "encoder_valid_num_quantizers"),
        ({"model_type": "qwen3_tts_tokenizer_25hz"}, "model_type"),
        ({"decoder_config": None}, "decoder_config"),
    ],
)
def test_bad_configs_are_refused_by_key(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word) as caught:
        load(tmp_path, published(**changes))
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT


def speaker(folder: Path, values: dict[str, Any]) -> SpeakerEncoderConfig:
    """What a golden checkpoint says with this speaker encoder, for named voices, which it is not loaded for."""
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text((GOLDEN / "checkpoint-custom" / name).read_text())
    config = json.loads((folder / "config.json").read_text()) | {"speaker_encoder_config": values}
    (folder / "config.json").write_text(json.dumps(config))
    return Qwen3TTSConfig.from_folder(folder).speaker_encoder


def test_speaker_defaults_are_the_packages(tmp_path: Path) -> None:
    config = speaker(tmp_path, {"enc_dim": 2048, "sample_rate": 24000})
    assert config.enc_dim == 2048
    assert config.enc_channels == (512, 512, 512, 512, 1536)
    assert (config.mel_dim, config.enc_res2net_scale, config.enc_attention_channels) == (128, 8, 128)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"enc_channels": [8, 8, 16]}, "enc_channels"),
        ({"enc_channels": [8, 8, 8, 8, 0]}, "enc_channels"),
        ({"enc_dim": 0}, "enc_dim"),
    ],
)
def test_bad_speaker_configs_are_refused(tmp_path: Path, values: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        speaker(tmp_path, values)


def test_a_speaker_vector_is_as_wide_as_the_talker(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "checkpoint-base" / "config.json").read_text())
    config["speaker_encoder_config"]["enc_dim"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"speaker_encoder_config\.enc_dim"):
        Qwen3TTSConfig.from_folder(tmp_path)

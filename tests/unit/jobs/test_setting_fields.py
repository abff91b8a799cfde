"""Every setting of the server and of the engines, said in the environment, reaches what it is a setting
of, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from jobs.cli.models import serve_options  # pyright: ignore[reportPrivateUsage]
from jobs.settings import EngineSettings, ServeSettings, VllmSettings, load_settings
from pipelines.options import read_options
from pipelines.qwen3_tts.pipeline import PipelineOptions
from pipelines.registry import PUBLISHED
from pipelines.serving import ServeOptions
from pipelines.speechlm.pipeline import SpeechLmOptions
from tests.support.field_tables import changed, fields_of

NATIVE = PUBLISHED["qwen3-tts-0.6b-base"][2]
VLLM = replace(NATIVE, family="speechlm", engine="vllm", engines=())

#: Setting -> what is said, and what the server is told.
SERVE: dict[str, tuple[str, Any]] = {
    "slots": ("3", 3),
    "waiting_room": ("4", 4),
    "request_seconds": ("8", 8.0),
    "drain_seconds": ("14", 14.0),
    "text_in": ("true", True),
    "voices_folder": ("voices-here", Path("voices-here")),
    "allowed_hosts": ("speech.example,other.example", ("speech.example", "other.example")),
}
#: Where it listens, with which keys, for how many streams the model is prepared, and its spare process.
SERVE_ELSEWHERE = {"address", "port", "api_key", "api_key_file", "streams", "spare_process"}
#: Setting -> what is said, and what Qwen3-TTS on our engine and SpeechLM on vLLM are told; None: it is none
#: of theirs.
ENGINE: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any] | None]] = {
    "ENGINE__SLOTS": ("3", {"slots": 3}, {"slots": 3}),
    "ENGINE__MEMORY_SHARE": ("0.5", {"memory_share": 0.5}, {"memory_share": 0.5}),
    "ENGINE__REPRODUCIBLE": ("true", {"reproducible": True}, {"reproducible": True}),
    "ENGINE__MAX_CONTEXT": ("512", {"max_context": 512}, {"max_context": 512}),
    "ENGINE__DTYPE": ("float32", {"dtype": "float32"}, {"dtype": "float32"}),
    "ENGINE__EXECUTOR": ("eager", {"executor": "eager"}, {"eager": True}),
    "ENGINE__VOICE_CACHE": ("kept", {"voice_cache": "kept"}, None),
    "ENGINE__CODEC_ROWS": ("64", {"codec_rows": 64}, None),
    "VLLM__TENSOR_PARALLEL": ("2", None, {"tensor_parallel": 2}),
}
ENGINE_ELSEWHERE = {"ENGINE__KIND"}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(name: str, text: str, monkeypatch: pytest.MonkeyPatch, of: Callable[[], Any]) -> dict[str, Any]:
    before = fields_of(of())
    monkeypatch.setenv(f"SPEECH_{name}", text)
    return changed(before, fields_of(of()))


@pytest.mark.parametrize("name", SERVE)
def test_a_setting_of_the_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, value = SERVE[name]
    assert told(
        f"SERVE__{name.upper()}",
        text,
        monkeypatch,
        lambda: serve_options(load_settings(), [("hibari",)])[0],
    ) == {name: value}


@pytest.mark.parametrize("name", ENGINE)
def test_a_setting_of_an_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, native, vllm = ENGINE[name]
    for card, kind, expected in ((NATIVE, PipelineOptions, native), (VLLM, SpeechLmOptions, vllm)):
        with monkeypatch.context() as patched:
            found = told(
                name,
                text,
                patched,
                lambda card=card, kind=kind: read_options(kind, load_settings().engine_options(card)),
            )
        assert found == (expected or {}), kind


def test_no_setting_is_missing_in_the_tables() -> None:
    assert set(SERVE) | SERVE_ELSEWHERE == set(ServeSettings.model_fields)
    assert set(SERVE) <= {field.name for field in fields(ServeOptions)}
    known = {
        f"{group}__{name.upper()}"
        for group, kind in (("ENGINE", EngineSettings), ("VLLM", VllmSettings))
        for name in kind.model_fields
    }
    assert set(ENGINE) | ENGINE_ELSEWHERE == known

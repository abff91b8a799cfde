"""Models by name, checkpoint folder and entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import registry
from pipelines.errors import ErrorCode, ModelError
from pipelines.hibari.pipeline import HibariPipeline
from pipelines.registry import (
    Family,
    ModelCard,
    describe,
    list_models,
    open_pipeline,
    recognise,
    register_pipeline,
)
from pipelines.request import Capabilities, Pipeline
from tests.support.packages import write_package

FAMILIES = (
    Family("alpha", "gpu", model_types=("alpha", "alpha_old")),
    Family("beta", "vllm", subfolders=("LLM", "Codec")),
)


def code_of(model: str) -> ErrorCode:
    with pytest.raises(ModelError) as caught:
        describe(model)
    assert caught.value.advice
    return caught.value.code


def checkpoint(folder: Path, config: bytes) -> Path:
    (folder / "config.json").write_bytes(config)
    return folder


def test_hibari_is_built_in() -> None:
    card = describe("hibari")
    assert (card.name, card.engine, card.sample_rate, card.revision) == ("hibari", "cpu", 24_000, "0.2.1")
    assert card.capabilities.voices == ("heart",)
    assert card.rtf is not None


def test_opens_by_name_with_options() -> None:
    pipeline = open_pipeline("hibari", threads=1)
    assert isinstance(pipeline, HibariPipeline)
    pipeline.close()


def test_list_has_every_name_and_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    names = [card.name for card in list_models()]
    assert names == sorted(names)
    assert {"hibari", "qwen3-tts-0.6b-base", "qwen3-tts-1.7b-voicedesign"} <= set(names)


def test_describing_loads_no_model_library() -> None:
    code = (
        "import sys; from pipelines.registry import describe, list_models; describe('hibari'); list_models();"
        "print([m for m in ('numpy', 'torch', 'onnxruntime', 'hibari', 'huggingface_hub') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


def test_registered_pipelines_come_first_and_can_leave() -> None:
    card = ModelCard("x", "fake", "cpu", 8_000, Capabilities())
    opened: list[dict[str, object]] = []

    def factory(**options: object) -> Pipeline:
        opened.append(options)
        return open_pipeline("hibari", threads=1)

    forget = register_pipeline("fake", card, factory)
    shadow = register_pipeline("hibari", card, factory)
    assert describe("hibari").family == "fake"
    shadow()
    assert describe("hibari").family == "hibari"
    assert describe("fake").name == "fake"
    assert "fake" in [card.name for card in list_models()]
    open_pipeline("fake", slots=3).close()
    assert opened == [{"slots": 3}]
    forget()
    forget()
    assert code_of("fake") is ErrorCode.MODEL_UNKNOWN


def test_entry_points_add_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {"night-voice": "night_voice", "broken": "night_voice_missing"}
    write_package(tmp_path, "night-voice", "nightjar.pipelines", added)
    (tmp_path / "night_voice.py").write_text(
        "from pipelines.hibari import load\n"
        "from pipelines.registry import ModelCard\n"
        "from pipelines.request import Capabilities\n"
        "def describe(): return ModelCard('x', 'night', 'cpu', 24000, Capabilities())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert describe("night-voice").family == "night"
    assert describe("night-voice").name == "night-voice"
    open_pipeline("night-voice", threads=1).close()
    assert code_of("broken") is ErrorCode.MODEL_MISSING_EXTRA


@pytest.mark.parametrize(
    "model",
    [
        "hibary",
        "",
        "a\0b",
        "x" * 100_000,
        "/nonexistent",
        "~/nonexistent",
        "http://x/y",
        "../../etc/passwd",
        ".",
    ],
)
def test_what_is_no_model(model: str) -> None:
    expected = {"": ErrorCode.MODEL_BAD_CHECKPOINT, ".": ErrorCode.MODEL_BAD_CHECKPOINT}
    assert code_of(model) is expected.get(model, ErrorCode.MODEL_UNKNOWN)


def test_a_near_miss_gets_a_hint() -> None:
    with pytest.raises(ModelError, match=r"'qwen3-tts-0\.6b-base'"):
        describe("Qwen3-TTS-0.6B-base")


def test_a_folder_is_recognised_by_its_config_or_its_subfolders(tmp_path: Path) -> None:
    assert (
        recognise(
            checkpoint(tmp_path, b'{"model_type": "alpha_old", "other": [1, {"x": null}]}'), FAMILIES
        ).name
        == "alpha"
    )
    (tmp_path / "LLM").mkdir()
    assert recognise(tmp_path, FAMILIES).name == "alpha"
    (tmp_path / "Codec").mkdir()
    assert recognise(tmp_path, FAMILIES).name == "beta"


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model_type": 3}',
        b'{"model_type": "gpt2"}',
        b'{"model_type": "\xff"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model_type": "qwen3_tts"}',
        b'{"model_type": "qwen3_tts"}' + b" " * (5 << 20),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, config: bytes) -> None:
    assert code_of(str(checkpoint(tmp_path, config))) is ErrorCode.MODEL_BAD_CHECKPOINT


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert code_of(str(tmp_path)) is ErrorCode.MODEL_BAD_CHECKPOINT
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert code_of(str(loop)) is ErrorCode.MODEL_UNKNOWN


def only_family(monkeypatch: pytest.MonkeyPatch, family: Family) -> None:
    """There is no other one."""
    monkeypatch.setattr(registry, "FAMILIES", (family,))


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_much").mkdir()
    (tmp_path / "needs_much" / "pipeline.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    only_family(monkeypatch, Family("much", "gpu", model_types=("much",), package="needs_much"))
    folder = checkpoint(tmp_path, json.dumps({"model_type": "much"}).encode())
    with pytest.raises(ModelError, match=r"a_library_that_nobody_has.*extra `gpu`") as caught:
        open_pipeline(str(folder))
    assert caught.value.code is ErrorCode.MODEL_MISSING_EXTRA


def test_a_folder_that_cannot_be_read_is_a_bad_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "unreadable_family"
    package.mkdir()
    for module, function in (("config", "describe"), ("prompt", "open_frontend")):
        (package / f"{module}.py").write_text(
            f"def {function}(folder): raise PermissionError(13, 'Permission denied', 'tokenizer.json')\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    family = Family("closed", "gpu", model_types=("closed",), package="unreadable_family", frontend=True)
    only_family(monkeypatch, family)
    folder = checkpoint(tmp_path, b'{"model_type": "closed"}')
    for call in (describe, registry.open_frontend):
        with pytest.raises(ModelError, match=r"cannot be read: .*Permission denied.*tokenizer") as caught:
            call(str(folder))
        assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT


def test_a_family_describes_its_folder_under_its_full_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small_family").mkdir()
    (tmp_path / "small_family" / "config.py").write_text(
        "from pipelines.registry import ModelCard\n"
        "from pipelines.request import Capabilities\n"
        "def describe(path): return ModelCard('x', 'small', 'native', 24000, Capabilities(), revision=path.name)\n"
    )
    (tmp_path / "small_family" / "pipeline.py").write_text(
        "from pipelines import registry\ndef open_pipeline(path, **options): return registry.open_pipeline('hibari', **options)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    only_family(monkeypatch, Family("small", "gpu", model_types=("small",), package="small_family"))
    folder = tmp_path / "weights"
    folder.mkdir()
    checkpoint(folder, b'{"model_type": "small"}')
    monkeypatch.chdir(tmp_path)
    for model in ("weights", "./weights", str(folder)):
        assert describe(model) == ModelCard(
            str(folder.resolve()), "small", "native", 24_000, Capabilities(), revision="weights"
        )
    open_pipeline("weights", threads=1).close()


def test_a_published_checkpoint_without_a_hub_says_what_to_do(tmp_path: Path) -> None:
    code = "from pipelines.registry import describe\ndescribe('qwen3-tts-0.6b-base')"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment
    )
    assert "Qwen/Qwen3-TTS-12Hz-0.6B-Base" in result.stderr
    assert "download the folder elsewhere" in result.stderr


def test_a_published_checkpoint_without_the_hubs_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert code_of("qwen3-tts-0.6b-base") is ErrorCode.MODEL_MISSING_EXTRA


def test_a_published_card_lists_no_dialect_as_a_language() -> None:
    for card in list_models():
        assert not any("dialect" in language for language in card.capabilities.languages), card.name

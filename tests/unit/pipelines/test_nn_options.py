"""What models are opened with: the options that they share, and devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.engine.opening import NativeModelOptions
from pipelines.errors import ConfigError, EngineCrashError, ErrorCode
from pipelines.fish_speech.pipeline import FishOptions
from pipelines.nn.checkpoint import open_device
from pipelines.options import ENGINE, ModelOptions, TokenModelOptions, read_options
from pipelines.qwen3_tts.pipeline import PipelineOptions
from pipelines.registry import open_pipeline
from pipelines.speechlm.pipeline import SpeechLmOptions
from tests.support.fake_gpus import FakeGpus

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def test_the_table_of_options_is_that_of_the_classes() -> None:
    table = DOCS.read_text().split("## Options for opening a model")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    told = {
        engine: {
            name for row in rows if row[2].strip("`") == engine for name in re.findall(r"`(\w+)`", row[0])
        }
        for engine in ("both", "native", "vllm")
    }
    both, native, vllm = names(ModelOptions), names(NativeModelOptions), names(TokenModelOptions)
    assert told == {"both": {*both, ENGINE}, "native": native - both, "vllm": vllm - both}


def test_families_have_the_options_of_their_engine_and_few_of_their_own() -> None:
    own = {"codec_rows", "text_first", "voice_cache", "voice_cache_mib"}
    assert names(PipelineOptions) - names(NativeModelOptions) == own
    assert names(FishOptions) - names(TokenModelOptions) == {"share_prefixes"}
    assert names(TokenModelOptions) < names(SpeechLmOptions)
    qwen3, shared = (read_options(kind, {}) for kind in (PipelineOptions, NativeModelOptions))
    assert all(getattr(qwen3, name) == getattr(shared, name) for name in names(NativeModelOptions))


@pytest.mark.parametrize("kind", [PipelineOptions, NativeModelOptions, TokenModelOptions])
@pytest.mark.parametrize(
    ("option", "value"), [("slot", 3), ("slots", "many"), ("dtype", "float8"), ("threads", 1.5)]
)
def test_what_no_model_takes_is_refused_by_all(kind: type, option: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(kind, {option: value})
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("kind", [PipelineOptions, NativeModelOptions, TokenModelOptions])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("slots", 0),
        ("slots", -1),
        ("waiting_room", -3),
        ("threads", 0),
        ("max_context", 0),
        ("memory_share", 0.0),
        ("memory_share", 7.0),
    ],
)
def test_numbers_that_nothing_can_run_with_are_refused(kind: type, option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"An option has a wrong value.*\$\.{option}"):
        read_options(kind, {option: value})


@pytest.mark.parametrize(
    ("option", "value"), [("streams", -1), ("pages", 0), ("page_size", 0), ("page_size", -64)]
)
def test_sizes_that_no_engine_has_are_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"\$\.{option}"):
        read_options(NativeModelOptions, {option: value})


@pytest.mark.parametrize("options", [{"engine": "native"}, {"threads": 0}, {"waiting_room": -1}])
def test_the_embedded_voice_refuses_options_too(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_pipeline("hibari", **options)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_qwen3_tts_has_no_float16() -> None:
    for option in ("dtype", "codec_dtype"):
        with pytest.raises(ConfigError, match="float16"):
            read_options(PipelineOptions, {option: "float16"})


def test_who_waits_for_a_slot() -> None:
    def room(device: str, **chosen: Any) -> int:
        return NativeModelOptions(**chosen).waiting(torch.device(device), 512)

    assert [room("cuda"), room("cpu"), room("cuda", waiting_room=7)] == [512, 64, 7]
    assert [NativeModelOptions(max_context=context).context(300) for context in (None, 0, 100)] == [
        300,
        0,
        100,
    ]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_cpu_has_the_threads_asked_for_and_else_one() -> None:
    assert open_device("cpu", 3).type == "cpu"
    assert torch.get_num_threads() == 3
    open_device("cpu")
    assert torch.get_num_threads() == 1


@pytest.fixture
def cuda_host(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A host without a GPU: the CUDA that its PyTorch is built for, and whether it has a driver."""

    def install(cuda: str | None, driver: bool) -> None:
        gpus.count = 0
        if driver:
            (tmp_path / "nvidiactl").touch()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr("pipelines.options.DRIVER", tmp_path / "nvidiactl")

    return install


@pytest.mark.usefixtures("threads")
def test_a_process_that_was_given_a_gpu_never_works_on_the_cpu_instead(
    cuda_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_host(cuda="13.0", driver=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(
        EngineCrashError, match=r"the GPU that this process was given \(CUDA_VISIBLE_DEVICES=3\)"
    ):
        open_device(None)
    assert open_device("cpu").type == "cpu"
    for nothing in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert open_device(None).type == "cpu"
    assert not caplog.records
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert open_device(None).type == "cpu"
    assert "PyTorch finds no GPU: the model runs on the CPU" in caplog.text


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("cuda", "driver"), [(None, True), ("13.0", False)])
def test_where_no_gpu_can_be_a_name_of_one_says_nothing(
    cuda_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: bool
) -> None:
    """A PyTorch for CPUs under Slurm, and a host without a driver."""
    cuda_host(cuda=cuda, driver=driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert open_device(None).type == "cpu"


@pytest.mark.usefixtures("gpus")
def test_attention_on_a_gpu_does_without_cudnn() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert open_device("cuda") == torch.device("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)

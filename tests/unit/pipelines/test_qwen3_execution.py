"""Which executor a model gets on its device, and what is said where its kernels cannot be made."""

from __future__ import annotations

import json
import logging
import stat
import sys
import threading
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.checkpoint import TINY_CODEC, dummy_decoder, qwen3_config
from kernels import lm_cuda, lm_persistent, toolchain
from kernels.cuda_driver import Source, available
from kernels.frame import Layer, StackTensors
from pipelines.codec.fused import codec_kernels
from pipelines.engine import opening
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor
from pipelines.engine.opening import open_executor
from pipelines.errors import ConfigError, ErrorCode, NightjarError, SynthesisError
from pipelines.qwen3_tts import pipeline as qwen3
from pipelines.qwen3_tts.config import Qwen3TTSConfig, StackConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.pipeline import packed_needs, start_warming
from tests.support.fake_gpus import FakeGpus
from tests.support.qwen3_golden import golden_model

SIZES = EngineOptions(slots=2, pages=8, page_size=8, max_context=64)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """What was found out about this machine's compilers comes from no other test and does not outlast this
    one."""
    cached = (toolchain.triton_fault, available, codec_kernels, Source.on)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def model() -> Qwen3TTSModel:
    return golden_model("base")


@pytest.fixture
def gpu_model(model: Qwen3TTSModel, gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Qwen3TTSModel:
    """A model that says it is on a GPU where there is none: whatever tries to make kernels for it fails
    for real."""
    gpus.capability, model = (8, 0), copy(model)
    model.device = torch.device("cuda")
    monkeypatch.setattr(opening, "EagerExecutor", lambda *sizes: ("eager", *sizes))
    return model


def test_auto_is_eager_on_a_cpu_and_graphs_are_refused(model: Qwen3TTSModel) -> None:
    assert (SIZES.frames_per_turn, SIZES.admit_turns) == (1, 1)
    assert isinstance(open_executor(model, SIZES), EagerExecutor)
    with pytest.raises(ConfigError) as caught:
        open_executor(model, SIZES, "graph")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_where_triton_makes_no_kernels_auto_is_eager_with_a_warning(
    gpu_model: Qwen3TTSModel, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_executor(gpu_model, SIZES)[0] == "eager"  # type: ignore[index]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert said.startswith("Triton cannot compile kernels here (")
    assert "slower" in said
    assert "apt-get install gcc" in said


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def triton_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small kernel that looks for faults ran."""
    monkeypatch.setattr(opening, "triton_fault", lambda: None)


def test_without_triton_the_warning_names_it(
    gpu_model: Qwen3TTSModel, no_triton: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_executor(gpu_model, SIZES)[0] == "eager"  # type: ignore[index]
    assert caplog.records[0].getMessage().startswith("Triton is not installed.")


@pytest.mark.parametrize("asked", [{"kind": "graph"}, {"reproducible": True}])
def test_what_was_asked_for_is_never_replaced_in_silence(
    gpu_model: Qwen3TTSModel, asked: dict[str, object]
) -> None:
    with pytest.raises(
        ConfigError, match=r"The graph executor cannot run here\. Triton cannot compile kernels"
    ) as caught:
        open_executor(gpu_model, SIZES, **asked)  # type: ignore[arg-type]
    assert "gcc" in caught.value.advice


def test_a_kernel_that_does_not_compile_falls_back_too(
    gpu_model: Qwen3TTSModel, triton_works: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the frame fail, since there is no device."""
    assert open_executor(gpu_model, SIZES)[0] == "eager"  # type: ignore[index]
    setup, said = caplog.records
    assert setup.exc_info
    assert said.getMessage().startswith("Its kernels could not be made (")


def test_a_lack_of_memory_is_not_a_missing_compiler(
    gpu_model: Qwen3TTSModel, triton_works: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_sizes: object, **_modes: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(opening, "graph_executor", full)
    with pytest.raises(torch.OutOfMemoryError):
        open_executor(gpu_model, SIZES)


def test_codecs_say_once_that_they_run_without_kernels(
    gpu_model: Qwen3TTSModel, caplog: pytest.LogCaptureFixture
) -> None:
    assert not codec_kernels()
    assert not codec_kernels()
    (record,) = caplog.records
    assert "Codecs run as single PyTorch ops" in record.getMessage()


@pytest.fixture
def hopper(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with an sm_90 device, an empty cache, and only the programs that the test puts into the
    folder returned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setitem(sys.modules, "nvidia", None)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    return programs


@pytest.mark.parametrize(
    "nvcc", [None, "#!/bin/sh\necho 'gcc: No such file or directory' >&2\nexit 1\n", "#!/bin/sh\nexit 0\n"]
)
def test_without_cuda_kernels_frames_run_on_tritons_with_a_warning(
    nvcc: str | None, hopper: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if nvcc is not None:
        program = hopper / "nvcc"
        program.write_text(nvcc)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert not available(0, *lm_cuda.SOURCES)
    assert not available(0, *lm_cuda.SOURCES)
    (record,) = caplog.records
    said = record.getMessage()
    assert "slower" in said
    assert toolchain.CUDA_ADVICE in said
    if nvcc is None:
        assert "neither nvcc nor nvrtc was found" in said
    elif "gcc" in nvcc:
        assert "gcc: No such file" in said


def test_a_c_compiler_is_looked_for_as_triton_does(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert toolchain.c_compiler() is None
    gcc = hopper / "gcc"
    gcc.touch(mode=0o755)
    assert toolchain.c_compiler() == str(gcc)
    monkeypatch.setenv("CC", "missing-compiler")
    assert toolchain.c_compiler() is None


def test_the_codec_of_a_gpu_is_made_ready_beside_the_model(caplog: pytest.LogCaptureFixture) -> None:
    warmed = threading.Event()
    start_warming(cast("Any", SimpleNamespace(device=torch.device("cpu"), warm=warmed.set)), False)()
    assert not warmed.is_set(), "on a CPU nothing is made"
    start_warming(cast("Any", SimpleNamespace(device=torch.device("cuda"))), False)()
    assert "could not be warmed up" in caplog.text, "that it cannot decode is no reason not to start"


def test_a_warm_decoder_has_decoded() -> None:
    decoder = dummy_decoder(TINY_CODEC, torch.device("cpu"), torch.float32)
    before = decoder.decode([torch.ones(4, 16, dtype=torch.int64)])[0]
    decoder.warm()
    assert torch.equal(decoder.decode([torch.ones(4, 16, dtype=torch.int64)])[0], before)


def test_the_megakernel_is_refused_on_a_cpu(model: Qwen3TTSModel) -> None:
    with pytest.raises(ConfigError, match="The megakernel executor needs a CUDA device"):
        open_executor(model, SIZES, "megakernel")


def test_the_megakernel_is_never_replaced_in_silence(gpu_model: Qwen3TTSModel, no_triton: None) -> None:
    with pytest.raises(ConfigError, match=r"The graph executor cannot run here\. Triton is not installed"):
        open_executor(gpu_model, SIZES, "megakernel")


def test_the_reproducible_mode_has_no_megakernel() -> None:
    with pytest.raises(ConfigError, match="The megakernel executor is not reproducible") as caught:
        opening.check_executor(torch.device("cuda"), "megakernel", True, 64, ())
    assert "SPEECH_ENGINE__REPRODUCIBLE" in caught.value.advice


@pytest.mark.parametrize(
    ("capability", "blocks", "fits"), [((9, 0), 132, True), ((9, 0), 114, False), ((10, 0), 148, False)]
)
def test_the_megakernel_by_itself_is_for_the_devices_it_was_measured_on(
    gpu_model: Qwen3TTSModel,
    gpus: FakeGpus,
    triton_works: None,
    capability: tuple[int, int],
    blocks: int,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus.capability, gpus.processors = capability, blocks
    asked: list[object] = []

    def opened(*_sizes: object, persistent: bool, **_modes: object) -> None:
        asked.append(persistent)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(opening, "graph_executor", opened)
    cuts: list[object] = [next(iter(lm_persistent.PREDICTORS.values()))]
    monkeypatch.setattr(lm_persistent, "predictor_config", lambda _: cuts[-1])
    for kind, reproducible in (("auto", False), ("auto", True), ("graph", False), ("megakernel", False)):
        with pytest.raises(torch.OutOfMemoryError):
            open_executor(gpu_model, SIZES, kind, reproducible)
    assert asked == [fits, False, False, True]
    for kind in ("auto", "megakernel"):
        with pytest.raises(torch.OutOfMemoryError):
            open_executor(gpu_model, replace(SIZES, persistent=False), kind)
        with pytest.raises(torch.OutOfMemoryError):
            open_executor(gpu_model, SIZES, kind, streams=8)
    assert asked[4:] == [False, False, True, True]
    cuts.append(None)
    with pytest.raises(torch.OutOfMemoryError):
        open_executor(gpu_model, SIZES)
    assert not asked[-1]


@pytest.mark.parametrize(
    ("free_gib", "total_gib", "refused"),
    [(6.2, 6.2, ConfigError), (6.2, 141, SynthesisError), (11.9, 141, None), (140, 141, None)],
)
def test_persistent_kernels_that_nobody_asked_for_take_no_slot_away(
    free_gib: float,
    total_gib: int,
    refused: type[NightjarError] | None,
    model: Qwen3TTSModel,
    gpus: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus.free_gib, gpus.total_gib = free_gib, total_gib
    monkeypatch.setattr(qwen3, "packed_needs", lambda *_: 4 << 30)

    def sizes(executor: opening.ExecutorKind) -> EngineOptions:
        options = qwen3.PipelineOptions(executor=executor)
        return qwen3.plan_sizes(model.config, options, torch.device("cuda"), torch.bfloat16, torch.bfloat16)

    plain, chosen, roomy = sizes("graph"), sizes("auto"), free_gib == 140
    assert (chosen.slots, chosen.persistent) == (plain.slots, roomy)
    if refused is None:
        assert (sizes("megakernel").slots == plain.slots) is roomy
    else:
        with pytest.raises(refused):
            sizes("megakernel")


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_packed_weights_are_in_the_memory_plan_and_the_published_predictors_have_a_kernel(
    size: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(size)))
    config = Qwen3TTSConfig.from_folder(tmp_path)
    predictor = config.predictor
    key = (predictor.hidden, predictor.intermediate, predictor.heads, predictor.kv_heads, predictor.head_dim)
    tiles = lm_persistent.PREDICTORS[*key, predictor.vocab, predictor.layers, config.codebooks - 1]

    def packed(stack: StackConfig) -> int:
        norm, heads = (
            torch.empty(stack.hidden, device="meta"),
            (stack.heads + 2 * stack.kv_heads) * stack.head_dim,
        )
        shapes = (
            (heads, stack.hidden),
            (stack.hidden, stack.q_width),
            (2 * stack.intermediate, stack.hidden),
            (stack.hidden, stack.intermediate),
        )
        qkv, o, gate_up, down = (torch.empty(shape, device="meta") for shape in shapes)
        layers = [Layer(norm, qkv, o, norm, gate_up, down)] * stack.layers
        table = torch.empty(1, stack.head_dim, device="meta")
        return lm_persistent.packed_layers(
            StackTensors(layers, norm, table, stack.heads, stack.kv_heads, 0, 1), tiles
        ).numel()

    heads = (config.codebooks - 1) * predictor.vocab * predictor.hidden
    talker = packed(config.talker) if size == "0b6" else 0
    assert packed_needs(config, torch.bfloat16) == 2 * (packed(predictor) + heads + talker)
    assert packed_needs(config, torch.float32) == 0

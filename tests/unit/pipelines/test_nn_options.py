"""Devices that models are opened on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipelines.errors import EngineCrashError
from pipelines.nn.checkpoint import open_device


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


@pytest.mark.usefixtures("threads")
def test_a_process_that_was_given_a_gpu_never_works_on_the_cpu_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(EngineCrashError, match=r"the GPU that this process was given \(CUDA_VISIBLE_DEVICES=3\)"):
        open_device(None)
    assert open_device("cpu").type == "cpu"
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert open_device(None).type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert open_device(None).type == "cpu"


def test_attention_on_a_gpu_does_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert open_device("cuda") == torch.device("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)

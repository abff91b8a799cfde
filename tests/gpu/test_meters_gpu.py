"""Meters on a GPU: chosen without a setting, in batches, near the scores of a CPU, within their share of memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from rapidfuzz.distance import Levenshtein
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.checkpoint import write_ctc
from benchmarks.voices import recording
from pipelines.audio import decode
from worker.quality.meters import GPU_BYTES, Utterance, open_meter
from worker.quality.process import MeterPool, MeterTask

pytestmark = pytest.mark.gpu
ALIGNER = Path(__file__).parents[1] / "support" / "aligner"
TEXT = "These days a chicken leg is a rare dish."


@pytest.fixture(autouse=True)
def _memory_of_a_process() -> Iterator[None]:
    """Other tests of this process have all of the memory again."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def utterances(count: int) -> list[Utterance]:
    sounds = (decode(recording(number, 3.0 + number / 3, 24_000)[0]) for number in range(count))
    return [Utterance(*sound, TEXT, "english") for sound in sounds]


def test_a_gpu_hears_what_a_cpu_hears() -> None:
    """In float16, also in batches of the pool's size: of 100 letters less than 2 differ."""
    some = utterances(32)
    meters = (open_meter("asr", {"model": str(ALIGNER), **place}) for place in ({}, {"device": "cpu"}))
    found, wanted = ([one["cer"][1] for one in meter.measure_batch(some)] for meter in meters)  # type: ignore[attr-defined]
    edits = sum(Levenshtein.distance(*both) for both in zip(found, wanted, strict=True))
    print("asr", edits, sum(map(len, wanted)))
    assert edits <= 0.02 * sum(map(len, wanted))


@pytest.mark.parametrize("name", ["align", "distillmos"])
def test_scores_are_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    if name == "distillmos" and find_spec("distillmos") is None:
        pytest.skip("distillmos is not installed")
    options: dict[str, str | int | float | bool] = {}
    if name == "align":
        write_ctc(tmp_path / "ctc")
        options = {"model": str(tmp_path / "ctc")}
    some = utterances(6)
    before = torch.cuda.memory_allocated()
    meter = open_meter(name, options)
    assert torch.cuda.memory_allocated() > before
    measure = getattr(meter, "measure_batch", lambda given: [meter.measure(one) for one in given])
    found = [one[name][0] for one in measure(some)]
    cpu = open_meter(name, options | {"device": "cpu", "threads": os.cpu_count() or 1})
    wanted = [cpu.measure(one)[name][0] for one in some]
    print(name, np.abs(np.subtract(found, wanted)).max())
    assert found == pytest.approx(wanted, abs=0.02)
    long = Utterance(np.tile(some[0].samples, 200), some[0].sample_rate, TEXT)
    meter.measure(long)
    # A full batch of the pool.
    measure(utterances(32))
    assert torch.cuda.max_memory_reserved() <= GPU_BYTES


def test_a_pool_takes_batches(tmp_path: Path) -> None:
    write_ctc(tmp_path / "ctc", tiny=True)
    pool = MeterPool()
    meters = {"asr": {"model": str(tmp_path / "ctc")}}
    found = [pool.submit(MeterTask(meters, one)).result(300) for one in utterances(20)]
    assert all(one.keys() == {"wer", "cer"} for one in found)
    pool.close()


def test_a_model_that_is_too_large_for_float16_hears_in_float32(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ALIGNER, tmp_path / "aligner"))
    weights = load_file(folder / "model.safetensors")
    large = {name: one * 2e4 if name.startswith("lm_head") else one for name, one in weights.items()}
    save_file(large, folder / "model.safetensors")
    gpu, cpu = (
        open_meter("asr", {"model": str(folder), **place}).measure(utterances(1)[0])["cer"][1]
        for place in ({}, {"device": "cpu"})
    )
    assert Levenshtein.distance(gpu, cpu) <= 1
    assert cpu

"""Fish Speech S2 on a CUDA device: the golden folder, steps as graphs, and the codec on fused ops at its
published size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.checkpoint import DummyWeights, dummy_fish_codec, fish_config
from kernels.frame import StackTensors
from pipelines.engine.state import Placement, SamplingParams, SlotState
from pipelines.fish_speech.codec import ReferenceEncoder
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.model import drawn_ids, frame_tensors, take_fast
from pipelines.nn.checkpoint import Loader
from pipelines.vllm_engine.engine_frames import EngineFrames
from tests.conformance.__main__ import main
from tests.support.fish_checkpoint import GOLDEN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def dummy_fish_frames(
    config: FishConfig, slots: int, device: torch.device, dtype: torch.dtype, graphed: bool = True
) -> EngineFrames:
    """Draws the frames of `slots` slots on vLLM, every slot with a request's default sampling and a
    seed of its own."""
    weights = Loader(DummyWeights(device, _keeping_variance), "", dtype, device)
    norm = torch.ones(config.slow.hidden, dtype=dtype, device=device)
    slow = config.slow
    sizes = slow.heads, slow.kv_heads, slow.eps, slow.head_dim**-0.5
    backbone = StackTensors((), norm, norm.new_zeros(1, slow.head_dim), *sizes)
    drawn = weights("drawn", len(drawn_ids(config)), slow.hidden)
    tensors = frame_tensors(config, backbone, drawn, take_fast(weights, config))
    state = SlotState(slots, slow.hidden, len(tensors.head), 1, 0, 0, dtype, device, tensors.draw.window)
    defaults = config.sampling
    how = defaults.temperature, defaults.top_k, defaults.top_p
    sampling, nothing = SamplingParams(*how, 1.0, *how, min_new_tokens=0), np.zeros(0, np.int64)
    state.place([Placement(slot, (), slot, sampling, nothing, norm, 0) for slot in range(slots)])
    return EngineFrames(tensors, state, graphed)


def _keeping_variance(name: str, noise: Tensor) -> Tensor:
    return torch.ones_like(noise) if noise.dim() == 1 else noise * noise.shape[-1] ** -0.5


def test_conformance() -> None:
    assert main(["fish", str(GOLDEN), "--device", "cuda"]) == 0


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("graphed", [False, True])
def test_frames_on_vllm_are_those_of_the_plain_ops(tmp_path: Path, graphed: bool) -> None:
    """In float32, at batches between buckets, whose other rows must not matter; every frame looks back at
    the ones before."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config, device = fish_config(tmp_path, tiny=True), torch.device("cuda")
    plain, fused = (dummy_fish_frames(config, 12, device, torch.float32, graphed) for _ in range(2))
    plain._buckets = ()
    with torch.inference_mode():
        fused.capture()
        for count in (1, 3, 7, 12, 5, 12):
            hidden, rows = (
                torch.randn(count, config.slow.hidden, device=device),
                torch.randperm(12, device=device)[:count],
            )
            assert torch.equal(fused(hidden, rows), plain(hidden, rows))


def test_the_fused_codec_is_the_plain_one(tmp_path: Path) -> None:
    """Both in bfloat16 against float32: the fused ops round no worse."""
    config, device = fish_config(tmp_path), torch.device("cuda")
    codes = [
        torch.randint(1024, (frames, 10), generator=torch.Generator().manual_seed(frames))
        for frames in (40, 25)
    ]
    exact = dummy_fish_codec(config, device, torch.float32, fused=False).decoder.decode(codes)
    errors = []
    for fused in (False, True):
        decoder = dummy_fish_codec(config, device, torch.bfloat16, fused).decoder
        waves = decoder.decode(codes)
        errors.append(sum(float((one - other).square().mean()) for one, other in zip(waves, exact)) ** 0.5)
        state = decoder.new_state()
        streamed = torch.cat(
            [decoder.decode_chunk([state], [part])[0] for part in codes[0].split([1, 2, 12, 25])]
        )
        assert (streamed - waves[0]).abs().max() < 0.1
    assert errors[1] < 1.5 * errors[0]


def test_a_recording_has_one_result_in_any_batch(tmp_path: Path) -> None:
    """As part of batches, alone in a batch, and, except for near ties, without padding and op by op."""
    device = torch.device("cuda")
    encoder = dummy_fish_codec(fish_config(tmp_path), device, torch.bfloat16).encoder
    references, dice = ReferenceEncoder(encoder), np.random.default_rng(0)
    lengths = [22_050, 22_529, *dice.integers(80_000, 300_000, 14), 1_200_000]
    rows = [dice.normal(0, 0.1, length).astype(np.float32) for length in lengths]
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        alone = [references.encode(row) for row in rows]
        for _ in range(2):
            with ThreadPoolExecutor(32) as pool:
                for codes, one in zip(pool.map(references.encode, rows), alone):
                    assert np.array_equal(codes, one)
        plain = [encoder.encode(torch.from_numpy(row)[None])[0].cpu().numpy() for row in rows]
    assert [len(codes) for codes in plain] == [-(-length // 2048) for length in lengths]
    assert np.mean(np.concatenate(plain)[:, 0] == np.concatenate(alone)[:, 0]) > 0.99

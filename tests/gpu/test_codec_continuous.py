"""Whole utterances as a continuous batch on a CUDA device: audio, bits in any company, memory; and the
fused front's error."""

from __future__ import annotations

import queue
import random
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.checkpoint import PUBLISHED_CODEC, dummy_decoder
from pipelines.codec.graphs import utterance_bytes
from pipelines.codec.stage import CodecStage
from pipelines.codec.states import CodecState
from pipelines.errors import NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, FRAMES, SECONDS = 32, 16, 240
#: How much further from float32 than gathered batches: steps meet other kernels of the libraries.
BOUND = 1.5


@lru_cache(maxsize=1)
def gathered() -> CodecDecoder:
    return dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.bfloat16)


@lru_cache(maxsize=1)
def exact() -> CodecDecoder:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.float32, False)


@lru_cache(maxsize=3)
def continuous(reproducible: bool = False, fused_front: bool = False) -> CodecDecoder:
    decoder = dummy_decoder(
        PUBLISHED_CODEC,
        torch.device("cuda"),
        torch.bfloat16,
        reproducible=reproducible,
        fused_front=fused_front,
    )
    decoder.prepare_utterances(ROWS, FRAMES)
    return decoder


def codes(frames: int, seed: int) -> Tensor:
    return torch.randint(2048, (frames, 16), generator=torch.Generator().manual_seed(seed))


def uttered(
    decoder: CodecDecoder, items: list[Tensor], starts: dict[int, CodecState] | None = None
) -> list[Tensor]:
    stage: CodecStage = CodecStage(decoder, 256, decoder.device, 0.05)
    places = [queue.SimpleQueue[np.ndarray | NightjarError]() for _ in items]
    for at, (item, place) in enumerate(zip(items, places)):
        stage.decode(item.numpy(), place.put, (starts or {}).get(at))
    found = [place.get(timeout=SECONDS) for place in places]
    stage.close()
    assert all(isinstance(one, np.ndarray) for one in found)
    return [torch.from_numpy(one) for one in found]


def error(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.float().cpu()
    return float((found.float().cpu() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("fused_front", [False, True])
def test_utterances_in_any_mix_are_as_close_to_float32_as_gathered_ones(fused_front: bool) -> None:
    plan, decoder = random.Random(1), continuous(fused_front=fused_front)
    items = [codes(plan.randint(1, 130), seed) for seed in range(90)]
    voice = decoder.new_state()
    decoder.decode_chunk([voice], [codes(40, 1000)])
    found = uttered(decoder, items, {3: voice, 50: voice})
    steps = decoder.utterances
    assert steps is not None
    assert steps.arena.free == ROWS
    made = {(rows, frames) for frames, graphs in steps.graphs.items() for rows in graphs.captured}
    assert made == set(steps.sizes)
    for at in (0, 1, 40, 89):
        (wanted,), (plain,) = exact().decode([items[at]]), gathered().decode([items[at]])
        assert torch.isfinite(found[at]).all()
        assert error(found[at], wanted) <= BOUND * error(plain, wanted)
    whole = torch.cat((codes(40, 1000), items[50]))
    (wanted,), (plain,) = exact().decode([whole]), gathered().decode([whole])
    begin = 40 * decoder.samples_per_frame
    assert error(found[50], wanted[begin:]) <= BOUND * error(plain[begin:], wanted[begin:])


@pytest.mark.parametrize("fused_front", [False, True])
def test_reproducible_audio_is_the_same_bits_in_any_company(fused_front: bool) -> None:
    decoder, plan = continuous(True, fused_front), random.Random(2)
    items = [codes(plan.randint(1, 100), seed) for seed in range(60)]
    together, backwards = uttered(decoder, items), uttered(decoder, items[::-1])[::-1]
    for one, other in zip(together, backwards):
        assert torch.equal(one, other)
    for at in range(0, 60, 7):
        assert torch.equal(uttered(decoder, [items[at]])[0], together[at])


def test_steps_take_no_more_memory_than_they_say_and_it_stays_as_it_is() -> None:
    continuous()  # the libraries' own memory is taken
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    decoder = dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.bfloat16)
    weights = torch.cuda.memory_reserved() - before
    decoder.prepare_utterances(8, FRAMES)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert (
        torch.cuda.memory_reserved() - before - weights <= utterance_bytes(decoder.shape, 8, FRAMES) + 2**28
    )
    uttered(decoder, [codes(20, seed) for seed in range(20)])
    torch.cuda.synchronize()
    used = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    uttered(decoder, [codes(30, seed) for seed in range(100)])
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == used

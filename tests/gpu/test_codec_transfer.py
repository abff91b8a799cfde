"""Samples of batches on their way from a CUDA device to the host, while the device goes on."""

from __future__ import annotations

import random

import pytest
import torch

from pipelines.codec.transfer import PendingSamples, Sender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_batches_of_any_size_arrive_whole_though_the_device_writes_their_memory_again() -> None:
    plan, sender, stream = random.Random(0), Sender(), torch.cuda.Stream()
    under_way: list[tuple[list[torch.Tensor], PendingSamples]] = []
    with torch.cuda.stream(stream):
        for batch in range(40):
            lengths = [plan.choice((0, 1, 777, 200_000, 900_000)) for _ in range(plan.randint(1, 30))]
            with torch.inference_mode():
                waves = [
                    torch.rand(length, device="cuda", generator=torch.Generator("cuda").manual_seed(batch))
                    for length in lengths
                ]
                kept = [wave.clone() for wave in waves]
                samples = sender([wave[:] for wave in waves])
                for wave in waves:
                    wave.fill_(-1.0)
                del waves
            under_way.append((kept, samples))
    for kept, samples in under_way:
        samples.wait()
        for at, wave in enumerate(kept):
            found = samples.of(at)
            assert torch.equal(torch.from_numpy(found), wave.cpu())
    stream.synchronize()


def test_a_copy_waits_for_its_samples_and_they_for_the_copy_before() -> None:
    count, cycles = 900_000, 200_000_000  # a tenth of a second
    sender, stream = Sender(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        before = [sender([torch.zeros(count, device="cuda")]) for _ in range(3)]
        for samples in before:
            samples.wait()
        del before, samples  # their memory of the host is pinned, and is taken again
        torch.cuda._sleep(cycles)
        under_way = [sender([torch.full((count,), 1.0, device="cuda")])]
        assert sender._stream is not None
        with torch.cuda.stream(sender._stream):
            torch.cuda._sleep(cycles)
        under_way += [sender([torch.full((count,), value, device="cuda")]) for value in (2.0, 3.0)]
    for samples, value in zip(under_way, (1.0, 2.0, 3.0)):
        samples.wait()
        assert (samples.of(0) == value).all()


def test_a_sender_without_samples_of_a_device_needs_none() -> None:
    samples = Sender()([torch.ones(3), torch.zeros(0)])
    assert samples.event is None
    assert samples.of(0).tolist() == [1.0, 1.0, 1.0]
    assert len(samples.of(1)) == 0

"""Captures on a CUDA device with little memory left: what lies unused is given back, and a pool outlives a
graph that failed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.cuda_graphs import GraphPool, capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: float32 values of a MiB.
MIB = 1 << 18


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Lets this process have so many MiB more than it has."""

    def limit(mib: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (mib << 20)) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def adds(made: torch.Tensor, captured_mib: int = 256) -> Callable[[], None]:
    """Work that adds 1 and needs so much memory when it is captured, and 256 MiB when it runs."""

    def work() -> None:
        mib = captured_mib if torch.cuda.is_current_stream_capturing() else 256
        made.add_(torch.ones(mib * MIB, device="cuda")[: len(made)])

    return work


def test_a_capture_has_the_memory_that_its_plain_run_took(limited: Callable[[int], None]) -> None:
    made, aside = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    limited(400)
    graph = capture(adds(made), GraphPool(), aside)
    graph.replay()
    graph.replay()
    assert made.tolist() == [3.0] * 8


def test_a_pool_outlives_a_graph_that_has_no_room(limited: Callable[[int], None]) -> None:
    made, aside, pool = torch.zeros(8, device="cuda"), torch.cuda.Stream(), GraphPool()
    limited(400)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            capture(adds(made, 1024), pool, aside)
        gc.collect()  # nobody holds the graph that failed
    limited(1600)
    graphs = [capture(adds(made), pool, aside)]
    with pytest.raises(torch.OutOfMemoryError):
        capture(adds(made, 4096), pool, aside)
    graphs.append(capture(adds(made), pool, aside))
    made.zero_()
    for graph in graphs:
        graph.replay()
    assert made.tolist() == [2.0] * 8

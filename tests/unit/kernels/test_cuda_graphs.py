"""Captures where the device has no memory, on an allocator and streams that are played: what a failed one
leaves behind."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from kernels.cuda_graphs import GraphPool, capture, lacks_memory

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


class Stream:
    device = torch.device("cpu")

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Device:
    """Counts the graphs of each pool as PyTorch's allocator does, which knows a pool until its unused
    memory was given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pools: Counter[int] = Counter()
        #: Ends of captures that find no memory, counted from 0.
        self.full_ends: tuple[int, ...] = ()
        ends = itertools.count()
        self.current, self.aside = Stream("current", self.log), Stream("aside", self.log)
        handles, device = itertools.count(1), self

        class Graph:
            capturing = pool = 0

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                if pool in device.pools and not device.pools[pool]:
                    raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
                device.pools[pool] += 1
                self.pool, Graph.capturing = pool, 1

            def capture_end(self) -> None:
                assert Graph.capturing
                Graph.capturing = 0
                if next(ends) in device.full_ends:
                    raise RuntimeError("CUDA error: out of memory")

            def __del__(self) -> None:
                device.pools[self.pool] -= bool(self.pool)

        self.graph = Graph
        device_functions = {
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: next(handles),
            "current_stream": lambda _: self.current,
            "stream": lambda stream: stream,
            "empty_cache": lambda: self.log.append("given back"),
        }
        for name, function in device_functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def capture(self, work: Callable[[], None], pool: GraphPool) -> torch.cuda.CUDAGraph:
        return capture(work, pool, self.aside)  # type: ignore[arg-type]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def fails(device: Device, error: Exception, at: tuple[int, ...]) -> Callable[[], None]:
    """Work that fails at these of its runs, counted from 0: the first is plain, the others are captured."""
    runs = itertools.count()

    def work() -> None:
        run = next(runs)
        device.log.append("captured" if device.graph.capturing else "runs")
        if run in at:
            raise type(error)(*error.args)  # another one, since one that is kept keeps the graph

    return work


def test_graphs_share_a_pool_and_each_side_waits_for_the_other(device: Device) -> None:
    pool = GraphPool()
    graphs = [device.capture(fails(device, FULL, ()), pool) for _ in range(2)]
    assert device.pools == {1: 2}
    assert device.log == ["aside waits for current", "runs", "captured", "current waits for aside"] * 2
    del graphs


def test_a_capture_without_room_is_tried_again_when_what_lay_unused_is_given_back(device: Device) -> None:
    pool = GraphPool()
    graph = device.capture(fails(device, FULL, (1,)), pool)
    assert device.log == [
        "aside waits for current",
        "runs",
        "captured",
        "given back",
        "captured",
        "current waits for aside",
    ]
    assert device.pools == {1: 0, 2: 1}
    del graph


@pytest.mark.parametrize("at", [(0,), (1, 2)])
def test_a_graph_that_has_no_room_leaves_nothing_behind(device: Device, at: tuple[int, ...]) -> None:
    """No pool that the allocator gave up, no capture under way, and no work that another stream does not
    wait for."""
    pool = GraphPool()

    def fail() -> None:
        with suppress(torch.OutOfMemoryError):
            device.capture(fails(device, FULL, at), pool)
            pytest.fail("there was room")
        assert not device.graph.capturing
        assert device.log[-1] == "current waits for aside"

    fail()
    assert not any(device.pools.values())
    kept = [device.capture(fails(device, FULL, ()), pool) for _ in range(2)]
    fail()
    kept.append(device.capture(fails(device, FULL, ()), pool))
    assert [count for count in device.pools.values() if count] == [3], "they share a pool"
    kept.clear()
    assert device.capture(fails(device, FULL, ()), pool)


def test_what_finds_no_room_at_the_end_of_a_capture_is_tried_again(device: Device) -> None:
    device.full_ends = (0,)
    graph = device.capture(fails(device, FULL, ()), GraphPool())
    assert device.log == [
        "aside waits for current",
        "runs",
        "captured",
        "given back",
        "captured",
        "current waits for aside",
    ]
    del graph
    device.full_ends = (2, 3)
    with pytest.raises(torch.OutOfMemoryError):
        device.capture(fails(device, FULL, ()), GraphPool())
    assert not any(device.pools.values())


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
        "The launch of a kernel was refused: CUDA_ERROR_OUT_OF_MEMORY (2).",
    ],
)
@pytest.mark.parametrize("at", [(0,), (1, 2)])
def test_a_driver_or_library_without_memory_is_a_lack_of_memory(
    device: Device, said: str, at: tuple[int, ...]
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"(?i)out.of.memory|ALLOC_FAILED"):
        device.capture(fails(device, RuntimeError(said), at), GraphPool())


def test_another_fault_stays_what_it_is_and_is_not_tried_again(device: Device) -> None:
    with pytest.raises(RuntimeError, match="device-side assert triggered") as caught:
        device.capture(
            fails(device, RuntimeError("CUDA error: device-side assert triggered"), (1,)), GraphPool()
        )
    assert not lacks_memory(caught.value)
    assert device.log.count("captured") == 1
    assert not device.graph.capturing

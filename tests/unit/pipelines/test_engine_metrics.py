"""What an engine says of itself: in one line, and in Prometheus metrics."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from pipelines.engine.engine import Engine
from pipelines.engine_metrics import EngineMetrics
from pipelines.qwen3_tts.pipeline import open_pipeline
from pipelines.request import EngineInfo, EngineStats
from tests.support.fakes import FakePipeline
from tests.support.qwen3_golden import GOLDEN
from tests.support.serving_kit import scraped

H200 = EngineInfo(
    slots=512,
    waiting_room=512,
    device="NVIDIA H200",
    dtype="bfloat16",
    executor="graph",
    kernels="fused CUDA",
    kv_pages=9545,
    page_size=64,
    max_context=8192,
    reproducible=False,
)


def test_one_line_says_what_runs_a_model() -> None:
    assert H200.summary("qwen3-tts-0.6b-base") == (
        "qwen3-tts-0.6b-base on NVIDIA H200, graph executor, fused CUDA kernels, bfloat16, 512 slots, 9545 KV pages of 64"
    )
    assert (
        EngineInfo(slots=2, device="cpu", dtype="float32").summary("hibari")
        == "hibari on cpu, float32, 2 slots, reproducible"
    )
    assert EngineInfo().summary("other") == "other, 1 slots, reproducible"


def test_the_metrics_of_engines_are_read_at_each_scrape() -> None:
    pipelines: list[FakePipeline] = []
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: pipelines))

    def metrics() -> dict[str, float]:
        return scraped(generate_latest(registry).decode())

    sizes = (
        "speech_engine_slots",
        "speech_engine_waiting_room",
        "speech_engine_kv_pages",
        "speech_engine_kv_use",
    )
    assert [metrics()[name] for name in sizes] == [0, 0, 0, 0]
    first, second = FakePipeline("first"), FakePipeline("second")
    first.info = H200
    second.info = replace(H200, slots=16, kv_pages=5, kernels="Triton", reproducible=True)
    pipelines += [first, second]
    found = metrics()
    assert [found[name] for name in sizes] == [528, 1024, 9550, 0]
    about = "device=NVIDIA H200,dtype=bfloat16,executor=graph"
    assert found[f"speech_engine_info{{{about},kernels=fused CUDA,model=first,reproducible=no}}"] == 1
    assert found[f"speech_engine_info{{{about},kernels=Triton,model=second,reproducible=yes}}"] == 1


def test_energy_is_a_metric_where_every_engine_knows_it() -> None:
    class Metered(FakePipeline):
        joules: float | None = None

        def stats(self) -> EngineStats:
            return replace(super().stats(), joules=self.joules)

    first, second = Metered("first"), Metered("second")
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: [first, second]))
    first.joules = 2.5
    assert "joules" not in generate_latest(registry).decode()
    second.joules = 10.0
    assert scraped(generate_latest(registry).decode())["speech_engine_joules_total"] == 12.5


def test_the_native_engine_on_a_cpu_says_how_it_was_opened() -> None:
    pipeline = open_pipeline(GOLDEN / "checkpoint-base", slots=3, pages=8, page_size=16, max_context=100)
    try:
        assert pipeline.info == EngineInfo(
            slots=3,
            waiting_room=64,
            device="cpu",
            dtype="float32",
            executor="eager",
            kernels="plain",
            kv_pages=8,
            page_size=16,
            max_context=100,
            reproducible=True,
            engine="native",
        )
    finally:
        pipeline.close()


def test_a_codec_that_is_not_as_by_default_is_named() -> None:
    pipeline = open_pipeline(GOLDEN / "checkpoint-base", slots=1, pages=8, page_size=16, max_context=100)
    try:
        assert pipeline.info.kernels == "plain"
        core = pipeline.engine.core
        other = Engine(core.executor, core.options, codec="continuous codec")
        assert other.info.kernels == "plain, continuous codec"
        other.close()
    finally:
        pipeline.close()

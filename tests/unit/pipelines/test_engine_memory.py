"""How many slots and KV pages a GPU's memory holds, what is refused before anything is loaded, and the
table of docs/qwen3-tts.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.checkpoint import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder, qwen3_config
from pipelines.codec.graphs import stream_bytes, utterance_bytes
from pipelines.engine.buckets import BUCKETS, WIDE_BUCKETS, buckets_for
from pipelines.engine.executor import EngineOptions
from pipelines.engine.opening import (
    DEFAULT_SHARE,
    LIBRARY_BYTES,
    MemoryNeeds,
    NativeModelOptions,
    check_executor,
    plan_memory,
    slots_bytes,
)
from pipelines.errors import ConfigError, ErrorCode, SynthesisError
from pipelines.fish_speech import pipeline as fish
from pipelines.nn.checkpoint import open_device
from pipelines.qwen3_tts import pipeline as qwen3
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.qwen3_tts.pipeline import (
    LATE_STATES,
    codec_needs,
    engine_options,
    memory_needs,
    packed_needs,
)
from pipelines.spark_tts import pipeline as spark
from tests.support import fish_checkpoint, golden_checkpoint
from tests.support.fake_gpus import FakeGpus
from tests.support.lm_tensors import Shape
from tests.support.qwen3_golden import GOLDEN

ROOT = Path(__file__).resolve().parents[3]
PAGE_SIZE, CONTEXT = 64, 8192
#: Values in the files of the published checkpoints: of the model, by its size, and of its codec.
MODEL_VALUES, CODEC_VALUES = {"0b6": 905_788_672, "1b7": 1_916_676_352}, 170_500_000
GIGABYTES = (16, 24, 40, 80, 141)


def published_needs(folder: Path, size: str) -> MemoryNeeds:
    (folder / "config.json").write_text(json.dumps(qwen3_config(size)))
    weight_bytes = 2 * (MODEL_VALUES[size] + CODEC_VALUES)
    return memory_needs(Qwen3TTSConfig.from_folder(folder), torch.bfloat16, PAGE_SIZE, CONTEXT, weight_bytes)


def planned(gigabytes: float, needs: MemoryNeeds, slots: int | None = None) -> EngineOptions:
    """The plan for jobs on a GPU that is free, by the default share."""
    return plan_memory(int(DEFAULT_SHARE * gigabytes * 1e9), needs, PAGE_SIZE, CONTEXT, slots, wide=True)


def taken(plan: EngineOptions, needs: MemoryNeeds) -> int:
    """Bytes of everything that a plan names."""
    return (
        needs.weights
        + plan.slots * needs.slot
        + plan.pages * needs.page
        + (plan.decode_frames or 0) * needs.decoded_frame
    )


def test_the_table_of_slots_is_what_the_arithmetic_says(tmp_path: Path) -> None:
    lines = (ROOT / "docs/qwen3-tts.md").read_text().splitlines()
    start = lines.index("| memory of the GPU | 0.6B: slots, KV pages | 1.7B: slots, KV pages |")
    rows = []
    for gigabytes in GIGABYTES:
        plans = [planned(gigabytes, published_needs(tmp_path, size)) for size in ("0b6", "1b7")]
        cells = " | ".join(f"{plan.slots}, {plan.pages:,}" for plan in plans)
        rows.append(f"| {gigabytes} GB | {cells} |")
    assert lines[start + 2 : start + 2 + len(rows)] == rows
    fewer = []
    for size in ("0b6", "1b7"):
        plain = published_needs(tmp_path, size)
        packed = plain._replace(
            weights=plain.weights + packed_needs(Qwen3TTSConfig.from_folder(tmp_path), torch.bfloat16)
        )
        fewer.append(planned(141, plain).pages - planned(141, packed).pages)
    assert (
        f"On 141 GB, where the executor is `megakernel`, there are {fewer[0]} pages fewer (1.7B: {fewer[1]})."
        in lines
    )


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_a_plan_stays_within_its_memory_and_grows_with_it(size: str, tmp_path: Path) -> None:
    needs = published_needs(tmp_path, size)
    before = 0
    for gigabytes in range(16, 200):
        plan = planned(gigabytes, needs)
        assert plan.slots in (*BUCKETS, *WIDE_BUCKETS)
        assert plan.slots >= before
        assert taken(plan, needs) + LIBRARY_BYTES < DEFAULT_SHARE * gigabytes * 1e9
        assert plan.pages * PAGE_SIZE >= plan.slots * 512, "a slot has no room for a typical utterance"
        before = plan.slots
    assert before == WIDE_BUCKETS[-1]
    assert plan_memory(180 << 30, needs, PAGE_SIZE, CONTEXT).slots == BUCKETS[-1]


def test_more_than_512_slots_leave_room_for_what_the_codec_keeps(tmp_path: Path) -> None:
    needs = published_needs(tmp_path, "0b6")
    most = [planned(gigabytes, needs).slots for gigabytes in (80, 106, 141)]
    assert most == [512, 640, 1024]
    for gigabytes in range(96, 200, 4):
        plan = planned(gigabytes, needs)
        pages = plan.pages - plan.slots * 512 // PAGE_SIZE
        assert plan.slots == 512 or pages * needs.page >= 15 << 30, "half of 32 GiB"


def test_more_slots_than_the_memory_holds_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    needs = published_needs(tmp_path, "1b7")
    with pytest.raises(
        ConfigError, match=r"500 slots do not fit into the GPU's memory: .* GiB, which hold \d+ slots\."
    ) as caught:
        planned(24, needs, 500)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    most = int(caught.value.message.split("hold ")[1].split()[0])
    assert f"SPEECH_ENGINE__SLOTS to {most} or less" in caught.value.advice
    plan = planned(24, needs, most)
    assert (plan.slots, plan.pages * PAGE_SIZE >= most * 256) == (most, True)
    assert planned(24, needs).slots < most
    with pytest.raises(ConfigError):
        planned(24, needs, most + 1)


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_wide_engines_count_the_rows_of_all_their_graphs(size: str, tmp_path: Path) -> None:
    needs = published_needs(tmp_path, size)
    #: Rows that a slot's bytes stand for, in the buffers of all graphs.
    row = needs.slot / 3
    for slots in (1, 100, 512, 513, 640, 700, 896, 1000, 1024):
        plan, buckets = planned(141, needs, slots), buckets_for(slots)
        counted = slots_bytes(needs, slots)
        assert counted >= sum(buckets) * row
        graphs = (
            counted
            + plan.pages * needs.page
            + needs.weights
            + 2 * (plan.decode_frames or 0) * needs.decoded_frame
            + LIBRARY_BYTES
            + (3 << 29)
        )
        assert graphs <= DEFAULT_SHARE * 141e9
    assert slots_bytes(needs, 512) == 512 * needs.slot, "the default is what was measured"
    assert slots_bytes(needs, 1024) > 1.5 * 1024 * needs.slot


def test_all_slots_that_are_said_to_fit_do(tmp_path: Path) -> None:
    for gigabytes in (24, 80, 141, 300):
        needs = published_needs(tmp_path, "0b6")
        with pytest.raises(ConfigError) as caught:
            planned(gigabytes, needs, 100_000)
        most = int(caught.value.message.split("hold ")[1].split()[0])
        assert planned(gigabytes, needs, most).pages * PAGE_SIZE >= most * 256
        with pytest.raises(ConfigError):
            planned(gigabytes, needs, most + 1)


def test_a_model_that_does_not_fit_at_all_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it needs \d\.\d GiB, and the engine may take 4\.7 GiB"):
        planned(6, published_needs(tmp_path, "1b7"))


def test_what_no_utterance_could_ever_need_is_not_taken(tmp_path: Path) -> None:
    needs = published_needs(tmp_path, "0b6")
    plan = plan_memory(140 << 30, needs, PAGE_SIZE, 256, 4)
    assert (plan.slots, plan.pages) == (4, 16)
    assert plan_memory(140 << 30, needs, PAGE_SIZE, CONTEXT, 4, 77).pages == 77


@pytest.fixture
def two_gpus(gpus: FakeGpus) -> FakeGpus:
    """Two GPUs of 16 GiB."""
    gpus.count, gpus.free_gib, gpus.total_gib = 2, 15, 16
    return gpus


def test_streams_take_slots_and_memory(two_gpus: FakeGpus, tmp_path: Path) -> None:
    published_needs(tmp_path, "0b6")
    config, device = Qwen3TTSConfig.from_folder(tmp_path), torch.device("cuda:1")
    weight_bytes = 2 * (MODEL_VALUES["0b6"] + CODEC_VALUES)
    plain, streams = (
        engine_options(
            config, device, torch.bfloat16, NativeModelOptions(streams=count), weight_bytes + graphs, state
        )
        for count, (graphs, state) in (
            (0, (0, 0)),
            (16, codec_needs(PUBLISHED_CODEC, torch.bfloat16, True, 0)),
        )
    )
    assert (plain.stream_slots, streams.stream_slots) == (0, 16)
    assert streams.pages < plain.pages
    assert (
        engine_options(config, device, torch.bfloat16, NativeModelOptions(slots=8, streams=16)).stream_slots
        == 4
    )


def test_a_turn_of_a_wide_engine_prefills_more(two_gpus: FakeGpus, tmp_path: Path) -> None:
    """1,024 utterances of 9 s end at 9 a frame: with prompts of 228 positions those of four turns have
    about 8,300."""
    two_gpus.free_gib, two_gpus.total_gib = 140, 141
    needs, device = published_needs(tmp_path, "0b6"), torch.device("cuda:1")
    sizes = [
        NativeModelOptions(slots=slots).plan(needs, device, CONTEXT, CONTEXT).prefill_tokens
        for slots in (None, 512, 640, 1024)
    ]
    assert sizes == [2048, 2048, 7680, 12288]
    assert [
        NativeModelOptions(slots=slots).plan(needs, device, CONTEXT, CONTEXT).frames_per_turn
        for slots in (None, 512, 640)
    ] == [2, 2, 1]
    plain = NativeModelOptions().plan(needs, device, CONTEXT, CONTEXT)
    assert (plain.spare_slots, plain.frame_seconds) == (0, 0.08)


@pytest.mark.parametrize(
    ("chosen", "slots", "spare"),
    [
        ({}, 1024, 128), ({"slots": 512}, 512, 64), ({"slots": 300}, 300, 0), ({"streams": 4}, 512, 0), ({"reproducible": True}, 512, 0),
        ({"streams": 4, "slots": 768}, 768, 0),
    ],
)  # fmt: skip
def test_only_jobs_have_more_than_512_slots_by_default_and_spare_ones(
    chosen: dict[str, Any],
    slots: int,
    spare: int,
    two_gpus: FakeGpus,
) -> None:
    two_gpus.free_gib, two_gpus.total_gib = 140, 141
    config, options = (
        Qwen3TTSConfig.from_folder(GOLDEN / "checkpoint-base"),
        qwen3.PipelineOptions(executor="graph", **chosen),
    )
    sizes = qwen3.plan_sizes(config, options, torch.device("cuda:1"), torch.bfloat16, torch.bfloat16)
    assert (sizes.slots, sizes.spare_slots) == (slots, spare)


@pytest.mark.parametrize(("share", "slots"), [(None, None), (0.9, None), (None, 64)])
def test_a_gpu_that_another_program_fills_is_no_wrong_setting(
    two_gpus: FakeGpus,
    tmp_path: Path,
    share: float | None,
    slots: int | None,
) -> None:
    needs, device = published_needs(tmp_path, "0b6"), torch.device("cuda:1")
    NativeModelOptions(memory_share=share, slots=slots).plan(needs, device, CONTEXT, CONTEXT)
    two_gpus.free_gib = 5
    with pytest.raises(
        SynthesisError, match=r"Another program fills the GPU: 5\.0 GiB of its 16\.0 GiB are free"
    ) as caught:
        NativeModelOptions(memory_share=share, slots=slots).plan(needs, device, CONTEXT, CONTEXT)
    assert caught.value.code is ErrorCode.SYNTH_OOM
    assert "nvidia-smi" in caught.value.advice
    with pytest.raises(ConfigError, match="10000 slots do not fit"):
        NativeModelOptions(memory_share=share, slots=10_000).plan(needs, device, CONTEXT, CONTEXT)
    with pytest.raises(ConfigError, match=r"the engine may take 1\.6 GiB"):
        NativeModelOptions(memory_share=0.1).plan(needs, device, CONTEXT, CONTEXT)


def test_whole_utterances_wait_for_less_company_beside_streams_and_in_the_steps_of_a_continuous_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "pipelines.codec.decoder.CodecStage", lambda _decoder, _most, _device, seconds, _frames: seconds
    )
    decoder: Any = SimpleNamespace(device=torch.device("cuda"), batch_frames=4096, utterances=None)
    short, long = qwen3.open_stage(decoder, 2048, streams=True), qwen3.open_stage(decoder, 2048)
    assert 0 < short < long
    assert decoder.batch_frames == 2048
    decoder.utterances = object()
    assert qwen3.open_stage(decoder) == short


def test_what_streams_take_is_known_before_the_codec_is_loaded() -> None:
    decoder = dummy_decoder(TINY_CODEC, torch.device("cpu"), torch.float32)
    graphs, state = codec_needs(TINY_CODEC, torch.float32, True, 0)
    assert graphs + 40 * state == stream_bytes(decoder.shape, LATE_STATES + 40), "every slot has a state"
    assert codec_needs(TINY_CODEC, torch.bfloat16, True, 0)[1] == state // 2


def test_a_continuous_batch_of_the_codec_takes_memory(two_gpus: FakeGpus, tmp_path: Path) -> None:
    published_needs(tmp_path, "0b6")
    config, device = Qwen3TTSConfig.from_folder(tmp_path), torch.device("cuda:1")
    decoder = dummy_decoder(TINY_CODEC, torch.device("cpu"), torch.float32)
    assert codec_needs(TINY_CODEC, torch.float32, False, 8)[0] == utterance_bytes(decoder.shape, 8)
    assert codec_needs(TINY_CODEC, torch.float32, False, 0)[0] == 0
    needs = codec_needs(PUBLISHED_CODEC, torch.bfloat16, False, 256)[0]
    assert 4 << 30 < needs < 9 << 30
    weight_bytes = 2 * (MODEL_VALUES["0b6"] + CODEC_VALUES)
    plain, batch = (
        engine_options(config, device, torch.bfloat16, taken=weight_bytes + taken)
        for taken in (0, codec_needs(PUBLISHED_CODEC, torch.bfloat16, False, 64)[0])
    )
    assert (batch.slots, batch.pages) < (plain.slots, plain.pages)


def test_a_share_bounds_slots_pages_and_the_allocator(two_gpus: FakeGpus, tmp_path: Path) -> None:
    published_needs(tmp_path, "0b6")
    config, device = Qwen3TTSConfig.from_folder(tmp_path), torch.device("cuda:1")
    weight_bytes = 2 * (MODEL_VALUES["0b6"] + CODEC_VALUES)
    whole = engine_options(config, device, torch.bfloat16, taken=weight_bytes)
    # The rest of the free memory is for the meters beside the engine.
    assert (whole.slots, two_gpus.shares) == (64, {1: DEFAULT_SHARE * 15 / 16 - 1 / 16})
    half = engine_options(config, device, torch.bfloat16, NativeModelOptions(memory_share=0.5), weight_bytes)
    assert half.slots < whole.slots
    assert half.pages < whole.pages
    assert two_gpus.shares == {1: 0.5 - 1 / 16}
    engine_options(config, torch.device("cuda"), torch.bfloat16, NativeModelOptions(memory_share=0.5))
    assert two_gpus.shares.keys() == {1, None}
    # Another program has taken more than the share leaves to others.
    all_of_it, what_is_free = (
        engine_options(config, device, torch.bfloat16, NativeModelOptions(memory_share=share), weight_bytes)
        for share in (1.0, 15 / 16)
    )
    assert all_of_it == what_is_free


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": 100_000}, "100000 slots do not fit"),
        ({"memory_share": 0.1}, "The model does not fit into the GPU's memory"),
        ({"max_context": 20}, "A context of 20 positions is too short"),
        ({"device": "cuda:7"}, "There is no GPU 7; this process sees 2."),
        ({"device": "gpu"}, "There is no device 'gpu'."),
        ({"executor": "eager", "reproducible": True}, "The eager executor is not reproducible on a GPU"),
        ({"reproducible": True}, r"The graph executor cannot run here\. Triton cannot compile kernels here"),
        ({"executor": "short"}, "wrong value: Invalid enum value 'short'"),
        ({"page_size": 48}, "a page_size that is a power of two up to 1024; page_size is 48"),
        ({"page_size": 2048, "executor": "graph"}, "page_size is 2048"),
        ({"device": "cpu", "executor": "graph"}, "The graph executor needs a CUDA device"),
        ({"dtype": "int3"}, "wrong value: Invalid enum value 'int3'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    options: dict[str, object],
    said: str,
    two_gpus: FakeGpus,
    tmp_path: Path,
) -> None:
    # Without one of their tensors, neither its model nor its codec can be loaded.
    folder = shutil.copytree(
        GOLDEN / "checkpoint-base", tmp_path / "checkpoint", copy_function=shutil.copyfile
    )
    for file in folder.rglob("*.safetensors"):
        weights = load_file(file)
        weights.popitem()
        save_file(weights, file)
    with pytest.raises(ConfigError, match=said) as caught:
        qwen3.open_pipeline(folder, **options)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert caught.value.advice


@pytest.mark.parametrize(
    ("sizes", "said"), [((34, 2, 64), "this model has 34 for 2"), ((8, 8, 80), "this model's is 80")]
)
def test_heads_that_the_kernels_do_not_know_are_refused_where_graphs_are_asked_for(
    sizes: tuple[int, int, int], said: str
) -> None:
    heads, kv_heads, head_dim = sizes
    stacks = [Shape(), Shape(heads=heads, kv_heads=kv_heads, head_dim=head_dim)]
    for kind, reproducible in (("graph", False), ("auto", True)):
        with pytest.raises(ConfigError, match=f"The graph executor cannot run this model.*{said}") as caught:
            check_executor(torch.device("cuda"), kind, reproducible, 64, stacks)
        assert "eager" in caught.value.advice
    check_executor(torch.device("cuda"), "auto", False, 64, stacks)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
@pytest.mark.parametrize(
    ("family", "loads"), [(qwen3, "_load"), (spark, "load_weights"), (fish, "load_weights")]
)
def test_memory_that_others_took_meanwhile_is_an_error_with_advice(
    family: ModuleType, loads: str, kind: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise kind("CUDA out of memory. Tried to allocate 20 GiB.\nmore words")

    monkeypatch.setattr(family, loads, full)
    folders = {
        qwen3: lambda: GOLDEN / "checkpoint-base",
        spark: lambda: golden_checkpoint.whole(GOLDEN.parent / "spark/checkpoint"),
        fish: fish_checkpoint.whole,
    }
    with pytest.raises(SynthesisError, match="while the model was opened: CUDA out of memory") as caught:
        family.open_pipeline(folders[family]())
    assert caught.value.code is ErrorCode.SYNTH_OOM
    assert "more words" not in caught.value.message


def test_a_device_is_named_or_the_best_there_is(two_gpus: FakeGpus) -> None:
    assert open_device("cuda:1") == torch.device("cuda:1")
    assert open_device(None) == torch.device("cuda")
    assert open_device("cpu", threads=1) == torch.device("cpu")


def test_a_gpu_where_there_is_none_is_refused(gpus: FakeGpus) -> None:
    gpus.count = 0
    with pytest.raises(ConfigError, match="There is no GPU 0; this process sees 0"):
        open_device("cuda:0")

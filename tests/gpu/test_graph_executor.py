"""The graph executor against the eager one, through the scheduler."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.checkpoint import PUBLISHED_CODEC, dummy_decoder, dummy_model
from pipelines.codec.stage import CodecStage
from pipelines.engine.buckets import ASKS
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor, FrameExecutor
from pipelines.engine.graph import prefills_of
from pipelines.engine.opening import graph_executor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
from tests.conformance.qwen3_tts import forced_frames
from tests.support.drawn import Watched
from tests.support.gpu_taps import tapped
from tests.support.listened import ListenedCore

pytestmark = pytest.mark.gpu


#: The log probabilities of codebook 0, [frames], of what was spoken last.
MEASURED: dict[str, np.ndarray] = {}


class Heard:
    def __init__(self) -> None:
        self.codes: dict[str, np.ndarray] = {}

    def frames(self, request: GenerationRequest, codes: np.ndarray) -> None:
        """Only whole utterances are looked at."""

    def finished(self, request: GenerationRequest, codes: np.ndarray, finish: str) -> None:
        self.codes[request.request_id] = codes

    def failed(self, request: GenerationRequest, error: Exception) -> None:
        raise error


def requests(model: Qwen3TTSModel, count: int, greedy: bool) -> list[GenerationRequest]:
    """Requests with short prompts; every fourth prompt has up to 600 positions, so that it is prefilled in
    several chunks."""
    draw = np.random.default_rng(3)
    made = []
    for index in range(count):
        body = draw.integers(0, 150_000, int(draw.integers(3, 600 if index % 4 == 3 else 40))).tolist()
        prompt = build_prompt(
            model.config, TokenizedTask([151644, 77091, 198], body, language="english", speaker="ryan")
        )
        sampling = (
            SamplingParams(temperature=0.0, residual_temperature=0.0)
            if greedy
            else SamplingParams(top_p=1.0 if index % 2 else 0.9)
        )
        made.append(
            GenerationRequest(str(index), prompt, sampling, seed=index, max_tokens=int(draw.integers(3, 12)))
        )
    return made


def spoken(
    executor: FrameExecutor, batch: list[GenerationRequest], together: int, frames: int = 1
) -> dict[str, np.ndarray]:
    """The codes of every request when at most `together` run at once."""
    heard = Heard()
    options = EngineOptions(
        slots=executor.state.slots, pages=512, page_size=64, max_context=1024, frames_per_turn=frames
    )
    core = ListenedCore(executor, options, heard)
    for start in range(0, len(batch), together):
        for request in batch[start : start + together]:
            core.add(request)
        while core.busy:
            core.step()
    for request, found in core.log_probabilities.items():
        MEASURED[request.request_id] = found
    return heard.codes


@pytest.fixture(scope="module")
def wide() -> Qwen3TTSModel:
    torch.backends.cuda.matmul.allow_tf32 = False
    return dummy_model("0b6", torch.device("cuda"), torch.float32, 1024)


@pytest.fixture(scope="module")
def narrow() -> Qwen3TTSModel:
    return dummy_model("0b6", torch.device("cuda"), torch.bfloat16, 1024)


def sized(slots: int) -> EngineOptions:
    return EngineOptions(slots=slots, pages=512, page_size=64, max_context=1024)


def graph(
    model: Qwen3TTSModel, slots: int, reproducible: bool = False, padded: bool = False
) -> FrameExecutor:
    """An executor with all of its graphs; `padded`: prompts meet the shapes of the reproducible mode."""
    executor = graph_executor(model, sized(slots), reproducible)
    if padded:
        executor.packed = False
        executor.prefills = prefills_of(executor, ())
    while executor.prepare():
        pass
    return executor


def test_float32_log_probabilities_equal_the_eager_executors(wide: Qwen3TTSModel) -> None:
    batch = requests(wide, 12, greedy=False)
    eager = spoken(EagerExecutor(wide, sized(7)), batch, 12)
    wanted = dict(MEASURED)
    fused = spoken(graph(wide, 7), batch, 12, frames=2)
    compared = 0
    for name, own in wanted.items():
        assert len(own) == len(eager[name])
        if np.array_equal(eager[name], fused[name]):
            np.testing.assert_allclose(own, MEASURED[name], atol=1e-3)
            compared += len(own)
    assert compared > 20


def test_float32_codes_equal_the_eager_executors(wide: Qwen3TTSModel) -> None:
    batch = requests(wide, 10, greedy=False) + requests(wide, 10, greedy=True)
    batch = [
        GenerationRequest(str(i), r.prompt, r.sampling, r.seed, r.max_tokens) for i, r in enumerate(batch)
    ]
    eager = spoken(EagerExecutor(wide, sized(7)), batch, 20)
    fused = spoken(graph(wide, 7), batch, 20, frames=2)
    same = [np.array_equal(eager[name], fused[name]) for name in eager]
    # Rounding differs by the order of additions: a draw at the very edge of its interval may fall to the
    # other side.
    assert sum(same) >= len(batch) - 1


def test_reproducible_codes_are_the_same_bits_alone_and_in_any_company(narrow: Qwen3TTSModel) -> None:
    batch = requests(narrow, 24, greedy=False)
    executor = graph(narrow, 16, reproducible=True)
    alone = spoken(executor, batch, 1)
    measured = dict(MEASURED)
    together = spoken(executor, batch[::-1], 24)
    for name in alone:
        assert len(measured[name]) == len(alone[name])
        np.testing.assert_array_equal(measured[name], MEASURED[name])
    again = spoken(executor, batch, 5, frames=3)
    anew = spoken(graph(narrow, 16, reproducible=True), batch, 24)
    for name in alone:
        np.testing.assert_array_equal(alone[name], together[name])
        np.testing.assert_array_equal(alone[name], again[name])
        np.testing.assert_array_equal(alone[name], anew[name])


def test_float32_codes_equal_the_eager_executors_where_each_stack_has_its_own_rope_theta(
    wide: Qwen3TTSModel,
) -> None:
    config = wide.config
    config = replace(
        config,
        talker=replace(config.talker, rope_theta=2e4),
        predictor=replace(config.predictor, rope_theta=300.0),
    )
    with torch.inference_mode():
        model = Qwen3TTSModel(config, wide.weights, 1024)
    batch = requests(model, 7, greedy=False)
    eager = spoken(EagerExecutor(model, sized(7)), batch, 7)
    fused = spoken(graph(model, 7), batch, 7)
    same = [np.array_equal(eager[name], fused[name]) for name in eager]
    assert sum(same) >= len(batch) - 1


def bits(
    executor: FrameExecutor, batch: list[GenerationRequest], frames: int
) -> dict[str, tuple[np.ndarray, torch.Tensor]]:
    """The codes of requests that run together, and the keys and values of all their positions after that
    many frames."""
    heard = Heard()
    options = EngineOptions(slots=executor.state.slots, pages=512, page_size=64, max_context=1024)
    core = ListenedCore(executor, options, heard)
    for request in batch:
        core.add(request)
    written: dict[str, torch.Tensor] = {}
    while core.busy:
        core.step()
        for one in core.scheduler.running:
            if one.started == frames:
                kv = torch.stack((executor.kv.k[:, one.pages], executor.kv.v[:, one.pages]))
                written[one.request.request_id] = (
                    kv.transpose(2, 3).flatten(3, 4)[:, :, :, : one.last + one.started].clone()
                )
    return {name: (heard.codes[name], written[name]) for name in heard.codes}


def assert_same_bits(
    some: dict[str, tuple[np.ndarray, torch.Tensor]],
    others: dict[str, tuple[np.ndarray, torch.Tensor]],
    members: int,
) -> None:
    shared = some.keys() & others.keys()
    assert len(shared) == members
    for name in shared:
        np.testing.assert_array_equal(some[name][0], others[name][0], err_msg=name)
        assert torch.equal(some[name][1], others[name][1]), f"keys and values of {name}"


def test_small_buckets_are_the_same_bits_in_any_company(narrow: Qwen3TTSModel) -> None:
    """Codes, and keys and values of all positions: in one bucket a row's bits depend on no neighbour and
    on no place.

    Alone and in a pair they are the same too: one and two rows meet the same kernels with the same splits.
    Prompts are prefilled in one shape, so that the frames alone are compared, and nobody ends early, so
    that the bucket stays.
    """
    frames = 7
    sampling = SamplingParams(top_p=0.9, min_new_tokens=frames + 1)
    batch = [
        replace(request, sampling=sampling, max_tokens=frames + 1)
        for request in requests(narrow, 11, greedy=False)
    ]
    batch = [request for request in batch if len(request.prompt) + frames < 64][:8]
    assert len(batch) == 8
    executor = graph(narrow, 8, padded=True)
    eight = bits(executor, batch, frames)
    assert_same_bits(eight, bits(executor, batch[::-1], frames), 8)
    assert_same_bits(eight, bits(executor, batch[3:], frames), 5)
    assert_same_bits(eight, bits(executor, [batch[index] for index in (6, 0, 5, 2, 1, 7)], frames), 6)
    four = bits(executor, batch[:4], frames)
    assert_same_bits(four, bits(executor, batch[:4][::-1], frames), 4)
    assert_same_bits(four, bits(executor, [batch[2], batch[7], batch[0]], frames), 2)
    alone = bits(executor, batch[:1], frames)
    assert_same_bits(alone, bits(executor, batch[:2], frames), 1)
    assert_same_bits(alone, bits(executor, [batch[5], batch[0]], frames), 1)
    codes, written = eight["0"]
    assert codes.shape == (frames, 16)
    assert written.shape[3] == len(batch[0].prompt) - 1 + frames
    assert not torch.equal(written[:, :, :, :9], eight["1"][1][:, :, :, :9]) or not np.array_equal(
        codes, eight["1"][0]
    )


def test_a_few_graphs_serve_every_batch(wide: Qwen3TTSModel) -> None:
    batch = requests(wide, 12, greedy=False)
    every = spoken(graph(wide, 16), batch, 12)
    few = graph_executor(wide, sized(16))
    few.warm()
    assert set(few.graphs.captured) == {1, 8, 16}
    found = spoken(few, batch, 12)
    assert sum(np.array_equal(every[name], found[name]) for name in every) >= len(batch) - 1
    for _ in range(ASKS):
        spoken(few, batch[:4], 4)
    assert 4 in few.graphs.captured, "a size that is asked for again and again gets its graph"


def test_graphs_are_captured_beside_a_codec_that_works(wide: Qwen3TTSModel) -> None:
    """The codec's thread allocates, launches, copies and waits on a stream of its own all the while;
    neither side disturbs the other."""
    device = torch.device("cuda")
    stage = CodecStage(dummy_decoder(PUBLISHED_CODEC, device, torch.bfloat16), 16, device)
    draw, stop = np.random.default_rng(0), threading.Event()
    heard: queue.Queue[object] = queue.Queue()
    outcomes: list[object] = []

    def keep_busy() -> None:
        while not stop.is_set():
            for _ in range(4):
                stage.decode(draw.integers(0, 2048, (int(draw.integers(10, 60)), 16)), heard.put)
            outcomes.extend(heard.get(timeout=60) for _ in range(4))

    feeding = threading.Thread(target=keep_busy, daemon=True)
    feeding.start()
    try:
        executor = graph(wide, 16)
        batch = requests(wide, 12, greedy=True)
        beside = spoken(executor, batch, 12)
    finally:
        stop.set()
        feeding.join()
        stage.close()
    assert len(outcomes) >= 4
    assert all(isinstance(outcome, np.ndarray) for outcome in outcomes)
    alone = spoken(graph(wide, 16), batch, 12)
    assert sum(np.array_equal(alone[name], beside[name]) for name in alone) >= len(batch) - 1


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("size", ["0b6", "1b7"])
@pytest.mark.parametrize("rows", [1, 32])
def test_full_size_frames(size: str, rows: int) -> None:
    """Full-size frames in bfloat16: as many as asked for, of codes that may be drawn, and their logits are
    right.

    The same codes are fed to the eager executor in float32 and in bfloat16: the graph's logits are no
    further from the float32 ones than twice as far as the eager executor's in bfloat16.
    """
    frames, device = 5, torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = dummy_model(size, device, torch.bfloat16, 1024)
    sampling = SamplingParams(min_new_tokens=frames + 1)
    bodies = np.random.default_rng(rows).integers(0, 150_000, (rows, 40)).tolist()
    parts = [TokenizedTask([151644, 77091, 198], body, language="english", speaker="ryan") for body in bodies]
    batch = [
        GenerationRequest(str(i), build_prompt(model.config, one), sampling, i, frames + 1)
        for i, one in enumerate(parts)
    ]
    with tapped(model.config, rows, device) as taps:
        executor = Watched(graph(model, rows), taps.logits)
        codes = spoken(executor, batch, rows)  # type: ignore[arg-type]
    assert {name: one.shape for name, one in codes.items()} == {
        request.request_id: (frames, 16) for request in batch
    }
    drawn = np.stack(list(codes.values()))
    assert drawn.min() >= 0
    assert drawn.max() < 2048
    assert len(np.unique(drawn)) > drawn.size // 4, "draws repeat themselves"
    exact = dummy_model(size, device, torch.float32, 1024)
    for name in {batch[0].request_id, batch[-1].request_id}:
        forced = [
            forced_frames(each, batch[int(name)].prompt, codes[name])[:frames] for each in (exact, model)
        ]
        first, residual = ([torch.cat([out.first_logits for out in outs]) for outs in forced],
                           [torch.stack([out.residual_logits[:, 0] for out in outs]) for outs in forced])  # fmt: skip
        kept = [executor.kept[int(name), frame] for frame in range(frames)]
        for what, found, (true, eager) in (
            ("codebook 0", torch.stack([one for one, _ in kept]), first),
            ("the other codebooks", torch.stack([one for _, one in kept]), residual),
        ):
            bound = 2 * relative_error(eager, true)
            assert relative_error(found, true) <= bound, (
                f"{what} of {name}: {relative_error(found, true):.4f}, at most {bound:.4f}"
            )

"""Equal bits and close frames.

    python -m benchmarks.bits --size 0b6 --slots 128
    python -m benchmarks.bits --agreement spark,fish [--rows 1,8,64,256]
    python -m benchmarks.bits --device cpu --tiny

In reproducible mode a request of Qwen3-TTS has the same bits alone, in any mix and on a second run: codes and audio,
short prompts and long ones.

`--agreement`: whether frames on the device agree with plain ones, of models with dummy weights. Prompts of noise are
prefilled and one frame is made of each, greedily: in float32 op by op, which is what others are compared with, in
bfloat16 op by op, and in bfloat16 by the engine's own executor. Compared are the keys and values that all layers wrote,
prompt and frame, and the codes. The executor passes where its keys and values are at most 1.5 times as far from float32
as those of plain bfloat16.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.checkpoint import (
    PUBLISHED_CODEC,
    SPARK_LM,
    TINY_CODEC,
    TINY_LM,
    AnyIdSpeaks,
    DummyWeights,
    dummy_decoder,
    dummy_model,
    fish_config,
)
from benchmarks.common import Bench, parser, read
from benchmarks.engine import PAGE_SIZE
from benchmarks.speech import prepare_all
from kernels.registry import on_device
from kernels.sampler import DrawFlags
from pipelines.engine.core import EngineCore, EngineOptions
from pipelines.engine.executor import EagerExecutor, FrameExecutor, FrameModel, FrameSettings, PrefillRun
from pipelines.engine.opening import open_executor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import Placement, SamplingParams
from pipelines.errors import NightjarError
from pipelines.fish_speech.model import FishModel
from pipelines.fish_speech.model import take_weights as take_fish
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
from pipelines.spark_tts.language_model import Drawable, SparkModel
from pipelines.spark_tts.language_model import take_weights as take_spark

Codes = dict[str, NDArray[np.int64]]
#: Positions of a sequence that is compared with plain frames; its prompt has one of these lengths, in turn.
CONTEXT, LENGTHS = 256, (100, 37, 64, 129)
#: How much farther from float32 than plain bfloat16 the executor may be.
WORSE = 1.5
GREEDY = SamplingParams(0.0, 0, 1.0, 1.0, 0.0, 0, 1.0, 0)


class Heard:
    """Keeps the codes of a whole utterance; those that are left out make the comparison fail."""

    def __init__(self) -> None:
        self.codes: NDArray[np.int64] | None = None

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Only whole utterances are compared."""

    def finished(self, codes: NDArray[np.int64], finish: str) -> None:
        self.codes = codes

    def failed(self, error: NightjarError) -> None: ...


def varied_requests(model: Qwen3TTSModel, count: int, longest: int, most: int) -> list[GenerationRequest]:
    """Sampled requests whose prompts take every path of prefill: most of up to a page, every fourth up to
    `longest` positions."""
    draw, role = np.random.default_rng(5), [151644, 77091, 198]
    made: list[GenerationRequest] = []
    for index in range(count):
        tokens = int(draw.integers(3, longest if index % 4 == 3 else 50))
        body = draw.integers(0, 150_000, tokens).tolist()
        prompt = build_prompt(model.config, TokenizedTask(role, body, language="english", speaker="ryan"))
        sampling, frames = SamplingParams(top_p=1.0 if index % 2 else 0.9), int(draw.integers(3, most))
        made.append(GenerationRequest(str(index), prompt, sampling, index, frames))
    return made


def spoken(
    executor: FrameExecutor, options: EngineOptions, batch: Sequence[GenerationRequest], together: int
) -> Codes:
    """The codes of every request when at most `together` run at once."""
    heard = {request.request_id: Heard() for request in batch}
    core = EngineCore(executor, options)
    for start in range(0, len(batch), together):
        for request in batch[start : start + together]:
            core.add(request, heard[request.request_id])
        while core.busy:
            core.step()
    return {name: one.codes for name, one in heard.items() if one.codes is not None}


def differing(first: Codes, second: Codes) -> list[str]:
    """Requests of both whose codes are not the same."""
    return [name for name in first if name in second and not np.array_equal(first[name], second[name])]


def differing_audio(decoder: CodecDecoder, codes: Codes, alone: int) -> list[str]:
    """Utterances whose samples, decoded alone, are not those decoded with all others."""
    names = [name for name, one in codes.items() if len(one)]
    given = [torch.from_numpy(codes[name]) for name in names]
    together, backwards = decoder.decode(given), decoder.decode(given[::-1])[::-1]
    found = []
    for at, name in enumerate(names):
        waves = [backwards[at], *(decoder.decode([given[at]]) if at < alone else [])]
        if not all(torch.equal(together[at], wave) for wave in waves):
            found.append(name)
    return found


def same_bits(bench: Bench, options: Any) -> bool:
    """Every comparison: in one mix, alone, in another mix, and again."""
    slots, context = 8 if options.tiny else options.slots, 1024
    count, few, longest, most = (6, 2, 80, 5) if options.tiny else (96, 24, 700, 40)

    def sizes(turn: int) -> EngineOptions:
        return EngineOptions(slots, slots * 13 + 40, PAGE_SIZE, context, frames_per_turn=turn)

    def opened() -> FrameExecutor:
        return open_executor(model, sizes(1), reproducible=bench.on_gpu)

    size, codec = ("tiny", TINY_CODEC) if options.tiny else (options.size, PUBLISHED_CODEC)
    with torch.inference_mode():
        model = dummy_model(size, bench.device, bench.dtype, context)
        decoder = dummy_decoder(codec, bench.device, bench.dtype, reproducible=True)
        batch, began = varied_requests(model, count, longest, most), time.perf_counter()
        executor = opened()
        mix = spoken(executor, sizes(2), batch, len(batch))
        alone = spoken(executor, sizes(1), batch[:few], 1)
        other = spoken(executor, sizes(3), batch[::-1], 7)
        del executor
        again = spoken(opened(), sizes(2), batch, len(batch))
        assert len(mix) == len(other) == len(again) == len(batch)
        found: dict[str, Any] = {
            "requests": len(batch),
            "alone": len(alone),
            "frames": sum(map(len, mix.values())),
            "differ_alone": differing(alone, mix),
            "differ_in_another_mix": differing(other, mix),
            "differ_on_a_second_run": differing(again, mix),
            "differ_in_audio": differing_audio(decoder, mix, few),
        }
    same = not any(value for key, value in found.items() if key.startswith("differ"))
    bench.keep(**found, same_bits=same, seconds=time.perf_counter() - began)
    print(json.dumps({**found, "same_bits": same}, indent=1))
    return same


class Made(NamedTuple):
    """Keys and values of all prompts and frames, float32 [values]; codes [rows, codebooks]."""

    kept: Tensor
    codes: Tensor


def spark_model(device: torch.device, dtype: torch.dtype, tiny: bool) -> FrameModel:
    lm = replace(SPARK_LM, **TINY_LM) if tiny else SPARK_LM
    drawable = Drawable.of(AnyIdSpeaks(), lm)
    return SparkModel(lm, take_spark(DummyWeights(device), lm, drawable, dtype, device), drawable, CONTEXT)


def fish_model(device: torch.device, dtype: torch.dtype, tiny: bool) -> FrameModel:
    with tempfile.TemporaryDirectory() as folder:
        config = fish_config(Path(folder), tiny)
    return FishModel(config, take_fish(DummyWeights(device), config, dtype, device), CONTEXT)


MODELS: dict[str, Callable[[torch.device, torch.dtype, bool], FrameModel]] = {
    "spark": spark_model,
    "fish": fish_model,
}


@torch.inference_mode()
def frame_of(model: FrameModel, executor: FrameExecutor, rows: int) -> Made:
    """Prefills noise, the same for every type, and makes one frame of `rows` rows."""
    dice, hidden, lengths = torch.Generator().manual_seed(0), model.tensors.backbone.hidden, len(LENGTHS)
    noise = [torch.randn(LENGTHS[row % lengths], hidden, generator=dice) for row in range(rows)]
    given = [one.to(torch.bfloat16).to(model.device, model.dtype) for one in noise]
    state, kv, none = executor.state, executor.kv, np.zeros(0, np.int64)
    pages = [kv.take(kv.pages_for(len(one) + 1)) or [] for one in given]
    for row, one in enumerate(given):
        state.place([Placement(row, pages[row], row, GREEDY, none, one[-1], len(one) - 1)])
    executor.prefill([PrefillRun(row, 0, one[:-1]) for row, one in enumerate(given)])
    flags = DrawFlags(0, False, True)
    found = executor.frames(list(range(rows)), 1, FrameSettings(max(map(len, given)) + 1, flags, flags))()
    parts = []
    for row, one in enumerate(given):
        for cache in (kv.k, kv.v):
            # [layers, kv_heads, positions, head_dim] of this row.
            written = cache[:, pages[row]].transpose(1, 2).flatten(2, 3)[:, :, : len(one)]
            parts.append(written.float().flatten())
        kv.give_back(pages[row])
    return Made(torch.cat(parts), torch.from_numpy(found.codes[0]))


def distance(one: Tensor, other: Tensor) -> float:
    """The root mean square of the difference, of that of `other`."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


def agreement(bench: Bench, name: str, rows: list[int], tiny: bool) -> None:
    """Rows for one model; raises where the executor is too far from float32."""
    most, make = max(rows), MODELS[name]
    sizes = EngineOptions(most, most * (CONTEXT // PAGE_SIZE), PAGE_SIZE, CONTEXT)

    def eager(dtype: torch.dtype) -> dict[int, Made]:
        with torch.inference_mode():
            model = make(bench.device, dtype, tiny)
        executor = EagerExecutor(model, sizes)
        return {number: frame_of(model, executor, number) for number in rows}

    exact, plain = eager(torch.float32), eager(torch.bfloat16)
    bench.clean()
    with torch.inference_mode():
        model = make(bench.device, torch.bfloat16, tiny)
    executor = open_executor(model, sizes)
    prepare_all(executor, bench.device)
    wrong: list[int] = []
    for number in rows:
        with on_device(bench.device), torch.cuda.stream(executor.stream):
            made = frame_of(model, executor, number)
        usual, own = (distance(one.kept, exact[number].kept) for one in (plain[number], made))
        equal = [float((one.codes == exact[number].codes).float().mean()) for one in (plain[number], made)]
        right = own <= WORSE * usual and bool(np.isfinite(own))
        wrong += [] if right else [number]
        about = {"part": "agreement", "model": name, "rows": number, "executor": executor.name}
        errors = {"kernels": executor.kernels, "error": own, "plain_error": usual}
        codes = {"equal_codes": equal[1], "plain_equal_codes": equal[0]}
        bench.add({**about, **errors, **codes, "verdict": "ok" if right else "WRONG"})
    if wrong:
        raise RuntimeError(f"{name}: frames of {wrong} rows are too far from float32.")


def main(given: list[str] | None = None) -> int:
    options = read(
        parser(__doc__),
        given,
        size="0b6",
        slots=128,
        agreement=str,
        rows=[1, 8, 64, 256],
        known={"agreement": MODELS},
    )
    if not options.agreement:
        return 0 if same_bits(Bench("qwen3_tts_bits", options), options) else 1
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench = Bench("engine_agreement", options)
    for name in options.agreement:
        bench.attempt(name, agreement, bench, name, options.rows, options.tiny)
    return bench.end("model", "rows", "executor", "error", "plain_error", "equal_codes", "verdict")


if __name__ == "__main__":
    raise SystemExit(main())

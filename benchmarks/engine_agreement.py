"""Whether frames on the device agree with plain ones, of SparkTTS and Fish Speech at their published sizes
with dummy weights.

    python -m benchmarks.engine_agreement [--models spark,fish] [--rows 1,8,64,256]
    python -m benchmarks.engine_agreement --device cpu --tiny --models fish --rows 2

Prompts of noise are prefilled and one frame is made of each, greedily: in float32 op by op, which is what
others are compared with, in bfloat16 op by op, and in bfloat16 by the engine's own executor. Compared are
the keys and values that all layers wrote, prompt and frame, and the codes. The executor passes where its
keys and values are at most 1.5 times as far from float32 as those of plain bfloat16.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import Bench, numbers, parser
from benchmarks.native_parts import prepare_all
from benchmarks.random_models.spark_tts import LM
from benchmarks.random_models.weights import DummyWeights
from benchmarks.spark_engines import TINY_LM, AnyIdSpeaks
from kernels.registry import on_device
from kernels.sampler import DrawFlags
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor, FrameExecutor, FrameModel, FrameSettings, PrefillRun
from pipelines.engine.opening import open_executor
from pipelines.engine.state import Placement, SamplingParams
from pipelines.spark_tts.language_model import Drawable, SparkModel
from pipelines.spark_tts.language_model import take_weights as take_spark

PAGE_SIZE, CONTEXT = 64, 256
#: Prompts are of these lengths, in turn.
LENGTHS = (100, 37, 64, 129)
#: How much farther from float32 than plain bfloat16 the executor may be.
WORSE = 1.5
GREEDY = SamplingParams(0.0, 0, 1.0, 1.0, 0.0, 0, 1.0, 0)


@dataclass(frozen=True, slots=True)
class Made:
    """Keys and values of all prompts and frames, float32 [values]; codes [rows, codebooks]."""

    kept: Tensor
    codes: Tensor


def spark_model(device: torch.device, dtype: torch.dtype, tiny: bool) -> FrameModel:
    from dataclasses import replace

    lm = replace(LM, **TINY_LM) if tiny else LM
    drawable = Drawable.of(AnyIdSpeaks(), lm)
    return SparkModel(lm, take_spark(DummyWeights(device), lm, drawable, dtype, device), drawable, CONTEXT)


def fish_model(device: torch.device, dtype: torch.dtype, tiny: bool) -> FrameModel:
    from benchmarks.random_models.fish_speech import write_checkpoint
    from pipelines.fish_speech.model import FishModel, take_weights

    with tempfile.TemporaryDirectory() as folder:
        config = write_checkpoint(Path(folder), tiny)
    return FishModel(config, take_weights(DummyWeights(device), config, dtype, device), CONTEXT)


MODELS = {"spark": spark_model, "fish": fish_model}


def prompts(model: FrameModel, rows: int) -> list[Tensor]:
    """Embeddings [length, hidden] of noise, the same for every type."""
    dice = torch.Generator().manual_seed(0)
    hidden = model.tensors.backbone.hidden
    made = [torch.randn(LENGTHS[row % len(LENGTHS)], hidden, generator=dice) for row in range(rows)]
    return [one.to(torch.bfloat16).to(model.device, model.dtype) for one in made]


@torch.inference_mode()
def frame_of(model: FrameModel, executor: FrameExecutor, rows: int) -> Made:
    """Prefills and makes one frame of so many rows."""
    state, kv, given = executor.state, executor.kv, prompts(model, rows)
    pages = [kv.take(kv.pages_for(len(one) + 1)) or [] for one in given]
    none = np.zeros(0, np.int64)
    state.place(
        [
            Placement(row, pages[row], row, GREEDY, none, one[-1], len(one) - 1)
            for row, one in enumerate(given)
        ]
    )
    executor.prefill([PrefillRun(row, 0, one[:-1]) for row, one in enumerate(given)])
    flags = DrawFlags(0, False, True)
    found = executor.frames(list(range(rows)), 1, FrameSettings(max(map(len, given)) + 1, flags, flags))()
    parts = []
    for row, one in enumerate(given):
        for cache in (kv.k, kv.v):
            # [layers, kv_heads, positions, head_dim] of this row.
            parts.append(
                cache[:, pages[row]].transpose(1, 2).flatten(2, 3)[:, :, : len(one)].float().flatten()
            )
        kv.give_back(pages[row])
    return Made(torch.cat(parts), torch.from_numpy(found.codes[0]))


def distance(one: Tensor, other: Tensor) -> float:
    """The root mean square of the difference, of that of `other`."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


def compare(bench: Bench, name: str, rows: list[int], tiny: bool) -> bool:
    """Rows for one model; whether all pass."""
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
    passed = True
    for number in rows:
        with on_device(bench.device), torch.cuda.stream(executor.stream):
            made = frame_of(model, executor, number)
        errors = [distance(one.kept, exact[number].kept) for one in (plain[number], made)]
        equal = [float((one.codes == exact[number].codes).float().mean()) for one in (plain[number], made)]
        right = bool(errors[1] <= WORSE * errors[0]) and bool(np.isfinite(errors[1]))
        passed &= right
        verdict = f"{'ok' if right else 'WRONG'}: error {errors[1]:.4f} (plain {errors[0]:.4f}), equal codes {equal[1]:.0%} ({equal[0]:.0%})"
        row: dict[str, Any] = {
            "part": "agreement",
            "model": name,
            "rows": number,
            "executor": executor.name,
            "kernels": executor.kernels,
        }
        bench.add(
            {
                **row,
                "error": errors[1],
                "plain_error": errors[0],
                "equal_codes": equal[1],
                "plain_equal_codes": equal[0],
                "verdict": verdict,
            }
        )
    return passed


def main(given: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--models", default="spark,fish")
    made.add_argument("--rows", type=numbers, default="1,8,64,256")
    options = made.parse_args(given)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench, passed = Bench("engine_agreement", options), []
    for name in options.models.split(","):
        bench.attempt(name, lambda name=name: passed.append(compare(bench, name, options.rows, options.tiny)))
    print("\n".join(f"{row['model']:6}{row['rows']:5} {row['verdict']}" for row in bench.rows))
    return 0 if all(passed) and not bench.faults else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Frames a second of the `eager` executor on full-size random weights: the baseline of what follows.

    python -m benchmarks.qwen3_tts_eager --sizes 0b6 1b7 --batches 1 32 128 --json benchmarks/results/qwen3_tts_eager.json

A frame is one talker step, its draw, 15 predictor steps with theirs, and the next input, for every row of the batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.engine.core import EngineCore, EngineOptions
from pipelines.engine.executor import EagerExecutor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.nn.options import open_device
from pipelines.qwen3_tts.dummy import dummy_model
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.prompt import PromptParts, build_prompt

FRAMES_PER_SECOND = 12.5
PAGE_SIZE = 64


class Silent:
    """A listener that keeps nothing but failures."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def frames(self, request: GenerationRequest, codes: Any) -> None:
        """Codes are not kept."""

    def finished(self, request: GenerationRequest, codes: Any, finish: str) -> None:
        """Ends are not counted."""

    def failed(self, request: GenerationRequest, error: Exception) -> None:
        self.errors.append(error)


def measure(model: Qwen3TTSModel, batch: int, frames: int, warm_up: int, text_tokens: int) -> dict[str, float]:
    """Runs `batch` requests that cannot end for some frames, through the scheduler; times of the frames after the warm-up."""
    tokens = frames + warm_up + 2
    pages = batch * -(-(text_tokens + 16 + tokens) // PAGE_SIZE)
    options = EngineOptions(slots=batch, pages=pages, page_size=PAGE_SIZE, max_context=2048, prefill_tokens=1 << 20, reserve_frames=tokens)
    heard = Silent()
    core = EngineCore(EagerExecutor(model, batch, pages, PAGE_SIZE, options.max_context), options, heard)
    draw = np.random.default_rng(0)
    for index in range(batch):
        body = draw.integers(0, 150_000, text_tokens).tolist()
        prompt = build_prompt(model.config, PromptParts([151644, 77091, 198], body, language="english", speaker="ryan"))
        sampling = SamplingParams(min_new_tokens=tokens)
        core.add(GenerationRequest(str(index), prompt, sampling, seed=index, max_tokens=tokens))
    begin = time.perf_counter()
    for _ in range(warm_up):
        core.step()
    _synchronize(model)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(frames):
        core.step()
    _synchronize(model)
    seconds = (time.perf_counter() - begin) / frames
    core.fail_all(_stop())
    return {
        "batch": batch,
        "context": text_tokens + 10 + warm_up + frames // 2,
        "ms_per_frame": seconds * 1e3,
        "frames_per_second": batch / seconds,
        "times_real_time": batch / seconds / FRAMES_PER_SECOND,
        "warm_up_seconds": first,
        "device_gib": torch.cuda.max_memory_allocated() / 2**30 if model.device.type == "cuda" else 0.0,
    }


def _stop() -> Any:
    from pipelines.errors import ErrorCode, SynthesisError

    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The measurement is over.")


def _synchronize(model: Qwen3TTSModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--sizes", nargs="+", default=["0b6", "1b7"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--frames", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--text-tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = open_device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    rows: list[dict[str, Any]] = []
    print(f"{'size':6}{'batch':>6}{'context':>9}{'ms/frame':>10}{'frames/s':>10}{'x real':>9}{'GiB':>7}")
    for size in options.sizes:
        model = dummy_model(size, device, getattr(torch, options.dtype))
        for batch in options.batches:
            row = {"size": size, **measure(model, batch, options.frames, options.warm_up, options.text_tokens)}
            rows.append(row)
            print(
                f"{size:6}{batch:6d}{row['context']:9.0f}{row['ms_per_frame']:10.2f}{row['frames_per_second']:10.1f}"
                f"{row['times_real_time']:9.1f}{row['device_gib']:7.1f}",
                flush=True,
            )
        del model
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"device": name, "torch": torch.__version__, "dtype": options.dtype, "executor": "eager", "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

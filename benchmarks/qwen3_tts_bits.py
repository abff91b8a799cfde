"""Reproducible mode: the same bits of a request alone, in any mix and on a second run; codes and audio,
short prompts and long ones.

python -m benchmarks.qwen3_tts_bits --size 0b6 --slots 128 --json bits.json
python -m benchmarks.qwen3_tts_bits --device cpu --tiny
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu import Bench, parser
from benchmarks.random_models.qwen3_tts import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder, dummy_model
from pipelines.engine.core import EngineCore, EngineOptions
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.opening import open_executor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt

PAGE_SIZE = 64
Codes = dict[str, NDArray[np.int64]]


class Heard:
    """Keeps the codes of a whole utterance."""

    def __init__(self) -> None:
        self.codes: NDArray[np.int64] | None = None

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Only whole utterances are compared."""

    def finished(self, codes: NDArray[np.int64], finish: str) -> None:
        self.codes = codes

    def failed(self, error: NightjarError) -> None:
        """Leaves the codes out, so that the comparison fails."""


def varied_requests(
    model: Qwen3TTSModel, count: int, longest: int, most_frames: int
) -> list[GenerationRequest]:
    """Sampled requests whose prompts take every path of prefill: most of up to a page, every fourth up to
    `longest` positions."""
    draw = np.random.default_rng(5)
    made: list[GenerationRequest] = []
    for index in range(count):
        tokens = int(draw.integers(3, longest if index % 4 == 3 else 50))
        parts = TokenizedTask(
            [151644, 77091, 198],
            draw.integers(0, 150_000, tokens).tolist(),
            language="english",
            speaker="ryan",
        )
        prompt = build_prompt(model.config, parts)
        frames = int(draw.integers(3, most_frames))
        made.append(
            GenerationRequest(
                str(index), prompt, SamplingParams(top_p=1.0 if index % 2 else 0.9), index, frames
            )
        )
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
    together = decoder.decode([torch.from_numpy(codes[name]) for name in names])
    backwards = decoder.decode([torch.from_numpy(codes[name]) for name in names[::-1]])[::-1]
    found = []
    for at, name in enumerate(names):
        waves = (
            [backwards[at]]
            if at >= alone
            else [backwards[at], decoder.decode([torch.from_numpy(codes[name])])[0]]
        )
        if not all(torch.equal(together[at], wave) for wave in waves):
            found.append(name)
    return found


def check(
    model: Qwen3TTSModel,
    decoder: CodecDecoder,
    open_: Callable[[], FrameExecutor],
    options: Callable[[int], EngineOptions],
    size: dict[str, int],
) -> dict[str, Any]:
    """Every comparison; `size` says how many requests there are, how many of them run alone, and how long
    prompts and speech are."""
    batch = varied_requests(model, size["requests"], size["longest"], size["frames"])
    began = time.perf_counter()
    executor = open_()
    mix = spoken(executor, options(2), batch, len(batch))
    alone = spoken(executor, options(1), batch[: size["alone"]], 1)
    other = spoken(executor, options(3), batch[::-1], 7)
    del executor
    again = spoken(open_(), options(2), batch, len(batch))
    assert len(mix) == len(other) == len(again) == len(batch)
    found: dict[str, Any] = {
        "requests": len(batch),
        "alone": len(alone),
        "frames": sum(map(len, mix.values())),
        "differ_alone": differing(alone, mix),
        "differ_in_another_mix": differing(other, mix),
        "differ_on_a_second_run": differing(again, mix),
        "differ_in_audio": differing_audio(decoder, mix, size["alone"]),
    }
    found["same_bits"] = not any(value for key, value in found.items() if key.startswith("differ"))
    return {**found, "seconds": time.perf_counter() - began}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--size", default="0b6")
    made.add_argument("--slots", type=int, default=128)
    options = made.parse_args()
    bench = Bench("qwen3_tts_bits", options)
    slots, context = 8 if options.tiny else options.slots, 1024
    size = {"requests": 96, "alone": 24, "longest": 700, "frames": 40}
    if options.tiny:
        size = {"requests": 6, "alone": 2, "longest": 80, "frames": 5}

    def sizes(frames_per_turn: int) -> EngineOptions:
        return EngineOptions(slots, slots * 13 + 40, PAGE_SIZE, context, frames_per_turn=frames_per_turn)

    with torch.inference_mode():
        model = dummy_model("tiny" if options.tiny else options.size, bench.device, bench.dtype, context)
        decoder = dummy_decoder(
            TINY_CODEC if options.tiny else PUBLISHED_CODEC, bench.device, bench.dtype, reproducible=True
        )
        found = check(
            model, decoder, lambda: open_executor(model, sizes(1), reproducible=bench.on_gpu), sizes, size
        )
    bench.keep(**found)
    print(json.dumps(found, indent=1))
    return 0 if found["same_bits"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

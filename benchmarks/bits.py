"""Equal bits of a request.

    python -m benchmarks.bits --size 0b6 --slots 128
    python -m benchmarks.bits --device cpu --tiny

In reproducible mode a request of Qwen3-TTS has the same bits alone, in any mix and on a second run: codes and audio,
short prompts and long ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.checkpoint import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder, dummy_model
from benchmarks.common import Bench, parser, read
from benchmarks.engine import PAGE_SIZE
from pipelines.engine.core import EngineCore, EngineOptions
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.opening import open_executor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt

Codes = dict[str, NDArray[np.int64]]


class Heard:
    """Keeps the codes of a whole utterance; those that are left out make the comparison fail."""

    def __init__(self) -> None:
        self.codes: NDArray[np.int64] | None = None

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Only whole utterances are compared."""

    def finished(self, codes: NDArray[np.int64], finish: str, log_probabilities: NDArray[np.float64]) -> None:
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


def main() -> int:
    options = read(parser(__doc__), size="0b6", slots=128)
    return 0 if same_bits(Bench("qwen3_tts_bits", options), options) else 1


if __name__ == "__main__":
    raise SystemExit(main())

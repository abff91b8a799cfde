"""Qwen3-TTS end to end on full-size random weights: prompt ids in, float32 samples on the host out, through the real engine.

    NIGHTJAR_COMMIT=... python -m benchmarks.qwen3_tts_gpu --sizes 0b6 1b7 --slots 128 512 --json benchmarks/results/qwen3_tts_h200.json
    python -m benchmarks.qwen3_tts_gpu --device cpu --tiny

A closed loop keeps every slot taken with utterances of 3 to 15 seconds. Each has its length from the start, but the engine does not
know it: the weights draw the end at the first frame that `min_new_tokens` allows. Measured: the whole, the language model without the
codec, and the codec alone. The comparison with the reference implementation is not part of this yet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.codec_random import PUBLISHED, RandomWeights
from benchmarks.qwen3_tts_shapes import random_model
from benchmarks.watched import GpuUse, Watched
from pipelines.engine.codec_stage import CodecStage
from pipelines.engine.core import EngineOptions, Finish
from pipelines.engine.engine import Engine
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.qwen3_tts.codec import CodecDecoder, CodecState
from pipelines.qwen3_tts.delivery import FrameOrder, FrameUtterer
from pipelines.qwen3_tts.execution import engine_options, open_executor, open_stage
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.prompt import PromptParts, build_prompt
from pipelines.request import Speech

FRAMES_PER_SECOND = 12.5
SAMPLE_RATE = 24_000
PAGE_SIZE = 64
#: Text tokens of a second of speech.
TOKENS_PER_SECOND = 3.3
MOST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for: seconds of the shortest and the longest utterance, and seconds that are measured."""

    shortest: float
    longest: float
    seconds: float


@dataclass(slots=True)
class Tally:
    """What came out so far; one thread writes, another reads."""

    utterances: int = 0
    frames: int = 0
    samples: int = 0
    wrong: int = 0


def requests(model: Qwen3TTSModel, load: Load, count: int) -> list[tuple[GenerationRequest, int]]:
    """Requests with the frames each will have; texts as long as the speech suggests."""
    draw = np.random.default_rng(0)
    made: list[tuple[GenerationRequest, int]] = []
    for index in range(count):
        seconds = float(draw.uniform(load.shortest, load.longest))
        frames = max(round(seconds * FRAMES_PER_SECOND), 3)
        body = draw.integers(0, 150_000, max(round(seconds * TOKENS_PER_SECOND), 1)).tolist()
        prompt = build_prompt(model.config, PromptParts([151644, 77091, 198], body, language="english", speaker="ryan"))
        made.append((GenerationRequest(str(index), prompt, SamplingParams(min_new_tokens=frames), index, MOST_TOKENS), frames))
    return made


class Counter:
    """A receiver that only counts: the language model without the codec."""

    def __init__(self, tally: Tally, wanted: int) -> None:
        self._tally, self._wanted = tally, wanted

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Counted at the end."""

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        self._tally.utterances += 1
        self._tally.frames += len(codes)
        self._tally.wrong += finish != "eos" or len(codes) != self._wanted

    def failed(self, error: NightjarError) -> None:
        self._tally.wrong += error.code is not ErrorCode.SYNTH_ABORTED


def uttered(tally: Tally, wanted: int, stage: CodecStage[CodecState]) -> FrameUtterer:
    """The receiver of the real pipeline, whose speech is counted."""

    def heard(future: Any) -> None:
        if future.exception() is not None:
            error = future.exception()
            tally.wrong += not (isinstance(error, SynthesisError) and error.code is ErrorCode.SYNTH_ABORTED)
            return
        speech: Speech = future.result()
        tally.utterances += 1
        tally.frames += int(speech.meta["frames"])
        tally.samples += len(speech.samples)
        tally.wrong += speech.meta["frames"] != wanted or speech.meta["finish"] != "eos"

    utterer = FrameUtterer(FrameOrder("", SAMPLE_RATE, {}, keep_unfinished=True), stage, lambda _seconds: None)
    utterer.future.add_done_callback(heard)
    return utterer


def closed_loop(
    executor: Watched, options: EngineOptions, pool: Sequence[tuple[GenerationRequest, int]], decoder: CodecDecoder | None, load: Load
) -> dict[str, Any]:
    """Keeps the engine full, and measures once every first utterance is out; without a decoder it ends at the codes."""
    tally, stage = Tally(), None if decoder is None else open_stage(decoder)
    engine, stop = Engine(executor, options, waiting_room=64), threading.Event()

    def feed() -> None:
        for number, (request, frames) in enumerate(itertools.cycle(pool)):
            if stop.is_set():
                return
            receiver = Counter(tally, frames) if stage is None else uttered(tally, frames, stage)
            try:
                engine.submit(replace(request, request_id=str(number), seed=number), receiver)
            except SynthesisError:  # closed
                return

    feeder = threading.Thread(target=feed, name="feeder")
    feeder.start()
    while tally.utterances < options.slots and tally.wrong == 0:
        time.sleep(0.05)
    before, use, began, cpu = replace(tally), GpuUse(executor.device), time.perf_counter(), time.process_time()
    executor.start()
    made = engine.core.frames_made
    time.sleep(load.seconds)
    seconds, cpu, made, after = time.perf_counter() - began, time.process_time() - cpu, engine.core.frames_made - made, replace(tally)
    watched = executor.stop()
    busy = use.stop()
    stop.set()
    engine.close()
    if stage is not None:
        stage.close()
    feeder.join()
    audio = (after.samples - before.samples) / SAMPLE_RATE if stage else (after.frames - before.frames) / FRAMES_PER_SECOND
    return {
        "audio_s_per_s": audio / seconds,
        # What was heard may hold a backlog of the codec from before: sustained is the smaller of the two.
        "audio_made_s_per_s": made / FRAMES_PER_SECOND / seconds,
        "frames_per_s": made / seconds,
        "ms_per_frame": 1000 * seconds * options.slots / made,
        "utterances": after.utterances - before.utterances,
        "wrong_lengths": after.wrong,
        "process_cpu_share": cpu / seconds,
        "gpu_busy_nvml": busy,
        **watched,
    }


def codec_alone(decoder: CodecDecoder, pool: Sequence[tuple[GenerationRequest, int]], load: Load, batch: int) -> dict[str, Any]:
    """Whole utterances from codes on the host to samples on the host, in batches as the stage makes them."""
    draw = torch.Generator().manual_seed(0)
    codes = [torch.randint(0, decoder.config.codebook_size, (frames, 16), generator=draw) for _, frames in pool[: 4 * batch]]
    parts = [codes[start : start + batch] for start in range(0, len(codes), batch)]
    frames, began = 0, time.perf_counter()
    for round_ in range(1 << 30):
        for part in parts:
            for wave in decoder.decode(part):
                wave.cpu()
            frames += sum(len(one) for one in part)
            if round_ and time.perf_counter() - began > load.seconds / 2:
                break
        if round_ == 0:
            frames, began = 0, time.perf_counter()  # the first round builds kernels
        elif time.perf_counter() - began > load.seconds / 2:
            break
    seconds = time.perf_counter() - began
    return {"us_per_frame": 1e6 * seconds / frames, "frames_per_s": frames / seconds, "audio_s_per_s": frames / seconds / FRAMES_PER_SECOND}


def memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    found = {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30, "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30}
    torch.cuda.reset_peak_memory_stats(device)
    return found


def measure(model: Qwen3TTSModel, decoder: CodecDecoder, slots: int, turns: Sequence[int], load: Load, most: int) -> list[dict[str, Any]]:
    """The rows of one model with so many slots: the whole for each number of frames a turn, and the language model alone."""
    longest = round(load.longest * (FRAMES_PER_SECOND + TOKENS_PER_SECOND)) + 32
    options = engine_options(model, slots, slots * -(-longest // PAGE_SIZE), PAGE_SIZE, most)
    began = time.perf_counter()
    executor = Watched(open_executor(model, options))
    opened = time.perf_counter() - began
    if load.seconds == 0:
        return [{"part": "open", "slots": slots, "open_s": opened}]
    pool = requests(model, replace(load), 4 * slots)
    pool = [(replace(request, max_tokens=min(MOST_TOKENS, options.pages * PAGE_SIZE - 64)), frames) for request, frames in pool]
    rows: list[dict[str, Any]] = []
    for frames in turns:
        for part, codec in (("all", decoder), ("lm", None)):
            if part == "lm" and frames != turns[0]:
                continue
            found = closed_loop(executor, replace(options, frames_per_turn=frames), pool, codec, load)
            rows.append({"part": part, "slots": slots, "frames_per_turn": frames, "open_s": opened, **found, **memory(model.device)})
            tell(rows[-1])
    return rows


def tell(row: dict[str, Any]) -> None:
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}), flush=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The short table."""
    lines = [
        f"{'size':5}{'part':6}{'slots':>6}{'turn':>5}{'audio-s/s':>11}{'frames/s':>10}{'ms/frame':>10}{'GPU idle':>10}{'peak GiB':>10}"
    ]
    for row in rows:
        idle, audio = row.get("gpu_busy_nvml"), min(row["audio_s_per_s"], row.get("audio_made_s_per_s", math.inf))
        lines.append(
            f"{row.get('size', ''):5}{row['part']:6}{row.get('slots', 0):6}{row.get('frames_per_turn', 0):5}{audio:11.0f}"
            f"{row['frames_per_s']:10.0f}{row.get('ms_per_frame', row.get('us_per_frame', 0) / 1000):10.3f}"
            f"{'' if idle is None else f'{1 - idle:.1%}':>10}{row.get('peak_gib', 0):7.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="*", default=["0b6", "1b7"])
    parser.add_argument("--slots", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--turns", nargs="+", type=int, default=[1], help="frames a scheduling turn")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement; 0 only builds the kernels of --sizes")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and short utterances, to try this on a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    load, sizes, shape, slots = Load(3.0, 15.0, options.seconds), options.sizes, PUBLISHED, options.slots
    if options.tiny:
        load, sizes, slots = Load(0.3, 0.8, 1.0), ["tiny"], [8]
        shape = replace(shape, latent_dim=32, codebook_dim=16, hidden_size=32, intermediate_size=32, head_dim=16, num_attention_heads=2,
                        num_key_value_heads=2, num_hidden_layers=1, decoder_dim=48)  # fmt: skip
    result: dict[str, Any] = {
        "commit": os.environ.get("NIGHTJAR_COMMIT", ""),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "load": {"shortest_s": load.shortest, "longest_s": load.longest, "measured_s": load.seconds},
        "left_out": "the reference implementation on the same shapes",
        "rows": [],
    }

    def save(rows: Sequence[dict[str, Any]]) -> None:
        result["rows"] += rows
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with torch.inference_mode():
        decoder = CodecDecoder(shape, RandomWeights(str(device)), device, dtype)
    if not sizes:
        decoder.decode([torch.zeros(frames, 16, dtype=torch.int64) for frames in (100, 90, 20)])
    for size in sizes:
        model = random_model(size, device, dtype, 4096, ends=True)
        if not result["rows"] and load.seconds:
            save([{"part": "codec", "size": "", **codec_alone(decoder, requests(model, load, 256), load, 64), **memory(device)}])
            tell(result["rows"][-1])
        for count in slots:
            save([{"size": size, **row} for row in measure(model, decoder, count, options.turns, load, 4096)])
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if load.seconds == 0:
        return
    print(table(result["rows"]))
    print("The reference implementation is not compared yet.")


if __name__ == "__main__":
    main()

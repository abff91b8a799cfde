"""Ten thousand short utterances of Qwen3-TTS at full speed: does anything leak, drift or go wrong?

    python -m benchmarks.soak --size 0b6 --slots 512 --count 10000
    python -m benchmarks.soak --device cpu --tiny --count 40

Watched all along: utterances and frames made, memory of device and host, running requests, free pages. At the end everything is
drained: every slot and page must be free again.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from benchmarks.common import Bench, parser, read
from benchmarks.engine import PAGE_SIZE, ClosedLoop, Load, Throughput, requests

MIB = 2**20
#: Growth from the first third to the end that counts as a leak (MiB of the device and of the host), and the least
#: share of the first third's speed that the last third must keep.
MOST_DEVICE_GROWTH, MOST_HOST_GROWTH, LEAST_SPEED = 64.0, 256.0, 0.9


def sample(loop: ClosedLoop, device: torch.device, began: float) -> dict[str, float]:
    core, on_gpu = loop.engine.core, device.type == "cuda"
    return {
        "at_s": time.perf_counter() - began,
        "utterances": loop.tally.utterances,
        "frames": core.frames_made,
        "running": len(core.scheduler.running),
        "free_pages": len(core.executor.kv.free),
        "device_mib": torch.cuda.memory_allocated(device) / MIB if on_gpu else 0.0,
        "device_reserved_mib": torch.cuda.memory_reserved(device) / MIB if on_gpu else 0.0,
        "host_mib": psutil.Process().memory_info().rss / MIB,
    }


def verdict(
    samples: Sequence[dict[str, float]], count: int, slots: int, pages: int, end: dict[str, Any], timed: bool
) -> dict[str, Any]:
    """Figures of the samples, and the problems in words. `end` is the state after draining; `timed`: whether the speed means
    something."""
    third = max(len(samples) // 3, 1)
    early, late = samples[:third], samples[-third:]

    def speed(part: Sequence[dict[str, float]]) -> float:
        seconds = part[-1]["at_s"] - part[0]["at_s"]
        return (part[-1]["frames"] - part[0]["frames"]) / seconds if seconds > 0 else 0.0

    def growth(name: str) -> float:
        """Of what is always taken: a batch that is under way at one sample is no leak."""
        return min(one[name] for one in late) - min(one[name] for one in early)

    first, last, device, host = speed(early), speed(late), growth("device_mib"), growth("host_mib")
    slow = timed and first and len(samples) >= 9 and last < LEAST_SPEED * first
    problems = {
        f"{end['utterances']} of {count} utterances": end["utterances"] < count,
        f"{end['wrong']} utterances were wrong": end["wrong"],
        "not everything came out": not end["drained"],
        f"{slots - end['free_slots']} slots are lost": end["free_slots"] != slots,
        f"{pages - end['free_pages']} pages are lost": end["free_pages"] != pages,
        "the device's memory grew": device > MOST_DEVICE_GROWTH,
        "the host's memory grew": host > MOST_HOST_GROWTH,
        f"the last third ran at {last / (first or 1):.0%} of the first": slow,
    }
    return {
        "frames_per_s_first_third": first,
        "frames_per_s_last_third": last,
        "device_growth_mib": device,
        "host_growth_mib": host,
        **end,
        "problems": [problem for problem, there in problems.items() if there],
    }


def soak(bench: Bench, size: str, slots: int, count: int, most_seconds: float) -> dict[str, Any]:
    """Runs `count` utterances and gives samples and verdict."""
    load = Load(0.3, 0.6, 0) if size == "tiny" else Load(0.4, 2.0, 0)
    work = Throughput(bench, size, load)
    executor, options, _ = work.open(slots, load, wide=False)
    pool = requests(work.model, load, 4 * slots, min(256, options.pages * PAGE_SIZE - 64))
    loop = ClosedLoop(executor, options, pool, work.decoder)
    try:
        loop.settle(min(slots, count // 4), most_seconds / 2)  # kernels are built
        before, began = loop.tally.utterances, time.perf_counter()
        samples = [sample(loop, bench.device, began)]
        while (
            loop.tally.utterances - before < count
            and loop.tally.wrong == 0
            and time.perf_counter() - began < most_seconds
        ):
            time.sleep(0.25)
            samples.append(sample(loop, bench.device, began))
        drained = loop.drain(30 if bench.on_gpu else 240)
        gc.collect()
        end = {
            "utterances": loop.tally.utterances - before,
            "wrong": loop.tally.wrong,
            "drained": drained,
            "free_slots": loop.engine.core.scheduler.free_slots,
            "free_pages": len(executor.kv.free),
        }
    finally:
        loop.close()
    seconds = samples[-1]["at_s"]
    rate = (samples[-1]["frames"] - samples[0]["frames"]) / seconds
    speed = {"frames_per_s": rate, "utterances_per_s": end["utterances"] / seconds}
    about = {"size": size, "slots": slots, "count": count, "seconds": seconds}
    return {
        **about,
        **speed,
        **verdict(samples, count, slots, options.pages, end, size != "tiny"),
        "samples": samples,
    }


def main() -> int:
    options = read(parser(__doc__), size="0b6", slots=512, count=10_000, seconds=90.0, option=str)
    bench = Bench("qwen3_tts_soak", options)
    size, slots = ("tiny", 8) if options.tiny else (options.size, options.slots)
    found = soak(bench, size, slots, options.count, options.seconds)
    bench.keep(**found)
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

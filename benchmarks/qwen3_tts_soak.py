"""Ten thousand short utterances at full speed: does anything leak, drift or go wrong?

    python -m benchmarks.qwen3_tts_soak --size 0b6 --slots 512 --count 10000 --json soak.json
    python -m benchmarks.qwen3_tts_soak --device cpu --tiny --count 40

Watched all along: utterances and frames made, memory of device and host, running requests, free pages.
Every 100th request is the same one with the same seed. At the end everything is drained: every slot and
page must be free again.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import Bench, parser
from benchmarks.qwen3_load import ClosedLoop, Load, requests
from benchmarks.qwen3_tts import MAX_CONTEXT, PAGE_SIZE
from benchmarks.random_models.qwen3_tts import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder, dummy_model
from benchmarks.watched_executor import Watched
from pipelines.engine.opening import NativeModelOptions, open_executor
from pipelines.qwen3_tts.execution import engine_options

MIB = 2**20
#: Growth from the first third to the end that counts as a leak (MiB of the device and of the host), and the
#: least share of the first third's speed that the last third must keep.
MOST_DEVICE_GROWTH, MOST_HOST_GROWTH, LEAST_SPEED = 64.0, 256.0, 0.9


def resident_mib() -> float:
    """Memory of this process that is in the machine's memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def sample(loop: ClosedLoop, device: torch.device, began: float) -> dict[str, float]:
    core = loop.engine.core
    on_gpu = device.type == "cuda"
    return {
        "at_s": time.perf_counter() - began,
        "utterances": loop.tally.utterances,
        "frames": core.frames_made,
        "running": len(core.scheduler.running),
        "free_pages": core.executor.kv.free,
        "device_mib": torch.cuda.memory_allocated(device) / MIB if on_gpu else 0.0,
        "device_reserved_mib": torch.cuda.memory_reserved(device) / MIB if on_gpu else 0.0,
        "host_mib": resident_mib(),
    }


def verdict(
    samples: Sequence[dict[str, float]], count: int, slots: int, pages: int, end: dict[str, Any]
) -> dict[str, Any]:
    """What the samples say, and what is wrong, in words. `end` is the state after draining."""
    third = max(len(samples) // 3, 1)
    early, late = samples[:third], samples[-third:]

    def speed(part: Sequence[dict[str, float]]) -> float:
        seconds = part[-1]["at_s"] - part[0]["at_s"]
        return (part[-1]["frames"] - part[0]["frames"]) / seconds if seconds > 0 else 0.0

    def growth(name: str) -> float:
        """Of what is always taken: a batch that is under way at one sample is no leak."""
        return min(one[name] for one in late) - min(one[name] for one in early)

    first, last = speed(early), speed(late)
    found: dict[str, Any] = {
        "frames_per_s_first_third": first,
        "frames_per_s_last_third": last,
        "device_growth_mib": growth("device_mib"),
        "host_growth_mib": growth("host_mib"),
        **end,
    }
    problems = [
        f"{end['utterances']} of {count} utterances" if end["utterances"] < count else "",
        f"{end['wrong']} utterances were wrong" if end["wrong"] else "",
        "" if end["drained"] else "not everything came out",
        f"{slots - end['free_slots']} slots are lost" if end["free_slots"] != slots else "",
        f"{pages - end['free_pages']} pages are lost" if end["free_pages"] != pages else "",
        "the device's memory grew" if found["device_growth_mib"] > MOST_DEVICE_GROWTH else "",
        "the host's memory grew" if found["host_growth_mib"] > MOST_HOST_GROWTH else "",
        f"the last third ran at {last / first:.0%} of the first"
        if first and len(samples) >= 9 and last < LEAST_SPEED * first
        else "",
        f"a probe had {end['distinct_probes']} results"
        if end["reproducible"] and end["distinct_probes"] > 1
        else "",
    ]
    found["problems"] = [problem for problem in problems if problem]
    return found


def soak(
    bench: Bench, size: str, slots: int, count: int, reproducible: bool, most_seconds: float
) -> dict[str, Any]:
    """Runs `count` utterances and gives samples and verdict."""
    tiny, device, dtype = size == "tiny", bench.device, bench.dtype
    load = Load(0.3, 0.6, 0) if tiny else Load(0.4, 2.0, 0)
    decoder = dummy_decoder(TINY_CODEC if tiny else PUBLISHED_CODEC, device, dtype, reproducible=reproducible)
    model = dummy_model(size, device, dtype, MAX_CONTEXT, ends=True)
    each = -(-load.positions // PAGE_SIZE)
    asked = NativeModelOptions(slots=slots, pages=slots * each, page_size=PAGE_SIZE, max_context=MAX_CONTEXT)
    options = engine_options(model.config, model.device, model.dtype, asked)
    executor = Watched(open_executor(model, options, reproducible=reproducible and bench.on_gpu))
    pool = requests(model, load, 4 * slots, min(256, options.pages * PAGE_SIZE - 64))
    loop = ClosedLoop(executor, options, pool, decoder, probe_every=10 if tiny else 100)
    try:
        loop.settle(min(slots, count // 4), most_seconds / 2)  # kernels are built
        before, began = loop.tally.utterances, time.perf_counter()
        samples = [sample(loop, device, began)]
        while (
            loop.tally.utterances - before < count
            and loop.tally.wrong == 0
            and time.perf_counter() - began < most_seconds
        ):
            time.sleep(0.25)
            samples.append(sample(loop, device, began))
        drained = loop.drain(30 if bench.on_gpu else 240)
        gc.collect()
        end = {
            "utterances": loop.tally.utterances - before,
            "wrong": loop.tally.wrong,
            "drained": drained,
            "free_slots": loop.engine.core.scheduler.free_slots,
            "free_pages": executor.kv.free,
            "probes": sum(loop.tally.probes.values()),
            "distinct_probes": len(loop.tally.probes),
            "reproducible": reproducible,
        }
    finally:
        loop.close()
    seconds = samples[-1]["at_s"]
    rate = (samples[-1]["frames"] - samples[0]["frames"]) / seconds
    speed = {"frames_per_s": rate, "utterances_per_s": end["utterances"] / seconds}
    about = {"size": size, "slots": slots, "count": count, "seconds": seconds}
    return {**about, **speed, **verdict(samples, count, slots, options.pages, end), "samples": samples}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--size", default="0b6")
    made.add_argument("--slots", type=int, default=512)
    made.add_argument("--count", type=int, default=10_000)
    made.add_argument("--seconds", type=float, default=90.0, help="seconds at most")
    made.add_argument("--reproducible", action="store_true")
    options = made.parse_args()
    bench = Bench("qwen3_tts_soak", options)
    size, slots = ("tiny", 8) if options.tiny else (options.size, options.slots)
    found = soak(bench, size, slots, options.count, options.reproducible, options.seconds)
    bench.keep(**found)
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    print(f"soak: {', '.join(found['problems']) or 'nothing leaked, drifted or went wrong'}")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Times the codec's residual units of 96 and 192 channels on a GPU, Triton's kernel and those in CUDA C++, and checks them.

    python -m benchmarks.codec_units [--channels 96|192|both] [--parts check,times,sizes,without] [--rows 32] [--frames 100]

`check` compares with the twin in float32 (`error`: a kernel's relative RMS error over the twin's own in bfloat16; `unlike`: values that are
not those of Triton's kernel, bit by bit) and launches twice; `times` measures whole utterances, in us per frame of the codec; `sizes`
small batches as graphs; `without` kernels in CUDA C++ with one part left out, so their results are wrong. Random weights and activations.
The result is written as JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import Bench, event_us, graph_us, numbers, parser
from kernels import binaries, codec_cuda, codec_ops, codec_unit_wide, toolchain
from kernels.codec_cuda import Cut
from kernels.codec_unit_wide import WideCut
from kernels.cuda_driver import Module

DILATIONS = (1, 3, 9)
#: What has the cuts of a width.
KINDS: dict[int, Any] = {96: codec_cuda, 192: codec_unit_wide}
#: Steps of the codec's frame at a width.
STEPS = {96: 1920, 192: 640}
#: Rows and frames of small batches.
SIZES = ((1, 1), (1, 16), (8, 4), (32, 4), (256, 16))
#: What `without` leaves out, as edits of the source.
LEFT_OUT: dict[str, dict[str, dict[str, str]]] = {
    "codec_unit": {
        "the sine": {"const float sine = fast_sine(x * frequency);": "const float sine = x * frequency;"},
        "six taps": {"tap < TAPS; ++tap": "tap < 1; ++tap"},
        "copies": {
            "        if (K::COPYING == WHOLE) copy_whole": "        if (p.lead == 1 << 30) copy_whole",
            "        else copy_thirds": "        else if (p.lead == 1 << 30) copy_thirds",
        },
        "the residual": {
            "if (!K::LATE) read_residual(tiles, 0, 3);": "for (auto& half : before) half[0] = half[1] = half[2] = uint4{};",
            "if (K::LATE) read_residual(tiles, 0, 2);": "for (auto& half : before) half[0] = half[1] = half[2] = uint4{};",
            "            if (K::LATE && part == 0) read_residual(tiles, 2, 3);\n": "",
        },
        "the last snake and stores": {
            "if (step >= p.steps) continue;\n                if (p.raw": "if (step != 1 << 30) continue;\n                if (p.raw"
        },
        "the fence": {"        if (K::COPYING != BOXES) writes_to_products();\n": ""},
        "six taps and stores": {
            "tap < TAPS; ++tap": "tap < 1; ++tap",
            "if (step >= p.steps) continue;\n                if (p.raw": "if (step != 1 << 30) continue;\n                if (p.raw",
        },
        "six taps and copies": {
            "tap < TAPS; ++tap": "tap < 1; ++tap",
            "        if (K::COPYING == WHOLE) copy_whole": "        if (p.lead == 1 << 30) copy_whole",
            "        else copy_thirds": "        else if (p.lead == 1 << 30) copy_thirds",
        },
        "copies and stores": {
            "        if (K::COPYING == WHOLE) copy_whole": "        if (p.lead == 1 << 30) copy_whole",
            "        else copy_thirds": "        else if (p.lead == 1 << 30) copy_thirds",
            "if (step >= p.steps) continue;\n                if (p.raw": "if (step != 1 << 30) continue;\n                if (p.raw",
        },
        "all but copies": {
            "tap < TAPS; ++tap": "tap < 1; ++tap",
            "if (!K::LATE) read_residual(tiles, 0, 3);": "for (auto& half : before) half[0] = half[1] = half[2] = uint4{};",
            "if (K::LATE) read_residual(tiles, 0, 2);": "for (auto& half : before) half[0] = half[1] = half[2] = uint4{};",
            "            if (K::LATE && part == 0) read_residual(tiles, 2, 3);\n": "",
            "if (step >= p.steps) continue;\n                if (p.raw": "if (step != 1 << 30) continue;\n                if (p.raw",
        },
        "all but the residual and stores": {
            "tap < TAPS; ++tap": "tap < 1; ++tap",
            "        if (K::COPYING == WHOLE) copy_whole": "        if (p.lead == 1 << 30) copy_whole",
            "        else copy_thirds": "        else if (p.lead == 1 << 30) copy_thirds",
            "const float sine = fast_sine(x * frequency);": "const float sine = x * frequency;",
        },
    },
    "codec_unit_wide": {
        "the sine": {"const float wave = fast_sine(v * frequency);": "const float wave = v * frequency;"},
        "the weights' copies": {
            "arrive_expecting(full, CHUNK);": "arrive(full);",
            "bulk_copy(s.ring() + place.stage * CHUNK, plan.p.weights + chunk * CHUNK, CHUNK, full);": "",
        },
        "the first product": {
            "                multiply(total, a, b, true);\n": "",
            "                multiply(total, moved(a, 32 * plan.slab), moved(b, 32 * CHANNELS), true);\n": "",
        },
        "copies": {"        if (!piece.works()) return;\n        const int first": "        return;\n        const int first"},
        "the residual and stores": {
            "return piece.there && step_of(piece, row) < p.steps;": "return piece.there && step_of(piece, row) == 1 << 30;"
        },
        "the fence": {"                writes_to_products();\n": ""},
    },
}

#: Names of the clocks of a warpgroup's tile, in order; and the edits of the source of 96 channels that count them, into `raw`.
PHASES = (
    "before",
    "tile there",
    "residual asked for",
    "turn",
    "issued",
    "convolved",
    "activated",
    "mixed",
    "written",
    "since asked",
    "waits",
)
COUNTED = {
    "    Barriers barriers;\n};": "    Barriers barriers;\n    int phases[5][16], last[5], asked[4];\n};",
    "    static_assert(K::THREADS >= C": """    for (int i = threadIdx.x; i < 80; i += K::THREADS)
        s.phases[i / 16][i % 16] = 0, s.last[i / 16] = clock();
    static_assert(K::THREADS >= C""",
    "    __device__ __forceinline__ void mark(int) const {}": """
    __device__ __forceinline__ void mark(int i) const {
        if (thread != 0) return;
        const int now = clock();
        s.phases[warpgroup][i] += now - s.last[warpgroup];
        if (i == 1 && now - s.last[warpgroup] > 200) s.phases[warpgroup][9] += now - s.asked[stage_now], s.phases[warpgroup][10] += 1;
        s.last[warpgroup] = now, s.phases[warpgroup][11] += i == 8;
    }
    int stage_now;
""",
    "        mark(0);": "        stage_now = stage;\n        mark(0);",
    "        wait_for(&s.barriers.empty[stage], tiles.parity() ^ 1);\n        const": """        const int t0 = clock();
        wait_for(&s.barriers.empty[stage], tiles.parity() ^ 1);
        const int t1 = clock();
        if (thread == 0) s.asked[stage] = t1;
        const""",
    "        arrive_expecting(&s.barriers.full[stage], (K::TILE + reach) * C * 2);\n": """        s.asked[stage] = clock();
        arrive_expecting(&s.barriers.full[stage], (K::TILE + reach) * C * 2);
""",
    "        arrive_after_copies(&s.barriers.full[stage]);\n": """        arrive_after_copies(&s.barriers.full[stage]);
        if (thread == 0) s.phases[4][0] += t1 - t0, s.phases[4][1] += clock() - t1, s.phases[4][11] += 1;
""",
    "        Multiplier<K>(p, s, warpgroup).run();\n    }\n": """        Multiplier<K>(p, s, warpgroup).run();
    }
    __syncthreads();
    if (threadIdx.x < 80) reinterpret_cast<int*>(p.raw)[blockIdx.x * 80 + threadIdx.x] = s.phases[threadIdx.x / 16][threadIdx.x % 16];
""",
}

#: After which a part of one kernel, of a second on a GPU, is given up.
SECONDS = 15

#: Of the rows that are checked, of 1000 steps.
ENDS = (1000, 999, 150, 0)

Launch = Callable[[Tensor | None, Tensor | None], None]


class Unit:
    """Random weights and inputs of a unit, [rows, steps, channels], and its launches by name."""

    def __init__(
        self, channels: int, dilation: int, rows: int, steps: int, ends: Sequence[int] | None = None, device: str = "cuda"
    ) -> None:
        draw = torch.Generator(device).manual_seed(channels + dilation)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(*shape, generator=draw, device=device)

        self.channels, self.dilation = channels, dilation
        self.ends = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
        self.a, self.x = (normal(rows, steps, channels).bfloat16() for _ in range(2))
        self.weight1 = (normal(7 * channels, channels) / math.sqrt(7 * channels)).bfloat16()
        self.weight2 = (normal(channels, channels) / math.sqrt(channels)).bfloat16()
        self.bias1, self.bias2 = normal(channels), normal(channels)
        alphas = [normal(channels, scale=0.3) for _ in range(4)]
        self.inner, self.after = codec_ops.snake_parameters(*alphas[:2]), codec_ops.snake_parameters(*alphas[2:])

    def outputs(self) -> tuple[Tensor, Tensor]:
        return torch.full_like(self.x, math.nan), torch.full_like(self.x, math.nan)

    def triton(self, raw: Tensor | None, active: Tensor | None) -> None:
        from kernels.codec_launch import Shape, tile_for, unit

        tile = tile_for(Shape("unit", self.channels, self.channels, 7), self.x.shape[1], tma=True)
        assert tile is not None
        weights = (self.weight1, self.bias1, *self.inner, self.weight2, self.bias2)
        unit(self.a, 0, self.x, *weights, self.dilation, raw, active, 0, *self.after, tile, self.ends)

    def twin(self, outputs: Sequence[Tensor], wide: Callable[[Tensor], Tensor]) -> None:
        weights = (wide(self.weight1), self.bias1, *self.inner, wide(self.weight2), self.bias2)
        where = (outputs[0], outputs[1], 0, *self.after)
        codec_ops.codec_active_unit(wide(self.a), 0, wide(self.x), *weights, self.dilation, *where, ends=self.ends)

    def with_weights(self, launch: Callable[..., None], packed: Tensor, *cut: object) -> Launch:
        """A launch of a kernel in CUDA C++ that takes packed weights."""
        first = (self.a, 0, self.x, packed, self.bias1, *self.inner, self.bias2, self.dilation)
        return lambda raw, active: launch(*first, raw, active, 0, *self.after, *cut, ends=self.ends)

    def launches(self) -> dict[str, Launch]:
        kind = KINDS[self.channels]
        weights = self.weight1, self.weight2
        return {"triton": self.triton, **{cut.kernel: self.with_weights(codec_cuda.unit, cut.pack(*weights), cut) for cut in kind.CUTS}}


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


def check(bench: Bench, channels: int, name: str) -> None:
    """Rows that end: at their last step, inside a tile, before their first step."""
    worst, unlike, same = 0.0, 0, True
    for dilation in DILATIONS:
        unit = Unit(channels, dilation, 4, 1000, ENDS, str(bench.device))
        exact, rounded = (tuple(torch.empty_like(unit.x, dtype=dtype) for _ in range(2)) for dtype in (torch.float32, torch.bfloat16))
        unit.twin(exact, Tensor.float)
        unit.twin(rounded, lambda tensor: tensor)
        triton, found, again = unit.outputs(), unit.outputs(), unit.outputs()
        unit.triton(*triton)
        for outputs in (found, again):
            unit.launches()[name](*outputs)
        if found[1][2, 150:].any() or found[1][3].any():
            raise RuntimeError("What lies behind a row's end is not zero.")
        for row, end in enumerate(ENDS):
            for i in range(2 if end else 0):
                yardstick = relative(rounded[i][row, :end], exact[i][row, :end])
                worst = max(worst, relative(found[i][row, :end], exact[i][row, :end]) / yardstick)
                unlike += int((found[i][row, :end] != triton[i][row, :end]).sum())
                same &= torch.equal(found[i][row, :end], again[i][row, :end])
    bench.add({"part": "check", "channels": channels, "kernel": name, "error": worst, "unlike": unlike, "same": same})
    if not (worst < 1.5 and same):
        raise RuntimeError(f"{name} is wrong: error {worst:.2f} times the twin's, launches agree: {same}.")


def times(bench: Bench, channels: int, name: str, rows: int, frames: int) -> None:
    """Whole utterances; the last of the three units writes no raw result."""

    def us(dilation: int) -> float:
        unit = Unit(channels, dilation, rows, frames * STEPS[channels])
        raw, active = unit.outputs()
        return event_us(partial(unit.launches()[name], None if dilation == DILATIONS[-1] else raw, active)) / (rows * frames)

    found = {f"dilation_{dilation}": us(dilation) for dilation in DILATIONS}
    bench.add({"part": "times", "channels": channels, "kernel": name, **found, "us_per_frame": sum(found.values())})


def sizes(bench: Bench, channels: int, name: str) -> None:
    """Small batches: us of one unit of dilation 3 in a graph of ten."""
    found: dict[str, float] = {}
    for rows, frames in SIZES:
        unit = Unit(channels, 3, rows, frames * STEPS[channels])
        raw, active = unit.outputs()
        launch = unit.launches()[name]

        def ten(launch: Launch = launch, raw: Tensor = raw, active: Tensor = active) -> None:
            for _ in range(10):
                launch(raw, active)

        found[f"{rows}x{frames}"] = graph_us(ten, 10)
    bench.add({"part": "sizes", "channels": channels, "kernel": name, **found})


def reduced(text: str, cut: Cut | WideCut, edits: dict[str, str]) -> str:
    """The source with one kernel, where it has many, and some edits. Raises ValueError for an edit whose text does not stand there once."""
    for old, new in edits.items():
        if text.count(old) != 1:
            raise ValueError(f"{old!r} does not stand in the source once")
        text = text.replace(old, new)
    if isinstance(cut, WideCut):
        return text
    wanted = f"{'BOXED' if cut.boxed else 'UNIT'}({cut.warpgroups}, {cut.sharing}, {cut.stages}, {cut.turns}, {cut.copying})"
    return re.sub(r"^(?:UNIT|BOXED)\(.*\)$", lambda found: found[0] if found[0] == wanted else "", text, flags=re.MULTILINE)


def reduced_codes(cuts: Sequence[Cut | WideCut]) -> list[tuple[Cut | WideCut, str, bytes]]:
    """Machine code of each cut with each of `LEFT_OUT` left out, which it names."""
    counted = ["clocks"] if cuts[0].channels == 96 else []
    cases = [(cut, what) for cut in cuts for what in ("nothing", *LEFT_OUT.get(cut.source, {}), *counted)]

    def made(case: tuple[Cut | WideCut, str]) -> bytes:
        cut, what = case
        source = binaries.SOURCES / f"{cut.source}.cu"
        with tempfile.TemporaryDirectory() as folder:
            edited = Path(folder) / source.name
            edited.write_text(reduced(source.read_text(), cut, COUNTED if what == "clocks" else LEFT_OUT.get(cut.source, {}).get(what, {})))
            return toolchain.compile_cuda(edited, binaries._headers(cut.source), "sm_90a")

    with ThreadPoolExecutor(8) as pool:
        return [(*case, code) for case, code in zip(cases, pool.map(made, cases))]


def clocks(raw: Tensor) -> dict[str, list[int]]:
    """Mean clocks of a tile by phase, of the warpgroups; of the copying one: those it waits for room, and those it needs to ask."""
    counts = raw.view(-1)[: 2 * 80 * 132].view(torch.int32).view(132, 5, 16).double()
    mean = (counts[:, :, :11] / counts[:, :, 11:12].clamp(min=1)).mean(dim=0)
    waited = counts[:, :, 9].sum(dim=0) / counts[:, :, 10].sum(dim=0).clamp(min=1)
    found = {name: [round(float(value)) for value in mean[:4, i]] for i, name in enumerate(PHASES) if i != 9}
    return found | {PHASES[9]: [round(float(value)) for value in waited[:4]], "copying": [round(float(value)) for value in mean[4, :2]]}


def without(bench: Bench, channels: int, rows: int, frames: int, codes: Sequence[tuple[Cut | WideCut, str, bytes]]) -> None:
    """What the parts of a kernel cost: its time with one of them left out, us per frame of one unit of dilation 9."""
    unit, kept = Unit(channels, 9, rows, frames * STEPS[channels]), codec_cuda._kernel
    raw, active = unit.outputs()
    try:
        for cut, what, code in codes:
            kernel = Module(code, 0).kernel(cut.kernel, cut.shared_bytes + (512 if what == "clocks" else 0))
            codec_cuda._kernel = lambda *_, kernel=kernel: kernel  # type: ignore[assignment]
            us = event_us(partial(unit.launches()[cut.kernel], raw, active)) / (rows * frames)
            row = {"part": "without", "channels": channels, "kernel": cut.kernel, "left_out": what, "us_per_frame": us}
            bench.add(row | (clocks(raw) if what == "clocks" else {}))
    finally:
        codec_cuda._kernel = kept


def kernels(channels: int) -> list[str]:
    return ["triton", *(cut.kernel for cut in KINDS[channels].CUTS)]


def compile_launches(channels: int, name: str) -> None:
    """Makes the kernels that the parts launch."""
    for dilation in DILATIONS:
        for each, ends, raw in (("triton", ENDS, True), (name, ENDS, True), (name, None, dilation != DILATIONS[-1])):
            unit = Unit(channels, dilation, 4, 1000, ends)
            outputs = unit.outputs()
            unit.launches()[each](outputs[0] if raw else None, outputs[1])
    torch.cuda.synchronize()


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """All parts of one kernel. Others of this benchmark wait meanwhile; a kernel that does not end takes the process along."""
    channels, name = int(options.channels), options.kernel
    signal.alarm(2 * SECONDS)
    if name == "without":
        codes = reduced_codes([cut for number, cut in enumerate(KINDS[channels].CUTS) if number in options.cuts])
        known = {"without": partial(without, bench, channels, options.rows, options.frames, codes)}
    else:
        bench.attempt(f"compile {name}", partial(compile_launches, channels, name))
        known = {
            "check": partial(check, bench, channels, name),
            "times": partial(times, bench, channels, name, options.rows, options.frames),
            "sizes": partial(sizes, bench, channels, name),
        }
    signal.alarm(0)
    for part in (part for part in options.parts.split(",") if part in known):
        with options.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            signal.alarm(SECONDS)
            bench.attempt(f"{part} {name}", known[part])
            signal.alarm(0)


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every kernel in a process of its own, so that one that fails leaves the others alone."""
    channels = (96, 192) if options.channels == "both" else (int(options.channels),)
    left_out = ["without"] if "without" in options.parts else []
    cases = [(each, name) for each in channels for name in (*kernels(each), *left_out)]
    found: dict[str, Any] = {"rows": [], "faults": {}}
    with tempfile.TemporaryDirectory() as folder:
        running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        for each, name in cases:
            path = Path(folder) / f"{each}_{name}.json"
            command = [sys.executable, "-m", "benchmarks.codec_units", *sys.argv[1:], "--channels", str(each), "--kernel", name]
            command += ["--json", str(path), "--lock", str(Path(folder) / "lock")]
            running.append((f"{each} {name}", path, subprocess.Popen(command)))
        for name, path, process in running:
            status = process.wait()
            part = json.loads(path.read_text()) if path.exists() else {"rows": [], "faults": {}}
            rows, faults = found["rows"] + part.pop("rows"), found["faults"] | part.pop("faults")
            if status < 0 or not path.exists():
                faults[name] = f"its process ended with {status}"
            found |= {**part, "rows": rows, "faults": faults}
    return found


def summary(rows: list[dict[str, Any]]) -> None:
    """A line for each kernel, with its share of Triton's time."""
    timed = [row for row in rows if row["part"] == "times"]
    for row in timed:
        base = next((one["us_per_frame"] for one in timed if (one["channels"], one["kernel"]) == (row["channels"], "triton")), math.nan)
        each = " ".join(f"{row[f'dilation_{dilation}']:6.3f}" for dilation in DILATIONS)
        share = row["us_per_frame"] / base
        print(f"{row['channels']:4} {row['kernel']:26} {each}  sum {row['us_per_frame']:6.3f} us/frame  {share:5.2f} of Triton's")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--channels", default="both", choices=("96", "192", "both"))
    made.add_argument("--parts", default="check,times,sizes,without")
    made.add_argument("--rows", type=int, default=32)
    made.add_argument("--frames", type=int, default=100)
    made.add_argument("--cuts", type=numbers, default=[1, 4, 8], help="cuts of `without`, as numbers of a width's `CUTS`")
    made.add_argument("--kernel", help=argparse.SUPPRESS)
    made.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.kernel:
        bench = Bench("codec_units", options, rows_of_batch=options.rows, frames=options.frames)
        measure(bench, options)
        return int(bool(bench.faults))
    path: Path = options.json or Path(os.environ.get("OUT", ".")) / "codec_units.json"
    found = measure_all(options)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    summary(found["rows"])
    print(f"faults: {', '.join(found['faults']) or 'none'}")
    return int(bool(found["faults"]))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

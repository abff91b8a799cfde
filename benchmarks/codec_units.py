"""Times the codec's residual units of 96 and 192 channels on a GPU, Triton's kernel and those in CUDA C++,
and checks them.

    python -m benchmarks.codec_units [--channels 96|192|both] [--parts check,times,sizes] [--rows 32] [--frames 100]

`check` compares with the twin in float32 (`error`: a kernel's relative RMS error over the twin's own in
bfloat16; `unlike`: values that are not those of Triton's kernel, bit by bit) and launches twice; `times`
measures whole utterances, in us per frame of the codec; `sizes` small batches as graphs. Random weights
and activations. The result is written as JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import Bench, event_us, graph_us, parser
from kernels import codec_cuda, codec_ops

DILATIONS = (1, 3, 9)
#: Steps of the codec's frame at a width.
STEPS = {96: 1920, 192: 640}
#: Rows and frames of small batches.
SIZES = ((1, 1), (1, 16), (8, 4), (32, 4), (256, 16))
#: After which a part of one kernel, of a second on a GPU, is given up.
SECONDS = 15

#: Of the rows that are checked, of 1000 steps.
ENDS = (1000, 999, 150, 0)

Launch = Callable[[Tensor | None, Tensor | None], None]


class Unit:
    """Random weights and inputs of a unit, [rows, steps, channels], and its launches by name."""

    def __init__(
        self,
        channels: int,
        dilation: int,
        rows: int,
        steps: int,
        ends: Sequence[int] | None = None,
        device: str = "cuda",
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
        self.inner, self.after = (
            codec_ops.snake_parameters(*alphas[:2]),
            codec_ops.snake_parameters(*alphas[2:]),
        )

    def outputs(self) -> tuple[Tensor, Tensor]:
        return torch.full_like(self.x, math.nan), torch.full_like(self.x, math.nan)

    def triton(self, raw: Tensor | None, active: Tensor | None) -> None:
        from kernels.codec_launch import Shape, tile_for, unit

        tile = tile_for(Shape("unit", self.channels, self.channels, 7), self.x.shape[1], tma=True)
        assert tile is not None
        weights = (self.weight1, self.bias1, *self.inner, self.weight2, self.bias2)
        unit(
            self.a, 0, self.x, *weights, self.dilation, raw, active, 0, *self.after, tile=tile, ends=self.ends
        )

    def twin(self, outputs: Sequence[Tensor], wide: Callable[[Tensor], Tensor]) -> None:
        weights = (wide(self.weight1), self.bias1, *self.inner, wide(self.weight2), self.bias2)
        where = (outputs[0], outputs[1], 0, *self.after)
        codec_ops.codec_active_unit(
            wide(self.a), 0, wide(self.x), *weights, self.dilation, *where, ends=self.ends
        )

    def with_weights(self, launch: Callable[..., None], packed: Tensor) -> Launch:
        """A launch of a kernel in CUDA C++ that takes packed weights."""
        first = (self.a, 0, self.x, packed, self.bias1, *self.inner, self.bias2, self.dilation)
        return lambda raw, active: launch(*first, raw, active, 0, *self.after, ends=self.ends)

    def launches(self) -> dict[str, Launch]:
        cut = codec_cuda.CUTS[self.channels]
        return {
            "triton": self.triton,
            cut.kernel: self.with_weights(codec_cuda.unit, cut.pack(self.weight1, self.weight2)),
        }


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


def check(bench: Bench, channels: int, name: str) -> None:
    """Rows that end: at their last step, inside a tile, before their first step."""
    worst, unlike, same = 0.0, 0, True
    for dilation in DILATIONS:
        unit = Unit(channels, dilation, 4, 1000, ENDS, str(bench.device))
        exact, rounded = (
            tuple(torch.empty_like(unit.x, dtype=dtype) for _ in range(2))
            for dtype in (torch.float32, torch.bfloat16)
        )
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
    bench.add(
        {
            "part": "check",
            "channels": channels,
            "kernel": name,
            "error": worst,
            "unlike": unlike,
            "same": same,
        }
    )
    if not (worst < 1.5 and same):
        raise RuntimeError(f"{name} is wrong: error {worst:.2f} times the twin's, launches agree: {same}.")


def times(bench: Bench, channels: int, name: str, rows: int, frames: int) -> None:
    """Whole utterances; the last of the three units writes no raw result."""

    def us(dilation: int) -> float:
        unit = Unit(channels, dilation, rows, frames * STEPS[channels])
        raw, active = unit.outputs()
        return event_us(
            partial(unit.launches()[name], None if dilation == DILATIONS[-1] else raw, active)
        ) / (rows * frames)

    found = {f"dilation_{dilation}": us(dilation) for dilation in DILATIONS}
    bench.add(
        {"part": "times", "channels": channels, "kernel": name, **found, "us_per_frame": sum(found.values())}
    )


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


def kernels(channels: int) -> list[str]:
    return ["triton", codec_cuda.CUTS[channels].kernel]


def compile_launches(channels: int, name: str) -> None:
    """Makes the kernels that the parts launch."""
    for dilation in DILATIONS:
        for each, ends, raw in (
            ("triton", ENDS, True),
            (name, ENDS, True),
            (name, None, dilation != DILATIONS[-1]),
        ):
            unit = Unit(channels, dilation, 4, 1000, ends)
            outputs = unit.outputs()
            unit.launches()[each](outputs[0] if raw else None, outputs[1])
    torch.cuda.synchronize()


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """All parts of one kernel. Others of this benchmark wait meanwhile; a kernel that does not end takes
    the process along."""
    channels, name = int(options.channels), options.kernel
    signal.alarm(2 * SECONDS)
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
    cases = [(each, name) for each in channels for name in kernels(each)]
    found: dict[str, Any] = {"rows": [], "faults": {}}
    with tempfile.TemporaryDirectory() as folder:
        running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        for each, name in cases:
            path = Path(folder) / f"{each}_{name}.json"
            command = [
                sys.executable,
                "-m",
                "benchmarks.codec_units",
                *sys.argv[1:],
                "--channels",
                str(each),
                "--kernel",
                name,
            ]
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
        base = next(
            (
                one["us_per_frame"]
                for one in timed
                if (one["channels"], one["kernel"]) == (row["channels"], "triton")
            ),
            math.nan,
        )
        each = " ".join(f"{row[f'dilation_{dilation}']:6.3f}" for dilation in DILATIONS)
        share = row["us_per_frame"] / base
        print(
            f"{row['channels']:4} {row['kernel']:26} {each}  sum {row['us_per_frame']:6.3f} us/frame  {share:5.2f} of Triton's"
        )


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--channels", default="both", choices=("96", "192", "both"))
    made.add_argument("--parts", default="check,times,sizes")
    made.add_argument("--rows", type=int, default=32)
    made.add_argument("--frames", type=int, default=100)
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

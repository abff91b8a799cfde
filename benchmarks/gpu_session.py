"""One scripted run on a GPU machine: tests, conformance, bits, kernels, reference, throughput, soak; one
failure stops nothing.

    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps check
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps "rows 0.6B"
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps "rows 1.7B"
    NIGHTJAR_COMMIT=... NIGHTJAR_REFERENCE_SITE=/tmp/reference python -m benchmarks.gpu_session --out $OUT --steps speed
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps engines
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps "codec ways"
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps "codec gathered" "codec continuous" "codec plain"
    NIGHTJAR_COMMIT=... NIGHTJAR_VLLM_SITE=/tmp/vllm python -m benchmarks.gpu_session --out $OUT --steps spark fish
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps "eight 0.6B"
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps "eight 1.7B"
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps kernels
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps megakernel
    NIGHTJAR_COMMIT=... python -m benchmarks.gpu_session --out $OUT --steps "megakernel soak"
    python -m benchmarks.gpu_session --out /tmp/out --device cpu --tiny

Every step is a process of its own with a limit of its own, and all share the minutes of the whole. Each
writes its JSON into the folder as soon as it has it; `session.json` says how each step ended,
`session.log` holds what they printed. A short table comes last.

`spark` and `fish` measure both engines in one run where NIGHTJAR_VLLM_SITE names the folder that vLLM is
installed in, and the native engine alone where it does not; each of their steps is its own group.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.job_rows import table as job_table
from benchmarks.qwen3_tts import headlines, table
from benchmarks.qwen3_tts_rows import split_lines
from benchmarks.roofline import device_named, frame_floor

#: Seconds that a step should have left at least to be started.
LEAST_SECONDS = 2.0
#: The folder that vLLM is installed in, which other steps do not see.
VLLM_SITE = "NIGHTJAR_VLLM_SITE"
#: Groups that run when they are named.
_ASKED_FOR = ("eight", "kernels", "megakernel", "rows")
MODEL_SIZES = {"0.6b": "0b6", "1.7b": "1b7"}


@dataclass(frozen=True, slots=True)
class Step:
    """One process: its group, the module or program and its arguments, seconds that it may take, and where
    it cannot run."""

    name: str
    group: str
    arguments: tuple[str, ...]
    limit_s: float
    gpu_only: bool = False
    needs: str = ""
    #: Names an environment variable with a folder of packages that this step can import as well.
    site: str = ""


@dataclass(slots=True)
class Outcome:
    """How a step ended: "ok", "failed", "too slow", or "left out"."""

    name: str
    ended: str
    seconds: float = 0.0
    why: str = ""


def steps(device: str, tiny: bool, out: Path) -> list[Step]:
    """All steps in order. `check` proves the kernels and the modes, `speed` gives the table, `tune` tries
    other choices."""
    common = ("--device", device, *(["--tiny"] if tiny else []))
    golden = ("qwen3_tts", "tests/golden/qwen3_tts", "--device", device)
    tests = ("pytest", "-m", "gpu", "tests/gpu", "-q", "-rs", "-n", "6", "--timeout=250", "--durations=8")
    frames = (
        "benchmarks.lm_gpu",
        "--part",
        "frame",
        "--model",
        "0.6b,1.7b",
        "--batch",
        "1,8,32,64,128,256,512",
    )
    # With tiny shapes fewer of everything: this only tries the steps.
    throughput = ("benchmarks.qwen3_tts", *common, "--seconds", "1.5", "--windows", "3")
    same_bits = (
        *throughput,
        "--slots",
        "--reproducible",
        "4" if tiny else "512",
        "--codec-rows",
        "4" if tiny else "256",
    )
    small, large = (*throughput, "--sizes", "0b6", "--codec"), (*throughput, "--sizes", "1b7")
    if tiny:
        small = (*small, "--slots", "4", "--sweep", "2", "--long-prompts", "4")
    else:
        small = (
            *small,
            "--slots",
            "1024",
            "512",
            "128",
            "--sweep",
            "1",
            "8",
            "32",
            "64",
            "256",
            "768",
            "--long-prompts",
            "1024",
        )
        large = (*large, "--slots", "1024", "512")
    small = (
        *small,
        "--also",
        str(out / "reference.json"),
        str(out / "same_bits.json"),
        "--json",
        str(out / "qwen3_tts.json"),
    )
    large = (
        *large,
        "--also",
        str(out / "reference.json"),
        str(out / "same_bits.json"),
        "--json",
        str(out / "qwen3_tts_1b7.json"),
    )
    same_bits = (*same_bits, "--sizes", "0b6", "1b7", "--json", str(out / "same_bits.json"))
    sooner = (
        *throughput,
        "--sizes",
        "0b6",
        "--slots",
        "4" if tiny else "512",
        "--parts",
        "all",
        "--admit-turns",
        "2",
    )
    continuous = (
        *throughput,
        "--sizes",
        "0b6",
        "--slots",
        "4" if tiny else "512",
        "--reproducible",
        "4" if tiny else "512",
    )
    soak = (
        "benchmarks.qwen3_tts_soak",
        *common,
        "--count",
        "20" if tiny else "10000",
        "--json",
        str(out / "soak.json"),
    )
    bits = ("benchmarks.qwen3_tts_bits", *common, "--json", str(out / "bits.json"))
    reference = ("benchmarks.qwen3_tts_reference", *common, "--json", str(out / "reference.json"))
    return [
        Step("tests", "check", (*tests, "-p", "no:cacheprovider"), 270),
        Step("conformance float32", "check", ("tests.conformance", *golden), 180, gpu_only=True),
        Step(
            "conformance bfloat16",
            "check",
            ("tests.conformance", *golden, "--dtype", "bfloat16"),
            40,
            gpu_only=True,
        ),
        Step("same bits", "check", bits, 100),
        Step("frames", "check", frames, 150, gpu_only=True),
        Step("codec", "check", ("benchmarks.codec_gpu", "--part", "decode,stream"), 200, gpu_only=True),
        Step("reference", "speed", reference, 120, needs="NIGHTJAR_REFERENCE_SITE"),
        Step("throughput, same bits", "speed", same_bits, 90),
        Step("throughput 0.6B", "speed", small, 250),
        Step("throughput 1.7B", "speed", large, 100, gpu_only=True),
        Step("soak", "speed", soak, 80),
        Step(
            "plots",
            "speed",
            ("benchmarks.plots", str(out / "qwen3_tts.json"), str(out / "qwen3_tts_1b7.json")),
            20,
        ),
        Step("newcomers sooner", "tune", (*sooner, "--json", str(out / "sooner.json")), 70),
        *codec_steps(device, tiny, out, continuous),
        *engine_steps(device, tiny, out),
        *eight_steps(device, tiny, out),
        *kernel_steps(out),
        *megakernel_steps(common, out),
        *row_steps(common, tiny, out),
    ]


def kernel_steps(out: Path) -> list[Step]:
    """Kernels in CUDA C++ beside Triton's and cuBLAS's: the codec's units and products of few and many
    rows."""
    products = ("products_gpu", "residual_products", "wide_products")
    names = ("codec_unit_gpu", *products, "lm_kernels", "frame_kernels", "prefill_kernels")
    files = (f"tests/gpu/test_{name}.py" for name in names)
    tests = ("pytest", "-m", "gpu", *files, "-q", "-rs", "-n", "6", "--timeout=250", "-p", "no:cacheprovider")
    modules = {"codec units": "codec_units", "products": "products_gpu"}
    modules |= {
        "residual products": "residual_products",
        "wide products": "wide_products",
        "prefill": "prefill_gpu",
    }
    measured = [
        Step(
            name,
            "kernels",
            (f"benchmarks.{module}", "--json", str(out / f"{module}.json")),
            100,
            gpu_only=True,
        )
        for name, module in modules.items()
    ]
    return [Step("tests of the kernels", "kernels", tests, 250, gpu_only=True), *measured]


def megakernel_steps(common: tuple[str, ...], out: Path) -> list[Step]:
    """The persistent kernel of the code predictor beside the graph, alone and in speech; then 100,000
    launches with delays."""
    tests = (
        "pytest",
        "-m",
        "gpu",
        "tests/gpu/test_persistent_gpu.py",
        "-q",
        "-rs",
        "--timeout=250",
        "-p",
        "no:cacheprovider",
    )
    measured = (
        "benchmarks.megakernel",
        *common,
        "--part",
        "codes,times,rtf",
        "--json",
        str(out / "megakernel.json"),
    )
    soaked = (
        "--part",
        "soak",
        "--rows",
        "1",
        "--kinds",
        "whole",
        "--frames",
        "100000",
        "--json",
        str(out / "megakernel_soak.json"),
    )
    soak = ("benchmarks.megakernel", *common, *soaked)
    return [
        Step("tests of the megakernel", "megakernel", tests, 200, gpu_only=True),
        Step("megakernel", "megakernel", measured, 200, gpu_only=True),
        Step("megakernel soak", "megakernel", soak, 500, gpu_only=True),
    ]


def codec_steps(device: str, tiny: bool, out: Path, throughput: tuple[str, ...]) -> list[Step]:
    """Whole utterances gathered and as a continuous batch, the front plain and fused: the codec, then the
    LM with each."""
    files = (
        f"tests/gpu/test_codec_{name}.py" for name in ("kernels", "front_kernels", "continuous", "streams")
    )
    tests = ("pytest", "-m", "gpu", *files, "-q", "-rs", "-n", "6", "--timeout=250", "-p", "no:cacheprovider")
    common = ("--device", device, *(["--tiny"] if tiny else []))
    return [
        Step("codec tests", "tune", tests, 250, gpu_only=True),
        Step(
            "codec ways",
            "tune",
            ("benchmarks.codec_stage", *common, "--json", str(out / "codec_stage.json")),
            240,
        ),
        *(
            Step(
                f"codec {name}", "tune", (*throughput, *more, "--json", str(out / f"codec_{name}.json")), 120
            )
            for name, more in (
                ("gathered", ("--parts", "all")),
                ("continuous", ("--parts", "all", "--codec-rows", "4" if tiny else "256")),
                ("plain", ("--parts", "all", "--codec-plain-front")),
            )
        ),
    ]


def engine_steps(device: str, tiny: bool, out: Path) -> list[Step]:
    """The models that both engines run. `engines` proves the native one on this device, `spark` and `fish`
    measure both."""
    common = ("--device", device, *(["--tiny"] if tiny else []))
    files = (
        "test_lm_kernels",
        "test_frame_kernels",
        "test_prefill_kernels",
        "test_graph_executor",
        "test_graph_draws",
        "test_spark_gpu",
        "test_fish_gpu",
    )
    tests = (
        "pytest",
        "-m",
        "gpu",
        *(f"tests/gpu/{file}.py" for file in files),
        "-q",
        "-rs",
        "-n",
        "6",
        "--timeout=250",
    )
    agreement = ("benchmarks.engine_agreement", *common, "--json", str(out / "agreement.json"))
    spark = ("benchmarks.spark_tts", *common, "--json", str(out / "spark.json"))
    fish = ("benchmarks.fish_speech", *common, "--json", str(out / "fish.json"))
    if tiny:
        spark = (*spark, "--part", "frame,lm", "--requests", "2", "--seconds", "0.1", "--engines", "native")
        fish = (
            *fish,
            "--part",
            "frame,lm,speech",
            "--requests",
            "2",
            "--seconds",
            "0.1",
            "--engines",
            "native",
        )
    else:
        spark = (
            *spark,
            "--part",
            "codec,frame,lm,speech,streams,stock,loop",
            "--turns",
            "0,4",
            "--loop-batches",
            "256,1024",
        )
        fish = (*fish, "--part", "frame,codec,lm,speech,loop", "--requests", "64,256")
    native = ("--only", "native", "--device", device)
    return [
        Step("tests of the frames", "engines", (*tests, "-p", "no:cacheprovider"), 280, gpu_only=True),
        Step(
            "conformance spark",
            "engines",
            ("tests.conformance", "spark", "tests/golden/spark", *native),
            120,
            gpu_only=True,
        ),
        Step(
            "conformance fish",
            "engines",
            ("tests.conformance", "fish", "tests/golden/fish", *native),
            120,
            gpu_only=True,
        ),
        Step("agreement", "engines", agreement, 120),
        Step("spark", "spark", spark, 540, site=VLLM_SITE),
        Step("fish", "fish", fish, 540, site=VLLM_SITE),
    ]


def eight_steps(device: str, tiny: bool, out: Path) -> list[Step]:
    """A job on all GPUs of a host with eight: rows of one GPU and of eight, folder and S3, faults, and the
    engine alone for comparison."""
    job = (
        "benchmarks.job_gpu",
        "--device",
        device,
        "--paths",
        "folder",
        "s3",
        "--faults",
        "--memory",
        "--engine-last",
        "--minutes",
        "8.8",
    )
    if tiny:
        small = (
            *job,
            "--tiny",
            "--gpus",
            "1",
            "3",
            "--items",
            "150",
            "--skip-engine",
            "--json",
            str(out / "job_h200_x8.json"),
        )
        return [Step("eight tiny", "eight", small, 545)]
    sizes = {"0.6B": "0b6", "1.7B": "1b7"}
    host = (*job, "--gpus", "1", "8", "--seconds", "15")
    return [
        Step(
            f"eight {name}",
            "eight",
            (*host, "--sizes", size, "--json", str(out / f"job_h200_x8_{size}.json")),
            545,
            gpu_only=True,
        )
        for name, size in sizes.items()
    ]


def named(known: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """The steps of these names and groups; without any, all that are not for a host of eight or a trial."""
    return [
        step
        for step in known
        if ({step.name, step.group} & set(names) if names else step.group not in _ASKED_FOR)
    ]


def run(step: Step, device: str, left_s: float, out: Path, log: TextIO) -> Outcome:
    """Runs one step; whatever it does, this returns."""
    if step.gpu_only and device == "cpu":
        return Outcome(step.name, "left out", why="needs a GPU")
    if step.needs and not os.environ.get(step.needs):
        return Outcome(step.name, "left out", why=f"{step.needs} is not set")
    limit = min(step.limit_s, left_s)
    if limit < LEAST_SECONDS:
        return Outcome(step.name, "left out", why="no time is left")
    began = time.monotonic()
    environment = {**os.environ, "OUT": str(out), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if site := os.environ.get(step.site, ""):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-m", *step.arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, start_new_session=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
    seconds = time.monotonic() - began
    log.write(f"\n===== {step.name}: {' '.join(step.arguments)}\n{printed}\n")
    log.flush()
    ended = "ok" if process.returncode == 0 else "too slow" if seconds >= limit else "failed"
    lines = [line for line in printed.splitlines() if line.strip()]
    return Outcome(step.name, ended, seconds, (lines[-1] if lines else "")[:200])


def run_all(
    chosen: Sequence[Step], device: str, minutes: float, out: Path, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Runs the steps one after the other and keeps `session.json` up to date."""
    until = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    with (out / "session.log").open("w", encoding="utf-8") as log:
        for step in chosen:
            try:
                outcome = run(step, device, until - time.monotonic(), out, log)
            except OSError as error:
                outcome = Outcome(step.name, "failed", why=str(error))
            outcomes.append(outcome)
            tell(outcome)
            facts = {
                "commit": os.environ.get("NIGHTJAR_COMMIT", ""),
                "device": device,
                "steps": [asdict(one) for one in outcomes],
            }
            (out / "session.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return outcomes


def read(path: Path) -> dict[str, Any]:
    """A step's JSON, or nothing when it did not come."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def row_steps(common: tuple[str, ...], tiny: bool, out: Path) -> list[Step]:
    """512 to 1,024 slots; each of the two needs a session of its own."""
    chosen = (
        ("--slots", "4", "6", "--more-text", "0", "40", "--spare", "4")
        if tiny
        else ("--lm", "512", "1024", "--spare", "512", "1024")
    )
    rows = ("benchmarks.qwen3_tts_rows", *common, *chosen)
    return [
        Step("rows 0.6B", "rows", (*rows, "--sizes", "0b6", "--json", str(out / "qwen3_tts_rows.json")), 520),
        Step(
            "rows 1.7B",
            "rows",
            (*rows, "--sizes", "1b7", "--json", str(out / "qwen3_tts_rows_1b7.json")),
            520,
            gpu_only=True,
        ),
    ]


def frame_lines(result: dict[str, Any]) -> list[str]:
    """Frames by batch: milliseconds, the device's floor, and its share."""
    device = device_named(result.get("device", ""))
    lines = []
    for row in result.get("frames", []):
        floor = (
            1000 * frame_floor(MODEL_SIZES[row["model"]], row["rows"], 300, device).seconds
            if device
            else None
        )
        of = f"{floor:8.2f} {floor / row['best_ms']:6.0%}" if floor else ""
        lines.append(f"frame {row['model']:5}{row['rows']:5}{row['best_ms']:8.2f} ms {of}")
    return lines


def engine_lines(name: str, result: dict[str, Any]) -> list[str]:
    """What is kept busy on each engine beside its aim, first chunks, and what a step takes alone."""
    rows, lines = result.get("rows", []), list[str]()
    for row in rows:
        about = f"{name:6}{row.get('engine', ''):7}{row['part']:20}{row.get('slots', row['batch']):6}"
        turns = f" {row['frames_per_turn']} frames a turn" if "frames_per_turn" in row else ""
        kept = "" if "kept_voices" not in row else " kept voices" if row["kept_voices"] else " nothing kept"
        if row["part"] == "first chunk":
            lines.append(f"{about} p50 {row['p50_ms']:8.1f} ms  p95 {row['p95_ms']:8.1f} ms")
        elif row["part"] == "frame alone":
            floor = f"  floor {row['floor_ms']:6.2f}" if "floor_ms" in row else ""
            lines.append(f"{about} {row['ms']:8.2f} ms{floor}")
        elif "audio_s_per_s" in row and ("engine" in row or "loop" in row["part"] or "stock" in row["part"]):
            lines.append(f"{about} {row['audio_s_per_s']:10,.0f} RTFx{turns}{kept}")
        elif row["part"].startswith("prefill"):
            lines.append(f"{about} {row['ms']:8.2f} ms")
    if rows:
        lines.append(
            f"{name} aim {result.get('aim')}, must {result.get('must')}; faults: {', '.join(result.get('faults', {})) or 'none'}"
        )
    return lines


def summary(out: Path) -> list[str]:
    """The short table of what is in the folder."""
    lines: list[str] = []
    for name in ("qwen3_tts.json", "qwen3_tts_1b7.json", "sooner.json"):
        if rows := read(out / name).get("rows"):
            lines += [table(rows), *headlines(rows)]
    for name in ("qwen3_tts_rows.json", "qwen3_tts_rows_1b7.json"):
        lines += split_lines(read(out / name).get("rows", []))
    lines += frame_lines(read(out / "lm_gpu.json"))
    for row in read(out / "codec_gpu.json").get("decode", {}).get("times", []):
        lines.append(
            f"codec {row['rows']:3} x {row['frames']:3} frames {row['graph_us']:7.2f} us a frame (floor 6.28)"
        )
    for row in read(out / "codec_stage.json").get("rows", []):
        if row["part"] in ("host to host", "step"):
            about = f"codec {row['part']:13}{row['way']:10}{row['front']:7}{row.get('lengths', ''):7}"
            threads = f"  threads {row['thread_share']:.0%} of a core" if "thread_share" in row else ""
            lines.append(f"{about}{row['us_per_frame']:7.2f} us a frame{threads}")
        elif row["part"] == "error":
            lines.append(f"codec error {row['way']:24}{row['relative_rms']:8.4f}")
    for name in ("gathered", "continuous", "plain"):
        if rows := read(out / f"codec_{name}.json").get("rows"):
            lines += [f"codec {name}:", table(rows)]
    lines += [
        f"agreement {row['model']:6}{row['rows']:5} {row['verdict']}"
        for row in read(out / "agreement.json").get("rows", [])
    ]
    for name in ("spark", "fish"):
        lines += engine_lines(name, read(out / f"{name}.json"))
    for name in ("job_h200_x8", "job_h200_x8_0b6", "job_h200_x8_1b7"):
        if rows := read(out / f"{name}.json").get("rows"):
            lines.append(job_table(rows))
    if bits := read(out / "bits.json"):
        differ = {key: len(value) for key, value in bits.items() if key.startswith("differ")}
        lines.append(f"same bits: {bits.get('same_bits')} for {bits.get('requests')} requests {differ}")
    if soak := read(out / "soak.json"):
        lines.append(
            f"soak: {soak['utterances']} utterances at {soak['frames_per_s']:,.0f} frames/s, device {soak['device_growth_mib']:+.0f} MiB, "
            f"host {soak['host_growth_mib']:+.0f} MiB, {soak['distinct_probes']} results of {soak['probes']} probes, "
            f"{', '.join(soak['problems']) or 'no problem'}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder for every result")
    parser.add_argument(
        "--steps",
        nargs="*",
        default=[],
        help="groups or names of steps (check, speed, tune, engines, spark, fish, eight, kernels, megakernel, rows); "
        "all but the last four without",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try every step on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    chosen = named(steps(options.device, options.tiny, out), options.steps)

    def tell(outcome: Outcome) -> None:
        print(f"{outcome.name:22}{outcome.ended:10}{outcome.seconds:7.1f} s  {outcome.why}", flush=True)

    outcomes = run_all(chosen, options.device, options.minutes, out, tell)
    print("\n".join(summary(out)))
    return 1 if any(outcome.ended in ("failed", "too slow") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

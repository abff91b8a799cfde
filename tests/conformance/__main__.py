"""`python -m tests.conformance FAMILY FOLDER`: runs every case of a golden folder; one line a case, and a
closing line.

    python -m tests.conformance qwen3_tts tests/golden/qwen3_tts
    python -m tests.conformance qwen3_tts tests/golden/qwen3_tts --device cuda --dtype bfloat16

Exits with 1 when a case fails, with 2 when the folder cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path

FAMILIES = {
    "fish": "tests.conformance.fish",
    "qwen3_tts": "tests.conformance.qwen3_tts",
    "spark": "tests.conformance.spark",
    "speechlm": "tests.conformance.speechlm",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    options = parser.parse_args(arguments)
    try:
        json.loads((options.folder / "cases.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{options.folder} has no cases.json that can be read: {error}", file=sys.stderr)
        return 2
    module = import_module(FAMILIES[options.family])
    passed = failed = 0
    for name, check in module.cases(options.folder, options.device, options.dtype):
        if options.only not in name:
            continue
        begin = time.perf_counter()
        problem = _run(check)
        passed, failed = passed + (not problem), failed + bool(problem)
        took = time.perf_counter() - begin
        print(
            f"FAIL {name}: {problem} ({took:.2f} s)" if problem else f"ok   {name} ({took:.2f} s)", flush=True
        )
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def _run(check: object) -> str:
    """What is wrong with a case; empty when nothing is."""
    try:
        check()  # pyright: ignore[reportCallIssue]
    except AssertionError as error:
        return str(error) or "assertion failed"
    except Exception as error:  # noqa: BLE001 - a case that breaks must not hide the others
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())

"""SpeechLM's backbone on a GPU at its published size, dummy weights: text alone, eight streams, guidance pairs, in one run.

    python -m benchmarks.speechlm_gpu [--requests 512] [--prompt 120] [--steps 300] [--parts text,streams,mixed,pairs] [--tensor-parallel 1]

`text` is text alone; `streams` draws all eight streams in every step; `mixed` writes text for two thirds of the steps and then audio,
and `pairs` does so with guidance, each request with a null branch of its own; `mixed16`, `pairs16`, `mixed64` and `pairs64` are the same
for so many requests. A token is a stream-0 step of a request; null branches do not count. A pair that broke is counted: under
asynchronous scheduling none may. JSON goes to $OUT (or the working folder) as speechlm_gpu.json. Needs vLLM; written for 0.26 and
0.32. `--tiny` runs the same on a CPU, to show that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.speechlm_load import Load, make_plugin_known, run, write_shape
from pipelines.speechlm.lm import model_spec
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import VllmOptions

#: Tokens a second: stock vLLM with this backbone and text alone on one H200, and what eight streams should and must reach.
STOCK, AIM, MUST = 18_147, 15_000, 9_000


def loads(options: argparse.Namespace) -> list[Load]:
    count, prompt, steps = options.requests, options.prompt, options.steps
    third = steps // 3
    known = {
        "text": Load("text", count, prompt, steps, 0),
        "streams": Load("streams", count, prompt, 0, steps),
        "mixed": Load("mixed", count, prompt, steps - third, third),
        "pairs": Load("pairs", count, prompt, steps - third, third, 3.0),
    }
    for few in (16, 64):
        known[f"mixed{few}"] = Load(f"mixed{few}", few, prompt, steps - third, third)
        known[f"pairs{few}"] = Load(f"pairs{few}", few, prompt, steps - third, third, 3.0)
    return [known[name] for name in options.parts.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=120)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--parts", default="text,streams,mixed,pairs,mixed16,pairs16,mixed64,pairs64")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--memory-share", type=float, default=0.9)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    load_vllm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_plugin_known(folder)
        if options.tiny:
            from tests.support.vllm_v2 import v2_runner

            stack.enter_context(v2_runner())
        config = write_shape(folder, published=not options.tiny)
        spec = model_spec(config, share_prefixes=True)
        spec = replace(spec, engine={**spec.engine, "load_format": "dummy"})
        context = 256 if options.tiny else 2048
        wanted = VllmOptions(
            memory_share=None if options.tiny else options.memory_share,
            max_sequences=2 * options.requests,
            waiting_room=options.requests,
            max_context=context,
            step_tokens=None if options.tiny else 16_384,
            tensor_parallel=options.tensor_parallel,
        )
        host = VllmHost(spec, wanted)
        stack.callback(host.close)
        run(Load("warm", min(32, options.requests), options.prompt, 8, 8, 2.0), config, host)
        rows: list[dict[str, Any]] = []
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        for load in loads(options):
            row = run(load, config, host)
            rows.append(row)
            share = row["tokens_per_s"] / STOCK
            print(
                f"{row['load']:8} {row['tokens_per_s']:9.0f} tokens/s ({share:.2f} of stock text), {row['engine_steps']} steps, "
                f"{row['sequence_steps']} sequence steps, {row['preemptions']} preempted, {row['broken_pairs']} pairs broken, "
                f"{len(row['failures'])} failed",
                flush=True,
            )
            # After every part: a later one may fail.
            result = {"device": device, "stock": STOCK, "aim": AIM, "must": MUST, "options": vars(options), "rows": rows}
            (Path(os.environ.get("OUT", ".")) / "speechlm_gpu.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What guidance of SpeechLM's audio costs against none, in engine steps, sequence steps and time, on a CPU with tiny random weights.

    python -m benchmarks.speechlm_steps [--pairs 16,64] [--text 24] [--rows 12]

Audio is a third of the steps by default. The engine is vLLM's V2 runner in Triton's interpreter: steps are what a GPU would make too,
times only show the ratio here. Writes benchmarks/results/speechlm_steps.json.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Figure, show, write
from benchmarks.speechlm_load import Load, run, write_shape
from pipelines.speechlm.lm import model_spec
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import VllmOptions
from tests.support.vllm_v2 import v2_runner

#: Guided to none, when audio is a third of the steps.
AIM = "at most 1.35"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", default="16,64")
    parser.add_argument("--prompt", type=int, default=20)
    parser.add_argument("--text", type=int, default=24)
    parser.add_argument("--rows", type=int, default=12)
    options = parser.parse_args()
    counts = [int(count) for count in options.pairs.split(",")]
    load_vllm()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, v2_runner():
        config = write_shape(Path(folder), published=False)
        spec = model_spec(config, share_prefixes=True)
        spec = replace(spec, engine={**spec.engine, "load_format": "dummy"})
        host = VllmHost(spec, VllmOptions(max_context=256, max_sequences=2 * max(counts)))
        try:
            run(Load("warm", 4, options.prompt, 2, 2, 2.0), config, host)
            for count in counts:
                plain = run(Load("plain", count, options.prompt, options.text, options.rows), config, host)
                guided = run(Load("guided", count, options.prompt, options.text, options.rows, 3.0), config, host)
                for key in ("engine_steps", "sequence_steps", "seconds"):
                    what = f"{count} pairs, {key.replace('_', ' ')}"
                    figures += [Figure(f"{what}, without guidance", plain[key], key), Figure(f"{what}, guided", guided[key], key)]
                    figures.append(Figure(f"{what}, guided to none", guided[key] / plain[key], "times", AIM if key != "seconds" else ""))
                figures.append(Figure(f"{count} pairs, broken", guided["broken_pairs"], "pairs", "0"))
        finally:
            host.close()
    show(f"SpeechLM, tiny weights, CPU: {options.text} steps of text, {options.rows} of audio", figures)
    write("speechlm_steps", figures)


if __name__ == "__main__":
    main()

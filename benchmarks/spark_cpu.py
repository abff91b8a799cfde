"""SparkTTS on CPU with tiny weights: our pipeline against a loop over transformers' `generate`, at 32 requests.

    python -m benchmarks.spark_cpu [--checkpoint tests/golden/spark/checkpoint] [--requests 32] [--tokens 200]

The LM alone at equal lengths and at lengths from a fifth to the whole (a loop runs each batch to its longest row), then prompts to
audio. Every sequence has a set length, so both sides make the same number of tokens. Needs vLLM.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.figures import Figure, show, write
from pipelines.codec.stage import CodecStage
from pipelines.spark_tts.bicodec import BiCodec, load_bicodec
from pipelines.spark_tts.config import LLM, SparkConfig
from pipelines.spark_tts.pipeline import column, model_spec
from pipelines.spark_tts.prompt import Vocabulary, creation_prompt
from pipelines.spark_tts.streaming_decoder import BiCodecDecoder, Voice
from pipelines.vllm_engine.host import VllmHost
from pipelines.vllm_engine.library import load_vllm
from pipelines.vllm_engine.options import TokenRequest, Tokens, TokenSampling, VllmOptions
from tests.support.golden_checkpoint import whole
from tests.support.spark_oracle import OracleLm
from tests.support.vllm_kit import GOLDEN, Waiter

REPEATS = 3


def ours(host: VllmHost, prompts: list[list[int]], lengths: list[int], temperature: float = 0.8) -> list[Tokens]:
    """All sequences through the host, as they end."""
    waiters = []
    for index, (prompt, length) in enumerate(zip(prompts, lengths)):
        waiters.append(Waiter())
        sampling = TokenSampling(length, temperature=temperature, top_k=50, top_p=0.95, seed=index, ignore_end=True)
        host.submit(TokenRequest(str(index), prompt, sampling), waiters[-1])
    return [waiter.future.result() for waiter in waiters]


def theirs(oracle: OracleLm, prompts: list[list[int]], lengths: list[int], sample: bool = True) -> list[list[int]]:
    """The sequences as one batch of `generate`, which runs to the longest; what is over is cut."""
    rows = oracle.generate(prompts, max(lengths), sample=sample, ignore_end=True)
    return [row[:length] for row, length in zip(rows, lengths)]


def semantic(ids: list[int], config: SparkConfig) -> torch.Tensor:
    """Any ids as semantic tokens: random weights do not write speech, but as many tokens."""
    return torch.tensor(ids) % config.bicodec.codebook_size


def decode_ours(codec: BiCodec, rows: list[list[int]], config: SparkConfig) -> None:
    """The codec stage, as the pipeline feeds it."""
    stage: CodecStage[Voice] = CodecStage(BiCodecDecoder(codec))
    voice = torch.zeros(config.bicodec.speaker.tokens, dtype=torch.long)
    for row in rows:
        stage.decode(column(semantic(row, config).tolist()), lambda heard: None, Voice(voice))
    stage.close()


def decode_theirs(codec: BiCodec, rows: list[list[int]], config: SparkConfig) -> None:
    """One utterance after the other, as the published code does."""
    voice = torch.zeros(config.bicodec.speaker.tokens, dtype=torch.long)
    for row in rows:
        codec.decode([semantic(row, config)], [voice])


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def compare(name: str, tokens: int, fast: float, slow: float) -> list[Figure]:
    return [
        Figure(f"{name}: ours", tokens / fast, "tokens/s"),
        Figure(f"{name}: transformers", tokens / slow, "tokens/s"),
        Figure(f"{name}: ratio", slow / fast, "times"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=GOLDEN / "checkpoint")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = whole(options.checkpoint)
    config = SparkConfig.from_folder(checkpoint)
    vocabulary = Vocabulary.from_folder(checkpoint / LLM, config.bicodec.codebook_size, config.bicodec.global_codes)
    prompts = [
        creation_prompt(vocabulary, f"This is line {n}{' and it goes on' * (n % 5)}.", "male/low/low") for n in range(options.requests)
    ]
    equal = [options.tokens] * options.requests
    mixed = [options.tokens // 5 + (options.tokens - options.tokens // 5) * n // (options.requests - 1) for n in range(options.requests)]
    codec = load_bicodec(config, torch.device("cpu"))[1]
    oracle = OracleLm(checkpoint / LLM)
    load_vllm()
    host = VllmHost(model_spec(config), VllmOptions(max_context=1024, max_sequences=options.requests))
    figures: list[Figure] = []
    try:
        for name, lengths in (("LM, equal lengths", equal), ("LM, mixed lengths", mixed)):
            for drawn in (False, True):
                fast = best(lambda lengths=lengths, drawn=drawn: ours(host, prompts, lengths, 0.8 if drawn else 0.0))
                slow = best(lambda lengths=lengths, drawn=drawn: theirs(oracle, prompts, lengths, drawn))
                figures += compare(f"{name}, {'sampled' if drawn else 'greedy'}", sum(lengths), fast, slow)
        fast = best(lambda: decode_ours(codec, [tokens.ids for tokens in ours(host, prompts, mixed)], config))
        slow = best(lambda: decode_theirs(codec, theirs(oracle, prompts, mixed), config))
        figures += compare("prompts to audio, mixed lengths", sum(mixed), fast, slow)
    finally:
        host.close()
    show(f"SparkTTS, tiny weights, CPU, {options.requests} requests", figures)
    write("spark_cpu", figures)


if __name__ == "__main__":
    main()

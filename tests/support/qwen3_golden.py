"""Golden Qwen3-TTS models for the engine's tests, loaded once, and random requests for them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import NightjarError
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
from tests.support.golden_checkpoint import whole
from tests.support.listened import ListenedCore
from tests.support.rounds import turn_until

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_tts"
MAX_CONTEXT = 256
KINDS = ("base", "custom", "design")


@cache
def golden_model(
    kind: str, dtype: torch.dtype = torch.float32, codebooks: int | None = None
) -> Qwen3TTSModel:
    """The golden checkpoint of this kind, on CPU; with only its first codebooks where a test needs many
    frames."""
    torch.set_num_threads(1)
    folder = whole(GOLDEN / f"checkpoint-{kind}")
    config = Qwen3TTSConfig.from_folder(folder)
    config = replace(config, codebooks=codebooks or config.codebooks)
    with Checkpoint(folder) as checkpoint:
        weights = take_weights(checkpoint, config, dtype, "cpu")
        checkpoint.ignore("speaker_encoder.*")
        if codebooks:
            checkpoint.ignore("talker.code_predictor.*")
        checkpoint.finish()
    return Qwen3TTSModel(config, weights, MAX_CONTEXT)


def random_request(rng: random.Random, model: Qwen3TTSModel, name: str) -> GenerationRequest:
    """A request in any mode that the model has, greedy or drawn in any way."""
    config = model.config
    draw = np.random.default_rng(rng.randrange(2**32))
    parts: dict[str, Any] = {"language": rng.choice(config.spoken_languages)}
    text_first, voice, codes = rng.random() < 0.5, None, None
    if config.kind == "base":
        voice = draw.standard_normal(config.talker.hidden).astype(np.float32)
        if rng.random() < 0.5:
            codes = draw.integers(0, config.predictor.vocab, (rng.randint(1, 24), config.codebooks))
            parts["reference_ids"] = draw.integers(0, 256, rng.randint(1, 12)).tolist()
    elif config.kind == "custom_voice":
        parts["speaker"] = rng.choice(list(config.speakers))
    if rng.random() < 0.5:
        parts["instruct_ids"] = draw.integers(0, 256, rng.randint(3, 20)).tolist()
    body = draw.integers(0, 256, rng.randint(1, 40)).tolist()
    task = TokenizedTask(
        [config.text_ids.im_start_token_id, config.text_ids.assistant_token_id, 198], body, **parts
    )
    prompt = build_prompt(config, task, voice, codes, text_first)
    return GenerationRequest(name, prompt, random_sampling(rng), rng.randrange(2**63), rng.randint(2, 12))


def random_sampling(rng: random.Random) -> SamplingParams:
    if rng.random() < 0.3:
        return SamplingParams(
            temperature=0.0, residual_temperature=0.0, repetition_penalty=rng.choice((1.0, 1.05, 1.5))
        )
    return SamplingParams(
        temperature=rng.choice((0.7, 0.9, 1.3)),
        top_k=rng.choice((0, 5, 50)),
        top_p=rng.choice((0.8, 1.0, 1.0)),
        repetition_penalty=rng.choice((1.0, 1.05, 1.3)),
        residual_temperature=rng.choice((0.0, 0.9, 1.1)),
        residual_top_k=rng.choice((0, 12, 50)),
        residual_top_p=rng.choice((0.9, 1.0, 1.0)),
    )


class Recorder:
    """A listener that keeps everything it hears, by request."""

    def __init__(self) -> None:
        self.chunks: dict[GenerationRequest, list[np.ndarray]] = {}
        self.codes: dict[GenerationRequest, np.ndarray] = {}
        self.finish: dict[GenerationRequest, str] = {}
        self.errors: dict[GenerationRequest, NightjarError] = {}

    def frames(self, request: GenerationRequest, codes: np.ndarray) -> None:
        self.chunks.setdefault(request, []).append(codes)

    def finished(self, request: GenerationRequest, codes: np.ndarray, finish: str) -> None:
        self.codes[request], self.finish[request] = codes, finish

    def failed(self, request: GenerationRequest, error: NightjarError) -> None:
        self.errors[request] = error


def make_core(
    model: Any, listener: Any, *, clock: Callable[[], float] = time.monotonic, **options: Any
) -> ListenedCore:
    """An engine on this model; small chunks, so that prompts take several."""
    sizes = EngineOptions(
        **{
            "slots": 8,
            "pages": 128,
            "page_size": 8,
            "max_context": MAX_CONTEXT,
            "prefill_chunk": 16,
            "reserve_frames": 4,
            **options,
        }
    )
    executor = EagerExecutor(model, sizes)
    return ListenedCore(executor, sizes, listener, clock)


def run_alone(model: Any, request: GenerationRequest) -> tuple[np.ndarray, str]:
    """Codes [frames, codebooks] and finish of a request that has the engine to itself."""
    heard = Recorder()
    core = make_core(model, heard, slots=1)
    core.add(request)
    turn_until(lambda: not core.busy, core.step)
    return heard.codes[request], heard.finish[request]

"""Fish Speech S2 end to end against a golden folder: its dual AR on vLLM, alone and in a running batch, and text to audio as a job asks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.fish_speech.language_model import as_extra
from pipelines.fish_speech.pipeline import FishPipeline, open_pipeline
from pipelines.request import Generation, Message, SynthesisRequest
from pipelines.vllm_engine.options import TokenRequest, Tokens, TokenSampling
from tests.support.golden_arrays import Array, flat
from tests.support.vllm_kit import Waiter
from tests.support.vllm_v2 import v2_runner

if TYPE_CHECKING:
    from tests.conformance.fish import Case, Golden, Item

SECONDS = 300
SLOTS = 12


class Opened:
    """The pipeline of a golden folder's checkpoint, opened at the first case; on a CPU on the runner that CUDA uses."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden
        self._stack = ExitStack()

    @cached_property
    def pipeline(self) -> FishPipeline:
        device = self.golden.device.type
        if device == "cpu":
            self._stack.enter_context(v2_runner())
        options: dict[str, Any] = {"device": device, "dtype": "float32", "codec_dtype": "float32", "slots": SLOTS}
        pipeline = open_pipeline(self.golden.checkpoint, **options, keep_unfinished=True, max_context=2048)
        self._stack.callback(pipeline.close)
        return pipeline

    def close(self) -> None:
        self._stack.close()


def cases(golden: Golden) -> Iterator[Case]:
    """A few sequences alone on vLLM, all greedy ones together, and from text and recordings to audio, whole and streamed."""
    opened = Opened(golden)
    greedy = [case for case in golden.cases.values() if case["kind"] == "greedy"]
    heard = [case for case in golden.cases.values() if case["kind"] == "end_to_end"]
    single = [case for case in greedy if len(case["ended_by_im_end"]) == 1]
    alone = sorted(single, key=lambda case: golden.arrays(case["file"])["columns_0"].shape[1])[:2]
    cloned = [case for case in single if case["references"]][:1]
    try:
        for case in alone + [case for case in cloned if case not in alone]:
            yield f"vllm alone {case['name']}", lambda case=case: _check(opened, case, _sequence(opened, case))
        yield "vllm together", lambda: _together(opened, single)
        yield "speech together", lambda: _speech(opened, greedy + heard)
        for case in heard[:1] + cloned + [case for case in greedy if case not in single][:1]:
            yield f"stream {case['name']}", lambda case=case: _stream(opened, case)
    finally:
        opened.close()


def _sequence(opened: Opened, case: Item) -> Future[Tokens]:
    config, prompt = opened.golden.config, opened.golden.arrays(case["file"])["prompt_0"]
    speech = (prompt[0] >= config.semantic.start) & (prompt[0] < config.semantic.stop)
    asked = case["sampling"]
    sampling = TokenSampling(asked["max_new_tokens"], asked["temperature"], asked["top_k"], asked["top_p"], stop_ids=(config.end,))
    waiter = Waiter()
    request = TokenRequest(case["name"], prompt[0].tolist(), sampling, as_extra(prompt[1:, speech].T))
    opened.pipeline.host.submit(request, waiter)
    return waiter.future


def _check(opened: Opened, case: Item, future: Future[Tokens]) -> None:
    from tests.conformance.fish import same

    tokens = future.result(SECONDS)
    assert tokens.codes is not None, "no codes came back"
    same(f"columns of {case['name']}", tokens.codes.T, opened.golden.arrays(case["file"])["columns_0"])
    assert (tokens.finish == "stop") is case["ended_by_im_end"][0], f"{case['name']} ended by {tokens.finish}"


def _together(opened: Opened, single: list[Item]) -> None:
    for case, future in [(case, _sequence(opened, case)) for case in single for _ in range(2)]:
        _check(opened, case, future)


def _wave(opened: Opened, case: Item) -> Array:
    """The golden audio of a case; where it has codes alone, the golden codes of all turns as our codec decodes them."""
    import torch

    arrays = opened.golden.arrays(case["file"])
    if "wav" in case["arrays"]:
        return flat(arrays["wav"])
    codes = np.concatenate([arrays[f"codes_{turn}"] for turn in range(len(case["ended_by_im_end"]))], axis=1)
    return opened.golden.codec.decoder.decode([torch.from_numpy(codes).T])[0].cpu().numpy()


def _speech(opened: Opened, greedy: list[Item]) -> None:
    for case in greedy:
        with _limits(opened, case):
            future = opened.pipeline.submit(_request(opened, case))
            speech = future.result(SECONDS) if "chunk_length" in case else None
        case["future"] = speech, future
    for case in greedy:
        speech, future = case.pop("future")
        speech = speech or future.result(SECONDS)
        assert speech.sample_rate == opened.golden.config.sample_rate, f"{speech.sample_rate} Hz"
        opened.golden.near(case["name"], speech.samples, _wave(opened, case), "wav")


def _stream(opened: Opened, case: Item) -> None:
    """A stream is the whole, to rounding, and its first chunk is the first frame."""
    with _limits(opened, case):
        chunks = list(opened.pipeline.stream(_request(opened, case)))
    assert chunks[-1].final, "the last chunk is not final"
    first, frame = len(chunks[0].samples), opened.golden.config.codec.samples_per_frame
    assert first == frame, f"the first chunk has {first} samples, expected {frame}"
    opened.golden.near(case["name"], np.concatenate([chunk.samples for chunk in chunks]), _wave(opened, case), "wav")


def _limits(opened: Opened, case: Item) -> ExitStack:
    """The golden turns' own limits in the place of the model's, while requests of the case are made."""
    from tests.conformance.fish import CHUNK_BYTES

    pipeline = opened.pipeline
    before, stack = pipeline.config, ExitStack()
    changed = {"max_new_tokens": case["sampling"]["max_new_tokens"], "chunk_bytes": case.get("chunk_length", CHUNK_BYTES)}
    pipeline.config = replace(before, sampling=replace(before.sampling, **changed))
    stack.callback(lambda: setattr(pipeline, "config", before))
    return stack


def _request(opened: Opened, case: Item) -> SynthesisRequest:
    """A case in the words of a dialogue."""
    messages = [Message("user", "audio", opened.golden.wav(reference["wav"])) for reference in case["references"]]
    words = "\n".join(reference["text"] for reference in case["references"]) or None
    generation = Generation(reference_text=words, temperature=0.0)
    return SynthesisRequest(case["name"], (*messages, Message("user", "text", case["text"])), generation)

"""Fish Speech S2 end to end against a golden folder, on one engine: its dual AR alone, in a running batch
and drawn, and text to audio.

What only our own engine can show is in `fish_native`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from pipelines.engine.turns import FIRST_FRAMES
from pipelines.fish_speech.pipeline import FishPipeline, open_pipeline
from pipelines.request import Generation, Message, SynthesisRequest, stream, submit
from pipelines.tokens import TokenPrompt, TokenRequest, Tokens, TokenSampling
from tests.conformance import fish_native
from tests.conformance.token_engines import SECONDS, staggered
from tests.support.golden_arrays import Array, flat
from tests.support.vllm_kit import Waiter
from tests.support.wide_heads import widened

if TYPE_CHECKING:
    from tests.conformance.fish import Case, Golden, Item

SLOTS = 12
EngineName = Literal["native", "vllm"]


class Opened:
    """The pipeline of a golden folder's checkpoint on one engine, opened at the first case; vLLM on a CPU
    on the runner that CUDA uses."""

    def __init__(self, golden: Golden, engine: EngineName) -> None:
        self.golden = golden
        self.engine: EngineName = engine
        self._stack = ExitStack()

    @cached_property
    def pipeline(self) -> FishPipeline:
        device = self.golden.device.type
        if device == "cpu" and self.engine == "vllm":
            from tests.support.vllm_v2 import v2_runner

            self._stack.enter_context(v2_runner())
        options: dict[str, Any] = {
            "device": device,
            "dtype": "float32",
            "codec_dtype": "float32",
            "slots": SLOTS,
        }
        folder = widened(self.golden.checkpoint) if self.engine == "vllm" else self.golden.checkpoint
        pipeline = open_pipeline(
            folder, engine=self.engine, **options, keep_unfinished=True, max_context=2048
        )
        self._stack.callback(pipeline.close)
        return pipeline

    def sequence(self, case: Item, waiter: Waiter | None = None) -> Future[Tokens]:
        """The first turn of a case."""
        config, prompt = self.golden.config, self.golden.arrays(case["file"])["prompt_0"]
        speech = (prompt[0] >= config.semantic.start) & (prompt[0] < config.semantic.stop)
        asked = case["sampling"]
        sampling = TokenSampling(
            asked["max_new_tokens"],
            asked["temperature"],
            asked["top_k"],
            asked["top_p"],
            stop_ids=(config.end,),
        )
        waiter = waiter or Waiter()
        self.pipeline.host.submit(
            TokenRequest(case["name"], TokenPrompt(prompt[0].tolist(), prompt[1:, speech].T), sampling),
            waiter,
        )
        return waiter.future

    def close(self) -> None:
        self._stack.close()


def cases(golden: Golden, engine: EngineName) -> Iterator[Case]:
    """Greedy sequences alone, together and one after the other into a running batch, and from text and
    recordings to audio, streamed too.

    vLLM shows a few of them alone, since each takes it seconds on a CPU.
    """
    opened = Opened(golden, engine)
    greedy = [case for case in golden.cases.values() if case["kind"] == "greedy"]
    heard = [case for case in golden.cases.values() if case["kind"] == "end_to_end"]
    single = [case for case in greedy if len(case["ended_by_im_end"]) == 1]
    shortest = sorted(single, key=lambda case: golden.arrays(case["file"])["columns_0"].shape[1])[:2]
    cloned = [case for case in single if case["references"]][:1]
    alone = single if engine == "native" else shortest + [case for case in cloned if case not in shortest]
    try:
        for case in alone:
            yield f"{engine} alone {case['name']}", partial(_alone, opened, case)
        yield f"{engine} together", partial(_together, opened, single)
        yield (
            f"{engine} staggered",
            partial(staggered, shortest + cloned, opened.sequence, partial(_check, opened)),
        )
        yield f"{engine} speech together", partial(_speech, opened, greedy + heard)
        for case in heard[:1] + cloned + [case for case in greedy if case not in single][:1]:
            yield f"{engine} stream {case['name']}", partial(_stream, opened, case)
        if engine == "native":
            # vLLM's frames are drawn by the same ops.
            yield from ((f"native {name}", check) for name, check in fish_native.cases(golden))
    finally:
        opened.close()


def _check(opened: Opened, case: Item, tokens: Tokens) -> None:
    """The columns up to the end, which vLLM hands over and our engine does not, and how the sequence
    ended."""
    from tests.conformance.fish import same

    wanted, end = opened.golden.arrays(case["file"])["columns_0"], opened.golden.config.end
    assert tokens.codes is not None, "no codes came back"
    made = tokens.codes[:-1] if tokens.ids[-1] == end else tokens.codes
    same(f"columns of {case['name']}", made.T, wanted[:, :-1] if wanted[0, -1] == end else wanted)
    assert (tokens.finish == "stop") is case["ended_by_im_end"][0], f"{case['name']} ended by {tokens.finish}"


def _alone(opened: Opened, case: Item) -> None:
    _check(opened, case, opened.sequence(case).result(SECONDS))


def _together(opened: Opened, single: list[Item]) -> None:
    for case, future in [(case, opened.sequence(case)) for case in single for _ in range(2)]:
        _check(opened, case, future.result(SECONDS))


def _wave(opened: Opened, case: Item) -> Array:
    """The golden audio of a case; where it has codes alone, the golden codes of all turns as our codec
    decodes them."""
    arrays = opened.golden.arrays(case["file"])
    if "wav" in case["arrays"]:
        return flat(arrays["wav"])
    codes = np.concatenate([arrays[f"codes_{turn}"] for turn in range(len(case["ended_by_im_end"]))], axis=1)
    return opened.golden.codec.decoder.decode([torch.from_numpy(codes).T])[0].cpu().numpy()


def _speech(opened: Opened, greedy: list[Item]) -> None:
    for case in greedy:
        with _limits(opened, case):
            future = submit(opened.pipeline, _request(opened, case))
            speech = future.result(SECONDS) if "chunk_length" in case else None
        case["future"] = speech, future
    for case in greedy:
        speech, future = case.pop("future")
        speech = speech or future.result(SECONDS)
        assert speech.sample_rate == opened.golden.config.sample_rate, f"{speech.sample_rate} Hz"
        assert speech.meta["engine"] == opened.engine, f"{case['name']} was made by {speech.meta['engine']}"
        opened.golden.near(case["name"], speech.samples, _wave(opened, case), "wav")


def _stream(opened: Opened, case: Item) -> None:
    """A stream is the whole, to rounding, and its first chunk is the first frame, or on our own engine a
    few where frames take long."""
    with _limits(opened, case):
        chunks = list(stream(opened.pipeline, _request(opened, case)))
    first, frame = len(chunks[0].samples), opened.golden.config.codec.samples_per_frame
    sizes = FIRST_FRAMES if opened.engine == "native" and not opened.pipeline.info.reproducible else (1,)
    assert first in [frame * size for size in sizes], (
        f"the first chunk has {first} samples, a frame has {frame}"
    )
    opened.golden.near(
        case["name"], np.concatenate([chunk.samples for chunk in chunks]), _wave(opened, case), "wav"
    )


def _limits(opened: Opened, case: Item) -> ExitStack:
    """The golden turns' own limits in the place of the model's, while requests of the case are made."""
    from tests.conformance.fish import CHUNK_BYTES

    pipeline = opened.pipeline
    before, stack = pipeline.config, ExitStack()
    changed = {
        "max_new_tokens": case["sampling"]["max_new_tokens"],
        "chunk_bytes": case.get("chunk_length", CHUNK_BYTES),
    }
    pipeline.config = replace(before, sampling=replace(before.sampling, **changed))
    stack.callback(lambda: setattr(pipeline, "config", before))
    return stack


def _request(opened: Opened, case: Item) -> SynthesisRequest:
    """A case in the words of a dialogue."""
    messages = [
        Message("user", "audio", opened.golden.wav(reference["wav"])) for reference in case["references"]
    ]
    words = "\n".join(reference["text"] for reference in case["references"]) or None
    generation = Generation(reference_text=words, temperature=0.0)
    return SynthesisRequest(case["name"], (*messages, Message("user", "text", case["text"])), generation)

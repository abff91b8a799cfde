"""Text to audio through the pipeline, as a job would ask for it, against the waveforms of a golden folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipelines.qwen3_tts.pipeline import PipelineOptions, Qwen3TTSPipeline
from pipelines.request import Generation, Message, SynthesisRequest, stream, submit
from tests.conformance.listing import Case
from tests.conformance.qwen3_folder import Golden, Row
from tests.support.golden_arrays import Array, largest_difference

WAVE_LIMIT = 1e-4


def cases(golden: Golden) -> Iterator[Case]:
    """Text, instruction, voice and reference file of every row to audio; all rows of a call share the
    running batch."""
    for case in golden.content["cases"]:
        yield f"speech {case['name']}", lambda case=case: _speak(golden, case)
        yield f"stream {case['name']}", lambda case=case: _stream(golden, case)


def _speak(golden: Golden, case: dict[str, Any]) -> None:
    pipeline = _open(golden, case)
    try:
        futures = [submit(pipeline, _request(pipeline, row)) for row in golden.rows(case)]
        for row, future in zip(golden.rows(case), futures):
            speech = future.result(timeout=300)
            assert speech.sample_rate == case["sample_rate"], f"{speech.sample_rate} Hz"
            _near(row.name, speech.samples, row.wave(pipeline.codec.decoder.samples_per_frame))
    finally:
        pipeline.close()


def _stream(golden: Golden, case: dict[str, Any]) -> None:
    pipeline = _open(golden, case)
    try:
        for row in golden.rows(case):
            chunks = list(stream(pipeline, _request(pipeline, row)))
            frame = pipeline.codec.decoder.samples_per_frame
            assert len(chunks[0].samples) == frame, "the first chunk is not one frame"
            _near(row.name, np.concatenate([chunk.samples for chunk in chunks]), row.wave(frame))
    finally:
        pipeline.close()


def _open(golden: Golden, case: dict[str, Any]) -> Qwen3TTSPipeline:
    folder = golden.checkpoint(case)
    context = golden.context(golden.config(case))
    sizes = PipelineOptions(
        device=golden.device,
        dtype="float32",
        slots=8,
        pages=-(-context // 16),
        page_size=16,
        max_context=context,
        text_first=case["non_streaming_mode"],
        keep_unfinished=True,
    )
    return Qwen3TTSPipeline(folder, sizes)


def _request(pipeline: Qwen3TTSPipeline, row: Row) -> SynthesisRequest:
    """A row in the words of a dialogue. What the model cannot take is left out, as the published wrapper
    drops it."""
    item = row.item
    instruct = item.get("instruct") or None
    messages = [Message("user", "text", item["text"])]
    if "ref_audio" in item:
        messages.insert(
            0, Message("user", "audio", (row.golden.folder / "refs" / item["ref_audio"]).read_bytes())
        )
    generation = Generation(
        voice=item.get("speaker"),
        language=item.get("language"),
        instruct=instruct if pipeline.capabilities.instruct else None,
        reference_text=row.reference_text,
        temperature=0.0,
        repetition_penalty=row.case["generation"].get("repetition_penalty"),
        max_seconds=(row.tokens - 1) * pipeline.codec.decoder.samples_per_frame / pipeline.sample_rate,
    )
    return SynthesisRequest(row.name, tuple(messages), generation)


def _near(name: str, got: Any, want: Array) -> None:
    difference = largest_difference(got, want, name)
    assert difference <= WAVE_LIMIT, f"{name}: largest difference {difference:.2e}, limit {WAVE_LIMIT:.0e}"

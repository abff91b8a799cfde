"""Requests for Qwen3-TTS that were prepared outside of the engine's process: the same speech, the same
refusals, without torch."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import soundfile

from pipelines.engine_process.client import EngineProcess
from pipelines.errors import ErrorCode, InputError
from pipelines.qwen3_tts.pipeline import open_pipeline
from pipelines.qwen3_tts.prompt import open_frontend
from pipelines.registry import open_frontend as registered_frontend
from pipelines.request import Done, Event, Generation, Message, SynthesisRequest, submit
from tests.support.golden_checkpoint import whole

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_tts"
TEXT = Message("user", "text", "One short line.")


def recording() -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(1).uniform(-0.3, 0.3, 24_000).astype(np.float32)
    soundfile.write(file, noise, 24_000, format="WAV")
    return file.getvalue()


def requests_for(kind: str) -> list[SynthesisRequest]:
    short = Generation(max_seconds=1.0)
    if kind == "base":
        messages = (Message("user", "audio", recording()), TEXT)
        settings = [short, Generation(max_seconds=1.0, reference_text="What was said.", language="english")]
        return [SynthesisRequest(f"r{number}", messages, one, number) for number, one in enumerate(settings)]
    spoken = (Message("system", "text", "A calm voice."), TEXT)
    return [
        SynthesisRequest("r0", (TEXT,), short, 3),
        SynthesisRequest("r1", spoken, Generation(max_seconds=1.0, temperature=0.0), 4),
    ]


@pytest.mark.parametrize("kind", ["base", "custom", "design"])
def test_prepared_requests_give_the_same_speech(kind: str) -> None:
    folder = whole(GOLDEN / f"checkpoint-{kind}")
    pipeline, frontend = open_pipeline(folder, keep_unfinished=True), open_frontend(folder)
    try:
        for request in requests_for(kind):
            if kind == "custom":
                voice = pipeline.capabilities.voices[0]
                request = SynthesisRequest(
                    request.request_id,
                    request.messages,
                    Generation(voice=voice, max_seconds=1.0),
                    request.seed,
                )
            whole_request = submit(pipeline, request).result(60)
            events: SimpleQueue[Event] = SimpleQueue()
            made = frontend.prepare(request)[0]
            # Both ways make the prompt in one function, so equal speech alone does not show it.
            assert (made.request_id, made.seed) == (request.request_id, request.seed)
            pipeline.start(made, events.put)
            done = events.get(timeout=60)
            assert isinstance(done, Done)
            prepared = done.speech
            np.testing.assert_array_equal(prepared.samples, whole_request.samples)
            assert (prepared.text, prepared.meta) == (whole_request.text, whole_request.meta)
    finally:
        pipeline.close()


def test_a_frontend_refuses_what_its_checkpoint_cannot_do() -> None:
    frontend = open_frontend(whole(GOLDEN / "checkpoint-design"))
    for messages, generation, code in (
        ((Message("user", "text", ""),), Generation(), ErrorCode.INPUT_EMPTY_TEXT),
        ((TEXT,), Generation(language="klingon"), ErrorCode.INPUT_UNKNOWN_LANGUAGE),
        ((Message("user", "text", "half \ud800"),), Generation(), ErrorCode.INPUT_UNPRONOUNCEABLE),
        ((TEXT,), Generation(temperature=-1.0), ErrorCode.INPUT_BAD_GENERATION),
    ):
        with pytest.raises(InputError) as refused:
            frontend.prepare(SynthesisRequest("r", messages, generation))
        assert refused.value.code is code


def test_a_frontend_needs_no_torch() -> None:
    command = f"from pipelines.registry import open_frontend; assert open_frontend({str(whole(GOLDEN / 'checkpoint-base'))!r})\n"
    command += "from pipelines.engine_process import client\nimport sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_models_without_one_have_none() -> None:
    assert registered_frontend("hibari") is None


def test_an_engine_process_gets_prepared_requests() -> None:
    folder = str(whole(GOLDEN / "checkpoint-design"))
    process = EngineProcess(folder, {"keep_unfinished": True})
    try:
        with pytest.raises(InputError, match="no user text"):
            submit(process, SynthesisRequest("r", (Message("system", "text", "A calm voice."),)))
        request = requests_for("design")[1]
        prepared = submit(process, request).result(60)
    finally:
        process.close()
    pipeline = open_pipeline(Path(folder), keep_unfinished=True)
    np.testing.assert_array_equal(submit(pipeline, request).result(60).samples, prepared.samples)
    pipeline.close()

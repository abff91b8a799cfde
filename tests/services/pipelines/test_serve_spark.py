"""SparkTTS on our own engine behind the server, in an engine process as `nightjar serve` opens it: streams
beside whole answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs.engine_process import engine_options, open_engine_process
from jobs.settings import load_settings
from pipelines.registry import describe
from tests.support.serving_kit import Running, b64, heard
from tests.support.vllm_kit import GOLDEN, checkpoint

TEXT = "Good morning, how are you today?"
#: In a WAV stream, before its samples.
HEADER_BYTES = 44


@pytest.fixture
def server() -> Iterator[Running]:
    settings = load_settings(engine={"kind": "native", "slots": 4}, serve={"streams": 2})
    model = str(checkpoint())
    card = describe(model)
    options = engine_options(settings, card)
    assert options == {"engine": "native", "slots": 4, "streams": 2}
    pipeline = open_engine_process(model, options, settings)
    with Running(pipeline, slots=8, waiting_room=8) as server:
        yield server


def test_streams_are_the_speech_of_whole_answers_in_any_company(server: Running) -> None:
    recording = b64((GOLDEN / "wavs/ref_a.wav").read_bytes())
    voices = [
        {"voice": "female/high/low"},
        {"voice": "male/very_low/very_high"},
        {"voice": "default", "reference_audio": recording},
    ]
    asked = [voice | {"temperature": 0.0, "seed": 1} for voice in voices]
    whole = [server.speak(TEXT, **one) for one in asked]
    assert [one.status_code for one in whole] == [200] * 3, whole[0].text
    lengths = [len(heard(one.content)[0]) for one in whole]
    assert len(set(lengths)) > 1
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(server.speak, TEXT, stream=True, **one) for one in asked]
        beside = [pool.submit(server.speak, TEXT, **one) for one in asked]
        assert [(len(one.result().content) - HEADER_BYTES) // 2 for one in streams] == lengths
        assert [one.result().content for one in beside] == [one.content for one in whole]
    server.until_idle()

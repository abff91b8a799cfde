"""Streams of a child process: no thread for each of them, an end at once, and errors that reach every
listener once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipelines.engine_process.client import EngineProcess
from pipelines.engine_process.server import CLONING_THREADS
from pipelines.errors import EngineCrashError, ErrorCode, InputError, ModelError, SynthesisError
from pipelines.request import AudioChunk, Done, Event, Failed, Message, SynthesisRequest, stream
from tests.support import streaming_fake
from tests.support.native_plugin import installed
from tests.unit.pipelines.test_engine_process import request, wait_for
from tests.unit.pipelines.test_streams import Heard


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    for name, value in installed(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    process = EngineProcess(streaming_fake.NAME)
    yield process
    process.close()


def threads_of(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def with_recording(text: str, request_id: str) -> SynthesisRequest:
    return SynthesisRequest(
        request_id, (Message("user", "audio", b"recording"), Message("user", "text", text))
    )


def test_chunks_are_those_of_the_pipeline(process: EngineProcess) -> None:
    heard = Heard()
    process.start(request("hello"), heard, stream=True)
    assert heard.over.wait(60)
    assert heard.samples == [n / 64 for n in (1, 2, 3, 4) for _ in range(320)]
    assert [type(one) for one in heard.outcomes] == [AudioChunk] * 4 + [Done]
    assert heard.threads == {"engine-host"}
    chunks = list(stream(process, request("hello")))
    assert np.concatenate([chunk.samples for chunk in chunks]).tolist() == heard.samples


def test_many_streams_take_no_threads_on_either_side(process: EngineProcess) -> None:
    first = Heard()
    process.start(request("[[chunks:1]]"), first, stream=True)
    assert first.over.wait(60)
    before = threads_of(os.getpid()), threads_of(process.pid)
    listeners = [Heard() for _ in range(200)]
    handles = [
        process.start(request("[[chunks:9]] [[seconds:600]]", f"r{n}"), one, stream=True)
        for n, one in enumerate(listeners)
    ]
    wait_for(lambda: process.stats().running == 200 and all(one.outcomes for one in listeners))
    # The few threads that start streams, and those that other tests leave, come and go.
    assert threads_of(os.getpid()) <= before[0] + 4
    assert threads_of(process.pid) <= before[1] + 4
    for one in handles:
        one.cancel()
    wait_for(lambda: process.stats().running == 0)
    assert all(len(one.outcomes) == 1 for one in listeners)


def test_a_stream_that_is_ended_leaves_the_childs_pipeline(process: EngineProcess) -> None:
    heard = Heard()
    handle = process.start(request("[[chunks:9]] [[seconds:600]]"), heard, stream=True)
    wait_for(lambda: process.stats().running == 1)
    handle.cancel()
    handle.cancel()
    wait_for(lambda: process.stats().running == 0)
    assert not heard.over.is_set()


def test_encoding_a_recording_stops_no_other_stream_and_may_be_ended(
    process: EngineProcess, tmp_path: Path
) -> None:
    encoded = tmp_path / "encoded"
    slow, gone, quick = Heard(), Heard(), Heard()
    process.start(with_recording(f"[[encode:{encoded}]]", "slow"), slow, stream=True)
    handle = process.start(
        with_recording(f"[[encode:{encoded}]] [[chunks:9]] [[seconds:600]]", "gone"), gone, stream=True
    )
    process.start(request("hello", "quick"), quick, stream=True)
    assert quick.over.wait(60)
    assert not slow.outcomes
    handle.cancel()
    encoded.touch()
    assert slow.over.wait(60)
    assert len(slow.outcomes) == 5
    last = Heard()
    process.start(request("hello", "last"), last, stream=True)
    assert last.over.wait(60)
    wait_for(lambda: process.stats().running == 0)
    assert not gone.outcomes


def test_what_waits_for_a_thread_and_is_ended_never_starts(process: EngineProcess, tmp_path: Path) -> None:
    encoded = tmp_path / "encoded"
    speaking = Heard()
    spoken = process.start(request("[[chunks:9]] [[seconds:600]]", "speaking"), speaking, stream=True)
    wait_for(lambda: process.stats().running == 1)
    busy = [Heard() for _ in range(CLONING_THREADS)]
    for number, one in enumerate(busy):
        process.start(with_recording(f"[[encode:{encoded}]]", f"busy{number}"), one, stream=True)
    gone = Heard()
    handle = process.start(with_recording("[[crash]]", "gone"), gone, stream=True)
    handle.cancel()
    # The child reads messages in order: once it has ended this one, it has read the end of that.
    spoken.cancel()
    wait_for(lambda: process.stats().running == 0)
    encoded.touch()
    assert all(one.over.wait(60) for one in busy)
    for _ in range(3):
        after = Heard()
        process.start(request("hello"), after, stream=True)
        assert after.over.wait(60)
        assert len(after.outcomes) == 5
    assert not gone.outcomes
    wait_for(lambda: not process.recordings)


def test_refusals_and_faults_are_the_one_error_of_a_stream(process: EngineProcess) -> None:
    refused, failed = Heard(), Heard()
    process.start(request("[[refuse:input.too_long]]"), refused, stream=True)
    process.start(request("[[fail:synth.nan]]"), failed, stream=True)
    for heard, kind, code in (
        (refused, InputError, ErrorCode.INPUT_TOO_LONG),
        (failed, SynthesisError, ErrorCode.SYNTH_NAN),
    ):
        assert heard.over.wait(60)
        (error,) = heard.errors
        assert isinstance(error, kind)
        assert error.code is code
        assert isinstance(heard.outcomes[-1], Failed)
    wait_for(lambda: process.stats().running == 0)


def test_a_listener_that_raises_stops_nobody_else(process: EngineProcess) -> None:
    called = threading.Event()

    def broken(_outcome: Event) -> None:
        called.set()
        raise ZeroDivisionError

    process.start(request("hello", "broken"), broken, stream=True)
    assert called.wait(60)
    heard = Heard()
    process.start(request("hello"), heard, stream=True)
    assert heard.over.wait(60)
    assert heard.samples


def test_an_engine_killed_under_a_hundred_streams_ends_each_with_one_error(process: EngineProcess) -> None:
    listeners = [Heard() for _ in range(100)]
    for number, one in enumerate(listeners):
        process.start(request("[[chunks:9]] [[seconds:600]]", f"r{number}"), one, stream=True)
    wait_for(lambda: process.stats().running == 100 and all(one.outcomes for one in listeners))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert all(one.over.wait(60) for one in listeners)
    for one in listeners:
        assert [type(outcome) for outcome in one.outcomes] == [AudioChunk, Failed]
        assert isinstance(one.errors[0], EngineCrashError)
    wait_for(lambda: process.stats().state == "broken")
    with pytest.raises(ModelError) as gone:
        process.start(request("after"), Heard(), stream=True)
    assert gone.value.code is ErrorCode.MODEL_UNREACHABLE

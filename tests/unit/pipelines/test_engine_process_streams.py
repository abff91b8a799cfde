"""Streams of a child process: no thread for each of them, an end at once, and errors that reach every listener once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipelines.engine_process.client import EngineProcess
from pipelines.errors import EngineCrashError, ErrorCode, InputError, ModelError, NightjarError, SynthesisError
from pipelines.request import AudioChunk, Message, SynthesisRequest
from pipelines.streams import start_stream
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
    return SynthesisRequest(request_id, (Message("user", "audio", b"recording"), Message("user", "text", text)))


def test_chunks_are_those_of_the_pipeline(process: EngineProcess) -> None:
    heard = Heard()
    start_stream(process, request("hello"), heard)
    assert heard.over.wait(60)
    assert heard.samples == [n / 64 for n in (1, 2, 3, 4) for _ in range(320)]
    assert [isinstance(one, AudioChunk) and one.final for one in heard.outcomes] == [False] * 4 + [True]
    assert heard.threads == {"engine-host"}
    chunks = list(process.stream(request("hello")))
    assert np.concatenate([chunk.samples for chunk in chunks]).tolist() == heard.samples


def test_many_streams_take_no_threads_on_either_side(process: EngineProcess) -> None:
    first = Heard()
    process.start_stream(request("[[chunks:1]]"), first)
    assert first.over.wait(60)
    before = threads_of(os.getpid()), threads_of(process.pid)
    listeners = [Heard() for _ in range(200)]
    ends = [process.start_stream(request("[[chunks:9]] [[seconds:600]]", f"r{n}"), one) for n, one in enumerate(listeners)]
    wait_for(lambda: process.stats().running == 200 and all(one.outcomes for one in listeners))
    # The few threads that start streams come as they are needed.
    assert threads_of(os.getpid()) <= before[0]
    assert threads_of(process.pid) <= before[1] + 4
    for end in ends:
        end()
    wait_for(lambda: process.stats().running == 0)
    assert all(len(one.outcomes) == 1 for one in listeners)


def test_a_stream_that_is_ended_leaves_the_childs_pipeline(process: EngineProcess) -> None:
    heard = Heard()
    end = process.start_stream(request("[[chunks:9]] [[seconds:600]]"), heard)
    wait_for(lambda: process.stats().running == 1)
    end()
    end()
    wait_for(lambda: process.stats().running == 0)
    process.abort("r")
    assert not heard.over.is_set()


def test_encoding_a_recording_stops_no_other_stream_and_may_be_ended(process: EngineProcess, tmp_path: Path) -> None:
    encoded = tmp_path / "encoded"
    slow, gone, quick = Heard(), Heard(), Heard()
    process.start_stream(with_recording(f"[[encode:{encoded}]]", "slow"), slow)
    end = process.start_stream(with_recording(f"[[encode:{encoded}]] [[chunks:9]] [[seconds:600]]", "gone"), gone)
    process.start_stream(request("hello", "quick"), quick)
    assert quick.over.wait(60)
    assert not slow.outcomes
    end()
    encoded.touch()
    assert slow.over.wait(60)
    assert len(slow.outcomes) == 5
    last = Heard()
    process.start_stream(request("hello", "last"), last)
    assert last.over.wait(60)
    wait_for(lambda: process.stats().running == 0)
    assert not gone.outcomes


def test_what_waits_for_a_thread_and_is_ended_never_starts(process: EngineProcess, tmp_path: Path) -> None:
    encoded = tmp_path / "encoded"
    speaking = Heard()
    process.start_stream(request("[[chunks:9]] [[seconds:600]]", "speaking"), speaking)
    wait_for(lambda: process.stats().running == 1)
    busy = [Heard() for _ in range(4)]
    for number, one in enumerate(busy):
        process.start_stream(with_recording(f"[[encode:{encoded}]]", f"busy{number}"), one)
    gone = Heard()
    end = process.start_stream(with_recording("[[crash]]", "gone"), gone)
    end()
    # The child reads messages in order: once it has done what an abort asks for, it has read the end.
    process.abort("speaking")
    wait_for(lambda: process.stats().running == 0)
    encoded.touch()
    assert all(one.over.wait(60) for one in busy)
    for _ in range(3):
        after = Heard()
        process.start_stream(request("hello"), after)
        assert after.over.wait(60)
        assert len(after.outcomes) == 5
    assert not gone.outcomes


def test_refusals_and_faults_are_the_one_error_of_a_stream(process: EngineProcess) -> None:
    refused, failed, aborted = Heard(), Heard(), Heard()
    process.start_stream(request("[[refuse:input.too_long]]"), refused)
    process.start_stream(request("[[fail:synth.nan]]"), failed)
    process.start_stream(request("[[chunks:9]] [[seconds:600]]", "other"), aborted)
    wait_for(lambda: process.stats().running == 1)
    process.abort("other")
    for heard, kind, code in (
        (refused, InputError, ErrorCode.INPUT_TOO_LONG),
        (failed, SynthesisError, ErrorCode.SYNTH_NAN),
        (aborted, SynthesisError, ErrorCode.SYNTH_ABORTED),
    ):
        assert heard.over.wait(60)
        (error,) = [one for one in heard.outcomes if isinstance(one, NightjarError)]
        assert isinstance(error, kind)
        assert error.code is code
        assert heard.outcomes[-1] is error
    wait_for(lambda: process.stats().running == 0)


def test_a_listener_that_raises_stops_nobody_else(process: EngineProcess) -> None:
    called = threading.Event()

    def broken(_outcome: AudioChunk | NightjarError) -> None:
        called.set()
        raise ZeroDivisionError

    process.start_stream(request("hello", "broken"), broken)
    assert called.wait(60)
    heard = Heard()
    process.start_stream(request("hello"), heard)
    assert heard.over.wait(60)
    assert heard.samples


def test_an_engine_killed_under_a_hundred_streams_ends_each_with_one_error(process: EngineProcess) -> None:
    listeners = [Heard() for _ in range(100)]
    for number, one in enumerate(listeners):
        process.start_stream(request("[[chunks:9]] [[seconds:600]]", f"r{number}"), one)
    wait_for(lambda: process.stats().running == 100 and all(one.outcomes for one in listeners))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert all(one.over.wait(60) for one in listeners)
    for one in listeners:
        assert [type(outcome) for outcome in one.outcomes] == [AudioChunk, EngineCrashError]
    wait_for(lambda: process.stats().state == "broken")
    with pytest.raises(ModelError) as gone:
        process.start_stream(request("after"), Heard())
    assert gone.value.code is ErrorCode.MODEL_UNREACHABLE

"""Recordings of voices on their way to the engine's process: they cross when the engine reads them, decoded, and
no thread waits for one that does not come."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import soundfile

from pipelines import ipc
from pipelines import recording as recordings
from pipelines.audio import encode
from pipelines.engine_process.client import EngineProcess
from pipelines.engine_process.messages import Answer
from pipelines.errors import EngineCrashError, ErrorCode, InputError, SynthesisError
from pipelines.recording import Reading, Recording, read_recording
from pipelines.request import Message, Speech, SynthesisRequest, stream, submit
from tests.support import reading_fake, streaming_fake
from tests.support.native_plugin import NAME
from tests.unit.pipelines.test_engine_process import Open, alive, error_of, open_process, request, wait_for

__all__ = ["open_process"]


def voice(number: int, seconds: float = 1.0) -> bytes:
    """A recording of its own."""
    noise = np.random.default_rng(number).normal(0, 0.1, int(44_100 * seconds))
    return encode(noise.astype(np.float32), 44_100, "wav")


def stereo() -> bytes:
    """A recording whose channels differ."""
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).normal(0, 0.1, (44_100, 2)), 44_100, format="WAV")
    return file.getvalue()


def cloned(*voices: bytes, text: str = "Hello.", request_id: str = "r") -> SynthesisRequest:
    audio = (Message("user", "audio", one) for one in voices)
    return SynthesisRequest(request_id, (*audio, Message("user", "text", text)))


def heard(*voices: bytes) -> str:
    """What the fake engine writes for these recordings."""
    read = (read_recording(one, Reading(reading_fake.RATE, 0, "VHQ", True))[0] for one in voices)
    return " ".join(map(reading_fake.heard, read))


def answers(process: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """The recordings that are sent to the child from now on."""
    child = process._child
    assert child is not None
    sent: list[Answer] = []
    send = child.channel.send

    def watched(message: object) -> None:
        if isinstance(message, Answer):
            sent.append(message)
        send(message)

    monkeypatch.setattr(child.channel, "send", watched)
    return sent


class Slow:
    """Recordings are decoded only after `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        monkeypatch.setattr(recordings, "read_recording", self._read)

    def _read(self, *given: Any, **options: Any) -> object:
        self.begun.set()
        assert self.go.wait(60)
        return read_recording(*given, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(monkeypatch)
    yield slow
    slow.go.set()


def test_a_recording_crosses_only_when_the_engine_reads_it(
    open_process: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = open_process(reading_fake.NAME)
    sent = answers(process, monkeypatch)
    one, two, three = voice(0), voice(1), stereo()
    for asked in [(one,), (bytes(bytearray(one)),), (two, one), (one, one), (), (two, three)]:
        assert submit(process, cloned(*asked)).result(60).text_out == heard(*asked)
    assert len(sent) == 3
    wait_for(lambda: not process.recordings)


def test_requests_with_recordings_are_prepared_at_once(
    open_process: Open, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an engine can encode their voices in a batch, while others go ahead."""
    wanted: list[object] = []
    process = open_process(reading_fake.NAME)
    monkeypatch.setattr(process.readers, "submit", lambda _, message, *given: wanted.append(message))
    futures = [submit(process, cloned(voice(number), request_id=f"r{number}")) for number in range(8)]
    wait_for(lambda: len(wanted) == 8)
    assert submit(process, request("quick")).result(60)
    assert not any(future.done() for future in futures)


@pytest.mark.parametrize("name", [NAME, streaming_fake.NAME])
def test_other_pipelines_get_the_bytes(open_process: Open, name: str) -> None:
    process = open_process(name)
    voices = os.urandom(1_000_000), b"recording"
    spoken = submit(process, cloned(*voices, text="[[hears]]")).result(60)
    assert spoken.text_out == " ".join(hashlib.sha256(one).hexdigest() for one in voices)
    if name == streaming_fake.NAME:
        assert list(stream(process, cloned(*voices)))


@pytest.mark.parametrize(
    "file", [b"no audio", voice(1, 0.1), encode(np.zeros(44_100, np.float32), 44_100, "wav")]
)
def test_a_recording_that_shows_no_voice_has_the_error_of_its_decoder(
    open_process: Open, file: bytes
) -> None:
    process = open_process(reading_fake.NAME)
    with pytest.raises(InputError) as expected:
        read_recording(file)
    error = error_of(submit(process, cloned(file)))
    assert isinstance(error, InputError)
    assert error.args == expected.value.args
    assert submit(process, cloned(voice(1))).result(60).text_out == heard(voice(1))


@pytest.mark.parametrize("reason", ["no memory", "Too many open files"])
def test_a_recording_that_cannot_be_sent_fails_its_request_alone(
    open_process: Open, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Samples cross in shared memory, which has a descriptor."""
    process = open_process(reading_fake.NAME)

    def full(_: object) -> int:
        raise OSError(reason)

    with monkeypatch.context() as patched:
        patched.setattr(ipc, "share", full)
        error = error_of(submit(process, cloned(voice(1, 6.0))), 30)
    assert isinstance(error, SynthesisError)
    assert error.code is ErrorCode.SYNTH_ENGINE
    assert reason in error.message
    assert submit(process, cloned(voice(1, 6.0))).result(60).text_out == heard(voice(1, 6.0))


def test_a_recording_that_cannot_be_received_fails_its_request_alone(open_process: Open) -> None:
    process = open_process(reading_fake.NAME)
    assert process.pid is not None
    assert submit(process, cloned(voice(0, 6.0))).result(60)
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), limits[1]))
    error = error_of(submit(process, cloned(voice(1, 6.0))))
    assert isinstance(error, SynthesisError)
    assert "too many open files" in error.message
    assert submit(process, request("quick")).result(60)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
    assert submit(process, cloned(voice(1, 6.0))).result(60).text_out == heard(voice(1, 6.0))


def test_recordings_leave_no_descriptor_open(open_process: Open) -> None:
    process = open_process(reading_fake.NAME)

    def descriptors(pid: int | None) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    assert submit(process, cloned(voice(0, 6.0))).result(60)
    before = descriptors(os.getpid()), descriptors(process.pid)
    for number in range(1, 5):
        assert submit(process, cloned(voice(number, 6.0))).result(60)
    assert isinstance(error_of(submit(process, cloned(b"no audio"))), InputError)
    wait_for(lambda: descriptors(os.getpid()) <= before[0] and descriptors(process.pid) <= before[1])


def test_a_request_that_cannot_be_sent_keeps_no_recording(open_process: Open) -> None:
    process = open_process(reading_fake.NAME)
    with pytest.raises(InputError):
        submit(process, cloned(voice(1), text="\ud800"))
    assert not process.recordings
    assert submit(process, cloned(voice(1))).result(60).text_out == heard(voice(1))


def test_who_shares_the_recording_of_a_cancelled_request_gets_it(open_process: Open, slow: Slow) -> None:
    process = open_process(reading_fake.NAME)
    handle = process.start(cloned(voice(1), request_id="gone"), lambda _: pytest.fail("it was cancelled"))
    assert slow.begun.wait(60)
    handle.cancel()
    assert process.recordings, "the child may still read it"
    other = submit(process, cloned(voice(1), request_id="other"))
    slow.go.set()
    assert other.result(60).text_out == heard(voice(1))
    wait_for(lambda: not process.recordings)


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_end_of_the_child_ends_what_waits_for_a_recording(
    open_process: Open, slow: Slow, end: str
) -> None:
    process = open_process(reading_fake.NAME)
    futures: list[Future[Speech]] = [submit(process, cloned(voice(number))) for number in range(8)]
    assert slow.begun.wait(60)
    assert process.pid is not None
    if end == "killed":
        os.kill(process.pid, signal.SIGKILL)
    else:
        process.close()
        assert not alive(process.pid)
    for future in futures:
        assert isinstance(error_of(future), EngineCrashError if end == "killed" else SynthesisError)
    slow.go.set()
    # The threads that decoded have ended.
    process.readers.shutdown(wait=True)
    assert not process.recordings


def test_a_recording_has_one_digest() -> None:
    made = Recording(b"recording")
    assert Recording.of(made) is made
    assert made.digest == Recording.of(b"recording").digest == hashlib.sha256(b"recording").hexdigest()

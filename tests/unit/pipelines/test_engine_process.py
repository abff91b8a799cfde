"""A pipeline in a child process: what it gives, how it refuses, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.engine_process import client, server
from pipelines.engine_process.client import MAX_PENDING, EngineProcess
from pipelines.engine_process.messages import Close, Import, ToChild
from pipelines.errors import (
    ConfigError,
    EngineCrashError,
    ErrorCode,
    InputError,
    ModelError,
    NightjarError,
    NoAudioError,
    SynthesisError,
)
from pipelines.ipc import Channel
from pipelines.request import (
    Event,
    Failed,
    Generation,
    Handle,
    Message,
    Speech,
    SynthesisRequest,
    stream,
    submit,
)
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.golden_checkpoint import whole
from tests.support.native_plugin import NAME, installed
from tests.unit.pipelines.test_ipc import room_for

CHECKPOINT = whole(Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-design")

Open = Callable[..., EngineProcess]


@pytest.fixture
def open_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    for name, value in installed(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    opened: list[EngineProcess] = []

    def open_one(model: str = NAME, **options: Any) -> EngineProcess:
        opened.append(EngineProcess(model, options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
        assert one.pid is not None
        assert not alive(one.pid)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One that no test of it ends or changes."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in installed(tmp_path_factory.mktemp("plugin")).items():
            patched.setenv(name, value)
        process = EngineProcess(NAME, {})
    yield process
    process.close()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def request(text: str, request_id: str = "r", seed: int = 1) -> SynthesisRequest:
    return SynthesisRequest(request_id, (Message("user", "text", text),), Generation(voice="sine"), seed)


def error_of(future: Future[Speech], seconds: float = 60.0) -> BaseException:
    error = future.exception(seconds)
    assert error is not None
    return error


def test_speech_is_that_of_the_pipeline(open_process: Open) -> None:
    process = open_process(slots=4, waiting_room=7)
    assert (process.name, process.sample_rate, process.capabilities.voices) == (NAME, SAMPLE_RATE, ("sine",))
    assert (process.info.slots, process.info.waiting_room) == (4, 7)
    for seed in range(5):
        speech = submit(process, request("[[says:more]] hello", seed=seed)).result(60)
        np.testing.assert_array_equal(speech.samples, sine("[[says:more]] hello", seed))
        assert (speech.sample_rate, speech.text, speech.text_out) == (
            SAMPLE_RATE,
            "[[says:more]] hello",
            "more",
        )
    assert len(submit(process, request("[[empty]]")).result(60).samples) == 0
    wait_for(lambda: process.stats().requests_done == 6)


def test_an_engine_that_runs_otherwise_than_when_it_was_opened_says_so(open_process: Open) -> None:
    process = open_process(slots=3)
    opened = process.info
    assert (opened.slots, opened.executor) == (3, "")
    submit(process, request("A kernel gave up. [[executor:graph]]")).result(60)
    wait_for(lambda: process.info != opened)
    assert process.info == replace(opened, executor="graph")


def test_an_idle_engine_sends_its_energy_once_a_second(open_process: Open) -> None:
    process = open_process(energy=True)
    submit(process, request("Some words.")).result(60)
    wait_for(lambda: process.stats().requests_done == 1)
    seen, end = {process.stats().joules}, time.monotonic() + 2.2
    while time.monotonic() < end:
        seen.add(process.stats().joules)
        time.sleep(0.01)
    assert 2 <= len(seen) <= 4
    # Other changes do not wait.
    for done in range(2, 12):
        submit(process, request("More words.")).result(60)
        wait_for(lambda done=done: process.stats().requests_done == done, 0.5)


def test_speech_that_cannot_be_received_fails_its_request_alone(open_process: Open, tmp_path: Path) -> None:
    process = open_process()
    long = "x" * 500
    for room, ends in ((0, False), (1, True)):
        future = submit(process, request(f"[[until:{tmp_path / str(room)}]] {long}"))
        with room_for(room):
            (tmp_path / str(room)).mkdir()
            if ends:
                assert len(future.result(60).samples)
            else:
                error = error_of(future)
                assert isinstance(error, SynthesisError)
                assert "too many open files" in error.message
    assert process.stats().state == "ready"


def test_errors_keep_class_code_message_and_advice(process: EngineProcess, open_process: Open) -> None:
    refused = error_of(submit(process, request("[[refuse:input.too_long]]")))
    assert isinstance(refused, InputError)
    assert (refused.code, refused.message) == (ErrorCode.INPUT_TOO_LONG, "The fake engine refuses this text.")
    failed = error_of(submit(process, request("[[fail:synth.no_eos]]")))
    assert isinstance(failed, SynthesisError)
    assert failed.code is ErrorCode.SYNTH_NO_EOS
    with pytest.raises(ModelError, match=r"config\.json is missing") as bad:
        open_process(str(Path(__file__).parent))
    assert bad.value.code is ErrorCode.MODEL_BAD_CHECKPOINT
    assert bad.value.advice
    with pytest.raises(ConfigError, match="Unknown option 'wrong'"):
        open_process(str(CHECKPOINT), wrong=1)


@pytest.mark.parametrize(
    "error",
    [
        InputError(ErrorCode.INPUT_TOO_LONG, "Long.", "Cut it."),
        NoAudioError("None.", "Again.", "text", {"frames": np.int64(3)}),  # pyright: ignore[reportArgumentType]
        EngineCrashError(ErrorCode.WORKER_CRASH, "Dead."),
        type("Special", (ModelError,), {})(ErrorCode.MODEL_UNKNOWN, "Unknown.", "Ask."),
    ],
)
def test_an_error_travels_whole(error: NightjarError) -> None:
    one, two = (Channel[Any](connection, Any) for connection in socket.socketpair())
    one.send([error])
    (arrived,) = two.receive()
    one.close()
    two.close()
    assert isinstance(error, type(arrived))
    assert type(arrived) is not NightjarError
    assert (arrived.code, str(arrived)) == (error.code, str(error))
    assert getattr(arrived, "meta", None) == getattr(error, "meta", None)


def test_a_library_that_fails_at_opening_is_named(open_process: Open) -> None:
    with pytest.raises(EngineCrashError, match="no memory for the weights"):
        open_process(broken=True)
    with pytest.raises(EngineCrashError, match="ended with status 9"):
        open_process(exit=9)


def test_a_text_that_is_no_unicode_is_refused(process: EngineProcess) -> None:
    with pytest.raises(InputError) as caught:
        submit(process, request("half \ud800"))
    assert caught.value.code is ErrorCode.INPUT_UNPRONOUNCEABLE
    assert submit(process, request("whole")).result(60).text == "whole"


def test_a_number_that_cannot_travel_is_refused_and_stops_nobody(process: EngineProcess) -> None:
    huge = SynthesisRequest(
        "r", (Message("user", "text", "hello"),), Generation(voice="sine", top_k=10**25), 1
    )
    with pytest.raises(InputError) as caught:
        submit(process, huge)
    assert caught.value.code is ErrorCode.INPUT_UNSUPPORTED
    assert submit(process, request("small")).result(60).text == "small"


def test_submit_blocks_while_the_engine_is_full(open_process: Open) -> None:
    room = 2 + 3 + MAX_PENDING
    process = open_process(slots=2, waiting_room=3)
    submitted: list[Handle] = []
    heard: list[Event] = []

    def feed() -> None:
        with suppress(SynthesisError):
            for number in range(room + 5):
                submitted.append(
                    process.start(request(f"[[slow:6000]] {number}", f"r{number}"), heard.append)
                )

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    wait_for(lambda: process.stats().running == 2 and process.stats().waiting == 3 and len(submitted) >= room)
    thread.join(0.2)
    assert len(submitted) == room
    # Neither a cancellation nor the end waits for room.
    for number in range(2):
        submitted[number].cancel()
    assert not heard
    wait_for(lambda: len(submitted) == room + 2)
    process.close()
    thread.join(60)
    assert [isinstance(one, Failed) and one.error.code for one in heard] == [ErrorCode.SYNTH_ABORTED] * room
    with pytest.raises(SynthesisError, match="closed"):
        submit(process, request("late"))


def test_a_killed_child_fails_what_it_had_and_takes_no_more(open_process: Open) -> None:
    process = open_process(slots=2, waiting_room=3)
    done = submit(process, request("before"))
    assert done.result(60)
    futures = [submit(process, request(f"[[slow:6000]] {number}", f"r{number}")) for number in range(4)]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    for future in futures:
        error = error_of(future)
        assert isinstance(error, EngineCrashError)
        assert error.code is ErrorCode.WORKER_CRASH
        assert "SIGKILL" in error.message
    wait_for(lambda: process.stats().state == "broken")
    with pytest.raises(ModelError) as gone:
        submit(process, request("after"))
    assert gone.value.code is ErrorCode.MODEL_UNREACHABLE


def test_who_waits_for_room_hears_of_the_end_last(open_process: Open) -> None:
    """A shard whose item may have killed the engine must not think that it was just away."""
    process = open_process(slots=1, waiting_room=1)
    heard: list[str] = []

    def hear(done: Future[Speech]) -> None:
        # Slow, so that who waits for room could be first.
        time.sleep(0.01)
        heard.append(type(done.exception()).__name__)

    def feed() -> None:
        try:
            for number in range(MAX_PENDING + 20):
                future = submit(process, request("[[slow:6000]]", f"r{number}"))
                future.add_done_callback(hear)
        except ModelError as error:
            heard.append(type(error).__name__)

    thread = threading.Thread(target=feed)
    thread.start()
    wait_for(lambda: process.stats().waiting == 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    thread.join(60)
    assert heard[-1] == "ModelError"
    assert set(heard[:-1]) == {"EngineCrashError"}


def test_an_engine_that_hangs_is_killed_by_close(open_process: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CLOSE_SECONDS", 0.5)
    process = open_process(slots=1, waiting_room=1)
    future = submit(process, request("[[hang]]"))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    process.close()
    assert not alive(process.pid)
    assert isinstance(error_of(future), SynthesisError)
    process.close()


_CLIENT = """
import os, sys, threading
from pipelines.engine_process.client import EngineProcess
from pipelines.request import submit
from tests.unit.pipelines.test_engine_process import request
process = EngineProcess(sys.argv[1], {"slots": 1})
future = submit(process, request("[[slow:6000]]"))
print(process.pid, flush=True)
threading.Event().wait()
"""


def test_the_child_ends_with_its_client(open_process: Open) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _CLIENT, NAME], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    # Not by what its own threads do.
    os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        # The kernel kills it at once; a planted fault shall not take a minute.
        wait_for(lambda: not alive(child), 20)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_of_the_terminal_are_not_the_childs(process: EngineProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    assert os.getpgid(process.pid) != os.getpgid(0)
    os.kill(process.pid, number)
    assert submit(process, request("still there")).result(60).text == "still there"


def test_nothing_is_left_of_samples_that_nobody_takes(open_process: Open) -> None:
    process = open_process(seconds=0.05, slots=64)
    before = len(os.listdir("/proc/self/fd"))
    heard: list[Event] = []
    for handle in [process.start(request("long " * 100, f"r{number}"), heard.append) for number in range(64)]:
        handle.cancel()
    assert submit(process, request("last")).result(60)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not heard


def test_a_checkpoint_speaks_and_streams_the_same_in_a_child(open_process: Open) -> None:
    from pipelines.registry import open_pipeline

    process = open_process(str(CHECKPOINT), slots=4)
    wanted = SynthesisRequest(
        "r", (Message("user", "text", "One short line."),), Generation(max_seconds=2.0), 5
    )
    here = open_pipeline(str(CHECKPOINT), keep_unfinished=True)
    there = open_process(str(CHECKPOINT), keep_unfinished=True)
    try:
        speech = submit(there, wanted).result(60)
        expected = submit(here, wanted).result(60)
        np.testing.assert_array_equal(speech.samples, expected.samples)
        assert (speech.text, speech.meta) == (expected.text, expected.meta)
        chunks = list(stream(there, wanted))
        np.testing.assert_array_equal(
            np.concatenate([chunk.samples for chunk in chunks]),
            np.concatenate([c.samples for c in stream(here, wanted)]),
        )
        with pytest.raises(InputError):
            list(stream(there, SynthesisRequest("r", (Message("user", "text", ""),))))
        chunks = iter(stream(there, wanted))
        next(chunks)
        chunks.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert list(chunks) == []
        wait_for(lambda: there.stats().running == 0)
    finally:
        here.close()
    assert process.capabilities == here.capabilities


def test_a_spare_process_opens_its_model_when_it_is_told_to() -> None:
    modules = ["pipelines.hibari.pipeline", "pipelines.no_such_module"]
    spare = EngineProcess("hibari", {"threads": 1}, modules=modules)
    try:
        spare.open()
        assert (spare.name, "pipelines.hibari.pipeline" in spare.modules) == ("hibari", True)
        assert "jobs" not in {name.partition(".")[0] for name in spare.modules}
    finally:
        spare.close()


def test_a_spare_process_reads_the_tokenizer_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    opened: list[str] = []
    monkeypatch.setattr(server, "open_frontend", opened.append)
    client_end = Channel[Any](ours, None)
    client_end.send(Import(["pipelines.no_such_module"], "its model"))
    client_end.send(Close())
    assert server.EngineServer(Channel(theirs, ToChild)).run() == 0
    assert opened == ["its model"]


def test_a_spare_process_ends_without_a_model() -> None:
    spare = EngineProcess("hibari", {"threads": 1}, modules=["pipelines.hibari.pipeline"])
    wait_for(lambda: spare.pid is not None)
    spare.close()
    assert spare.stats().state == "broken"
    with pytest.raises(NightjarError):
        spare.open()

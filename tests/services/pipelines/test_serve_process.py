"""`nightjar serve` as a process: where it listens, its keys, its signals and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from jobs.cli import main
from jobs.engine_process import engine_options
from jobs.settings import load_settings
from pipelines.registry import FAMILIES, PUBLISHED, describe
from tests.support.serving_kit import PATIENCE_SECONDS, heard, scraped

#: Text of about half a minute of speech, which takes the voice a while.
LONG = "The birch canoe slid on the smooth planks. " * 12
#: None of the server's own times ends what these tests hold.
PATIENT = {"SPEECH_SERVE__DRAIN_SECONDS": "3000"}


@contextmanager
def serving(
    folder: Path, *words: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A server of the embedded voice that is ready, its address and its log."""
    command = [sys.executable, "-m", "jobs", "serve", "--model", "hibari", "--port", "0", "--json", *words]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, stderr=file, text=True
        )
    try:
        assert process.stdout is not None
        view = json.loads(process.stdout.readline())
        assert (view["schema"], view["model"]) == (
            "nightjar.serve/1",
            "voice" if "--name" in words else "hibari",
        )
        until(
            lambda: (
                httpx2.get(view["url"] + "/health", timeout=PATIENCE_SECONDS, trust_env=False).status_code
                == 200
            )
        )
        yield process, view["url"], log
    finally:
        process.kill()
        process.wait()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def speak(url: str, text: str, model: str = "hibari", **headers: str) -> httpx2.Response:
    return httpx2.post(
        url + "/v1/audio/speech",
        json={"model": model, "input": text},
        headers=headers,
        timeout=PATIENCE_SECONDS,
        trust_env=False,
    )


def metrics(url: str, **headers: str) -> dict[str, float]:
    return scraped(
        httpx2.get(f"{url}/metrics", headers=headers, timeout=PATIENCE_SECONDS, trust_env=False).text
    )


def reached_the_engine(url: str, requests: int = 0, **headers: str) -> bool:
    """Whether more requests than these have come to the engine, be they over or not."""
    found = metrics(url, **headers)
    return found["speech_engine_batch_size"] + found["speech_engine_requests_total"] > requests


@contextmanager
def half_a_request(url: str, text: str, **headers: str) -> Iterator[tuple[socket.socket, bytes]]:
    """A request that the server is in the middle of until its other half is sent: its connection, and that
    half."""
    address = urlsplit(url)
    data = json.dumps({"model": "hibari", "input": text}).encode()
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += (
        "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        + f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(head.encode() + data[:20])
        yield connection, data[20:]


def is_gone(url: str) -> bool:
    """Whether a server takes no more connections."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS).close()
    except ConnectionError:
        return True
    return False


def test_a_server_with_keys_drains_and_leaves_no_key_anywhere(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("second-key\n\nthird-key\n")
    keys = {"SPEECH_SERVE__API_KEY": "first-key", "SPEECH_SERVE__API_KEY_FILE": str(tmp_path / "keys")}
    key = {"authorization": "Bearer first-key"}
    with serving(tmp_path, "--name", "voice", "--name", "hibari", **keys, **PATIENT) as (process, url, log):
        assert speak(url, "No.").status_code == 401
        for one in ("first-key", "second-key", "third-key"):
            answer = speak(url, "Yes.", model="voice", authorization=f"Bearer {one}")
            assert answer.status_code == 200, answer.text
        with half_a_request(url, "Good evening.", **key) as (connection, rest):
            assert metrics(url, **key)["speech_engine_slots"] >= 1
            held: list[httpx2.Response] = []
            thread = threading.Thread(target=lambda: held.append(speak(url, LONG, **key)))
            thread.start()
            until(lambda: reached_the_engine(url, 3, **key))
            process.send_signal(signal.SIGTERM)
            until(lambda: is_gone(url))
            connection.sendall(rest)
            with connection.makefile("rb") as answered:
                head, _, late = answered.read().partition(b"\r\n\r\n")
        thread.join(PATIENCE_SECONDS)
        assert held[0].status_code == 200
        assert len(heard(held[0].content)[0]) / 24_000 > 10
        # A request that is not whole has no slot, and a server that stops gives none.
        assert (head.split()[1], b"retry-after" in head.lower()) == (b"503", True), late
        assert process.wait(PATIENCE_SECONDS) == 0
        said = log.read_text()
        command = " ".join(str(part) for part in process.args)
    assert "/v1/audio/speech 200" in said
    assert "engine ready: hibari on cpu, float32, " in said
    assert "-key" not in said.replace("invalid_api-key", "") + command


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with (
        serving(tmp_path, **PATIENT) as (process, url, _),
        half_a_request(url, LONG) as (whole, rest),
        half_a_request(url, LONG),
    ):
        whole.sendall(rest)
        until(lambda: reached_the_engine(url))
        process.send_signal(signal.SIGINT)
        until(lambda: is_gone(url))
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0


def test_what_keeps_a_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")

    def start(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["serve", "--json", *words])
        out, err = capfd.readouterr()
        assert out == ""
        return code, json.loads(err)["error"]["code"] if err.startswith("{") else err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert start("--model", "hibari", "--port", port) == (4, "config.invalid")
    assert start("--model", "hibari", "--address", "0.0.0.0") == (4, "config.invalid")
    assert start("--model", "hibari", "--address", "nowhere.invalid") == (4, "config.invalid")
    assert start("--model", "hibary") == (4, "model.unknown")
    assert start("--model", str(tmp_path)) == (4, "model.bad_checkpoint")
    for name, value in (
        ("API_KEY", "é"),
        ("API_KEY", ""),
        ("API_KEY_FILE", "missing"),
        ("API_KEY_FILE", "empty"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"SPEECH_SERVE__{name}", value)
            assert start("--model", "hibari") == (4, "config.invalid"), (name, value)
    assert start()[0] == 2


def test_a_model_is_opened_as_a_worker_opens_it_but_keeps_what_reached_its_limit() -> None:
    settings = load_settings(worker={"threads": 3}, engine={"slots": 5, "executor": "eager"})
    voice = describe("hibari")
    assert engine_options(settings, voice) == {"threads": 3}
    talker = replace(voice, engine="vllm", capabilities=replace(voice.capabilities, text_out=True))
    assert engine_options(settings, talker) == {"keep_unfinished": True, "slots": 5, "eager": True}
    assert engine_options(settings, replace(voice, engine="native")) == {"slots": 5, "executor": "eager"}


def test_a_model_that_can_is_prepared_for_streams() -> None:
    from pipelines.qwen3_tts.pipeline import PipelineOptions

    assert {family.name for family in FAMILIES if "streams" in family.options} == {
        "fish_speech",
        "qwen3_tts",
        "spark_tts",
    }
    assert "streams" in {one.name for one in fields(PipelineOptions)}
    card = PUBLISHED["qwen3-tts-0.6b-base"][2]
    assert engine_options(load_settings(), card)["streams"] in (8, 128)
    assert engine_options(load_settings(serve={"streams": 32}), card)["streams"] == 32
    assert "text_first" not in engine_options(load_settings(serve={"text_in": False}), card)
    assert engine_options(load_settings(serve={"text_in": True}), card)["text_first"] is False
    assert "streams" not in engine_options(load_settings(serve={"streams": 32}), describe("hibari"))


def test_other_commands_pay_for_no_server() -> None:
    code = "import sys; from jobs.cli import main; main([sys.argv[1], '--help']); sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert not {"fastapi", "uvicorn", "torch", "soundfile"} & set(done.stderr.split())

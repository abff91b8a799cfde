"""SpeechLM as a pipeline on vLLM's V2 runner, and a job over a checkpoint folder: modes together, streams,
refusals, ESPnet out."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.vllm_kit import Waiter, paused_core
from tests.support.vllm_v2 import forked_environment, require_v2, v2_runner

require_v2()

from pipelines.errors import ConfigError, ErrorCode, InputError, NoAudioError, SynthesisError  # noqa: E402
from pipelines.registry import describe, open_decoder, open_pipeline  # noqa: E402
from pipelines.request import (  # noqa: E402
    AudioChunk,
    Done,
    Event,
    Generation,
    Message,
    Pipeline,
    Speech,
    SynthesisRequest,
    stream,
    submit,
)
from pipelines.tokens import TokenPrompt, TokenRequest, TokenSampling  # noqa: E402
from tests.support.serving_kit import Running, error_of  # noqa: E402
from tests.support.speechlm_checkpoint import GOLDEN, named  # noqa: E402
from tests.support.speechlm_clients import check_every_mode  # noqa: E402
from tests.support.wide_heads import widened  # noqa: E402

CHECKPOINT = str(widened(GOLDEN / "checkpoint"))
SECONDS = 300
CASES = {case["id"]: case for case in json.loads((GOLDEN / "cases.json").read_text())["cases"]}
DIALOGUES = {
    line["example_id"]: line["messages"]
    for line in map(json.loads, (GOLDEN / "dialogues.jsonl").read_text().splitlines())
}


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    """Of the checkpoint under the name that published ones have; the tests below open it under the other
    one."""
    with v2_runner():
        pipeline = open_pipeline(
            str(widened(named("bagpiper"))),
            max_context=256,
            slots=24,
            keep_unfinished=True,
            share_prefixes=True,
        )
        yield pipeline
        pipeline.close()


def golden(name: str, **changes: object) -> SynthesisRequest:
    """A golden case in the words of a dialogue."""
    case = CASES[name]
    messages = [Message(*message) for message in DIALOGUES[case["example_id"]]]
    heard = [
        Message("user", "audio", (GOLDEN / str(one.content)).read_bytes())
        if (one.role, one.modality) == ("user", "audio")
        else one
        for one in messages
    ]
    settings = {
        "mode": case["mode"],
        "cfg": case["cfg"],
        "max_tokens": case["max_tokens"],
        "temperature": 0.0,
    } | changes
    return SynthesisRequest(name, tuple(heard), Generation(**settings))  # pyright: ignore[reportArgumentType]


def check(name: str, speech: Speech) -> None:
    expected = CASES[name]["expected"]
    assert speech.text_out == expected["text"]
    assert len(speech.samples) == expected["n_samples"]
    assert speech.meta["tokens"] == expected["completion_tokens"]
    assert speech.meta["finish"] == expected["finish_reason"]
    assert speech.meta["prompt_positions"] == expected["prompt_tokens"]
    arrays = np.load(GOLDEN / "arrays.npz")
    if f"{name}/waveform" in arrays.files:
        assert np.abs(speech.samples - arrays[f"{name}/waveform"]).max() < 1e-4


def test_all_modes_together_and_again_with_shared_prefixes(pipeline: Pipeline) -> None:
    names = [
        "a0",
        "t_eot",
        "a0_cfg30",
        "u_a",
        "u_b",
        "max_rows8",
        "ua_cfg15",
        "a2",
        "a1",
        "t_multi",
        "a0_cfg10",
        "eot_audio_cfg",
    ]
    for turn in (names, names[::-1]):
        futures = [(name, submit(pipeline, golden(name))) for name in turn]
        for name, future in futures:
            check(name, future.result(SECONDS))
    stats = pipeline.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_codes_decode_later_to_the_samples_of_the_pipeline(pipeline: Pipeline) -> None:
    request = dataclasses.replace(golden("a0"), output="both")
    speech = submit(pipeline, request).result(SECONDS)
    check("a0", speech)
    alone = submit(pipeline, dataclasses.replace(request, output="codes")).result(SECONDS)
    assert speech.codes is not None
    np.testing.assert_array_equal(alone.codes, speech.codes)
    assert (len(alone.samples), alone.sample_count) == (0, len(speech.samples))
    found: queue.SimpleQueue[object] = queue.SimpleQueue()
    with closing(open_decoder(CHECKPOINT)) as decoder:
        decoder.decode(speech.codes, None, found.put)
        np.testing.assert_array_equal(found.get(timeout=SECONDS), speech.samples)
    codec = describe(CHECKPOINT).codec
    assert codec is not None
    assert codec().sample_rate / codec().frame_rate == speech.frame_samples


def streamed(pipeline: Pipeline, request: SynthesisRequest) -> tuple[list[AudioChunk], Speech]:
    """The chunks of a stream, and the speech that ends it with their samples."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    pipeline.start(request, events.put, stream=True)
    chunks: list[AudioChunk] = []
    while isinstance(event := events.get(timeout=SECONDS), AudioChunk):
        chunks.append(event)
    assert isinstance(event, Done), event
    return chunks, dataclasses.replace(
        event.speech, samples=np.concatenate([chunk.samples for chunk in chunks])
    )


def test_text_comes_while_it_is_written_and_the_audio_behind_it(pipeline: Pipeline) -> None:
    deadline = time.monotonic() + SECONDS
    for name in ("t_eot", "a0", "a0_cfg30"):
        chunks, speech = streamed(pipeline, golden(name))
        while sum(1 for chunk in chunks if chunk.text) < 2:
            # What is written while nobody could look comes in one piece.
            assert time.monotonic() < deadline, chunks
            chunks, speech = streamed(pipeline, golden(name))
        assert "".join(chunk.text for chunk in chunks) == CASES[name]["expected"]["text"]
        assert sum(len(chunk.samples) for chunk in chunks) == CASES[name]["expected"]["n_samples"]
        check(name, speech)


@pytest.mark.parametrize("name", ["eos_text", "max_rows5", "a1_cfg15", "max_in_text", "max_at_assistant"])
def test_text_without_audio_is_an_error_that_keeps_the_text(pipeline: Pipeline, name: str) -> None:
    with pytest.raises(NoAudioError) as caught:
        submit(pipeline, golden(name)).result(SECONDS)
    assert caught.value.code is ErrorCode.SYNTH_NO_AUDIO
    expected, meta = CASES[name]["expected"], caught.value.meta
    assert caught.value.text_out == expected["text"]
    said = (meta["finish"], meta["tokens"], meta["prompt_positions"])
    assert said == tuple(expected[key] for key in ("finish_reason", "completion_tokens", "prompt_tokens"))


def test_max_seconds_is_a_limit_of_the_audio(pipeline: Pipeline) -> None:
    for name in ("a0", "a2_cfg15"):
        speech = submit(pipeline, golden(name, max_seconds=0.1)).result(SECONDS)
        assert (len(speech.samples), speech.meta["finish"]) == (5 * 320, "length")


def test_refusals(pipeline: Pipeline) -> None:
    long = b"RIFF" + b"\0" * 40
    user = Message("user", "text", "Hello.")
    for messages, settings, code in (
        ((user,), {"cfg": -1.0}, ErrorCode.INPUT_BAD_GENERATION),
        ((user,), {"repetition_penalty": 1.2}, ErrorCode.INPUT_UNSUPPORTED),
        ((user,), {"voice": "anna"}, ErrorCode.INPUT_UNKNOWN_VOICE),
        ((Message("user", "text", "word " * 400),), {}, ErrorCode.INPUT_TOO_LONG),
        ((Message("user", "audio", long), user), {"mode": "text_only"}, ErrorCode.INPUT_AUDIO_UNREADABLE),
        (
            (user, Message("assistant", "audio", "x.wav")),
            {"mode": "text_only"},
            ErrorCode.INPUT_AUDIO_MISSING,
        ),
    ):
        with pytest.raises(InputError) as caught:
            submit(pipeline, SynthesisRequest("bad", messages, Generation(**settings)))  # pyright: ignore[reportArgumentType]
        assert caught.value.code is code, settings


def test_extreme_settings_harm_nobody(pipeline: Pipeline) -> None:
    settings = (
        {"temperature": 1e300, "cfg": 1e300},
        {"temperature": 1e-300},
        {"top_k": 1 << 63, "audio_top_k": 10**30, "temperature": 1.0},
    )
    extreme = [submit(pipeline, golden("a0_cfg30", max_tokens=40, **each)) for each in settings]
    neighbour = submit(pipeline, golden("eot_audio_cfg"))
    for future in extreme:
        assert (
            not isinstance(error := future.exception(SECONDS), SynthesisError)
            or error.code is ErrorCode.SYNTH_NO_AUDIO
        )
    check("eot_audio_cfg", neighbour.result(SECONDS))
    assert pipeline.stats().state == "ready"


def test_a_sequence_without_settings_harms_nobody(pipeline: Pipeline) -> None:
    """On a GPU vLLM warms its kernels up with sequences of its own, which say nothing of phases."""
    plain = Waiter()
    request = TokenRequest("plain", TokenPrompt([5, 6, 7]), TokenSampling(4, ignore_end=True))
    pipeline.host.submit(request, plain)  # pyright: ignore[reportAttributeAccessIssue]
    assert len(plain.future.result(SECONDS).ids) == 4
    check("a0", submit(pipeline, golden("a0")).result(SECONDS))


def test_an_abort_ends_text_and_pair(pipeline: Pipeline) -> None:
    chunks = stream(pipeline, golden("a3_cfg15"))
    assert next(chunks).text
    with paused_core(os.getpid()):
        heard: list[Event] = []
        handles = [pipeline.start(golden(name), heard.append) for name in ("a2_cfg30", "a2_cfg30", "a3")]
        chunks.close()  # pyright: ignore[reportAttributeAccessIssue]
        for handle in handles:
            handle.cancel()
    check("eot_audio_cfg", submit(pipeline, golden("eot_audio_cfg")).result(SECONDS))
    assert not heard


def test_the_old_runner_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ConfigError, match="V2 model runner"):
        open_pipeline(CHECKPOINT, max_context=128)


def jobs(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command, whose jobs are in `home`."""
    settings = os.environ | forked_environment() | {"SPEECH_HOME": str(home)}
    command = [sys.executable, "-m", "jobs", *arguments]
    return subprocess.run(
        command, cwd=GOLDEN, env=settings, capture_output=True, text=True, timeout=400, check=False
    )


def input_of(folder: Path, wanted: dict[str, dict[str, Any]]) -> Path:
    """An input of golden cases, each with its generation settings."""
    lines = [
        {
            "example_id": name,
            "messages": DIALOGUES[CASES[name]["example_id"]],
            "generation": {"max_tokens": CASES[name]["max_tokens"], **generation},
        }
        for name, generation in wanted.items()
    ]
    source = folder / "input.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copytree(GOLDEN / "wavs", folder / "wavs")
    return source


def test_a_job_stores_text_and_audio_and_exports_dialogues(tmp_path: Path) -> None:
    home = tmp_path / "home"
    source = input_of(
        tmp_path,
        {
            "a0": {},
            "a0_cfg30": {"cfg": 3.0},
            "eos_text": {},
            "t_eot": {"mode": "text_only", "max_tokens": 60},
            "u_a": {"mode": "text_only"},
        },
    )
    done = jobs(home, "run", str(source), "--model", CHECKPOINT, "--set", "temperature=0", "--json")
    final = json.loads(done.stdout.splitlines()[-1])
    assert (final["items"]["done"], final["items"]["failed"]) == (4, 1), (
        done.stdout[-3000:] + done.stderr[-3000:]
    )
    out = tmp_path / "espnet.jsonl"
    exported = jobs(home, "export", final["job"], "--format", "espnet", "--to", str(out))
    assert exported.returncode == 0, exported.stderr
    found = {line["example_id"]: line["messages"] for line in map(json.loads, out.read_text().splitlines())}
    assert sorted(found) == ["a0", "a0_cfg30", "t_eot", "u_a"]
    for name, messages in found.items():
        answer = messages[-2:]
        assert ["assistant", "text", CASES[name]["expected"]["text"]] in answer
        assert any(message[1] == "audio" for message in answer) is (CASES[name]["mode"] == "text_audio")


def test_a_job_of_codes_is_decoded_later_to_the_samples_of_a_job_of_audio(tmp_path: Path) -> None:
    home = tmp_path / "home"
    source = input_of(tmp_path, {"a0": {}, "a0_cfg30": {"cfg": 3.0}})
    sounds = dict[str, dict[str, bytes]]()
    for output in ("both", "codes"):
        out = tmp_path / output
        done = jobs(
            home, "run", str(source), "--model", CHECKPOINT, "--set", "temperature=0", "--output", output, "--out", str(out), "--json"
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        if output == "codes":
            assert not [*out.rglob("*.wav")]
            job = json.loads(done.stdout.splitlines()[-1])["job"]
            made = jobs(home, "decode", job, "--out", str(out), "--to", str(tmp_path / "decoded"))
            assert made.returncode == 0, made.stderr
            out = tmp_path / "decoded"
        sounds[output] = {path.name: path.read_bytes() for path in out.rglob("*.wav")}
    assert len(sounds["both"]) == 2
    assert sounds["codes"] == sounds["both"]


def test_a_server_gives_the_golden_answers_to_both_clients(pipeline: Pipeline) -> None:
    with Running(pipeline, slots=24, waiting_room=8) as server:
        check_every_mode(server)
        bell = {"role": "user", "content": "A bell."}
        for fields, param in (
            ({"vllm_xargs": {"mode": "text_audio", "cfg": -1}}, "vllm_xargs.cfg"),
            ({"repetition_penalty": 1.2}, "repetition_penalty"),
            ({"audio": {"voice": "alloy"}}, "audio.voice"),
        ):
            answer = server.chat(bell, **fields)
            assert (answer.status_code, error_of(answer)["param"]) == (400, param)

"""A job on a GPU: the engine alone, a job into a folder and one through services, their rates, and the
planted lengths of their speech."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import job_gpu, planted
from benchmarks.qwen3_load import Load
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Done, Event, Failed, Speech


def test_a_jobs_rate_leaves_out_the_ramp_and_the_tail() -> None:
    # Two slots: 4 items are the ramp and the last 3 the tail. Commits of one item a second, of 2 s of audio,
    # but for a slow start.
    commits = [job_gpu.Commit(10.0, 3, 6.0)] + [job_gpu.Commit(20.0 + at, 1, 2.0) for at in range(10)]
    found = job_gpu.steady(commits, 2)
    assert (found["since"], found["until"]) == (20.0, 26.0)
    assert (found["audio_s_per_s"], found["items_per_s"]) == (2.0, 1.0)
    assert job_gpu.steady(commits[:2], 2) == {}
    assert job_gpu.steady([], 2) == {}


def test_planted_texts_say_their_frames_and_are_as_long_as_their_speech() -> None:
    frames = job_gpu.lengths(Load(3, 15, 1), 200)
    texts = [job_gpu.text_of(count, number) for number, count in enumerate(frames)]
    assert [planted.planted_frames(text) for text in texts] == frames
    characters = sum(len(text) for text in texts) / (sum(frames) / 12.5)
    assert 14 < characters < 16


def test_a_job_runs_beside_the_engine_into_a_folder_and_through_services(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    asked = [
        "--device",
        "cpu",
        "--tiny",
        "--items",
        "40",
        "--paths",
        "folder",
        "s3",
        "--folder",
        str(tmp_path),
        "--json",
        str(path),
    ]
    assert job_gpu.main(asked) == 0
    engine, *jobs = json.loads(path.read_text())["rows"]
    assert engine["engine_audio_s_per_s"] > 0
    assert engine["wrong_lengths"] == 0
    assert [job["path"] for job in jobs] == ["folder", "s3"]
    for job in jobs:
        assert (job["failed"], job["repeated_draws"]) == (0, 0)
        assert job["made_audio_s"] == pytest.approx(job["asked_audio_s"])
        assert job["first_audio_s"] < job["command_s"]


def test_planted_audio_is_as_long_as_what_it_replaces() -> None:
    heard: list[Event] = []
    tell = planted.with_planted_audio(heard.append)
    tell(Done(Speech(np.zeros(9600, np.float32), 24_000, "5 words", meta={"frames": 5})))
    (event,) = heard
    assert isinstance(event, Done)
    speech = event.speech
    assert (len(speech.samples), speech.text, speech.meta) == (9600, "5 words", {"frames": 5})
    assert 0.05 < np.abs(speech.samples).max() < 0.99
    failure = Failed(SynthesisError(ErrorCode.SYNTH_ABORTED, "closed"))
    tell(failure)
    assert heard[1] is failure


def test_table_of_jobs_leaves_out_what_a_row_has_not() -> None:
    rows = [
        {"path": "engine", "size": "0b6", "gpus": 2, "slots": 512, "engine_audio_s_per_s": 4800.0},
        {
            "path": "folder",
            "size": "0b6",
            "gpus": 2,
            "slots": 512,
            "qa": "off",
            "start": "warm",
            "job_audio_s_per_s": 4560.0,
        }
        | {
            "engine_audio_s_per_s": 4800.0,
            "share": 0.95,
            "times_one_gpu": 1.97,
            "first_audio_s": 8.04,
            "cpu_cores": 6.5,
            "failed": 0,
        },
    ]
    shown = job_gpu.table(rows).splitlines()
    assert shown[1].split() == ["engine", "0b6", "2", "512", "4,800"]
    assert shown[2].split() == [
        "folder",
        "0b6",
        "2",
        "512",
        "off",
        "warm",
        "4,560",
        "4,800",
        "95%",
        "1.97",
        "8.0",
        "6.50",
        "0",
    ]


def test_slots_of_a_job_are_those_that_its_worker_names() -> None:
    said = [
        '{"event": "worker up"}',
        '{"event": "engine ready: 0b6 on NVIDIA H200, graph executor, bfloat16, 512 slots, 9000 KV pages of 64"}',
    ]
    assert job_gpu.slots_of(said) == 512
    assert job_gpu.slots_of(said[:1]) is None

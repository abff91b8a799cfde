"""OpenAI batches: a file of `/v1/audio/speech` lines becomes a job, and comes back by its custom ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.dialogue import batch_dialogue
from jobs.ingest import SubmitOptions, SubmitResult, dry_run, submit
from jobs.ledger.records import JobSpec, RejectedLine
from jobs.shard_file import read_shard
from pipelines.errors import ErrorCode, InputError, ServiceError
from pipelines.request import Generation
from tests.support.export_kit import export
from tests.support.fake_worker import fake_card
from tests.support.worker_rig import Rig

BATCH = SubmitOptions(input_format="openai-batch")


def line(custom_id: Any, text: Any = "Good evening.", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/audio/speech",
        "body": {"model": "fake", "input": text, **body},
    }


def write(rig: Rig, *lines: dict[str, Any] | bytes) -> Path:
    path = rig.folder / "batch.jsonl"
    path.write_bytes(
        b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)
    )
    return path


def submitted(rig: Rig, *lines: dict[str, Any] | bytes, **spec: Any) -> SubmitResult:
    return submit(
        rig.settings,
        rig.ledger,
        rig.store,
        str(write(rig, *lines)),
        JobSpec(model="fake", **spec),
        options=BATCH,
    )


def exported(rig: Rig, job: str, format: str) -> list[dict[str, Any]]:
    to = rig.folder / f"{format}.jsonl"
    export(rig.ledger, rig.store, job, format, str(to))
    return [json.loads(one) for one in to.read_text().splitlines()]


def test_a_batch_comes_back_by_its_custom_ids(rig: Rig) -> None:
    ids = ["a1", "../b", "é\n\t", "x" * 1000]
    asked = [
        line(one, f"text {number}", voice="sine", response_format="wav", speed=1.0)
        for number, one in enumerate(ids)
    ]
    job = submitted(rig, *asked, line("broken", "[[fail:synth.nan]]"), line("fast", speed=2), b"no json").job
    while not rig.ledger.job(job.id).state.final:
        rig.run_next()

    done = exported(rig, job.id, "openai-batch")
    assert [one["custom_id"] for one in done] == ids
    assert {one["response"]["status_code"] for one in done} == {200}
    assert [
        one["response"]["body"]["audio"]["url"].removeprefix(rig.store.url) in rig.audio() for one in done
    ] == [True] * 4
    failed = exported(rig, job.id, "openai-batch-errors")
    assert [(one["custom_id"], one["error"]["code"]) for one in failed] == [
        ("fast", "input.unsupported"),
        ("line-7", "input.bad_json"),
        ("broken", "synth.nan"),
    ]


def test_a_custom_id_that_ends_like_a_turns_comes_back_as_it_is(rig: Rig) -> None:
    job = submitted(
        rig, line("chat:turn1"), line("lost:turn0", "[[fail:synth.nan]]"), line("fast:turn2", speed=2)
    ).job
    while not rig.ledger.job(job.id).state.final:
        rig.run_next()
    assert [one["custom_id"] for one in exported(rig, job.id, "openai-batch")] == ["chat:turn1"]
    assert [one["custom_id"] for one in exported(rig, job.id, "openai-batch-errors")] == [
        "fast:turn2",
        "lost:turn0",
    ]


def test_what_a_line_says_reaches_the_engine(rig: Rig) -> None:
    result = submitted(
        rig,
        line("a", " Good.", voice="sine", instructions="Calm."),
        line("b", instructions="", voice=""),
        line("c", voice=None),
    )
    ((key, sha256),) = rig.ledger.shard_inputs(result.job.id).values()
    lines = read_shard(rig.store, key, sha256)
    assert [(one.example_id, one.messages[0].content) for one in lines] == [
        ("a", " Good."),
        ("b", "Good evening."),
        ("c", "Good evening."),
    ]
    assert [one.generation for one in lines] == [
        Generation(voice="sine", instruct="Calm."),
        Generation(),
        Generation(),
    ]


REFUSED: list[tuple[dict[str, Any] | bytes, ErrorCode, str | None, str]] = [
    (line("id", response_format="mp3"), ErrorCode.INPUT_UNSUPPORTED, "id", "mp3"),
    (line("id", response_format="aac"), ErrorCode.INPUT_UNSUPPORTED, "id", "wav, flac, mp3, opus"),
    (line("id", response_format="flac"), ErrorCode.INPUT_UNSUPPORTED, "id", "flac"),
    (line("id", speed=1.25), ErrorCode.INPUT_UNSUPPORTED, "id", "1.25"),
    (line("id", stream_format="sse"), ErrorCode.INPUT_UNSUPPORTED, "id", "sse"),
    (line("id", temperature=0.4), ErrorCode.INPUT_UNSUPPORTED, "id", "temperature"),
    (line("id", model="tts-1"), ErrorCode.INPUT_UNSUPPORTED, "id", "tts-1"),
    (line("id") | {"url": "/v1/embeddings"}, ErrorCode.INPUT_UNSUPPORTED, "id", "/v1/embeddings"),
    (line("id") | {"method": "GET"}, ErrorCode.INPUT_UNSUPPORTED, "id", "GET"),
    (line("id", voice="nobody"), ErrorCode.INPUT_UNKNOWN_VOICE, "id", "nobody"),
    (line("id", voice={"id": "voice_1"}), ErrorCode.INPUT_BAD_LINE, "id", "voice"),
    (line("id", ""), ErrorCode.INPUT_EMPTY_TEXT, "id", "`input`"),
    (line("id", " \u200b"), ErrorCode.INPUT_EMPTY_TEXT, "id", "`input`"),
    (line("id", 7), ErrorCode.INPUT_BAD_LINE, "id", "input"),
    (
        {"custom_id": "id", "method": "POST", "url": "/v1/audio/speech"},
        ErrorCode.INPUT_BAD_LINE,
        "id",
        "body",
    ),
    (line(7), ErrorCode.INPUT_BAD_LINE, None, "custom_id"),
    (line(""), ErrorCode.INPUT_BAD_LINE, None, "`custom_id` is"),
    (line("x" * 1001), ErrorCode.INPUT_BAD_LINE, None, "`custom_id` is"),
    (line("nul\0"), ErrorCode.INPUT_BAD_LINE, None, "`custom_id` is"),
    (line("good"), ErrorCode.INPUT_DUPLICATE_ID, "good", "custom_id 'good'"),
    (
        {"example_id": "id", "messages": [["user", "text", "a"]]},
        ErrorCode.INPUT_UNSUPPORTED,
        None,
        "example_id",
    ),
    (b"[" * 10_000, ErrorCode.INPUT_BAD_LINE, None, "object"),
    (b'{"custom_id": ' + b"[" * 10_000, ErrorCode.INPUT_BAD_LINE, None, "custom_id"),
    (b'{"custom_id": "\xff"}', ErrorCode.INPUT_BAD_JSON, None, "JSON"),
]


@pytest.mark.parametrize(("bad", "code", "example_id", "words"), REFUSED)
def test_what_cannot_be_honoured_is_a_refused_line(
    rig: Rig, bad: dict[str, Any] | bytes, code: ErrorCode, example_id: str | None, words: str
) -> None:
    result = submitted(rig, line("good"), bad)
    assert (result.job.total_items, result.job.rejected_lines) == (1, 1)
    (found,) = rig.ledger.rejected_lines(result.job.id)
    assert found == RejectedLine(2, code, found.message, example_id)
    assert words in found.message
    if "example_id" not in words:
        assert not [
            word for word in ("example_id", "messages", "dialogue", "generation") if word in found.message
        ]


def test_a_custom_id_that_comes_back_far_behind(rig: Rig, short_batches: None) -> None:
    result = submitted(rig, line("a"), line("b"), line("a", "again"))
    (found,) = rig.ledger.rejected_lines(result.job.id)
    assert (found.line, "custom_id 'a'" in found.message) == (3, True)
    (estimated,) = dry_run(
        rig.settings,
        rig.store,
        str(rig.folder / "batch.jsonl"),
        JobSpec(model="fake"),
        SubmitOptions(input_format="openai-batch"),
    ).rejected_lines
    assert estimated == found


def test_instructions_that_a_model_cannot_follow() -> None:
    card = fake_card()
    card = replace(card, capabilities=replace(card.capabilities, instruct=False))
    batch_dialogue(json.dumps(line("a", instructions="")).encode(), card, "wav")
    with pytest.raises(InputError, match="`instructions`"):
        batch_dialogue(json.dumps(line("a", instructions="Calm.")).encode(), card, "wav")


def test_the_encoding_of_the_job_is_what_lines_may_ask_for(rig: Rig) -> None:
    result = submitted(
        rig, line("a", response_format="flac"), line("b", response_format="wav"), line("c"), format="flac"
    )
    assert (result.job.total_items, result.job.rejected_lines) == (2, 1)


def test_two_lines_with_one_custom_id(rig: Rig) -> None:
    result = submitted(rig, line("a"), line("a", "again"))
    (found,) = rig.ledger.rejected_lines(result.job.id)
    assert (found.line, found.code, found.example_id) == (2, ErrorCode.INPUT_DUPLICATE_ID, "a")


def test_the_format_is_part_of_what_a_job_is(rig: Rig) -> None:
    path = str(write(rig, line("a")))
    spec = JobSpec(model="fake")
    as_batch = submit(rig.settings, rig.ledger, rig.store, path, spec, options=BATCH)
    as_dialogues = submit(rig.settings, rig.ledger, rig.store, path, spec)
    assert (as_batch.job.total_items, as_dialogues.job.total_items, as_dialogues.job.rejected_lines) == (
        1,
        0,
        1,
    )
    assert not submit(rig.settings, rig.ledger, rig.store, path, spec, options=BATCH).created
    named = SubmitOptions(input_format="openai-batch", idempotency_key="k")
    submit(rig.settings, rig.ledger, rig.store, path, spec, options=named)
    with pytest.raises(ServiceError):
        submit(rig.settings, rig.ledger, rig.store, path, spec, options=SubmitOptions(idempotency_key="k"))


def test_a_dry_run_counts_as_a_submit_does(rig: Rig) -> None:
    path = write(rig, line("a"), line("a"), line("b", speed=3))
    estimate = dry_run(
        rig.settings, rig.store, str(path), JobSpec(model="fake"), SubmitOptions(input_format="openai-batch")
    )
    assert (estimate.items, estimate.rejected) == (
        1,
        {ErrorCode.INPUT_UNSUPPORTED: 1, ErrorCode.INPUT_DUPLICATE_ID: 1},
    )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--input-format openai-batch", 0),
        ("--input-format openai-batch --format flac", 4),
        ("--format wav", 0),
        ("--format openai-batch", 2),
    ],
)
def test_the_command_line_takes_an_encoding_and_an_input_format(
    tmp_path: Path, options: str, code: int
) -> None:
    request = line("a", response_format="wav")
    request["body"]["model"] = "hibari"
    (tmp_path / "in.jsonl").write_text(json.dumps(request) + "\n")
    command = [sys.executable, "-m", "jobs", "submit", "in.jsonl", "--dry-run", "--json", *options.split()]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == code, done.stderr
    if code == 0:
        assert json.loads(done.stdout)["items"] == 1

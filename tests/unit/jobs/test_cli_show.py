"""`nightjar show`: what a job is made with, and a command that makes exactly this job again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from jobs.cli import cli
from jobs.cli.options import job_options
from jobs.cli.run import run
from jobs.ingest import submit
from jobs.job_options import SubmitOptions, job_command
from jobs.ledger.records import Job, JobSpec
from jobs.provenance import put_provenance, read_records
from jobs.spec import resolve
from jobs.store import open_store
from pipelines.duration import Pace
from pipelines.registry import register_pipeline
from pipelines.request import EngineInfo
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.ledger_kit import execute
from tests.support.worker_rig import Rig

LINES = "".join(
    json.dumps({"example_id": f"e{n}", "messages": [["user", "text", f"Text {n}."]]}) + "\n" for n in range(3)
)


def given(command: click.Command, words: Sequence[str]) -> dict[str, object]:
    """What a command's options make of words."""
    return dict(command.make_context(command.name, list(words)).params)


@click.command()
@job_options
def asked(spec: JobSpec, options: SubmitOptions, dry_run: bool) -> tuple[JobSpec, SubmitOptions]:
    """A command with the options of a job."""
    return spec, options


def job_of_words(words: Sequence[str]) -> tuple[JobSpec, SubmitOptions]:
    return asked.main(list(words), standalone_mode=False)


def submitted(rig: Rig, *words: str) -> Job:
    """A job of the options of `nightjar submit`, made here."""
    rig.store = open_store(str(rig.folder))  # type: ignore[assignment]
    (rig.folder / "in.jsonl").write_text(LINES)
    spec, options = job_of_words(words)
    resolved = resolve(spec, options.input_format)
    return submit(
        rig.settings, rig.ledger, rig.store, str(rig.folder / "in.jsonl"), resolved, options=options
    ).job


def shown(rig: Rig, job: Job, *words: str) -> Result:
    done = CliRunner().invoke(
        cli, ["show", job.id[:12], "--out", str(rig.folder), *words], standalone_mode=False
    )
    assert done.exception is None, done.exception
    return done


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--qa off --format opus --sample-rate 24000 --seed 7 --pack",
        "--output codes --qa-set bounds.duration.high=3",
        "--output both",
        "--drop 'a b,c'",
        "--keep a,b",
        "--qa-set bounds.pause.high=2 --qa-set bounds.clipped=false --qa-set draws=5 --qa-set vad=energy --qa-set trim=true",
        "--qa-set bounds.wer.high=0.2 --qa-set meters.asr.model=tiny --limit 2 --set max_in_flight=3 --set error_budget=0.05",
        "--qa strict --qa-set meters.asr=false --qa-set meters.distillmos=false",
        "--voice-of assistant=sine --voice-of user=sine --speak all --set temperature=0.7 --set top_k=20 --set max_seconds=12.5",
        "--name 'a b' --label corpus=evening --label by=anna --priority -5 --set weight=3 --set max_attempts=9 --instruct 'low; $(voice)'",
    ],
)
def test_the_command_makes_the_job_again(rig: Rig, words: str) -> None:
    job = submitted(rig, "--model", "fake", *shlex.split(words))
    view = json.loads(shown(rig, job, "--json").stdout)
    command = view["command"]
    assert (command[:2], command[2], view["command_notes"]) == (
        ["nightjar", "run"],
        str(rig.folder / "in.jsonl"),
        [],
    )
    assert given(run, command[2:])["home"] == str(rig.folder)
    again = submitted(rig, *job_command(job, None)[0][3:])
    assert (again.id, again.spec_sha) == (job.id, job.spec_sha)
    assert view["spec_sha"] == job.spec_sha
    # All of the job beside its spec.
    _, options = job_of_words(job_command(job, None)[0][3:])
    told = {
        name: getattr(options, name)
        for name in ("name", "priority", "weight", "max_attempts", "max_in_flight", "error_budget")
    }
    assert told == {name: getattr(job, name) for name in told}
    assert job.labels == options.labels


def test_energy_is_shown_where_it_is_known(rig: Rig) -> None:
    job = submitted(rig, "--model", "fake")
    assert "joules" not in shown(rig, job).stdout
    execute(rig.ledger, "UPDATE shards SET energy_mj = 195, audio_ms = 1000")
    assert json.loads(shown(rig, job, "--json").stdout)["joules_per_audio_s"] == 0.195
    assert "joules_per_audio_s" in shown(rig, job).stdout


def test_the_pace_of_the_model_is_no_option(rig: Rig) -> None:
    register_pipeline("fake", replace(fake_card(), pace=Pace(0.3, 0.05, 0.7, 1.5)), FakePipeline)  # type: ignore[arg-type]
    job = submitted(rig, "--model", "fake", "--qa-set", "draws=5")
    assert job.spec.quality is not None
    assert job.spec.quality.paces
    words = job_command(job, None)[0][3:]
    assert [words[at + 1] for at, word in enumerate(words) if word == "--qa-set"] == ["draws=5"]
    assert submitted(rig, *words).id == job.id


@pytest.mark.parametrize(
    ("engines", "made_on", "chosen", "notes"),
    [
        (("native", "vllm"), ("vllm",), ["env", "SPEECH_ENGINE__KIND=vllm"], 0),
        (("native", "vllm"), ("native",), ["env", "SPEECH_ENGINE__KIND=native"], 0),
        (("native", "vllm"), ("vllm", "native"), [], 1),
        (("native", "vllm"), (), [], 0),
        ((), ("native",), [], 0),
    ],
)
def test_the_command_names_the_engine_where_it_is_a_choice(
    rig: Rig,
    engines: tuple[str, ...],
    made_on: tuple[str, ...],
    chosen: list[str],
    notes: int,
) -> None:
    job = submitted(rig, "--model", "fake")
    register_pipeline("fake", replace(fake_card(), engines=engines), FakePipeline)  # type: ignore[arg-type]
    for engine in made_on:
        put_provenance(rig.store, job, EngineInfo(executor=engine, engine=engine))
    view = json.loads(shown(rig, job, "--json").stdout)
    assert view["command"][: len(chosen) + 2] == [*chosen, "nightjar", "run"]
    assert len(view["command_notes"]) == notes
    assert " ".join([*chosen, "nightjar run"]) in shown(rig, job).stdout


def test_a_submit_leaves_the_engine_to_its_workers(rig: Rig) -> None:
    register_pipeline("fake", replace(fake_card(), engines=("native", "vllm")), FakePipeline)  # type: ignore[arg-type]
    job = submitted(rig, "--model", "fake")
    put_provenance(rig.store, job, EngineInfo(executor="vllm", engine="vllm"))
    made_with = read_records(rig.store, job)
    words, notes = job_command(job, None, made_with)
    assert words[:2] == ["nightjar", "submit"]
    assert [note for note in notes if "SPEECH_ENGINE__KIND=vllm" in note]
    assert job_command(job, str(rig.folder), made_with)[1] == []


def test_what_an_engine_does_not_have_is_left_out(rig: Rig) -> None:
    job = submitted(rig, "--model", "fake")
    put_provenance(rig.store, job, EngineInfo(slots=2))
    text = shown(rig, job).stdout
    assert "engine.reproducible " in text
    assert "kernels" not in text


def test_a_person_sees_what_a_job_is_made_with(rig: Rig) -> None:
    job = submitted(
        rig,
        "--model",
        "fake",
        "--name",
        "first",
        "--label",
        "corpus=evening",
        "--qa-set",
        "bounds.pause.low=0.1",
        "--seed",
        "3",
    )
    put_provenance(
        rig.store,
        job,
        EngineInfo(device="NVIDIA H200", executor="graph", kernels="fused CUDA", dtype="bfloat16", slots=8),
    )
    text = shown(rig, job).stdout
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert (lines["job"], lines["name"], lines["state"]) == (job.id, "first", "ready")
    assert (lines["input.uri"], lines["input.sha256"]) == (f"{rig.folder}/in.jsonl", job.input_sha256)
    assert (lines["input.format"], lines["input.lines"]) == ("dialogues", "3")
    assert lines["spec.quality.bounds.pause.low"] == "0.1"
    assert lines["labels.corpus"] == "evening"
    assert lines["spec.seed"] == "3"
    assert lines["prefix"] == f"jobs/{job.id}/"
    assert lines["made_with.1.device"] == "NVIDIA H200"
    assert (lines["made_with.1.engine.executor"], lines["made_with.1.engine.slots"]) == ("graph", "8")
    assert lines["command"].startswith(f"nightjar run {rig.folder}/in.jsonl --out {rig.folder} --model fake")
    view = json.loads(shown(rig, job, "--json").stdout)
    assert (view["schema"], view["made_with"][0]["engine"]["executor"], view["prefix"]) == (
        "nightjar.job/1",
        "graph",
        f"jobs/{job.id}/",
    )
    assert view["input"] == {
        "uri": f"{rig.folder}/in.jsonl",
        "sha256": job.input_sha256,
        "format": "dialogues",
        "lines": 3,
        "rejected_lines": 0,
    }
    assert view["spec"]["quality"]["bounds"]["pause"]["low"] == 0.1


def test_a_job_whose_store_is_damaged_is_shown(rig: Rig) -> None:
    job = submitted(rig, "--model", "fake")
    Path(rig.folder, "jobs", job.id, "provenance.json").write_text("no record")
    done = shown(rig, job, "--json")
    assert json.loads(done.stdout)["made_with"] is None
    assert "cannot be read" in done.stderr

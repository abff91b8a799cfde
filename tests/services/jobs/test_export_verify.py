"""Provenance records, and `nightjar verify`: objects against hashes, items made again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs.cli import main
from jobs.ledger.records import QUARANTINE, JobSpec
from jobs.provenance import ProvenanceWriter, model_provenance, provenance_key, put_provenance, read_records
from jobs.repair import reproduce, sample_items, snr_db
from jobs.store import FolderStore, open_store
from jobs.verify import Fault, ObjectCheck
from pipelines.audio import encode
from pipelines.errors import StoreError
from pipelines.registry import ModelCard, open_pipeline, register_pipeline
from pipelines.request import Capabilities, EngineInfo
from tests.services.jobs.test_s3_store import access_of
from tests.support.export_kit import Finished, export, finished_job
from tests.support.fakes import FakePipeline
from tests.support.ledger_kit import execute
from tests.support.services import MotoS3

VOICE = EngineInfo(slots=2, device="cpu", dtype="float32")
LINES = [
    {"example_id": f"u{number}", "messages": [["user", "text", f"Text number {number}."]]}
    for number in range(7)
]


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    made = finished_job(
        tmp_path, FolderStore(tmp_path / "store"), [*LINES, {**LINES[0], "example_id": "fails"}]
    )
    yield made
    made.ledger.close()


def faults(finished: Finished, *, deep: bool = False) -> tuple[int, list[tuple[str, Fault]]]:
    check = ObjectCheck(finished.ledger, finished.store, finished.ledger.job(finished.job_id), deep=deep)
    found = [(expected.key, fault) for expected, fault in check]
    return check.objects, found


def damage(finished: Finished) -> list[tuple[str, Fault]]:
    """One object gone and one with another byte; what is to be found."""
    gone, changed = list(finished.audio)[1:3]
    finished.store.delete(gone)
    finished.store.delete(changed)
    data = finished.audio[changed]
    finished.store.put(changed, data[:-1] + bytes([data[-1] ^ 1]))
    return [(gone, "missing"), (changed, "changed")]


@pytest.mark.parametrize("kind", ["text", QUARANTINE])
def test_texts_and_quarantine_are_looked_at_too(finished: Finished, kind: str) -> None:
    execute(finished.ledger, "UPDATE artifacts SET kind = :kind WHERE idx IN (1, 2)", kind=kind)
    assert faults(finished) == (11, [])
    wanted = damage(finished)
    assert faults(finished) == (11, wanted)


@pytest.mark.parametrize("deep", [False, True])
def test_missing_and_changed_objects_are_found(finished: Finished, deep: bool) -> None:
    assert faults(finished, deep=deep) == (11, [])
    wanted = damage(finished)
    assert faults(finished, deep=deep) == (11, wanted)


def test_objects_of_a_bucket(tmp_path: Path, moto: MotoS3) -> None:
    bucket = moto.create_bucket(f"verify-{tmp_path.name.replace('_', '-')[-20:]}".strip("-").lower())
    finished = finished_job(
        tmp_path,
        open_store(f"s3://{bucket}/p", access_of(moto.endpoint, moto.secret_key)),
        LINES,
        seconds=0.1,
    )
    assert faults(finished) == (11, [])
    wanted = damage(finished)
    assert faults(finished) == faults(finished, deep=True) == (11, wanted)
    finished.ledger.close()


def test_a_changed_input_is_found(finished: Finished) -> None:
    key, _ = finished.ledger.shard_inputs(finished.job_id)[0]
    finished.store.delete(key)
    finished.store.put(key, b"x")
    assert faults(finished)[1] == [(key, "changed")]


def run_job(folder: Path, *options: str) -> str:
    """A job of the embedded voice, made by a real worker; its id."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES[:4]))
    assert main(["run", str(source), "--out", str(folder / "out"), "-q", *options]) == 0
    (job,) = (folder / "out" / "jobs").iterdir()
    return job.name


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_job_of_the_embedded_voice_comes_out_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = run_job(tmp_path)
    capsys.readouterr()
    home = str(tmp_path / "out")
    assert main(["verify", job, "--out", home, "--sample", "2", "--json"]) == 0
    *redrawn, summary = lines_of(capsys)
    assert [view["likeness"] for view in redrawn] == ["same", "same"]
    assert summary == {
        "schema": "nightjar.verify/1",
        "job": job,
        "objects": 5,
        "faults": 0,
        "repaired": {"same": 0, "other": 0, "failed": 0},
        "redrawn": {"same": 2, "close": 0, "different": 0, "failed": 0},
    }
    (record,) = [
        json.loads(path.read_text()) for path in (tmp_path / "out" / "jobs" / job).glob("provenance*.json")
    ]
    assert (record["recorded_by"], record["model"]["name"], record["spec"]["seed"]) == ("worker", "hibari", 0)
    assert record["libraries"].keys() >= {"hibari-tts", "numpy", "soundfile"}
    assert (record["device"], record["engine"]) == (
        "",
        {"executor": "", "kernels": "", "dtype": "float32", "reproducible": True, "slots": 0},
    )
    audio = sorted((tmp_path / "out" / "jobs" / job / "audio").rglob("*.wav"))
    whole = {path: path.read_bytes() for path in audio}
    audio[0].unlink()
    assert main(["verify", job, "--out", home, "--sample", "0"]) == 1
    out = capsys.readouterr()
    assert out.out.startswith("missing\tjobs/")
    assert "5 files checked, 1 missing or changed" in out.err
    assert f"nightjar verify {job} --repair" in out.err
    data = bytearray(whole[audio[1]])
    data[-1] ^= 1
    audio[1].write_bytes(data)
    assert main(["verify", job, "--out", home, "--sample", "0", "--repair", "--json"]) == 0
    views = lines_of(capsys)
    assert [(view["schema"], view.get("fault") or view.get("outcome")) for view in views] == [
        ("nightjar.fault/1", "missing"),
        ("nightjar.fault/1", "changed"),
        ("nightjar.repaired/1", "same"),
        ("nightjar.repaired/1", "same"),
        ("nightjar.verify/1", None),
    ]
    assert {path: path.read_bytes() for path in audio} == whole
    export_to = tmp_path / "set"
    assert (
        main(
            [
                "export",
                job,
                "--out",
                home,
                "--format",
                "kaldi",
                "--to",
                str(export_to),
                "--split",
                "train=0.5,dev=0.5",
            ]
        )
        == 0
    )
    assert json.loads((export_to / "provenance.json").read_text())[0] == record


def test_audio_that_comes_out_otherwise(finished: Finished) -> None:
    """The kit's audio is noise, so a voice makes something else."""
    job = finished.ledger.job(finished.job_id)
    pipeline = open_pipeline("hibari")
    redrawn = list(reproduce(finished.ledger, finished.store, job, pipeline, 3))
    pipeline.close()
    assert [one.match for one in redrawn] == ["different"] * 3
    assert [one.index for one in redrawn] == [
        row.index for row in sample_items(finished.ledger, finished.job_id, 3)
    ]


def test_an_item_that_cannot_be_made_again(tmp_path: Path) -> None:
    engine = FakePipeline()
    forget = register_pipeline(
        "redrawn", ModelCard("redrawn", "fake", "cpu", 16_000, engine.capabilities, "1"), lambda: engine
    )
    finished = finished_job(
        tmp_path,
        FolderStore(tmp_path / "store"),
        [{"example_id": "bad", "messages": [["user", "text", "[[fail:synth.oom]]"]]}],
        JobSpec("redrawn"),
    )
    (redrawn,) = reproduce(finished.ledger, finished.store, finished.ledger.job(finished.job_id), engine, 3)
    assert redrawn.match == "failed"
    assert redrawn.reason
    forget()
    finished.ledger.close()


def test_rounding_is_close_and_another_sentence_is_not() -> None:
    wave = np.sin(np.arange(24_000, dtype=np.float32) / 20)
    assert snr_db(wave, wave) == math.inf
    assert snr_db(wave, wave + np.float32(1e-3)) > 40
    assert snr_db(wave, np.roll(wave, 100)) < 20
    assert snr_db(np.zeros(4, np.float32), np.ones(4, np.float32)) == -math.inf
    assert encode(wave, 24_000, "wav") != encode(wave * np.float32(0.999), 24_000, "wav")


def test_the_sample_is_the_same_each_time_and_no_larger_than_the_job(finished: Finished) -> None:
    few = [row.example_id for row in sample_items(finished.ledger, finished.job_id, 3)]
    assert few == [row.example_id for row in sample_items(finished.ledger, finished.job_id, 3)]
    assert set(few) < {row.example_id for row in sample_items(finished.ledger, finished.job_id, 5)}
    assert len(sample_items(finished.ledger, finished.job_id, 100)) == 7


def test_equal_workers_share_a_record_and_others_add_one(finished: Finished) -> None:
    job = finished.ledger.job(finished.job_id)
    assert read_records(finished.store, job) == []
    assert (
        put_provenance(finished.store, job, VOICE).key
        == put_provenance(finished.store, job, VOICE).key
        == provenance_key(job.id)
    )
    book = ProvenanceWriter()
    for _ in range(2):
        book.note(finished.store, job, replace(VOICE, executor="graph"))
    first, second = read_records(finished.store, job)
    assert (first.engine.executor, second.engine.executor) == (VOICE.executor, "graph")
    assert "numpy" in first.libraries
    assert (first.spec, first.spec_sha, first.input_sha256) == (job.spec, job.spec_sha, job.input_sha256)


def test_an_engine_that_makes_other_bits_adds_a_record(finished: Finished) -> None:
    """Pages and waiting rooms change no bits. The size of the batch does on a GPU, and not on a CPU."""
    job, book = finished.ledger.job(finished.job_id), ProvenanceWriter()
    gpu = EngineInfo(
        slots=512,
        device="NVIDIA H200",
        dtype="bfloat16",
        executor="graph",
        kernels="fused CUDA",
        reproducible=False,
    )
    for info in (
        VOICE,
        replace(VOICE, slots=9),
        gpu,
        replace(gpu, kv_pages=7, waiting_room=9),
        replace(gpu, slots=256),
    ):
        book.note(finished.store, job, info)
        ProvenanceWriter().note(finished.store, job, info)
    found = [
        (record.device, record.engine and (record.engine.slots, record.engine.kernels))
        for record in read_records(finished.store, job)
    ]
    assert found == [
        ("", (0, "")),
        ("NVIDIA H200", (512, "fused CUDA")),
        ("NVIDIA H200", (256, "fused CUDA")),
    ]


def test_a_record_that_could_not_be_written_is_tried_again(finished: Finished, tmp_path: Path) -> None:
    job = finished.ledger.job(finished.job_id)
    book = ProvenanceWriter()
    folder = tmp_path / "other"
    folder.write_text("in the way of a folder")
    store = FolderStore(folder)
    with pytest.raises(StoreError):
        book.note(store, job, VOICE)
    folder.unlink()
    folder.mkdir()
    book.note(store, job, VOICE)
    assert len(read_records(store, job)) == 1


def test_files_of_a_checkpoint_folder_are_hashed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "model.safetensors").write_bytes(b"weights")
    (folder / "notes.md").write_text("no part of the model")
    name = str(folder)
    forget = register_pipeline(
        name, ModelCard(name, "fake", "cpu", 16_000, Capabilities(), "1"), lambda: FakePipeline()
    )
    known = model_provenance(name)
    assert [(file.name, file.bytes) for file in known.files] == [
        ("config.json", 2),
        ("sub/model.safetensors", 7),
    ]
    assert known.files[0].sha256.startswith("44136fa355b3678a")
    forget()


def test_an_export_of_a_job_whose_model_is_gone(tmp_path: Path) -> None:
    card = ModelCard("passing", "fake", "cpu", 16_000, Capabilities(), "7")
    forget = register_pipeline("passing", card, FakePipeline)
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES[:1], JobSpec("passing"))
    forget()
    export(made.ledger, made.store, made.job_id, "lhotse", str(tmp_path / "to"))
    (record,) = json.loads((tmp_path / "to" / "provenance.json").read_text())
    assert record["model"] == {
        "name": "passing",
        "family": "",
        "engine": "",
        "revision": "7",
        "files": [],
    }
    made.ledger.close()

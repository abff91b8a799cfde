"""Exports with a filter, and exports of a job that runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.checks import Bound, Quality
from jobs.export import ExportReport, Part
from jobs.ingest import SubmitOptions, submit
from jobs.ledger import Ledger
from jobs.ledger.records import Artifact, Done, JobSpec
from jobs.settings import Settings
from jobs.store import FolderStore
from jobs.where import FilteredOut, parse_where
from pipelines.errors import ConfigError, ErrorCode
from pipelines.request import Generation
from tests.services.jobs.test_export_resume import StoppedError, contents, stop_at
from tests.support.cli_kit import call
from tests.support.export_kit import SAMPLE_RATE, Finished, export, run_all, wav
from tests.support.golden_checkpoint import whole
from tests.support.times import with_times

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_tts"
#: By example id: u0 to u9 have a WER of 0.0 to 0.9, and every second one has no DistillMOS.
SCORES = {f"u{no}": {"wer": no / 10, **({"distillmos": 3.0 + no / 10} if no % 2 else {})} for no in range(10)}
FILTER = "wer < 0.6 and distillmos > 3.2"
SPEC = JobSpec("hibari", quality=Quality(meters={"asr": {}, "distillmos": {}}))
LINES: list[dict[str, Any]] = [
    {"example_id": name, "messages": [["user", "text", f"Text {name}"]]} for name in (*SCORES, "fails")
]


def begun(folder: Path, lines: list[dict[str, Any]], spec: JobSpec = SPEC) -> Finished:
    """A job of which nothing is made yet, in the home `out` of a folder; shards of two items."""
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger, store = (
        Ledger(f"sqlite:///{folder}/out/.nightjar/ledger.sqlite"),
        FolderStore(folder / "out"),
    )
    ledger.migrate()
    settings = with_times(Settings(), shard_items=2)
    job = submit(settings, ledger, store, str(folder / "in.jsonl"), spec, options=SubmitOptions()).job
    return Finished(folder, ledger, store, job.id, {})


def go_on(job: Finished, shards: int = 100) -> None:
    run_all(job.ledger, job.store, job.job_id, scores=SCORES, shards=shards)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Finished]:
    made = begun(tmp_path, LINES)
    yield made
    made.ledger.close()


@pytest.fixture
def finished(started: Finished) -> Finished:
    go_on(started)
    return started


def run(
    job: Finished, format: str, to: Path | str, where: str | None = FILTER, **options: Any
) -> ExportReport:
    return export(
        job.ledger,
        job.store,
        job.job_id,
        format,
        str(to),
        where=None if where is None else parse_where(where),
        **options,
    )


def ids(folder: Path) -> list[str]:
    return [
        json.loads(line)["example_id"]
        for line in gzip.decompress((folder / "manifest.jsonl.gz").read_bytes()).splitlines()
    ]


def test_what_is_left_out_is_counted_by_the_first_condition_that_is_not_true(finished: Finished) -> None:
    report = run(finished, "manifest", finished.folder / "x.jsonl")
    lines = (finished.folder / "x.jsonl").read_text().splitlines()
    assert [json.loads(line)["example_id"] for line in lines] == ["u3", "u5"]
    assert (report.items, report.left_out) == (2, 9)
    assert report.reasons.filtered == (FilteredOut("wer < 0.6", 4, 0), FilteredOut("distillmos > 3.2", 4, 3))
    assert (
        str(report.reasons) == "1 without audio, 4 by wer < 0.6, 4 by distillmos > 3.2 (3 without that score)"
    )
    assert run(finished, "manifest", finished.folder / "all.jsonl", "attempts > 0").left_out == 1


def test_a_folder_says_its_filter_and_is_never_mixed_with_another(finished: Finished) -> None:
    to = finished.folder / "to"
    with pytest.raises(StoppedError):
        run(finished, "webdataset", to, part_bytes=100_000, on_part=stop_at(1))
    for other in ("wer < 0.6", None):
        with pytest.raises(ConfigError, match=r"with the filter .wer < 0\.6 and distillmos > 3\.2") as caught:
            run(finished, "webdataset", to, other, part_bytes=100_000)
        assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert run(finished, "webdataset", to, "0.6 > wer and (distillmos > 3.20)", part_bytes=100_000).items == 2
    about = json.loads((to / "export.json").read_bytes())
    assert (about["identity"]["where"], about["items"], about["left_out"]) == (FILTER, {"train": 2}, 9)
    assert about["reasons"]["filtered"][1] == {
        "condition": "distillmos > 3.2",
        "items": 4,
        "without_score": 3,
    }
    assert ids(to) == ["u3", "u5"]
    with pytest.raises(ConfigError, match="with the filter"):
        run(finished, "webdataset", to, None)


def test_a_filter_that_cannot_be_used_is_refused_before_anything_is_written(finished: Finished) -> None:
    for name, where, match in (
        ("manifest", "mos > 3", "No item of job .* has the score 'mos'"),
        ("openai-batch-errors", FILTER, "lists failures"),
    ):
        with pytest.raises(ConfigError, match=match) as caught:
            run(finished, name, finished.folder / "x", where)
        assert caught.value.code is ErrorCode.CONFIG_INVALID
        assert not (finished.folder / "x").exists()


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_scores_of_the_engine_are_exported_if_it_measures_them(
    tmp_path: Path, measured: bool, bound: bool
) -> None:
    """Exports of jobs that were made before there were such scores stay as they are."""
    bounds = {"log_probability": Bound(low=-9.0)} if bound else {}
    model, voice = (str(whole(GOLDEN / "checkpoint-custom")), "ryan") if bound else ("hibari", None)
    spec = JobSpec(model, generation=Generation(voice=voice), quality=Quality(bounds=bounds))
    job = begun(tmp_path, LINES, spec)
    own = {f"u{no}": {"log_probability": -no / 10} if measured else {} for no in range(10)}
    run_all(job.ledger, job.store, job.job_id, scores=own)
    run(job, "manifest", tmp_path / "x.jsonl", None)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    found = [line["scores"].get("log_probability", "absent") for line in lines]
    absent = None if bound else "absent"
    assert found == [-no / 10 if measured else absent for no in range(10)]
    if measured:
        where = "log_probability >= -0.3"
        assert run(job, "manifest", tmp_path / "y.jsonl", where).items == 4
    job.ledger.close()


def test_lost_audio_of_other_items_does_not_matter(finished: Finished) -> None:
    lost = next(item for item in finished.ledger.items(finished.job_id) if item.example_id == "u9")
    assert lost.artifact is not None
    finished.store.delete(lost.artifact.key)
    assert run(finished, "kaldi", finished.folder / "to").items == 2


def test_a_dialogue_is_written_if_one_of_its_items_matches(tmp_path: Path) -> None:
    texts = [["user", "text", "One."], ["assistant", "text", "Two."]]
    lines = [{"example_id": name, "messages": texts} for name in ("a", "b")]
    job = begun(tmp_path, lines, JobSpec("hibari", speak="all", quality=Quality(meters={"asr": {}})))
    where = "wer < 0.5 and seconds > 1.00002"
    run_all(job.ledger, job.store, job.job_id, scores={"a": {"wer": 0.1}, "b": {"wer": 0.9}})
    # Only the second item of `a` is long enough.
    assert [item.id for item in job.ledger.items(job.job_id, where=parse_where(where))] == ["a:turn1"]
    report = run(job, "espnet", tmp_path / "x.jsonl", where)
    assert [json.loads(line)["example_id"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [
        "a"
    ]
    assert (report.items, report.left_out, [out.items for out in report.reasons.filtered]) == (2, 2, [2, 0])
    run(job, "espnet-dataset", tmp_path / "to", where)
    assert len(ids(tmp_path / "to")) == 2
    assert run(job, "manifest", tmp_path / "y.jsonl", where).items == 1
    job.ledger.close()


@pytest.mark.parametrize("where", [None, "wer < 0.8"])
def test_a_job_that_runs_is_exported_as_far_as_it_is_done_and_again_later(
    started: Finished, where: str | None
) -> None:
    go_on(started, shards=2)
    file, folder = started.folder / "x.jsonl", started.folder / "to"
    report = run(started, "manifest", file, where)
    assert (report.items, report.left_out, report.reasons.pending, report.reasons.running) == (4, 7, 7, True)

    # What is done while the export is written is not in it, and does not disturb it.
    def more(_: object) -> None:
        go_on(started, shards=1)

    assert run(started, "webdataset", folder, where, part_bytes=100_000, on_part=more).items == 4
    assert ids(folder) == ["u0", "u1", "u2", "u3"]
    about = json.loads((folder / "export.json").read_bytes())
    assert (about["identity"]["running"], about["reasons"]["pending"]) == (True, 7)
    with pytest.raises(StoppedError):
        run(started, "webdataset", folder, where, part_bytes=100_000, on_part=stop_at(1))
    go_on(started)
    wanted = 10 if where is None else 8
    report = run(started, "webdataset", folder, where, part_bytes=100_000)
    assert (report.items, report.reasons.running, report.reasons.pending) == (wanted, False, 0)
    assert len(ids(folder)) == wanted
    assert not [name for name in contents(folder) if name.startswith("_export")]
    assert run(started, "manifest", file, where).items == wanted
    # The finished one is not replaced by an export with another filter.
    with pytest.raises(ConfigError, match="contains another export"):
        run(started, "webdataset", folder, "wer < 0.3", part_bytes=100_000)


def test_an_item_that_is_done_between_two_others_meanwhile_is_not_in_their_export(started: Finished) -> None:
    ledger, job = started.ledger, started.job_id
    go_on(started, shards=1)
    (ticket,) = ledger.take_ready(1)
    lease = ledger.claim(ticket, "w", 3600)
    assert lease is not None

    def commit(index: int) -> None:
        key, data = f"jobs/{job}/audio/00000/{index:09d}-u{index}.wav", wav(index)
        info = started.store.put(key, data)
        audio = Artifact(
            index, "audio", key, info.sha256, info.bytes, 1000, SAMPLE_RATE, SAMPLE_RATE + index, index
        )
        assert ledger.commit(lease.ticket, [Done(index, (audio,))]).accepted == 1

    commit(2)
    go_on(started, shards=1)
    # Parts of two items: u0 and u1, u2 and u4, u5.
    parts: list[int] = []

    def more(part: Part) -> None:
        parts.append(part.items)
        if len(parts) == 1:
            commit(3)

    assert (
        run(started, "webdataset", started.folder / "to", None, part_bytes=100_000, on_part=more).items == 5
    )
    assert parts == [2, 2, 1]
    assert ids(started.folder / "to") == ["u0", "u1", "u2", "u4", "u5"]


def test_the_commands_take_filters(finished: Finished) -> None:
    folder, job = finished.folder, finished.job_id
    done = call(folder, "items", job, "--where", FILTER, "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["u3", "u5"]
    assert call(folder, "items", job, "--where", FILTER, "--state", "failed", "--json").stdout == ""
    done = call(folder, "export", job, "--where", FILTER, "--format", "manifest", "--to", "x.jsonl")
    assert done.stderr.endswith(
        "x.jsonl. Left out: 1 without audio, 4 by wer < 0.6, 4 by distillmos > 3.2 (3 without that score).\n"
    )
    view = json.loads(
        call(
            folder, "export", job, "--where", FILTER, "--format", "manifest", "--to", "x.jsonl", "--json"
        ).stdout
    )
    assert (view["items"], view["left_out"], view["without_audio"], view["where"], view["running"]) == (
        2,
        9,
        1,
        FILTER,
        False,
    )
    wrong = call(folder, "export", job, "--where", "wer < 0.1 AND draw < 1", "--to", "x.jsonl")
    assert wrong.returncode == 4
    assert wrong.stderr.startswith(
        "Error config.invalid: The filter 'wer < 0.1 AND draw < 1' cannot be read, at character 11."
    )

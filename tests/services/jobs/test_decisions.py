"""Items that people accept and refuse, on the way from a worker to a dataset: the commands, the views, the manifests,
every family of formats, verify, repair, sweep and resume."""

from __future__ import annotations

import getpass
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.checks import BASIC
from jobs.export.formats import BUILT_IN
from jobs.ledger.records import QUARANTINE, WORDS, Decision, ItemState, Job
from jobs.repair import repair_objects
from jobs.settings import load_settings
from jobs.verify import ObjectCheck
from jobs.where import parse_where
from nightjar.job import Job as PythonJob
from pipelines.errors import ConfigError, NotFoundError
from tests.support.cli_kit import call, error_code
from tests.support.export_kit import export
from tests.support.report_kit import ClippingPipeline, Desk, open_desk
from worker.garbage import orphans

#: Items 1, 2 and 5 fail their checks.
TEXTS = [
    "a good one",
    "[[clipped]] accepted",
    "[[clipped]] still bad",
    "refused",
    "good too",
    "[[clipped]] both",
]
ACCEPTED, REFUSED = Decision(True, "ada"), Decision(False, "ada", "noise")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with open_desk(tmp_path, ClippingPipeline()) as desk:
        yield desk


def decided(desk: Desk, **spec: object) -> Job:
    """A job with two accepted items, of which one is refused again, and a refused item that had passed."""
    job = desk.job(TEXTS, quality=BASIC, spec=spec)
    ledger = desk.rig.ledger
    assert [row.state is ItemState.DONE for row in ledger.items(job.id)] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    ledger.decide(job.id, ["item-1", "item-5"], ACCEPTED)
    ledger.decide(job.id, ["item-3", "item-5"], REFUSED)
    return ledger.job(job.id)


def text_in(folder: Path) -> str:
    """All that is written below a folder, unpacked."""
    import pyarrow.parquet

    found = []
    for path in sorted(folder.rglob("*") if folder.is_dir() else [folder]):
        if path.suffix == ".parquet":
            table = pyarrow.parquet.read_table(path)
            found.append(
                str(table.select([name for name in table.column_names if name != "audio"]).to_pydict())
            )
        elif path.suffix == ".gz":
            found.append(gzip.decompress(path.read_bytes()).decode("latin-1"))
        elif path.is_file():
            found.append(f"{path.name} {path.read_bytes().decode('latin-1')}")
    return "\n".join(found)


#: They need a tokenizer, or list items by what an OpenAI batch names them.
NOT_HERE = {"interleaved", "openai-batch", "openai-batch-errors"}


@pytest.mark.parametrize("format", sorted(BUILT_IN.keys() - NOT_HERE))
def test_every_format_has_accepted_items_and_leaves_refused_ones_out(desk: Desk, format: str) -> None:
    job = decided(desk, output="both", timestamps=True)
    to = desk.rig.folder / "dataset"
    report = export(desk.rig.ledger, desk.rig.store, job.id, format, str(to))
    assert (report.items, report.left_out) == (3, 3)
    assert (report.reasons.without_audio, report.reasons.refused) == (2, {"noise": 1})
    assert str(report.reasons) == "2 without audio, 1 refused"
    written = text_in(to)
    assert [f"item-{number}" in written for number in range(6)] == [True, True, False, False, True, False]
    if (card := to / "README.md").exists():
        said = card.read_text()
        assert "1 items were refused by a person" in said
        assert "| `noise` | 1 |" in said
        manifest = gzip.decompress((to / "manifest.jsonl.gz").read_bytes()).decode()
        by_id = {one["example_id"]: one for one in map(json.loads, manifest.splitlines())}
        assert (
            by_id["item-1"]["decision"].items() >= {"accepted": True, "person": "ada", "reason": ""}.items()
        )
        assert "decision" not in by_id["item-0"]


def test_what_is_beside_the_audio_is_kept_for_a_person_and_goes_with_a_redraw(desk: Desk) -> None:
    job = desk.job(TEXTS[:2], quality=BASIC, spec={"output": "both", "timestamps": True})
    ledger = desk.rig.ledger
    kinds = [QUARANTINE, "codes", WORDS]
    before = {kind: ledger.artifacts_of(job.id, kind, [1])[1].key for kind in kinds}
    assert ledger.retry(job.id, None) == 1
    desk.rig.run_next()
    after = {kind: ledger.artifacts_of(job.id, kind, [1])[1].key for kind in kinds}
    assert all(before[kind] != after[kind] for kind in kinds)
    # The sweep finds those of the earlier draws.
    swept = {info.key for info, _ in orphans(ledger, desk.rig.store, job, ledger.now() + 3600)}
    assert swept == {*before.values()}


def test_filters_see_accepted_items_and_refused_ones_are_counted_once(desk: Desk) -> None:
    job, rig = decided(desk), desk.rig
    for where, items, filtered, refused in (
        ("clipped > 0.1", ["item-1"], 3, None),
        ("clipped < 0.1", ["item-0", "item-4"], 1, {"noise": 1}),
    ):
        to = rig.folder / "some.jsonl"
        report = export(rig.ledger, rig.store, job.id, "manifest", str(to), where=parse_where(where))
        assert [json.loads(line)["example_id"] for line in to.read_text().splitlines()] == items
        assert sum(out.items for out in report.reasons.filtered) == filtered
        assert (report.reasons.refused or None, report.reasons.without_audio) == (refused, 2)
        assert report.items + report.left_out == 6


def test_a_dialogue_with_a_refused_turn_is_left_out_whole(desk: Desk) -> None:
    path = desk.rig.folder / "two.jsonl"
    turns = [["user", "text", "one"], ["assistant", "text", "two"]]
    path.write_text("".join(json.dumps({"example_id": name, "messages": turns}) + "\n" for name in "ab"))
    job = desk.rig.submit_file(path, quality=BASIC, speak="all")
    while desk.rig.status(job).items.pending:
        desk.rig.run_next()
    with pytest.raises(NotFoundError):
        desk.rig.ledger.decide(job.id, ["a"], REFUSED)
    desk.rig.ledger.decide(job.id, ["a:turn1"], REFUSED)
    for name, items in (("manifest", 3), ("espnet", 2), ("rttm", 2)):
        report = export(desk.rig.ledger, desk.rig.store, job.id, name, str(desk.rig.folder / name))
        assert (report.items, report.left_out, report.reasons.refused) == (items, 4 - items, {"noise": 1})
        assert report.reasons.without_audio == 3 - items
    said = (desk.rig.folder / "rttm" / "README.md").read_text()
    assert "1 items of the job have no audio or are in a dialogue with a refused turn" in said


def test_accepted_audio_in_a_job_of_packs_is_an_object_of_its_own(desk: Desk) -> None:
    job = decided(desk, pack=True)
    to, root = desk.rig.folder / "all.jsonl", desk.rig.folder / "copies"
    export(desk.rig.ledger, desk.rig.store, job.id, "nemo", str(to), audio_root=root)
    files = [Path(json.loads(line)["audio_filepath"]) for line in to.read_text().splitlines()]
    assert [path.exists() for path in files] == [True, True, True]
    assert [QUARANTINE in str(path) for path in files] == [False, True, False]


def test_accepted_audio_is_verified_repaired_and_never_swept(desk: Desk) -> None:
    job, rig = decided(desk), desk.rig
    assert [info.key for info, _ in orphans(rig.ledger, rig.store, job, rig.ledger.now() + 3600)] == []
    row = next(rig.ledger.items(job.id, after=0, limit=1))
    assert row.artifact is not None
    data = rig.store.get(row.artifact.key)
    rig.store.delete(row.artifact.key)
    with pytest.raises(Exception, match=row.artifact.key):
        export(rig.ledger, rig.store, job.id, "manifest", str(rig.folder / "x"))
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert [one.key for one in lost] == [row.artifact.key]
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, lost) == {"same": 1}
    assert rig.store.get(row.artifact.key) == data
    # The same input again is the same job, with its decisions.
    assert desk.job(TEXTS, quality=BASIC).id == job.id
    assert [*rig.ledger.items(job.id, after=0, limit=1)] == [row]


def test_people_decide_on_the_command_line(desk: Desk) -> None:
    folder, job = desk.rig.folder, desk.job(TEXTS, quality=BASIC)
    home = ["--out", str(folder)]
    unknown = call(folder, "accept", job.id, "item-1", "item-9", "no such", *home, "--json")
    assert (unknown.returncode, unknown.stdout, error_code(unknown)) == (3, "", "ledger.not_found")
    assert "no item 'item-9', 'no such'." in json.loads(unknown.stderr)["error"]["message"]
    assert call(folder, "status", job.id, *home, "--json").stdout.count("decisions") == 0
    silent = call(folder, "accept", job.id, *home)
    assert (silent.returncode, "Missing argument" in silent.stderr) == (2, True)

    done = call(folder, "accept", job.id[:12], "item-1", *home)
    assert (done.returncode, done.stdout) == (0, f"1 item of {job.id} accepted by {getpass.getuser()}.\n")
    done = call(
        folder,
        "refuse",
        job.id,
        "-",
        "item-4",
        "--reason",
        "a\u202e | b",
        *home,
        "--json",
        stdin="item-3\n\nitem-4\n",
    )
    assert json.loads(done.stdout) == {
        "schema": "nightjar.decision/1",
        "job": job.id,
        "accepted": False,
        "items": 2,
    }
    listed = call(folder, "items", job.id, *home).stdout.splitlines()
    assert [line.split("\t")[6:] for line in listed[2:6]] == [
        [f"accepted by {getpass.getuser()}"],
        [],
        *[[f"refused by {getpass.getuser()}: a\\u202e | b"]] * 2,
    ]
    view = json.loads(call(folder, "items", job.id, *home, "--json", "--after", "0", "--limit", "1").stdout)
    assert (view["state"], view["error_code"], view["key"].split("/")[2]) == (
        "done",
        "qa.clipped",
        QUARANTINE,
    )
    assert view["decision"].keys() == {"accepted", "person", "decided_at", "reason"}
    assert view["decision"]["decided_at"].endswith("Z")
    status = json.loads(call(folder, "status", job.id, *home, "--json").stdout)
    assert (status["decisions"], status["items"]["done"]) == ({"accepted": 1, "refused": 2}, 4)
    assert (
        json.loads(call(folder, "show", job.id, *home, "--json").stdout)["decisions"] == status["decisions"]
    )
    assert "decided 1 accepted, 2 refused" in " ".join(call(folder, "status", job.id, *home).stdout.split())
    # The newest manifest of the job has what an export has.
    manifests = sorted(desk.rig.store.list(f"jobs/{job.id}/manifest."), key=lambda info: info.key)
    lines = desk.rig.store.get(manifests[-2].key).splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]
    assert json.loads(lines[1])["decision"]["accepted"]
    lines = call(folder, "refuse", job.id, "item-3", "--reason", "a\nb\u202e", *home).stdout.splitlines()
    assert lines == [f"1 item of {job.id} refused by {getpass.getuser()}: a\\nb\\u202e."]
    nothing = call(folder, "refuse", job.id, "-", *home, stdin="")
    assert (nothing.returncode, nothing.stdout.split()[0]) == (0, "0")


def test_programs_decide_too(desk: Desk) -> None:
    job = desk.job(TEXTS, quality=BASIC)
    settings = load_settings(home=str(desk.rig.folder))
    found = PythonJob(job.id, settings)
    assert found.accept("item-1") == 1
    assert found.refuse((f"item-{number}" for number in (3, 4)), reason="noise") == 2
    items = {item.id: item for item in found.items()}
    assert (items["item-1"].state, items["item-1"].draw) == ("done", 1)
    assert len(items["item-1"].audio.samples)
    assert items["item-1"].decision is not None
    assert items["item-1"].decision.accepted
    assert str(items["item-3"].decision) == f"refused by {getpass.getuser()}: noise"
    assert items["item-0"].decision is None
    assert found.status.decisions == {"accepted": 1, "refused": 2}
    lines = found.export("manifest", desk.rig.folder / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]
    for wrong in (lambda: found.accept([1]), lambda: found.refuse(["item-0"], reason=None)):  # type: ignore[list-item,arg-type]
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(NotFoundError, match="'item-77'"):
        found.refuse(["item-0", "item-77"])
    assert found.status.decisions == {"accepted": 1, "refused": 2}
    found.close()

"""The registry of export formats: what is built in, formats of other packages, and the pages that name
them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.export import find_format, format_names, parse_splits
from jobs.export.formats import BUILT_IN
from jobs.settings import Schedule, Settings
from jobs.store import FolderStore
from pipelines.errors import ConfigError, ErrorCode
from tests.support.export_kit import Finished, export, finished_job
from worker.nightly import check_exports

ROOT = Path(__file__).parents[3]
LINES = [{"example_id": name, "messages": [["user", "text", f"Text {name}"]]} for name in ("a", "b", "fails")]
PLUG_IN = """
import csv, io

from jobs.export import ExportFormat, item_metadata


def line(job, item, where):
    text = io.StringIO()
    csv.writer(text).writerow([item.id, item_metadata(job, item).text, where])
    return text.getvalue().encode()


def write(part, files, job, items):
    file = files.open(f"{part.split}/sizes.txt")
    for item, audio in items:
        file.write(f"{item.id} {len(audio)}\\n".encode())


CSV = ExportFormat(name="csv", summary="a table", item_line=line)
SIZES = ExportFormat(name="sizes", summary="sizes of audio", write_part=write, embeds_audio=True)
"""
ENTRY_POINTS = """[nightjar.exports]
csv = night_csv:CSV
sizes = night_csv:SIZES
broken = night_csv_missing:FORMAT
misnamed = night_csv:CSV
nemo = night_csv:CSV
"""


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES)
    yield made
    made.ledger.close()


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds formats."""
    site = tmp_path / "site"
    info = site / "night_csv-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: night-csv\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "night_csv.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(site)


def help_text() -> str:
    """The help of the command without white space: its lines break inside names."""
    return "".join(CliRunner().invoke(cli, ["export", "--help"]).output.split())


def test_every_built_in_format_is_declared_under_its_name() -> None:
    for name in BUILT_IN:
        found = find_format(name)
        assert found.name == name
        writers = (found.item_line, found.dialogue_line, found.failure_line, found.write_part)
        assert sum(writer is not None for writer in writers) == 1, name
        assert found.summary


def test_the_page_and_the_help_list_the_formats() -> None:
    page = (ROOT / "docs" / "export.md").read_text().partition("\n## ")[0]
    rows = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert rows == list(BUILT_IN)
    kinds = {
        line.split("|")[1].strip(" `"): line.split("|")[2].strip()
        for line in page.splitlines()
        if line.startswith("| `")
    }
    assert kinds == {name: "file" if find_format(name).one_file(None) else "folder" for name in BUILT_IN}
    told = help_text()
    for name in BUILT_IN:
        assert f"{name}({''.join(find_format(name).summary.split())})" in told, name


@pytest.mark.usefixtures("plug_in")
def test_a_format_of_another_package(finished: Finished) -> None:
    to = finished.folder / "csv" / "items.csv"
    report = export(finished.ledger, finished.store, finished.job_id, "csv", str(to))
    assert (report.items, report.left_out) == (2, 1)
    audio = [f"../store/{key}" for key in finished.audio]
    assert to.read_text() == f"a,Text a,{audio[0]}\nb,Text b,{audio[1]}\n"
    split = finished.folder / "split"
    export(
        finished.ledger,
        finished.store,
        finished.job_id,
        "csv",
        str(split),
        splits=parse_splits("train=0.5,dev=0.5"),
    )
    assert sum(len(path.read_text().splitlines()) for path in split.glob("*.jsonl")) == 2
    sizes = finished.folder / "sizes"
    export(finished.ledger, finished.store, finished.job_id, "sizes", str(sizes))
    lengths = [len(data) for data in finished.audio.values()]
    assert (sizes / "train" / "sizes.txt").read_text() == f"a {lengths[0]}\nb {lengths[1]}\n"
    assert json.loads((sizes / "export.json").read_text())["identity"]["format"] == "sizes"


@pytest.mark.usefixtures("plug_in")
def test_the_command_and_the_schedules_know_it() -> None:
    assert format_names() == [*BUILT_IN, "broken", "csv", "misnamed", "sizes"]
    assert "csv(atable)" in help_text()
    assert "sizes(sizesofaudio)" in help_text()
    with pytest.raises(ConfigError) as caught:
        find_format("mp3")
    assert caught.value.advice == f"Use one of: {', '.join(format_names())}."
    schedule = Schedule(input="in.jsonl", exports=("csv", "sizes"))
    check_exports(Settings(schedules={"news": schedule}), ["news"])


@pytest.mark.usefixtures("plug_in")
def test_formats_that_do_not_load_are_named_and_leave_the_others_alone(finished: Finished) -> None:
    for name, reason in (("broken", "night_csv_missing"), ("misnamed", "not an ExportFormat with the name")):
        with pytest.raises(ConfigError, match=reason) as caught:
            export(finished.ledger, finished.store, finished.job_id, name, "-")
        assert caught.value.code is ErrorCode.CONFIG_MISSING_LIBRARY
    # A package cannot replace a built-in format.
    assert find_format("nemo").summary == "NeMo's manifest"

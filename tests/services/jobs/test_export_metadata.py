"""What exports say of an item beside its audio: how it was made, and what was measured of the draw that
was kept."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.checks import Quality
from jobs.ledger.records import JobSpec
from jobs.store import FolderStore
from tests.support.export_kit import Finished, export, finished_job

LINES: list[dict[str, Any]] = [
    {
        "example_id": f"u{number}",
        "messages": [["user", "text", f"Text {number}"]],
        "generation": {"voice": "heart"},
    }
    for number in range(3)
]
#: The scores of the job's checks, in the order of the registry.
SCORES = ["ended", "duration", "clipped", "silence", "pause", "loudness", "wer", "cer"]


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    made = finished_job(
        tmp_path,
        FolderStore(tmp_path / "store"),
        LINES,
        JobSpec("hibari", quality=Quality(meters={"asr": {}})),
    )
    yield made
    made.ledger.close()


def origin(index: int) -> dict[str, Any]:
    measured = {"clipped": 0.0, "wer": index / 100, "cer": index / 200}
    scores = {name: measured.get(name) for name in SCORES}
    return {
        "seed": index + 2**62,
        "model": "hibari",
        "voice": "heart",
        "draw": index % 2,
        "scores": scores,
        "transcript": f"heard {index}",
    }


def part_of(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in origin(0)}


def written(finished: Finished, format: str) -> Path:
    to = finished.folder / format
    export(finished.ledger, finished.store, finished.job_id, format, str(to))
    return to


def told(finished: Finished, format: str) -> list[dict[str, Any]]:
    """What each item's line of the format says, in order."""
    to = written(finished, format)
    if format in ("manifest", "nemo"):
        return [json.loads(line) for line in to.read_text().splitlines()]
    if format == "openai-batch":
        return [json.loads(line)["response"]["body"]["metadata"] for line in to.read_text().splitlines()]
    if format == "webdataset":
        with tarfile.open(next(to.rglob("*.tar"))) as tar:
            return [
                json.load(io.BytesIO(tar.extractfile(one).read())) for one in tar if one.name.endswith("json")
            ]  # type: ignore[union-attr]
    cuts = gzip.decompress(next(to.rglob("cuts*.gz")).read_bytes()).splitlines()
    return [json.loads(cut)["supervisions"][0]["custom"] for cut in cuts]


@pytest.mark.parametrize(
    "format", ["manifest", "nemo", "openai-batch", "webdataset", "lhotse", "shar", "espnet-dataset"]
)
def test_an_item_has_the_seed_and_the_scores_of_the_draw_that_was_kept(
    finished: Finished, format: str
) -> None:
    assert [part_of(line) for line in told(finished, format)] == [
        origin(index) for index in range(len(LINES))
    ]


def test_a_folder_has_them_in_its_manifest(finished: Finished) -> None:
    lines = gzip.decompress((written(finished, "kaldi") / "manifest.jsonl.gz").read_bytes()).splitlines()
    assert [part_of(json.loads(line)) for line in lines] == [origin(index) for index in range(len(LINES))]


def test_parquet_has_a_column_for_each_score(finished: Finished) -> None:
    parquet = pytest.importorskip(
        "pyarrow.parquet",
        reason="NOT TESTED: the library pyarrow is missing; it comes with the extra `export`.",
    )
    (path,) = (written(finished, "parquet") / "data").iterdir()
    table = parquet.read_table(path)
    for index, row in enumerate(table.drop(["audio"]).to_pylist()):
        wanted = origin(index)
        for name, value in wanted.pop("scores").items():
            assert row[f"score_{name}"] == value
        assert {name: row[name] for name in wanted} == wanted
    # A score that no item has is a column of numbers too, so that the files of all splits fit together.
    assert {str(table.schema.field(f"score_{name}").type) for name in SCORES} == {"double"}


def test_a_job_without_checks_says_nothing_of_draws(tmp_path: Path) -> None:
    plain = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES[:1])
    (line,) = told(plain, "nemo")
    plain.ledger.close()
    assert (line["seed"], line["model"], line["voice"]) == (2**62, "hibari", "heart")
    assert not line.keys() & {"draw", "scores", "transcript"}

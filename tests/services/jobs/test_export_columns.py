"""The other columns and keys of records are in every export, with the values and the types that they had,
as the libraries that read it see them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.export.items import audio_items
from jobs.export.manifest import put_manifest
from jobs.export.table_formats import JSON, MAX_COLUMNS, common, type_of
from jobs.ledger.records import JobSpec
from jobs.store import FolderStore
from tests.support.export_kit import Finished, datasets_library, export, finished_job
from tests.support.manifests import read_manifest

#: Ten keys, one of each kind; a line without a key, and a line whose values are null.
COLUMNS: list[dict[str, Any]] = [
    {
        "zip": f"00{number}",
        "age": number,
        "wide": 2**60 + number,
        "pitch": number / 3,
        "kept": number % 2 == 0,
        "tags": ["a", f"tag {number}"],
        "place": {"city": "Köln\x1b", "at": [50.9, number]},
        "note": None,
        "mixed": number if number % 2 else f"{number}",
        "text": "not the text",
    }
    for number in range(4)
] + [{}, {"zip": None, "age": None, "place": None, "mixed": None}]
LINES = [
    {"example_id": f"u{number}", "messages": [["user", "text", f"Text {number}"]], **columns}
    for number, columns in enumerate(COLUMNS)
]


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Finished]:
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES, JobSpec("hibari"))
    yield made
    made.ledger.close()


def library(name: str) -> Any:
    return pytest.importorskip(
        name, reason=f"NOT READ BACK: the library {name} is missing; it comes with the extra `dev`."
    )


def exported(finished: Finished, format: str) -> Path:
    to = finished.folder / format
    export(finished.ledger, finished.store, finished.job_id, format, str(to), absolute=True)
    return to


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return [
        json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    ]


def metadata_in(finished: Finished, format: str) -> list[Any]:
    """The metadata of each item, as a library reads it from an export."""
    to = exported(finished, format)
    if format in ("manifest", "nemo"):
        return [line.get("metadata", {}) for line in lines_of(to)]
    if format == "openai-batch":
        return [line["response"]["body"]["metadata"].get("metadata", {}) for line in lines_of(to)]
    if format in ("kaldi", "ljspeech"):
        return [line.get("metadata", {}) for line in lines_of(to / "manifest.jsonl.gz")]
    if format in ("espnet", "espnet-dataset"):
        lines = lines_of(to if format == "espnet" else to / "train" / "dialogue.jsonl")
        return [
            {name: value for name, value in line.items() if name not in ("example_id", "messages")}
            for line in lines
        ]
    if format == "webdataset":
        tars = [str(path) for path in (to / "train").iterdir()]
        samples = library("webdataset").WebDataset(tars, shardshuffle=False)
        return [json.loads(sample["json"]).get("metadata", {}) for sample in samples]
    cut_set = library("lhotse").CutSet
    cuts = (
        cut_set.from_shar(in_dir=to / "train")
        if format == "shar"
        else cut_set.from_file(to / "train" / "cuts.jsonl.gz")
    )
    return [cut.supervisions[0].custom.get("metadata", {}) for cut in cuts]


@pytest.mark.parametrize(
    "format",
    [
        "manifest",
        "nemo",
        "openai-batch",
        "kaldi",
        "ljspeech",
        "espnet",
        "espnet-dataset",
        "webdataset",
        "lhotse",
        "shar",
    ],
)
def test_formats_of_json_have_the_values(finished: Finished, format: str) -> None:
    assert metadata_in(finished, format) == COLUMNS


def in_table(columns: dict[str, Any]) -> dict[str, Any]:
    """The values in a table: a missing one is null, and a column of several types is JSON text."""
    values = {name: columns.get(name) for name in COLUMNS[0]}
    return values | {"mixed": None if values["mixed"] is None else json.dumps(values["mixed"])}


@pytest.mark.parametrize("format", ["parquet", "audiofolder"])
def test_tables_have_the_values_with_their_types(
    finished: Finished, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = datasets_library(monkeypatch)
    to = exported(finished, format)
    where = {"path": str(to)} if format == "parquet" else {"path": "audiofolder", "data_dir": str(to)}
    loaded = datasets.load_dataset(**where, split="train", cache_dir=str(finished.folder / "cache"))
    rows = sorted(loaded.remove_columns("audio"), key=lambda row: row["index"])
    assert [row["metadata"] for row in rows] == [in_table(columns) for columns in COLUMNS]
    types = {name: getattr(feature, "dtype", None) for name, feature in loaded.features["metadata"].items()}
    assert types["zip"] == types["mixed"] == types["text"] == "string"
    assert (types["age"], types["wide"], types["pitch"], types["kept"]) == (
        "int64",
        "int64",
        "float64",
        "bool",
    )
    assert types["note"] == "null"


def test_all_parts_of_a_table_have_the_types_of_the_whole_job(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = library("pyarrow.parquet")
    to = finished.folder / "parts"
    export(finished.ledger, finished.store, finished.job_id, "parquet", str(to), part_bytes=1)
    schemas = [parquet.read_schema(path) for path in sorted((to / "data").iterdir())]
    assert len(schemas) == len(LINES)
    assert all(schema == schemas[0] for schema in schemas)


def test_more_columns_than_a_table_holds_are_one_text(tmp_path: Path) -> None:
    parquet = library("pyarrow.parquet")
    many = {f"column {number}": number for number in range(MAX_COLUMNS + 1)}
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), [LINES[0], {**LINES[1], **many}])
    (path,) = (exported(made, "parquet") / "data").iterdir()
    made.ledger.close()
    found = parquet.read_table(path, columns=["metadata"]).to_pylist()
    assert [json.loads(row["metadata"]) for row in found] == [COLUMNS[0], COLUMNS[1] | many]


def test_manifests_in_the_store_and_items_have_the_metadata(finished: Finished) -> None:
    ledger, store = finished.ledger, finished.store
    written = put_manifest(ledger, store, finished.job_id)
    entries = read_manifest(store, written.key)
    found = [{name: json.loads(bytes(value)) for name, value in one.metadata.items()} for one in entries]
    assert found == [item.metadata for item in audio_items(ledger, store, finished.job_id)] == COLUMNS


def test_a_job_without_other_keys_has_no_metadata(tmp_path: Path) -> None:
    parquet = library("pyarrow.parquet")
    own = {"id": "u0", "example_id": "u0", "generation": {"seed": 1}, "messages": [["user", "text", "Hi"]]}
    made = finished_job(tmp_path, FolderStore(tmp_path / "store"), [own])
    assert all("metadata" not in line for line in lines_of(exported(made, "manifest")))
    (path,) = (exported(made, "parquet") / "data").iterdir()
    made.ledger.close()
    assert "metadata" not in parquet.read_schema(path).names


def test_a_whole_number_that_a_double_does_not_hold_is_never_a_double() -> None:
    assert common(type_of(2**53), type_of(0.5)) == "float64"
    assert common(type_of(2**53 + 1), type_of(0.5)) == JSON

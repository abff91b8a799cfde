"""Places of the datasets of nights: their names, and those that are refused before the night."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import ConfigError
from tests.support.night_kit import EXPORTS, House, changed_schedule, line


@pytest.mark.parametrize(
    ("to", "names"),
    [
        (
            "{date}/{format}",
            [
                f"2026-11-20/{name}"
                for name in ("espnet.jsonl", "openai-batch-errors.jsonl", "report.html", "webdataset")
            ],
        ),
        (
            "{format}-%Y%m%d",
            [
                "espnet-20261120.jsonl",
                "openai-batch-errors-20261120.jsonl",
                "report-20261120.html",
                "webdataset-20261120",
            ],
        ),
        ("{date}.{format}.set", [f"2026-11-20.{name}.set" for name in sorted(EXPORTS)]),
    ],
)
def test_formats_of_one_file_have_their_extension(house: House, to: str, names: list[str]) -> None:
    schedule = house.settings.schedules["news"].model_copy(update={"export_to": str(house.folder / "x" / to)})
    house.settings = house.settings.model_copy(update={"schedules": {"news": schedule}})
    house.write(line("a"))
    house.make(house.run())
    assert sorted(one.to for one in house.run().datasets) == [
        str(house.folder / "x" / name) for name in names
    ]
    assert all((house.folder / "x" / name).exists() for name in names)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            {"export_to": "s3://b/{date}/{format}", "exports": ("parquet", "nemo")},
            "nemo: The format nemo is one file",
        ),
        (
            {"export_to": "s3://b/{date}/{format}", "exports": ("report",)},
            "report: A report is one local file",
        ),
        (
            {"export_to": "s3://b/{date}/{format}", "exports": ("espnet-dataset",)},
            "espnet-dataset: .* local paths",
        ),
        ({"pack": True, "exports": ("webdataset", "nemo")}, "nemo: The format nemo names audio by its path"),
        ({"store_url": "s3://b/store", "exports": ("kaldi",)}, "kaldi: Readers of kaldi open local files"),
        (
            {"exports": ("nemo",), "export_options": {"uniqe": True}},
            "nemo: There is no option 'uniqe'. Did you mean 'unique'",
        ),
        (
            {"exports": ("nemo",), "export_options": {"unique": "yes"}},
            "unique of .* is 'yes'.* type is bool",
        ),
        ({"exports": ("shar",), "export_options": {"part_mb": 0}}, "part_mb of the export is 0"),
        ({"exports": ("report",), "export_options": {"report": {}}}, "a table for 'report'"),
        ({"exports": ("report",), "export_options": {"uniqe": True}}, "There is no option 'uniqe'"),
        ({"exports": ("nemo",), "export_options": {"splits": "a=1"}}, "nemo: `export_options` has splits"),
        ({"exports": ("nemo",), "export_options": {"where": "wer <"}}, "nemo: .*wer <"),
        ({"exports": ("nemo",), "export_options": {"license": "mit"}}, "nemo is one file, without a card"),
        ({"exports": ("nemo",), "export_options": {"rttm": {}}}, "a table for 'rttm'. Name its format in"),
        ({"exports": ("rttm",), "export_options": {"gaps": "wide"}}, "'wide' are no distribution"),
        ({"exports": ("nemo",), "export_options": {"interleave": "words"}}, "nemo is not interleaved"),
        ({"exports": ("shar",), "export_options": {"audio_format": "mp4"}}, "'mp4' is unknown"),
    ],
)
def test_formats_that_never_fit_their_place_are_refused_before_the_night(
    house: House, wrong: dict[str, Any], why: str
) -> None:
    schedule = changed_schedule(house.settings.schedules["news"], **wrong)
    house.settings = house.settings.model_copy(update={"schedules": {"news": schedule}})
    house.write(line("a"))
    with pytest.raises(ConfigError, match=why):
        house.run()
    assert house.ledger.jobs() == []


def test_exports_have_the_options_of_the_schedule(house: House) -> None:
    """Those of all exports, and those of one format."""
    options = {
        "unique": True,
        "webdataset": {
            "audio_format": "flac",
            "license": "cc0-1.0",
            "part_mb": 1,
            "where": "seconds > 0.05001",
        },
        "rttm": {"dialogues": "mono", "gaps": "0.5"},
        # What a format has of its own precedes the options of all.
        "nemo": {"absolute": True, "unique": False},
    }
    fields = {"exports": ("webdataset", "manifest", "rttm", "nemo"), "export_options": options}
    schedule = changed_schedule(house.settings.schedules["news"], **fields)
    house.settings = house.settings.model_copy(update={"schedules": {"news": schedule}})
    # The last one is a duplicate; the audio of the first one has 0.05 s, and that of the others a few samples more.
    house.write(*map(line, "abc"), line("d", messages=[["user", "text", "good night b"]]))
    house.make(house.run())
    sets = {one.format: one for one in house.run().datasets}
    assert [one.reason for one in sets.values()] == [None] * 4
    items = {name: one.items for name, one in sets.items()}
    assert items == {"webdataset": 2, "manifest": 3, "rttm": 3, "nemo": 4}
    assert 'license: "cc0-1.0"' in (Path(sets["webdataset"].to) / "README.md").read_text()
    with tarfile.open(Path(sets["webdataset"].to) / "train/shard-000000.tar") as shard:
        assert {Path(name).suffix for name in shard.getnames()} == {".flac", ".json", ".txt"}
    lines = Path(sets["nemo"].to).read_text().splitlines()
    assert all(Path(json.loads(one)["audio_filepath"]).is_absolute() for one in lines)

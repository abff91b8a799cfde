"""Places of the datasets of nights: their names, and those that are refused before the night."""

from __future__ import annotations

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

"""A home with a nightly schedule, whose jobs a test makes itself."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from jobs.ledger import Ledger
from jobs.ledger.records import Job
from jobs.settings import Schedule, Settings
from jobs.store import open_store
from tests.support.export_kit import run_all
from worker.nightly import Night, run_nights

NIGHT = date(2026, 11, 20)
EXPORTS = ("espnet", "openai-batch-errors", "webdataset", "report")


def changed_schedule(schedule: Schedule | None, **fields: Any) -> Schedule:
    """A schedule with other fields and options."""
    before: dict[str, Any] = (
        {} if schedule is None else schedule.model_dump(exclude={"options"}) | schedule.options
    )
    return Schedule.model_validate(before | fields)


class House:
    """A home with one schedule, whose jobs a test makes itself."""

    def __init__(self, folder: Path, **schedule: Any) -> None:
        self.folder = folder
        given = {"exports": EXPORTS, "export_to": str(folder / "sets" / "{date}" / "{format}"), **schedule}
        self.settings = Settings(
            home=folder / "home",
            schedules={
                "news": changed_schedule(
                    None, input=str(folder / "in-{date}.jsonl"), model="fake", qa="off", **given
                )
            },
        )
        self.ledger = Ledger(self.settings.ledger_url)
        self.ledger.migrate()
        self.store = open_store(self.settings.effective_store_url)

    def write(self, *lines: str, night: date = NIGHT) -> None:
        (self.folder / f"in-{night}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def report(self, night: date = NIGHT, catch_up: int = 0, **options: Any) -> list[Night]:
        return run_nights(self.settings, night.isoformat(), catch_up, **options)

    def run(self, **options: Any) -> Night:
        (night,) = self.report(**options)
        return night

    def make(self, night: Night, **options: Any) -> None:
        run_all(self.ledger, self.store, night.job_id, 0.05, **options)

    def job(self, night: Night) -> Job:
        return self.ledger.job(night.job_id)

    @property
    def sets(self) -> Path:
        return self.folder / "sets" / NIGHT.isoformat()

    def contents(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.sets)): path.read_bytes()
            for path in self.sets.rglob("*")
            if path.is_file()
        }

    def exported(self) -> list[str]:
        return [
            json.loads(line)["example_id"] for line in (self.sets / "espnet.jsonl").read_text().splitlines()
        ]


def line(example_id: str, **more: Any) -> str:
    return json.dumps(
        {"example_id": example_id, "messages": [["user", "text", f"good night {example_id}"]], **more}
    )

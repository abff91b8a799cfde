"""Nightjar in Python: files of dialogues, sentences or tables become speech datasets.

    import nightjar

    with nightjar.run(["Good evening.", "Good night."], out="out") as job:
        for item in job:
            print(item.id, item.seconds, item.scores)

Jobs are the same as those of the command line: `nightjar status` shows them, and the same call resumes an
interrupted job. Importing this package imports no model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.job_options import JobOptions
    from nightjar.job import Item, Job, Report, augment, decode, export
    from nightjar.runs import find_job, find_jobs, run, submit
    from nightjar.voice import Sound, Voice, open_model
    from pipelines.errors import ErrorCode, InputError, NightjarError

__all__ = [
    "ErrorCode",
    "InputError",
    "Item",
    "Job",
    "JobOptions",
    "NightjarError",
    "Report",
    "Sound",
    "Voice",
    "augment",
    "decode",
    "export",
    "find_job",
    "find_jobs",
    "open_model",
    "run",
    "submit",
]

#: The module of each name, imported at its first use.
_MODULES = {
    "ErrorCode": "pipelines.errors",
    "InputError": "pipelines.errors",
    "Item": "nightjar.job",
    "Job": "nightjar.job",
    "JobOptions": "jobs.job_options",
    "NightjarError": "pipelines.errors",
    "Report": "nightjar.job",
    "Sound": "nightjar.voice",
    "Voice": "nightjar.voice",
    "augment": "nightjar.job",
    "decode": "nightjar.job",
    "export": "nightjar.job",
    "find_job": "nightjar.runs",
    "find_jobs": "nightjar.runs",
    "open_model": "nightjar.voice",
    "run": "nightjar.runs",
    "submit": "nightjar.runs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nightjar' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

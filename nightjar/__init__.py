"""Nightjar in Python: files of dialogues, sentences or tables become speech datasets.

    import nightjar

    with nightjar.run(["Good evening.", "Good night."], out="out") as job:
        for item in job:
            print(item.id, item.seconds, item.scores)

The same jobs as those of the command line, by the same path: `nightjar status` shows them, and the same
call goes on with what was interrupted. Importing this package imports no model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.job_options import JobOptions
    from nightjar.item import Item
    from nightjar.job import Job, Report
    from nightjar.runs import find_job, run, submit
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
    "find_job",
    "open_model",
    "run",
    "submit",
]

_MODULES = {
    "nightjar.item": ("Item",),
    "nightjar.job": ("Job", "Report"),
    "jobs.job_options": ("JobOptions",),
    "nightjar.runs": ("find_job", "run", "submit"),
    "nightjar.voice": ("Sound", "Voice", "open_model"),
    "pipelines.errors": ("ErrorCode", "InputError", "NightjarError"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nightjar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""Are the weights of meters here? `python -m worker.quality.weights` answers the commands, which import no meter themselves.

Standard input: `{"fetch": true, "meters": {"asr": {"model": "base"}}}`. Standard output: `{}`, or the code, message and advice of what is
missing. With `fetch` weights that are not here are fetched.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

import msgspec

from jobs.checks import METERS, Option
from pipelines.errors import ModelError
from worker.quality.metrics import missing_library


class Question(msgspec.Struct):
    """What is asked."""

    fetch: bool
    meters: dict[str, dict[str, Option]]


def missing(meters: Mapping[str, Mapping[str, Option]], *, fetch: bool) -> ModelError | None:
    """Why the first of these meters could not be opened here for its weights, or None."""
    for name, options in meters.items():
        if name not in METERS or not METERS[name].weights:
            continue
        try:
            importlib.import_module(f"worker.quality.{name}").prepare(fetch=fetch, **options)
        except ModelError as error:
            return error
        except ImportError as error:
            return missing_library(name, error)
    return None


def main() -> None:
    """Libraries may print; only the answer goes to standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    error = missing(question.meters, fetch=question.fetch)
    facts = {} if error is None else {"code": error.code.value, "message": error.message, "advice": error.advice}
    with answers:
        answers.write(msgspec.json.encode(facts))


if __name__ == "__main__":
    main()

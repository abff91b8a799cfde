"""Logs: one shape for all libraries, context in every line, no secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from structlog.contextvars import bound_contextvars

from jobs.logs import setup_logging


@pytest.fixture(autouse=True)
def restore(logging_of_its_own: None) -> Iterator[None]:
    yield
    structlog.reset_defaults()


def logged(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_is_json_with_its_context() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", stream)
    with bound_contextvars(job="j", shard=3, epoch=2, worker="w"):
        structlog.get_logger("ours").info("made", items=5)
        logging.getLogger("theirs").warning("said %s", "so")
    ours, theirs = logged(stream)
    assert {
        "event": "made",
        "items": 5,
        "job": "j",
        "shard": 3,
        "epoch": 2,
        "worker": "w",
        "level": "info",
    }.items() <= ours.items()
    assert {"event": "said so", "job": "j", "logger": "theirs", "level": "warning"}.items() <= theirs.items()


def test_no_secret_is_logged() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", stream)
    logging.getLogger("x").info("connected to redis://user:hunter2@host/0 and postgresql://me:hunter2@db/n")
    structlog.get_logger().info(
        "set", basic_auth="admin:hunter2", secret_access_key="hunter2", url="s3://k:hunter2@b"
    )
    try:
        raise ValueError("cannot reach redis://:hun/ter'h@unter2@host")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "hunter2" not in stream.getvalue()
    assert len(logged(stream)) == 3


def test_console_lines_are_redacted_too() -> None:
    stream = io.StringIO()
    setup_logging("info", "console", stream)
    structlog.get_logger().info("connected", url="redis://:hunter2@host")
    try:
        raise ValueError("cannot reach redis://:hun/ter'h@unter2@host")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert "hunter2" not in stream.getvalue()
    assert "connected" in stream.getvalue()


def test_the_level_is_kept() -> None:
    stream = io.StringIO()
    setup_logging("warning", "json", stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    assert stream.getvalue() == ""

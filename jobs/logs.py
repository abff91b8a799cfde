"""Logging of all processes: structlog on the standard library, as JSON or for a console, without secrets."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Literal, TextIO

from jobs.formatting import MASK, redact

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

LogFormat = Literal["auto", "json", "console"]

_SECRET_NAME = re.compile(r"password|passwd|secret|token|basic_auth|credential", re.IGNORECASE)

#: Loggers of libraries that are too verbose at INFO.
_QUIET = (
    "celery.worker.strategy",
    "celery.app.trace",
    "celery.redirected",
    "botocore",
    "boto3",
    "urllib3",
    "alembic",
    "kombu",
)


def redact_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor that removes secrets from the values of an entry."""
    for key, value in event.items():
        if value is not None and _SECRET_NAME.search(key):
            event[key] = MASK
        elif isinstance(value, str):
            event[key] = redact(value)
    return event


def setup_logging(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Sends all logs of this process, of structlog and the standard library, to `stream` (stderr) in one format.

    `auto` is `console` on a terminal and otherwise one JSON object per line. Bound context variables (job, shard,
    epoch, worker) are in every line. A later call replaces an earlier one.
    """
    import structlog

    out: TextIO = stream if stream is not None else sys.stderr
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    shared = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    tail = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        # Tracebacks become text first, so that they are redacted as well.
        structlog.processors.format_exc_info,
        redact_event,
        structlog.dev.ConsoleRenderer(colors=out.isatty())
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False),
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=tail))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )

"""Logging for every process of the house: structlog over the standard library, JSON or console, without
secrets."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Literal, TextIO

from jobs.formatting import MASK, redact

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["auto", "json", "console"]

_SECRET_NAME = re.compile(r"password|passwd|secret|token|basic_auth|credential", re.IGNORECASE)

#: Loggers of libraries that speak too much at INFO.
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
    """A structlog processor: no value of a log line carries a secret."""
    for key, value in event.items():
        if value is not None and _SECRET_NAME.search(key):
            event[key] = MASK
        elif isinstance(value, str):
            event[key] = redact(value)
    return event


def setup_logging(level: str = "INFO", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Sends all logs of this process, structlog's and the standard library's, to `stream` (stderr) in one
    shape.

    `auto` is the console shape on a terminal and one JSON object a line elsewhere. Bound context variables
    (job, shard, epoch, worker) appear in every line. May be called again; the last call counts.
    """
    import structlog

    out: TextIO = stream if stream is not None else sys.stderr
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    tail: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        # Tracebacks become text first, so that they are redacted like all the rest.
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

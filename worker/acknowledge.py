"""Acknowledging a message whose connection is gone, without ending the worker."""

from __future__ import annotations

from typing import Any

import structlog
from celery import Task
from celery.worker.request import Request

log = structlog.get_logger(__name__)


class _AckLog:
    """Takes kombu's complaint about an acknowledgement that failed: one line, for the ledger knows that the shard ran."""

    def critical(self, message: str, *arguments: object, exc_info: object = None) -> None:
        log.warning("message not acknowledged", reason=message % arguments)


class ShardRequest(Request):
    """A request whose late acknowledgement may fail.

    A connection that kombu closed after an error has no client any more, so that acknowledging over it is an
    AttributeError; Celery takes that for a fault of its own and ends the worker. A message that is delivered again for
    want of an acknowledgement is dropped at its claim.
    """

    def acknowledge(self) -> None:
        if not self.acknowledged:
            self._on_ack(_AckLog(), self._errors())
            self.acknowledged = True

    def reject(self, requeue: bool = False) -> None:
        if not self.acknowledged:
            self._on_reject(_AckLog(), self._errors(), requeue)
            self.acknowledged = True
            self.send_event("task-rejected", requeue=requeue)

    def _errors(self) -> tuple[type[BaseException], ...]:
        errors: Any = self._connection_errors
        return (*errors, AttributeError)


class ShardTask(Task):
    """The base of tasks that are acknowledged late."""

    Request = ShardRequest

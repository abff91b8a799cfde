"""The part of a worker that listens to the broker. After any error it connects again."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

import structlog
from celery import Task
from celery.worker import state
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from kombu.transport import virtual
from redis.exceptions import DataError, RedisError
from vine import promise

from jobs.dispatch import RUN_SHARD

if TYPE_CHECKING:
    from kombu.asynchronous.hub import Hub
    from kombu.connection import Connection

    from worker.runtime import Runtime

log = structlog.get_logger(__name__)

#: Of the broker itself. kombu's own list has errors in it that a message may cause, such as KeyError.
BROKER_ERRORS = (RedisError, OSError)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
#: A consumer that lived so long starts its pauses anew.
HEALTHY_SECONDS = 30.0
#: Between two looks whether the worker is to end, or can use another shard.
LOOK_SECONDS = 0.1


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


class SteadyConsumer(Consumer):
    """Celery's consumer, which ends its worker on any error but a lost connection, connects anew after every error.

    A broker that was killed, or is a replica now, raises more kinds of errors than those (in kombu's cleaning up, too). A
    message that cannot be read is dropped and counted, or it would break the next worker too. A shard that this worker has no use for
    now goes back to the queue, for another one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # What Celery comes back from, and what an acknowledgement may meet.
        self.connection_errors = (Exception,)
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._started_at = 0.0

    def start(self) -> None:
        """Listens until the worker ends."""
        while True:
            try:
                return super().start()
            except Exception as error:  # noqa: BLE001 - whatever it is, the worker listens again
                # From Celery's own handling of the first error.
                log.warning("consumer not cleaned up", error=repr(error))
                self.connection = None
                self.blueprint.restart(self)
                self._rest()

    def on_connection_error_before_connected(self, exc: BaseException) -> None:
        self._note(exc)

    def on_connection_error_after_connected(self, exc: BaseException) -> None:
        self._note(exc)
        super().on_connection_error_after_connected(exc)

    def connection_for_read(self, heartbeat: float | None = None) -> Connection:
        app: Any = self.app
        connection = app.connection_for_read(heartbeat=heartbeat)
        transport: Any = connection.transport
        transport.Channel = _steady(transport.Channel, self._drop)
        return self.ensure_connected(connection)

    def create_task_handler(self, promise: Any = promise) -> Callable[[Any], None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        receive = super().create_task_handler(promise)

        def on_message(message: Any) -> None:
            try:
                if _is_of_shard(message) and not _hungry():
                    # It came when the worker had asked, and another one was claimed meanwhile.
                    message.requeue()
                    return
                receive(message)
            except BROKER_ERRORS:
                raise
            except Exception as error:  # noqa: BLE001 - a message may break anything
                self._drop(error)
                if not message.acknowledged:
                    message.reject_log_error(log, BROKER_ERRORS)

        return on_message

    def register_with_event_loop(self, hub: Hub) -> None:
        super().register_with_event_loop(hub)
        # Without it the loop would look only once a second whether the worker can use another shard.
        hub.timer.call_repeatedly(LOOK_SECONDS, lambda: None)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._drop(exc)
        message.ack_log_error(log, BROKER_ERRORS)

    def on_unknown_message(self, body: object, message: Any) -> None:
        self._drop(None)
        message.reject_log_error(log, BROKER_ERRORS)

    def on_unknown_task(self, body: object, message: Any, exc: Exception) -> None:
        self._drop(exc)
        message.reject_log_error(log, BROKER_ERRORS)

    def on_invalid_task(self, body: object, message: Any, exc: Exception) -> None:
        self._drop(exc)
        message.reject_log_error(log, BROKER_ERRORS)

    def _drop(self, error: Exception | None) -> None:
        log.warning("message dropped: this worker cannot read it", reason="it names no task" if error is None else repr(error))
        if (runtime := _runtime()) is not None:
            runtime.metrics.dropped_messages.inc()

    def _note(self, error: BaseException) -> None:
        log.warning("broker lost; connecting again", error=repr(error))
        if (runtime := _runtime()) is not None:
            runtime.metrics.consumer_restarts.inc()
        self._rest()

    def _rest(self) -> None:
        """Waits before the next connection, longer each time while none lasts; a worker that is to end does not wait."""
        now = time.monotonic()
        self._pause_seconds = (
            FIRST_PAUSE_SECONDS if now - self._started_at >= HEALTHY_SECONDS else min(self._pause_seconds * 2, LONGEST_PAUSE_SECONDS)
        )
        deadline = now + self._pause_seconds
        while (left := deadline - time.monotonic()) > 0:
            state.maybe_shutdown()
            time.sleep(min(left, LOOK_SECONDS))
        self._started_at = time.monotonic()


def _steady(channel: type[Any], drop: Callable[[Exception], None]) -> type[Any]:
    """A Redis channel that drops what it cannot read: kombu takes a message from its list before it looks at it. It asks the broker
    for a message only while the worker can use one.

    What cannot be acknowledged is delivered no more here: it would take a slot's place for ever, and a worker without a free
    slot asks the broker for nothing, so it would never see that its connection is gone.
    """

    class SteadyQoS(channel.QoS):
        def can_consume(self) -> bool:
            # What the broker was asked for is read in any case: unread, it would be kept from other workers.
            return super().can_consume() and (bool(self.channel._in_poll) or _hungry())

        def ack(self, delivery_tag: str) -> None:
            try:
                super().ack(delivery_tag)
            except BROKER_ERRORS:
                virtual.QoS.ack(self, delivery_tag)
                raise

        def reject(self, delivery_tag: str, requeue: bool = False) -> None:
            try:
                super().reject(delivery_tag, requeue)
            except BROKER_ERRORS:
                virtual.QoS.ack(self, delivery_tag)
                raise

    class SteadyChannel(channel):
        QoS = SteadyQoS

        def _brpop_read(self, **options: Any) -> Any:
            try:
                return super()._brpop_read(**options)
            except DataError as error:
                # Of an envelope that cannot be kept until it is acknowledged.
                drop(error)
                return True
            except (Empty, *BROKER_ERRORS):
                raise
            except Exception as error:  # noqa: BLE001 - a message may break anything
                drop(error)
                return True

    return SteadyChannel


def _is_of_shard(message: Any) -> bool:
    return isinstance(message.headers, dict) and message.headers.get("task") == RUN_SHARD


def _hungry() -> bool:
    """Whether the worker of this process takes another shard."""
    runtime = _runtime()
    return runtime is None or runtime.demand.hungry


def _runtime() -> Runtime | None:
    """That of the worker of this process, if it has one."""
    from worker import celery_app

    try:
        return celery_app.runtime()
    except RuntimeError:
        return None

"""Celery in a worker: the app with its task, the pool that owns the engine, the consumer of the broker, and Flower."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any

import structlog
from celery import Celery, signals
from celery.concurrency.thread import TaskPool
from celery.exceptions import CPendingDeprecationWarning, Reject
from celery.platforms import SecurityWarning
from celery.worker import state as celery_state
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from kombu.asynchronous.hub import Hub
from kombu.connection import Connection
from kombu.transport import virtual
from redis.exceptions import DataError, RedisError
from vine import promise

from jobs.dispatch import RUN_SHARD, make_celery
from jobs.ledger.records import Ticket
from jobs.settings import Settings
from pipelines.errors import NightjarError, invalid
from pipelines.interpreter import tune_gc
from worker.admission import MAX_SHARDS
from worker.models import Preload
from worker.runtime import Runtime
from worker.supervisor import report_end

log = structlog.get_logger(__name__)

#: Errors of the broker. Kombu's own list also contains errors that a message may cause, such as KeyError.
BROKER_ERRORS = (RedisError, OSError)

#: Pause before a reconnection; while the broker cannot be reached, Celery itself waits longer each time.
PAUSE_SECONDS = 0.5
#: Interval at which the worker checks whether it must end, or can use another shard.
CHECK_SECONDS = 0.1

#: The runtime of the worker in this process; None if there is no worker.
_runtime: Runtime | None = None


def run_worker(settings: Settings, model: str | None, private: bool, preload: Preload | None) -> int:
    """Runs the worker until a signal; returns the exit status. Raises `NightjarError` if it cannot start."""
    global _runtime
    # Celery warns about pickled messages if it runs as root (only JSON is accepted here), and about running tasks at each
    # lost connection (the ledger's leases handle those).
    for category in (SecurityWarning, CPendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    _runtime = Runtime(settings, model, private, preload)
    worker = create_app(settings).Worker(
        pool_cls=EnginePool,
        concurrency=settings.times.shards_in_flight or MAX_SHARDS,
        hostname=f"nightjar-{os.getpid()}@{socket.gethostname()}",
        loglevel=settings.log_level.upper(),
        quiet=True,
        # Workers need not know each other: leases are in the ledger.
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    if _runtime.failure is not None:
        raise _runtime.failure
    return int(worker.exitcode or 0)


def run_flower(settings: Settings) -> None:
    """Runs Flower in this process. Raises `config.invalid` without credentials, because the dashboard shows all jobs."""
    auth = "" if settings.flower.basic_auth is None else settings.flower.basic_auth.get_secret_value()
    # Flower accepts several pairs, separated by commas. A colon alone would mean an empty user and password.
    if not all(
        user.strip() and password.strip()
        for user, _, password in (one.partition(":") for one in auth.split(","))
    ):
        raise invalid(
            "Flower does not start without a user and a password.",
            "Set SPEECH_FLOWER__BASIC_AUTH to user:password, both without commas and not empty.",
        )
    # Passed in the environment, because every user of the machine can read arguments.
    os.environ["FLOWER_BASIC_AUTH"] = auth
    sys.argv[0] = "celery"
    create_app(settings).start(
        [
            "flower",
            f"--address={settings.flower.address}",
            f"--port={settings.flower.port}",
            "--read_only=True",
            "--max_tasks=100000",
        ]
    )


def create_app(settings: Settings) -> Celery:
    """The Celery app with its task. The logging of this process stays as it is: Celery configures none if the signal
    `setup_logging` has a receiver."""
    signals.setup_logging.connect(lambda **_: None, weak=False)
    app = make_celery(settings)
    app.conf.worker_consumer = ReconnectingConsumer
    app.task(name=RUN_SHARD, Request=ShardRequest)(run_shard)
    app.finalize()
    return app


def run_shard(job: str, shard: int, epoch: int) -> str:
    """Runs one shard. The message returns to the queue if this worker leaves the shard to another worker."""
    assert _runtime is not None
    handling = _runtime.handle(Ticket(job, shard, epoch))
    if handling == "refused":
        raise Reject(requeue=True)
    return handling


def wants_message() -> bool:
    """Whether the worker of this process takes another shard."""
    return _runtime is None or _runtime.demand.wants_message


class EnginePool(TaskPool):
    """The threads that run shards with the `Runtime`, one per shard in flight, started as needed.

    The pool owns the engine, because Celery would stop a bootstep before the pool has drained. Threads share the
    process, so CUDA is never forked.
    """

    def on_start(self) -> None:
        super().on_start()
        assert _runtime is not None
        runtime = self.runtime = _runtime
        # SIGTERM and SIGINT drain the worker; a second one, or SIGQUIT, stops it at once. The exit status is 0. These
        # handlers replace Celery's, whose cold shutdown fails for this pool and waits for its time limit (celery#9505).
        for number, end in (
            (signal.SIGTERM, runtime.drain),
            (signal.SIGINT, runtime.drain),
            (signal.SIGQUIT, runtime.stop_now),
        ):
            signal.signal(number, partial(_end, end))
        try:
            runtime.start()
            tune_gc()
        except NightjarError as error:
            # The caller reports the error; Celery would log a traceback.
            runtime.failure = error
            raise SystemExit(1) from error
        except Exception as error:
            # Celery logs the traceback and ends with an error status.
            report_end(f"{type(error).__name__}: {error}")
            raise

    def on_apply(self, target: Any, args: Any = None, *arguments: Any, **options: Any) -> Any:
        result = super().on_apply(target, args, *arguments, **options)
        if args and args[0] == RUN_SHARD:
            self.runtime.demand.taken()
            result.f.add_done_callback(lambda _: self.runtime.demand.ended())
        return result

    def on_stop(self) -> None:
        """Drains, then closes the engine. Celery may call it twice."""
        if not self.runtime.draining:
            self.runtime.drain()
        super().on_stop()
        self.runtime.stop()

    def on_terminate(self) -> None:
        self.runtime.stop_now()
        self.on_stop()

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Gives all shards in flight back, because threads cannot be killed (Celery's default raises, celery#10490)."""
        self.runtime.stop_now()


def _end(end: Callable[[], None], *_: object) -> None:
    celery_state.should_stop = 0
    end()


class _AckLog:
    """Logs kombu's message about a failed acknowledgement as one line without a traceback, because the ledger has the
    result of the shard."""

    def critical(self, message: str, *arguments: object, exc_info: object = None) -> None:
        log.warning("message not acknowledged", reason=message % arguments)


class ShardRequest(Request):
    """A request whose late acknowledgement may fail.

    After an error kombu closes the connection, and an acknowledgement raises AttributeError, after which Celery would
    end the worker. If the message is delivered again, its shard cannot be claimed, and the message is dropped.
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


class ReconnectingConsumer(Consumer):
    """A consumer that reconnects after every error; Celery's own consumer ends the worker on most errors.

    A killed broker, or one that became a replica, raises various errors, also in kombu's cleanup. Messages that
    cannot be read are dropped and counted, since they would break other workers too. A message that the worker
    cannot use now returns to the queue for another worker.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Errors after which Celery reconnects, also in acknowledgements.
        self.connection_errors = (Exception,)

    def start(self) -> None:
        """Consumes messages until the worker ends."""
        while True:
            try:
                return super().start()
            except Exception as error:  # noqa: BLE001 - the worker reconnects after any error
                # A second error in Celery's handling of the first one.
                log.warning("cleanup of the consumer failed", error=repr(error))
                self.connection = None
                self.blueprint.restart(self)
                self._pause()

    def on_connection_error_before_connected(self, exc: BaseException) -> None:
        log.warning("connection to the broker lost; reconnecting", error=repr(exc))
        if _runtime is not None:
            _runtime.metrics.consumer_restarts.inc()
        self._pause()

    def on_connection_error_after_connected(self, exc: BaseException) -> None:
        self.on_connection_error_before_connected(exc)
        super().on_connection_error_after_connected(exc)

    def connection_for_read(self, heartbeat: float | None = None) -> Connection:
        app: Any = self.app
        connection = app.connection_for_read(heartbeat=heartbeat)
        transport: Any = connection.transport
        transport.Channel = _tolerant(transport.Channel, self._drop)
        return self.ensure_connected(connection)

    def create_task_handler(self, promise: Any = promise) -> Callable[[Any], None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        receive = super().create_task_handler(promise)

        def on_message(message: Any) -> None:
            try:
                task = message.headers.get("task") if isinstance(message.headers, dict) else None
                if task == RUN_SHARD and not wants_message():
                    # The worker claimed another shard after it had requested this message.
                    message.requeue()
                    return
                receive(message)
            except BROKER_ERRORS:
                raise
            except Exception as error:  # noqa: BLE001 - a message may break anything
                self._drop(error, message)

        return on_message

    def register_with_event_loop(self, hub: Hub) -> None:
        super().register_with_event_loop(hub)
        # Otherwise the loop would check only once a second whether the worker can use another shard.
        hub.timer.call_repeatedly(CHECK_SECONDS, lambda: None)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._drop(exc, message)

    def on_unknown_message(self, body: object, message: Any, exc: Exception | None = None) -> None:
        self._drop(exc, message)

    on_unknown_task = on_invalid_task = on_unknown_message

    def _drop(self, error: Exception | None, message: Any = None) -> None:
        """Counts a dropped message, and removes it from the queue. `message`: None if the channel has removed it."""
        log.warning(
            "message dropped, because it cannot be read",
            reason="it names no task" if error is None else repr(error),
        )
        if _runtime is not None:
            _runtime.metrics.dropped_messages.inc()
        if message is not None and not message.acknowledged:
            message.reject_log_error(log, BROKER_ERRORS)

    def _pause(self) -> None:
        """Waits before a reconnection, unless the worker must end."""
        until = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < until:
            celery_state.maybe_shutdown()
            time.sleep(CHECK_SECONDS)


def _tolerant(channel: type[Any], drop: Callable[[Exception], None]) -> type[Any]:
    """A Redis channel that requests a message only if the worker can use one, and drops messages that cannot be read,
    because kombu removes a message from its list before parsing it.

    A message whose acknowledgement fails is removed from the channel's list of unacknowledged messages. Otherwise it
    would occupy a place there forever, and a worker without free places would request nothing and so not notice that
    its connection is lost.
    """

    class TolerantQoS(channel.QoS):
        def can_consume(self) -> bool:
            # A message that was requested must be read. Otherwise it would be withheld from other workers.
            return super().can_consume() and (bool(self.channel._in_poll) or wants_message())

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

    class TolerantChannel(channel):
        QoS = TolerantQoS

        def _brpop_read(self, **options: Any) -> Any:
            try:
                return super()._brpop_read(**options)
            except DataError as error:
                # Kombu stores a message in Redis until its acknowledgement, but Redis cannot store values of this one.
                drop(error)
                return True
            except (Empty, *BROKER_ERRORS):
                raise
            except Exception as error:  # noqa: BLE001 - a message may break anything
                drop(error)
                return True

    return TolerantChannel

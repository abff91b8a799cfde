"""Celery in a worker: the app with its task, the pool that owns the engine, the consumer that listens to
the broker, and Flower."""

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
from typing import TYPE_CHECKING, Any

import structlog
from celery import Celery, signals
from celery.concurrency.thread import TaskPool
from celery.exceptions import CPendingDeprecationWarning, Reject
from celery.platforms import SecurityWarning
from celery.worker import state as celery_state
from celery.worker.consumer import Consumer
from celery.worker.request import Request
from kombu.transport import virtual
from redis.exceptions import DataError, RedisError
from vine import promise

from jobs.dispatch import RUN_SHARD, make_celery
from jobs.ledger.records import Ticket
from jobs.settings import Settings
from pipelines.errors import NightjarError, invalid
from pipelines.interpreter import collect_seldom
from worker.admission import MAX_SHARDS
from worker.runtime import Handling, Runtime, WorkerOptions
from worker.supervisor import report_end

if TYPE_CHECKING:
    from kombu.asynchronous.hub import Hub
    from kombu.connection import Connection

log = structlog.get_logger(__name__)

#: Of the broker itself. kombu's own list has errors in it that a message may cause, such as KeyError.
BROKER_ERRORS = (RedisError, OSError)

#: Before the consumer connects anew; while the broker is away, Celery itself waits longer each time.
PAUSE_SECONDS = 0.5
#: Between two looks whether the worker is to end, or can use another shard.
LOOK_SECONDS = 0.1

#: That of the worker of this process; None: there is no worker in it.
_runtime: Runtime | None = None


def run_worker(settings: Settings, options: WorkerOptions) -> int:
    """Works until a signal; returns the exit status. Raises `NightjarError` when the worker cannot start."""
    global _runtime
    # Celery warns root of pickled messages; only JSON is accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # And of what becomes of tasks when a connection is lost, at each loss; that is set.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    _runtime = Runtime(settings, options)
    worker = create_app(settings).Worker(
        pool_cls=EnginePool,
        concurrency=settings.times.shards_in_flight or MAX_SHARDS,
        hostname=f"nightjar-{os.getpid()}@{socket.gethostname()}",
        loglevel=settings.log_level.upper(),
        quiet=True,
        # Workers owe each other nothing: the ledger knows who holds what.
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    if _runtime.failure is not None:
        raise _runtime.failure
    return int(worker.exitcode or 0)


def run_flower(settings: Settings) -> None:
    """Becomes Flower. Raises `config.invalid` without credentials, for the dashboard shows every job."""
    auth = "" if settings.flower.basic_auth is None else settings.flower.basic_auth.get_secret_value()
    # Flower takes several, with commas between them, and would let in whoever leaves both fields of a lone
    # colon empty.
    if not all(
        user.strip() and password.strip()
        for user, _, password in (one.partition(":") for one in auth.split(","))
    ):
        raise invalid(
            "Flower does not start without a user and a password.",
            "Set SPEECH_FLOWER__BASIC_AUTH to user:password, neither of them empty or with a comma.",
        )
    # By environment, not by arguments: those are readable by every user of the machine.
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
    """The app with its task. Its logs are the ones of this process: who listens to this signal keeps
    Celery from setting up its own."""
    signals.setup_logging.connect(_keep_logging)
    app = make_celery(settings)
    app.conf.worker_consumer = SteadyConsumer
    app.task(name=RUN_SHARD, Request=ShardRequest)(run_shard)
    app.finalize()
    return app


def _keep_logging(**_: object) -> None:
    """Leaves logging as it is."""


def run_shard(job: str, shard: int, epoch: int) -> str:
    """Runs one shard. The message goes back to the queue when this worker leaves it to another one."""
    assert _runtime is not None
    handling = _runtime.handle(Ticket(job, shard, epoch))
    if handling is Handling.REFUSED:
        raise Reject(requeue=True)
    return handling.value


def _is_hungry() -> bool:
    """Whether the worker of this process takes another shard."""
    return _runtime is None or _runtime.demand.hungry


class EnginePool(TaskPool):
    """Threads around the `Runtime`, one for each shard in flight. A thread begins when it is first needed.

    A bootstep would be stopped while tasks still run, since Celery stops steps before the pool drains; so
    the pool itself holds the engine. CUDA is never forked over, because threads share the process.
    """

    def on_start(self) -> None:
        super().on_start()
        assert _runtime is not None
        self.runtime: Runtime = _runtime
        runtime = self.runtime
        # SIGTERM and SIGINT drain, a second one hurries; SIGQUIT hurries. All end with status 0. Celery's
        # handlers are replaced: its cold shutdown cancels tasks of pools that cannot, and waits out its whole
        # time (celery#9505).
        for number, end in (
            (signal.SIGTERM, runtime.drain),
            (signal.SIGINT, runtime.drain),
            (signal.SIGQUIT, runtime.hurry),
        ):
            signal.signal(number, partial(_end, end))
        try:
            runtime.start()
            collect_seldom()
        except NightjarError as error:
            # Celery would log a traceback; whoever started the worker tells the person.
            runtime.failure = error
            raise SystemExit(1) from error
        except Exception as error:
            # Celery logs the traceback and ends with a status.
            report_end(f"{type(error).__name__}: {error}")
            raise

    def on_apply(self, target: Any, args: Any = None, *arguments: Any, **options: Any) -> Any:
        result = super().on_apply(target, args, *arguments, **options)
        if args and args[0] == RUN_SHARD:
            self.runtime.demand.taken()
            result.f.add_done_callback(lambda _: self.runtime.demand.ended())
        return result

    def on_stop(self) -> None:
        """Drains, then closes the engine. Celery may call it twice on its way down."""
        if not self.runtime.draining:
            self.runtime.drain()
        super().on_stop()
        self.runtime.stop()

    def on_terminate(self) -> None:
        self.runtime.hurry()
        self.on_stop()

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Threads cannot be killed: every shard in flight is given back instead (celery#10490 is a
        traceback here)."""
        self.runtime.hurry()


def _end(end: Callable[[], None], *_: object) -> None:
    celery_state.should_stop = 0
    end()


class _AckLog:
    """Takes kombu's complaint about an acknowledgement that failed: one line, for the ledger knows that
    the shard ran."""

    def critical(self, message: str, *arguments: object, exc_info: object = None) -> None:
        log.warning("message not acknowledged", reason=message % arguments)


class ShardRequest(Request):
    """A request whose late acknowledgement may fail.

    A connection that kombu closed after an error has no client any more, so that acknowledging over it is
    an AttributeError; Celery takes that for a fault of its own and ends the worker. A message that is
    delivered again for want of an acknowledgement is dropped at its claim.
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


class SteadyConsumer(Consumer):
    """Celery's consumer, which ends its worker on any error but a lost connection, connects anew after
    every error.

    A broker that was killed, or is a replica now, raises more kinds of errors than those (in kombu's
    cleaning up, too). A message that cannot be read is dropped and counted, or it would break the next
    worker too. A shard that this worker has no use for now goes back to the queue, for another one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # What Celery comes back from, and what an acknowledgement may meet.
        self.connection_errors = (Exception,)

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
                task = message.headers.get("task") if isinstance(message.headers, dict) else None
                if task == RUN_SHARD and not _is_hungry():
                    # It came when the worker had asked, and another one was claimed meanwhile.
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
        # Without it the loop would look only once a second whether the worker can use another shard.
        hub.timer.call_repeatedly(LOOK_SECONDS, lambda: None)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._drop(exc, message)

    def on_unknown_message(self, body: object, message: Any) -> None:
        self._drop(None, message)

    def on_unknown_task(self, body: object, message: Any, exc: Exception) -> None:
        self._drop(exc, message)

    on_invalid_task = on_unknown_task

    def _drop(self, error: Exception | None, message: Any = None) -> None:
        """Drops a message; None: the channel has dropped it."""
        log.warning(
            "message dropped: this worker cannot read it",
            reason="it names no task" if error is None else repr(error),
        )
        if _runtime is not None:
            _runtime.metrics.dropped_messages.inc()
        if message is not None and not message.acknowledged:
            message.reject_log_error(log, BROKER_ERRORS)

    def _note(self, error: BaseException) -> None:
        log.warning("broker lost; connecting again", error=repr(error))
        if _runtime is not None:
            _runtime.metrics.consumer_restarts.inc()
        self._rest()

    def _rest(self) -> None:
        """Waits before the next connection; a worker that is to end does not wait."""
        until = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < until:
            celery_state.maybe_shutdown()
            time.sleep(LOOK_SECONDS)


def _steady(channel: type[Any], drop: Callable[[Exception], None]) -> type[Any]:
    """A Redis channel that drops what it cannot read: kombu takes a message from its list before it looks
    at it. It asks the broker for a message only while the worker can use one.

    What cannot be acknowledged is delivered no more here: it would take a slot's place for ever, and a
    worker without a free slot asks the broker for nothing, so it would never see that its connection is
    gone.
    """

    class SteadyQoS(channel.QoS):
        def can_consume(self) -> bool:
            # What the broker was asked for is read in any case: unread, it would be kept from other workers.
            return super().can_consume() and (bool(self.channel._in_poll) or _is_hungry())

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

"""The broker and the dispatcher: the Celery app with its settings, and messages for ready shards.

The state is in the ledger; messages only wake workers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from jobs.formatting import redact
from jobs.ledger.records import Ticket
from pipelines.errors import ErrorCode, ServiceError

if TYPE_CHECKING:
    from celery import Celery
    from kombu.connection import Connection

    from jobs.ledger import Ledger
    from jobs.settings import Settings


RUN_SHARD = "nightjar.run_shard"
QUEUE = "nightjar"
KEY_PREFIX = "speech:"

CONNECT_SECONDS = 5
SOCKET_SECONDS = 30
BATCH_MESSAGES = 500


def message_priority(job_priority: int) -> int:
    """The Redis priority of a job's messages: 0 is delivered first; kombu has one list each for 0, 3, 6 and
    9."""
    if job_priority > 0:
        return 0 if job_priority >= 10 else 3
    return 6 if job_priority == 0 else 9


def make_celery(settings: Settings) -> Celery:
    """The Celery app for these settings.

    Messages only wake workers: no results, no start times (`eta`), JSON only, late acknowledgement, and no
    prefetching. Retries are scheduled by the ledger (`not_before`), never by Celery.
    """
    from celery import Celery
    from kombu.entity import Queue

    app = Celery("nightjar", set_as_current=False)
    app.conf.update(
        broker_url=settings.effective_broker_url,
        broker_transport_options={
            # After this time messages of killed workers are delivered again. That is harmless, because a
            # worker needs the lease of a shard.
            "visibility_timeout": 3600,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "socket_timeout": SOCKET_SECONDS,
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_keepalive": True,
            "health_check_interval": 25,
            "global_keyprefix": KEY_PREFIX,
            "queue_order_strategy": "priority",
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        task_ignore_result=True,
        task_acks_late=True,
        accept_content=["json"],
        task_default_queue=QUEUE,
        task_queues=[Queue(QUEUE)],
        task_create_missing_queues=False,
        task_send_sent_event=True,
        worker_send_task_events=True,
        # Otherwise any client of the broker could end workers.
        worker_enable_remote_control=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
    )
    return app


class Publisher:
    """Publishes shards over a pooled connection. It can still be used after `broker.unreachable`."""

    def __init__(self, settings: Settings) -> None:
        self._app = make_celery(settings)

    def publish(self, tickets: Sequence[Ticket]) -> None:
        """Sends one message (job, shard, epoch) per ticket, pipelined."""
        if not tickets:
            return
        with self.connection() as connection:
            producer = self._app.amqp.Producer(connection, auto_declare=False)
            self._app.amqp.queues[QUEUE](producer.channel).declare()
            with producer.batch(max_size=BATCH_MESSAGES):
                for ticket in tickets:
                    arguments = {"job": ticket.job_id, "shard": ticket.shard_no, "epoch": ticket.epoch}
                    message = self._app.amqp.as_task_v2(
                        str(uuid.uuid4()), RUN_SHARD, kwargs=arguments, ignore_result=True
                    )
                    producer.publish(
                        message.body,
                        exchange="",
                        routing_key=QUEUE,
                        serializer="json",
                        headers=message.headers,
                        priority=message_priority(ticket.priority),
                        **message.properties,
                    )

    def queue_depth(self) -> int:
        """The number of messages in the queue."""
        with self.connection() as connection:
            channel: Any = connection.default_channel
            return int(channel.queue_declare(QUEUE).message_count)

    def close(self) -> None:
        self._app.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection of the pool. Raises `broker.unreachable`, also for errors of the block."""
        from kombu.exceptions import OperationalError
        from redis.exceptions import RedisError

        try:
            with self._app.pool.acquire(block=True, timeout=CONNECT_SECONDS) as connection:
                connection.ensure_connection(
                    max_retries=1, interval_start=0, interval_step=0, timeout=CONNECT_SECONDS
                )
                yield connection
        except (OperationalError, RedisError, OSError) as error:
            url = redact(str(self._app.conf.broker_url))
            raise ServiceError(
                ErrorCode.BROKER_UNREACHABLE,
                f"The broker at {url} cannot be reached: {redact(str(error)).rstrip('.')}.",
                "Start it, or set SPEECH_BROKER_URL to a running one. `nightjar dev` runs one with a worker.",
            ) from error


def check(settings: Settings) -> None:
    """Raises `broker.unreachable` if the broker does not answer within a few seconds."""
    with closing(Publisher(settings)) as publisher, publisher.connection() as connection:
        channel: Any = connection.default_channel
        channel.client.ping()


def dispatch(ledger: Ledger, settings: Settings, publisher: Publisher | None = None) -> int:
    """Queues and publishes ready shards until the window of queued shards is full; returns their number. Any
    number of processes can dispatch at once.

    The state is committed before the message is sent, so a crash in between loses only messages, which
    `Ledger.reconcile` detects. Raises `ServiceError`; shards whose messages could not be sent become ready again.
    """
    factor = settings.times.window_factor
    room = ledger.free_window(factor)
    tickets = ledger.take_ready(room, factor) if room > 0 else []
    try:
        (publisher or Publisher(settings)).publish(tickets)
    except ServiceError:
        ledger.give_back(tickets)
        raise
    return len(tickets)

"""The dispatcher: ready shards become messages, no more than the workers can soon take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.broker import Publisher
from pipelines.errors import ServiceError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings


class Dispatcher:
    """Moves shards from ready to queued in the ledger, then publishes them.

    The state is committed before the message is sent: a crash between loses messages, which `Ledger.reconcile` finds, and
    never a shard. Any number of dispatchers may run at once.
    """

    def __init__(self, ledger: Ledger, settings: Settings, publisher: Publisher | None = None) -> None:
        self._ledger = ledger
        self._window_factor = settings.dispatch.window_factor
        self._publisher = publisher or Publisher(settings)

    def run_once(self) -> int:
        """Dispatches what fits into the window; returns how many shards.

        Raises `ServiceError`; shards whose messages could not be sent are ready again then.
        """
        room = self._ledger.free_window(self._window_factor)
        tickets = self._ledger.take_ready(room, self._window_factor) if room > 0 else []
        try:
            self._publisher.publish(tickets)
        except ServiceError:
            self._ledger.give_back(tickets)
            raise
        return len(tickets)

"""What the client of an engine process keeps of the requests in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from pipelines.engine_process.messages import Append
from pipelines.errors import NightjarError
from pipelines.request import AudioChunk, Speech
from pipelines.streams import Listener

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    request_id: str
    #: What hears of it: the future of a whole utterance, or the listener of a stream.
    hears: Future[Speech] | Listener

    def fail(self, error: NightjarError) -> None:
        if isinstance(self.hears, Listener):
            tell(self.hears, error)
        else:
            self.hears.set_exception(error)


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """A stream whose text is open. Implements `pipelines.streams.IdStream`."""

    number: int
    listener: Listener
    post: Callable[[Append], None]

    def append(self, ids: Sequence[int], final: bool) -> None:
        self.post(Append(self.number, list(ids), final))

    def end(self) -> None:
        self.listener.close()


def tell(listener: Listener, outcome: AudioChunk | NightjarError) -> None:
    """A listener that raises must not stop the host."""
    try:
        listener(outcome)
    except Exception:
        log.exception("a listener of a stream failed")

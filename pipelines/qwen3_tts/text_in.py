"""An utterance whose text is still being written, from its first ids to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipelines.errors import ErrorCode, InputError, NightjarError

if TYPE_CHECKING:
    from pipelines.engine.engine import Engine
    from pipelines.engine.scheduler import GenerationRequest
    from pipelines.streams import End, Heard

#: Gives a request with these ids of its text to the engine; says whether they are all of it. Raises `NightjarError`.
Begin = Callable[[Sequence[int], bool], "tuple[GenerationRequest, End]"]


class OpenText:
    """Implements `pipelines.streams.IdStream`. The engine hears of the request once the ids are there that stand in its prompt."""

    def __init__(self, engine: Engine, begin: Begin, first: int, end_id: int, heard: Heard) -> None:
        """`first`: how many ids that is; `end_id`: the one that follows the text."""
        self._engine = engine
        self._begin = begin
        self._first = first
        self._end_id = end_id
        self._heard = heard
        self._lock = threading.RLock()
        self._ids: list[int] = []
        self._begun: tuple[GenerationRequest, End] | None = None
        #: Whether nothing more is to come: the text has ended, or the stream.
        self._complete = False

    def append(self, ids: Sequence[int], final: bool) -> None:
        error: NightjarError | None = None
        with self._lock:
            if self._complete:
                return
            self._complete = final
            if self._begun is not None:
                self._engine.append(self._begun[0], [*ids, self._end_id] if final else ids, final)
                return
            self._ids += ids
            if final or len(self._ids) >= self._first:
                try:
                    self._begun = self._started(final)
                except NightjarError as refused:
                    self._complete, error = True, refused
        if error is not None:
            self._heard(error)

    def end(self) -> None:
        with self._lock:
            self._complete = True
            begun = self._begun
        if begun is not None:
            begun[1]()

    def _started(self, final: bool) -> tuple[GenerationRequest, End]:
        if not self._ids:
            raise InputError(ErrorCode.INPUT_EMPTY_TEXT, "There is no text to speak.", "Send some text.")
        return self._begin(self._ids, final)

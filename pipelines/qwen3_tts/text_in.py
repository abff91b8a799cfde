"""An utterance whose text is still being written, from its first ids to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipelines.errors import ErrorCode, InputError, NightjarError
from pipelines.request import Failed

if TYPE_CHECKING:
    from pipelines.engine.engine import Engine
    from pipelines.engine.scheduler import GenerationRequest
    from pipelines.request import Handle, OnEvent, TextPieces

#: Gives a request with these ids of its text to the engine; says whether they are all of it. Raises `NightjarError`.
Begin = Callable[[Sequence[int], bool], "tuple[GenerationRequest, Handle]"]


class OpenText:
    """The `pipelines.request.Handle` of a text that comes in pieces.

    The engine hears of the request once the ids are there that stand in its prompt.
    """

    def __init__(self, engine: Engine, begin: Begin, first: int, end_id: int, on_event: OnEvent, pieces: TextPieces | None = None) -> None:
        """`first`: how many ids that is; `end_id`: the one that follows the text; `pieces`: makes ids of text, None: ids come."""
        self._engine = engine
        self._begin = begin
        self._first = first
        self._end_id = end_id
        self._on_event = on_event
        self._pieces = pieces
        self._lock = threading.RLock()
        self._ids: list[int] = []
        self._begun: tuple[GenerationRequest, Handle] | None = None
        #: Whether nothing more is to come: the text has ended, or the stream.
        self._complete = False

    def append(self, text: str | list[int], final: bool) -> None:
        error: NightjarError | None = None
        with self._lock:
            if self._complete:
                return
            ids = self._ids_of(text, final)
            self._complete = final
            if not (ids or final):
                return
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
            self._on_event(Failed(error))

    def cancel(self) -> None:
        with self._lock:
            self._complete = True
            begun = self._begun
        if begun is not None:
            begun[1].cancel()

    def _ids_of(self, text: str | list[int], final: bool) -> list[int]:
        if isinstance(text, list):
            return text
        assert self._pieces is not None, "the text of a prepared request comes as ids"
        return self._pieces(text, final)

    def _started(self, final: bool) -> tuple[GenerationRequest, Handle]:
        if not self._ids:
            raise InputError(ErrorCode.INPUT_EMPTY_TEXT, "There is no text to speak.", "Send some text.")
        return self._begin(self._ids, final)

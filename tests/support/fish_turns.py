"""Items of Fish Speech S2 turn by turn on any host, told to a plain receiver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from pipelines.errors import NightjarError
from pipelines.fish_speech.pipeline import TurnPlan, Turns
from pipelines.request import Listener
from pipelines.results import Receiver
from pipelines.tokens import Tokens


class _Told(Receiver):
    """Hands all on to the receiver of its info."""

    def __init__(self, info: Any, stage: Any, listener: Listener) -> None:
        super().__init__(info, stage, listener)
        self.streamed, self._heard = info.heard.streamed, info.heard

    def tokens(self, ids: list[int], codes: NDArray[Any] | None) -> None:
        self._heard.tokens(ids, codes)

    def finished(self, tokens: Tokens) -> None:
        self._heard.finished(tokens)

    def failed(self, error: NightjarError) -> None:
        self._heard.failed(error)


class Asked(Turns, _Told):
    """An item that was asked for."""

    def __init__(self, host: Any, plan: TurnPlan, heard: Any) -> None:
        listener = Listener(lambda _event: None, lambda _done: host.cancel(self.current))
        super().__init__(SimpleNamespace(plan=plan, heard=heard), None, listener)  # pyright: ignore[reportArgumentType]
        self.engine = host
        self.request_more(plan.current)

    def cancel(self) -> None:
        """Nobody listens any more."""
        self._listener.cancel()

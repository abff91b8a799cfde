"""What families of both engines show alike: sequences that join a running batch, and draws beside exact
probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.tokens import Tokens
from tests.support.vllm_kit import Waiter

SECONDS = 300
#: The expected number of draws from which on an id is a group of its own.
EXPECTED = 5


class _Next(Waiter):
    """Hears a stream; its first tokens send the next sequence into the batch."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__(streamed=True)
        self._then = then

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        if not self.parts:
            self._then()
        super().tokens(ids, codes)


def staggered(
    order: Sequence[dict[str, Any]],
    submit: Callable[[dict[str, Any], Waiter], object],
    check: Callable[[dict[str, Any], Tokens], None],
) -> None:
    """Streams of these cases that join a running batch one after the other, each once the one before has
    been heard."""
    waiters: list[Waiter] = [Waiter()] * len(order)

    def send(index: int) -> None:
        if index < len(order):
            waiters[index] = waiter = _Next(lambda: send(index + 1))
            submit(order[index], waiter)

    send(0)
    for index, case in enumerate(order):
        # A sequence is submitted before the one ahead of it is over.
        tokens = waiters[index].future.result(SECONDS)
        check(case, tokens)
        assert [one for part in waiters[index].parts for one in part] == tokens.ids, (
            f"{case['name']}: other ids while it grew"
        )


def check_share(what: str, ids: Sequence[int], chances: NDArray[np.float64]) -> None:
    """Raises AssertionError for an id that cannot be drawn, and where chi-square is beyond its
    one-in-a-million point."""
    found = np.bincount(ids, minlength=len(chances))
    impossible = np.flatnonzero((chances == 0) & (found > 0))
    assert not len(impossible), f"{what}: id {impossible[:1]} was drawn, whose probability is 0"
    often = chances * len(ids) >= EXPECTED
    groups = [np.append(values[often], values[~often].sum()) for values in (found, chances * len(ids))]
    kept = groups[1] > 0
    square = float(((groups[0] - groups[1])[kept] ** 2 / groups[1][kept]).sum())
    freedom = max(int(kept.sum()) - 1, 1)
    # Wilson and Hilferty (1931); 4.75 standard deviations are one in a million.
    bound = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert square <= bound, (
        f"{what}: chi-square {square:.1f} of {freedom} degrees of freedom, allowed {bound:.1f}"
    )

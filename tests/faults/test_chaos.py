"""Workers, broker, database and store are killed at random moments; every item is still made exactly once."""

from __future__ import annotations

import pytest

from tests.faults.cluster import Chaos, Cluster, assert_exactly_once

ITEMS = 2000
SEEDS = (11, 29, 47)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_item_is_made_exactly_once_whatever_is_killed(cluster: Cluster, seed: int) -> None:
    texts = {f"item-{seed}-{number}": f"Sentence number {number} of the night {seed}." for number in range(ITEMS)}
    job = cluster.submit(texts)
    chaos = Chaos(cluster, job, seed)
    chaos.start()
    try:
        cluster.wait(job, seconds=300)
    finally:
        chaos.halt()
    assert chaos.kills["worker"] >= 1
    assert sum(chaos.kills.values()) >= 4
    assert_exactly_once(cluster, job, texts)

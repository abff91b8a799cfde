"""Workers, broker, database and store are killed at random moments; every item is still made exactly once."""

from __future__ import annotations

import os

import pytest

from tests.faults.cluster import Chaos, Cluster, assert_exactly_once

#: One seed kills one of each kind at once; `make soak` tries many, with more items.
SEEDS = [int(seed) for seed in os.environ.get("NIGHTJAR_CHAOS_SEEDS", "315").split()]
ITEMS = 2000 if len(SEEDS) > 1 else 800


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pack", [False, True], ids=["objects", "packs"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_item_is_made_exactly_once_whatever_is_killed(cluster: Cluster, seed: int, pack: bool) -> None:
    texts = {
        f"item-{seed}-{number}": f"Sentence number {number} of the night {seed}." for number in range(ITEMS)
    }
    texts[f"item-{seed}-0"] = cluster.held("The first sentence, which lasts.")
    # The held item ends under no kill, and must not count as the cause of any.
    job = cluster.submit(texts, max_attempts=50, pack=pack)
    chaos = Chaos(cluster, job, seed)
    chaos.start()
    try:
        cluster.wait(job, seconds=900)
    finally:
        chaos.halt()
    assert chaos.enough
    assert_exactly_once(cluster, job, texts)

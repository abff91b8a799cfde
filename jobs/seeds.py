"""Seeds that depend on the job, the line and the message alone: not on shard, order, retry or worker."""

from __future__ import annotations

import hashlib


def item_seed(job_seed: int, example_id: str, message_index: int, draw: int = 0, line_seed: int | None = None) -> int:
    """The seed of all noise of one message, 0 <= seed < 2**63.

    `line_seed` is the line's own `generation.seed`: used as it is at draw 0, and in the job's place at later draws. The
    others are the first 63 bits of BLAKE2b over the fields, each after its length, so that no two rows of fields collide.
    """
    if line_seed is not None and draw == 0:
        return line_seed
    digest = hashlib.blake2b(digest_size=8, person=b"nightjar.seed")
    for field in (str(job_seed if line_seed is None else line_seed), example_id, str(message_index), str(draw)):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(digest.digest(), "big") >> 1

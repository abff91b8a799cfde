"""A job whose workers meet faults, beside the same job without: an engine's process is killed, and a GPU
is gone for the rest of the job.

Both jobs run in the engine's reproducible mode, in which equal requests give equal bits on any GPU and in
any batch. So every object of the one must have the bytes of the other's.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import planted
from benchmarks.job_paths import Made
from benchmarks.process_use import family

#: The variable under which engines give equal bits.
REPRODUCIBLE = {"SPEECH_ENGINE__REPRODUCIBLE": "true"}
#: Objects that are read back from the store.
_READ_BACK = 2000
#: What the log says when the worker of a GPU that is gone has noticed it, and when the supervisor gives it
#: up.
NOTICED, QUARANTINED = "does not find the GPU", "worker quarantined"


@dataclass(slots=True)
class Faults:
    """What happens to the workers of a job of `items`, each once the given share of them is done.

    The engine of `killed` gets SIGKILL. `hidden` is a GPU that is gone: its engine dies, and no process
    finds the GPU from then on.
    """

    voices: Path
    items: int
    killed: str
    hidden: str
    kill_after: float = 0.1
    hide_after: float = 0.2
    #: The workers go on after the job's end until their log says this.
    awaited: str = QUARANTINED
    happened: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    #: Unix times at which the log was seen to say so.
    noticed_at: float | None = None
    quarantined_at: float | None = None

    def look(self, root: int, done: int) -> None:
        """Does what is due. `root`: the process above the workers."""
        if not self.happened:
            if done >= self.kill_after * self.items and (engine := engine_of(root, self.killed)):
                self._end("its engine was killed", self.killed, engine, done)
        elif (
            len(self.happened) == 1
            and done >= self.hide_after * self.items
            and (engine := engine_of(root, self.hidden))
        ):
            planted.hide(self.voices, self.hidden)
            self._end("it was hidden", self.hidden, engine, done)

    def over(self, said: str) -> bool:
        """Whether the workers' log says what is awaited of the GPU that is gone; True where none is."""
        if self.noticed_at is None and NOTICED in said:
            self.noticed_at = time.time()
        if self.quarantined_at is None and QUARANTINED in said:
            self.quarantined_at = time.time()
        return self.awaited in said or len(self.happened) < 2

    def _end(self, what: str, gpu: str, engine: int, done: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
            self.happened.append({"gpu": gpu, "what": what, "items_done": done, "at": time.time()})


def engine_of(root: int, gpu: str) -> int | None:
    """The engine's process of a worker below `root`, by the GPU in its environment; None where there is
    none now."""
    for pid in family([root]):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            any(word.endswith(b"engine_process") for word in words)
            and f"CUDA_VISIBLE_DEVICES={gpu}".encode() in variables
        ):
            return pid
    return None


def differing(
    undisturbed: Mapping[int, tuple[str, str]], disturbed: Mapping[int, tuple[str, str]]
) -> list[int]:
    """Items whose audio has other bytes, or is in one job only, by the hashes of key and SHA-256 that the
    ledgers name."""
    hashes = [
        {index: sha256 for index, (_, sha256) in objects.items()} for objects in (undisturbed, disturbed)
    ]
    return sorted(
        index for index in hashes[0].keys() | hashes[1].keys() if hashes[0].get(index) != hashes[1].get(index)
    )


def wrong_objects(objects: Mapping[int, tuple[str, str]], read: Callable[[str], bytes]) -> tuple[int, int]:
    """Objects of a store that were read, drawn from all with a fixed seed, and those of them without the
    bytes of their SHA-256."""
    chosen = random.Random(0).sample(sorted(objects), min(len(objects), _READ_BACK))
    wrong = [
        index for index in chosen if hashlib.sha256(read(objects[index][0])).hexdigest() != objects[index][1]
    ]
    return len(chosen), len(wrong)


def found_of(undisturbed: Made, disturbed: Made, items: int, faults: Faults) -> dict[str, Any]:
    """What came of the items, and of the workers: each item must be done once, with the bytes of the job
    without faults."""
    gone_at = faults.happened[-1]["at"] if faults.happened else None
    ended = faults.quarantined_at
    return {
        "faults": faults.happened,
        "noticed": faults.noticed_at is not None,
        "quarantined": ended is not None,
        "quarantined_s": None if ended is None or gone_at is None else ended - gone_at,
        "items": items,
        "done": len(disturbed.objects),
        "done_undisturbed": len(undisturbed.objects),
        "failed": disturbed.failed,
        "other_bytes": len(differing(undisturbed.objects, disturbed.objects)),
        "attempts": disturbed.attempts,
    }


def checked(
    objects: Mapping[int, tuple[str, str]], keys: set[str], read: Callable[[str], bytes]
) -> dict[str, int]:
    """What is in the store beside what the ledger says: `keys` are there; some are read with `read`."""
    named = {key for key, _ in objects.values()}
    lacking = named - keys
    there = {index: one for index, one in objects.items() if one[0] in keys}
    count, wrong = wrong_objects(there, read)
    return {
        "missing_objects": len(lacking),
        "orphans": len(keys - named),
        "read_back": count,
        "wrong_objects": wrong,
    }


def nothing_lost(row: Mapping[str, Any]) -> bool:
    """Whether both faults came, and every item was done once, is in the store, and has the same bytes."""
    complete = row["done"] == row["done_undisturbed"] == row["items"] and len(row["faults"]) == 2
    return complete and not any(
        row[name] for name in ("failed", "other_bytes", "missing_objects", "wrong_objects")
    )

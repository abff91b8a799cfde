"""`python -m tests.faults.soak`: one job, many faults drawn from a seed, and what became of every item.
Exit status 1 if any is wrong."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import commit
from tests.faults.cluster import ENGINE
from tests.faults.soak.audit import audit
from tests.faults.soak.cluster_site import ClusterSite
from tests.faults.soak.embedded_site import EmbeddedSite
from tests.faults.soak.site import Site
from tests.support.services import running_postgres

LAYOUTS = ("embedded", "folder", "s3")
#: Of the items, so many kill the engine that makes them, once.
CRASHING = 5
#: How long a fault and what it costs last about. Engines work slowly enough that there are items left for the
#: last one.
FAULT_SECONDS = 2.5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        action="append",
        help="may be given more than once; default: each of them",
    )
    parser.add_argument(
        "--kind", action="append", help="only faults of this kind; may be given more than once"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="for the job's end, once the faults are over",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="write the figures there, in place of those of the same layouts",
    )
    options = parser.parse_args(arguments)
    # What was started is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[dict[str, Any]] = []
    for layout in options.layout or LAYOUTS:
        rows.append(
            torment(layout, options.items, options.faults, options.seed, options.kind, options.patience)
        )
        if options.results is not None:
            command = f"python -m tests.faults.soak --items {options.items} --faults {options.faults} --seed {options.seed}"
            write_results(options.results, command, rows)
    return 0 if all(row["right"] for row in rows) else 1


def torment(
    layout: str, items: int, faults: int, seed: int, kinds: list[str] | None, patience: float
) -> dict[str, Any]:
    """Runs one job in one layout, prints what happened as a line of JSON and returns it."""
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="nightjar-chaos-", ignore_cleanup_errors=True)
            )
        )
        # PostgreSQL's user has to reach what is its own.
        folder.chmod(0o755)
        slots = ENGINE["slots"] * (1 if layout == "embedded" else 2)
        pace = faults * FAULT_SECONDS * slots / items
        if layout == "embedded":
            site: Site = EmbeddedSite(folder, pace)
        else:
            site = ClusterSite(folder, stack.enter_context(running_postgres()), layout, pace)
        stack.callback(site.end)
        texts = {
            f"item-{number}": f"Sentence number {number} of the night {seed}." for number in range(items)
        }
        for number in range(1, min(CRASHING, items - 1) + 1):
            place = number * items // (CRASHING + 1)
            texts[f"item-{place}"] += f" [[crash_once:{folder / f'crashed-{number}'}]]"
        submitted = site.begin(texts)
        done = happen(site, faults, random.Random(seed), kinds)
        site.let_go()
        site.settle(patience)
        verdict = audit(site, submitted)
    row: dict[str, Any] = {
        "layout": layout,
        "items": items,
        "seed": seed,
        "seconds": round(time.monotonic() - started),
    }
    row |= {"faults": sum(done.values()), "kinds": dict(sorted(done.items()))}
    row |= {
        "effects": dict(sorted(site.effects.items())) | {"objects repaired": verdict.repaired}
    } | verdict.view
    row |= {"right": verdict.right, "commit": commit()}
    print(json.dumps(row), flush=True)
    for line in verdict.details:
        print(f"  {line}", file=sys.stderr)
    return row


def write_results(path: Path, command: str, rows: list[dict[str, Any]]) -> None:
    """Writes the rows, and keeps those of other layouts that are there."""
    before: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {row["layout"]: row for row in before} | {row["layout"]: row for row in rows}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "command": command,
        "device": f"{os.cpu_count()} cores, {memory:.0f} GiB",
        "rows": [new[key] for key in LAYOUTS if key in new],
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")


def happen(site: Site, count: int, chance: random.Random, only: list[str] | None) -> Counter[str]:
    """`count` faults at moments drawn from `chance`: each kind in its turn, in an order that is drawn too."""
    faults = site.faults()
    if unknown := set(only or ()) - set(faults):
        raise SystemExit(
            f"This layout has no fault {', '.join(sorted(unknown))}; it has {', '.join(sorted(faults))}."
        )
    names = sorted(only or faults)
    done: Counter[str] = Counter()
    turn: list[str] = []
    for number in range(count):
        if not turn:
            turn = chance.sample(names, len(names))
        time.sleep(chance.uniform(0.2, 2.0))
        name = turn.pop()
        faults[name](chance)
        done[name] += 1
        site.mend()
        if number % 4 == 3:
            site.wait_for_progress()
    return done


if __name__ == "__main__":
    sys.exit(main())

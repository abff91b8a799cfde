"""`python -m tests.faults.soak`: one job, many faults drawn from a seed, and what became of every item. Exit status 1 if any is wrong."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.faults.soak.audit import Audit, audit
from tests.faults.soak.cluster_site import ClusterSite
from tests.faults.soak.embedded_site import EmbeddedSite
from tests.faults.soak.site import Site
from tests.support.services import running_postgres

LAYOUTS = ("embedded", "folder", "s3")
#: Of the items, so many kill the worker that makes them, once.
CRASHING = 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="may be given more than once; default: each of them")
    parser.add_argument("--kind", action="append", help="only faults of this kind; may be given more than once")
    parser.add_argument("--patience", type=float, default=900.0, metavar="SECONDS", help="for the job's end, once the faults are over")
    options = parser.parse_args(arguments)
    verdicts = [
        torment(layout, options.items, options.faults, options.seed, options.kind, options.patience) for layout in options.layout or LAYOUTS
    ]
    return 0 if all(verdict.right for verdict in verdicts) else 1


def torment(layout: str, items: int, faults: int, seed: int, kinds: list[str] | None, patience: float) -> Audit:
    """Runs one job in one layout, and prints what happened as a line of JSON."""
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-chaos-", ignore_cleanup_errors=True)))
        # PostgreSQL's user has to reach what is its own.
        folder.chmod(0o755)
        site: Site = EmbeddedSite(folder) if layout == "embedded" else ClusterSite(folder, stack.enter_context(running_postgres()), layout)
        stack.callback(site.end)
        texts = {f"item-{number}": f"Sentence number {number} of the night {seed}." for number in range(items)}
        for number in range(1, min(CRASHING, items - 1) + 1):
            place = number * items // (CRASHING + 1)
            texts[f"item-{place}"] += f" [[crash_once:{folder / f'crashed-{number}'}]]"
        submitted = site.begin(texts)
        done = happen(site, faults, random.Random(seed), kinds)
        site.let_go()
        site.settle(patience)
        verdict = audit(site, submitted)
    kinds_done = dict(sorted(done.items()))
    seconds = round(time.monotonic() - started)
    view = {"layout": layout, "items": items, "seed": seed, "seconds": seconds, "faults": sum(done.values()), "kinds": kinds_done}
    print(json.dumps(view | verdict.view), flush=True)
    for line in verdict.details:
        print(f"  {line}", file=sys.stderr)
    return verdict


def happen(site: Site, count: int, chance: random.Random, only: list[str] | None) -> Counter[str]:
    """`count` faults at moments drawn from `chance`: each kind in its turn, in an order that is drawn too."""
    faults = site.faults()
    if unknown := set(only or ()) - set(faults):
        raise SystemExit(f"This layout has no fault {', '.join(sorted(unknown))}; it has {', '.join(sorted(faults))}.")
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

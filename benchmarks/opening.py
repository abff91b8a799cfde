"""Where the seconds go in which the spare process of a server becomes its engine.

    python -m benchmarks.opening --size 1b7
    python -m benchmarks.opening --device cpu --tiny

One process opens a checkpoint with random weights as a server's engine does, so that all caches are filled. Another one
is prepared as a spare process is, and then opens it in turn. Its rows are the lines of ours in which its threads were
meanwhile, sampled every few milliseconds; a line that waits for the device counts too. Then come the modules that it
had to import only then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Result, device_name, parser, read

#: Seconds between two samples, and the number of rows.
INTERVAL, ROWS = 0.004, 60


def place_of(frame: Any) -> str:
    """The innermost line of ours of a thread, and what it calls; empty: it is in none."""
    called = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith((f"{ROOT}/pipelines", f"{ROOT}/kernels")):
            return f"{Path(code.co_filename).relative_to(ROOT)}:{frame.f_lineno} {code.co_name}{called}"
        called, frame = f" > {code.co_name}", frame.f_back
    return ""


def sample(found: Counter[tuple[str, str]], stopped: threading.Event) -> None:
    """Counts the places of all other threads until it is stopped."""
    while not stopped.wait(INTERVAL):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():
            if number != threading.get_ident() and (place := place_of(frame)):
                found[names.get(number, ""), place] += 1


def open_once(folder: str, device: str, known: Path) -> None:
    """Opens a checkpoint, and prints the facts. `known`: the modules of the first process, which writes them; the second
    one imports them in advance."""
    from pipelines.engine_process import server
    from pipelines.registry import open_frontend, open_pipeline

    assert server, "the engine's program imports it"
    begin, is_spare = time.perf_counter(), known.exists()
    if is_spare:
        names = (partial(import_module, name) for name in json.loads(known.read_text()))
        for prepare in (*names, partial(open_frontend, folder)):
            with suppress(Exception):
                prepare()
    prepared, before = time.perf_counter(), set(sys.modules)
    found, stopped = Counter[tuple[str, str]](), threading.Event()
    sampler = threading.Thread(target=sample, args=(found, stopped))
    sampler.start()
    pipeline = open_pipeline(folder, device=device, streams=128, few_graphs=is_spare)
    seconds = time.perf_counter() - prepared
    stopped.set()
    sampler.join()
    if not is_spare:
        names = [name for name in sys.modules if name.startswith(("pipelines", "kernels"))]
        known.write_text(json.dumps(names))
    each = seconds / max(sum(count for (name, _), count in found.items() if name == "MainThread"), 1)
    facts = {
        "device": device_name(),
        "engine": pipeline.info.summary(pipeline.name),
        "prepared_s": prepared - begin,
        "opened_s": seconds,
        "rows": [
            {"s": count * each, "thread": name, "line": line}
            for (name, line), count in found.most_common(ROWS)
        ],
        "imported_late": sorted(set(sys.modules) - before),
    }
    print(json.dumps(facts), flush=True)
    pipeline.close()


def main() -> int:
    options = read(parser(__doc__), size="1b7", folder="", modules="")
    if options.modules:
        open_once(options.folder, options.device, Path(options.modules))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder, known = options.folder or f"{scratch}/checkpoint", f"{scratch}/known.json"
        if not options.folder:
            # Imports torch, which takes seconds.
            import torch

            from benchmarks.checkpoint import write_checkpoint

            size = "tiny" if options.tiny else options.size
            write_checkpoint(Path(folder), size, torch.device(options.device), ["The quick brown fox."])
            torch.cuda.empty_cache()
        words = ("--folder", folder, "--device", options.device, "--modules", known)
        first, spare = (
            json.loads(
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.opening", *words],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        )
    found = Result("opening", options, spare.pop("device"))
    for row in spare.pop("rows"):
        found.add(row)
    found.keep(first_opened_s=first["opened_s"], **spare)
    print(json.dumps({"first_opened_s": first["opened_s"], **spare}, indent=1))
    return found.end("s", "thread", "line")


if __name__ == "__main__":
    sys.exit(main())

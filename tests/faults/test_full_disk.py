"""The disk of a whole home is full: ledger, store, logs and records. The run says so and ends, and goes on
once there is room.

A file system in memory is mounted, and filled by a file.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jobs.ledger import Ledger
from jobs.settings import Settings
from pipelines.errors import ErrorCode, StoreError
from tests.support.ledger_kit import submit
from tests.support.run_kit import SLOW, Shell, until, write_input

ITEMS = 24
MEGABYTES = 48


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk, where this machine can mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"DISK NOT FILLED: no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


def fill(disk: Path, left: int = 0) -> None:
    """Leaves `left` bytes free."""
    with (disk / "full").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    with (disk / "full").open("r+b") as file:
        file.truncate(os.stat(file.fileno()).st_size - left)


def test_a_run_on_a_full_disk_says_so(slow: Shell, disk: Path) -> None:
    write_input(slow.folder / "in.jsonl", ITEMS)
    fill(disk)
    run = slow.run(*SLOW, "--out", str(disk / "home"))
    assert run.returncode == 5
    assert "store.full" in run.stderr


def test_a_run_whose_disk_fills_ends_and_goes_on_once_there_is_room(slow: Shell, disk: Path) -> None:
    """Not even a row can be written; tests/faults/test_bad_luck.py has a disk with a little room."""
    write_input(slow.folder / "in.jsonl", ITEMS)
    slow.hold(f"line-{ITEMS - 1}")
    home = disk / "home"
    run = slow.start(*SLOW, "--out", str(home), NIGHTJAR_TIMES__COMMIT_ITEMS="2")
    until(lambda: slow.done(str(home)) >= 2, "no item was made")
    fill(disk)
    _, said = run.communicate(timeout=240)
    assert run.returncode == 5
    assert "store.full" in said
    until(lambda: not slow.processes(), "processes are left")
    slow.let_go()
    (disk / "full").unlink()
    again = slow.run(*SLOW, "--out", str(home))
    assert again.returncode == 0, again.stderr
    assert f"{ITEMS} done, 0 failed" in again.stdout


def test_a_ledger_on_a_full_disk_is_no_ledger_that_is_away(disk: Path) -> None:
    ledger = Ledger.of(Settings(home=disk / "home"))
    ledger.migrate()
    job = submit(ledger)
    ledger.check_writable(job.id)
    # There is room for a row.
    fill(disk, 200_000)
    ledger.set_priority(job.id, 1)
    with pytest.raises(StoreError) as caught:
        ledger.check_writable(job.id)
    assert caught.value.code is ErrorCode.STORE_FULL
    fill(disk)
    with pytest.raises(StoreError) as caught:
        for priority in range(1000):
            ledger.set_priority(job.id, priority)
    assert caught.value.code is ErrorCode.STORE_FULL
    with pytest.raises(StoreError) as caught:
        Ledger.of(Settings(home=disk / "other")).migrate()
    assert caught.value.code is ErrorCode.STORE_FULL
    ledger.close()

"""The power goes while `nightjar run` works: the disk is a file of its own, and what it holds at that
moment is all that is left.

An ext4 image is mounted over a loop device, with commits of its own so far apart that only what Nightjar
syncs gets there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.ledger import Ledger
from jobs.settings import Settings
from jobs.store import open_store
from jobs.verify import ObjectCheck
from tests.support.run_kit import SLOW, Shell, until, write_input

ITEMS = 60
IMAGE_MB = 64


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop,noatime,commit=300", image, folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An empty file system in a file, where this machine can mount one."""
    made = tmp_path / "disk.img"
    with made.open("wb") as file:
        file.truncate(IMAGE_MB << 20)
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("POWER NOT CUT: mounting an image needs root and mkfs.ext4.")
    try:
        subprocess.run(["mkfs.ext4", "-q", made], check=True, capture_output=True)
        with mounted(made, tmp_path / "try"):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"POWER NOT CUT: no loop device can be mounted here: {error.stderr.decode().strip()}")
    return made


def test_what_the_ledger_calls_done_is_there_after_a_power_cut(
    slow: Shell, image: Path, tmp_path: Path
) -> None:
    write_input(slow.folder / "in.jsonl", ITEMS)
    slow.hold(f"line-{ITEMS - 1}")
    left = tmp_path / "left.img"
    with mounted(image, tmp_path / "disk") as disk:
        home = disk / "home"
        run = slow.start(*SLOW, "--out", str(home), NIGHTJAR_TIMES__COMMIT_ITEMS="5")
        until(lambda: slow.done(str(home)) >= ITEMS - 10, "no item was made")
        # What the file system has not written is not in its file.
        shutil.copyfile(image, left)
        run.kill()
        run.communicate(timeout=240)
        until(lambda: not slow.processes(), "processes are left")
    slow.let_go()
    with mounted(left, tmp_path / "after") as disk:
        home = disk / "home"
        done = check(home)
        assert 5 <= done < ITEMS
        again = slow.run(*SLOW, "--out", str(home))
        assert again.returncode == 0, again.stderr
        assert f"{ITEMS} done, 0 failed" in again.stdout
        assert check(home) == ITEMS


def check(home: Path) -> int:
    """Items of the only job that the ledger calls done, all of whose objects are there."""
    ledger = Ledger(Settings(home=home).ledger_url)
    (job,) = ledger.jobs()
    assert list(ObjectCheck(ledger, open_store(job.store_url), job)) == []
    done = ledger.status(job.id).items.done
    ledger.close()
    return done

"""What the soak does to folders does what it says, and no more."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.faults.soak.__main__ import write_results
from tests.faults.soak.site import Stubs, copy_of, flipped_bits


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    (root / "jobs").mkdir(parents=True)
    (root / "jobs" / "one").write_bytes(b"content")
    return root


def test_a_folder_is_away_and_back_and_what_was_written_meanwhile_is_known(
    tmp_path: Path, root: Path
) -> None:
    stubs = Stubs(tmp_path / "stubs")
    with stubs.instead_of(root):
        assert list(root.iterdir()) == []
    assert (root / "jobs" / "one").read_bytes() == b"content"
    assert stubs.files() == []
    with stubs.instead_of(root):
        (root / "jobs").mkdir()
        (root / "jobs" / "two").touch()
    assert [path.name for path in (root / "jobs").iterdir()] == ["one"]
    assert [Path(name).name for name in stubs.files()] == ["two"]


def test_a_flipped_bit_is_right_again(root: Path) -> None:
    path = root / "jobs" / "one"
    with flipped_bits([path, root / "missing"], random.Random(1)):
        spoiled = path.read_bytes()
        assert sum((one ^ other).bit_count() for one, other in zip(spoiled, b"content", strict=True)) == 1
    assert path.read_bytes() == b"content"


def test_a_file_that_replaced_a_flipped_one_stays_as_it_is(root: Path) -> None:
    path = root / "jobs" / "one"
    with flipped_bits([path], random.Random(1)):
        path.unlink()
        path.write_bytes(b"CONTENT")
    assert path.read_bytes() == b"CONTENT"


def test_a_copy_lacks_what_came_later(tmp_path: Path, root: Path) -> None:
    (root / ".nightjar").mkdir()
    for _ in range(2):
        copy_of(root, tmp_path / "copy", but=".nightjar")
    (root / "jobs" / "two").touch()
    assert [str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")] == [
        "jobs",
        "jobs/one",
    ]


def test_figures_of_other_layouts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    write_results(path, "first", [{"layout": "s3", "lost": 0}, {"layout": "embedded", "lost": 0}])
    write_results(path, "second", [{"layout": "s3", "lost": 1}])
    view = json.loads(path.read_text())
    assert view["command"] == "second"
    assert view["rows"] == [{"layout": "embedded", "lost": 0}, {"layout": "s3", "lost": 1}]

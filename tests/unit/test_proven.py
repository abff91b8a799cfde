"""Slow tests are skipped only while everything that can break them is as it was when they passed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import proven
from tests.proven import ROOT, Proof, proofs


@pytest.fixture
def proof(tmp_path: Path) -> Proof:
    for name in ("tests/test_a.py", "sources/deep/b.cu", "sources/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    made = Proof("a", ["tests/test_*.py"], ["sources/**/*"], "")
    return replace(made, sha256=made.digest(tmp_path))


def test_a_proof_holds_until_a_test_or_a_source_changes(tmp_path: Path, proof: Proof) -> None:
    assert proof.holds(tmp_path)
    (tmp_path / "elsewhere.py").touch()
    assert proof.holds(tmp_path)
    for name in ("tests/test_a.py", "sources/deep/b.cu"):
        (tmp_path / name).write_text("another")
        assert not proof.holds(tmp_path)
        (tmp_path / name).write_text(name)
        assert proof.holds(tmp_path)


@pytest.mark.parametrize("change", [("sources/new.py", None), ("sources/c.py", "sources/d.py")])
def test_a_source_that_is_added_or_renamed_counts(
    tmp_path: Path, proof: Proof, change: tuple[str, str | None]
) -> None:
    path, to = change
    (tmp_path / path).touch() if to is None else (tmp_path / path).rename(tmp_path / to)
    assert not proof.holds(tmp_path)


def test_all_tests_run_where_they_are_asked_for(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = request.node
    held = Proof("a", ["tests/unit/test_proven.py"], [], "")
    monkeypatch.setattr(proven, "proofs", lambda: [replace(held, sha256=held.digest())])
    monkeypatch.setenv(proven.ALL_TESTS, "1")
    proven.skip_proven([item])
    assert item.get_closest_marker("skip") is None
    monkeypatch.delenv(proven.ALL_TESTS)
    proven.skip_proven([item])
    assert item.get_closest_marker("skip") is not None
    item.own_markers.clear()


@pytest.mark.parametrize("proof", proofs(), ids=lambda proof: proof.name)
def test_the_patterns_of_the_list_match_files(proof: Proof) -> None:
    for pattern in (*proof.tests, *proof.sources):
        assert any(ROOT.glob(pattern)), pattern

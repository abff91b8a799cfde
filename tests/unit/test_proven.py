"""Slow tests are left out only while everything that can break them is as it was when they passed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import proven
from tests.conftest import pytest_ignore_collect
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


@pytest.fixture
def proven_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests are a group that passed."""
    held = Proof("a", ["tests/unit/test_proven.py"], [], "")
    monkeypatch.setattr(proven, "proofs", lambda: [replace(held, sha256=held.digest())])
    monkeypatch.delenv(proven.ALL_TESTS, raising=False)
    proven.left_out.cache_clear()
    yield
    proven.left_out.cache_clear()


@pytest.mark.usefixtures("proven_here")
def test_all_tests_run_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pytest_ignore_collect(Path(__file__))
    proven.left_out.cache_clear()
    monkeypatch.setenv(proven.ALL_TESTS, "1")
    assert pytest_ignore_collect(Path(__file__)) is None


@pytest.mark.usefixtures("proven_here")
def test_tests_of_gpus_are_left_out_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for here, left_out in ((True, None), (False, True)):
        monkeypatch.setattr(proven, "has_gpu", lambda here=here: here)
        proven.left_out.cache_clear()
        assert pytest_ignore_collect(ROOT / "tests/gpu") is left_out


@pytest.mark.parametrize("proof", proofs(), ids=lambda proof: proof.name)
def test_the_patterns_of_the_list_match_files(proof: Proof) -> None:
    for pattern in (*proof.tests, *proof.sources):
        assert any(ROOT.glob(pattern)), pattern

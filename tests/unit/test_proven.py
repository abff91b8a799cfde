"""Slow tests are left out only while everything that can break them is as it was when they passed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import proven
from tests.conftest import pytest_ignore_collect
from tests.proven import ROOT, Proof, left_out_of, proofs


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
def held(monkeypatch: pytest.MonkeyPatch) -> list[Proof]:
    """These tests are a group that passed."""
    monkeypatch.delenv(proven.ALL_TESTS, raising=False)
    made = Proof("a", ["tests/unit/test_proven.py"], [], "")
    return [replace(made, sha256=made.digest())]


def test_all_tests_run_where_they_are_asked_for(held: list[Proof], monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(__file__) in left_out_of(held, gpu=True)
    monkeypatch.setenv(proven.ALL_TESTS, "1")
    assert left_out_of(held, gpu=False) == {}


def test_tests_of_gpus_are_left_out_only_where_there_is_none(
    held: list[Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert [ROOT / "tests/gpu" in left_out_of(held, gpu=here) for here in (True, False)] == [False, True]


def test_what_is_left_out_is_not_collected() -> None:
    for path in (*proven.left_out(), Path(__file__)):
        assert pytest_ignore_collect(path) is (True if path in proven.left_out() else None)


@pytest.mark.parametrize("proof", proofs(), ids=lambda proof: proof.name)
def test_the_patterns_of_the_list_match_files(proof: Proof) -> None:
    for pattern in (*proof.tests, *proof.sources):
        assert any(ROOT.glob(pattern)), pattern

"""The list of planted faults fits the code: each can be planted once, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.faults import REPOSITORY, BadFaultError, Fault, of_the_day, read_faults

FAULTS = read_faults()


def test_every_fault_can_be_planted_and_its_tests_exist() -> None:
    """One test for all: a fault that no longer applies also fails where it is tried."""
    assert {fault.name: wrong for fault in FAULTS if (wrong := _what_is_wrong(fault))} == {}


def _what_is_wrong(fault: Fault) -> str:
    try:
        planted = fault.planted((REPOSITORY / fault.file).read_text())
        if fault.file.endswith(".py"):
            ast.parse(planted)
        for test in fault.tests:
            path, *names = test.split("[")[0].split("::")
            tree: ast.AST = ast.parse((REPOSITORY / path).read_text())
            for name in names:
                tree = next(
                    node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name
                )
    except (BadFaultError, OSError, SyntaxError, StopIteration) as error:
        return repr(error)
    return "" if fault.tests else "no tests"


def test_what_cannot_be_planted_is_said() -> None:
    fault = Fault("twice", "a.py", "x", "y", ("tests/unit",))
    assert fault.planted("x = 1") == "y = 1"
    for source in ("", "x x"):
        with pytest.raises(BadFaultError, match="twice"):
            fault.planted(source)


def test_two_faults_of_one_name_are_refused(tmp_path: Path) -> None:
    table = '[one]\nfile = "a.py"\nold = "x"\nnew = "y"\ntests = ["t"]\n'
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text(table)
    with pytest.raises(BadFaultError, match="one"):
        read_faults(tmp_path)


def test_every_fault_has_its_day() -> None:
    days = (len(FAULTS) + 9) // 10
    tried = [fault.name for day in range(days) for fault in of_the_day(FAULTS, day, 10)]
    assert set(tried) == {fault.name for fault in FAULTS}
    assert len(of_the_day(FAULTS, 3, 10)) == min(10, len(FAULTS))

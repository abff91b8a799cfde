"""Filters of items: comparisons of scores and facts with numbers, joined by `and`, `or` and `not`, as in
`wer < 0.1 and distillmos > 3.5`.

A comparison with a missing score is neither true nor false, as in SQL, and neither is its negation:
`not wer < 0.1` is `wer >= 0.1`. An item matches only if the whole filter is true. The ledger evaluates
filters, see `jobs.ledger.queries`.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from pipelines.errors import ConfigError, invalid

#: The facts of an item that a filter can compare, besides its scores, with their meaning.
FACTS = {
    "seconds": "length of the audio",
    "draw": "number of the draw that was kept; 0 is the first",
    "attempts": "number of attempts at the item",
}
#: Facts that items without scores have.
OF_ALL_ITEMS = frozenset({"seconds", "attempts"})
EXAMPLE = "wer < 0.1 and distillmos > 3.5"
MAX_CHARACTERS, MAX_COMPARISONS = 2000, 50

_OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_SWAPPED = str.maketrans("<>", "><")
#: A name in quotes. It has no characters that would end a quoted JSON path.
_QUOTED_NAME = re.compile(r"[^\"\\\x00-\x1f]{1,100}")
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Comparison(NamedTuple):
    """A comparison of a score or a fact with a number."""

    name: str
    #: `<`, `<=`, `>`, `>=`, `==` or `!=`.
    operator: str
    value: float

    def __str__(self) -> str:
        name = self.name if _PLAIN_NAME.fullmatch(self.name) and self.name not in _WORDS else repr(self.name)
        return f"{name} {self.operator} {repr(self.value).removesuffix('.0')}"


class Conditions(NamedTuple):
    """Conditions that must all be true, or (`all` is False) of which at least one must be true."""

    all: bool
    parts: tuple[Condition, ...]

    def __str__(self) -> str:
        return (" and " if self.all else " or ").join(
            f"({part})" if isinstance(part, Conditions) else str(part) for part in self.parts
        )


Condition = Comparison | Conditions
_WORDS = {"and", "or", "not"}


@dataclass(frozen=True)
class Where:
    """A filter without negations: `parse_where` replaces them by the opposite comparisons."""

    condition: Condition

    def __str__(self) -> str:
        """The normal form: filters that differ only in spaces, brackets or `not` have the same text."""
        return str(self.condition)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions that must all be true."""
        whole = self.condition
        return whole.parts if isinstance(whole, Conditions) and whole.all else (whole,)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The compared scores and facts, in order."""
        return tuple(dict.fromkeys(comparison.name for comparison in _comparisons(self.condition)))

    @cached_property
    def needs_scores(self) -> bool:
        """Whether every matching item must have scores, and is therefore done."""
        return _needs(self.condition, frozenset(self.names) - OF_ALL_ITEMS)


def _comparisons(condition: Condition) -> Iterator[Comparison]:
    """Yields the comparisons of a condition, in order."""
    if isinstance(condition, Comparison):
        yield condition
        return
    for part in condition.parts:
        yield from _comparisons(part)


def parse_where(text: str) -> Where:
    """Parses a filter. Raises `config.invalid`."""
    if len(text) > MAX_CHARACTERS:
        raise _wrong(f"has {len(text)} characters; the maximum is {MAX_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            # Python warns about `0.1and`, which is valid here.
            warnings.simplefilter("ignore", SyntaxWarning)
            found = Where(_condition(ast.parse(text.strip(), mode="eval").body, negated=False))
    except SyntaxError as error:
        place = f"character {error.offset}" if error.offset else "its end"
        raise _wrong(f"{text[:200]!r} cannot be read, at {place}") from None
    except (ValueError, MemoryError, RecursionError):
        raise _wrong(f"{text[:200]!r} cannot be read") from None
    if sum(1 for _ in _comparisons(found.condition)) > MAX_COMPARISONS:
        raise _wrong(f"has more than {MAX_COMPARISONS} comparisons")
    return found


class FilteredOut(msgspec.Struct, frozen=True):
    """The number of items with audio that a filter leaves out because of one condition. An item counts for
    the first condition that is not true for it."""

    #: A text such as `wer < 0.1`.
    condition: str
    items: int
    #: How many of these items lack the score.
    without_score: int


def _condition(node: ast.expr, *, negated: bool) -> Condition:
    """Converts the Python syntax that filters may use to conditions."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _condition(node.operand, negated=not negated)
    if isinstance(node, ast.BoolOp):
        every = isinstance(node.op, ast.And) is not negated
        return _joined(every, [_condition(value, negated=negated) for value in node.values])
    text = ast.unparse(node)[:100]
    if not isinstance(node, ast.Compare):
        raise _wrong(f"contains {text!r}, which is not a comparison")
    # `0 < pause < 2` are two comparisons.
    operands = [node.left, *node.comparators]
    found: list[Condition] = []
    for left, operation, right in zip(operands, node.ops, operands[1:], strict=False):
        operator = _OPERATORS.get(type(operation), "")
        name = _name(left)
        number = _number(right)
        if name is None:
            name = _name(right)
            number = _number(left)
            operator = operator.translate(_SWAPPED)
        if name is None or number is None or not math.isfinite(number) or not operator:
            raise _wrong(f"contains {text!r}, which does not compare a score with a number")
        found.append(Comparison(name, _NEGATED[operator] if negated else operator, number))
    return _joined(not negated, found)


def _name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    quoted = node.value if isinstance(node, ast.Constant) else None
    return quoted if isinstance(quoted, str) and _QUOTED_NAME.fullmatch(quoted) else None


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
        # Adding 0.0 converts -0.0 to 0.0, so that equal filters have the same normal form.
        return None if isinstance(value, bool) or not isinstance(value, int | float) else value + 0.0
    except (ValueError, TypeError, OverflowError):
        return None


def _joined(every: bool, parts: list[Condition]) -> Condition:
    """Joins conditions, and flattens inner ones of the same kind."""
    flat: list[Condition] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Conditions) and part.all is every else (part,))
    return flat[0] if len(flat) == 1 else Conditions(every, tuple(flat))


def _needs(condition: Condition, names: frozenset[str]) -> bool:
    if isinstance(condition, Comparison):
        return condition.name in names
    needs = [_needs(part, names) for part in condition.parts]
    return any(needs) if condition.all else all(needs)


def _wrong(what: str) -> ConfigError:
    return invalid(
        f"The filter {what}.",
        f"Compare scores, or {', '.join(FACTS)}, with numbers, and join comparisons by and, or, not and brackets: {EXAMPLE}.",
    )

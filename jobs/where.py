"""Filters of items: comparisons of scores and facts with numbers, joined by `and`, `or` and `not`, as in
`wer < 0.1 and distillmos > 3.5`.

A comparison with what an item does not have is neither true nor false, as in SQL, and neither is its
negation: `not wer < 0.1` is `wer >= 0.1`. An item matches only where the whole is true. The ledger answers
a filter, see `jobs.ledger.filters`.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from jobs.checks import CHECKS
from pipelines.errors import ConfigError, ErrorCode, nearest

#: What the ledger knows of every item beside its scores.
FACTS = {
    "seconds": "length of the audio",
    "draw": "number of the draw that was kept; 0 is the first",
    "attempts": "how often the item was tried",
}
#: Facts that items have without scores.
OF_ALL_ITEMS = frozenset({"seconds", "attempts"})
EXAMPLE = "wer < 0.1 and distillmos > 3.5"
MAX_CHARACTERS, MAX_COMPARISONS = 2000, 50

_OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
#: What a name in quotes may have: a path into JSON has quotes of its own.
_QUOTED_NAME = re.compile(r"[^\"\\\x00-\x1f]{1,100}")
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A score or a fact against a number."""

    name: str
    #: `<`, `<=`, `>`, `>=`, `==` or `!=`.
    operator: str
    value: float

    def __str__(self) -> str:
        name = self.name if _PLAIN_NAME.fullmatch(self.name) and self.name not in _WORDS else repr(self.name)
        number = repr(self.value)
        return f"{name} {self.operator} {number.removesuffix('.0')}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Several conditions of which all, or one, must be true."""

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
    """A filter without negations: `parse_where` has moved them into the comparisons."""

    condition: Condition

    def __str__(self) -> str:
        """Its text in one form: filters that differ only in spaces, brackets or `not` have the same one."""
        return str(self.condition)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions that must all be true."""
        whole = self.condition
        return whole.parts if isinstance(whole, Conditions) and whole.all else (whole,)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The scores and facts that it compares, in its order."""
        return tuple(dict.fromkeys(comparison.name for comparison in comparisons(self.condition)))

    @cached_property
    def needs_scores(self) -> bool:
        """Whether an item that matches has scores for certain, and is done therefore."""
        return _needs(self.condition, frozenset(self.names) - OF_ALL_ITEMS)


def comparisons(condition: Condition) -> Iterator[Comparison]:
    """The comparisons of a condition, in its order."""
    if isinstance(condition, Comparison):
        yield condition
        return
    for part in condition.parts:
        yield from comparisons(part)


def parse_where(text: str) -> Where:
    """The filter of a text. Raises `config.invalid` with the place of what is wrong."""
    if len(text) > MAX_CHARACTERS:
        raise _wrong(f"The filter has {len(text)} characters.", f"Use {MAX_CHARACTERS} at most.")
    reader = _Reader(text)
    try:
        with warnings.catch_warnings():
            # Of `0.1and`, which is what it says.
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise reader.wrong(max((error.offset or 1) - 1, 0), "cannot be read") from None
    except (ValueError, MemoryError, RecursionError):
        raise reader.wrong(0, "cannot be read") from None
    try:
        found = Where(reader.condition(tree.body, negated=False))
    except RecursionError:
        raise reader.wrong(0, "has too many brackets") from None
    if sum(1 for _ in comparisons(found.condition)) > MAX_COMPARISONS:
        raise _wrong(f"The filter has more than {MAX_COMPARISONS} comparisons.", "Leave some out.")
    return found


def no_such_score(job_id: str, name: str, there: Sequence[str], meters: Collection[str]) -> ConfigError:
    """The error of a filter of a job with these meters whose items have no such score, with the scores
    that are there."""
    meter = None if name not in CHECKS else CHECKS[name].meter
    unmeasured = (
        "" if meter is None or meter.name in meters else f": the job was made without the meter {meter.name}"
    )
    advice = f"{'' if unmeasured else nearest(name, [*there, *FACTS])}Compare one of: {', '.join([*there, *FACTS])}."
    if not there:
        advice = f"The job was made without checks, see docs/quality.md. Without scores there are: {', '.join(FACTS)}."
    elif unmeasured:
        advice = f"Checks with this meter are in docs/quality.md. {advice}"
    return ConfigError(
        ErrorCode.CONFIG_INVALID, f"No item of job {job_id} has the score {name[:80]!r}{unmeasured}.", advice
    )


class FilteredOut(msgspec.Struct, frozen=True):
    """Items with audio that a filter leaves out by one of its conditions, the first that is not true of
    them."""

    #: As text, such as `wer < 0.1`.
    condition: str
    items: int
    #: Of these: items of which it is not known, because they have no such score.
    without_score: int


class _Reader:
    """From the closed set of Python's syntax that a filter may use to conditions."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._skipped = len(text) - len(text.lstrip())

    def condition(self, node: ast.expr, *, negated: bool) -> Condition:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.condition(node.operand, negated=not negated)
        if isinstance(node, ast.BoolOp):
            every = isinstance(node.op, ast.And) is not negated
            return _joined(every, [self.condition(value, negated=negated) for value in node.values])
        if isinstance(node, ast.Compare):
            return self._comparison(node, negated=negated)
        raise self._wrong_at(node, "is no comparison")

    def _comparison(self, node: ast.Compare, *, negated: bool) -> Condition:
        """`0 < pause < 2` are two comparisons."""
        operands = [node.left, *node.comparators]
        found: list[Condition] = []
        for left, operation, right in zip(operands, node.ops, operands[1:], strict=False):
            operator = _OPERATORS.get(type(operation))
            if operator is None:
                raise self._wrong_at(left, "is compared in a way that is not known")
            name, number = self._name(left), self._number(right)
            if name is None:
                name, number, operator = self._name(right), self._number(left), _SWAPPED[operator]
            if name is None or number is None:
                raise self._wrong_at(left, "is no comparison of a score with a number")
            found.append(Comparison(name, _NEGATED[operator] if negated else operator, number))
        return _joined(not negated, found)

    def _name(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return node.id
        quoted = node.value if isinstance(node, ast.Constant) else None
        return quoted if isinstance(quoted, str) and _QUOTED_NAME.fullmatch(quoted) else None

    def _number(self, node: ast.expr) -> float | None:
        sign = 1.0
        while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            sign, node = -sign if isinstance(node.op, ast.USub) else sign, node.operand
        if (
            not isinstance(node, ast.Constant)
            or isinstance(node.value, bool)
            or not isinstance(node.value, int | float)
        ):
            return None
        try:
            value = float(node.value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise self._wrong_at(node, "is too large a number")
        # Not -0.0, which other texts would write as 0.
        return sign * value + 0.0

    def _wrong_at(self, node: ast.expr, what: str) -> ConfigError:
        line = self._text.strip().splitlines()[0] if node.lineno == 1 else ""
        # Python counts bytes.
        return self.wrong(len(line.encode()[: node.col_offset].decode(errors="ignore")) if line else 0, what)

    def wrong(self, offset: int, what: str) -> ConfigError:
        """The error of what stands at `offset` of the text without the spaces around it."""
        place = min(self._skipped + offset, len(self._text))
        rest = self._text[place : place + 40].strip()
        shown = f"{rest!r}, character {place + 1}" if rest else "its end"
        return _wrong(f"The filter {self._text[:200]!r} {what}, at {shown}.")


def _joined(every: bool, parts: list[Condition]) -> Condition:
    """Conditions as one, with those of the same kind inside taken out of their brackets."""
    flat: list[Condition] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Conditions) and part.all is every else (part,))
    return flat[0] if len(flat) == 1 else Conditions(every, tuple(flat))


def _needs(condition: Condition, names: frozenset[str]) -> bool:
    if isinstance(condition, Comparison):
        return condition.name in names
    needs = [_needs(part, names) for part in condition.parts]
    return any(needs) if condition.all else all(needs)


def _wrong(message: str, advice: str = "") -> ConfigError:
    facts = ", ".join(FACTS)
    advice = (
        advice
        or f"Compare scores, or {facts}, with numbers, and join them by and, or, not and brackets: {EXAMPLE}."
    )
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)

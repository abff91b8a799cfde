"""Formats text for people, in commands, errors, reports and logs: counts, times and sizes. Hides passwords
and escapes terminal control characters."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from typing import Any

import msgspec

#: An object of JSON or TOML.
JsonObject = dict[str, Any]
#: The text that replaces a secret.
MASK = "********"
# A password may contain any character except white space, also `@` and `/`: everything up to the last `@` of the
# word is hidden.
_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@'\"]*):\S*@", re.IGNORECASE)
#: One slash is enough: it is a common mistake, and converting an address to a path removes the second slash.
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_PARAMETER = re.compile(
    r"([?&;](?:\w*password|[\w-]*secret[\w-]*|[\w-]*token|[\w-]*signature)=)[^&\s'\"]*", re.IGNORECASE
)


def json_bytes(value: object) -> bytes:
    """Indented JSON, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def redact(text: str) -> str:
    """Masks the passwords of all URLs in a text, and the values of query parameters whose names suggest a
    secret."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1:{MASK}@", text))


def is_address(text: str) -> bool:
    """Whether a text is an address such as `s3://bucket/prefix` rather than a path."""
    return _ADDRESS.match(text) is not None


def printable(text: str, limit: int | None = None) -> str:
    """Makes text of a user safe for a ledger and a terminal: escapes characters that can control it (control and
    format characters, newlines), and cuts the text after `limit` characters."""
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}..."
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 line`, `2 lines`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def seconds_text(seconds: float | None) -> str:
    """A time for a person: `0.4 s`, `41 s`, `12 min 5 s`, `3 h 20 min`, `4 d 2 h`; `unknown` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def bytes_text(count: int) -> str:
    """A size for a person, in decimal units."""
    size = float(count)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size = size / 1000
        unit = larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a class, each on one line."""
    found: Any = ast.parse(inspect.getsource(kind)).body[0]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(found.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }

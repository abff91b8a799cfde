"""The one masker: whatever is printed, logged or raised passes through it before a person or a file sees it."""

from __future__ import annotations

import re

MASK = "********"

# A password may hold any sign but white space, also `@` and `/`: all up to the last `@` of the word is hidden.
_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@'\"]*):\S*@", re.IGNORECASE)
_PARAMETER = re.compile(r"([?&;](?:\w*password|[\w-]*secret[\w-]*|[\w-]*token|[\w-]*signature)=)[^&\s'\"]*", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` with the password of every URL in it masked, and every query parameter that is a secret by its name."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1:{MASK}@", text))

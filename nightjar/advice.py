"""What the errors and notes of a run advise, in the words of Python: arguments in the place of options, a
call in that of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.errors import ConfigError, ErrorCode, NightjarError

#: What stays as it is: a command to type. Then options: with a pair, in quotes with a value, and alone.
_OPTION = re.compile(
    r"with: .*|`(?!--)[^`]*`"
    r"|--(?P<mapping>column|voice-for) '?(?P<key>[\w*]+)=(?P<value>\w+)'?"
    r"|`--(?P<quoted>[a-z-]+)(?: (?P<chosen>[^`]*))?`"
    r"|--(?P<name>[a-z]+(?:-[a-z]+)*)"
)
_AGAIN = re.compile(r"([Gg])ive the same command")


def in_python(text: str) -> str:
    """A sentence for a person at a terminal, as one for a program."""
    called = _AGAIN.sub(lambda found: ("M" if found[1] == "G" else "m") + "ake the same call", text)
    return _OPTION.sub(_argument, called)


def advise(error: NightjarError) -> NightjarError:
    """The error with its sentences `in_python`."""
    error.message, error.advice = in_python(error.message), in_python(error.advice)
    error.args = (error.message,)
    return error


@contextmanager
def advising() -> Iterator[None]:
    """What is raised inside has its sentences `in_python`."""
    try:
        yield
    except NightjarError as error:
        advise(error)
        raise


def _argument(found: re.Match[str]) -> str:
    name = found["mapping"] or found["quoted"] or found["name"]
    if name is None:
        return found[0]
    argument = {"column": "columns"}.get(name, name.replace("-", "_"))
    if found["mapping"]:
        return f'`{argument}={{"{found["key"]}": "{found["value"]}"}}`'
    return f'`{argument}="{found["chosen"]}"`' if found["chosen"] else f"`{argument}`"


def check_type(name: str, value: object, kinds: type | tuple[type, ...], words: str) -> None:
    """Raises `config.invalid` for an argument of another type than these; True and False are no numbers."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        message = f"The argument `{name}` is {value!r:.100}."
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, message, f"Give {words}; docs/python.md says what there is."
        )

"""Shared parts of the command line: output (data on stdout, everything else on stderr), exit codes,
interrupts, and types of options."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from jobs.formatting import is_address, printable, redact
from pipelines.errors import ErrorCode, NightjarError

F = TypeVar("F", bound=Callable[..., Any])

#: The entries of a larger object, such as a pool of voices, are counted in a table of a record.
SHOWN_ENTRIES = 50
#: Environment variable with the program name in the usage line of a command that another command starts.
PROGRAM = "NIGHTJAR_PROGRAM"

FAILED, NOT_FOUND, INVALID_INPUT, UNREACHABLE = 1, 3, 4, 5
#: Exit codes for a cancelled job, and for `nightjar wait` when the job did not end in time.
CANCELLED, TIMEOUT = 6, 7

#: Exit codes by error code. Other error codes have the exit code of their group, which is the first word of
#: the error code.
_EXIT_BY_CODE = {
    ErrorCode.LEDGER_STATE: FAILED,
    ErrorCode.LEDGER_CANCELLED: CANCELLED,
    ErrorCode.LEDGER_NOT_FOUND: NOT_FOUND,
    ErrorCode.MODEL_UNREACHABLE: UNREACHABLE,
    ErrorCode.STORE_BAD_KEY: INVALID_INPUT,
}
_EXIT_BY_GROUP = {
    **dict.fromkeys(("config", "input", "model"), INVALID_INPUT),
    **dict.fromkeys(("broker", "ledger", "server", "store"), UNREACHABLE),
}


class FiniteRange(click.FloatRange):
    """A range of numbers that refuses infinity and NaN, which click accepts in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class NamedPath(click.Path):
    """A path that is not empty and does not look like an option. An unset shell variable can cause both.

    `anywhere`: the path may be an address, which the command checks.
    """

    def __init__(self, *, anywhere: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._anywhere = anywhere

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        if not text.strip():
            self.fail("the path is empty", param, ctx)
        if text.startswith("--"):
            self.fail(f"{text!r} looks like an option; write ./{text} for a path of this name", param, ctx)
        if is_address(text) and not self._anywhere:
            self.fail(f"{text!r} is an address; give a path on this host", param, ctx)
        return super().convert(value, param, ctx)


#: The type of an option that is a path on this host.
LOCAL_PATH = NamedPath(path_type=Path)


def option(
    flag: str, metavar: str, text: str, *, name: str | None = None, **settings: Any
) -> Callable[[F], F]:
    """An option with a value, and its help. `name`: the parameter that gets it, unless named like the flag."""
    return click.option(flag, *([name] if name else []), metavar=metavar, help=text, **settings)


def flag(flag: str, text: str, *names: str) -> Callable[[F], F]:
    """An option without a value, and its help. `names`: a short flag, or the parameter that gets it."""
    return click.option(flag, *names, is_flag=True, help=text)


json_option = flag("--json", "Print JSON, one object per line.", "as_json")
home_option = click.option(
    *("--out", "--home", "home"),
    metavar="DIR",
    type=NamedPath(anywhere=True),
    help="Folder with the ledger and the audio. [default: out]",
)


class OutputClosed(BaseException):
    """The reader of stdout closed it; the command ends as SIGPIPE would end it."""

    exit_code = 128 + signal.SIGPIPE


class Interrupted(BaseException):
    """A signal requested the end of the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


class Stop:
    """The request to stop a run."""

    def __init__(self) -> None:
        #: Ends the processes of the run at once.
        self.kill = lambda: None
        #: Whether the run is cleaning up, so that it must not be interrupted.
        self.cleaning = False
        #: The number of the signal that stops the run; None: not received.
        self.number: int | None = None

    def check(self) -> None:
        """Raises `Interrupted` if the run must stop, even if C code or a `__del__` swallowed the exception of
        the signal."""
        if self.number is not None:
            raise Interrupted(self.number)


#: The signals that Ctrl-C sent since the command began.
_interrupts: list[int] = []


def record_interrupts() -> None:
    """Records each Ctrl-C in addition to raising `KeyboardInterrupt`, because that exception is lost in
    Python code that is called by C code, as in many imports."""
    _interrupts.clear()
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _record_interrupt)
        print_lost = sys.unraisablehook

        def hook(lost: sys.UnraisableHookArgs) -> None:
            if not (_interrupts and lost.exc_type is KeyboardInterrupt):
                print_lost(lost)

        # Python prints exceptions that cannot be caught, such as those raised while an object is freed.
        # `check_interrupts` raises a recorded Ctrl-C again, so it is not printed.
        sys.unraisablehook = hook


def _record_interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    signal.default_int_handler(number, frame)


def check_interrupts() -> None:
    """Raises `Interrupted` if Ctrl-C was pressed, even if its exception was lost."""
    if _interrupts:
        raise Interrupted(_interrupts[-1])


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals(Stop):
    """Interrupts a run at the first signal. While the run cleans up, the next signal ends its worker at
    once."""

    def __call__(self, number: int, _frame: object) -> None:
        if self.cleaning:
            self.kill()
            return
        self.cleaning = True
        self.number = number
        raise Interrupted(number)

    @contextmanager
    def installed(self) -> Iterator[Signals]:
        # Under `nohup` SIGHUP stays ignored, so that the run outlives its terminal.
        before = {
            number: signal.signal(number, self)
            for number in _SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            check_interrupts()
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block: Python code that C code calls, as in the import of a pydantic
    model, would swallow it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_code(error: Exception) -> int:
    """The exit code of a command that fails with this error."""
    if not isinstance(error, NightjarError):
        return FAILED
    return _EXIT_BY_CODE.get(error.code) or _EXIT_BY_GROUP.get(error.code.partition(".")[0], FAILED)


def fail(error: BaseException, *, as_json: bool) -> None:
    """Prints an error on stderr: a sentence with its code and advice, or `nightjar.error/1`. Passwords of
    URLs are hidden."""
    if isinstance(error, NightjarError):
        code = error.code.value
        message = error.message
        advice = error.advice
    elif isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename}"
        code = "system"
        message = f"System error: {error.strerror or error}{where}."
        advice = "Correct the cause and try again."
        try:
            os.getcwd()
        except FileNotFoundError:
            message = "The working directory no longer exists."
            advice = "Change to one that exists."
    else:
        code = "internal"
        message = f"An unexpected error: {type(error).__name__}: {error}."
        advice = "This is a bug; SPEECH_DEBUG=1 shows where it happened."
    message = redact(message)
    advice = redact(advice)
    if as_json:
        view = {"schema": "nightjar.error/1", "error": {"code": code, "message": message, "advice": advice}}
        click.echo(msgspec.json.encode(view), err=True)
        return
    label = click.style("Error", fg="red", bold=True)
    # The command has ended, and click's context, which applies NO_COLOR, no longer exists.
    color = False if os.environ.get("NO_COLOR") else None
    click.echo(
        f"{label} {code}: {printable(message)}\n{printable(advice)}".rstrip("\n"), err=True, color=color
    )


class Output(NamedTuple):
    """Prints the output of a command, by its options `--json` and `--quiet`."""

    as_json: bool = False
    quiet: bool = False

    def data(self, view: Mapping[str, Any]) -> None:
        """Prints a JSON object as a line on stdout."""
        sys.stdout.buffer.write(msgspec.json.encode(view) + b"\n")

    def result(self, text: str, view: Mapping[str, Any] | str, /, **fields: Any) -> None:
        """Prints a result, as JSON or as a line of text. `view`: the JSON object, or the name of its schema
        if `fields` are its other keys."""
        if self.as_json:
            self.data({"schema": view, **fields} if isinstance(view, str) else view)
        else:
            click.echo(text)

    def row(self, cells: Iterable[object], view: Mapping[str, Any] | str, /, **fields: Any) -> None:
        """Prints a result as `result` does; as text, its cells with tabs between them, without empty ones at the
        end."""
        self.result("\t".join(map(_cell, cells)).rstrip("\t"), view, **fields)

    def note(self, text: str) -> None:
        """Prints a note on stderr, unless `--quiet`."""
        if not self.quiet:
            click.echo(text, err=True)

    def records(
        self,
        header: Sequence[str],
        found: Iterable[tuple[Mapping[str, Any], Sequence[object]]],
        nothing: str = "",
    ) -> None:
        """Prints records, each (JSON object, table row), as JSON lines or as a table. `nothing`: the note
        that replaces an empty table."""
        if self.as_json:
            for view, _ in found:
                self.data(view)
        elif rows := [row for _, row in found]:
            self.table(header, rows)
        elif nothing:
            self.note(nothing)

    def record(self, view: Mapping[str, Any]) -> None:
        """Prints a record, as JSON or as a table of its fields that are not empty."""
        if self.as_json:
            self.data(view)
        else:
            self.table(("KEY", "VALUE"), _leaves(msgspec.to_builtins(view)))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Prints aligned columns on stdout; the rows are kept in memory."""
        cells = [[_cell(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(header, *cells)]
        click.echo(click.style(_columns(header, widths), bold=True))
        for row in cells:
            click.echo(_columns(row, widths))


def _cell(value: object) -> str:
    return "" if value is None else printable(str(value))


def _columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()


def _leaves(view: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text) of the fields of a record that are not empty."""
    for name, part in view.items():
        is_list = isinstance(part, list | tuple)
        if is_list and part and isinstance(part[0], dict):
            part = dict(enumerate(part, 1))
        if isinstance(part, dict) and len(part) > SHOWN_ENTRIES:
            yield f"{path}{name}", f"{len(part):,} entries, see --json"
        elif isinstance(part, dict):
            yield from _leaves(part, f"{path}{name}.")
        elif part not in (None, "", [], ()):
            yield f"{path}{name}", ", ".join(map(str, part)) if is_list else str(part)

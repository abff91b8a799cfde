"""How a child process tells the one that started it that it came up: a byte through a pipe whose number stands in its environment."""

from __future__ import annotations

import os
from contextlib import suppress

UP_PIPE = "NIGHTJAR_UP_PIPE"


class UpPipe:
    """The parent's end. Give `environment` and `pass_fds` to the child, and call `started` once it runs."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    @property
    def environment(self) -> dict[str, str]:
        return {UP_PIPE: str(self._writer)}

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._writer,)

    def started(self) -> None:
        """The child has the pipe: this process no longer needs the child's end."""
        os.close(self._writer)

    def close(self) -> bool:
        """Ends the watch on a child that is gone; whether it ever came up."""
        try:
            return bool(os.read(self._reader, 1))
        except BlockingIOError:
            # A process that the child left behind holds the pipe still, and no word came.
            return False
        finally:
            os.close(self._reader)


def say_up() -> None:
    """Tells whoever started this process that it came up; does nothing where nobody asks, or a second time."""
    writer = os.environ.pop(UP_PIPE, None)
    if writer is None:
        return
    with suppress(OSError, ValueError):
        os.write(int(writer), b"1")
        os.close(int(writer))

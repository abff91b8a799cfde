"""moto's server, whose conditional writes here are what S3's are: of several at one key at once, one is
the first."""

from __future__ import annotations

import sys
import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_writing = threading.Lock()
_put_object = S3Response.put_object


def _one_at_a_time(self: S3Response) -> Any:
    # moto looks for the key and then writes it, and between the two another thread may do the same.
    with _writing:
        return _put_object(self)


if __name__ == "__main__":
    S3Response.put_object = _one_at_a_time
    main(sys.argv[1:])

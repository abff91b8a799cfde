"""`python -m worker.engine LEVEL FORMAT`: the process of a worker's engine. It logs as the worker does."""

from __future__ import annotations

import sys
from typing import cast

from jobs.logs import LogFormat, setup_logging
from pipelines.engine_process.server import main

if __name__ == "__main__":
    setup_logging(sys.argv[1], cast(LogFormat, sys.argv[2]))
    main()

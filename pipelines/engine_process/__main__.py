"""`python -m pipelines.engine_process`: the child's side, started by `pipelines.engine_process.client`."""

from __future__ import annotations

import logging

from pipelines.engine_process.server import main

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()

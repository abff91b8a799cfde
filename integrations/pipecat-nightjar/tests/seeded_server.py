"""`nightjar` with one seed for every utterance. A normal server draws seeds, and the speech of a few seeds is
hard to recognize."""

from __future__ import annotations

import runpy
import secrets

SEED = 7
secrets.randbits = lambda _bits: SEED
runpy.run_module("jobs", run_name="__main__", alter_sys=True)

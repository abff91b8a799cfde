"""`nightjar` with one seed for every utterance: a server draws them, and a few of all drawings are hard to
hear."""

from __future__ import annotations

import runpy
import secrets

SEED = 7
secrets.randbits = lambda _bits: SEED
runpy.run_module("jobs", run_name="__main__", alter_sys=True)

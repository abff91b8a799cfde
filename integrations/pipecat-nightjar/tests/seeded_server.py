"""`nightjar` with the same seeds in each run: a server draws one for each utterance, and a few of all voices are hard to hear."""

from __future__ import annotations

import random
import runpy
import secrets

secrets.randbits = random.Random(7).getrandbits
runpy.run_module("jobs", run_name="__main__", alter_sys=True)

"""`python -m benchmarks`: the figures of the job system that need no GPU."""

from benchmarks.cpu import jobs

jobs()

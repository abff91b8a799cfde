"""`python -m benchmarks.ingest_once LEDGER_URL STORE SOURCE`: ingests one file and prints seconds, memory and the job as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec
from jobs.settings import load_settings
from jobs.store import open_store

if __name__ == "__main__":
    url, store, source = sys.argv[1:]
    ledger = Ledger.open(url)
    ledger.migrate()
    start = time.perf_counter()
    result = submit(load_settings(), ledger, open_store(store), source, JobSpec(model="hibari"))
    seconds = time.perf_counter() - start
    ledger.close()
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "rss_mb": rss_mb, "job": result.job.id, "items": result.items}))

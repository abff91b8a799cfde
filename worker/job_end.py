"""What is left to do when a job has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from jobs.store.base import ObjectStore
from pipelines.errors import NightjarError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

log = structlog.get_logger(__name__)


def put_manifest_if_over(ledger: Ledger, store_for: Callable[[str], ObjectStore], job_id: str) -> None:
    """Writes the manifest of a job that has ended and has audio; any number of workers may do so.

    A failure is logged. Where it may pass, the reconciler tries again later; else never: the ledger has all that a manifest says,
    and an export writes it anew.
    """
    from jobs.export.manifest import put_manifest

    try:
        job = ledger.job(job_id)
        if not job.state.final:
            return
        if not ledger.status(job_id).items.done:
            ledger.note_manifest(job)
            return
        try:
            info = put_manifest(ledger, store_for(job.store_url), job_id)
        except NightjarError as error:
            if not error.code.retryable:
                ledger.note_manifest(job)
            raise
        log.info("job ended", job=job_id, state=job.state.value, manifest=info.key)
    except NightjarError as error:
        log.warning("manifest of the job not written", job=job_id, code=error.code.value, error=str(error))

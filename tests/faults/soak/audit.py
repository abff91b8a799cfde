"""What became of every item: compared with what the fake engine must have made, byte for byte."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from jobs.layout import job_manifest_key
from jobs.ledger.records import ItemState, JobState
from pipelines.audio import encode
from pipelines.errors import ErrorCode, NightjarError
from tests.faults.cluster import message_seed, patiently
from tests.faults.soak.site import Site
from tests.support.fakes import SAMPLE_RATE, sine

_INDEX = re.compile(r"/(\d{9})-[^/]*$")


#: Of one kind.
DETAILS = 10


@dataclass(slots=True)
class Audit:
    """Counts of what is wrong; all zero when the job is right."""

    #: Items without their speech.
    lost: int = 0
    #: Items with more than one object of audio.
    doubled: int = 0
    #: Objects whose bytes are not the item's speech, and artifacts that say something else than their object.
    wrong: int = 0
    #: Objects of the job that nothing names.
    orphans: int = 0
    #: The job has not ended as completed, or has no manifest.
    stuck: int = 0
    #: Processes and temporary files.
    left_behind: int = 0
    #: Files where the store is not.
    outside: int = 0
    #: What a person had to be told and was not.
    untold: int = 0
    #: Objects that `verify --repair` made again, as it should after a backup of the store was put back.
    repaired: int = 0
    details: list[str] = field(default_factory=list[str])

    @property
    def view(self) -> dict[str, int]:
        names = ("lost", "doubled", "wrong", "orphans", "stuck", "left_behind", "outside", "untold")
        return {name: getattr(self, name) for name in names}

    @property
    def right(self) -> bool:
        return not any(self.view.values())

    def note(self, kind: str, text: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if getattr(self, kind) <= DETAILS:
            self.details.append(f"{kind}: {text}")


def audit(site: Site, texts: Mapping[str, str]) -> Audit:
    """Looks at every item, artifact and object of the job, and of the jobs that had ended before the
    faults."""
    found = Audit()
    for job, of_job in [(site.job, texts), *site.ended.items()]:
        _repair(site, job, found)
        _audit_job(site, job, of_job, found)
    for kind, what in (
        ("left_behind", site.left_behind()),
        ("outside", site.outside()),
        ("untold", site.untold),
    ):
        for one in what:
            found.note(kind, one)
    return found


def _repair(site: Site, job: str, found: Audit) -> None:
    """Does what a person does who has put back a backup of the store. In other installations nothing may
    be left to repair."""
    status, said = site.verify(job)
    faults = [line for line in said.splitlines() if '"nightjar.fault/1"' in line]
    if status != 0:
        found.note("lost", f"`verify --repair` ended with {status}: {said[-500:]}")
    if site.repaired_by_hand:
        found.repaired += len(faults)
        return
    for line in faults:
        found.note("lost", f"`verify` found {line}")


def _audit_job(site: Site, job: str, texts: Mapping[str, str], found: Audit) -> None:
    status = patiently(lambda: site.ledger.status(job))
    if status.job.state != JobState.COMPLETED:
        found.note("stuck", f"the job is {status.job.state}: {status.items}")
    if site.store.head(job_manifest_key(job)) is None:
        found.note("stuck", "the job has no manifest")
    named: set[str] = set()
    seen: set[str] = set()
    for row in site.ledger.items(job):
        seen.add(row.example_id)
        if row.state is not ItemState.DONE or row.artifact is None:
            found.note("lost", f"{row.example_id} is {row.state}: {row.error_code}")
            continue
        artifact = row.artifact
        named.add(artifact.key)
        expected = encode(
            sine(texts[row.example_id], message_seed(status.job, row.example_id)), SAMPLE_RATE, "wav"
        )
        data = patiently(partial(_content, site, artifact.key))
        if data is None:
            found.note("lost", f"{artifact.key} is not in the store")
        elif data != expected:
            found.note("wrong", f"{artifact.key} has {len(data)} bytes that are not its item's")
        elif (artifact.sha256, artifact.bytes) != (hashlib.sha256(data).hexdigest(), len(data)):
            found.note("wrong", f"{artifact.key} is not what its artifact says")
    for example_id in set(texts) - seen:
        found.note("lost", f"{example_id} is no item")
    _count_objects(site, job, named, found)


def _content(site: Site, key: str) -> bytes | None:
    try:
        return site.store.get(key)
    except NightjarError as error:
        if error.code is ErrorCode.STORE_MISSING:
            return None
        raise


def _count_objects(site: Site, job: str, named: set[str], found: Audit) -> None:
    # Files without content are those that the faults left.
    keys = [info.key for info in patiently(lambda: list(site.store.list(f"jobs/{job}/audio/"))) if info.bytes]
    inputs = {key for key, _ in site.ledger.shard_inputs(job).values()}
    of_item = Counter(match[1] for key in keys if (match := _INDEX.search(key)))
    for index, count in of_item.items():
        if count > 1:
            found.note("doubled", f"item {int(index)} has {count} objects")
    for key in set(keys) - named:
        found.note("orphans", key)
    for info in patiently(lambda: list(site.store.list(f"jobs/{job}/input/"))):
        if info.key not in inputs:
            found.note("orphans", info.key)

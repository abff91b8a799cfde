"""The keys of a job's objects in the store. An `example_id` comes from the input, and cannot move an object
to another place."""

from __future__ import annotations

import re
import unicodedata
from typing import BinaryIO

from jobs.store.base import Metadata, ObjectInfo, ObjectStore, sha256_of

MAX_SLUG_CHARACTERS = 60
_NOT_SAFE = re.compile(r"[^A-Za-z0-9_-]+")
_INDEX = re.compile(r"/(\d{9,})-[^/]*\Z")
_DRAW = re.compile(r"-draw([1-9]\d*)\.[^/]*\Z")
_NUMBER = re.compile(r"(\.(?:[2-9]|[1-9]\d+))(\.[^./]+)\Z")
_INPUT = re.compile(r"/(\d{6,})(?:\.([1-9]\d*))?\.jsonl\.zst\Z")
_PACK = re.compile(r"(\d{6,})-([1-9]\d*)-(\d+)-([0-9a-f]{16})\.tar")
_REFERENCE = re.compile(r"[0-9a-f]{64}\.[a-z0-9]+")


def slug(example_id: str) -> str:
    """A readable form of the id: 1 to 60 ASCII letters, digits, `_` and `-`.

    Different ids may have the same slug; keys still differ, because they contain the item's index.
    """
    head = unicodedata.normalize("NFKD", example_id[: 4 * MAX_SLUG_CHARACTERS])
    return (
        _NOT_SAFE.sub("_", head.encode("ascii", "ignore").decode())[:MAX_SLUG_CHARACTERS].strip("_") or "item"
    )


#: Length of `spec_sha` in an object's metadata. Longer metadata does not fit into an ext4 inode and needs a
#: block per file.
SPEC_SHA_CHARACTERS = 16
#: Length of the SHA-256 in a pack's key.
PACK_SHA_CHARACTERS = 16


def object_metadata(spec_sha: str, seed: int) -> dict[str, str]:
    """The metadata of an item's object."""
    return {"seed": str(seed), "spec_sha": spec_sha[:SPEC_SHA_CHARACTERS]}


def job_prefix(job_id: str) -> str:
    """The prefix of the keys of all objects of a job."""
    return f"jobs/{job_id}/"


def item_key(job_id: str, kind: str, index: int, example_id: str, ext: str, draw: int = 0) -> str:
    """`jobs/<job>/<kind>/<index // 10000>/<index>-<slug>.<ext>`, or `<index>-<slug>-draw<n>.<ext>` for a later
    draw. The kind is `audio`, `text` (written by the model), `words` (their times) or `quarantine` (see
    `QUARANTINE`).

    Each draw has its own key. Repeated results with other content are numbered, see `put_numbered`.
    """
    later = f"-draw{draw}" if draw else ""
    return f"jobs/{job_id}/{kind}/{index // 10_000:05d}/{index:09d}-{slug(example_id)}{later}.{ext}"


def pack_key(job_id: str, shard_no: int, epoch: int, number: int, sha256: str) -> str:
    """The key of a pack written under a lease: `jobs/<job>/packs/<shard>-<epoch>-<number>-<sha256[:16]>.tar`.

    The epoch separates the packs of different workers; the hash identifies the content.
    """
    return f"{packs_prefix(job_id)}{shard_no:06d}-{epoch}-{number}-{sha256[:PACK_SHA_CHARACTERS]}.tar"


def pack_index_name(job_id: str, shard_no: int, epoch: int, number: int) -> str:
    """The name of the last member of a pack: JSON lines with the offsets of the others."""
    return f"{packs_prefix(job_id)}{shard_no:06d}-{epoch}-{number}.jsonl"


def packs_prefix(job_id: str) -> str:
    """The prefix of the keys of all packs of a job."""
    return f"{job_prefix(job_id)}packs/"


def lease_of_pack(key: str, job_id: str) -> tuple[int, int] | None:
    """The shard and epoch in the key of a pack; None: it is not such a key."""
    match = _PACK.fullmatch(key.removeprefix(packs_prefix(job_id)))
    return None if match is None else (int(match[1]), int(match[2]))


def sha256_of_pack(key: str) -> str:
    """The first digits of the SHA-256 in the key of a pack; empty: it is not such a key."""
    match = _PACK.fullmatch(key.rpartition("/")[2])
    return "" if match is None else match[4]


def index_of(key: str) -> int | None:
    """The item index in a key below the folder of a kind of artifacts; None: it is not such a key."""
    match = _INDEX.search(key)
    return None if match is None else int(match[1])


def draw_of(key: str, job_id: str, kind: str, index: int, example_id: str, ext: str) -> int | None:
    """The draw in a key of this item, with or without a number; None: it is not exactly a key of the
    item."""
    match = _DRAW.search(key)
    draws = [0] if match is None else [0, int(match[1])]
    unnumbered = _NUMBER.sub(r"\2", key)
    return next(
        (draw for draw in draws if unnumbered == item_key(job_id, kind, index, example_id, ext, draw)), None
    )


def shard_of_input(key: str, job_id: str) -> int | None:
    """The shard in the key of an input; None: it is not such a key."""
    match = _INPUT.search(key)
    if match is None:
        return None
    shard_no = int(match[1])
    return shard_no if key == numbered_key(input_key(job_id, shard_no), int(match[2] or 1)) else None


def references_prefix(job_id: str) -> str:
    """The prefix of the keys of all references of a job."""
    return f"{job_prefix(job_id)}references/"


def is_reference_key(key: str, job_id: str) -> bool:
    """Whether a key has the form of reference audio of a job."""
    prefix = references_prefix(job_id)
    return key.startswith(prefix) and _REFERENCE.fullmatch(key.removeprefix(prefix)) is not None


def input_key(job_id: str, shard_no: int) -> str:
    """The key of the lines of a shard."""
    return f"jobs/{job_id}/input/{shard_no:06d}.jsonl.zst"


def reference_key(job_id: str, sha256: str, ext: str) -> str:
    """The key of reference audio, which contains the SHA-256 of the audio."""
    return f"{references_prefix(job_id)}{sha256}.{ext}"


def shard_manifest_key(job_id: str, shard_no: int) -> str:
    """The key of a shard's manifest; later ones are numbered, see `put_numbered`."""
    return f"jobs/{job_id}/manifest/{shard_no:06d}.jsonl"


def job_manifest_key(job_id: str) -> str:
    """The key of a job's manifest; later ones are numbered, see `put_numbered`."""
    return f"jobs/{job_id}/manifest.jsonl"


def numbered_key(key: str, number: int) -> str:
    """The key with a number: `a/b.jsonl.zst` for number 1, `a/b.2.jsonl.zst` for number 2."""
    if number == 1:
        return key
    folder, slash, name = key.rpartition("/")
    stem, dot, extensions = name.partition(".")
    return f"{folder}{slash}{stem}.{number}{dot}{extensions}"


def put_hashed(store: ObjectStore, key: str, data: bytes, sha256: str, metadata: Metadata = None) -> None:
    """Puts an object whose key contains its hash. An existing object with another hash is damaged, for example by a
    power cut, and is replaced."""
    if store.put(key, data, metadata=metadata).sha256 != sha256:
        store.delete(key)
        store.put(key, data, metadata=metadata)


def put_numbered(
    store: ObjectStore,
    key: str,
    data: bytes | BinaryIO,
    metadata: Metadata = None,
    *,
    newest: bool = False,
) -> ObjectInfo:
    """Puts an object that may be written again with other content, such as a manifest after `nightjar retry`
    or the audio of a worker that died: under `key`, or under the next number whose object is missing or has
    the same SHA-256. `newest`: the object gets the highest number, also if an earlier one has the same SHA-256.

    Objects stay write-once, so readers never see a partial change, and damaged objects do no harm. The ledger
    refers to the valid object. Without the ledger, the highest number is the newest. Returns the object with
    its key and SHA-256.

    `data` may be an open file, positioned at its start and larger than memory.
    """
    number = 1
    target = key
    sha256 = "" if isinstance(data, bytes) else sha256_of(data)
    while True:
        if not isinstance(data, bytes):
            data.seek(0)
        result = store.put(target, data, metadata=metadata)
        # The store has hashed the data; hashing it again would take as long as encoding.
        if result.created:
            return result
        same = result.sha256 == (sha256 := sha256 or sha256_of(data))
        number += 1
        target = numbered_key(key, number)
        if same and not (newest and store.head(target)):
            return result

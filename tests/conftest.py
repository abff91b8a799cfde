"""Fixtures: real services on free ports, and an environment without the settings of whoever runs the tests. A test's folder is its tier."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import skips
from tests.support.services import S3, MotoS3, Postgres, SeaweedFS, Valkey, running_postgres

if TYPE_CHECKING:
    from tests.support.worker_rig import Rig

os.environ.setdefault("OMP_NUM_THREADS", "1")
# An engine core computes in its own process, as on one CUDA device; vLLM for CPUs would start another one for that, in as much time again.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
for name in [name for name in os.environ if name.startswith("SPEECH_")]:
    del os.environ[name]

# The same examples in every run; NIGHTJAR_RANDOM_EXAMPLES=1 tries others.
settings.register_profile("same", derandomize=True, database=None)
if not os.environ.get("NIGHTJAR_RANDOM_EXAMPLES"):
    settings.load_profile("same")

pytest_sessionfinish = skips.pytest_sessionfinish

#: The folders here, each a tier and its marker. Those whose files take longest begin first, so that no process is left with one of them.
TIERS = ("vllm", "parity", "faults", "services", "gpu", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    tiers = {item: item.path.relative_to(here).parts[0] for item in items if item.path.is_relative_to(here)}
    for item, tier in tiers.items():
        item.add_marker(tier)
    items.sort(key=lambda item: TIERS.index(tiers[item]) if item in tiers else len(TIERS))


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
    with running_postgres() as server:
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

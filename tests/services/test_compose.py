"""docker-compose.yml and Dockerfile, as far as they can be tested without Docker: every command starts,
every variable is a setting."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import check_jsonschema
import jsonschema
import pytest
import redis
import yaml
from botocore.exceptions import ClientError

from jobs.settings import load_settings
from tests.support.docs_kit import commands_of
from tests.support.services import SeaweedFS, Valkey, free_port

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
SECRETS = {"POSTGRES_PASSWORD": "p", "REDIS_PASSWORD": "r", "S3_SECRET_KEY": "s", "FLOWER_AUTH": "me:secret"}
MONITORS = {"prometheus", "grafana"}
ON_GPUS = {"worker-gpu": "gpu", "worker-vllm": "vllm", "serve": "serve"}


def filled(text: str) -> str:
    """The text with its variables replaced as compose does."""
    return re.sub(
        r"\$\{(\w+)(?::-([^}]*)|[^}]*)\}",
        lambda match: SECRETS[match[1]] if match[2] is None else match[2],
        text,
    )


def test_the_commands_of_the_page_make_what_the_file_asks_for(tmp_path: Path) -> None:
    """Those before `docker compose`, run where a clone is: each variable that has no default, and each
    folder that a person names."""
    commands = [
        one.text
        for one in commands_of(ROOT / "docs/deploy.md")
        if re.match(r"printf |echo NIGHTJAR|chmod .*env|mkdir ", one.text)
    ]
    subprocess.run(["bash", "-e", "-c", "\n".join(commands)], cwd=tmp_path, check=True, timeout=60)
    written = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    assert {name for name, value in written.items() if value} == {*SECRETS, "NIGHTJAR_USER"}
    assert set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker-compose.yml").read_text())) <= set(written)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"exports", "models"}


def test_every_part_is_there() -> None:
    assert set(SERVICES) == {
        "redis",
        "postgres",
        "s3",
        "migrate",
        "worker-cpu",
        *ON_GPUS,
        "flower",
        "nightjar",
        *MONITORS,
    }
    assert SERVICES["worker-cpu"]["profiles"] == ["cpu"]
    assert all(SERVICES[name]["profiles"] == ["monitoring"] for name in MONITORS)


def test_the_file_follows_the_specification_of_compose() -> None:
    schema = json.loads(
        (Path(check_jsonschema.__file__).parent / "builtin_schemas/vendor/compose-spec.json").read_text()
    )
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(COMPOSE)] == []
    assert list(validator.iter_errors(COMPOSE | {"services": {"worker": {"stop_grace": "1s"}}})), (
        "an unknown key is seen"
    )


def test_every_volume_is_defined_and_every_folder_is_there_or_a_person_names_it() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = filled(volume.partition(":/")[0])
            if source.startswith("./"):
                assert (ROOT / source).exists() or source in {"./models", "./exports"}, f"{name}: {volume}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {volume}"


def test_what_a_person_exports_lands_on_the_host_as_their_own() -> None:
    people = SERVICES["nightjar"]
    assert "${EXPORTS:-./exports}:/exports" in people["volumes"]
    assert people["user"] == "${NIGHTJAR_USER:-10001}"
    # As another user than the image's, with folders of its own only where everyone may write.
    assert people["environment"]["HOME"] == "/tmp"
    assert people["environment"]["SPEECH_HOME"].startswith("/tmp/")


def test_the_server_keeps_its_voices_where_its_user_may_write() -> None:
    serve = SERVICES["serve"]
    folder = serve["environment"]["SPEECH_SERVE__VOICES_FOLDER"]
    assert f"voices:{folder}" in serve["volumes"]
    (line,) = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if "install -d -o nightjar" in line
    ]
    assert {folder, "/cache", "/data"} <= set(line.split())


@pytest.mark.parametrize("name", ON_GPUS)
def test_services_on_gpus_have_them_all_a_compiler_and_what_they_keep(name: str) -> None:
    service = SERVICES[name]
    assert service["profiles"] == [ON_GPUS[name]]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["count"], devices["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert "-devel-" in service["build"]["args"]["BASE"]
    extras = service["build"]["args"]["EXTRAS"].split(",")
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    assert ("vllm" if name == "worker-vllm" else "gpu") in extras
    assert ("serve" in extras) >= (name == "serve")
    images = {one["image"]: one["build"] for one in SERVICES.values() if "build" in one}
    assert images[service["image"]] == service["build"], "an image has one recipe"
    (folder,) = [volume.partition(":")[2] for volume in service["volumes"] if volume.startswith("cache:")]
    kept = [
        line
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("ENV XDG_CACHE_HOME")
    ]
    assert kept == [f"ENV XDG_CACHE_HOME={folder} TRITON_CACHE_DIR={folder}/triton"]
    assert "cache" in COMPOSE["volumes"]
    if name != "serve":
        assert service["command"] == ["worker", "--gpu", "all"]


def test_the_server_is_reached_from_its_host_alone_and_asks_for_a_key() -> None:
    serve = SERVICES["serve"]
    assert serve["ports"] == ["127.0.0.1:8000:8000"]
    assert "http://127.0.0.1:8000/health" in serve["healthcheck"]["test"][-1]
    assert serve["environment"]["SPEECH_SERVE__API_KEY"] == "${SERVE_API_KEY:-}"
    drain = int(serve["environment"]["SPEECH_SERVE__DRAIN_SECONDS"])
    assert int(serve["stop_grace_period"].removesuffix("s")) > drain
    started = subprocess.run(
        [sys.executable, "-m", "jobs", "serve", "--model", "hibari"],
        env=os.environ | settings_of("serve"), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert started.returncode != 0, "without a key it does not start"
    assert "An API key is empty" in started.stderr


def test_docker_takes_the_file(tmp_path: Path) -> None:
    asked = (
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if shutil.which("docker")
        else None
    )
    if asked is None or asked.returncode != 0:
        pytest.skip("needs docker compose")
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    command = [
        "docker",
        "compose",
        "--env-file",
        tmp_path / ".env",
        "--file",
        ROOT / "docker-compose.yml",
        "--profile",
        "*",
        "config",
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", OURS)
def test_the_command_of_a_service_exists_and_starts(name: str) -> None:
    command = SERVICES[name]["command"]
    started = subprocess.run(
        [sys.executable, "-m", "jobs", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    assert "Usage:" in started.stdout


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in SERVICES[name]["environment"].items():
        assert variable.startswith("SPEECH_") or variable == "HOME"
        monkeypatch.setenv(variable, filled(str(value)))
    config = tmp_path / "nightjar.toml"
    config.write_text(filled(COMPOSE["configs"]["schedules"]["content"]))
    monkeypatch.setenv("SPEECH_CONFIG", str(config))
    settings = load_settings()
    if name == "serve":
        return
    assert settings.ledger_url == "postgresql://nightjar:p@postgres:5432/nightjar"
    assert settings.store_url == "s3://speech/datasets"


def test_addresses_name_services_and_the_bucket_is_made() -> None:
    environment = SERVICES["worker-cpu"]["environment"]
    hosts = re.findall(
        r"(?:@|//)([a-z0-9]+):\d+", filled(" ".join(str(value) for value in environment.values()))
    )
    assert set(hosts) == {"postgres", "redis", "s3"}
    assert "-s3.port=8333" in SERVICES["s3"]["command"]
    assert settings_of("worker-cpu")["SPEECH_BROKER_URL"] == "redis://:r@redis:6379/0"


def settings_of(name: str) -> dict[str, str]:
    return {variable: filled(str(value)) for variable, value in SERVICES[name]["environment"].items()}


def test_valkey_answers_only_those_with_its_password(tmp_path: Path) -> None:
    _, *options = [filled(word) for word in SERVICES["redis"]["command"]]
    valkey = Valkey(tmp_path)
    valkey.command = lambda: [*Valkey.command(valkey), *options]  # type: ignore[method-assign]
    valkey.ready = valkey.listens  # type: ignore[method-assign]
    valkey.start()
    try:
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=valkey.port).ping()
        assert redis.Redis(port=valkey.port, password=SECRETS["REDIS_PASSWORD"]).ping()
    finally:
        valkey.stop()


def test_objects_are_served_through_s3_alone(tmp_path: Path) -> None:
    """The command of the compose file on ports of its own: on the network's address nothing but S3
    answers, and it asks for the key."""
    config = tmp_path / "s3.json"
    config.write_text(filled(COMPOSE["configs"]["s3"]["content"]))
    places = {"-dir=/data": f"-dir={tmp_path}", "-s3.config=/etc/seaweedfs/s3.json": f"-s3.config={config}"}
    seaweedfs = SeaweedFS(tmp_path / "server")
    seaweedfs.access_key, seaweedfs.secret_key = "nightjar", SECRETS["S3_SECRET_KEY"]
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port")}
    # The address of the network: all of 127.0.0.0/8 leads here, and only 127.0.0.1 is the container's own.
    network = "127.0.0.2"
    command = [
        places.get(word, word) for word in SERVICES["s3"]["command"] if not word.startswith("-s3.port=")
    ]
    command += [f"-s3.port={seaweedfs.port}", *(f"-{name}={port}" for name, port in ports.items())]
    seaweedfs.command = lambda: [str(Path(sys.executable).with_name("weed")), *command]  # type: ignore[method-assign]
    seaweedfs.start()
    try:
        client = seaweedfs.client()
        deadline = time.monotonic() + 120
        while True:
            try:
                client.put_object(Bucket="speech", Key="datasets/a.wav", Body=b"speech")
                break
            except ClientError:
                # The server listens before all of it is there.
                assert time.monotonic() < deadline
                time.sleep(0.2)
        own = f"http://127.0.0.1:{ports['filer.port']}/buckets/speech/datasets/a.wav"
        assert urlopen(own, timeout=60).read() == b"speech"
        for port in ports.values():
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((network, port), timeout=60)
        with pytest.raises(HTTPError, match="403"):
            urlopen(f"http://{network}:{seaweedfs.port}/speech/datasets/a.wav", timeout=60)
    finally:
        seaweedfs.stop()


def test_a_worker_may_drain_before_it_is_killed() -> None:
    drain = int(SERVICES["worker-cpu"]["environment"]["SPEECH_WORKER__DRAIN_SECONDS"])
    assert int(SERVICES["worker-cpu"]["stop_grace_period"].removesuffix("s")) > drain


def test_every_dependency_and_config_is_defined() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert {config["source"] for config in service.get("configs", [])} <= set(COMPOSE["configs"])


def test_no_secret_is_written_down() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for line in text.splitlines():
        if re.search(r"PASSWORD|SECRET|AUTH", line) and ":" in line and not line.strip().startswith("#"):
            assert "${" in line, line


def test_the_example_configuration_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEECH_CONFIG", str(ROOT / "examples/nightjar.example.toml"))
    assert set(load_settings().schedules) == {"news", "dialogues"}


def test_the_image_copies_every_package_and_runs_as_nobody_special() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    packages = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in packages:
        name = package.removesuffix("*")
        assert f"COPY {name} {name}" in lines
        assert (ROOT / name).is_dir()
    assert "USER nightjar" in lines
    # One base for building and running, so that what was built runs.
    assert [line for line in lines if line.startswith("FROM")] == [
        "FROM ${BASE} AS base",
        "FROM base AS build",
        "FROM base",
    ]
    for line in lines:
        if line.startswith("COPY") and "--from" not in line:
            assert all((ROOT / source).exists() for source in line.split()[1:-1])

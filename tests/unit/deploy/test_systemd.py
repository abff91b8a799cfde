"""deploy/systemd: units that drain, that leave the GPUs visible, and whose commands and variables exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.console import INVALID_INPUT
from jobs.settings import ServeSettings, WorkerSettings
from pipelines.serving import model
from tests.support.deploy_kit import DEPLOY, check_command, unknown_settings
from worker.runtime import EXIT_SECONDS

FOLDER = DEPLOY / "systemd"
PROGRAM = "/opt/nightjar/bin/nightjar"
WORKERS = ("nightjar-worker@", "nightjar-workers", "nightjar-worker-cpu")
#: What takes the GPUs from a unit, by itself or since it turns the list of devices into one of what is
#: allowed.
HIDES_GPUS = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}


def unit(name: str) -> dict[str, list[str]]:
    """The directives of a unit; one that is given more than once has several values."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line and not line.startswith(("#", "[", ";")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


UNITS = {path.stem: unit(path.name) for path in sorted(FOLDER.glob("*.service"))}


def variables(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if line and not line.startswith("#"))


EXAMPLES = {path.name: variables(path.read_text()) for path in FOLDER.glob("*.env.example")}


def test_every_unit_is_there() -> None:
    assert set(UNITS) == {*WORKERS, "nightjar-serve", "nightjar-migrate", "nightjar-nightly"}


@pytest.mark.parametrize("name", UNITS)
def test_the_command_of_a_unit_exists(name: str) -> None:
    (line,) = UNITS[name]["ExecStart"]
    (_, command) = re.fullmatch(rf"(.*exec )?{PROGRAM} ([^']*)'?", line).groups()  # type: ignore[union-attr]
    check_command(shlex.split(command.replace("%i", "0")))


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_may_drain_and_gets_one_signal(name: str) -> None:
    worker = UNITS[name]
    drain = float(EXAMPLES["nightjar.env.example"]["SPEECH_WORKER__DRAIN_SECONDS"])
    assert drain == WorkerSettings().drain_seconds
    assert float(worker["TimeoutStopSec"][0]) > drain + EXIT_SECONDS
    # The default, control-group, sends SIGTERM to the workers beside the one that their supervisor passes on.
    assert worker["KillMode"] == ["mixed"]
    assert worker["RestartPreventExitStatus"] == [f"2 {INVALID_INPUT}"]
    assert "nightjar-migrate.service" in worker["After"][0].split()


def test_the_server_may_drain_and_close_its_model() -> None:
    serve = UNITS["nightjar-serve"]
    drain = float(EXAMPLES["serve.env.example"]["SPEECH_SERVE__DRAIN_SECONDS"])
    assert drain == ServeSettings().drain_seconds
    assert float(serve["TimeoutStopSec"][0]) > drain + model.CLOSE_SECONDS
    assert serve["KillMode"] == ["mixed"]


@pytest.mark.parametrize("name", [*WORKERS, "nightjar-serve"])
def test_hardening_leaves_gpus_and_compiled_kernels(name: str) -> None:
    assert not HIDES_GPUS & set(UNITS[name])
    assert "MemoryDenyWriteExecute" not in UNITS[name]
    # What is compiled or downloaded is kept where the unit may write.
    kept = dict(one.split("=", 1) for line in UNITS[name]["Environment"] for one in line.split())
    assert (kept["XDG_CACHE_HOME"], UNITS[name]["CacheDirectory"]) == ("/var/cache/nightjar", ["nightjar"])
    assert kept["TRITON_CACHE_DIR"].startswith("/var/cache/nightjar/")


@pytest.mark.parametrize("name", UNITS)
def test_units_run_as_nobody_special_and_read_their_secrets_from_a_file(name: str) -> None:
    assert UNITS[name]["User"] == ["nightjar"]
    assert {"NoNewPrivileges", "ProtectHome", "PrivateTmp"} <= set(UNITS[name])
    assert UNITS[name]["ProtectSystem"] == ["strict"]
    files = UNITS[name]["EnvironmentFile"]
    assert files == [f"/etc/nightjar/{'serve' if name == 'nightjar-serve' else 'nightjar'}.env"]
    assert re.match(r"u nightjar ", (FOLDER / "nightjar.sysusers").read_text().splitlines()[-1])


def test_instances_have_a_gpu_and_a_port_of_their_own() -> None:
    one = UNITS["nightjar-worker@"]
    assert "CUDA_VISIBLE_DEVICES=%i CUDA_DEVICE_ORDER=PCI_BUS_ID" in one["Environment"]
    (script,) = re.findall(r"/bin/sh -c '(.*)'", one["ExecStart"][0])
    shown = script.replace("$$", "$").replace("%i", "3").replace(f"exec {PROGRAM}", "env")
    said = subprocess.run(
        ["sh", "-c", shown.replace("worker --gpu 3", "")], capture_output=True, text=True, check=True
    ).stdout
    assert "SPEECH_WORKER__METRICS_PORT=9111" in said.splitlines()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_name_settings_and_hold_no_secret(name: str) -> None:
    assert unknown_settings(EXAMPLES[name]) == []
    for variable, value in EXAMPLES[name].items():
        if re.search(r"KEY|SECRET|PASSWORD", variable):
            assert value in {"KEY", "SECRET"}, variable


def test_the_night_runs_once_a_day_and_waits_for_its_jobs() -> None:
    assert unit("nightjar-nightly.timer")["Persistent"] == ["true"]
    nightly = UNITS["nightjar-nightly"]
    assert (nightly["Type"], nightly["TimeoutStartSec"]) == (["oneshot"], ["infinity"])


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    program = Path(sys.executable).with_name("nightjar")
    paths = []
    for path in [*FOLDER.glob("*.service"), *FOLDER.glob("*.timer")]:
        # A template is verified as an instance.
        paths.append(tmp_path / path.name.replace("@.", "@0."))
        paths[-1].write_text(path.read_text().replace(PROGRAM, str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

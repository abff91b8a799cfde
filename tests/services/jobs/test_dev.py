"""`nightjar dev`: an installation of one machine that other terminals find, and that leaves nothing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import urllib.request

from tests.support.cli_kit import CLOSED_PORT, error_code, run_command
from tests.support.run_kit import Shell, until, write_input
from tests.support.services import free_port


def elsewhere(shell: Shell, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in another terminal, whose folder is another one."""
    folder = shell.folder / "elsewhere"
    folder.mkdir(exist_ok=True)
    return run_command(folder, words, shell.environment)


def ready(shell: Shell, *words: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    dev = shell.start("dev", "--json", *words)
    assert dev.stdout is not None
    return dev, json.loads(dev.stdout.readline())


def test_other_terminals_find_it_and_ctrl_c_leaves_nothing(shell: Shell) -> None:
    port = free_port()
    shell.environment["SPEECH_SERVE__PORT"] = str(port)
    source = write_input(shell.folder / "in.jsonl", 3)
    dev, said = ready(shell, "--serve")
    assert (said["home"], said["server"]) == (str(shell.folder / "out"), f"http://127.0.0.1:{port}")
    submitted = elsewhere(shell, "submit", str(source), "-q")
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    watched = elsewhere(shell, "watch", job, "-q")
    assert watched.returncode == 0, watched.stdout
    assert "3 done" in elsewhere(shell, "status", job).stdout
    assert len(elsewhere(shell, "export", job).stdout.splitlines()) == 3
    assert [
        json.loads(line)["state"] for line in elsewhere(shell, "workers", "--json").stdout.splitlines()
    ] == ["up"]
    assert "`nightjar dev`" in shell.run("run", "in.jsonl").stderr
    until(lambda: health(said["server"]) == "ready", "the server does not start")
    dev.send_signal(signal.SIGINT)
    _, told = dev.communicate(timeout=240)
    assert dev.returncode == 0, told
    assert told.splitlines()[-1].startswith("Stopping.")
    assert not shell.processes()
    assert list((shell.folder / "state/nightjar/dev").iterdir()) == []
    assert not (shell.folder / "out/.nightjar/broker.json").exists()
    assert not (shell.folder / "elsewhere/out").exists()
    # What it made is found while nothing runs.
    assert "completed" in elsewhere(shell, "status", job).stdout
    assert len(elsewhere(shell, "export", job).stdout.splitlines()) == 3


def health(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return json.load(answer)["status"]
    except OSError:
        return ""


def test_a_job_goes_on_in_the_next_one_after_a_kill(slow: Shell) -> None:
    source = write_input(slow.folder / "in.jsonl", 8)
    slow.hold("line-0")
    dev, _ = ready(slow)
    job = elsewhere(slow, "submit", str(source), "--model", "slow", "-q").stdout.strip()
    until(lambda: slow.done() >= 1, "no item was made")
    dev.kill()
    dev.communicate(timeout=240)
    until(lambda: not slow.processes(), "processes are left")
    assert "no live worker takes this job" in elsewhere(slow, "status", job).stdout
    slow.let_go()
    dev, _ = ready(slow)
    assert elsewhere(slow, "wait", job, "-q").returncode == 0
    assert len(list((slow.folder / "state/nightjar/dev").iterdir())) == 1
    dev.send_signal(signal.SIGTERM)
    assert dev.wait(timeout=240) == 0


def test_a_server_that_ends_ends_it_with_its_words(shell: Shell) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        shell.environment["SPEECH_SERVE__PORT"] = str(taken.getsockname()[1])
        dev, _ = ready(shell, "--serve")
        _, told = dev.communicate(timeout=240)
    assert dev.returncode == 5
    assert "The server ended. Its last message:" in told


def test_one_whose_folder_is_moved_ends_and_leaves_nothing_in_its_place(shell: Shell) -> None:
    process, _ = ready(shell)
    (shell.folder / "out").rename(shell.folder / "moved")
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, '"store.unreachable"' in said) == (5, True), said
    assert not (shell.folder / "out").exists()


def test_the_error_of_a_broker_that_is_away_names_it_and_it_takes_no_other(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    shell.environment["SPEECH_BROKER_URL"] = f"redis://127.0.0.1:{CLOSED_PORT}/0"
    away = shell.run("submit", "in.jsonl", "--json")
    assert (away.returncode, error_code(away)) == (5, "broker.unreachable")
    assert "`nightjar dev`" in away.stderr
    refused = shell.run("dev", "--json")
    assert (refused.returncode, error_code(refused)) == (4, "config.invalid")
    assert "SPEECH_BROKER_URL" in refused.stderr

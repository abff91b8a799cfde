"""The processes of `nightjar run`: ended in every way, unable to start, several at once on GPUs, and
nothing left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

from jobs.embedded import EmbeddedHome, embedded_settings
from jobs.ledger import Ledger
from jobs.ledger.records import QUARANTINED, JobSpec
from jobs.settings import Settings, load_settings
from jobs.worker_group import FAILED_STARTS
from tests.support.gpu_host import install_nvidia_smi
from tests.support.run_kit import SLOW, Shell, until, write_input
from tests.support.services import free_port


def test_workers_that_open_their_model_ahead_wait_for_the_job(tmp_path: Path) -> None:
    settings = embedded_settings(load_settings(home=str(tmp_path / "out")))
    with EmbeddedHome(settings) as home:
        ledger = home.ledger
        ledger.migrate()
        home.prepare(JobSpec("hibari"))
        (worker,) = home._workers.processes  # type: ignore[union-attr]
        until(lambda: ledger.worker_statuses() or is_waiting(worker.pid), "the worker is not up")
        assert ledger.worker_statuses() == []
        home.start(print)
        until(lambda: ledger.worker_statuses(), "the worker waits for ever", 120)


def is_waiting(pid: int) -> bool:
    """Whether the main thread of a process waits in `poll` (`ppoll`) or `recvmsg`, by their numbers on x86-64
    and ARM."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("7", "73", "47", "212")


def test_an_ended_run_leaves_no_process_and_the_next_one_makes_only_the_rest(slow: Shell) -> None:
    """A killed one is that of two GPUs below."""
    total = 60
    write_input(slow.folder / "in.jsonl", total)
    slow.hold("line-0")
    run = slow.start(*SLOW)
    until(lambda: slow.done() >= 10, "no item was made")
    run.terminate()
    _, said = run.communicate(timeout=240)
    assert run.returncode == 143, said
    assert "Traceback" not in said
    until(lambda: not slow.processes(), "processes are left")
    before = {path: path.stat().st_mtime_ns for path in (slow.folder / "out").glob("jobs/*/audio/*/*.wav")}
    assert 10 <= len(before) < total
    (job,) = (slow.folder / "out" / "jobs").iterdir()
    assert "no live worker takes this job" in slow.run("status", job.name).stdout
    slow.let_go()
    again = slow.run(*SLOW)
    assert again.returncode == 0, again.stderr
    assert slow.done() == total
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    assert {row["state"] for row in slow.items().values()} == {"done"}


def test_a_killed_broker_costs_no_item(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 80)
    slow.hold("line-79")
    run = slow.start(*SLOW)
    until(lambda: slow.done() >= 5, "no item was made")
    assert len(slow.processes()) == 3
    (pid,) = slow.processes("valkey-server")
    os.kill(pid, signal.SIGKILL)
    assert slow.done() < 80
    slow.let_go()
    _, said = run.communicate(timeout=400)
    assert run.returncode == 0, said
    assert {row["state"] for row in slow.items().values()} == {"done"}


def test_a_worker_that_cannot_start_ends_the_run_with_its_words(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        run = shell.run("run", "in.jsonl", SPEECH_WORKER__METRICS_PORT=str(taken.getsockname()[1]))
    assert run.returncode == 1, run.stderr
    assert "worker.crash" in run.stderr
    assert "worker.log" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_run_on_two_gpus_has_two_workers_and_resumes(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 80)
    slow.hold("line-79")
    gpus = install_nvidia_smi(slow.folder / "state" / "bin", 2)
    run = slow.start(*SLOW, "--gpu", "all", **gpus)
    until(lambda: slow.done() >= 5, "no item was made")
    # The command, the broker and two workers.
    until(lambda: len(slow.processes()) == 4, "not every worker runs")
    # Celery names its process where setproctitle is installed.
    workers = {pid for words in ("worker run", "celeryd") for pid in slow.processes(words)}
    names = {variables(pid)["CUDA_VISIBLE_DEVICES"] for pid in workers}
    assert names == {"0", "1"}
    os.kill(max(workers), signal.SIGKILL)
    until(lambda: len(slow.processes()) == 4, "the worker did not come back")
    run.kill()
    run.communicate(timeout=240)
    until(lambda: not slow.processes(), "processes are left")
    before = {path: path.stat().st_mtime_ns for path in (slow.folder / "out").glob("jobs/*/audio/*/*.wav")}
    slow.let_go()
    again = slow.run(*SLOW, "--gpu", "1,0", **gpus)
    assert again.returncode == 0, again.stderr
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    assert {row["state"] for row in slow.items().values()} == {"done"}
    assert slow.done() == 80


def test_a_run_goes_on_without_a_worker_that_cannot_start_and_says_so(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 20)
    slow.hold("line-19")
    gpus = install_nvidia_smi(slow.folder / "state" / "bin", 2)
    log = slow.folder / "out/.nightjar/worker.log"
    with socket.socket() as taken:
        # The port of the second worker.
        taken.bind(("127.0.0.1", free_port() + 1))
        taken.listen()
        port = taken.getsockname()[1]
        run = slow.start(*SLOW, "--gpu", "0,1", **gpus, SPEECH_WORKER__METRICS_PORT=str(port - 1))
        until(
            lambda: log.exists() and log.read_text().count("cannot be served") == FAILED_STARTS,
            "the worker started",
            100,
        )
        with closing(Ledger.of(Settings(home=slow.folder / "out"))) as ledger:
            until(
                lambda: [row.gpu for row in ledger.worker_statuses() if row.state == QUARANTINED] == ["1"],
                "the end of the worker was not seen",
                100,
            )
        slow.let_go()
        _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert slow.done() == 20
    assert "The worker of GPU 1 ended with status 4, 3 times in a row without a finished item." in said
    assert f"Its last message: Metrics cannot be served on port {port}" in said
    assert "It is quarantined and restarted every 10 min 0 s." in said


def test_settings_that_do_not_let_the_model_open_end_the_run_and_fail_no_item(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 3)
    model = str(Path(__file__).parents[2] / "golden/qwen3_tts/checkpoint-custom")
    run = shell.run(
        "run",
        "in.jsonl",
        "--model",
        model,
        SPEECH_ENGINE__SLOTS="3",
        SPEECH_ENGINE__EXECUTOR="graph",
        CUDA_VISIBLE_DEVICES="",
    )
    assert run.returncode == 4, run.stderr
    assert (
        "Error config.invalid: The graph executor needs a CUDA device.\nSet SPEECH_ENGINE__EXECUTOR to eager, or unset it."
        in run.stderr
    )
    assert "run the same command again to continue" in run.stderr
    assert (shell.folder / "out/.nightjar/worker.log").read_text().count("worker up") == 1, (
        "another start would end in the same way"
    )
    assert {(row["state"], row["attempts"]) for row in shell.items().values()} == {("pending", 0)}


def test_a_checkpoint_that_cannot_be_opened_ends_the_run_and_fails_no_item(shell: Shell) -> None:
    """The codebooks of this folder are cut: tests put them together first."""
    write_input(shell.folder / "in.jsonl", 3)
    model = str(Path(__file__).parents[2] / "golden/qwen3_tts/checkpoint-custom")
    run = shell.run("run", "in.jsonl", "--model", model, SPEECH_ENGINE__SLOTS="3")
    assert run.returncode == 4, run.stderr
    assert re.search(r"Error model.bad_checkpoint: Tensor \S+ has shape", run.stderr)
    assert {(row["state"], row["attempts"]) for row in shell.items().values()} == {("pending", 0)}
    # The job waits for its checkpoint, and does not disturb runs of other models in its folder.
    other = shell.run("run", "in.jsonl", "--model", "hibari")
    assert other.returncode == 0, other.stderr


def test_wrong_gpus_are_refused_before_anything_is_written(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    gpus = install_nvidia_smi(shell.folder / "state" / "bin", 2)
    run = shell.run("run", "in.jsonl", "--gpu", "0,7", **gpus)
    assert run.returncode == 4
    assert "config.invalid: GPU 7 does not exist; this host has 0, 1." in run.stderr
    no_driver = shell.run("run", "in.jsonl", "--gpu", "all", PATH=str(shell.folder))
    assert no_driver.returncode == 4
    assert "config.invalid: --gpu all: no GPU was found on this host (`nvidia-smi`" in no_driver.stderr
    assert not (shell.folder / "out").exists()


def test_a_run_on_one_of_several_gpus_says_how_to_use_all(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    golden = Path(__file__).parents[2] / "golden"
    native, either = str(golden / "qwen3_tts/checkpoint-custom"), str(golden / "spark/checkpoint")

    def says(visible: str, *options: str, **environment: str) -> bool:
        run = shell.run("run", "in.jsonl", "--dry-run", *options, CUDA_VISIBLE_DEVICES=visible, **environment)
        assert run.returncode == 0, run.stderr
        return "This run uses one of 2 GPUs. Give --gpu all to use all of them." in run.stderr

    both = {"SPEECH_VLLM__TENSOR_PARALLEL": "2"}
    assert says("0,1", "--model", native)
    assert not says("1", "--model", native)
    assert not says("0,1"), "the embedded voice needs none"
    assert says("0,1", "--model", either, **both), "the native engine takes one, whatever vLLM would take"
    assert not says("0,1", "--model", either, SPEECH_ENGINE__KIND="vllm", **both)


def variables(pid: int) -> dict[str, str]:
    """The environment of a process."""
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def test_two_runs_in_one_folder_are_refused(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 20)
    slow.hold("line-19")
    first = slow.start(*SLOW)
    until(lambda: slow.done() >= 1, "no item was made")
    second = slow.run(*SLOW)
    assert second.returncode == 1
    assert "Another `nightjar run` or `nightjar dev`" in second.stderr
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=240)
    assert first.returncode == 130


def test_ctrl_c_at_any_time_leaves_nothing(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 60)
    slow.hold("line-59")
    patient = (*SLOW, "--set", "max_attempts=100")
    chooser = random.Random(7)
    for _ in range(3):
        run = slow.start(*patient)
        time.sleep(chooser.uniform(0.02, 4.0))
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=240)
        # Before any line of ours runs, Python itself ends by the signal, or with 1 while it imports `site`;
        # both with a traceback.
        assert run.returncode in (130, -2) or "init_import_site" in said, said
        assert "Traceback" not in said or run.returncode != 130, said
        until(lambda: not slow.processes(), "processes are left")
    slow.let_go()
    final = slow.run(*patient)
    assert final.returncode == 0, final.stderr
    assert slow.done() == 60

"""`nightjar run` as its users meet it: a real process, a real Valkey, a real worker; ended in every way, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import time
import uuid
from contextlib import closing
from pathlib import Path

import pytest
import soundfile

from jobs.embedded import EmbeddedHome, embedded_overrides
from jobs.ledger import Ledger
from jobs.settings import load_settings
from jobs.worker_group import FAILED_STARTS
from tests.support.gpu_host import install_nvidia_smi
from tests.support.report_kit import read_page, rows_of
from tests.support.run_kit import SLOW, Shell, until, write_input
from tests.support.services import MotoS3, free_port


def test_a_run_makes_every_item_and_leaves_nothing(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 8)
    run = shell.run("run", "in.jsonl", "--json")
    assert run.returncode == 0, run.stderr
    assert not shell.processes()
    view = json.loads(run.stdout)
    assert view["schema"] == "nightjar.run/1"
    assert view["items"] == {"total": 8, "done": 8, "failed": 0, "skipped": 0, "pending": 0}
    assert view["audio_seconds"] > 4
    for row in shell.items().values():
        samples, rate = soundfile.read(shell.folder / "out" / str(row["key"]))
        assert (len(samples) * 1000 / rate, rate) == (pytest.approx(row["duration_ms"], abs=1), 24000)
    assert not list((shell.folder / "out/.nightjar").glob("broker.json"))
    assert (Path(view["audio"]).is_dir(), Path(view["manifest"]).is_file(), view["text"]) == (True, True, None)
    report = Path(view["report"])
    assert report == shell.folder / "out" / "reports" / f"{view['job']}.html"
    page = read_page(report.read_text())
    assert len(rows_of(page)) == 8
    assert all((report.parent / player.attributes["src"]).is_file() for player in page.all("audio"))


def test_a_second_run_of_the_same_input_makes_nothing_again(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 3)
    first = shell.run("run", "in.jsonl", "-q")
    written = {path: path.stat().st_mtime_ns for path in (shell.folder / "out").glob("jobs/**/*") if path.is_file()}
    second = shell.run("run", "in.jsonl", "-q")
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert first.stdout == second.stdout
    assert first.stderr == second.stderr == ""
    assert written == {path: path.stat().st_mtime_ns for path in (shell.folder / "out").glob("jobs/**/*") if path.is_file()}


def test_workers_that_open_their_model_ahead_wait_for_the_job(tmp_path: Path) -> None:
    chosen = load_settings(home=str(tmp_path / "out"))
    settings = load_settings(home=str(chosen.home), **embedded_overrides(chosen))
    with EmbeddedHome(settings) as home, closing(Ledger.of(settings)) as ledger:
        ledger.migrate()
        home.prepare("hibari")
        assert home._workers is not None
        (worker,) = home._workers.processes
        pipe = int(
            dict(one.split(b"=", 1) for one in Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0") if one)[b"NIGHTJAR_START_PIPE"]
        )
        until(lambda: ledger.worker_statuses() or blocked_on(worker.pid) == pipe, "the worker is not up")
        assert ledger.worker_statuses() == []
        home.start("hibari")
        until(lambda: ledger.worker_statuses(), "the worker waits for ever", 120)


def blocked_on(pid: int) -> int | None:
    """The file that the main thread of a process waits to read, write or poll; None where it does something else."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return int(words[1], 16) if len(words) > 2 else None


def test_status_finds_a_job_of_another_folder_without_options(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    odd = "else where%20?#&é"
    job = shell.run("run", "in.jsonl", "--out", odd, "-q").stdout.strip()
    assert sorted(path.name for path in shell.folder.iterdir()) == [odd, "in.jsonl", "state"]
    status = shell.run("status", job[:12], "--json")
    assert json.loads(status.stdout)["job"] == job
    assert shell.run("status", job, "--out", "out").returncode == 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_ended_run_leaves_no_process_and_the_next_one_makes_only_the_rest(slow: Shell, number: signal.Signals, status: int) -> None:
    total = 60
    write_input(slow.folder / "in.jsonl", total)
    slow.hold("line-0")
    run = slow.start(*SLOW)
    until(lambda: slow.done() >= 10, "no item was made")
    run.send_signal(number)
    _, said = run.communicate(timeout=240)
    assert run.returncode == status, said
    assert "Traceback" not in said
    until(lambda: not slow.processes(), "processes are left")
    before = {path: path.stat().st_mtime_ns for path in (slow.folder / "out").glob("jobs/*/audio/*/*.wav")}
    assert 10 <= len(before) < total
    slow.let_go()
    again = slow.run(*SLOW)
    assert again.returncode == 0, again.stderr
    assert slow.done() == total
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    assert {row["state"] for row in slow.items().values()} == {"done"}


# Celery names its process where setproctitle is installed.
@pytest.mark.parametrize("victim", [("worker run", "celeryd"), ("valkey-server",)])
def test_a_killed_child_costs_no_item(slow: Shell, victim: tuple[str, ...]) -> None:
    write_input(slow.folder / "in.jsonl", 80)
    slow.hold("line-79")
    run = slow.start(*SLOW)
    until(lambda: slow.done() >= 5, "no item was made")
    assert len(slow.processes()) == 3
    (pid,) = {pid for words in victim for pid in slow.processes(words)}
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
    workers = {pid for words in ("worker run", "celeryd") for pid in slow.processes(words)}
    names = {variables(pid)["CUDA_VISIBLE_DEVICES"] for pid in workers}
    assert names == {"0", "1"}
    os.kill(max(workers), signal.SIGKILL)
    until(lambda: len(slow.processes()) == 4, "the worker did not come back")
    run.kill()
    run.communicate(timeout=240)
    until(lambda: not slow.processes(), "processes are left")
    slow.let_go()
    again = slow.run(*SLOW, "--gpu", "1,0", **gpus)
    assert again.returncode == 0, again.stderr
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
        until(lambda: log.exists() and log.read_text().count("cannot be served") == FAILED_STARTS, "the worker started", 100)
        running = slow.folder / "out/.nightjar/worker.json"
        until(lambda: len(json.loads(running.read_text())["pids"]) == 1, "the end of the worker was not seen", 100)
        slow.let_go()
        _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert slow.done() == 20
    assert "The worker of GPU 1 ended with status 4, 3 times in a row without a finished item." in said
    assert f"It said: Metrics cannot be served on port {port}" in said
    assert "It is quarantined: it is started again every 10 min 0 s." in said


def test_settings_that_do_not_let_the_model_open_end_the_run_and_fail_no_item(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 3)
    model = str(Path(__file__).parents[2] / "golden/qwen3_tts/checkpoint-custom")
    run = shell.run("run", "in.jsonl", "--model", model, SPEECH_ENGINE__SLOTS="3", SPEECH_ENGINE__EXECUTOR="graph", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1, run.stderr
    assert "It said: The graph executor needs a CUDA device. Set SPEECH_ENGINE__EXECUTOR to eager, or unset it." in run.stderr
    assert {(row["state"], row["attempts"]) for row in shell.items().values()} == {("pending", 0)}


def test_wrong_gpus_are_refused_before_anything_is_written(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    gpus = install_nvidia_smi(shell.folder / "state" / "bin", 2)
    run = shell.run("run", "in.jsonl", "--gpu", "0,7", **gpus)
    assert run.returncode == 4
    assert "config.invalid: GPU 7 does not exist; this host has 0 and 1." in run.stderr
    no_driver = shell.run("run", "in.jsonl", "--gpu", "all", PATH=str(shell.folder))
    assert no_driver.returncode == 4
    assert "config.invalid: --gpu all: no GPU was found on this host (`nvidia-smi`" in no_driver.stderr
    assert not (shell.folder / "out").exists()


@pytest.mark.parametrize(("visible", "says"), [("0,1", True), ("1", False), ("", False)])
def test_a_run_on_one_of_several_gpus_says_how_to_use_all(shell: Shell, visible: str, says: bool) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    model = str(Path(__file__).parents[2] / "golden/qwen3_tts/checkpoint-custom")
    run = shell.run("run", "in.jsonl", "--model", model, "--dry-run", CUDA_VISIBLE_DEVICES=visible)
    assert run.returncode == 0, run.stderr
    assert ("This run uses one of 2 GPUs. Give --gpu all to use all of them." in run.stderr) is says
    assert "GPUs" not in shell.run("run", "in.jsonl", "--dry-run", CUDA_VISIBLE_DEVICES=visible).stderr


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
    assert "Another `nightjar run`" in second.stderr
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=240)
    assert first.returncode == 130


def test_ctrl_c_at_any_time_leaves_nothing(slow: Shell) -> None:
    write_input(slow.folder / "in.jsonl", 60)
    slow.hold("line-59")
    patient = (*SLOW, "--max-attempts", "100")
    chooser = random.Random(7)
    for _ in range(6):
        run = slow.start(*patient)
        time.sleep(chooser.uniform(0.02, 4.0))
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=240)
        # Before any line of ours runs, Python itself ends by the signal, or with 1 while it imports `site`; both with a traceback.
        assert run.returncode in (130, -2) or "init_import_site" in said, said
        assert "Traceback" not in said or run.returncode != 130, said
        until(lambda: not slow.processes(), "processes are left")
    slow.let_go()
    final = slow.run(*patient)
    assert final.returncode == 0, final.stderr
    assert slow.done() == 60


def test_lines_and_items_that_fail_end_with_1_and_are_listed(shell: Shell) -> None:
    good = write_input(shell.folder / "in.jsonl", 2).read_text()
    (shell.folder / "in.jsonl").write_text(good + "not json\n" + good.splitlines()[0] + "\n" + '{"example_id": "e", "messages": []}\n')
    run = shell.run("run", "in.jsonl", "--json")
    assert run.returncode == 1, run.stderr
    view = json.loads(run.stdout)
    assert (view["state"], view["rejected_lines"]) == ("completed_with_errors", 3)
    errors = [json.loads(line) for line in shell.run("errors", view["job"], "--json").stdout.splitlines()]
    assert [(error["kind"], error["line"], error["code"]) for error in errors][:2] == [
        ("line", 3, "input.bad_json"),
        ("line", 4, "input.duplicate_id"),
    ]


def test_abort_on_a_bad_line_leaves_nothing(shell: Shell) -> None:
    (shell.folder / "in.jsonl").write_text("{not json\n")
    run = shell.run("run", "in.jsonl", "--on-error", "abort", "--json")
    assert run.returncode == 4
    assert json.loads(run.stderr.splitlines()[-1])["error"]["code"] == "input.bad_json"
    assert not list((shell.folder / "out").glob("jobs/*"))


def test_example_ids_cannot_leave_the_folder(shell: Shell) -> None:
    ids = [
        "../../x",
        "/etc/passwd",
        "a" * 300,
        "naïve 日本 🎵",
        "line\nbreak",
        "'; DROP TABLE items; --",
        "$(touch pwned)",
        "..",
        ".",
        "CON",
        "\x1b[31m",
    ]
    lines = [json.dumps({"example_id": example_id, "messages": [["user", "text", "Hello there."]]}) for example_id in ids]
    (shell.folder / "in.jsonl").write_text("\n".join(lines))
    run = shell.run("run", "in.jsonl", "--json")
    assert run.returncode in (0, 1), run.stderr
    rows = shell.items()
    for row in rows.values():
        path = (shell.folder / "out" / str(row["key"])).resolve()
        assert path.is_relative_to((shell.folder / "out").resolve())
        assert path.is_file()
    assert {"../../x", "naïve 日本 🎵", "'; DROP TABLE items; --"} <= set(rows)
    assert sorted(path.name for path in shell.folder.iterdir()) == ["in.jsonl", "out", "state"]
    listed = shell.run("items", json.loads(run.stdout)["job"])
    assert "\x1b" not in listed.stdout
    assert len(listed.stdout.splitlines()) == len(rows) + 1


def test_a_run_into_a_bucket(shell: Shell, moto: MotoS3) -> None:
    write_input(shell.folder / "in.jsonl", 2)
    url = f"s3://{moto.create_bucket(f'run-{uuid.uuid4().hex[:12]}')}/prefix"
    shell.environment |= {
        "SPEECH_STORE_URL": url,
        "SPEECH_S3__ENDPOINT_URL": moto.endpoint,
        "SPEECH_S3__ACCESS_KEY_ID": moto.access_key,
        "SPEECH_S3__SECRET_ACCESS_KEY": moto.secret_key,
        "SPEECH_S3__REGION": "us-east-1",
    }
    run = shell.run("run", "in.jsonl")
    assert run.returncode == 0, run.stderr
    job = run.stdout.split()[0]
    assert f"files   {url}/jobs/{job}/audio" in run.stdout
    assert f"list    {url}/jobs/{job}/manifest.jsonl" in run.stdout
    # The ledger and what belongs to this machine stay in the folder.
    assert sorted(path.name for path in (shell.folder / "out").iterdir()) == [".nightjar", "reports"]
    assert shell.run("verify", job, "--sample", "1").returncode == 0


def test_a_run_uses_the_store_that_is_set(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 2)
    run = shell.run("run", "in.jsonl", "--json", SPEECH_STORE_URL="the store", SPEECH_BROKER_URL="redis://127.0.0.1:9/0")
    assert run.returncode == 0, run.stderr
    view = json.loads(run.stdout)
    assert "set by store_url (environment)" in run.stderr
    assert "broker_url (environment) is not used" in run.stderr
    store = shell.folder / "the store"
    assert view["audio"] == f"{store}/jobs/{view['job']}/audio"
    assert len(list(store.glob("jobs/*/audio/*/*.wav"))) == 2
    assert not (shell.folder / "out" / "jobs").exists()
    assert shell.run("verify", view["job"], "--sample", "0").returncode == 0
    again = shell.run("run", "in.jsonl", "--json", SPEECH_STORE_URL="the store")
    assert json.loads(again.stdout)["job"] == view["job"]


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@127.0.0.1:9/x", "sqlite:///elsewhere.sqlite"])
def test_a_ledger_elsewhere_is_refused_before_anything_is_written(shell: Shell, url: str) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    run = shell.run("run", "in.jsonl", SPEECH_DATABASE_URL=url)
    assert run.returncode == 4
    assert "config.invalid" in run.stderr
    assert "database_url (environment)" in run.stderr
    assert "nightjar submit" in run.stderr
    assert "hunter2" not in run.stderr
    assert not (shell.folder / "out").exists()


def test_a_run_writes_only_where_it_says(shell: Shell, tmp_path: Path) -> None:
    """An empty home of the user: nothing but the pointer to the job is left there, and nothing in the folder of temporary files."""
    write_input(shell.folder / "in.jsonl", 2)
    user, temporary = tmp_path / "user", tmp_path / "temporary"
    user.mkdir()
    temporary.mkdir()
    # What the session says of caches and of telemetry does not count.
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "ORT_DISABLE_TELEMETRY"):
        shell.environment.pop(name, None)
    run = shell.run("run", "in.jsonl", "--quiet", HOME=str(user), TMPDIR=str(temporary))
    assert run.returncode == 0, run.stderr
    assert [path.relative_to(user).as_posix() for path in user.rglob("*") if path.is_file()] == [
        f".local/state/nightjar/jobs/{run.stdout.strip()}"
    ]
    assert not list(temporary.iterdir())


def test_a_run_of_a_finished_job_makes_again_what_is_lost(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 4)
    job = shell.run("run", "in.jsonl", "-q").stdout.strip()
    made = {path: path.read_bytes() for path in (shell.folder / "out" / "jobs" / job).rglob("*") if path.suffix in (".wav", ".zst")}
    gone, empty, *_ = sorted(path for path in made if path.suffix == ".wav")
    (lines,) = (path for path in made if path.suffix == ".zst")
    gone.unlink()
    os.truncate(empty, 0)
    os.truncate(lines, 0)
    refused = shell.run("export", job, "--format", "nemo", "--to", "x.jsonl")
    assert refused.returncode == 5
    assert "store.missing" in refused.stderr
    assert f"missing {gone.relative_to(shell.folder / 'out')}, changed {empty.relative_to(shell.folder / 'out')}" in refused.stderr
    assert f"nightjar verify {job} --repair" in refused.stderr
    again = shell.run("run", "in.jsonl", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["job"] == job
    assert "Lost or damaged: 1 shard input of this job." in again.stderr
    assert "Missing or damaged: 2 files of this job." in again.stderr
    assert "Made again: 2 with the same bytes, 0 with other bytes." in again.stderr
    assert {path: path.read_bytes() for path in made} == made


def test_a_moved_folder_goes_on(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 3)
    job = shell.run("run", "in.jsonl", "-q").stdout.strip()
    here, moved, copy = (shell.folder / name for name in ("out", "moved", "copy"))
    here.rename(moved)
    shutil.copytree(moved, copy)
    for home in (copy, moved):
        again = shell.run("run", "in.jsonl", "--json", "--out", home.name)
        assert json.loads(again.stdout)["job"] == job, again.stderr
        assert json.loads(again.stdout)["audio"] == f"{home}/jobs/{job}/audio"
        assert "done before" in again.stderr
    assert shell.run("verify", job, "--sample", "1", "--out", "moved").returncode == 0
    assert shell.run("report", job, "--out", "moved").stdout.strip() == str(moved / "reports" / f"{job}.html")
    assert len(shell.items("moved")) == 3
    assert not here.exists()
    # Without a folder: the first command that named the one it was moved to has noted it.
    assert json.loads(shell.run("status", job, "--json").stdout)["store"] in (copy.as_uri(), moved.as_uri())

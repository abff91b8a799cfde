"""deploy/slurm with programs that do to processes what Slurm's do: a real worker takes a job, drains at
the warning, and is requeued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.worker_process import REPOSITORY, Site

SLURM = REPOSITORY / "deploy/slurm"
#: One task on this node. At SIGTERM srun kills its tasks.
SRUN = """#!/bin/bash
echo "$1" >"$FAKE_SLURM/cores"
while [[ $1 == -* ]]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
task=$!
echo $task >"$FAKE_SLURM/task.tmp" && mv "$FAKE_SLURM/task.tmp" "$FAKE_SLURM/task"
trap 'kill -KILL $task' TERM
wait $task
"""
#: A signal with a name goes to the tasks.
SCANCEL = """#!/bin/bash
[[ $1 == --signal=* && $2 == "$SLURM_JOB_ID" ]] || exit 1
kill "-${1#--signal=}" "$(cat "$FAKE_SLURM/task")"
"""
SCONTROL = """#!/bin/bash
echo "$@" >>"$FAKE_SLURM/asked"
"""
#: `nightjar`, whose workers also know the model `fake`.
NIGHTJAR = f"""#!/bin/bash
cd {REPOSITORY}
case $1 in
    worker) shift; exec {sys.executable} -m tests.support.fake_worker run "$@" ;;
    *) exec {sys.executable} -m jobs "$@" ;;
esac
"""


def programs(folder: Path) -> dict[str, str]:
    """Variables of a job of Slurm whose programs are ours."""
    folder.mkdir()
    for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "nightjar": NIGHTJAR}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FAKE_SLURM": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "8",
        "NIGHTJAR_REQUEUE": "1",
    }


def started(site: Site, **variables: str) -> subprocess.Popen[bytes]:
    settings = site.folder / "nightjar.env"
    settings.write_text("".join(f"{name}='{value}'\n" for name, value in site.environment.items()))
    given = (
        {"NIGHTJAR_ENV": str(settings), "OMP_NUM_THREADS": "1"} | programs(site.folder / "slurm") | variables
    )
    with site.log.open("ab") as log:
        job = subprocess.Popen(
            [SLURM / "nightjar.sbatch"], cwd=site.folder, env=os.environ | given, stdout=log, stderr=log
        )
    site.processes.append(job)
    return job


def requeued(site: Site) -> list[str]:
    path = site.folder / "slurm/asked"
    return path.read_text().splitlines() if path.exists() else []


def test_workers_drain_before_the_time_limit_and_are_requeued(tmp_path: Path, valkey_url: str) -> None:
    with Site(tmp_path, valkey_url) as site:
        job = site.submit([site.held("One."), "Two."])
        workers = started(site)
        site.wait_for(lambda: site.status(job).items.done == 1)
        workers.send_signal(signal.SIGUSR1)
        site.wait_for(lambda: '"draining"' in site.log_text() or workers.poll() is not None)
        assert workers.poll() is None, "it waits for the item in the engine"
        site.let_go()
        assert workers.wait(240) == 0, site.log_text()[-3000:]
        assert site.status(job).items.done == 2
        assert requeued(site) == ["requeue 7"]


def test_workers_end_with_the_job_that_they_were_started_for(tmp_path: Path, valkey_url: str) -> None:
    with Site(tmp_path, valkey_url) as site:
        job = site.submit(["One.", "Two."])
        workers = started(site, NIGHTJAR_JOB=job.id)
        assert workers.wait(240) == 0, site.log_text()[-3000:]
        assert site.status(job).job.state.final
        assert requeued(site) == [], "its time is not over"
        assert (tmp_path / "slurm/cores").read_text() == "--cpus-per-task=8\n"


def test_a_run_on_one_node_is_asked_to_stop_and_requeued(tmp_path: Path) -> None:
    """What `nightjar run` does at SIGTERM is tested with it; here it only says that it got one."""
    variables = os.environ | programs(tmp_path / "slurm")
    program = tmp_path / "slurm/nightjar"
    program.write_text("#!/bin/bash\ntrap 'kill $!; exit 143' TERM\nsleep 600 >&- &\necho \"$*\"\nwait\n")
    command = [SLURM / "nightjar-run.sbatch", "in.jsonl", "out", "--model", "hibari"]
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "run in.jsonl --out out --gpu all --model hibari\n"
        run.send_signal(signal.SIGUSR1)
        assert run.wait(60) == 143, "as the program ended"
    assert (tmp_path / "slurm/asked").read_text() == "requeue 7\n"

"""`python -m worker run|nightly|flower|sweep|check`: the commands of the consumer side, which `nightjar worker`,
`nightjar nightly`, `nightjar flower`, `nightjar sweep` and `nightjar check` start."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, get_origin

import click
import structlog

from jobs.console import (
    FAILED,
    PROGRAM,
    TIMEOUT,
    F,
    FiniteRange,
    Interrupted,
    Output,
    Signals,
    exit_code,
    fail,
    flag,
    home_option,
    json_option,
    option,
)
from jobs.formatting import field_docs
from jobs.gpus import choose_gpus, count_gpus
from jobs.job_options import CheckOptions, flags
from jobs.logs import setup_logging
from jobs.recent_jobs import chosen_jobs
from jobs.settings import Settings, load_settings
from jobs.status import measured_view
from jobs.worker_group import WorkerGroup, WorkerReport, plan_workers
from pipelines.child_process import Child
from pipelines.errors import NightjarError
from worker.supervisor import is_supervised, report_end, run_group, wait_for_release

log = structlog.get_logger(__name__)

#: Pause before the first restart of a worker.
FIRST_PAUSE_SECONDS = 0.5
_HELP = ["-h", "--help"]


def _check_options(function: F) -> F:
    """Adds the options of the quality checks, which the command gets by their names in the table."""
    for name, text in reversed(field_docs(CheckOptions).items()):
        row = flags()[name]
        several = get_origin(row.kind) is Sequence
        function = option(row.flag, row.metavar or "NAME", text, name=name, multiple=several)(function)
    return function


@click.group(context_settings={"help_option_names": _HELP})
def cli() -> None:
    """Processes that run shards and maintain jobs. `nightjar worker`, `flower`, `nightly`, `sweep` and `check`
    start them.

    \b
    Examples:
      python -m worker run --gpu 0,1
      python -m worker run --help
    """


def _settings() -> Settings:
    settings = load_settings()
    setup_logging(settings.log_level, settings.log_format)
    return settings


@cli.command()
@option(
    "--gpu",
    "N,N...|all",
    "GPUs by their numbers in `nvidia-smi`, for example 0,1,2,3, or `all`. Runs one worker process per GPU, on separate cores, and "
    "restarts a process that dies.",
    name="gpus",
)
@option("--model", "MODEL", "Run only jobs of this model, and load it at the start.")
@option(
    "--preload", "MODEL", "Load this model at once, before a job needs it. [default: the model of --model]"
)
@flag(
    "--supervise", "Run the worker under a parent process that restarts it if it dies (--gpu does this too)."
)
@click.option("--private", is_flag=True, hidden=True, help="The worker of `nightjar run`.")
@click.option("--codes", is_flag=True, hidden=True, help="Preload the model for codes alone.")
def run(
    gpus: str | None, model: str | None, preload: str | None, supervise: bool, private: bool, codes: bool
) -> None:
    """Run a worker, which synthesizes shards until SIGTERM.

    After SIGTERM it takes no new shards and finishes its items. A second signal makes it return unfinished
    items to the queue at once. With --gpu or --supervise, a worker that keeps failing is quarantined: the
    others continue, and the exit code at the end is 1.

    \b
    Examples:
      nightjar worker
      nightjar worker --gpu 0,1,2,3
      nightjar worker --gpu all
    """
    # Checked first, because the process that started this one may end at any time.
    supervised = is_supervised()
    settings = _settings()
    count = 0 if gpus is not None or supervised or private else count_gpus()
    if count > 1 and settings.vllm.tensor_parallel == 1:
        log.warning("this worker uses one GPU; --gpu all uses all of them", gpus=count)
    if gpus is not None or supervise:
        # Each worker runs this program without these options.
        spec = sys.modules["__main__"].__spec__
        program = ["-m", "worker" if spec is None else spec.name.removesuffix(".__main__"), "run"]
        for name, value in (("--model", model), ("--preload", preload)):
            program += [] if value is None else [name, value]
        sys.exit(
            run_group(
                WorkerGroup(
                    settings,
                    plan_workers(settings, None if gpus is None else choose_gpus(gpus)),
                    lambda plan: Child(
                        program, WorkerReport, plan.environment, bound=False, cores=plan.cores
                    ),
                    (FIRST_PAUSE_SECONDS, settings.times.restart_seconds),
                    on_event=lambda level, event, details: getattr(log, level)(event, **details),
                )
            )
        )
    from worker.models import Preload

    # Started before the import of Celery, since both take seconds.
    wanted = preload or model
    opening = None if wanted is None else Preload(settings, wanted, not codes)
    from worker.celery_app import run_worker

    wait_for_release()
    sys.exit(run_worker(settings, model, private, opening))


@cli.command()
@option("--night", "YYYY-MM-DD", "Night to run. [default: the last night]")
@option(
    "--catch-up",
    "N",
    "Also run up to N earlier nights that have not run yet.",
    type=click.IntRange(0, 366),
    default=0,
)
@option(
    "--schedule", "NAME", "Run only this schedule. Can be given more than once.", name="names", multiple=True
)
@option(
    "--wait",
    "HOURS",
    "Maximum hours to wait until the jobs end.",
    name="wait_hours",
    type=FiniteRange(min=0),
    default=0.0,
)
@flag("--again", "Submit a night's file again if its job failed or was cancelled.")
@json_option
def nightly(
    night: str | None, catch_up: int, names: tuple[str, ...], wait_hours: float, again: bool, as_json: bool
) -> None:
    """Submit the night's file of every schedule.

    Also write the exports of nights whose job has ended. A night that ran is not run again. Exit codes: 0 ok;
    1 a night or a dataset failed; 7 (only with --wait) a job did not end in time.

    \b
    Examples:
      nightjar nightly
      nightjar nightly --catch-up 2 --wait 8
    """
    from worker.nightly import run_nights

    nights = run_nights(_settings(), night, catch_up, names, wait_seconds=wait_hours * 3600, again=again)
    for one in nights:
        Output(as_json).result(str(one), one.view)
    if any(one.bad for one in nights):
        sys.exit(FAILED)
    sys.exit(TIMEOUT if wait_hours and any(one.unfinished for one in nights) else 0)


@cli.command()
def flower() -> None:
    """Run the Flower dashboard, which is read-only and needs a password. SPEECH_FLOWER__BASIC_AUTH sets it,
    as USER:PASSWORD.

    \b
    Examples:
      nightjar flower
    """
    from worker.celery_app import run_flower

    run_flower(_settings())


@cli.command()
@flag("--delete", "Delete the orphans.")
@option(
    "--grace-hours",
    "HOURS",
    "Minimum hours since the job ended and since the object was written.",
    type=FiniteRange(min=0),
    default=24.0,
    show_default=True,
)
@json_option
def sweep(delete: bool, grace_hours: float, as_json: bool) -> None:
    """Find orphans: objects in the store that no job uses.

    Killed workers and cancelled jobs leave them. Without --delete they are only counted. Exit code 1: a job could
    not be checked.

    \b
    Examples:
      nightjar sweep
      nightjar sweep --delete
    """
    from worker.garbage import sweep_all

    report = sweep_all(_settings(), grace_hours * 3600, delete=delete)
    failed = f"; {report.failed_jobs} jobs could not be checked" if report.failed_jobs else ""
    Output(as_json).result(
        f"{report.orphans} orphans, {report.bytes} bytes{', deleted' if delete else ''}{failed}",
        "nightjar.sweep/1",
        orphans=report.orphans,
        bytes=report.bytes,
        deleted=delete,
        failed_jobs=report.failed_jobs,
    )
    sys.exit(FAILED if report.failed_jobs else 0)


@cli.command()
@click.argument("job")
@home_option
@json_option
@_check_options
def check(job: str, home: str | None, as_json: bool, **given: Any) -> None:
    """Measure the stored audio of JOB with meters, as if they had run during the job.

    Without options of checks, those of the job measure the items that they have not measured. A failed item gets the
    code of its check, and its audio moves to quarantine unless the job keeps it. The job must have completed. After
    Ctrl-C or SIGTERM, what was measured is kept; to continue, repeat the command. Several machines may run it at
    once. Exit code 1: a measured item is failed, or an item could not be measured.

    \b
    Examples:
      nightjar check JOB --qa strict
      nightjar check JOB --qa strict --qa-sample 5%
    """
    from worker.check import run_check

    _settings()
    output = Output(as_json)
    with Signals().installed() as signals, chosen_jobs([job], home) as (found,):
        signals.kill = lambda: os._exit(FAILED)
        try:
            checked = run_check(found, {name: one or None for name, one in given.items()}, output.note)
        except Interrupted:
            output.note("Stopped. What was measured is kept. To continue, repeat the command.")
            raise
    view = {"left": checked.left.total(), "left_by_code": checked.left, **measured_view(checked.measured)}
    view["still_failed"] = checked.measured.still_failed
    output.result(str(checked), "nightjar.check/1", job=found.id, **view)
    sys.exit(0 if checked.passed else FAILED)


def main() -> None:
    """Runs the command line; errors that the user can correct are printed without a traceback."""
    program = os.environ.pop(PROGRAM, None)
    try:
        if program is None:
            cli(prog_name="python -m worker", standalone_mode=False)
        else:
            # The usage line shows the command of the user.
            cli.commands[sys.argv[1]].main(
                sys.argv[2:], prog_name=program, standalone_mode=False, help_option_names=_HELP
            )
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Interrupted as error:
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(128 + signal.SIGINT)
    except NightjarError as error:
        report_end(str(error))
        fail(error, as_json="--json" in sys.argv)
        sys.exit(exit_code(error))
    except Exception as error:
        report_end(f"{type(error).__name__}: {error}")
        raise

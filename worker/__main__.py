"""`python -m worker run|beat|nightly|flower|sweep`: the processes of the consumer side."""

from __future__ import annotations

import signal
import sys

import click

from jobs.cli.context import FiniteRange
from jobs.cli.output import Output, exit_code, fail
from jobs.logs import setup_logging
from jobs.settings import Settings, load_settings
from pipelines.errors import NightjarError

#: Exit codes, as those of `nightjar wait`.
FAILED, NOT_ENDED = 1, 7


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """The consumer side of Nightjar."""


def _settings() -> Settings:
    settings = load_settings()
    setup_logging(settings.log_level, settings.log_format)
    return settings


@cli.command()
@click.option("--gpu", "gpus", help="GPUs to use, as in 0,1,2,3: one process each, brought back when it dies.")
@click.option("--model", help="Serve this model only, and load it at the start.")
@click.option("--supervise", is_flag=True, help="Without --gpu: a parent process brings the worker back when it dies.")
@click.option("--parent-pid", type=int, help="Drain when this process is no longer the parent.")
def run(gpus: str | None, model: str | None, supervise: bool, parent_pid: int | None) -> None:
    """Takes shards and runs them until SIGTERM, which drains."""
    settings = _settings()
    if gpus is not None or supervise:
        from worker.supervisor import supervise as run_all

        wanted = [gpu.strip() for gpu in gpus.split(",") if gpu.strip()] if gpus is not None else [None]
        if not wanted:
            raise click.UsageError("--gpu names no GPU.")
        sys.exit(run_all(["--model", model] if model else [], wanted, settings.worker.restart_seconds))
    from worker.run import run_worker

    sys.exit(run_worker(settings, model, parent_pid))


@cli.command()
def beat() -> None:
    """Sends the nightly schedules, and the sweep if wanted, to the workers; run exactly one."""
    from worker.run import run_beat

    run_beat(_settings())


@cli.command()
@click.option("--night", help="The night to run, YYYY-MM-DD; default: the last one.")
@click.option("--catch-up", type=click.IntRange(0, 366), default=0, help="Also run that many earlier nights that did not run.")
@click.option("--schedule", "names", multiple=True, help="Only this schedule; may be given more than once.")
@click.option("--wait", "wait_hours", type=FiniteRange(min=0), default=0.0, metavar="HOURS", help="Wait so long for the jobs' end.")
@click.option("--again", is_flag=True, help="Also submit the same file of a night whose job failed or was cancelled.")
@click.option("--json", "as_json", is_flag=True, help="Print versioned JSON, one object a line.")
def nightly(night: str | None, catch_up: int, names: tuple[str, ...], wait_hours: float, again: bool, as_json: bool) -> None:
    """Submits the night's file of every schedule, and writes the exports of nights that have ended; no night runs twice.

    Exit code: 0 all is well, 1 a night or a dataset failed, 7 with --wait: a job has not ended.
    """
    from worker.nightly import run_nights

    settings = _settings()
    report = run_nights(settings, night, catch_up, names, wait_seconds=wait_hours * 3600, again=again)
    for one in report.nights:
        if as_json:
            Output(as_json=True).data(one.view)
        else:
            click.echo(str(one))
    sys.exit(FAILED if report.failed else NOT_ENDED if wait_hours and report.unfinished else 0)


@cli.command()
def flower() -> None:
    """The dashboard of workers and shards: with a password, and for looking only."""
    from worker.run import run_flower

    run_flower(_settings())


@cli.command()
@click.option("--delete", is_flag=True, help="Delete what was found; without it, it is only counted.")
@click.option("--grace-hours", type=FiniteRange(min=0), help="Age of the end of a job, and of an object; default: the setting, 24.")
@click.option("--json", "as_json", is_flag=True, help="Print versioned JSON.")
def sweep(delete: bool, grace_hours: float | None, as_json: bool) -> None:
    """Finds objects of ended jobs that nothing names: what killed workers and cancelled jobs left.

    Exit code: 0 all jobs were looked at, 1 the store of a job did not answer as it should.
    """
    from worker.garbage import sweep_all

    settings = _settings()
    hours = settings.sweep.grace_hours if grace_hours is None else grace_hours
    report = sweep_all(settings, hours * 3600, delete=delete)
    if as_json:
        view = {"orphans": report.orphans, "bytes": report.bytes, "deleted": delete, "failed_jobs": report.failed_jobs}
        Output(as_json=True).data({"schema": "nightjar.sweep/1", **view})
    else:
        failed = f"; {report.failed_jobs} jobs could not be looked at" if report.failed_jobs else ""
        click.echo(f"{report.orphans} orphans, {report.bytes} bytes{', deleted' if delete else ''}{failed}")
    sys.exit(FAILED if report.failed_jobs else 0)


def main() -> None:
    """Runs the command line; an error that a person can mend is a sentence, not a traceback."""
    try:
        cli(prog_name="python -m worker", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(128 + signal.SIGINT)
    except NightjarError as error:
        fail(error, as_json="--json" in sys.argv)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()

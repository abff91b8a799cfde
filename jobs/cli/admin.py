"""The commands of an installation: `nightjar doctor`, `db`, `config`, `worker`, `workers`, `flower`, `sweep` and
`completion`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click
from click.shell_completion import ShellComplete, get_completion_class

from jobs.cli.options import common_options, output_options, read_ledger, worker_command
from jobs.console import FAILED, Output, flag
from jobs.doctor import run_checks
from jobs.formatting import field_docs, printable, redact, seconds_text
from jobs.ledger.status import RECENT_SECONDS, WorkerStatus, worker_statuses
from jobs.recent_jobs import settings_for_new_job
from jobs.settings import load_settings, setting_fields, variable_of
from jobs.status import utc, worker_view
from pipelines.errors import NotFoundError

if TYPE_CHECKING:
    from jobs.ledger import Ledger


@click.group()
def db() -> None:
    """Create or upgrade the ledger's tables.

    \b
    Examples:
      nightjar db upgrade
    """


@db.command()
@common_options
def upgrade(home: str | None, output: Output) -> None:
    """Create the ledger's tables, or upgrade them to this version.

    \b
    Examples:
      nightjar db upgrade
    """
    _db(home, output, "The ledger {url} has the tables of this version.", lambda ledger: ledger.migrate())


@db.command()
@common_options
def current(home: str | None, output: Output) -> None:
    """Check that the ledger's tables match this version.

    \b
    Examples:
      nightjar db current
    """
    _db(home, output, "{revision}  {url}", lambda ledger: ledger.check_schema())


def _db(home: str | None, output: Output, text: str, act: Callable[[Ledger], None]) -> None:
    from jobs.ledger import Ledger
    from jobs.ledger.records import SCHEMA_REVISION

    with closing(Ledger.of(load_settings(home=home))) as ledger:
        act(ledger)
        fields = {"url": redact(ledger.url), "revision": SCHEMA_REVISION}
        output.result(text.format(**fields), "nightjar.ledger/1", **fields)


@click.group()
def config() -> None:
    """Show the settings and where they come from.

    \b
    Examples:
      nightjar config show
    """


@config.command()
@common_options
def show(home: str | None, output: Output) -> None:
    """Show every setting with its value and where it was set. Secrets are hidden.

    \b
    Examples:
      nightjar config show
      nightjar config show --json
    """
    settings = load_settings(home=home)
    rows = [
        (key, redact(value) if isinstance(value, str) else value, settings.origin(key))
        for key, value in leaves(settings.model_dump(mode="json"))
    ]
    effective = {
        "ledger": redact(settings.ledger_url),
        "broker": redact(settings.effective_broker_url),
        "store": redact(settings.effective_store_url),
    }
    if output.as_json:
        values = {key: {"value": value, "origin": origin} for key, value, origin in rows}
        output.data({"schema": "nightjar.config/1", "settings": values, "effective": effective})
        return
    output.table(("SETTING", "VALUE", "ORIGIN"), rows)
    click.echo()
    output.table(("EFFECTIVE", "ADDRESS"), effective.items())


@config.command("list")
@output_options
def list_settings(output: Output) -> None:
    """List every setting with its variable, default and meaning. Works even if the configuration is invalid.

    \b
    Examples:
      nightjar config list
    """
    names = ("variable", "default", "description")
    views = (({"schema": "nightjar.setting/1", **dict(zip(names, row))}, row) for row in described())
    output.records(("VARIABLE", "DEFAULT", "MEANING"), views)


def leaves(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every setting, including nested ones. The part `options` is left out of
    the keys of a schedule."""
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, prefix if name == "options" else f"{prefix}{name}.")
        elif name != "options":
            yield f"{prefix}{name}", value


def described() -> Iterator[tuple[str, str, str]]:
    """Yields (variable, default, meaning) of every setting; `NAME` is the key of a schedule."""
    for key, group in setting_fields():
        name = key.rpartition(".")[2]
        if name == "options":
            yield variable_of(key.removesuffix("s")), "", "Option of the job, by its name in docs/python.md."
            continue
        field = group.model_fields[name]
        default = "" if field.default in (None, ()) else str(field.default)
        yield variable_of(key), "required" if field.is_required() else default, field_docs(group)[name]


_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@common_options
def doctor(home: str | None, output: Output) -> int:
    """Check Python, settings, ledger, broker, store, disk, models and GPUs, with advice for each failure.

    Exit code 1: a check failed.

    \b
    Examples:
      nightjar doctor
    """
    failed = False
    for finding in run_checks(home):
        failed |= finding.health == "fail"
        if output.as_json:
            output.data({"schema": "nightjar.finding/1", **finding._asdict()})
        elif finding.health != "ok" or not output.quiet:
            label = click.style(f"{finding.health:<5}", fg=_COLORS[finding.health], bold=True)
            click.echo(f"{label} {finding.check:<9} {printable(finding.message)}")
            if finding.advice:
                click.echo(f"{'':<15} {printable(finding.advice)}")
    return FAILED if failed else 0


#: Characters of a job's id in the table of workers.
_ID_CHARACTERS = 10
_HEADER = (
    "HOST",
    "PID",
    "GPU",
    "MODEL",
    "STATE",
    "SINCE",
    "HEARTBEAT",
    "SHARD",
    "ITEMS",
    "RTFX",
    "VERSION",
    "REASON",
)
worker, flower, sweep = (
    worker_command("worker", "run"),
    worker_command("flower", "flower"),
    worker_command("sweep", "sweep"),
)


@click.command()
@flag(
    "--all", "Also list workers that ended, and workers that were lost more than a day ago.", "include_ended"
)
@common_options
def workers(include_ended: bool, home: str | None, output: Output) -> None:
    """List the workers: host, state and shards of each, with the items and the speed of its last 10 minutes.

    A worker is `up`, `draining` (takes no more shards), `quarantined` (keeps failing) or `lost` (no heartbeat
    for a minute).

    \b
    Examples:
      nightjar workers
      nightjar workers --all --json
    """
    settings = settings_for_new_job(home)
    try:
        found = read_ledger(settings, partial(worker_statuses, include_ended=include_ended))
    except NotFoundError as error:
        output.note(f"No workers: {error}")
        return
    nothing = "No workers. Start one with `nightjar worker`."
    output.records(_HEADER, ((worker_view(worker), _row(worker)) for worker in found), nothing)
    if found and not output.as_json:
        output.note(f"ITEMS and RTFX: last {RECENT_SECONDS / 60:.0f} minutes.")


def _row(worker: WorkerStatus) -> Sequence[object]:
    recent = worker.recent
    doing = ""
    if held := worker.held:
        first = held[0]
        more = f" +{len(held) - 1}" if len(held) > 1 else ""
        doing = f"{first.job[:_ID_CHARACTERS]}/{first.shard} {first.ended_items}/{first.items}{more}"
    failed = f" ({recent.items_failed} failed)" if recent.items_failed else ""
    return (
        *(worker.host, worker.pid, worker.gpu, worker.model or "any", worker.state, utc(worker.started_at)),
        *(f"{seconds_text(worker.silent_seconds)} ago", doing, f"{recent.items_done}{failed}"),
        *("" if recent.rtfx is None else f"{recent.rtfx:.1f}", worker.version, worker.state_reason),
    )


#: Shells have a builtin `jobs`, which takes precedence over the installed program `jobs`. This function
#: passes Nightjar's commands to `nightjar`, and all else to the builtin.
_BASH = """
function jobs {
    case "${1-}" in
        (%(words)s) nightjar "$@" ;;
        (*) builtin jobs "$@" ;;
    esac
}
_nightjar_jobs_completion() {
    _nightjar_completion nightjar
}
complete -o nosort -F _nightjar_jobs_completion jobs
"""
_ZSH_FIRST = """
whence compdef >/dev/null || { autoload -Uz compinit && compinit -i -D }
"""
_ZSH = """
function jobs {
    case "${1-}" in
        (%(words)s) nightjar "$@" ;;
        (*) builtin jobs "$@" ;;
    esac
}
compdef _nightjar_completion jobs
"""
_FISH = """
function jobs --description "nightjar, or the jobs of this shell"
    switch "$argv[1]"
        case %(fish_words)s
            nightjar $argv
        case '*'
            builtin jobs $argv
    end
end
complete --no-files --command jobs --arguments "(_nightjar_completion)"
"""
_LAST = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@click.command()
@click.argument("shell", type=click.Choice(list(_LAST)))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    The script completes `nightjar`. It also defines a function `jobs`, which calls nightjar if its first
    argument is a nightjar command, such as `status`. `jobs` alone, `jobs -l` and `jobs %1` still call the
    shell's builtin.

    \b
    Examples:
      eval "$(nightjar completion bash)"
    """
    from jobs.cli import COMMANDS, cli

    kind = cast("type[ShellComplete]", get_completion_class(shell))
    words = [*COMMANDS, "--help", "--version"]
    ours = {"words": "|".join(words), "fish_words": " ".join(words)}
    source = kind(cli, {}, "nightjar", "_NIGHTJAR_COMPLETE").source()
    click.echo(f"{_ZSH_FIRST if shell == 'zsh' else ''}{source}{_LAST[shell] % ours}")

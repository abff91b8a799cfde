"""Options that commands share, with their shell completion, the search for a job's ledger by its id, and commands
that run a program of the worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from jobs.console import LOCAL_PATH, PROGRAM, F, FiniteRange, Output, flag, home_option, json_option, option
from jobs.formatting import printable
from jobs.ledger.status import newest_jobs
from jobs.ledger.transaction import Transaction, read_with_driver
from jobs.recent_jobs import JobChoice, chosen_jobs, reading_ledger, settings_of_places
from jobs.settings import Settings, load_settings
from pipelines.errors import ErrorCode, NightjarError, nearest

if TYPE_CHECKING:
    from jobs.job_options import Flag

T = TypeVar("T")

#: Headings for the other options in the help of a command with job options.
_HEADINGS = {"home": "Input and output", "gpus": "Job", "assignments": "Job", "dry_run": "Job"}


class LateHelp(click.Option):
    """An option whose help text is made only when it is shown."""

    def __init__(self, *args: Any, about: Callable[[], str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.about = about

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        self.help = self.about()
        return super().get_help_record(ctx)


class EnumChoice(click.Choice[Any]):
    """The members of an enumeration, given by their values."""

    def normalize_choice(self, choice: Any, ctx: click.Context | None) -> str:
        return str(choice)


class JobCommand(click.Command):
    """A command with job options, which its help shows under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from jobs.job_options import GROUPS, KEYS, MESSAGES, flags, settable

        headings = {name: flag.heading for name, flag in flags().items()} | _HEADINGS
        records = {heading: [] for heading in GROUPS}
        records[KEYS] = list(settable().items())
        for parameter in self.get_params(ctx):
            # Arguments are explained in the text above the options.
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                records[headings.get(parameter.name or "", MESSAGES)].append(record)
        for heading, options in records.items():
            with formatter.section(heading):
                formatter.write_dl(options)


quiet_option = flag("--quiet", "Print no progress and no notes to stderr.", "-q")
price_option = option(
    "--price",
    "PRICE",
    "Price per GPU hour, for the cost. [default: the setting price_per_gpu_hour]",
    type=FiniteRange(min=0),
)


def parsed_by(module: str, function: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that parses the text of an option with a function, whose module is imported late."""
    return lambda ctx, param, text: None if text is None else getattr(import_module(module), function)(text)


where_option = option(
    "--where",
    "EXPRESSION",
    "Only items that match this filter of scores, seconds, draw and attempts, for example 'wer < 0.1 and distillmos > 3.5'.",
    callback=parsed_by("jobs.where", "parse_where"),
)


def code_option(text: str) -> Callable[[F], F]:
    """Adds `--code`, which can be given more than once, as `codes`; None: not given."""
    return option(
        "--code",
        "CODE",
        text,
        name="codes",
        multiple=True,
        type=EnumChoice(ErrorCode),
        callback=lambda ctx, param, codes: codes or None,
    )


def output_options(function: F) -> F:
    """Adds `--json` and `--quiet`, which the command gets as one `output`."""

    @wraps(function)
    def call(*args: Any, as_json: bool, quiet: bool, **given: Any) -> Any:
        return function(*args, output=Output(as_json=as_json, quiet=quiet), **given)

    return json_option(quiet_option(call))  # pyright: ignore[reportReturnType]


def common_options(function: F) -> F:
    """Adds `--out/--home`, which the command gets as `home`, and the options of `output_options`."""
    return home_option(output_options(function))


def pairs(given: Sequence[str], shape: str) -> dict[str, str]:
    """Parses the values of an option KEY=VALUE that can be given more than once. Raises `UsageError`."""
    found: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not key or not equals or not (value or shape == "KEY=VALUE"):
            raise click.UsageError(f"{pair!r} is not {shape}.")
        if key in found:
            raise click.UsageError(f"{shape.partition('=')[0].capitalize()} {key!r} is given twice.")
        found[key] = value
    return found


def job_options(function: F) -> F:
    """Adds the job options and `--dry-run`; the command gets the job's spec as `spec` and its `SubmitOptions`
    as `options`."""
    from jobs.job_options import flags, job_of, user_name

    @wraps(function)
    def call(*args: Any, assignments: Sequence[str], **given: Any) -> Any:
        asked = {name: given.pop(name) for name in flags()}
        options = _read(
            {name: value for name, value in asked.items() if value not in (None, ())}, assignments
        )
        spec, submitted = job_of(options, user_name())
        return function(*args, spec=spec, options=submitted, **given)

    set_help = "Set one of the keys below. Can be given more than once."
    dry_help = "Check the file and estimate time, size and cost. Writes nothing."
    added = [
        *(_option(name, flag) for name, flag in flags().items()),
        option("--set", "KEY=VALUE", set_help, name="assignments", multiple=True),
        flag("--dry-run", dry_help),
    ]
    for add in reversed(added):
        call = add(call)
    return call  # pyright: ignore[reportReturnType]


def _option(name: str, flag: Flag) -> Callable[[Any], Any]:
    """Makes the option for a row of the table of `jobs.job_options`. Its value is parsed by `_read`."""
    from jobs.job_options import help_of

    kind = LOCAL_PATH if flag.metavar == "FILE" else None
    return click.option(
        flag.flag,
        name,
        cls=LateHelp,
        about=lambda: help_of(name),
        metavar=flag.metavar,
        is_flag=flag.kind is bool,
        default=None,
        multiple=get_origin(flag.kind) in (Mapping, Sequence),
        type=click.Choice(get_args(flag.kind)) if get_origin(flag.kind) is Literal else kind,
        shell_complete=models if name == "model" else None,
    )


def _read(given: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Converts the given options, including those of `--set`, to the types in the table of job options.
    Raises `UsageError`."""
    from jobs.job_options import GENERATION, OptionError, checked_generation, flags, read_options, settable
    from pipelines.validation import check_generation

    asked = {
        name: pairs(value, str(flags()[name].metavar)) if get_origin(flags()[name].kind) is Mapping else value
        for name, value in given.items()
    }
    generation: dict[str, str] = {}
    for key, value in pairs(assignments, "KEY=VALUE").items():
        if key not in settable():
            raise click.UsageError(
                f"--set has no key {key!r}. {nearest(key, settable())}The keys are: {', '.join(settable())}."
            )
        (generation if key in GENERATION else asked)[key] = value
    try:
        check_generation(checked_generation(generation))
        return read_options(asked | ({"generation": generation} if generation else {}))
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    except NightjarError as error:
        raise click.UsageError(f"--set: {error.message}") from None


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes files and folders by the shell's rules."""
    return [CompletionItem(incomplete, type="file")]


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the names of models; if none matches, checkpoint folders."""
    from pipelines.registry import model_names

    found = [CompletionItem(name) for name in model_names() if name.startswith(incomplete)]
    return found or files(ctx, param, incomplete)


class JobId(click.ParamType):
    """A job's id, or a unique prefix of it."""

    name = "job"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():
            self.fail("the job id is empty", param, ctx)
        return value.strip()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Completes the ids of the newest jobs; none without a ledger, because a shell cannot show an error."""
        found: dict[str, str] = {}
        with suppress(NightjarError):
            for settings in settings_of_places("", ctx.params.get("home")):
                with suppress(NightjarError):
                    for job in read_ledger(settings, lambda reader: newest_jobs(reader, 200)):
                        found[job.id] = f"{job.state.value} {printable(job.name)}"
        return [CompletionItem(job, help=text) for job, text in found.items() if job.startswith(incomplete)]


_CHOICES = (
    ("name", "NAME", "All jobs with this name, or a pattern such as 'books-*', instead of JOB."),
    ("schedule", "NAME", "All nights of this schedule, instead of JOB."),
    ("since", "DATE", "Only jobs of this night or submitted on this day (UTC), or later; YYYY-MM-DD."),
    ("until", "DATE", "Only jobs of this night or submitted on this day (UTC), or earlier."),
)
job_argument = click.argument("job", metavar="JOB", type=JobId())


def read_ledger(settings: Settings, work: Callable[[Transaction], T]) -> T:
    """Returns the result of `work`: read without SQLAlchemy if possible, else with `Ledger`, which raises
    errors."""
    if (found := read_with_driver(settings.ledger_url, work)) is not None:
        return found
    with reading_ledger(settings) as ledger:
        return ledger.read(work)


def of_jobs(function: F) -> F:
    """Adds JOB..., the options that choose jobs without their ids, and the common options: the command gets
    the jobs as `found`. Raises `ledger.not_found`."""

    @wraps(function)
    def call(jobs: Sequence[str], home: str | None, **given: Any) -> Any:
        choice = JobChoice(*(given.pop(f"of_{name}") for name in JobChoice._fields))
        if not jobs and not any(choice):
            raise click.UsageError("Missing argument 'JOB...'.")
        if jobs and any(choice):
            raise click.UsageError("Give either jobs, or --name, --schedule, --since and --until.")
        with chosen_jobs(jobs, home, choice) as found:
            return function(found, **given)

    for name, metavar, text in reversed(_CHOICES):
        call = option(f"--{name}", metavar, text, name=f"of_{name}")(call)
    job_ids = click.argument("jobs", metavar="[JOB]...", nargs=-1, type=JobId())
    return job_ids(common_options(call))  # pyright: ignore[reportReturnType]


def of_job(function: F) -> F:
    """Adds JOB and the common options: the command gets the job as `found`. Raises `ledger.not_found`."""

    @wraps(function)
    def call(job: str, home: str | None, **given: Any) -> Any:
        with chosen_jobs([job], home) as (found,):
            return function(found, **given)

    return job_argument(common_options(call))  # pyright: ignore[reportReturnType]


_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def worker_command(name: str, command: str) -> click.Command:
    """Makes the command `nightjar NAME`, which runs `python -m worker COMMAND`."""

    @click.command(name, context_settings=_PASS_ON, add_help_option=False)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def become(arguments: Sequence[str]) -> None:
        if not {"-h", "--help"} & set(arguments):
            load_settings()
        sys.stdout.flush()
        # -P: the working directory must not shadow our modules.
        program = [sys.executable, "-P", "-m", "worker", command, *arguments]
        os.execve(sys.executable, program, os.environ | {PROGRAM: f"nightjar {name}"})  # noqa: S606

    return become

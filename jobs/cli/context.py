"""What commands share: help with headings, the common options, and the way from a job's id to its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from jobs.console import FiniteRange, NamedPath, Output
from jobs.formatting import printable
from jobs.ledger.status import Reader, newest_jobs, read_with_driver
from jobs.recent_jobs import keep_remembered, places_of, settings_for_job
from jobs.settings import Settings, sqlite_path
from pipelines.errors import ErrorCode, NightjarError, NotFoundError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.records import Job

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

#: Headings of the options of a help page, in their order.
INPUT, MODEL, CHECKS, SAMPLING, TEXT_AND_AUDIO, JOB, MESSAGES = (
    "Input and output",
    "Model and voice",
    "Checks",
    "Sampling",
    "Models that write text and audio",
    "Job",
    "Messages",
)
_HEADINGS = ("Options", INPUT, MODEL, CHECKS, SAMPLING, TEXT_AND_AUDIO, JOB, MESSAGES)


class Option(click.Option):
    """An option that knows under which heading it stands."""

    def __init__(self, *args: Any, heading: str = "Options", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command with many options: its help shows them under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _HEADINGS}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                records[getattr(parameter, "heading", MESSAGES)].append(record)
        for heading in _HEADINGS:
            if records[heading]:
                with formatter.section(heading):
                    formatter.write_dl(records[heading])


option = partial(click.option, cls=Option)
json_option = option("--json", "as_json", is_flag=True, heading=MESSAGES, help="Print JSON, one object per line.")
quiet_option = option("-q", "--quiet", is_flag=True, heading=MESSAGES, help="Print no progress and no notes to stderr.")
home_option = option(
    *("--out", "--home", "home"),
    metavar="DIR",
    type=NamedPath(anywhere=True),
    heading=INPUT,
    help="Folder of the job's ledger and audio. [default: out]",
)


def output_options(function: F) -> F:
    """`--json` and `--quiet`, handed over as one `output`."""

    @wraps(function)
    def call(*args: Any, as_json: bool, quiet: bool, **given: Any) -> Any:
        return function(*args, output=Output(as_json=as_json, quiet=quiet), **given)

    return json_option(quiet_option(call))  # pyright: ignore[reportReturnType]


def common_options(function: F) -> F:
    """`--out/--home` as `home`, and `--json` and `--quiet` as one `output`."""
    return home_option(output_options(function))


price_option = option(
    "--price",
    type=FiniteRange(min=0),
    metavar="PRICE",
    help="Price per GPU hour, for the cost. [default: the setting price_per_gpu_hour]",
)


def label_option(text: str) -> Callable[[F], F]:
    """`--label` as `labels`, for `labels_of`."""
    return option("--label", "labels", multiple=True, metavar="KEY=VALUE", heading=JOB, help=text)


def labels_of(given: Sequence[str]) -> dict[str, str]:
    """The labels of `--label KEY=VALUE`. Raises `UsageError`."""
    labels: dict[str, str] = {}
    for label in given:
        key, equals, value = label.partition("=")
        if not key or not equals:
            raise click.UsageError(f"The label {label!r} is not KEY=VALUE.")
        labels[key] = value
    return labels


def where_option(text: str) -> Callable[[F], F]:
    """`--where` as `where`, the text of a filter."""
    return option("--where", metavar="EXPRESSION", help=text)


class JobId(click.ParamType):
    """A job's id or a prefix that no other job has."""

    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if not text:
            self.fail("the job id is empty", param, ctx)
        return text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Ids of the newest jobs; none where there is no ledger, since a shell has no place for an error."""
        found: list[Job] = []
        with suppress(NightjarError):
            for settings in places_of("", ctx.params.get("home")):
                with suppress(NightjarError):
                    found += read_ledger(settings, lambda reader: newest_jobs(reader, 200))
        jobs = {job.id: f"{job.state.value} {printable(job.name)}" for job in found if job.id.startswith(incomplete)}
        return [CompletionItem(job_id, help=text) for job_id, text in jobs.items()]


job_argument = click.argument("job", type=JobId(), metavar="JOB")


@contextmanager
def reading_ledger(settings: Settings) -> Iterator[Ledger]:
    """The ledger, as it is: nothing is created. Raises `ledger.not_found` where there is none and `ledger.schema`."""
    path = sqlite_path(settings.ledger_url)
    if path is not None and not path.exists():
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"There is no ledger at {path}.",
            "Name the folder of the job with --out, or set SPEECH_DATABASE_URL.",
        )
    from jobs.ledger import Ledger

    with closing(Ledger.of(settings)) as ledger:
        ledger.check_schema()
        yield ledger


def read_ledger(settings: Settings, work: Callable[[Reader], T]) -> T:
    """What `work` reads: without SQLAlchemy where that is plain, else from the ledger, which says what is wrong."""
    if (found := read_with_driver(settings.ledger_url, work)) is not None:
        return found
    with reading_ledger(settings) as ledger:
        return ledger.read(work)


@contextmanager
def found_job(prefix: str, home: str | None) -> Iterator[tuple[Settings, Ledger, Job]]:
    """The job of an id or prefix, with its ledger and the settings it was found under. Raises `ledger.not_found`."""
    settings = settings_for_job(prefix, home)
    with reading_ledger(settings) as ledger:
        job = ledger.find_job(prefix)
        keep_remembered(job.id, settings)
        yield settings, ledger, job

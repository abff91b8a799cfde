"""What commands share: their common options, and the way from a job's id to its ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from jobs.recent_jobs import keep_remembered, settings_for_job
from jobs.settings import Settings, load_settings, sqlite_path
from pipelines.errors import ErrorCode, NightjarError, NotFoundError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.records import Job


class FiniteRange(click.FloatRange):
    """A range of numbers without infinity and NaN, which click takes for one that is in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number that can be used.", param, ctx)
        return number


class NamedPath(click.Path):
    """A path that is not empty: an empty one, as of a variable that is not set, would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.strip():
            self.fail("a path is not empty", param, ctx)
        return super().convert(value, param, ctx)


PRIORITY = click.IntRange(-100, 100)

F = TypeVar("F", bound=Callable[..., Any])


def common_options(function: F) -> F:
    """`--out/--home`, `--json` and `--quiet`, handed over as `home`, `as_json` and `quiet`."""
    function = click.option("-q", "--quiet", is_flag=True, help="No progress and no notes on stderr.")(function)
    function = click.option("--json", "as_json", is_flag=True, help="Print versioned JSON, one object a line.")(function)
    return home_option(function)


def home_option(function: F) -> F:
    """`--out/--home` as `home`."""
    option = click.option(
        "--out", "--home", "home", metavar="DIR", type=NamedPath(), help="Folder of the embedded ledger and store. [default: out]"
    )
    return option(function)


def price_option(function: F) -> F:
    """`--price` as `price`; None: the setting's."""
    text = "Price of a GPU hour. [default: the setting price_per_gpu_hour]"
    return click.option("--price", type=FiniteRange(min=0), metavar="PRICE", help=text)(function)


def label_option(text: str) -> Callable[[F], F]:
    """`--label` as `labels`, for `labels_of`."""
    return click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help=text)


def labels_of(given: Sequence[str]) -> dict[str, str]:
    """The labels of `--label KEY=VALUE`. Raises `UsageError`."""
    labels: dict[str, str] = {}
    for label in given:
        key, equals, value = label.partition("=")
        if not key or not equals:
            raise click.UsageError(f"The label {label!r} is not KEY=VALUE.")
        labels[key] = value
    return labels


class JobId(click.ParamType):
    """A job's id or a prefix that no other job has."""

    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if not text:
            self.fail("a job's id is not empty", param, ctx)
        return text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Ids of the newest jobs; none where there is no ledger, since a shell has no place for an error."""
        try:
            with reading_ledger(load_settings(home=ctx.params.get("home"))) as ledger:
                jobs = ledger.jobs(limit=200)
        except NightjarError:
            return []
        return [CompletionItem(job.id, help=f"{job.state.value} {job.name}") for job in jobs if job.id.startswith(incomplete)]


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


@contextmanager
def found_job(prefix: str, home: str | None) -> Iterator[tuple[Settings, Ledger, Job]]:
    """The job of an id or prefix, with its ledger and the settings it was found under. Raises `ledger.not_found`."""
    settings = settings_for_job(prefix, home)
    with reading_ledger(settings) as ledger:
        job = ledger.find_job(prefix)
        keep_remembered(job.id, settings)
        yield settings, ledger, job

"""`nightjar db` and `nightjar config`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click
from pydantic import BaseModel, SecretStr

from jobs.cli.context import common_options, home_option
from jobs.cli.output import FAILED, Output, printable
from jobs.doctor import Health, examine
from jobs.redact import MASK, redact
from jobs.settings import PREFIX, Settings, load_settings

_json_option = click.option("--json", "as_json", is_flag=True, help="Print versioned JSON, one object a line.")


@click.group()
def db() -> None:
    """Set up the ledger's schema."""


@db.command()
@home_option
@_json_option
def upgrade(home: str | None, as_json: bool) -> None:
    """Make the ledger's tables, or bring them to this version."""
    from jobs.ledger import Ledger
    from jobs.ledger.records import SCHEMA_REVISION

    settings = load_settings(home=home)
    with closing(Ledger.of(settings)) as ledger:
        ledger.migrate()
        if as_json:
            Output(as_json=True).data(_ledger_view(ledger.url, SCHEMA_REVISION))
        else:
            click.echo(f"The ledger {redact(ledger.url)} has the tables of this version.")


@db.command()
@home_option
@_json_option
def current(home: str | None, as_json: bool) -> None:
    """Check that the ledger's tables are of this version."""
    from jobs.ledger import Ledger
    from jobs.ledger.records import SCHEMA_REVISION

    settings = load_settings(home=home)
    with closing(Ledger.of(settings)) as ledger:
        ledger.check_schema()
        if as_json:
            Output(as_json=True).data(_ledger_view(ledger.url, SCHEMA_REVISION))
        else:
            click.echo(f"{SCHEMA_REVISION}  {redact(ledger.url)}")


def _ledger_view(url: str, revision: str) -> dict[str, str]:
    return {"schema": "nightjar.ledger/1", "url": redact(url), "revision": revision}


@click.group()
def config() -> None:
    """Show the settings and where they come from."""


@config.command()
@home_option
@_json_option
def show(home: str | None, as_json: bool) -> None:
    """Show every setting with its value and origin; secrets are hidden."""
    settings = load_settings(home=home)
    output = Output(as_json=as_json)
    rows = [(key, shown(value), settings.origin(key)) for key, value in leaves(settings)]
    effective = (
        ("ledger", redact(settings.ledger_url)),
        ("broker", redact(settings.effective_broker_url)),
        ("store", redact(settings.effective_store_url)),
    )
    if as_json:
        values = {key: {"value": value, "origin": origin} for key, value, origin in rows}
        output.data({"schema": "nightjar.config/1", "settings": values, "effective": dict(effective)})
        return
    output.table(("SETTING", "VALUE", "ORIGIN"), [(key, "" if value is None else value, origin) for key, value, origin in rows])
    output.line()
    output.table(("IN EFFECT", "ADDRESS"), effective)


@config.command("list")
@click.option("--markdown", is_flag=True, help="Print the rows of docs/configuration.md.")
@_json_option
def list_settings(markdown: bool, as_json: bool) -> None:
    """List every setting: its variable, default and meaning. Needs no valid configuration."""
    output = Output(as_json=as_json)
    rows = list(described(Settings))
    if markdown:
        for row in markdown_rows():
            output.line(row)
        return
    if as_json:
        for variable, default, text in rows:
            output.data({"schema": "nightjar.setting/1", "variable": variable, "default": default, "description": text})
        return
    output.table(("VARIABLE", "DEFAULT", "MEANING"), rows)


def leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting, nested ones too."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value:
            for key, entry in value.items():
                yield from leaves(entry, f"{prefix}{name}.{key}.")
        else:
            yield f"{prefix}{name}", value


def described(model: type[BaseModel], prefix: str = PREFIX) -> Iterator[tuple[str, str, str]]:
    """(variable, default, meaning) of every setting; `NAME` stands for the key of a schedule."""
    from jobs.settings import Schedule

    for name, field in model.model_fields.items():
        variable = f"{prefix}{name.upper()}"
        if isinstance(field.default, BaseModel):
            yield from described(type(field.default), f"{variable}__")
        elif name == "schedules":
            yield from described(Schedule, f"{variable}__NAME__")
        else:
            default = "required" if field.is_required() else "" if field.default in (None, ()) else str(field.default)
            yield variable, default, field.description or ""


def markdown_rows() -> list[str]:
    """The rows of the table in docs/configuration.md."""
    return [f"| `{variable}` | {f'`{default}`' if default else ''} | {text} |" for variable, default, text in described(Settings)]


def shown(value: Any) -> Any:
    """A setting as it may be seen: no secret, and no password of a URL."""
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        return redact(secret) if "://" in secret else MASK
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


_COLORS = {Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "red"}


@click.command()
@common_options
def doctor(home: str | None, as_json: bool, quiet: bool) -> int:
    """Check Python, settings, ledger, broker, store, disk and models; the exit code is 1 when something fails."""
    output = Output(as_json=as_json, quiet=quiet)
    worst = Health.OK
    for finding in examine(home):
        worst = Health.FAIL if Health.FAIL in (worst, finding.health) else finding.health if worst is Health.OK else worst
        if as_json:
            view = {"check": finding.check, "health": finding.health.value, "message": finding.message, "advice": finding.advice}
            output.data({"schema": "nightjar.finding/1", **view})
            continue
        if quiet and finding.health is Health.OK:
            continue
        label = click.style(f"{finding.health.value:<5}", fg=_COLORS[finding.health], bold=True)
        output.line(f"{label} {finding.check:<9} {printable(finding.message)}")
        if finding.advice:
            output.line(f"{'':<15} {printable(finding.advice)}")
    return FAILED if worst is Health.FAIL else 0

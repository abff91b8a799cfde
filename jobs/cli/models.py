"""`nightjar models`: which models there are and what they can do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import msgspec

from jobs.cli.convert import convert
from jobs.cli.output import Output, counted
from pipelines.registry import ModelCard, describe, list_models


class _ShowOrCommand(click.Group):
    """Shows models, unless the first word names a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, "--help"}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowOrCommand)
def models() -> None:
    """List the models by name, or show MODEL (a name or a checkpoint folder): nightjar models [MODEL] [--json]."""


models.add_command(convert)


@models.command()
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print versioned JSON, one object a line.")
def show(model: str | None, as_json: bool) -> None:
    """List the models by name, or show MODEL (a name or a checkpoint folder). Nothing is loaded."""
    output = Output(as_json=as_json)
    cards = [describe(model)] if model else list_models()
    if as_json:
        for card in cards:
            output.data(model_view(card))
        return
    if model:
        for key, value in model_view(cards[0]).items():
            if key == "capabilities":
                output.line("\n".join(f"{name}: {_words(can)}" for name, can in value.items()))
            elif key != "schema":
                output.line(f"{key}: {value}")
        return
    rows = [(card.name, card.engine, card.sample_rate, ", ".join(_abilities(card))) for card in cards]
    output.table(("MODEL", "ENGINE", "HZ", "CAN"), rows)


def model_view(card: ModelCard) -> dict[str, Any]:
    """`nightjar.model/1`."""
    facts = {field.name: getattr(card, field.name) for field in fields(card) if not field.name.startswith("check_")}
    return {"schema": "nightjar.model/1", **msgspec.to_builtins(facts)}


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _abilities(card: ModelCard) -> list[str]:
    can = card.capabilities
    named = {
        "cloning": can.cloning,
        "instruct": can.instruct,
        "streaming": can.streaming,
        "guidance": can.guidance,
        "multi_turn": can.multi_turn,
        "text_out": can.text_out,
        "audio_in": can.audio_in,
    }
    words = [name for name, able in named.items() if able]
    choices = (("voice", can.voices), ("language", can.languages))
    return [*words, *(counted(len(names), noun) for noun, names in choices if names)]

"""`nightjar models`: which models there are and what they can do."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from jobs.cli import completion
from jobs.cli.context import json_option
from jobs.console import NamedPath, Output
from jobs.formatting import counted
from pipelines.errors import ErrorCode, ModelError
from pipelines.registry import ModelCard, describe, list_models


@click.command(name="convert")
@click.argument("source", type=NamedPath(path_type=Path))
@click.option(
    "--like",
    required=True,
    type=NamedPath(path_type=Path),
    metavar="DIR",
    help="Folder to copy config.json, tokenizer and chat template from.",
)
@click.option("--out", required=True, type=NamedPath(path_type=Path), metavar="DIR", help="New folder.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32", "same"]), default="bfloat16", show_default=True, help="Data type of the weights."
)
def convert(source: Path, like: Path, out: Path, dtype: str) -> None:
    """Convert the SpeechLM training checkpoint SOURCE (.pt) to a folder of safetensors.

    Only tensors are read from SOURCE; no code in it is run.

    \b
    Examples:
      nightjar models convert base.pt --like folder-with-config-and-tokenizer --out speechlm-base
    """
    try:
        import torch

        from pipelines.speechlm.weights import convert as write
    except ModuleNotFoundError as error:
        message = f"Converting a checkpoint needs the library {error.name}."
        raise ModelError(ErrorCode.MODEL_MISSING_EXTRA, message, "Install Nightjar with its extra `gpu` (docs/install.md).") from error

    count = write(source, like, out, None if dtype == "same" else getattr(torch, dtype))
    Output(as_json=False).line(f"{count} tensors written to {out}.")


class _ShowOrCommand(click.Group):
    """Shows models, unless the first word names a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, "-h", "--help"}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowOrCommand, subcommand_metavar="[MODEL] [--json] | convert SOURCE")
def models() -> None:
    """List the models, or show MODEL (a name or a checkpoint folder) with its voices, languages and abilities.

    Nothing is loaded.

    \b
    Examples:
      nightjar models
      nightjar models hibari
    """


models.add_command(convert)


@models.command()
@click.argument("model", required=False, shell_complete=completion.models)
@json_option
def show(model: str | None, as_json: bool) -> None:
    """List the models, or show MODEL. Nothing is loaded.

    \b
    Examples:
      nightjar models hibari
    """
    output = Output(as_json=as_json)
    cards = [_on_its_engine(describe(model))] if model else list_models()
    if as_json:
        for card in cards:
            output.data(model_view(card))
        return
    if model:
        for key, value in model_view(cards[0]).items():
            if key == "capabilities":
                output.line("\n".join(f"{name}: {_words(can)}" for name, can in value.items()))
            elif key not in ("schema", "realtime_factor"):
                output.line(f"{key}: {_words(value)}")
        return
    rows = [(card.name, card.engine, card.sample_rate, ", ".join(_abilities(card))) for card in cards]
    output.table(("MODEL", "ENGINE", "HZ", "CAN"), rows)


def _on_its_engine(card: ModelCard) -> ModelCard:
    """The card with the engine that the settings choose here. Raises `ConfigError` for settings that cannot be used."""
    if not card.engines:
        return card
    from jobs.settings import load_settings

    return replace(card, engine=load_settings().chosen_engine(card))


def model_view(card: ModelCard) -> dict[str, Any]:
    """`nightjar.model/1`."""
    facts = {field.name: getattr(card, field.name) for field in fields(card) if not field.name.startswith("check_")}
    # The name of `rtf` before RTF and RTFx were told apart.
    return {"schema": "nightjar.model/1", **msgspec.to_builtins(facts), "realtime_factor": card.rtf}


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

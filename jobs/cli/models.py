"""`nightjar models` and `nightjar voices`."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from jobs.cli import options
from jobs.cli.options import common_options, json_option
from jobs.console import NamedPath, Output
from jobs.formatting import bytes_text, counted, printable
from jobs.settings import load_settings
from jobs.voices import voice_folder
from pipelines.errors import ErrorCode, InputError, ModelError, NotFoundError
from pipelines.registry import ModelCard, describe, list_models
from pipelines.stored_voices import StoredVoice, VoiceExistsError


@click.command(name="convert")
@click.argument("source", type=NamedPath(path_type=Path))
@click.option(
    "--like",
    required=True,
    type=NamedPath(path_type=Path),
    metavar="DIR",
    help="Folder to copy config.json, tokenizer and chat template from.",
)
@click.option("--out", required=True, type=NamedPath(path_type=Path), metavar="DIR", help="Folder to create.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32", "same"]),
    default="bfloat16",
    show_default=True,
    help="Data type of the weights; `same` keeps that of SOURCE.",
)
def convert(source: Path, like: Path, out: Path, dtype: str) -> None:
    """Convert a SpeechLM training checkpoint to safetensors.

    SOURCE is a .pt file. Only tensors are read from it; its code is not run.

    \b
    Examples:
      nightjar models convert base.pt --like folder-with-config-and-tokenizer --out speechlm-base
    """
    try:
        import torch

        from pipelines.speechlm.weights import convert as write
    except ModuleNotFoundError as error:
        message = f"Converting a checkpoint needs the library {error.name}."
        raise ModelError(
            ErrorCode.MODEL_MISSING_EXTRA, message, "Install Nightjar with its extra `gpu` (docs/install.md)."
        ) from error

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
    """List the models, or show MODEL (a name or a checkpoint folder) with its voices, languages and
    abilities.

    No model is loaded.

    \b
    Examples:
      nightjar models
      nightjar models hibari
    """


models.add_command(convert)


@models.command()
@click.argument("model", required=False, shell_complete=options.models)
@json_option
def show(model: str | None, as_json: bool) -> None:
    """List the models, or show MODEL. No model is loaded.

    \b
    Examples:
      nightjar models hibari
    """
    output = Output(as_json=as_json)
    if model:
        card = describe(model)
        if card.engines:
            card = replace(card, engine=load_settings().chosen_engine(card))
        output.record(model_view(card))
        return
    rows = (
        (model_view(card), (card.name, card.engine, card.sample_rate, ", ".join(_abilities(card))))
        for card in list_models()
    )
    output.records(("MODEL", "ENGINE", "HZ", "CAN"), rows)


def model_view(card: ModelCard) -> dict[str, Any]:
    """The JSON object `nightjar.model/1`."""
    # The functions of a card are no part of what it compares.
    facts = {field.name: getattr(card, field.name) for field in fields(card) if field.compare}
    # `realtime_factor` is the old name of `rtf`.
    return {"schema": "nightjar.model/1", **msgspec.to_builtins(facts), "realtime_factor": card.rtf}


def _abilities(card: ModelCard) -> list[str]:
    can = card.capabilities
    names = ("cloning", "instruct", "streaming", "guidance", "multi_turn", "text_out", "audio_in", "codes")
    abilities = [name for name in names if getattr(can, name)]
    choices = (("voice", can.voices), ("language", can.languages))
    return abilities + [counted(len(found), noun) for noun, found in choices if found]


@click.group()
def voices() -> None:
    """List, add and delete stored voices: named recordings with their texts.

    Jobs and the server use a stored voice by its name (`--voice NAME`, `generation.voice` of a line). Stored
    voices are in the folder that SPEECH_SERVE__VOICES_FOLDER names, or else in the folder `voices` of --out
    DIR.

    \b
    Examples:
      nightjar voices add anna anna.wav --text "The words of the recording."
      nightjar voices list
      nightjar run dialogues.jsonl --model qwen3-tts-0.6b-base --voice anna
    """


@voices.command(name="list")
@common_options
def list_voices(home: str | None, output: Output) -> None:
    """List the stored voices with their texts.

    \b
    Examples:
      nightjar voices list
    """
    folder = voice_folder(load_settings(home=home))
    found: list[StoredVoice] = []
    for name in folder.names():
        try:
            found += filter(None, [folder.get(name)])
        except InputError as error:
            output.note(str(error))
    rows = ((_view(voice), _row(voice)) for voice in found)
    output.records(("VOICE", "ADDED", "SIZE", "TEXT"), rows, f"No voice is stored in {folder.path}.")


def _row(voice: StoredVoice) -> tuple[str, ...]:
    added = datetime.fromtimestamp(voice.created_at, UTC).date().isoformat()
    return voice.name, added, bytes_text(len(voice.recording)), voice.text


@voices.command()
@click.argument("name")
@click.argument("recording", type=NamedPath(path_type=Path))
@click.option("--text", metavar="WORDS", default="", help="Text of the recording; some models need it.")
@click.option("--replace", is_flag=True, help="Replace the stored voice if NAME exists.")
@common_options
def add(name: str, recording: Path, text: str, replace: bool, home: str | None, output: Output) -> None:
    """Store RECORDING as the voice NAME.

    RECORDING is a WAV, FLAC, OGG or MP3 file of up to 60 s. Jobs that were already submitted keep the
    recording that NAME had then.

    \b
    Examples:
      nightjar voices add anna anna.wav --text "The words of the recording."
    """
    from jobs.references import read_audio_file

    folder = voice_folder(load_settings(home=home))
    try:
        voice = folder.add(name, read_audio_file(recording).data, text, replace=replace)
    except VoiceExistsError:
        message = f"The voice {name!r} already exists."
        raise InputError(
            ErrorCode.INPUT_BAD_GENERATION, message, "Give --replace, or another name."
        ) from None
    output.result(f"The voice {name} is stored in {folder.path}.", _view(voice))


@voices.command()
@click.argument("name")
@common_options
def delete(name: str, home: str | None, output: Output) -> None:
    """Delete the stored voice NAME. Jobs that were already submitted keep its recording.

    \b
    Examples:
      nightjar voices delete anna
    """
    folder = voice_folder(load_settings(home=home))
    if not folder.delete(name):
        message = f"There is no stored voice {printable(name[:80])!r} in {folder.path}."
        raise NotFoundError(ErrorCode.LEDGER_NOT_FOUND, message, "See `nightjar voices list`.")
    output.result(f"The voice {name} is deleted.", "nightjar.voice/1", voice=name, deleted=True)


def _view(voice: StoredVoice) -> dict[str, object]:
    """The JSON object `nightjar.voice/1`."""
    return {
        "schema": "nightjar.voice/1",
        "voice": voice.name,
        "text": voice.text,
        "bytes": len(voice.recording),
        "created_at": voice.created_at,
    }

"""The commands about models and servers: `nightjar models`, `voices` and `serve`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jobs.cli import options
from jobs.cli.options import common_options, output_options
from jobs.console import LOCAL_PATH, Output, flag, json_option, option
from jobs.formatting import bytes_text, counted, printable
from jobs.settings import Settings, load_settings
from jobs.voices import voice_folder
from pipelines.errors import ErrorCode, InputError, ModelError, NotFoundError, invalid, missing_library
from pipelines.registry import ModelCard, describe, list_models
from pipelines.stored_voices import StoredVoice, VoiceExistsError

if TYPE_CHECKING:
    from pipelines.serving import ServeOptions


@click.command(name="convert")
@click.argument("source", type=LOCAL_PATH)
@option(
    "--like",
    "DIR",
    "Folder to copy config.json, tokenizer and chat template from.",
    required=True,
    type=LOCAL_PATH,
)
@option("--out", "DIR", "Folder to create.", required=True, type=LOCAL_PATH)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32", "same"]),
    default="bfloat16",
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
        raise ModelError(
            ErrorCode.MODEL_MISSING_EXTRA,
            f"Converting a checkpoint needs the library {error.name}.",
            "Install Nightjar with its extra `gpu` (docs/install.md).",
        ) from error

    count = write(source, like, out, None if dtype == "same" else getattr(torch, dtype))
    click.echo(f"{count} tensors written to {out}.")


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
@click.argument("recording", type=LOCAL_PATH)
@option("--text", "WORDS", "Text of the recording; some models need it.", default="", show_default=False)
@flag("--replace", "Replace the stored voice if NAME exists.")
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
        raise InputError(
            ErrorCode.INPUT_BAD_GENERATION,
            f"The voice {name!r} already exists.",
            "Give --replace, or another name.",
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
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"There is no stored voice {printable(name[:80])!r} in {folder.path}.",
            "See `nightjar voices list`.",
        )
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


_KEYS_ADVICE = "Write one key per line, with visible ASCII characters only."


@click.command()
@option(
    "--model",
    "MODEL",
    "Name of a model, or path of a checkpoint folder. Can be given more than once. See `nightjar models`.",
    name="models",
    required=True,
    multiple=True,
    shell_complete=options.models,
)
@option(
    "--name",
    "NAME",
    "Name that clients use for the model. One model can have several; several models have one each. [default: the model's name]",
    name="names",
    multiple=True,
)
@option("--address", "ADDRESS", "Address to listen on. [default: 127.0.0.1]")
@option(
    "--port", "N", "Port to listen on; 0 takes a free port. [default: 8000]", type=click.IntRange(0, 65535)
)
@output_options
def serve(
    models: tuple[str, ...], names: tuple[str, ...], address: str | None, port: int | None, output: Output
) -> None:
    """Serve models over HTTP until SIGTERM. Requests that are running then still finish.

    The routes are those of OpenAI: /v1/audio/speech, and /v1/chat/completions for models that write text and
    audio. Clients need the key in SPEECH_SERVE__API_KEY, or a key from the file that
    SPEECH_SERVE__API_KEY_FILE names.

    \b
    Examples:
      nightjar serve --model hibari
      nightjar serve --model qwen3-tts-0.6b-base --port 8080
      nightjar serve --model qwen3-tts-0.6b-base --model qwen3-tts-1.7b-customvoice
    """
    from jobs.engine_process import ModelOpener, engine_options
    from jobs.logs import setup_logging

    given = {"address": address, "port": port}
    settings = load_settings(serve={key: value for key, value in given.items() if value is not None})
    cards = [describe(model) for model in models]
    check_extra()
    from pipelines.serving import is_loopback

    options = serve_options(settings, client_names(cards, names))
    if not options[0].keys and not is_loopback(settings.serve.address):
        raise invalid(
            f"The server does not open {settings.serve.address} to the network without a key.",
            "Set SPEECH_SERVE__API_KEY or SPEECH_SERVE__API_KEY_FILE, or listen on 127.0.0.1.",
        )
    from pipelines.interpreter import serve_threads
    from pipelines.serving.model import ServedModel
    from pipelines.serving.server import Server

    logged = settings.model_copy(update={"log_level": "warning"}) if output.quiet else settings
    setup_logging(logged.log_level, logged.log_format)
    openers = [
        ModelOpener(model, card, logged, engine_options(settings, card, len(models)))
        for model, card in zip(models, cards, strict=True)
    ]
    server = Server(
        [ServedModel(*one) for one in zip(cards, openers, options, strict=True)],
        settings.serve.address,
        settings.serve.port,
    )
    output.result(server.url, "nightjar.serve/1", url=server.url, model=options[0].names[0])
    sys.stdout.flush()
    output.note(
        f"Serving {', '.join(one.names[0] for one in options)}; the model is loading while {server.url}/health says `starting`."
    )
    serve_threads()
    server.run()
    if server.hangs:
        sys.stdout.flush()
        logging.shutdown()
        os._exit(0)


def client_names(cards: Sequence[ModelCard], names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The names of each model for clients. Raises `config.invalid` for a name that nobody can read, and if the names do
    not tell models apart."""
    # Clients must not see the path of a folder.
    given = names or tuple(Path(card.name).name for card in cards)
    if not all(name.strip() and name.isprintable() for name in given):
        raise invalid("A --name is empty or has invisible characters.", "Give a name that clients can send.")
    if len(cards) == 1:
        return [given]
    if not len(cards) == len(given) == len(set(given)):
        raise invalid(
            f"{len(cards)} models have the names {', '.join(given)}.",
            "Give each model one --name of its own.",
        )
    return [(name,) for name in given]


def serve_options(settings: Settings, named: Sequence[tuple[str, ...]]) -> list[ServeOptions]:
    """The options of each model of a server, by its names."""
    from pipelines.serving import ServeOptions

    limits = settings.serve.model_dump(
        exclude={"address", "port", "api_key", "api_key_file", "streams", "spare_process"}
    )
    limits["voices_folder"] = voice_folder(settings).path
    keys = read_keys(settings)
    return [ServeOptions(names, keys, **limits) for names in named]


def read_keys(settings: Settings) -> tuple[str, ...]:
    """Reads the API keys; the one in the settings is the first, then those of the key file. Raises
    `config.invalid` for a file without a key."""
    keys = [] if settings.serve.api_key is None else [settings.serve.api_key.get_secret_value().strip()]
    path = settings.serve.api_key_file
    if path is not None:
        try:
            found = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise invalid(f"The key file {path} cannot be read: {reason}.", _KEYS_ADVICE) from error
        if not found:
            raise invalid(f"The key file {path} has no key.", _KEYS_ADVICE)
        keys += found
    if not all(key.isascii() and key.isprintable() and key for key in keys):
        raise invalid("An API key is empty or has characters that a header cannot contain.", _KEYS_ADVICE)
    return tuple(keys)


def check_extra() -> None:
    """Raises `config.missing_library` if a library of the server is not installed."""
    for library in ("fastapi", "uvicorn", "websockets"):
        if find_spec(library) is None:
            raise missing_library("The server", library, "serve")

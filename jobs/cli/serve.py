"""The commands of server and workers: `nightjar serve`, `worker`, `workers`, `flower`, `nightly` and `sweep`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.cli.options import common_options, models, output_options, read_ledger
from jobs.console import PROGRAM, Output
from jobs.formatting import seconds_text
from jobs.ledger.status import RECENT_SECONDS, WorkerStatus, worker_statuses
from jobs.recent_jobs import settings_for_new_job
from jobs.settings import Settings, load_settings
from jobs.status import utc, worker_view
from pipelines.errors import NotFoundError, invalid, missing_library

if TYPE_CHECKING:
    from pipelines.registry import ModelCard
    from pipelines.serving import ServeOptions


_KEYS_ADVICE = "Write one key per line, with visible ASCII characters only."
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


@click.command()
@click.option(
    "--model",
    metavar="MODEL",
    required=True,
    shell_complete=models,
    help="Name of a model, or path of a checkpoint folder. See `nightjar models`.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Name that clients use for the model. Can be given more than once. [default: the model's name]",
)
@click.option("--address", metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes a free port. [default: 8000]",
)
@output_options
def serve(model: str, names: tuple[str, ...], address: str | None, port: int | None, output: Output) -> None:
    """Serve a model over HTTP until SIGTERM. Requests that are running then still finish.

    The routes are those of OpenAI: /v1/audio/speech, and /v1/chat/completions for models that write text and
    audio. Clients need the key in SPEECH_SERVE__API_KEY, or a key from the file that
    SPEECH_SERVE__API_KEY_FILE names.

    \b
    Examples:
      nightjar serve --model hibari
      nightjar serve --model qwen3-tts-0.6b-base --port 8080
    """
    from jobs.engine_process import engine_options, open_model
    from jobs.logs import setup_logging
    from pipelines.registry import describe

    given = {"address": address, "port": port}
    settings = load_settings(serve={key: value for key, value in given.items() if value is not None})
    card = describe(model)
    check_extra()
    from pipelines.serving import is_loopback

    options = serve_options(settings, card, names)
    if not options.keys and not is_loopback(settings.serve.address):
        raise invalid(
            f"The server does not open {settings.serve.address} to the network without a key.",
            "Set SPEECH_SERVE__API_KEY or SPEECH_SERVE__API_KEY_FILE, or listen on 127.0.0.1.",
        )
    from pipelines.interpreter import serve_threads
    from pipelines.serving.server import Server

    level = "warning" if output.quiet else settings.log_level
    setup_logging(level, settings.log_format)
    server = Server(
        card,
        lambda: open_model(model, card, settings, engine_options(settings, card), level),
        options,
        settings.serve.address,
        settings.serve.port,
    )
    output.result(server.url, "nightjar.serve/1", url=server.url, model=options.names[0])
    sys.stdout.flush()
    output.note(
        f"Serving {options.names[0]}; the model is loading while {server.url}/health says `starting`."
    )
    serve_threads()
    server.run()
    if server.hangs:
        sys.stdout.flush()
        logging.shutdown()
        os._exit(0)


def serve_options(settings: Settings, card: ModelCard, names: tuple[str, ...]) -> ServeOptions:
    from jobs.voices import voice_folder
    from pipelines.serving import ServeOptions

    # Clients must not see the path of a folder.
    names = names or (Path(card.name).name,)
    limits = settings.serve.model_dump(exclude={"address", "port", "api_key", "api_key_file", "streams"})
    return ServeOptions(
        names=names, keys=read_keys(settings), **{**limits, "voices_folder": voice_folder(settings).path}
    )


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


_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _command(name: str, command: str) -> click.Command:
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


worker, flower, nightly, sweep = (
    _command("worker", "run"),
    _command("flower", "flower"),
    _command("nightly", "nightly"),
    _command("sweep", "sweep"),
)


@click.command()
@click.option(
    "--all",
    "include_ended",
    is_flag=True,
    help="Also list workers that ended, and workers that were lost more than a day ago.",
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
    recent, doing = worker.recent, ""
    if held := worker.held:
        first, more = held[0], f" +{len(held) - 1}" if len(held) > 1 else ""
        doing = f"{first.job[:_ID_CHARACTERS]}/{first.shard} {first.ended_items}/{first.items}{more}"
    failed = f" ({recent.items_failed} failed)" if recent.items_failed else ""
    return (
        *(worker.host, worker.pid, worker.gpu, worker.model or "any", worker.state, utc(worker.started_at)),
        *(f"{seconds_text(worker.silent_seconds)} ago", doing, f"{recent.items_done}{failed}"),
        *("" if recent.rtfx is None else f"{recent.rtfx:.1f}", worker.version, worker.state_reason),
    )

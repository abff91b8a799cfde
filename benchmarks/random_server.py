"""`python -m benchmarks.random_server FOLDER`: a server of random weights, which end when they like: what
did not end counts as done."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from jobs.engine_process import engine_options, open_model
from jobs.settings import load_settings
from pipelines.interpreter import serve_threads
from pipelines.registry import describe
from pipelines.serving import ServeOptions
from pipelines.serving.server import Server


@click.command()
@click.argument("model")
@click.option("--port", default=8000, show_default=True)
@click.option("--slots", default=256, show_default=True, help="Requests in the engine at once.")
@click.option("--waiting-room", default=256, show_default=True, help="Requests behind them.")
@click.option(
    "--option",
    "given",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Option of the pipeline; may be given more than once.",
)
def main(model: str, port: int, slots: int, waiting_room: int, given: tuple[str, ...]) -> None:
    """Serves as `nightjar serve` does, until SIGTERM; prints its address first."""
    card, settings = describe(model), load_settings()
    options = engine_options(settings, card) | {
        name: int(value) for name, _, value in (one.partition("=") for one in given)
    }
    if card.engine != "cpu":
        options["keep_unfinished"] = True
    serve = ServeOptions((Path(card.name).name,), slots=slots, waiting_room=waiting_room)
    server = Server(card, lambda: open_model(model, card, settings, options), serve, "127.0.0.1", port)
    print(server.url)
    sys.stdout.flush()
    serve_threads()
    server.run()


if __name__ == "__main__":
    main()

"""`nightjar dev`: broker, ledger, store, worker and server of one machine for `nightjar submit`. They are those of `nightjar run`."""

from __future__ import annotations

import sys
import time
from contextlib import closing

import click

from jobs.cli.completion import models
from jobs.cli.context import common_options
from jobs.cli.run import Signals
from jobs.console import Interrupted, Output, undisturbed
from jobs.embedded import EmbeddedHome, embedded_settings
from jobs.recent_jobs import noted_dev
from jobs.settings import load_settings
from pipelines.errors import ConfigError, ErrorCode


@click.command()
@click.option("--serve", "serves", is_flag=True, help="Also serve --model over HTTP, as `nightjar serve` does.")
@click.option(
    "--model", metavar="MODEL", default="hibari", show_default=True, shell_complete=models, help="Model of the server. Jobs name their own."
)
@common_options
def dev(serves: bool, model: str, home: str | None, output: Output) -> int:
    """Run a small installation on this machine until Ctrl-C: broker, ledger, store and one worker, with --serve also the server.

    Meanwhile `nightjar submit`, `status`, `watch` and `export` work in any folder without settings. Ctrl-C ends everything; jobs that
    have not ended continue with the next `nightjar dev` in the same folder.

    \b
    Examples:
      nightjar dev
      nightjar dev --serve
    """
    settings = embedded_settings(load_settings(home=home))
    if settings.broker_url is not None:
        message = f"broker_url ({settings.origin('broker_url')}) names another broker, and `nightjar submit` would use that one."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Unset SPEECH_BROKER_URL for both.")
    with undisturbed():
        from jobs.cli.serve import check_extra
        from jobs.ledger import Ledger
        from jobs.local_run import POLL_SECONDS, forsake, requeue
        from pipelines.registry import describe

    if serves:
        describe(model)
        check_extra()
    with Signals().installed() as signals, EmbeddedHome(settings) as embedded, closing(Ledger.of(settings)) as ledger:
        signals.embedded = embedded
        try:
            ledger.migrate()
            for lost in embedded.lost_workers:
                ledger.lose_worker(*lost)
            requeue(ledger)
            embedded.start()
            url = f"http://{settings.serve.address}:{settings.serve.port}" if serves else None
            if serves:
                embedded.serve(model)
            with noted_dev(settings.home):
                _say(output, embedded, url)
                while True:
                    signals.check()
                    embedded.check_place()
                    embedded.tend(lambda: requeue(ledger), lambda host, pid: forsake(ledger, host, pid), output.note)
                    time.sleep(POLL_SECONDS)
        except Interrupted:
            seconds = settings.worker.drain_seconds
            output.note(f"Stopping. Items in the engine have {seconds:.0f} s to finish. Press Ctrl-C again to stop now.")
            embedded.stop(seconds + 2)
    return 0


def _say(output: Output, embedded: EmbeddedHome, url: str | None) -> None:
    """Where everything is."""
    settings = embedded.settings
    if output.as_json:
        output.data({"schema": "nightjar.dev/1", "home": str(embedded.home), "store": settings.effective_store_url, "server": url})
    else:
        output.line(f"ledger  {embedded.state / 'ledger.sqlite'}")
        output.line(f"store   {settings.effective_store_url}")
        output.line(f"logs    {embedded.worker_log}{'' if url is None else f', {embedded.server_log}'}")
        if url is not None:
            output.line(f"server  {url}")
    sys.stdout.flush()
    output.note("Ready. In another terminal: nightjar submit FILE. Ctrl-C ends everything.")

"""`jobs completion`: the script that teaches a shell our commands, options and job ids."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL; for bash: eval "$(jobs completion bash)"."""
    from jobs.cli import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"There is no completion for {shell}.")
    click.echo(kind(cli, {}, "jobs", "_JOBS_COMPLETE").source())

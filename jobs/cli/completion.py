"""`nightjar completion`: the script for shells, which completes commands, options and job ids, and takes `jobs SUBCOMMAND`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

#: Shells have a builtin `jobs`, which wins over the script of that name. This function takes our words and leaves the builtin the rest.
_BASH = """
function jobs {
    case "${1-}" in
        (%(words)s) nightjar "$@" ;;
        (*) builtin jobs "$@" ;;
    esac
}
_nightjar_jobs_completion() {
    _nightjar_completion nightjar
}
complete -o nosort -F _nightjar_jobs_completion jobs
"""
_ZSH_FIRST = """
whence compdef >/dev/null || { autoload -Uz compinit && compinit -i -D }
"""
_ZSH = """
function jobs {
    case "${1-}" in
        (%(words)s) nightjar "$@" ;;
        (*) builtin jobs "$@" ;;
    esac
}
compdef _nightjar_completion jobs
"""
_FISH = """
function jobs --description "nightjar, or the jobs of this shell"
    switch "$argv[1]"
        case %(fish_words)s
            nightjar $argv
        case '*'
            builtin jobs $argv
    end
end
complete --no-files --command jobs --arguments "(_nightjar_completion)"
"""
_FIRST = {"zsh": _ZSH_FIRST}
_LAST = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@click.command()
@click.argument("shell", type=click.Choice(list(_LAST)))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    The script completes `nightjar`. It also makes `jobs` followed by a nightjar command call nightjar; `jobs` alone, `jobs -l` and
    `jobs %1` still call the shell's builtin.

    \b
    Examples:
      eval "$(nightjar completion bash)"
    """
    from jobs.cli import COMMANDS, cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"There is no completion for {shell}.")
    words = [*COMMANDS, "--help", "--version"]
    ours = {"words": "|".join(words), "fish_words": " ".join(words)}
    source = kind(cli, {}, "nightjar", "_NIGHTJAR_COMPLETE").source()
    click.echo(f"{_FIRST.get(shell, '')}{source}{_LAST[shell] % ours}")

"""`nightjar evaluate`: a file of dialogues is sent to a server, and its answers are saved in a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.completion import files
from jobs.cli.context import SAMPLING, GroupedCommand, option, output_options
from jobs.cli.serve import read_keys
from jobs.console import FAILED, FiniteRange, NamedPath, Output
from jobs.formatting import counted, seconds_text
from jobs.settings import Settings, load_settings
from pipelines.errors import ConfigError, ErrorCode, ModelError

if TYPE_CHECKING:
    from jobs.evaluation.client import ChatClient, RequestOptions
    from jobs.evaluation.run import Tally

_LINE_SECONDS = 30.0


_TEMPERATURE, _TOP_K = FiniteRange(min=0), click.IntRange(min=0)


@click.command(cls=GroupedCommand)
@click.argument("source", metavar="INPUT", shell_complete=files)
@option("--server", metavar="URL", default="http://127.0.0.1:8000", show_default=True, help="Address of the server.")
@option(
    "--to",
    required=True,
    metavar="FILE",
    type=NamedPath(path_type=Path),
    help="File for the answers. An existing file is continued.",
)
@option("--model", metavar="MODEL", help="Name of the model. [default: the server's first model]")
@option("--mode", type=click.Choice(["text_only", "text_audio"]), help="Requested output. [default: text_only; text_audio with --cfg]")
@option("--connections", metavar="N", type=click.IntRange(1, 4096), default=16, show_default=True, help="Number of parallel requests.")
@option(
    "--timeout",
    metavar="SECONDS",
    type=FiniteRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Maximum seconds for one answer.",
)
@option(
    "--patience",
    metavar="SECONDS",
    type=FiniteRange(min=0),
    default=300.0,
    show_default=True,
    help="Maximum seconds to wait while the server is unreachable.",
)
@option("--cfg", metavar="N", type=FiniteRange(min=1), heading=SAMPLING, help="Scale of classifier-free guidance for audio; 1 is none.")
@option("--temperature", metavar="N", type=_TEMPERATURE, heading=SAMPLING, help="Sampling temperature.")
@option("--text-temperature", metavar="N", type=_TEMPERATURE, heading=SAMPLING, help="Temperature for text, if audio is requested too.")
@option("--audio-temperature", metavar="N", type=_TEMPERATURE, heading=SAMPLING, help="Temperature for audio.")
@option("--top-k", metavar="N", type=_TOP_K, heading=SAMPLING, help="Sample from the N most likely codes.")
@option("--audio-top-k", metavar="N", type=_TOP_K, heading=SAMPLING, help="Top-k for audio.")
@option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    heading=SAMPLING,
    help="Maximum steps of an answer: text tokens and audio frames together.",
)
@option("--seed", metavar="N", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, heading=SAMPLING, help="Seed of the run.")
@output_options
def evaluate(source: str, server: str, to: Path, output: Output, **given: Any) -> int:
    """Send every dialogue of INPUT to a server and save the answers.

    INPUT is a path, `-` for standard input, or s3://BUCKET/KEY; JSONL, also .gz or .zst. If it is interrupted, give the same command
    again: good answers are kept and failed ones are asked again. The server's key is SPEECH_SERVE__API_KEY. Exit code 1: an answer
    failed or lacks its audio.

    \b
    Examples:
      nightjar evaluate dialogues.jsonl --to answers.jsonl
      nightjar evaluate dialogues.jsonl --to speech.jsonl --cfg 3
    """
    if given["mode"] == "text_only" and (given["cfg"] or 1) != 1:
        raise click.UsageError("--cfg guides audio: give --mode text_audio, or leave --mode out.")
    from jobs.source import check_source

    check_source(source)
    tally = asyncio.run(_evaluate(load_settings(), source, server, to, given, output))
    return FAILED if tally.failed or tally.no_audio else 0


async def _evaluate(settings: Settings, source: str, server: str, to: Path, given: dict[str, Any], output: Output) -> Tally:
    # It says which library is missing, so it comes before all that needs one.
    asked = _client(settings, server, given)
    from jobs.evaluation.run import AnswerFile, Evaluation
    from jobs.references import ReferenceReader
    from jobs.source import open_source
    from jobs.store import open_store

    begin = time.monotonic()
    async with asked as client:
        options = await _request_options(client, given)
        with open_source(source, settings.s3) as opened, AnswerFile(to, options) as answers:
            reader = ReferenceReader(opened.folder, settings.audio_roots, open_store(settings.effective_store_url, settings.s3))
            if answers.done:
                output.note(f"{counted(len(answers.done), 'answer')} of an earlier run in {to}.")
            tally = await Evaluation(client, options, reader, answers).run(opened, given["connections"], _progress(output))
    _summarize(tally, to, time.monotonic() - begin, (answers.equal[0], answers.equal[1]), output)
    return tally


def _client(settings: Settings, server: str, given: dict[str, Any]) -> ChatClient:
    try:
        from jobs.evaluation.client import ChatClient
    except ModuleNotFoundError as error:
        raise ModelError(
            ErrorCode.CONFIG_MISSING_LIBRARY,
            f"Asking a server needs the library {error.name}.",
            "Install it with: pip install 'nightjar-speech[serve]'.",
        ) from error
    key = next(iter(read_keys(settings)), None)
    return ChatClient(server, key, given["connections"], given["timeout"], given["patience"])


async def _request_options(client: ChatClient, given: dict[str, Any]) -> RequestOptions:
    """Raises `server.unreachable`, and `config.invalid` for a model that the server does not have."""
    from jobs.evaluation.client import RequestOptions
    from pipelines.request import Generation

    names = await client.models()
    model = given["model"] or next(iter(names), "")
    if model not in names:
        message = f"The server has no model {given['model'] or ''!r}."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, f"It has: {', '.join(names) or 'none'}.")
    sampling = ("cfg", "temperature", "text_temperature", "audio_temperature", "top_k", "audio_top_k", "max_tokens")
    mode = given["mode"] or ("text_only" if given["cfg"] is None else "text_audio")
    return RequestOptions(model, mode, Generation(**{name: given[name] for name in sampling}), given["seed"])


def _progress(output: Output) -> Callable[[Tally], None]:
    """A line on stderr now and then."""
    next_line = time.monotonic() + _LINE_SECONDS

    def show(tally: Tally) -> None:
        nonlocal next_line
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + _LINE_SECONDS
            output.note(_counts(tally))

    return show


def _counts(tally: Tally) -> str:
    parts = [counted(tally.total, "dialogue"), f"{tally.ok} ok"]
    parts += [f"{number} {word}" for number, word in ((tally.no_audio, "without audio"), (tally.failed, "failed")) if number]
    return ", ".join(parts) + "."


def _summarize(tally: Tally, to: Path, seconds: float, equal: tuple[int, int], output: Output) -> None:
    times = sorted(tally.seconds)

    def at(share: float) -> float | None:
        return times[min(int(share * len(times)), len(times) - 1)] if times else None

    if output.as_json:
        counts = {"ok": tally.ok, "no_audio": tally.no_audio, "failed": tally.failed, "skipped": tally.skipped}
        view = {"schema": "nightjar.evaluate/1", "answers": str(to), **counts, "codes": dict(tally.codes)}
        compared = {"equal": equal[0], "compared": equal[1]}
        output.data({**view, **compared, "seconds": round(seconds, 3), "p50_seconds": at(0.5), "p99_seconds": at(0.99)})
        return
    if output.quiet:
        return
    output.line(_counts(tally) + (f" {tally.skipped} of them from an earlier run." if tally.skipped else ""))
    if times:
        output.line(
            f"time    {seconds_text(seconds)}; an answer {seconds_text(at(0.5))}, the slowest of a hundred {seconds_text(at(0.99))}"
        )
    if equal[1]:
        output.line(f"equal   {equal[0]} of {equal[1]} texts are what the dialogue expects")
    for code, number in tally.codes.most_common():
        output.line(f"{code}  {number}")
    output.line(f"answers {to}")

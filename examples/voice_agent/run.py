"""A voice agent on one machine, without a key: whisper-base hears a question, a language model answers,
Nightjar speaks.

The question comes from WAV files, whose answers go to another one; from a microphone; or from a page of a
browser:

    python examples/voice_agent/run.py question.wav --to answer.wav
    python examples/voice_agent/run.py --microphone
    python examples/voice_agent/run.py --browser
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import soundfile
import soxr
from agent import IN_RATE, OUT_RATE, Agent, Turn
from browser import browser_transport
from loguru import logger
from microphone import microphone_transport
from pipecat.transports.base_transport import BaseTransport
from speech_server import running_server, speech_server
from stub_llm import stub_llm


def read_question(path: Path) -> bytes:
    """A recording of any rate as 16-bit mono PCM at IN_RATE."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    heard = soxr.resample(samples.mean(axis=1), rate, IN_RATE)
    return (heard.clip(-1, 1) * 32767).astype("<i2").tobytes()


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "questions", nargs="*", type=Path, metavar="WAV", help="recordings of questions, one for each turn"
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("answer.wav"),
        metavar="WAV",
        help="where the answers go [default: answer.wav]",
    )
    parser.add_argument(
        "--microphone",
        action="store_true",
        help="talk with the agent through this machine's sound devices; use headphones",
    )
    parser.add_argument(
        "--browser", action="store_true", help="serve a page through whose microphone you talk with the agent"
    )
    parser.add_argument("--port", type=int, default=7860, help="of the page; 0: a free one [default: 7860]")
    parser.add_argument(
        "--server", metavar="URL", help="a Nightjar server that runs; without it one is started"
    )
    parser.add_argument("--model", default="hibari", help="the model that speaks [default: hibari]")
    parser.add_argument("--voice", help="one of its voices")
    parser.add_argument(
        "--llm",
        metavar="URL",
        help="base URL of an OpenAI chat server; without it a stub answers. Key: OPENAI_API_KEY",
    )
    parser.add_argument("--llm-model", default="stub", metavar="NAME", help="name of the language model")
    parser.add_argument("--verbose", action="store_true", help="show Pipecat's log")
    options = parser.parse_args(given)
    if bool(options.questions) + options.microphone + options.browser != 1:
        parser.error("give WAV files, --microphone or --browser: one of the three")
    return options


def main(given: Sequence[str] | None = None) -> int:
    options = parse_arguments(given)
    if not options.verbose:
        logger.remove()
    try:
        with ExitStack() as stack:
            if options.questions:
                return _answer_files(options, stack, [read_question(path) for path in options.questions])
            transport = (
                microphone_transport()
                if options.microphone
                else stack.enter_context(browser_transport(options.port))
            )
            asyncio.run(_converse(options, stack, transport))
    except (OSError, RuntimeError, soundfile.LibsndfileError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _answer_files(options: argparse.Namespace, stack: ExitStack, questions: Sequence[bytes]) -> int:
    async def talk() -> list[Turn]:
        return await _agent(options, stack).talk(questions)

    turns = asyncio.run(talk())
    for number, turn in enumerate(turns, 1):
        print(turn.report(number))
    with soundfile.SoundFile(options.to, "w", OUT_RATE, 1, "PCM_16") as file:
        for turn in turns:
            file.buffer_write(turn.audio, "int16")
    print(f"wrote {options.to}")
    return 0


async def _converse(options: argparse.Namespace, stack: ExitStack, transport: BaseTransport) -> None:
    await _agent(options, stack, transport).converse()


def _agent(options: argparse.Namespace, stack: ExitStack, transport: BaseTransport | None = None) -> Agent:
    """With servers of its own where none is named; the stack ends them."""
    llm = options.llm or stack.enter_context(stub_llm())
    server = (
        running_server(options.server)
        if options.server
        else stack.enter_context(speech_server(options.model))
    )
    return Agent(llm, options.llm_model, server, options.model, options.voice, transport)


if __name__ == "__main__":
    sys.exit(main())

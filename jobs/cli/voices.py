"""`nightjar voices`: the stored voices of this machine, which its server and its jobs use by name."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from jobs.cli.completion import stored_voices
from jobs.cli.context import common_options
from jobs.console import NamedPath, Output
from jobs.formatting import bytes_text, printable
from jobs.settings import load_settings
from jobs.voices import voice_folder
from pipelines.errors import ErrorCode, InputError, NightjarError, NotFoundError
from pipelines.stored_voices import StoredVoice, VoiceExistsError, VoiceFolder


@click.group()
def voices() -> None:
    """List, add and delete stored voices: recordings and their texts, by name.

    A job uses a stored voice by its name (`--voice NAME`, `generation.voice` of a line), and so does the server. They are in
    SPEECH_SERVE__VOICES_FOLDER, or else in the folder `voices` of DIR.

    \b
    Examples:
      nightjar voices add anna anna.wav --text "What she says there."
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
    rows: list[tuple[str, str, str, str]] = []
    for name in folder.names():
        try:
            if (voice := folder.get(name)) is None:
                continue
        except InputError as error:
            output.note(str(error))
            continue
        if output.as_json:
            output.data(_view(voice))
        added = datetime.fromtimestamp(voice.created_at, UTC).date().isoformat()
        rows.append((name, added, bytes_text(len(voice.recording)), printable(voice.text)))
    if output.as_json:
        return
    if rows:
        output.table(("VOICE", "ADDED", "SIZE", "TEXT"), rows)
    else:
        output.note(f"No voice is stored in {folder.path}.")


@voices.command()
@click.argument("name")
@click.argument("recording", type=NamedPath(path_type=Path))
@click.option("--text", metavar="WORDS", default="", help="What is said in the recording; some models need it.")
@click.option("--replace", is_flag=True, help="Take the place of a voice with this name.")
@common_options
def add(name: str, recording: Path, text: str, replace: bool, home: str | None, output: Output) -> None:
    """Keep RECORDING (WAV, FLAC, OGG or MP3, up to 60 s) as the voice NAME.

    Jobs that were submitted keep the recording that they were submitted with.

    \b
    Examples:
      nightjar voices add anna anna.wav --text "What she says there."
    """
    from jobs.references import read_audio_file

    folder = voice_folder(load_settings(home=home))
    try:
        voice = folder.add(name, read_audio_file(recording).data, text, replace=replace)
    except VoiceExistsError:
        message = f"There is a voice {name!r}."
        raise InputError(ErrorCode.INPUT_BAD_GENERATION, message, "Give --replace, or another name.") from None
    if output.as_json:
        output.data(_view(voice))
    else:
        output.line(f"The voice {name} is stored in {folder.path}.")


@voices.command()
@click.argument("name", shell_complete=stored_voices)
@common_options
def delete(name: str, home: str | None, output: Output) -> None:
    """Delete the stored voice NAME. Jobs that were submitted keep its recording.

    \b
    Examples:
      nightjar voices delete anna
    """
    folder = voice_folder(load_settings(home=home))
    if not folder.delete(name):
        raise _missing(folder, name)
    if output.as_json:
        output.data({"schema": "nightjar.voice/1", "voice": name, "deleted": True})
    else:
        output.line(f"The voice {name} is deleted.")


def _view(voice: StoredVoice) -> dict[str, object]:
    """`nightjar.voice/1`."""
    return {
        "schema": "nightjar.voice/1",
        "voice": voice.name,
        "text": voice.text,
        "bytes": len(voice.recording),
        "created_at": voice.created_at,
    }


def _missing(folder: VoiceFolder, name: str) -> NightjarError:
    message = f"There is no stored voice {printable(name[:80])!r} in {folder.path}."
    return NotFoundError(ErrorCode.LEDGER_NOT_FOUND, message, "See `nightjar voices list`.")

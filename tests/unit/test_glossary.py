"""One word for one thing: files, classes and functions have names of docs/glossary.md and of the field;
pages are in plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import click
import pytest

from jobs.cli import COMMANDS, cli
from pipelines.registry import ModelCard
from tests.support.docs_kit import PAGES, name_of

ROOT = Path(__file__).parents[2]
ROOMS = ("nightjar", "jobs", "worker", "pipelines", "kernels")

#: Pictures and old words, with the word to use instead; in no name at all.
NOWHERE = {
    "bury": "mark_dead",
    "cabinet": "cache",
    "cutting": "sharding",
    "endings": "lifecycle",
    "gate": "admission, or check",
    "gates": "checks",
    "glance": "queries",
    "housekeeping": "maintenance",
    "inlet": "request_body",
    "likeness": "match",
    "manner": "request options",
    "oust": "preempt",
    "payload": "shard_file",
    "people": "control",
    "settled": "on_done",
    "shelf": "uploader",
    "storer": "result_writer",
    "utterer": "utterance future",
}
#: Words that are fine for a function, but say nothing as the name of a file or a class.
NOT_OF_FILES_AND_CLASSES = {
    "homes": "recent_jobs",
    "isolation": "exclusive",
    "made": "items",
    "place": "destination",
    "places": "destinations",
    "storing": "result_writer",
    "tower": "audio_encoder",
    "twin": "reference",
}
#: Names that a file had once, or might get again.
NOT_OF_FILES = {
    "acknowledge": "celery_app",
    "activity": "vad",
    "answer": "output",
    "artifacts": "layout",
    "calls": "model",
    "course": "multi_turn",
    "delivery": "results",
    "drawing": "verdict",
    "guard": "middleware",
    "names": "weights",
    "own_file": "destination",
    "pace": "duration",
    "packed_runs": "attention",
    "redraw": "reproduce",
    "refusal": "errors",
    "refusals": "errors",
    "reply": "streaming",
    "requests": "request_builder",
    "rows": "mapping",
    "samples": "queries",
    "sweep": "garbage",
    "task": "validation",
    "validity": "checks",
    "views": "queries",
    "wave": "wave_generator",
    "words": "wer",
}
#: Classes that were several things under one name: each is one thing now, or nothing.
ONE_MEANING = ("Draw", "Pace", "Place", "Receiver", "Sample", "Slot", "Talker")
#: Words that somebody needs to read the code or a page.
NEEDED = {
    *(
        "job",
        "item",
        "shard",
        "ledger",
        "lease",
        "epoch",
        "draw",
        "check, score",
        "pipeline",
        "engine",
        "executor",
        "slot",
        "codec",
    ),
    *("RTF", "RTFx"),
}
#: Phrases that readers stumble over, with the plain ones.
PHRASES = {
    r"\bis told\b|\bare told\b": "is reported",
    r"\banew\b": "again",
    r"\bbecomes? of\b": "happens to",
    r"\bmost (requests|items|shards|jobs|outcomes|seconds)\b": "maximum ...",
    r"\bwhoever\b|\bwhatever comes\b": "anyone who",
    r"\bmay be given again\b": "can be given more than once",
    r"\b(a|an) (line|item|job|night|second) (each|apiece)\b": "per ...",
}


class Name(NamedTuple):
    """A name of the product: of a file or folder (its path without suffix), a class or a function."""

    kind: str
    name: str
    where: str

    @property
    def words(self) -> list[str]:
        """`_open_HTTPBody` has open, http and body."""
        return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", self.name)]


@cache
def names() -> tuple[Name, ...]:
    return tuple(_names())


def _names() -> Iterator[Name]:
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        where = str(path.relative_to(ROOT))
        yield Name("file", path.stem, where)
        yield Name("file", path.parent.name, where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield Name("class", node.name, where)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Name("function", node.name, where)


def offence(name: Name) -> str | None:
    """What to call it instead; None: the name is good."""
    if name.kind == "file" and name.name in NOT_OF_FILES:
        return NOT_OF_FILES[name.name]
    forbidden = NOWHERE if name.kind == "function" else NOWHERE | NOT_OF_FILES_AND_CLASSES
    return next((forbidden[word] for word in name.words if word in forbidden), None)


def test_names_are_the_words_of_the_field() -> None:
    assert len(names()) > 1500
    assert [
        f"{name.where}: {name.kind} {name.name}; use: {instead}"
        for name in names()
        if (instead := offence(name)) is not None
    ] == []


@pytest.mark.parametrize(
    "name",
    [
        Name("file", "voice_cabinet", "pipelines/qwen3_tts/voice_cabinet.py"),
        Name("file", "course", "pipelines/fish_speech/course.py"),
        Name("file", "delivery", "pipelines/delivery/results.py"),
        Name("class", "VoiceCabinet", "pipelines/qwen3_tts/voices.py"),
        Name("class", "FolderPlace", "jobs/export/files.py"),
        Name("function", "_oust", "pipelines/vllm_engine/pair_scheduler.py"),
        Name("function", "glance_at", "jobs/verify.py"),
    ],
    ids=lambda name: f"{name.kind} {name.name}",
)
def test_a_forbidden_name_is_seen(name: Name) -> None:
    assert offence(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        Name("file", "codec_stage", "pipelines/engine/codec_stage.py"),
        Name("class", "Placement", "jobs/x.py"),
        Name("function", "replace_artifact", "jobs/x.py"),
        Name("function", "reference_places", "jobs/turns.py"),
        Name("function", "aggregate", "jobs/x.py"),
    ],
    ids=lambda name: f"{name.kind} {name.name}",
)
def test_a_good_name_is_left_alone(name: Name) -> None:
    assert offence(name) is None


def test_a_class_name_has_one_meaning() -> None:
    defined = {
        known: [name.where for name in names() if name.kind == "class" and name.name == known]
        for known in ONE_MEANING
    }
    assert {known: places for known, places in defined.items() if len(places) > 1} == {}


def test_the_engine_of_ours_is_called_native() -> None:
    assert set(get_args(get_type_hints(ModelCard)["engine"])) == {"cpu", "native", "vllm"}


def test_the_glossary_has_the_words_that_one_needs() -> None:
    explained = re.findall(r"(?m)^\| ([^|]+?) \|", (ROOT / "docs/glossary.md").read_text())
    assert set(explained) >= NEEDED


def clumsy(text: str) -> list[str]:
    """The phrases of a text that have a plain one."""
    return [
        f"{found[0]}; use: {plain}"
        for phrase, plain in PHRASES.items()
        for found in re.finditer(phrase, text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_in_plain_english(page: Path) -> None:
    assert clumsy(page.read_text()) == []
    assert clumsy("one that fails is told, keeps no other back") == ["is told; use: is reported"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_plain_english(name: str) -> None:
    context = click.Context(cli, info_name="nightjar")
    command = cli.get_command(context, name)
    assert command is not None
    assert clumsy(command.get_help(click.Context(command, parent=context, info_name=name))) == []

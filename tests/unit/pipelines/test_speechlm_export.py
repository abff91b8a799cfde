"""ESPnet lines of items whose model wrote text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from jobs.export.line_formats import espnet_line, espnet_text_line
from jobs.ledger.records import JobSpec

ANSWERS: Any = SimpleNamespace(spec=JobSpec("speechlm", speak="answer"))
USER = ["user", "text", "A bell."]


def line(messages: list[list[str]], text_out: str | None) -> list[list[str]]:
    raw = msgspec.Raw(json.dumps({"example_id": "a", "messages": messages, "metadata": {"k": 1}}).encode())
    item: Any = SimpleNamespace(dialogue=raw, text_out=text_out, message_index=None)
    made = json.loads(espnet_line(ANSWERS, [(item, "a.wav")]))
    assert made["metadata"] == {"k": 1}
    return made["messages"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], [USER, ["assistant", "text", "T"], ["assistant", "audio", "a.wav"]]),
        (
            [USER, ["assistant", "audio", "x"]],
            [USER, ["assistant", "text", "T"], ["assistant", "audio", "a.wav"]],
        ),
        (
            [USER, ["assistant", "text", "old"], ["assistant", "audio", "x"], ["user", "text", "b"]],
            [USER, ["assistant", "text", "T"], ["assistant", "audio", "a.wav"], ["user", "text", "b"]],
        ),
    ],
)
def test_text_and_audio_take_the_assistants_place(
    messages: list[list[str]], expected: list[list[str]]
) -> None:
    assert line(messages, "T") == expected


def test_without_text_the_assistants_text_stays() -> None:
    messages = [USER, ["assistant", "text", "old"], ["assistant", "audio", "x"]]
    assert line(messages, None) == [USER, ["assistant", "text", "old"], ["assistant", "audio", "a.wav"]]


def test_an_answer_in_text_alone_stands_at_the_end() -> None:
    raw = msgspec.Raw(
        json.dumps({"example_id": "a", "messages": [USER, ["assistant", "text", "x"], USER]}).encode()
    )
    assert json.loads(espnet_text_line(raw, "T"))["messages"] == [
        USER,
        ["assistant", "text", "x"],
        USER,
        ["assistant", "text", "T"],
    ]

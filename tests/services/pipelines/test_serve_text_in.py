"""A context whose text is spoken while it is written, by a checkpoint: one utterance, the same speech in
any pieces, and its slot."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.qwen3_tts.pipeline import open_pipeline
from pipelines.serving import contexts
from tests.services.pipelines.test_serve_speech import SIZES, alike
from tests.support.golden_checkpoint import whole
from tests.support.qwen3_golden import GOLDEN
from tests.support.serving_kit import Running, b64
from tests.support.websocket_kit import Talk, talk
from tests.unit.pipelines.test_qwen3_pipeline import reference

TEXT = "Good morning. Is it 3 o'clock? Not yet."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pipeline: Any = open_pipeline(
        whole(GOLDEN / "checkpoint-custom"), **{**SIZES, "text_first": False, "keep_unfinished": True}
    )
    with Running(pipeline, slots=4, waiting_room=8) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Talk]:
    with talk(server.url) as one:
        yield one
    server.until_idle()


def settings(server: Running, seed: int = 3) -> dict[str, Any]:
    voice = server.pipeline.capabilities.voices[0]
    return {"voice": {"mode": "id", "id": voice}, "generation_config": {"seed": seed, "max_seconds": 3.0}}


def running(server: Running) -> int:
    return server.pipeline.stats().running


def until(server: Running, count: int) -> None:
    server.until(lambda: running(server) == count)


def test_text_in_pieces_is_one_utterance_and_the_speech_of_the_joined_text(
    server: Running, client: Talk
) -> None:
    rng, fields = random.Random(2), settings(server)
    client.say("once", TEXT, **fields)
    once = client.hear("once")
    before = server.pipeline.stats().requests_done
    for number in range(3):
        begin = 0
        while begin < len(TEXT):
            size = rng.randint(1, 9)
            client.say(f"c{number}", TEXT[begin : begin + size], more=True, **fields)
            begin += size
            time.sleep(rng.choice((0, 0.03)))
        client.say(f"c{number}", " ")
        assert alike(client.hear(f"c{number}"), once)
    assert server.pipeline.stats().requests_done == before + 3


def test_estimated_words_are_those_of_the_whole_text_in_any_pieces(server: Running, client: Talk) -> None:
    for number in range(0, len(TEXT), 3):
        client.say("a", TEXT[number : number + 3], more=True, add_timestamps=True, **settings(server))
    client.say("a", " ")
    messages = [client.next("a")]
    while messages[-1]["type"] != "done":
        messages.append(client.next("a"))
    times = [one["word_timestamps"] for one in messages if one["type"] == "timestamps"]
    assert [word for one in times for word in one["words"]] == TEXT.split()
    ends = [end for one in times for end in one["end"]]
    assert ends == sorted(ends)


def test_speech_begins_before_its_sentence_ends_and_waits_for_the_rest(server: Running, client: Talk) -> None:
    client.say("a", "Good morning, my ", more=True, max_buffer_delay_ms=60_000, **settings(server))
    assert client.next("a")["type"] == "chunk"
    until(server, 1)
    frames = server.pipeline.engine.core.scheduler  # type: ignore[attr-defined]
    server.until(lambda: frames.running[0].starved)
    client.say("b", TEXT, **settings(server, 4))
    assert client.hear("b")
    assert frames.running[0].starved
    client.say("a", "friend.")
    assert client.hear("a")


def test_a_context_that_is_cancelled_while_it_waits_for_text_frees_its_slot(
    server: Running, client: Talk
) -> None:
    client.say("a", "Good morning, my ", more=True, **settings(server))
    assert client.next("a")["type"] == "chunk"
    client.cancel("a")
    client.hear("a")
    until(server, 0)


def test_a_passage_ends_at_a_flush_and_when_no_text_comes(
    server: Running, client: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.say("a", "Good morning, my", more=True, flush=True, **settings(server))
    assert client.hear("a", until="flush_done")
    until(server, 0)
    monkeypatch.setattr(contexts, "MAX_TEXT_WAIT_SECONDS", 0.05)
    client.say("a", " friend, how", more=True)
    assert client.next("a")["type"] == "chunk"
    until(server, 0)
    client.say("a", " are you?")
    assert client.hear("a")


def test_a_pause_ends_a_passage_behind_a_whole_word(server: Running, client: Talk) -> None:
    before = server.pipeline.stats().requests_done
    fields = settings(server)
    client.say("a", "Good morning, my fri", more=True, max_buffer_delay_ms=50, **fields)
    server.until(lambda: server.pipeline.stats().requests_done == before + 1)
    client.say("a", "end.", **fields)
    paused = client.hear("a")
    for text in ("Good morning, my", "friend."):
        client.say("b", text, more=True, flush=True, **fields)
    client.say("b")
    assert alike(paused, client.hear("b"))


def test_a_clone_with_its_text_is_one_utterance_in_any_pieces_where_that_is_asked_for(tmp_path: Path) -> None:
    pipeline: Any = open_pipeline(GOLDEN / "checkpoint-base", **{**SIZES, "keep_unfinished": True})
    rng, fields = (
        random.Random(5),
        {"voice": {"mode": "id", "id": "anna"}, "generation_config": {"seed": 3, "max_seconds": 2.0}},
    )
    with (
        Running(pipeline, slots=4, waiting_room=8, text_in=True, voices_folder=tmp_path) as server,
        talk(server.url) as client,
    ):
        voice = {"name": "anna", "recording": b64(reference()), "text": "It was."}
        assert server.http.post("/v1/audio/voices", json=voice).status_code == 200
        client.say("once", TEXT, **fields)
        once = client.hear("once")
        before = pipeline.stats().requests_done
        begin = 0
        while begin < len(TEXT):
            size = rng.randint(1, 9)
            client.say("pieces", TEXT[begin : begin + size], more=True, **fields)
            begin += size
        client.say("pieces", " ")
        assert alike(client.hear("pieces"), once)
        assert pipeline.stats().requests_done == before + 1


def test_a_delay_of_0_speaks_sentence_by_sentence(server: Running, client: Talk) -> None:
    before = server.pipeline.stats().requests_done
    for piece in ("Good morning. ", "Not yet."):
        client.say("a", piece, more=True, max_buffer_delay_ms=0, **settings(server))
    client.say("a", "", max_buffer_delay_ms=0)
    assert client.hear("a")
    assert server.pipeline.stats().requests_done == before + 2

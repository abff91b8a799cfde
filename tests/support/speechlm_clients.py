"""What clients ask of a SpeechLM behind a server, openai's and a bare one, and the golden answers to it."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai

from tests.support.serving_kit import Running, b64, heard

GOLDEN = Path(__file__).parents[1] / "golden" / "speechlm"
CASES = {case["id"]: case for case in json.loads((GOLDEN / "cases.json").read_text())["cases"]}
DIALOGUES = {
    line["example_id"]: line["messages"]
    for line in map(json.loads, (GOLDEN / "dialogues.jsonl").read_text().splitlines())
}
#: Text, understanding, text and audio, guided, and guided to the end without a frame.
NAMES = ("t_max", "u_a", "a1", "a1_cfg30", "a1_cfg15")
SECONDS = 600


def request(name: str) -> dict[str, Any]:
    """A golden case in the words of a client."""
    case = CASES[name]
    turns: list[dict[str, Any]] = []
    for role, modality, content in DIALOGUES[case["example_id"]]:
        if role == "assistant":
            continue
        if modality == "text":
            turns.append({"role": role, "content": content})
            continue
        audio = {"data": b64((GOLDEN / content).read_bytes()), "format": "wav"}
        turns.append({"role": role, "content": [{"type": "input_audio", "input_audio": audio}]})
    fields: dict[str, Any] = {"messages": turns, "max_tokens": case["max_tokens"], "temperature": 0.0}
    if case["mode"] == "text_only":
        return {**fields, "stop_token_ids": [3]}
    xargs = {
        "mode": "text_audio",
        "phase": "text",
        "text_temperature": 0.0,
        "audio_temperature": 0.0,
        "audio_topk": 20,
    }
    return {**fields, "vllm_xargs": xargs | ({"cfg": case["cfg"]} if case["cfg"] else {})}


def check(name: str, text: str, finish: str | None, audio: str | None) -> None:
    expected = CASES[name]["expected"]
    assert (text, finish) == (expected["text"], expected["finish_reason"]), name
    assert (audio is not None) == bool(expected["n_samples"]), name
    if audio is not None:
        samples, rate = heard(base64.b64decode(audio))
        assert (len(samples), rate) == (expected["n_samples"], 16_000)
        assert np.abs(samples).max() > 0


def check_every_mode(server: Running) -> None:
    """Asks for every mode whole, streamed and by both clients, all at once."""
    server.http.timeout = httpx2.Timeout(SECONDS)

    def bare(name: str) -> None:
        view = server.http.post(
            "/v1/chat/completions", json={"model": server.pipeline.name, **request(name)}
        ).json()
        message = view["choices"][0]["message"]
        check(
            name,
            message["content"],
            view["choices"][0]["finish_reason"],
            (message["audio"] or {}).get("data"),
        )
        if message["audio"] or "vllm_xargs" not in request(name):
            assert view["usage"]["completion_tokens"] == CASES[name]["expected"]["completion_tokens"]
            assert view["usage"]["prompt_tokens"] == CASES[name]["expected"]["prompt_tokens"]

    def by_openai(name: str, client: openai.OpenAI) -> None:
        fields = request(name)
        answer = client.chat.completions.create(
            model=server.pipeline.name, messages=fields.pop("messages"), extra_body=fields
        )
        choice = answer.choices[0]
        check(
            name,
            choice.message.content or "",
            choice.finish_reason,
            choice.message.audio.data if choice.message.audio else None,
        )

    def streamed(name: str, client: openai.OpenAI) -> int:
        """How many pieces the text came in."""
        fields = request(name)
        stream = client.chat.completions.create(
            model=server.pipeline.name, messages=fields.pop("messages"), stream=True, extra_body=fields
        )
        choices = [chunk.choices[0] for chunk in stream]
        text = [choice.delta.content for choice in choices if choice.delta.content]
        audio = [choice.delta.audio.data for choice in choices if choice.delta.audio]
        check(name, "".join(text), choices[-1].finish_reason, audio[0] if audio else None)
        return len(text)

    def in_pieces(name: str, client: openai.OpenAI) -> None:
        deadline = time.monotonic() + SECONDS
        while streamed(name, client) < 2:
            # What is written while nobody could look comes in one piece.
            assert time.monotonic() < deadline, name

    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=SECONDS, max_retries=0) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        asked = [pool.submit(bare, name) for name in NAMES]
        asked += [pool.submit(by_openai, name, client) for name in NAMES]
        asked += [pool.submit(in_pieces, name, client) for name in NAMES]
        for future in asked:
            future.result(SECONDS)
    server.until_idle()

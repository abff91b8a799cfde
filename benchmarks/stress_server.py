"""`python -m benchmarks.stress_server`: a running server asked for three kinds of work at once, N
connections each.

Reports for each kind p50 and p99 of whole answers and of first bytes, failures by code and what was made
in a second; the server's memory before, in the middle and after; and whether every slot is free at the
end. Exit code 1 when a request failed or a slot is taken.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx2
import numpy as np
import soundfile
from rich.console import Console
from rich.table import Table

from benchmarks.figures import RESULTS, commit
from benchmarks.jobs import SENTENCES

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
_TEXT = {"temperature": 0.6, "top_k": 20}
_AUDIO = {
    "mode": "text_audio",
    "phase": "text",
    "text_temperature": 0.6,
    "audio_temperature": 0.8,
    "audio_topk": 20,
}
#: What each kind adds to a request.
KINDS: dict[str, dict[str, Any]] = {
    "guided": {"temperature": 0.8, "top_k": 20, "vllm_xargs": {**_AUDIO, "cfg": 3.0}},
    "audio": {"temperature": 0.8, "top_k": 20, "vllm_xargs": _AUDIO},
    "text": _TEXT,
    "text-stream": {**_TEXT, "stream": True},
    "understanding": _TEXT,
    "speech": {"response_format": "wav"},
    "speech-stream": {"response_format": "pcm", "stream": True},
    "speech-flac": {"response_format": "flac"},
}
#: What is asked of a server that writes text, and of one that only speaks.
DIALOGUE_KINDS, VOICE_KINDS = ("guided", "audio", "text"), ("speech", "speech-stream", "speech-flac")
_GAUGES = (
    "speech_server_running",
    "speech_server_waiting",
    "speech_engine_batch_size",
    "speech_engine_waiting",
)
_IDLE_SECONDS = 30.0


@dataclass(slots=True)
class Result:
    """What one kind of request got."""

    seconds: list[float] = field(default_factory=list[float])
    first_seconds: list[float] = field(default_factory=list[float])
    failures: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0
    audio_seconds: float = 0.0
    without_audio: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of which model, how often and by how many."""

    model: str
    sample_rate: int
    voice: str | None
    kinds: tuple[str, ...]
    connections: int
    requests: int
    max_tokens: int | None
    max_seconds: float | None
    samples: Path | None
    sample_count: int

    def body(self, kind: str, number: int) -> dict[str, Any]:
        """The request of a number; equal numbers ask for the same."""
        text = SENTENCES[number % len(SENTENCES)]
        common = {"model": self.model, "seed": number, **KINDS[kind]}
        if self.max_seconds is not None and kind not in ("text", "text-stream", "understanding"):
            common["max_seconds"] = self.max_seconds
        if kind in VOICE_KINDS:
            return {**common, "input": text, **({"voice": self.voice} if self.voice else {})}
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        if kind == "understanding":
            audio = {"data": _tone(1.0), "format": "wav"}
            messages.insert(0, {"role": "user", "content": [{"type": "input_audio", "input_audio": audio}]})
        return {
            **common,
            "messages": messages,
            **({"max_tokens": self.max_tokens} if self.max_tokens else {}),
        }


def _tone(seconds: float, rate: int = 16_000) -> str:
    file = io.BytesIO()
    soundfile.write(
        file, 0.3 * np.sin(np.arange(int(seconds * rate)) / 20), rate, format="WAV", subtype="PCM_16"
    )
    return base64.b64encode(file.getvalue()).decode()


class Stress:
    """One run against one server."""

    def __init__(self, client: httpx2.AsyncClient, plan: Plan) -> None:
        self._client = client
        self._plan = plan
        self._kept = 0
        self.results = {kind: Result() for kind in plan.kinds}
        self.ended = 0

    async def run(self, halfway: Callable[[], Awaitable[None]]) -> None:
        """All kinds at once; `halfway` is called when half of the requests have ended."""
        half = self._plan.requests * len(self._plan.kinds) // 2
        told = asyncio.Event()

        async def tell() -> None:
            await told.wait()
            await halfway()

        async def work(kind: str, numbers: list[int]) -> None:
            while numbers:
                await self._one(kind, numbers.pop())
                self.ended += 1
                if self.ended >= half:
                    told.set()

        queues = {kind: list(range(self._plan.requests)) for kind in self._plan.kinds}
        await asyncio.gather(
            tell(),
            *(work(kind, queues[kind]) for kind in self._plan.kinds for _ in range(self._plan.connections)),
        )

    async def _one(self, kind: str, number: int) -> None:
        result = self.results[kind]
        route = SPEECH if kind in VOICE_KINDS else CHAT
        begin = time.perf_counter()
        first: float | None = None
        data = bytearray()
        try:
            async with self._client.stream("POST", route, json=self._plan.body(kind, number)) as answer:
                async for piece in answer.aiter_raw():
                    first = time.perf_counter() - begin if first is None else first
                    data += piece
        except httpx2.HTTPError as error:
            result.failures[type(error).__name__] += 1
            return
        if answer.status_code != 200:
            code = json.loads(data)["error"]["code"] if data.startswith(b"{") else ""
            result.failures[f"{answer.status_code} {code}".strip()] += 1
            return
        result.seconds.append(time.perf_counter() - begin)
        result.first_seconds.append(first or 0.0)
        self._read(kind, number, bytes(data), result)

    def _read(self, kind: str, number: int, data: bytes, result: Result) -> None:
        """Counts what an answer holds, and keeps some of its audio. Raises what makes it no answer."""
        if kind in VOICE_KINDS:
            samples = (
                np.frombuffer(data, "<i2")
                if kind == "speech-stream"
                else soundfile.read(io.BytesIO(data), dtype="int16")[0]
            )
            result.audio_seconds += len(samples) / self._plan.sample_rate
            self._keep(kind, number, samples)
            return
        if kind == "text-stream":
            result.tokens += data.count(b'"content":"') - 1
            if not data.rstrip().endswith(b"[DONE]"):
                result.failures["broken stream"] += 1
            return
        view = json.loads(data)
        result.tokens += (view["usage"] or {}).get("completion_tokens", 0)
        audio = view["choices"][0]["message"]["audio"]
        if audio is not None:
            samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio["data"])), dtype="int16")
            result.audio_seconds += len(samples) / rate
            self._keep(kind, number, samples)
        elif kind in ("audio", "guided"):
            result.without_audio += 1

    def _keep(self, kind: str, number: int, samples: np.ndarray) -> None:
        plan = self._plan
        if plan.samples is not None and self._kept < plan.sample_count and random.random() < 0.2:
            self._kept += 1
            plan.samples.mkdir(parents=True, exist_ok=True)
            soundfile.write(
                plan.samples / f"{kind}-{number:05d}.wav", samples, plan.sample_rate, subtype="PCM_16"
            )


async def gauges(client: httpx2.AsyncClient) -> dict[str, float]:
    """The server's own figures: its slots and its memory."""
    page = (await client.get("/metrics")).text
    names = (*_GAUGES, "process_resident_memory_bytes")
    return {
        name: float(found[1])
        for name in names
        if (found := re.search(rf"^{name} (\S+)$", page, re.MULTILINE))
    }


async def measure(url: str, key: str | None, plan_for: Callable[[dict[str, Any]], Plan]) -> dict[str, Any]:
    """The whole run as one JSON object."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=3600.0, trust_env=False
    ) as client:
        try:
            card = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
        except httpx2.HTTPError as error:
            raise click.ClickException(f"The server {url} cannot be asked: {error}.") from error
        plan = plan_for(card)
        stress = Stress(client, plan)
        memory = {"start": (await gauges(client))["process_resident_memory_bytes"]}

        async def halfway() -> None:
            memory["middle"] = (await gauges(client))["process_resident_memory_bytes"]

        begin = time.perf_counter()
        await stress.run(halfway)
        seconds = time.perf_counter() - begin
        deadline = time.monotonic() + _IDLE_SECONDS
        left = await gauges(client)
        while any(left[name] for name in _GAUGES) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            left = await gauges(client)
        memory["end"] = left["process_resident_memory_bytes"]
    return {
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "model": plan.model,
        "connections": plan.connections * len(plan.kinds),
        "seconds": round(seconds, 3),
        "memory_bytes": memory,
        "slots_taken_at_the_end": {name: left[name] for name in _GAUGES},
        "kinds": {kind: _view(stress.results[kind], seconds) for kind in plan.kinds},
    }


def _view(result: Result, seconds: float) -> dict[str, Any]:
    def at(values: list[float], share: float) -> float | None:
        ordered = sorted(values)
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 4) if ordered else None

    return {
        "ok": len(result.seconds),
        "failed": result.failures.total(),
        "failures": dict(result.failures),
        "without_audio": result.without_audio,
        "mean_seconds": round(sum(result.seconds) / len(result.seconds), 4) if result.seconds else None,
        "p50_seconds": at(result.seconds, 0.5),
        "p99_seconds": at(result.seconds, 0.99),
        "first_p50_seconds": at(result.first_seconds, 0.5),
        "first_p99_seconds": at(result.first_seconds, 0.99),
        "tokens_per_second": round(result.tokens / seconds, 2),
        "audio_seconds_per_second": round(result.audio_seconds / seconds, 3),
    }


def _show(view: dict[str, Any]) -> None:
    table = Table(title=f"{view['connections']} connections to {view['model']}, {view['seconds']:.1f} s")
    for heading in ("kind", "ok", "failed", "p50 s", "p99 s", "first p50 s", "tokens/s", "audio s/s"):
        table.add_column(heading)
    for kind, row in view["kinds"].items():
        names = (
            "ok",
            "failed",
            "p50_seconds",
            "p99_seconds",
            "first_p50_seconds",
            "tokens_per_second",
            "audio_seconds_per_second",
        )
        table.add_row(kind, *(str(row[name]) for name in names))
    console = Console(width=140)
    console.print(table)
    memory = ", ".join(f"{when} {size / 1e6:.0f} MB" for when, size in view["memory_bytes"].items())
    console.print(
        f"memory: {memory}; slots taken at the end: {sum(view['slots_taken_at_the_end'].values()):.0f}"
    )


@click.command()
@click.option("--server", default="http://127.0.0.1:8000", show_default=True, help="Address of the server.")
@click.option(
    "--connections",
    default=128,
    show_default=True,
    type=click.IntRange(min=1),
    help="Connections of each kind.",
)
@click.option(
    "--requests", type=click.IntRange(min=1), help="Requests of each kind. [default: twice the connections]"
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="What is asked; may be given more than once.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer of a dialogue.")
@click.option("--max-seconds", type=click.FloatRange(min=0, min_open=True), help="Longest audio.")
@click.option("--samples", type=click.Path(path_type=Path), help="Folder for some of the WAVs.")
@click.option("--sample-count", default=12, show_default=True, help="How many of them.")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    default=RESULTS / "stress_server.json",
    show_default=True,
    help="JSON of the run.",
)
def main(
    server: str,
    connections: int,
    requests: int | None,
    kinds: tuple[str, ...],
    max_tokens: int | None,
    max_seconds: float | None,
    samples: Path | None,
    sample_count: int,
    to: Path,
) -> None:
    """Stresses the server at an address; its key is SPEECH_SERVE__API_KEY."""

    def plan_for(card: dict[str, Any]) -> Plan:
        able = card["capabilities"]
        chosen = kinds or (DIALOGUE_KINDS if able["text_out"] else VOICE_KINDS)
        voice = next(iter(able["voices"]), None)
        asked = requests or 2 * connections
        return Plan(
            card["id"],
            card["sample_rate"],
            voice,
            chosen,
            connections,
            asked,
            max_tokens,
            max_seconds,
            samples,
            sample_count,
        )

    view = asyncio.run(measure(server.rstrip("/"), os.environ.get("SPEECH_SERVE__API_KEY"), plan_for))
    _show(view)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(view, indent=1) + "\n")
    failed = sum(row["failed"] for row in view["kinds"].values())
    sys.exit(1 if failed or any(view["slots_taken_at_the_end"].values()) else 0)


if __name__ == "__main__":
    main()

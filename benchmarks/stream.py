"""How soon a server's streams begin and whether they ever run dry, under load.

    python -m benchmarks.stream http://127.0.0.1:8000 --parts open --rates 10 20 50
    python -m benchmarks.stream http://127.0.0.1:8000 --parts listen --listeners 384
    python -m benchmarks.stream --peer http://127.0.0.1:8091 --parts open --rates 10
    python -m benchmarks.stream --sizes 1b7 --parts closed open --minutes 9
    python -m benchmarks.stream --sizes 1b7 --parts cloning --clients 1 32
    python -m benchmarks.stream --sizes 1b7 --parts recovery
    python -m benchmarks.stream --sizes 1b7 --parts neutral --rates 1 5 10 20 40 --warm-up 15
    python -m benchmarks.stream --sizes 1b7 --parts seed_tts --clients 64
    python -m benchmarks.stream --tiny --parts closed --clients 2 --short

With an address, of a server that runs (`--peer`: any OpenAI-style one, which gets OpenAI's fields only); with `--sizes`, of
Qwen3-TTS at full size with random weights: `nightjar serve` with a checkpoint on disk that never draws an end, so a speech is as
long as its request says. Settings of the server come from the environment; by default it has 256 slots and room for 1,024
requests more. Rows are written as soon as they are there.

Clients run in processes of their own, on bare sockets. Time zero is just before the first
byte of a request is written, on an open connection; the end is the first PCM byte. Requests are for 2 to 8 s of speech
(`--seconds`; with `--text-lengths` only the text says how long). Every stream has a player that starts with its first chunk;
an underrun is a moment at which it has nothing to play. Parts: `closed` are clients back to back; `open` Poisson arrivals at a rate, however many requests are under way, medians over
`--seeds`; `listen` listeners in real time; `cloning` clients back
to back whose requests have a recording of 8 s, by speaker vector and in context, the same one in each or a new one in each (the
size's Base checkpoint gets a server of its own); `recovery` kills the engine under up to 32 clients (`--clients`) back to
back: `first_again_s` is from the kill to the first byte of a speech that had none before, `failed` are the requests sent before
that, by how they failed, and `retried` those that the server tried again; `neutral` and `seed_tts` as others publish theirs. `neutral` is `open` by the
definitions of Nari's `tts_bench`: `audible_ms` is when the first audible sample plays, `e2e_ms` the end of the answer, percentiles
are measured values of every request that was sent in the span; `--texts` has its prompts, and `--field NAME=JSON` further fields.
`seed_tts` is `--requests` requests from clients back to back, each with a recording of its own that is cloned in context:
all of their audio over all of the time, after two requests of each client that do not count. Speech and recordings of both are 2
to 8 s long, 4.1 s on average, as Seed-TTS's English ones. A closed point counts `--duration` seconds after `--warm-up`, an open one twice as
long; `--short` is for a first look. What does not fit into `--minutes` is left out and named.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import psutil

from benchmarks.clients import Answer, Plan, client_process, text_of
from benchmarks.common import Result, Row, Use, device_name, environment_with, parser, read, table
from benchmarks.voices import plant, recording

PARTS = ("closed", "open", "listen", "recovery", "neutral", "cloning", "seed_tts")
#: The parts that clone need a checkpoint of another kind.
CLONING = ("cloning", "seed_tts")
#: Lengths of speech in Seed-TTS's English set: of the most frequent one; and what a request of `tts_bench` says besides.
SEED_TTS: Row = {"seconds": (2.0, 8.0), "usual": 2.3}
NEUTRAL: Row = {"language": "English", "non_streaming_mode": False}
#: Longest time of `seed_tts`.
CLONES_SECONDS = 300.0
GAUGES = tuple(
    f"speech_{name}" for name in ("server_running", "server_waiting", "engine_batch_size", "engine_waiting")
)
#: Settings of the server, unless the environment has others.
SERVER = {"SPEECH_SERVE__SLOTS": "256", "SPEECH_SERVE__WAITING_ROOM": "1024", "SPEECH_ENGINE__SLOTS": "256"}
TINY_SERVER = {"SPEECH_SERVE__SLOTS": "4", "SPEECH_SERVE__WAITING_ROOM": "8", "SPEECH_ENGINE__SLOTS": "4"}
#: Length of a speech whose request does not say it; the longest waits until everything is free again and until a server
#: is ready.
LONGEST_SECONDS, IDLE_SECONDS, READY_SECONDS = 8.0, 30.0, 240.0
#: Length of the recordings that are cloned.
RECORDING_SECONDS = 8.0
#: Of `recovery`: maximum clients, and the time after the kill in which audio of the dead engine may still arrive.
RECOVERY_CLIENTS, LATE_SECONDS = 32, 0.25
#: Time between the word to all processes of clients, which are connected, and the start.
START_SECONDS = 0.1
#: Processes of clients.
PROCESSES = max(min((os.cpu_count() or 1) // 3, 6), 1)
COLUMNS = (
    "system", "size", "mode", "cloning", "recording", "rate", "clients", "protocol", "first_pcm_ms.50", "first_pcm_ms.95",
    "first_pcm_ms.99", "audible_ms.50", "audible_ms.95", "e2e_ms.95", "underrun_share", "underrun_ms.95", "rtf", "audio_s_per_s", "joules_per_audio_s", "requests", "failures",
    "left_over", "cpu_cores", "first_again_s", "healthy_again_s", "retried", "failed",
)  # fmt: skip


def fetch(url: str, path: str, key: str = "") -> tuple[int, str]:
    """A small page of a server: status and body. Raises `OSError` where it does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(url + path, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""


def plan_of(options: argparse.Namespace, url: str) -> Plan:
    """Asks a server what it is: what every request to it says. Raises `OSError` where it does not answer."""
    url, key = url.rstrip("/"), os.environ.get("SPEECH_SERVE__API_KEY", "")
    status, body = fetch(url, "/v1/models", key)
    if status != 200:
        raise ConnectionError(f"{url}/v1/models was answered with {status}")
    card = json.loads(body)["data"][0]
    own = not options.peer and card.get("owned_by") == "nightjar"
    voices = (card.get("capabilities") or {}).get("voices") if own else None
    voice, rate = next(iter(voices or ()), None), card.get("sample_rate", 24_000)
    sized, seconds = own and not options.text_lengths, tuple(options.seconds)
    return Plan(url, card["id"], key, voice, rate, own, sized, seconds=seconds, fields=dict(options.fields))


def measure(plan: Plan, pid: int | None, seeds: int = 1) -> Row:
    """The row of a load: medians over its seeds. `pid`: the server's process."""
    rows = [_one_seed(plan, pid, seed) for seed in range(seeds)]
    mode, load = ("open", "rate") if plan.rate else ("closed", "clients")
    about: Row = {"mode": mode, load: getattr(plan, load), "protocol": "http", "seeds": seeds}
    about |= {"warm_up_s": plan.warm_up, "seconds": plan.seconds}
    about |= {"listen": True} if plan.listen else {}
    about |= {"clones": plan.clones} if plan.clones else {}
    return about | (rows[0] if seeds == 1 else _joined(rows))


def _one_seed(plan: Plan, pid: int | None, seed: int) -> Row:
    use = Use(pid, 0.25)
    shift = time.time() - time.monotonic()
    answers, audio, start = run_clients(plan, seed)
    count_from = start + plan.warm_up
    count_until = count_from + plan.duration
    if plan.clones:
        count_until = max(one.sent + one.took for one in answers)
    row = row_of(answers, audio, count_from, count_until, plan)
    row["duration_s"] = count_until - count_from
    use.stop()
    if pid is not None:
        row |= use.between(count_from + shift, count_until + shift, row["audio_s_per_s"])
    return row | ({"left_over": left_over(plan)} if plan.own else {})


def run_clients(plan: Plan, seed: int = 0) -> tuple[list[Answer], float, float]:
    """What all processes of clients received, the seconds of audio in the span, and the monotonic time of the
    start."""
    count = PROCESSES if plan.rate else min(PROCESSES, plan.clients, plan.clones or plan.clients)
    context, pipes = get_context("spawn"), list[Connection]()
    for number in range(count):
        mine = {"rate": plan.rate / count, "clients": (plan.clients + number) // count}
        mine |= {"clones": (plan.clones + number) // count, "seed": 1 + 1000 * seed + number}
        here, there = context.Pipe()
        context.Process(target=client_process, args=(replace(plan, **mine), there), daemon=True).start()
        there.close()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    start = time.monotonic() + START_SECONDS
    for pipe in pipes:
        pipe.send(start)
    found = [pipe.recv() for pipe in pipes]
    return [one for answers, _ in found for one in answers], sum(audio for _, audio in found), start


def metric(plan: Plan, name: str) -> float:
    """A metric of a server; 0 if it has none of this name."""
    found = re.search(rf"^{name} (\S+)$", fetch(plan.url, "/metrics", plan.key)[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def listener_of(url: str) -> int | None:
    """The process that listens at an address; None where it is on another host or another user's."""
    parts = urlsplit(url)
    here = psutil.net_connections("tcp") if parts.hostname in ("127.0.0.1", "localhost", "::1") else []
    listening = (
        one for one in here if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (parts.port or 80,)
    )
    return next((one.pid for one in listening if one.pid), None)


def recovery(plan: Plan, pid: int) -> Row:
    """The row of a load whose engine is killed once all clients have a request in it."""
    engines = [one for one in psutil.Process(pid).children() if "jobs.engine_process" in one.cmdline()]
    if not engines:
        raise RuntimeError("the server has no engine in a process of its own")
    before = metric(plan, "speech_requests_retried_total")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_clients, plan)
        while metric(plan, "speech_engine_batch_size") < plan.clients / 2 and not running.done():
            time.sleep(0.05)
        time.sleep(plan.warm_up)
        killed = time.monotonic()
        min(engines, key=psutil.Process.create_time).kill()  # a spare process is younger
        time.sleep(LATE_SECONDS)
        while fetch(plan.url, "/health")[0] != 200 and not running.done():
            time.sleep(0.02)
        ready = time.monotonic()
        answers, *_ = running.result()
    firsts = {id(one): one.sent + one.first for one in answers if one.first is not None}
    again = min((at for at in firsts.values() if at > killed + LATE_SECONDS), default=math.inf)
    failed = [(one.sent < again, one.failure) for one in answers if one.failure not in ("", "cut off")]
    waited = (one for one in answers if one.sent < killed < again <= firsts.get(id(one), 0))
    waits = [one.first for one in waited if one.first is not None]
    return {
        "mode": "recovery",
        "clients": plan.clients,
        "protocol": "http",
        "seconds": plan.seconds,
        "first_again_s": again - killed,
        "healthy_again_s": ready - killed,
        "waited_ms": percentiles_ms(waits),
        "requests": len(answers),
        "retried": metric(plan, "speech_requests_retried_total") - before,
        "failed": dict(Counter(name for was_early, name in failed if was_early)),
        "failures": dict(Counter(name for was_early, name in failed if not was_early)),
        "left_over": left_over(plan),
    }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the maximum in milliseconds, as values that were measured (nearest rank)."""
    shares = {"50": 50, "95": 95, "99": 99, "max": 100}
    if not len(seconds):
        return dict.fromkeys(shares)
    found = 1000 * np.percentile(seconds, [*shares.values()], method="inverted_cdf")
    return dict(zip(shares, found.round(2).tolist(), strict=True))


def row_of(answers: Sequence[Answer], audio: float, since: float, until: float, plan: Plan) -> Row:
    """The figures of one load: what came of the requests that were sent in the span, and the seconds of audio
    in it."""
    sent = [one for one in answers if since <= one.sent < until]
    firsts = [one.first for one in sent if one.first is not None]
    done, waits = [one for one in sent if one.failure == ""], [wait for one in sent for wait in one.underruns]
    dry, ended = sum(bool(one.underruns) for one in sent), Counter(one.failure for one in sent)
    rtf = [one.took / one.audio for one in done if one.audio]
    heard = [one for one in sent if one.audible is not None]
    neutral: Row = {
        "audible_ms": percentiles_ms([one.audible for one in heard if one.audible is not None]),
        "leading_silence_ms": percentiles_ms([one.silence for one in heard if one.silence is not None]),
        "e2e_ms": percentiles_ms([one.took for one in done]),
        "inaudible": len(sent) - len(heard),
    }
    return {
        "first_pcm_ms": percentiles_ms(firsts),
        **(neutral if plan.audible else {}),
        "rtf": statistics.median(rtf) if rtf else None,
        "underrun_share": dry / len(firsts) if firsts else None,
        "underruns": len(waits),
        "underrun_ms": percentiles_ms(waits),
        "audio_s_per_s": audio / (until - since),
        "requests": len(sent),
        "requests_per_s": len(sent) / (until - since),
        "failures": {name: count for name, count in ended.items() if name not in ("", "cut off")},
        "cut_off": ended["cut off"],
        "too_short": sum(one.audio < 0.8 * one.asked_audio for one in done) if plan.sized else 0,
        "client_late_ms": percentiles_ms([one.late for one in sent]),
    }


def _joined(values: list[Any]) -> Any:
    """One value of several seeds': the median of each figure, the sum of each count."""
    values = [value for value in values if value is not None]
    if values and isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _joined([value.get(name) for value in values]) for name in names}
    if not values or isinstance(values[0], bool | str | list):
        return values[0] if values else None
    return sum(values) if isinstance(values[0], int) else statistics.median(values)


def left_over(plan: Plan) -> int:
    """Waits until nothing holds a place in the server and its engine any more; how much does after `IDLE_SECONDS`."""
    until = time.monotonic() + IDLE_SECONDS
    while True:
        left = round(sum(metric(plan, name) for name in GAUGES))
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.02)


@contextmanager
def served(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[int, str, Path]]:
    """The server of a Python command, which prints its address as JSON, once it is ready: its process, its address, its
    log."""
    with tempfile.TemporaryDirectory(prefix="nightjar-server-") as name:
        log = Path(name, "server.log")
        with log.open("wb") as file:
            out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": file, "start_new_session": True}
            process = subprocess.Popen([sys.executable, *words], cwd=name, env=environment, **out)
        try:
            said = process.stdout.readline() if process.stdout else b""
            until = time.monotonic() + READY_SECONDS
            url = json.loads(said)["url"] if said else ""
            while not url or fetch(url, "/health")[0] != 200:
                if process.poll() is not None or time.monotonic() >= until:
                    end = log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"The server did not become ready: {end}")
                time.sleep(0.1)
            yield process.pid, url, log
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


class StreamBench(Result):
    """One run: its rows, and what is left of its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.server = {**(TINY_SERVER if options.tiny else SERVER), **os.environ}
        told = [name for name in self.server if name.startswith("SPEECH_") and "KEY" not in name]
        settings = {name: self.server[name] for name in told}
        super().__init__("stream_h200", options, device_name(), server=settings)
        self.size = ""

    def add(self, row: Row) -> None:
        """Prints and writes a row."""
        self.rows.append({"size": self.size, **row})
        print(f"{table(self.rows[-1:], COLUMNS)}  [{self.seconds_left:.0f} s left]", flush=True)
        self.write()

    def part(self, name: str, work: Callable[..., None], *given: Any, needs: float = 0.0) -> None:
        self.attempt(f"{self.size} {name}".strip(), work, *given, needs=needs)

    def measure_size(self, size: str) -> None:
        """The parts of a size, each on a checkpoint of the kind that it needs."""
        self.size, facts = size, self.found.setdefault(f"facts_{size}", {})
        for kind in ("custom_voice", "base"):
            if parts := [part for part in self.options.parts if (part in CLONING) == (kind == "base")]:
                with tempfile.TemporaryDirectory(prefix="nightjar-stream-") as name:
                    self._measure_checkpoint(Path(name), kind, parts, facts)

    def _measure_checkpoint(self, folder: Path, kind: str, parts: Sequence[str], facts: Row) -> None:
        """A checkpoint of random weights in a folder, and a server of it."""
        size, options = self.size, self.options
        given = folder, size, kind, [5.0] * 400, options.device, LONGEST_SECONDS
        model, made = plant(*given, keep_unfinished=True)
        facts["checkpoint_s"] = made["written_s"]
        stored = {"SPEECH_SERVE__VOICES_FOLDER": str(folder / "stored")}
        words = ["-P", "-m", "jobs", "serve", "--model", model, "--port", "0", "--json"]
        began, environment = time.monotonic(), stored | self.server | environment_with(folder)
        with served(words, environment) as (pid, url, log):
            facts["ready_s"] = time.monotonic() - began
            self.measure(plan_of(options, url), pid, parts)
            kept = self.path.with_name(f"{self.path.stem}-server-{size}-{kind}.log")
            kept.write_text(log.read_text(errors="replace")[-200_000:], encoding="utf-8")

    def measure(self, plan: Plan, pid: int | None, parts: Sequence[str]) -> None:
        """The parts on a server."""
        options, like_seed_tts = self.options, {} if self.options.tiny else SEED_TTS
        # The beginnings of listeners are spread over the mean length of a speech, so the warm-up is longer.
        listen = max(options.warm_up, sum(options.seconds) / 2 + 1), 1.5 * options.duration
        closed, opened = (options.warm_up, options.duration), (2 * options.warm_up, 2 * options.duration)
        neutral = replace(plan, audible=True, fields=NEUTRAL | plan.fields, texts=options.texts)
        points: dict[str, tuple[Plan, str, Sequence[float], tuple[float, float]]] = {
            "closed": (plan, "clients", options.clients, closed),
            "open": (plan, "rate", options.rates, opened),
            "neutral": (replace(neutral, **like_seed_tts), "rate", options.rates, opened),
            "listen": (replace(plan, listen=True), "clients", options.listeners, listen),
        }
        for part in parts:
            if part in points:
                about = {"harness": "neutral"} if part == "neutral" else {}
                self._points(pid, *points[part], **about)
            elif part == "recovery" and pid is None:
                self.left_out.append(part)  # the server is not on this machine
            elif part == "recovery" and pid is not None:
                clients, span = min(RECOVERY_CLIENTS, max(options.clients)), 4 * options.duration
                load = replace(plan, clients=clients, warm_up=options.warm_up, duration=span)
                self.part(part, lambda load=load: self.add(recovery(load, pid)), needs=span + 10)
            elif part == "cloning":
                self._cloning(plan, pid, closed)
            elif part == "seed_tts":
                for clients in options.clients:
                    self.part(f"seed_tts {clients}", self._seed_tts, plan, pid, clients, like_seed_tts)

    def _points(
        self, pid: int | None, plan: Plan, each: str, values: Sequence[float], span: tuple[float, float], **about: Any
    ) -> None:  # fmt: skip
        """A row for each value, which begins with `about`. `span`: seconds of the warm-up and of what counts."""
        seeds, mode = (self.options.seeds, "open") if each == "rate" else (1, "closed")
        for value in values:
            load = replace(plan, warm_up=span[0], duration=span[1], **{each: value})
            work = lambda load=load: self.add(about | measure(load, pid, seeds))  # noqa: E731
            self.part(f"{about.get('harness', mode)} {value:g}", work, needs=seeds * (sum(span) + 4))

    def _seed_tts(self, plan: Plan, pid: int | None, clients: int, like_seed_tts: Row) -> None:
        """A row of requests that clone recordings of their own, after a few that do not count."""
        load = replace(plan, clients=clients, duration=CLONES_SECONDS, **like_seed_tts)
        _one_seed(replace(load, clones=2 * clients), pid, 1)
        row = measure(replace(load, clones=self.options.requests), pid)
        self.add({"harness": "seed_tts", "cloning": "context", "recording": "new", **row})

    def _cloning(self, plan: Plan, pid: int | None, span: tuple[float, float]) -> None:
        """Rows of kept and of new recordings, by speaker vector and in context."""
        with tempfile.TemporaryDirectory(prefix="nightjar-recording-") as name:
            path = Path(name, "recording.wav")
            path.write_bytes(recording(0, RECORDING_SECONDS)[0])
            spoken = {"vector": "", "context": text_of(RECORDING_SECONDS, 0)}
            for cloning, new in itertools.product(spoken, (False, True)):
                about = {"cloning": cloning, "recording": "new" if new else "kept"}
                load = replace(plan, recording=str(path), spoken=spoken[cloning], new=new)
                self._points(pid, load, "clients", self.options.clients, span, **about)


def field(text: str) -> tuple[str, Any]:
    """A further field of every request, of NAME=JSON such as `temperature=0.7`."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("url", nargs="?", default="", help="address of a server of ours")
    made.add_argument("--field", action="append", dest="fields", type=field, default=[], metavar="NAME=JSON")
    options = read(
        made, peer="", sizes=str, parts=["closed"], clients=[1, 8, 32, 64, 128],
        rates=[1.0, 10.0, 20.0, 50.0, 100.0], listeners=[384, 1000], seconds=[2.0, LONGEST_SECONDS], seeds=3,
        warm_up=5.0, duration=15.0, requests=1088, texts="", short=False, text_lengths=False, minutes=60.0,
        known={"parts": PARTS, "sizes": ("0b6", "1b7", "tiny")},
    )  # fmt: skip
    if options.tiny:
        options.sizes, options.device, options.seconds = ["tiny"], "cpu", [0.3, 0.6]
    if options.short:
        options.seeds, options.warm_up, options.duration = 1, 2.0, 6.0
    if options.requests < 1 or (options.texts and not Path(options.texts).is_file()):
        made.error("--requests takes 1 or more, --texts a file")
    url = options.peer or options.url
    if not (url or options.sizes):
        made.error("give the address of a server, or --sizes")
    bench = StreamBench(options)
    if url:
        try:
            plan = plan_of(options, url)
        except OSError as error:
            made.error(f"the server does not answer ({error}): start it, or give another address")
        bench.measure(plan, listener_of(url), options.parts)
    for size in options.sizes:
        bench.part(size, bench.measure_size, size)
    bad = any(row["failures"] or row.get("left_over") for row in bench.rows)
    return bench.end(*COLUMNS) or int(bad)


if __name__ == "__main__":
    raise SystemExit(main())

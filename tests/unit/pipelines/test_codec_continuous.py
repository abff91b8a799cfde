"""Whole utterances as a continuous batch: the audio of the whole decode in any company, rows that leak
nothing, faults that end alone.

On a CPU a graph is the pass itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.codec.graphs import STEP_FRAMES, Codes, UtteranceGraphs, utterance_bytes
from pipelines.codec.stage import CodecStage
from pipelines.codec.states import Arena, CodecState
from pipelines.codec.transfer import PendingSamples
from pipelines.errors import ErrorCode, NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder, load_codec
from tests.support.codec_stage_kit import Heard

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"
CLOSE = 3e-5


@lru_cache(maxsize=1)
def plain() -> CodecDecoder:
    torch.set_num_threads(1)
    return load_codec(FOLDER).decoder


class Spoiled(UtteranceGraphs):
    """Steps that fail where they are told to, and whose rows hold what must not be heard before each
    utterance."""

    def __init__(self, rows: int, frames: int, fixed: bool = False, broken: int = -1) -> None:
        super().__init__(plain().run, plain().shape, rows, frames, fixed, plain()._check)
        self.prepare()
        self.steps, self.broken = 0, broken
        with torch.inference_mode():
            self.arena.values.fill_(math.nan)

    def step(self, states: Sequence[CodecState], codes: Sequence[Codes]) -> PendingSamples:
        self.steps += 1
        if self.steps == self.broken:
            raise RuntimeError("the device is lost")
        return super().step(states, codes)

    def leave(self, state: CodecState) -> None:
        assert state.row is not None
        with torch.inference_mode():
            self.arena.values[state.row.number].fill_(math.nan)
        super().leave(state)


class Continuous(CodecDecoder):
    """A decoder on a CPU whose utterances go the way of a GPU's."""

    def __init__(self, rows: int, frames: int = 4, fixed: bool = False, broken: int = -1) -> None:
        self.__dict__.update(plain().__dict__)
        self.utterances = self.graphs = Spoiled(rows, frames, fixed, broken)

    @property
    def arena(self) -> Arena:
        return self.graphs.arena


def graphs(rows: int, frames: int, fixed: bool = False) -> UtteranceGraphs:
    return UtteranceGraphs(plain().run, plain().shape, rows, frames, fixed)


def codes(frames: int, seed: int) -> Tensor:
    config = plain().config
    return torch.randint(
        config.codebook_size, (frames, config.num_quantizers), generator=torch.Generator().manual_seed(seed)
    )


def uttered(
    decoder: Continuous, items: list[Tensor], starts: dict[int, CodecState] | None = None
) -> list[np.ndarray | NightjarError]:
    """What the stage makes of the items, handed over in this order."""
    heard, stage = Heard(), CodecStage(decoder)
    for at, item in enumerate(items):
        stage.decode(item.numpy(), heard.at(str(at)), (starts or {}).get(at))
    found = dict(heard.take(len(items)))
    stage.close()
    return [found[str(at)] for at in range(len(items))]


def check(found: np.ndarray | NightjarError, item: Tensor, wanted: Tensor | None = None) -> None:
    assert isinstance(found, np.ndarray), found
    wanted = plain().decode([item])[0] if wanted is None else wanted
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    ("rows", "frames", "fixed"), [(1, 4, False), (3, 4, False), (5, 7, True), (16, 16, False), (2, 1, False)]
)
def test_any_mix_in_any_order_is_the_whole_decode(rows: int, frames: int, fixed: bool) -> None:
    plan = random.Random(rows)
    items = [codes(plan.choice((1, 2, frames, 2 * frames, plan.randint(1, 40))), seed) for seed in range(14)]
    decoder = Continuous(rows, frames, fixed)
    for order in (items, items[::-1]):
        for found, item in zip(uttered(decoder, order), order):
            check(found, item)
        assert decoder.arena.free == rows, "all rows came back"


def test_alone_in_a_row_an_utterance_is_its_chunks_bit_for_bit() -> None:
    item, state = codes(19, 1), plain().new_state()
    padded = torch.cat((item, torch.zeros(1, item.shape[1], dtype=item.dtype)))
    chunks = torch.cat([plain().decode_chunk([state], [part])[0] for part in padded.split(4)])
    (found,) = uttered(Continuous(1), [item])
    assert isinstance(found, np.ndarray)
    assert torch.equal(torch.from_numpy(found), chunks[: len(found)])


def test_with_one_size_of_steps_an_utterance_is_the_same_bits_in_any_company() -> None:
    items = [codes(frames, frames) for frames in (5, 9, 1, 23, 16, 3, 12)]
    together, backwards = (
        uttered(Continuous(4, fixed=True), items),
        uttered(Continuous(4, fixed=True), items[::-1])[::-1],
    )
    for item, one, other in zip(items, together, backwards):
        (alone,) = uttered(Continuous(4, fixed=True), [item])
        assert isinstance(alone, np.ndarray)
        assert isinstance(one, np.ndarray)
        assert isinstance(other, np.ndarray)
        assert np.array_equal(one, alone)
        assert np.array_equal(other, alone)


def test_a_voice_starts_utterances_beside_others_and_stays_as_it_is() -> None:
    voice, reference, new = plain().new_state(), codes(30, 1), codes(9, 2)
    plain().decode_chunk([voice], [reference])
    assert voice.values is not None
    before = voice.values.clone()
    wanted = plain().decode([torch.cat((reference, new))])[0][30 * plain().samples_per_frame :]
    items = [new, codes(11, 3), new, codes(2, 4), new]
    for at, found in enumerate(uttered(Continuous(2), items, {0: voice, 2: voice, 4: voice})):
        check(found, items[at], wanted if at % 2 == 0 else None)
    assert torch.equal(voice.values, before)
    assert (voice.frames, voice.row) == (30, None)


@pytest.mark.parametrize("bad", [codes(3, 1)[:, :-1], codes(3, 1) + 5000, codes(3, 1).float()])
def test_codes_that_cannot_be_are_refused_alone(bad: Tensor) -> None:
    decoder, items = Continuous(2), [codes(6, 1), bad, codes(0, 1), codes(9, 2)]
    first, refused, empty, last = uttered(decoder, items)
    check(first, items[0])
    check(last, items[3])
    assert isinstance(refused, NightjarError)
    assert refused.code is ErrorCode.SYNTH_ENGINE
    assert isinstance(empty, np.ndarray)
    assert empty.shape == (0,)
    assert decoder.arena.free == 2


def test_a_step_that_fails_ends_those_in_it_and_nobody_else() -> None:
    """Two have a row when the second step fails, one in its middle; those that wait get their rows and
    hear nothing of them."""
    decoder, items = Continuous(2, broken=2), [codes(12, seed) for seed in range(5)]
    found = uttered(decoder, items)
    failed = [one for one in found if isinstance(one, NightjarError)]
    assert 1 <= len(failed) <= 2
    assert all(one.code is ErrorCode.SYNTH_ENGINE for one in failed)
    for one, item in zip(found, items):
        if not isinstance(one, NightjarError):
            check(one, item)
    assert decoder.arena.free == 2


def test_a_stage_that_is_closed_decodes_what_it_has() -> None:
    decoder, heard = Continuous(2), Heard()
    stage: CodecStage = CodecStage(decoder, gather_seconds=10_000.0)
    items = [codes(10, seed) for seed in range(12)]
    for at, item in enumerate(items):
        stage.decode(item.numpy(), heard.at(str(at)))
    stage.close()
    for name, found in heard.take(12):
        check(found, items[int(name)])
    assert decoder.arena.free == 2
    assert not stage.is_backlogged


def test_without_steps_utterances_are_gathered_and_a_cpu_never_has_them() -> None:
    decoder = plain()
    decoder.prepare_utterances(4)
    assert decoder.utterances is None
    stepping = Continuous(1)
    uttered(stepping, [codes(3, 1)])
    assert stepping.graphs.steps == 1


def test_steps_of_fewer_utterances_have_fewer_rows() -> None:
    assert graphs(64, 2).sizes == [
        (64, 2),
        (32, 2),
        (16, 2),
        (8, 2),
        (4, 2),
    ]
    assert graphs(3, 2).sizes == [(3, 2), (1, 2)]
    assert graphs(64, 2, fixed=True).sizes == [(64, 2)]


def test_the_bytes_of_steps_grow_with_rows_and_frames() -> None:
    shape = plain().shape
    state = shape.state_size * shape.dtype.itemsize
    small, wide, long = (
        utterance_bytes(shape, 64),
        utterance_bytes(shape, 128),
        utterance_bytes(shape, 64, 2 * STEP_FRAMES),
    )
    assert utterance_bytes(shape, 64) > 65 * state + 4 * 64 * STEP_FRAMES * shape.samples_per_frame
    assert wide - small > long - small > 0
    arena = graphs(8, 1).arena.values
    assert arena.numel() * arena.itemsize == 9 * state

"""Chunks of streams in an arena: what a launch reads and writes, sizes that are filled up, rows that come
back.

On a CPU a graph is the pass itself.
"""

from __future__ import annotations

import gc
import math
import queue
import random
import threading
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.codec.batches import FIXED_ROWS
from pipelines.codec.graphs import FRAMES, GROUP_FRAMES, ROWS, StreamGraphs, pieces
from pipelines.codec.stage import CodecStage
from pipelines.codec.states import Arena, CodecState
from pipelines.codec.transfer import PendingSamples
from pipelines.engine.buckets import ASKS
from pipelines.errors import SynthesisError
from pipelines.qwen3_tts.codec import CodecDecoder, load_codec

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"
CLOSE = 3e-5


@lru_cache(maxsize=1)
def plain() -> CodecDecoder:
    torch.set_num_threads(1)
    return load_codec(FOLDER).decoder


class Prepared(CodecDecoder):
    """A decoder on a CPU whose streams go the way of a GPU's. Its arena is full of what must not be read."""

    def __init__(self, streams: int, fixed: bool = False) -> None:
        self.__dict__.update(plain().__dict__)
        self.stream_graphs = self.graphs = StreamGraphs(self.run, self.shape, streams, fixed)
        self.graphs.prepare()
        self.spoil()

    @torch.inference_mode()
    def spoil(self, rows: slice = slice(None)) -> None:
        """Fills rows of the arena with what must not be heard."""
        self.arena.values[rows].fill_(math.nan)

    @property
    def arena(self) -> Arena:
        return self.graphs.arena

    def hear(
        self, states: list[CodecState], codes: list[Tensor], last: bool | list[bool] = False
    ) -> list[Tensor]:
        started = self.start_chunks(states, codes, last if isinstance(last, list) else [last] * len(codes))
        waves = [torch.from_numpy(started.of(at)) for at in range(len(codes))]
        started.release()
        return waves


def codes(frames: int, seed: int) -> Tensor:
    config = plain().config
    return torch.randint(
        config.codebook_size, (frames, config.num_quantizers), generator=torch.Generator().manual_seed(seed)
    )


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("frames", [*range(26), 100, 511])
def test_pieces_are_the_chunk_in_sizes_of_graphs(frames: int) -> None:
    for last in (False, True):
        found = pieces(frames, last)
        assert sum(taken for taken, _ in found) == frames
        assert all(size in FRAMES and 0 < taken <= size for taken, size in found)
        assert all(taken == size for taken, size in found[: -1 if last else None]), (
            "only the end of a stream is filled up"
        )
    assert len(pieces(frames, True)) == math.ceil(frames / FRAMES[-1])


def test_graphs_are_those_of_a_group_and_its_frames() -> None:
    decoder = Prepared(200)
    assert {frames for _, frames in decoder.graphs.sizes} == set(FRAMES)
    assert {rows for rows, frames in decoder.graphs.sizes if frames == 1} == set(ROWS)
    assert all(rows * frames <= GROUP_FRAMES for rows, frames in decoder.graphs.sizes)
    assert decoder.batch_key(1, False) == (1, 128)
    assert decoder.batch_key(12, False) == (12, 32)
    assert decoder.batch_key(3, True) == (4, 128)
    assert decoder.batch_key(3, False) == (2, 128)
    assert {rows for rows, _ in Prepared(3).graphs.sizes} == {1, 2, 4}
    assert {rows for rows, _ in Prepared(200, fixed=True).graphs.sizes} == {FIXED_ROWS}
    assert plain().batch_key(12, False) == (0, None)


def test_a_few_graphs_hold_every_launch_and_others_follow_by_need() -> None:
    decoder = Prepared(40)
    few = decoder.stream_graphs = decoder.graphs = StreamGraphs(
        decoder.run, decoder.shape, 40, False
    ).prepare(few=True)
    decoder.spoil()
    assert {frames: set(one.captured) for frames, one in few.graphs.items()} == {
        1: {1, 8, 64},
        2: {1, 8, 64},
        4: {1, 8, 64},
        8: {1, 8, 64},
        12: {1, 8, 32},
    }
    streams = [codes(ASKS + 1, seed) for seed in range(3)]
    states, waves = [decoder.new_state() for _ in streams], [[torch.empty(0)] for _ in streams]
    for place in range(ASKS + 1):
        parts = [stream[place : place + 1] for stream in streams]
        for wave, found in zip(waves, decoder.hear(states, parts)):
            wave.append(found)
        assert (4 in few.graphs[1].captured) == (place >= ASKS - 1)
    for wave, stream in zip(waves, streams):
        close(torch.cat(wave), plain().decode([stream])[0])


@pytest.mark.parametrize("fixed", [False, True])
def test_chunks_of_many_streams_make_the_whole_utterances(fixed: bool) -> None:
    """Random chunks, in sizes that have a graph and others, some streams idle in some turns; new streams
    follow in rows of old ones."""
    plan, decoder = random.Random(5), Prepared(6, fixed)
    for trial in range(2):
        streams = [codes(plan.randint(1, 40), 100 * trial + i) for i in range(6)]
        states, waves = [decoder.new_state() for _ in streams], [[torch.empty(0)] for _ in streams]
        left = list(streams)
        while any(len(one) for one in left):
            turn = [i for i, one in enumerate(left) if len(one) and plan.random() < 0.8]
            parts = [left[i][: plan.choice((1, 1, 2, 3, 4, 7, 8, 12, 25))] for i in turn]
            ends = [len(part) == len(left[i]) for i, part in zip(turn, parts)]
            for i, part, wave in zip(turn, parts, decoder.hear([states[i] for i in turn], parts, ends)):
                assert wave.shape == (len(part) * decoder.samples_per_frame,)
                waves[i].append(wave)
                left[i] = left[i][len(part) :]
        for wave, stream in zip(waves, streams):
            close(torch.cat(wave), plain().decode([stream])[0])
        assert decoder.arena.free == 6, "the last chunks gave the rows back"


def test_alone_and_in_a_launch_of_its_size_a_stream_is_the_plain_path_bit_for_bit() -> None:
    decoder, stream, state = Prepared(1), codes(15, 1), plain().new_state()
    mine = decoder.new_state()
    for part in stream.split([1, 2, 4, 8]):
        assert torch.equal(decoder.hear([mine], [part])[0], plain().decode_chunk([state], [part])[0])


@pytest.mark.parametrize("frames", [3, 5, 7, 9, 11])
def test_a_last_chunk_that_is_filled_up_sounds_the_same(frames: int) -> None:
    decoder, stream = Prepared(2), codes(8 + frames, frames)
    state = decoder.new_state()
    found = [*decoder.hear([state], [stream[:8]]), *decoder.hear([state], [stream[8:]], last=True)]
    assert len(found[1]) == frames * decoder.samples_per_frame
    close(torch.cat(found), plain().decode([stream])[0])
    assert state.closed


def test_what_a_row_held_before_does_not_reach_its_next_stream() -> None:
    """The arena is full of NaN at first, and its one row again between two streams; the row that is
    nobody's is read as well."""
    decoder, stream = Prepared(1), codes(4, 0)
    for _ in range(2):
        state = decoder.new_state()
        close(decoder.hear([state], [stream])[0], plain().decode([stream])[0])
        state.close()
        decoder.spoil()
    three = Prepared(3)
    for wave in three.hear([three.new_state() for _ in range(3)], [stream] * 3):
        close(wave, plain().decode([stream])[0])
    assert three.graphs.batch_key(4, False)[1] == 4, (
        "three streams share a launch with a row that is nobody's"
    )


def test_a_row_that_is_nobodys_changes_no_stream() -> None:
    decoder, stream = Prepared(3), codes(10, 3)
    states = [decoder.new_state() for _ in range(3)]
    first = decoder.hear(states, [stream[:8]] * 3)
    second = decoder.hear(states[:2], [stream[8:]] * 2)
    decoder.spoil(slice(3, None))
    third = decoder.hear(states[2:], [stream[8:]])
    for head, tail in zip(first, [*second, *third]):
        close(torch.cat((head, tail)), plain().decode([stream])[0])


def test_streams_beyond_the_arena_are_heard_as_well_and_get_a_row_later() -> None:
    decoder = Prepared(2)
    streams = [codes(14, seed) for seed in range(5)]
    states = [decoder.new_state() for _ in streams]
    waves = [[wave] for wave in decoder.hear(states, [one[:3] for one in streams])]
    assert [state.row is not None for state in states] == [True, True, False, False, False]
    assert all(state.values is not None for state in states[2:])
    for state in states[:2]:
        state.close()
    for wave, more in zip(waves[2:], decoder.hear(states[2:], [one[3:8] for one in streams[2:]])):
        wave.append(more)
    assert [state.row is not None for state in states[2:]] == [True, True, False]
    for wave, more in zip(waves[2:], decoder.hear(states[2:], [one[8:] for one in streams[2:]], last=True)):
        wave.append(more)
    for wave, stream in zip(waves[2:], streams[2:]):
        close(torch.cat(wave), plain().decode([stream])[0])
    assert decoder.arena.free == 2


def test_a_voice_starts_many_streams_and_stays_as_it_is() -> None:
    decoder, reference, new = Prepared(2), codes(30, 1), codes(9, 2)
    voice = decoder.new_state()
    decoder.decode_chunk([voice], [reference])
    assert voice.row is None, "a voice is no stream"
    assert voice.values is not None
    before = voice.values.clone()
    wanted = plain().decode([torch.cat((reference, new))])[0][30 * decoder.samples_per_frame :]
    for _ in range(2):
        states = [voice.copy() for _ in range(3)]
        for wave in decoder.hear(states, [new] * 3, last=[True, False, False]):
            close(wave, wanted)
        with pytest.raises(ValueError, match="one stream"):
            states[1].copy()
        del states
    assert torch.equal(voice.values, before)
    assert voice.frames == 30
    assert decoder.arena.free == 2


def test_streams_go_on_beside_others_that_start_with_the_codes_of_their_voice() -> None:
    """Also a stream without a row; one with a row needs no values after the codes any more."""
    decoder, reference, new = Prepared(2), codes(30, 1), codes(9, 2)
    voice = decoder.state_after(reference)
    wanted = plain().decode([torch.cat((reference, new))])[0][30 * decoder.samples_per_frame :]
    states = [voice.copy() for _ in range(3)]
    heads = decoder.hear(states, [new[:4]] * 3)
    middles = decoder.hear(states, [new[4:6]] * 3)
    *tails, whole = decoder.hear([*states, voice.copy()], [new[6:]] * 3 + [new])
    for wave in [whole, *map(torch.cat, zip(heads, middles, tails))]:
        close(wave, wanted)
    assert [state.values is None for state in states] == [True, True, False]
    assert voice.values is None


def test_wrong_codes_are_refused_before_any_stream_moves_on() -> None:
    decoder, good = Prepared(2), codes(4, 1)
    states = [decoder.new_state(), decoder.new_state()]
    for bad in (good[:, :-1], good.float(), good - 5000, good + 5000):
        with pytest.raises(SynthesisError):
            decoder.hear(states, [good, bad])
    assert [state.frames for state in states] == [0, 0]
    close(decoder.hear(states[:1], [good])[0], plain().decode([good])[0])


def test_an_empty_last_chunk_gives_the_row_back() -> None:
    decoder, state = Prepared(1), plain().new_state()
    decoder.hear([state], [codes(2, 0)])
    assert decoder.arena.free == 0
    assert decoder.hear([state], [codes(0, 0)], last=True)[0].shape == (0,)
    assert decoder.arena.free == 1


def test_samples_are_the_receivers_own_and_buffers_are_written_again() -> None:
    decoder, state = Prepared(1), plain().new_state()
    kept: list[tuple[PendingSamples, np.ndarray, np.ndarray]] = []
    for step in range(12):
        started = decoder.start_chunks([state], [codes(1, step)], [False])
        samples = started.of(0)
        kept.append((started, samples, samples.copy()))
        if step % 2:
            for one, *_ in kept[-2:]:
                one.release()
    assert len(decoder.graphs.buffers) == 4, "two at a time were in use"
    assert all(np.array_equal(found, wanted) for _, found, wanted in kept)


def test_streams_that_end_at_any_point_leave_no_row_behind() -> None:
    """Through the stage: some speak to their end, some are ended and some are forgotten while a chunk is
    under way."""
    decoder = Prepared(8)
    stage: CodecStage = CodecStage(decoder)

    def speak(seed: int) -> None:
        plan, heard = random.Random(seed), queue.SimpleQueue[object]()
        parts = codes(27, seed).split([1, 2, 4, 8, 12])
        state, stops = stage.new_state(), plan.choice((0, 1, 3, len(parts)))
        for turn, part in enumerate(parts):
            stage.decode_chunk(
                part.numpy(), heard.put, state, last=turn == len(parts) - 1, deadline=float(turn)
            )
            if turn == stops:
                break
            assert isinstance(heard.get(timeout=240), np.ndarray)
        if stops < len(parts) and plan.random() < 0.5:
            stage.end(state)
        done.append(seed)

    done: list[int] = []
    threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stage.close()
    assert len(done) == 30
    assert decoder.arena.free == 8


def test_a_stage_that_waits_keeps_no_stream_that_is_forgotten() -> None:
    decoder, heard = Prepared(1), queue.SimpleQueue[object]()
    stage: CodecStage = CodecStage(decoder)
    state = stage.new_state()
    stage.decode_chunk(codes(1, 0).numpy(), heard.put, state)
    assert isinstance(heard.get(timeout=240), np.ndarray)
    del state
    ticks = iter(range(3000))
    while not decoder.arena.free and next(ticks, None) is not None:
        threading.Event().wait(0.01)
    assert decoder.arena.free == 1
    stage.close()


def test_a_row_comes_back_once_however_its_stream_ends() -> None:
    arena = Arena(3, 5, torch.float32, torch.device("cpu"))
    closed, forgotten, cyclic = CodecState(), CodecState(), CodecState()
    with torch.inference_mode():
        assert all(state.enter(arena) for state in (closed, forgotten, cyclic))
        assert not CodecState().enter(arena)
    assert arena.free == 0
    for _ in range(2):
        closed.close()
    assert arena.free == 1
    del forgotten
    assert arena.free == 2
    ring: list[object] = [cyclic]
    ring.append(ring)
    del ring, cyclic
    gc.collect()
    assert arena.free == 3
    late = CodecState(closed=True)
    with torch.inference_mode():
        assert late.enter(arena)
    assert arena.free == 3, "a stream that ends while its first chunk is started keeps nothing"


def test_many_threads_take_and_give_back_and_no_row_is_lost_or_had_twice() -> None:
    arena, faults = Arena(16, 1, torch.float32, torch.device("cpu")), list[str]()
    owners: dict[int, int] = {}

    def churn(seed: int) -> None:
        plan = random.Random(seed)
        for _ in range(400):
            row = arena.take()
            if row is None:
                continue
            if owners.setdefault(row.number, seed) != seed:
                faults.append(f"row {row.number} is had twice")
            del owners[row.number]
            if plan.random() < 0.5:
                row.release()
                row.release()
            del row

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    rows = list(iter(arena.take, None))
    assert sorted(row.number for row in rows) == list(range(16))

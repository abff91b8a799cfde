"""Chunks of streams on a CUDA device: graphs against single ops, rows that come back, utterances beside
streams, memory that stays flat."""

from __future__ import annotations

import math
import queue
import random
import threading
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.checkpoint import PUBLISHED_CODEC, dummy_decoder
from pipelines.codec.decoder import CausalDecoder
from pipelines.codec.graphs import StreamGraphs, stream_bytes
from pipelines.codec.stage import CodecStage
from pipelines.codec.states import CodecState
from pipelines.engine.buckets import ASKS
from pipelines.errors import ErrorCode, NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Heard = np.ndarray | NightjarError
ROWS = 64
#: How much further from float32 than single ops of a whole utterance: other batch sizes meet other kernels of
#: the libraries.
BOUND = 1.5
SECONDS = 240


@lru_cache(maxsize=1)
def launched() -> CodecDecoder:
    """Single ops in bfloat16."""
    return dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.bfloat16)


@lru_cache(maxsize=1)
def exact() -> CodecDecoder:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.float32, False)


@lru_cache(maxsize=2)
def prepared(reproducible: bool = False) -> CodecDecoder:
    """The same weights, with graphs."""
    decoder = dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.bfloat16, reproducible=reproducible)
    decoder.prepare_streams(ROWS, few=False)
    return decoder


def graphs_of(decoder: CausalDecoder) -> StreamGraphs:
    assert decoder.stream_graphs is not None
    return decoder.stream_graphs


def codes(frames: int, seed: int) -> Tensor:
    return torch.randint(2048, (frames, 16), generator=torch.Generator().manual_seed(seed))


def hear(
    decoder: CodecDecoder, states: list[CodecState], parts: list[Tensor], last: bool = False
) -> list[Tensor]:
    started = decoder.start_chunks(states, parts, [last] * len(parts))
    started.wait()
    waves = [torch.from_numpy(started.of(at)) for at in range(len(parts))]
    started.release()
    return waves


def error(found: Tensor, wanted: Tensor) -> float:
    return float(
        (found.float() - wanted.float()).square().mean().sqrt() / wanted.float().square().mean().sqrt()
    )


def check_close(found: Tensor, stream: Tensor) -> None:
    """No further from float32 than the bound says."""
    (wanted,), (whole,) = exact().decode([stream]), launched().decode([stream])
    assert torch.isfinite(found).all()
    assert error(found.cuda(), wanted) <= BOUND * error(whole, wanted)


class Inbox:
    """What the stage hands on."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Heard] = queue.SimpleQueue()

    def take(self) -> np.ndarray:
        found = self.items.get(timeout=SECONDS)
        assert isinstance(found, np.ndarray), found
        return found


def test_every_size_was_captured_and_takes_no_more_than_it_says() -> None:
    decoder = prepared()
    graphs = graphs_of(decoder)
    assert all(set(one.captured) == set(one.sizes) for one in graphs.graphs.values())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    another = dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.bfloat16)
    weights = torch.cuda.memory_reserved() - before
    another.prepare_streams(8, few=False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before - weights <= stream_bytes(another.shape, 8) + 2**28


def test_a_graph_that_is_captured_between_chunks_changes_no_sample() -> None:
    decoder, streams = dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.bfloat16), 3
    decoder.prepare_streams(ROWS, few=True)
    assert 4 not in graphs_of(decoder).graphs[1].captured
    parts = [codes(2 * ASKS, seed) for seed in range(streams)]
    states, waves = [decoder.new_state() for _ in parts], [list[torch.Tensor]() for _ in parts]
    for place in range(2 * ASKS):
        found = hear(decoder, states, [part[place : place + 1] for part in parts])
        for wave, samples in zip(waves, found):
            wave.append(samples)
    assert 4 in graphs_of(decoder).graphs[1].captured
    for wave, part in zip(waves, parts):
        check_close(torch.cat(wave), part)


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_graphs_make_what_single_ops_of_the_same_sizes_make(rows: int) -> None:
    streams = [codes(28, seed) for seed in range(rows)]
    decoder, plain = prepared(), launched()
    mine, theirs = [decoder.new_state() for _ in streams], [plain.new_state() for _ in streams]
    place = 0
    for frames in (1, 2, 4, 8, 12, 1):
        parts = [stream[place : place + frames] for stream in streams]
        for found, wanted in zip(hear(decoder, mine, parts), plain.decode_chunk(theirs, parts)):
            assert torch.equal(found, wanted.cpu()), f"chunk of {frames} frames after {place}"
        place += frames
    for state in mine:
        state.close()
    assert graphs_of(decoder).arena.free == ROWS


@pytest.mark.parametrize("seed", range(3))
def test_any_chunks_make_the_whole_utterance(seed: int) -> None:
    plan, decoder = random.Random(seed), prepared()
    streams = [codes(plan.randint(1, 80), 1000 * seed + i) for i in range(7)]
    states, waves, left = (
        [decoder.new_state() for _ in streams],
        [[torch.empty(0)] for _ in streams],
        list(streams),
    )
    while any(map(len, left)):
        for i in [i for i, one in enumerate(left) if len(one) and plan.random() < 0.7]:
            part = left[i][: plan.choice((1, 2, 3, 4, 7, 8, 12, 25))]
            left[i] = left[i][len(part) :]
            waves[i] += hear(decoder, [states[i]], [part], last=not len(left[i]))
    for wave, stream in zip(waves, streams):
        check_close(torch.cat(wave), stream)
    assert graphs_of(decoder).arena.free == ROWS


def test_what_a_row_held_before_is_not_heard() -> None:
    decoder = prepared()
    with torch.inference_mode():
        graphs_of(decoder).arena.values.fill_(math.nan)
        torch.cuda.synchronize()
    stream = codes(5, 0)
    for rows in (1, 3):
        for wave in hear(decoder, [decoder.new_state() for _ in range(rows)], [stream] * rows, last=True):
            check_close(wave, stream)


def test_a_voice_of_another_thread_starts_streams() -> None:
    """It is made on another CUDA stream, behind other work, and its memory is given up while streams read
    it."""
    decoder, reference, new = prepared(), codes(40, 1), codes(12, 2)
    (wanted,) = exact().decode([torch.cat((reference, new))])
    (whole,) = launched().decode([torch.cat((reference, new))])
    behind = 40 * decoder.samples_per_frame
    for _ in range(5):
        voices: list[CodecState] = []

        def make(voices: list[CodecState] = voices) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(20_000_000)
                voices.append(decoder.new_state())
                decoder.decode_chunk(voices, [reference])

        maker = threading.Thread(target=make)
        maker.start()
        maker.join()
        states = [voices[0].copy() for _ in range(3)]
        started = decoder.start_chunks(states, [new] * 3, [True] * 3)
        voices.clear()
        junk = [
            torch.full((decoder.state_size,), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(8)
        ]
        started.wait()
        for at in range(3):
            found = torch.from_numpy(started.of(at)).cuda()
            assert error(found, wanted[behind:]) <= BOUND * error(whole[behind:], wanted[behind:])
        started.release()
        del junk


def test_streams_beyond_the_arena_are_heard_as_well() -> None:
    decoder, stream = prepared(), codes(15, 9)
    states = [decoder.new_state() for _ in range(ROWS + 6)]
    waves = [[wave] for wave in hear(decoder, states, [stream[:4]] * len(states))]
    for wave, more in zip(waves, hear(decoder, states, [stream[4:]] * len(states), last=True)):
        wave.append(more)
    for wave in (waves[0], waves[-1]):
        check_close(torch.cat(wave), stream)
    assert graphs_of(decoder).arena.free == ROWS


def test_three_hundred_streams_that_come_and_go_leave_nothing() -> None:
    """A third are ended at a random point; what the others hear is their speech; all rows and all memory
    are free at the end."""
    decoder, plan = prepared(), random.Random(4)
    stage: CodecStage = CodecStage(decoder, 256, decoder.device)
    chunks = [1, 2, 4, 8, 12, 12, 12]

    def converse(seed: int, heard: dict[int, Tensor]) -> None:
        own, stream = random.Random(seed), codes(random.Random(seed).randint(3, 45), seed)
        state, inbox, place = stage.new_state(), Inbox(), 0
        ends_after = own.randint(0, 6) if own.random() < 1 / 3 else None
        waves: list[np.ndarray] = []
        for turn, size in enumerate(chunks):
            part = stream[place : place + size].numpy()
            place += len(part)
            stage.decode_chunk(
                part,
                inbox.items.put,
                state,
                last=place == len(stream),
                deadline=0.0 if not turn else own.random(),
            )
            if turn == ends_after:
                stage.end(state)
                outcome = inbox.items.get(timeout=SECONDS)
                assert isinstance(outcome, np.ndarray) or outcome.code is ErrorCode.SYNTH_ABORTED
                return
            waves.append(inbox.take())
            if place == len(stream):
                break
        if place == len(stream):
            heard[seed] = torch.from_numpy(np.concatenate(waves))
        stage.end(state)

    for _ in range(2):
        heard: dict[int, Tensor] = {}
        faults: list[Exception] = []

        def guarded(seed: int, heard: dict[int, Tensor] = heard, faults: list[Exception] = faults) -> None:
            try:
                converse(seed, heard)
            except Exception as fault:  # noqa: BLE001 - the test's thread tells
                faults.append(fault)

        waiting = [threading.Thread(target=guarded, args=(seed,)) for seed in plan.sample(range(10_000), 150)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        assert not faults
        for seed in list(heard)[:12]:
            check_close(heard[seed], codes(random.Random(seed).randint(3, 45), seed))
        assert graphs_of(decoder).arena.free == ROWS
    stage.close()


def test_whole_utterances_beside_streams_are_the_same_bits() -> None:
    """In reproducible mode, where no sample depends on its company: utterances beside streams, and streams
    among others."""
    decoder = prepared(True)
    stage: CodecStage = CodecStage(decoder, 256, decoder.device)
    utterances = [codes(frames, frames) for frames in (30, 61, 100, 17)]
    alone = decoder.decode(utterances)
    speech = codes(27, 5)
    single = torch.cat(
        [
            hear(decoder, [state], [part])[0]
            for state in [decoder.new_state()]
            for part in speech.split([1, 2, 4, 8, 12])
        ]
    )
    stop, streamed = threading.Event(), list[Tensor]()

    def stream_on() -> None:
        while not stop.is_set():
            states, inboxes = [stage.new_state() for _ in range(5)], [Inbox() for _ in range(5)]
            waves: list[list[np.ndarray]] = [[] for _ in states]
            for part in speech.split([1, 2, 4, 8, 12]):
                for state, inbox in zip(states, inboxes):
                    stage.decode_chunk(part.numpy(), inbox.items.put, state)
                for wave, inbox in zip(waves, inboxes):
                    wave.append(inbox.take())
            streamed.extend(torch.from_numpy(np.concatenate(wave)) for wave in waves)

    streaming = threading.Thread(target=stream_on)
    streaming.start()
    try:
        for _ in range(10):
            inboxes = [Inbox() for _ in utterances]
            for one, inbox in zip(utterances, inboxes):
                stage.decode(one.numpy(), inbox.items.put)
            for wanted, inbox in zip(alone, inboxes):
                assert torch.equal(torch.from_numpy(inbox.take()), wanted.cpu())
    finally:
        stop.set()
        streaming.join()
        stage.close()
    assert streamed
    assert all(torch.equal(wave, single) for wave in streamed)


def test_memory_stays_as_it_is_over_two_thousand_chunks() -> None:
    decoder, part = prepared(), {frames: codes(frames, frames) for frames in (1, 2, 3, 4, 8, 12)}
    plan = random.Random(0)

    def chunks(count: int) -> None:
        done = 0
        while done < count:
            states = [decoder.new_state() for _ in range(plan.choice((1, 5, 40)))]
            for frames in (1, 2, 4, 8, plan.choice((3, 12))):
                hear(decoder, states, [part[frames]] * len(states), last=frames in (3, 12))
                done += len(states)

    chunks(500)
    torch.cuda.synchronize()
    buffers, before = len(graphs_of(decoder).buffers), torch.cuda.memory_stats()
    chunks(2000)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for figure in ("allocated_bytes.all.current", "reserved_bytes.all.current"):
        assert after[figure] == before[figure], figure
    assert len(graphs_of(decoder).buffers) == buffers
    assert graphs_of(decoder).arena.free == ROWS

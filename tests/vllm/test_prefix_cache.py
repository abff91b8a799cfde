"""What frames of speech share through the prefix cache of our schedulers, real and without a model: KV
that is theirs, and all of it."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.rounds import turn_until
from tests.support.vllm_kit import require_vllm

require_vllm()

from pipelines.fish_speech.model import as_extra  # noqa: E402
from pipelines.tokens import TokenPrompt  # noqa: E402
from tests.support.scheduler_rig import BLOCK, Run, hashed, scheduler  # noqa: E402

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402  # isort: skip
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402  # isort: skip

from pipelines.vllm_engine.scheduler import AsyncGroupScheduler, GroupScheduler  # noqa: E402

#: Ids of frames; every sequence draws the same ones, and residual codes of its own.
SEMANTIC = range(1000, 1002)
KINDS = [GroupScheduler, AsyncGroupScheduler]
Frames = NDArray[np.int64]


def frames(count: int, seed: int) -> Frames:
    """int64 [count, 3]: the same first codes for every seed."""
    first = np.arange(count) * 7 // 3 % 2
    return np.column_stack((first, np.random.default_rng(seed).integers(0, 1000, (count, 2))))


@cache
def system(voice: int | None) -> tuple[tuple[int, ...], Frames]:
    """Ids and frames of a system message: a few words, and the recording of a voice."""
    spoken = frames(0 if voice is None else 3 * BLOCK - 5, 100 + (voice or 0))
    return (*range(10, 31), *(spoken[:, 0] + SEMANTIC.start), 5), spoken


class Item:
    """The turns of a dialogue so far."""

    def __init__(self, name: str, voice: int | None, turns: int) -> None:
        self.name, self.left, self.turn = name, turns, 0
        ids, spoken = system(voice)
        self.ids, self.parts = list(ids), [spoken]

    def ask(self) -> TokenPrompt:
        self.ids += range(40, 47)
        self.left, self.turn = self.left - 1, self.turn + 1
        return TokenPrompt(tuple(self.ids), np.concatenate(self.parts))

    def answer(self, spoken: Frames) -> None:
        self.ids += [*(spoken[:, 0] + SEMANTIC.start), 5]
        self.parts.append(spoken)


class Memory(Run):
    """A run whose blocks of KV are real: what stands at a position names all frames up to it, and is
    looked at before every step."""

    def __init__(self, kind: Any, blocks: int, step_tokens: int = 128) -> None:
        super().__init__(
            scheduler(kind, 8, blocks, step_tokens, caching=True, gather_seconds=0.0),
            issubclass(kind, AsyncScheduler),
        )
        self._kv: dict[tuple[int, int], bytes] = {}
        self._tables: dict[str, list[int]] = {}
        #: Of every sequence: its columns by position, what its KV is at each of them, and positions that it
        #: drew nothing before.
        self._columns: dict[str, list[tuple[int, ...]]] = {}
        self._own: dict[str, list[bytes]] = {}
        self._entered: dict[str, int] = {}
        self.asked: dict[str, Any] = {}
        #: Positions that a sequence found in the cache when it first entered.
        self.found: dict[str, int] = {}
        self.preempted = 0

    def ask(self, name: str, prompt: TokenPrompt, most: int) -> None:
        request = hashed(name, list(prompt.ids), most, **as_extra(prompt, SEMANTIC))
        spoken = iter(prompt.codes.tolist())
        self._columns[name] = [
            (token, *next(spoken)) if token in SEMANTIC else (token,) for token in prompt.ids
        ]
        self._own[name], self.asked[name] = [], request
        self.scheduler.add_request(request)

    def drawn(self, name: str) -> Frames:
        request = self.asked[name]
        return np.array(
            [column[1:] for column in self._columns[name][request.num_prompt_tokens : request.num_tokens]]
        )

    def finish(self) -> None:
        turn_until(lambda: not self.scheduler.has_unfinished_requests(), self.step)

    def _model(self, planned: Any) -> Any:
        self._take_blocks(planned)
        made: list[list[int]] = []
        for name, count in planned.num_scheduled_tokens.items():
            end = self.asked[name].num_computed_tokens
            self._compute(name, end - count, end)
            made.append([self._draw(name, end)] if end >= self._entered[name] else [])
        names = list(planned.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=made,
        )

    def _take_blocks(self, planned: Any) -> None:
        for one in planned.scheduled_new_reqs:
            self._tables[one.req_id] = list(one.block_ids[0])
            self._entered[one.req_id] = self.asked[one.req_id].num_tokens
            self.found.setdefault(one.req_id, one.num_computed_tokens)
        cached = planned.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids):
            if name in cached.resumed_req_ids:
                self._tables[name], self._entered[name] = [], self.asked[name].num_tokens
                self.preempted += 1
            self._tables[name] += new[0] if new is not None else []

    def _compute(self, name: str, start: int, end: int) -> None:
        columns, own, table = self._columns[name], self._own[name], self._tables[name]
        for column in columns[len(own) : end]:
            own.append(hashlib.sha256((own[-1] if own else b"") + repr(column).encode()).digest())
        for at in range(start):
            assert self._kv[table[at // BLOCK], at % BLOCK] == own[at], (
                f"{name} reads KV at {at} that is not its own"
            )
        for at in range(start, end):
            self._kv[table[at // BLOCK], at % BLOCK] = own[at]

    def _draw(self, name: str, position: int) -> int:
        token = SEMANTIC.start + position // 3 % 2
        residual = random.Random(f"{name} {position}").randrange(1 << 30)
        self._columns[name][position:] = [(token, token - SEMANTIC.start, residual & 1023, residual >> 20)]
        return token


def full(prompt: TokenPrompt) -> int:
    """Positions of a prompt in whole blocks; its last position is always computed."""
    return (len(prompt.ids) - 1) // BLOCK * BLOCK


def speak(run: Memory, name: str, prompt: TokenPrompt, most: int = 2 * BLOCK) -> Frames:
    run.ask(name, prompt, most)
    run.finish()
    return run.drawn(name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_voice_is_prefilled_once_and_answers_are_private(kind: Any) -> None:
    run = Memory(kind, 200)
    message, words = len(system(1)[0]) // BLOCK * BLOCK, 21 // BLOCK * BLOCK
    prompts = {name: Item(name, voice, 1).ask() for name, voice in (("a", 1), ("b", 1), ("other", 2))}
    for name, prompt in prompts.items():
        assert speak(run, name, prompt).shape == (2 * BLOCK, 3)
    assert prompts["b"].ids == prompts["other"].ids
    assert run.found == {"a": 0, "b": full(prompts["b"]), "other": words}
    assert full(prompts["b"]) >= message > words


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_shares_what_was_asked_before_it_and_no_answer_of_another_item(kind: Any) -> None:
    run = Memory(kind, 200)
    items = [Item(f"i{number}", 1, 2) for number in range(3)]
    first = [item.ask() for item in items]
    answers = [speak(run, f"{item.name}-0", prompt) for item, prompt in zip(items, first)]
    assert np.array_equal(answers[0][:, 0], answers[1][:, 0])
    assert not np.array_equal(answers[0], answers[1])
    # The last one goes on as the first one did: its answer is other frames with equal ids, or the very same.
    for item, answer in zip(items, [answers[0], answers[1], answers[0]]):
        item.answer(answer)
    second = [item.ask() for item in items]
    assert second[0].ids == second[1].ids
    for item, prompt in zip(items, second):
        speak(run, f"{item.name}-1", prompt)
    assert [run.found[f"{item.name}-1"] for item in items] == [
        full(first[0]),
        full(first[1]),
        full(second[0]),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [500, 36])
def test_nobody_ever_reads_kv_of_others_frames(kind: Any, blocks: int) -> None:
    """Items of few voices and of equal ids come at any time, turn by turn; with few blocks they lose
    theirs and read them again."""
    run, dice = Memory(kind, blocks, 64), random.Random(blocks)
    under_way: dict[str, Item] = {}

    def ask(item: Item) -> None:
        name = f"{item.name}-{item.turn}"
        under_way[name] = item
        run.ask(name, item.ask(), dice.choice((BLOCK, 2 * BLOCK, 3 * BLOCK)))

    for moment in range(260):
        if moment < 200 and dice.random() < 0.4 and len(under_way) < 12:
            ask(Item(f"i{moment}", dice.choice((None, 1, 2)), dice.choice((1, 2, 3))))
        run.step()
        for name in [name for name in under_way if run.asked[name].is_finished()]:
            item = under_way.pop(name)
            if item.left:
                item.answer(run.drawn(name))
                ask(item)
    run.finish()
    assert sum(run.found.values()) > 1000, "hardly anything was found in the cache"
    assert bool(run.preempted) == (blocks == 36)
    run.step()
    assert run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1

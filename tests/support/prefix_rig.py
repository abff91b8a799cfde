"""An engine on a device without a model, whose pages tell what was written to them: who owns a page, and
what its reader finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.reference import ENDED, NOT_FINITE
from pipelines.engine.core import EngineOptions, engine_failure
from pipelines.engine.executor import FrameCodes, FrameExecutor, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.scheduler import GenerationRequest, PromptPrefix, Utterance
from pipelines.engine.state import PagedKV, SamplingParams, SlotState
from tests.support.attention_layers import SMALLEST
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import Recorder

PAGE = 4
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt whose embeddings are numbers: those of a voice, then its own."""

    numbers: tuple[int, ...]
    trailing = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.numbers)


def request(
    number: int,
    voice: int,
    shared: int,
    own: int,
    frames: int = 3,
    stream: bool = False,
    within: Sequence[int] = (),
) -> GenerationRequest:
    """One that ends after so many frames, and whose prompt begins with the `shared` positions of a voice,
    and shorter ones `within` it."""
    numbers = [100 * voice + at for at in range(shared)] + [10_000 + 100 * number + at for at in range(own)]
    prefixes = [PromptPrefix(bytes([voice, length]), length) for length in (*within, shared) if length]
    return GenerationRequest(
        f"r{number}", Prompt(tuple(numbers)), SamplingParams(), frames, 10, stream, prefixes=prefixes
    )


def numbers_of(utterance: Utterance) -> tuple[int, ...]:
    assert isinstance(utterance.request.prompt, Prompt)
    return utterance.request.prompt.numbers


class Device(FrameExecutor):
    """An executor without a model. The keys are the numbers of prompts, and of frames their positions
    below zero: a page tells what it has.

    A request whose context holds NaN gets NaN.
    """

    name, reproducible = "numbers", True

    def __init__(self, slots: int, pages: int, lag: int) -> None:
        self.batch_sizes, self.lag = (slots,), lag
        self.kv = PagedKV(SMALLEST, pages, PAGE)
        self.keys = self.kv.k[0, :, 0, :, 0].numpy()
        self.state = SlotState(slots, 1, 2, 16, 4, 0, torch.float32, CPU)
        self.running: list[Utterance] = []
        #: Raised by the next prefill or frame, after its first chunk.
        self.fault: Exception | None = None
        #: The next frame writes NaN at this position of its first row.
        self.nan_at: int | None = None
        #: Chunks that were prefilled: (slot, start, positions).
        self.chunks: list[tuple[int, int, int]] = []

    def embed(self, prompts: Sequence[Any]) -> list[Tensor]:
        return [torch.tensor(prompt.numbers, dtype=torch.float32)[:, None] for prompt in prompts]

    def take_text(self, ids: object) -> None:
        """Text costs nothing."""

    def prepare(self) -> bool:
        return False

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        for run in runs:
            self.chunks.append((run.slot, run.start, len(run.embeddings)))
            self._write(self._owner(run.slot), run.start, run.embeddings[:, 0].numpy())
            self._break()

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        self._break()
        flags = np.zeros((count, len(slots)), np.uint8)
        for row, slot in enumerate(slots):
            utterance, at = self._owner(slot), int(self.state.positions[slot])
            self._write(utterance, at, -1.0 - np.arange(at, at + count))
            if self.nan_at is not None:
                where, self.nan_at = self.nan_at % (at + 1), None
                self.keys[utterance.pages[where // PAGE], where % PAGE] = np.nan
            flags[max(utterance.request.seed - utterance.started, 0) :, row] = ENDED
            if np.isnan(self.context(utterance)[: at + 1]).any():
                flags[:, row] = NOT_FINITE
            self.state.positions[slot] += count
        made = FrameCodes(
            np.zeros((count, len(slots), 1), np.int64), flags, np.zeros(flags.shape, np.float32)
        )
        return lambda: made

    def context(self, utterance: Utterance) -> np.ndarray:
        """The keys of an utterance in the order of positions."""
        return self.keys[utterance.pages].ravel()

    def _owner(self, slot: int) -> Utterance:
        (found,) = (one for one in self.running if one.slot == slot)
        assert self.state.page_table[slot, : len(found.pages)].tolist() == found.pages
        return found

    def _write(self, utterance: Utterance, start: int, numbers: np.ndarray) -> None:
        for at, number in enumerate(numbers, start):
            page = utterance.pages[at // PAGE]
            assert page in utterance.pages[utterance.shared_pages :], (
                "a page that others can read was written"
            )
            self.keys[page, at % PAGE] = number

    def _break(self) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault


class Run:
    """An engine on such a device, and what was asked of it."""

    def __init__(
        self,
        slots: int = 3,
        pages: int = 14,
        lag: int = 0,
        frames_per_turn: int = 1,
        prefill_tokens: int = 12,
    ) -> None:
        self.device, self.heard = Device(slots, pages, lag), Recorder()
        options = EngineOptions(
            slots,
            pages,
            PAGE,
            64,
            prefill_chunk=6,
            prefill_tokens=prefill_tokens,
            reserve_frames=2,
            frames_per_turn=frames_per_turn,
        )
        self.core = ListenedCore(self.device, options, self.heard)
        self.device.running = self.core.scheduler.running
        self.asked: list[GenerationRequest] = []

    def add(self, *requests: GenerationRequest) -> None:
        for one in requests:
            self.core.add(one)
            self.asked.append(one)

    def step(self, turns: int = 1) -> None:
        for _ in range(turns):
            try:
                self.core.step()
            except RuntimeError as error:
                self.core.fail_all(engine_failure(error))
            self.check()

    def end(self) -> None:
        for _ in range(1000):
            if not self.core.busy:
                break
            self.step()
        assert not self.core.busy, "the engine never came to rest"
        assert Counter(self.asked) == Counter([*self.heard.codes, *self.heard.errors])
        for one, codes in self.heard.codes.items():
            assert len(codes) == min(one.seed, one.max_tokens - 1)
        assert self.core.scheduler.prefixes.free == self.device.kv.pages

    def check(self) -> None:
        """Each page has one owner, or is of a prefix with its users; each utterance reads what is its own,
        from first to last."""
        running, cache, kv = self.core.scheduler.running, self.core.scheduler.prefixes, self.device.kv
        unused, known, free = cache._unused, set(cache.known.values()), kv.free
        users = Counter(prefix for one in running if one.shared is not None for prefix in one.shared.chain)
        assert {prefix: prefix.users for prefix in users} == users
        assert not any(prefix.users or prefix.invalid for prefix in unused)
        in_use = [page for prefix in users for page in prefix.pages] + [
            page for one in running for page in one.pages[one.shared_pages :]
        ]
        assert all(
            one.pages[: one.shared_pages] == one.shared.all_pages for one in running if one.shared is not None
        )
        left = [page for prefix in unused for page in prefix.pages]
        assert sorted([*free, *cache._unclean, *left, *in_use]) == list(range(1, kv.pages + 1))
        assert cache.free == kv.pages - len(in_use)
        assert {prefix for prefix in users if not prefix.invalid} | set(unused) == known
        assert np.isfinite(self.device.keys[free]).all(), "NaN was left in free pages"
        for one in running:
            last, found = len(one.request.prompt) - 1, self.device.context(one)
            wanted = [*numbers_of(one)[: one.prefilled], *[-1 - at for at in range(last, last + one.started)]]
            found = np.concatenate((found[: one.prefilled], found[last : last + one.started]))
            assert np.array_equal(found[np.isfinite(found)], np.array(wanted)[np.isfinite(found)])

    @property
    def known(self) -> set[bytes]:
        return {prefix.content for prefix in self.core.scheduler.prefixes.known.values()}

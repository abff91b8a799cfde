"""Dialogues of Fish Speech S2 on our own engine: a turn prefills only what is new, and says what it says
without shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipelines.engine.engine import Engine, NativeHost
from pipelines.engine.executor import EagerExecutor, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.scheduler import PromptPrefix
from pipelines.fish_speech.model import shared_prefixes
from pipelines.fish_speech.pipeline import TurnPlan
from pipelines.fish_speech.prompt import Conversation, Reference
from pipelines.tokens import TokenPrompt, TokenSampling
from tests.support.evictions import Evictions
from tests.support.fish_turns import Asked
from tests.support.vllm_kit import Waiter
from tests.unit.pipelines.test_fish_native import CONFIG, OPTIONS, SECONDS, VOCABULARY, model, voice

TEXTS = (
    "Good morning, how are you today?", "I am well.", "That is nice to hear.", "It rains.", "There are 12 months in a year.",
    "Do not wake the baby.", "The train to the city leaves at nine.", "See you then.",
)  # fmt: skip
PAGE = OPTIONS.page_size


class WatchedExecutor(EagerExecutor):
    """Counts the positions that it prefills, and remembers the context that the first frame of each run of
    a request reads."""

    def __init__(self, slots: int, pages: int) -> None:
        super().__init__(model(), replace(OPTIONS, slots=slots, pages=pages, page_size=PAGE))
        self.prefilled: list[int] = []
        self.contexts: list[bytes] = []

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        self.prefilled += [len(run.embeddings) for run in runs]
        super().prefill(runs)

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        for slot in slots:
            if self.state.frames[slot] == 0:
                self.contexts.append(self._context(slot))
        return super().frames(slots, count, settings)

    def _context(self, slot: int) -> bytes:
        pages, length = self.state.page_table[slot], int(self.state.positions[slot])
        layers = zip(self.kv.k, self.kv.v)
        return b"".join(
            cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].numpy().tobytes()
            for layer in layers
            for cache in layer
        )


class Rig:
    """An engine of dialogues, and what happened in it."""

    def __init__(self, share: bool = True, forgetful: bool = False, slots: int = 6, pages: int = 128) -> None:
        """`share`: whether prompts name prefixes; `forgetful`: whether those that nobody reads are gone
        before each prompt."""
        self.executor = WatchedExecutor(slots, pages)
        engine = Engine(self.executor, OPTIONS)
        prefixes = engine.core.scheduler.prefixes
        self.evictions = Evictions(engine.core)

        def named(prompt: TokenPrompt) -> Sequence[PromptPrefix]:
            if forgetful:
                prefixes.clear()
            return shared_prefixes(prompt, CONFIG.semantic) if share else ()

        ids = np.array([*CONFIG.semantic, CONFIG.end])
        self.host = NativeHost(engine, ids, named, CONFIG.codebooks)

    def close(self) -> None:
        self.host.close()


@dataclass
class Dialogue:
    """What one is asked for. Its prompts are known once it was spoken."""

    texts: Sequence[str] = TEXTS
    voices: Sequence[Reference] = ()
    seed: int = 1
    most: int = 9
    prompts: list[TokenPrompt] = field(default_factory=list[TokenPrompt])

    def plan(self) -> TurnPlan:
        self.prompts = []
        sampling = TokenSampling(self.most, 1.2, 0, 1.0, seed=self.seed, stop_ids=(CONFIG.end,))
        conversation = Conversation(VOCABULARY, CONFIG.codebooks, self.voices)
        ask = conversation.ask

        def asked(text: str, more: bool = False) -> TokenPrompt:
            self.prompts.append(ask(text, more))
            return self.prompts[-1]

        conversation.ask = asked
        return TurnPlan(
            f"d{self.seed}",
            conversation,
            self.texts,
            sampling,
            None,
            OPTIONS.max_context,
            keep_unfinished=True,
            frames_per_second=CONFIG.frames_per_second,
        )


def spoken(rig: Rig, *dialogues: Dialogue) -> list[NDArray[np.int64]]:
    waiters = [Waiter() for _ in dialogues]
    for one, waiter in zip(dialogues, waiters):
        Asked(rig.host, one.plan(), waiter)
    found = [waiter.future.result(SECONDS).codes for waiter in waiters]
    return [codes for codes in found if codes is not None]


def test_a_turn_of_a_dialogue_prefills_what_is_new_since_the_prompt_before_it() -> None:
    dialogue = Dialogue(voices=[voice()])
    with closing(Rig(share=False)) as rig:
        (wanted,) = spoken(rig, dialogue)
        before = sum(rig.executor.prefilled)
    with closing(Rig()) as rig:
        (found,) = spoken(rig, dialogue)
        after = sum(rig.executor.prefilled)
    np.testing.assert_array_equal(found, wanted)
    assert len(dialogue.prompts) == len(TEXTS) == 8
    lengths = [len(prompt) - 1 for prompt in dialogue.prompts]
    assert before == sum(lengths)
    assert after == lengths[-1] + sum(length % PAGE for length in lengths[:-1]), (
        "only what does not fill a page is prefilled again"
    )
    assert (before, after) == (2036, 420), "positions of all eight turns, as docs/fish-speech.md says"


def test_found_and_computed_again_a_turn_reads_equal_bits() -> None:
    dialogue = Dialogue(voices=[voice()])
    rigs = [Rig(), Rig(forgetful=True)]
    for rig in rigs:
        with closing(rig):
            spoken(rig, dialogue)
    known, forgotten = (rig.executor for rig in rigs)
    assert sum(known.prefilled) < sum(forgotten.prefilled) / 3
    assert len(known.contexts) == 8
    assert known.contexts == forgotten.contexts


def test_answers_of_equal_ids_and_other_codes_are_other_dialogues() -> None:
    found: list[Sequence[PromptPrefix]] = []
    for residual in (0, 1):
        conversation = Conversation(VOCABULARY, CONFIG.codebooks, [voice()])
        conversation.ask(TEXTS[0], more=True)
        conversation.answer(voice(residual).codes)
        conversation.ask(TEXTS[1], more=True)
        conversation.answer(voice().codes)
        found.append(shared_prefixes(conversation.ask(TEXTS[2]), CONFIG.semantic))
    one, other = found
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False]
    assert len({prefix.content for prefix in one}) == 3


def test_dialogues_say_the_same_alone_and_in_any_mix() -> None:
    """Of one voice and of others, of equal texts with other answers, with too few pages for all: prefixes
    go, turns start again."""
    dialogues = [Dialogue(voices=[voice()], seed=seed, texts=TEXTS[:5]) for seed in (1, 2)]
    dialogues += [
        Dialogue(voices=[voice(residual)], seed=3, texts=TEXTS[2:6], most=30) for residual in (0, 1)
    ]
    dialogues += [
        Dialogue(seed=4, texts=TEXTS[4:], most=20),
        Dialogue(voices=[voice()], seed=5, texts=TEXTS[:1], most=40),
    ]
    alone: list[NDArray[np.int64]] = []
    for one in dialogues:
        with closing(Rig(share=False)) as rig:
            alone += spoken(rig, one)
    assert not np.array_equal(alone[0], alone[1]), "equal texts, other answers"
    with closing(Rig(pages=36)) as rig:
        together = spoken(rig, *dialogues, *dialogues[:2])
        assert rig.evictions.prefixes
        assert rig.evictions.restarts
    for found, wanted in zip(together, [*alone, *alone[:2]]):
        np.testing.assert_array_equal(found, wanted)

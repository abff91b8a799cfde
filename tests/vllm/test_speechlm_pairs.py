"""SpeechLM's pairs on vLLM's V2 runner with little of everything: KV for a few requests, and halves that die."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.vllm_v2 import require_v2

require_v2()

from pipelines.errors import ErrorCode, NightjarError  # noqa: E402
from pipelines.options import TokenModelOptions  # noqa: E402
from pipelines.speechlm.lm import Script, StreamSampling  # noqa: E402
from pipelines.tokens import TokenRequest  # noqa: E402
from tests.conformance.speechlm import Golden  # noqa: E402
from tests.conformance.speechlm_vllm import Heard, Opened  # noqa: E402
from tests.support.vllm_kit import kill_core  # noqa: E402

import torch  # noqa: E402  # isort: skip

GOLDEN = Path(__file__).parents[1] / "golden" / "speechlm"
SECONDS = 300
#: Cases that differ from others in what no engine sees, or by length alone.
LEFT_OUT = {
    "a0_cfg10",
    "a1_cfg05",
    "u_b_norm",
    "u_c_norm",
    "max_rows0",
    "max_rows5",
    "max_rows7",
    "long",
    "t_think",
    "a2_cfg15_min",
    "a2_cfg30_max",
}


@pytest.fixture(scope="module")
def golden() -> Golden:
    torch.set_num_threads(1)
    return Golden(GOLDEN, torch.device("cpu"))


@pytest.fixture(scope="module")
def opened(golden: Golden) -> Iterator[Opened]:
    """Prompts of a pair have up to 240 positions: KV has room for two to six requests."""
    options = TokenModelOptions(max_context=256, slots=24)
    opened = Opened(golden, options, block_size=32, num_gpu_blocks_override=26)
    yield opened
    opened.close()


def test_the_cases_equal_the_plain_loop_through_preemptions(opened: Opened, golden: Golden) -> None:
    opened.check(name for name in golden.cases if name not in LEFT_OUT)
    assert opened.host.moment.preemptions > 0, "nothing was preempted: this test needs less KV"
    assert opened.host.stats().kv_use == 0.0, "blocks are left behind"


def test_staggered_arrivals_change_nothing(opened: Opened, golden: Golden) -> None:
    for batch in golden.content["batches"]:
        if "arrival_step" in batch:
            opened.check(batch["members"], batch["arrival_step"])


def drawn(golden: Golden, name: str, seed: int) -> Script:
    script = replace(golden.script(golden.cases[name]), request_id=f"{name}-{seed}", seed=seed, max_tokens=60)
    return replace(script, text=StreamSampling(0.6, 20), audio=StreamSampling(0.8, 20, 0.95))


def test_draws_are_those_of_the_plain_loop_alone_and_together(opened: Opened, golden: Golden) -> None:
    names = ("a0", "a0_cfg30", "t_eot", "u_d", "short_cfg", "a2_cfg15", "max_rows9")
    scripts = [drawn(golden, name, seed) for seed, name in enumerate(names, 1)]
    # One that draws among all text: its neighbours' draws must not notice.
    scripts.append(replace(drawn(golden, "t_think", 40), text=StreamSampling(1.0, 0)))
    expected = [golden.oracle.write(script) for script in scripts]
    assert any(one.rows for one in expected)
    asked = [opened.ask(script) for script in scripts]
    for script, heard, written in zip(scripts, asked, expected):
        ids, rows = heard.result(SECONDS)
        assert ids == written.ids, script.request_id
        assert rows.tolist() == written.rows, script.request_id
    assert opened.ask(scripts[1]).result(SECONDS)[0] == expected[1].ids


def test_a_pair_whose_half_dies_is_redone(
    opened: Opened, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first null branch is given fewer tokens than its partner, so it ends early: no row may be drawn
    without it."""
    submit = opened.host.submit
    cut: list[TokenRequest] = []

    def cutting(request: TokenRequest, receiver: Heard) -> None:
        if request.shadow is not None and not cut:
            cut.append(request)
            sampling = replace(request.shadow.sampling, max_tokens=5)
            request = replace(request, shadow=None), replace(request.shadow, sampling=sampling)
            submit(request[1], Ignored())
            request = request[0]
        submit(request, receiver)

    monkeypatch.setattr(opened.host, "submit", cutting)
    case = golden.cases["a2_cfg15"]
    other = opened.ask(golden.script(golden.cases["a3"]))
    heard = opened.ask(golden.script(case))
    golden.check_written(case, *heard.result(SECONDS))
    golden.check_written(golden.cases["a3"], *other.result(SECONDS))
    assert cut
    assert heard.redone == 1


class Ignored:
    """Receives a sequence that nobody waits for."""

    streamed = False

    def tokens(self, *_: object) -> None: ...

    def finished(self, *_: object) -> None: ...

    def failed(self, *_: object) -> None: ...


def test_aborted_pairs_leave_nothing_behind(opened: Opened, golden: Golden) -> None:
    dice = random.Random(5)
    case = golden.cases["a2_cfg30"]
    asked = [opened.ask(replace(golden.script(case), request_id=f"gone-{n}")) for n in range(6)]
    kept = opened.ask(golden.script(case))
    for n in dice.sample(range(6), 6):
        asked[n].cancel()
    golden.check_written(case, *kept.result(SECONDS))
    for heard in asked:
        with pytest.raises(Exception, match=r"aborted|closed"):
            heard.result(SECONDS)
    deadline = time.monotonic() + SECONDS
    while (opened.host.stats().running, opened.host.stats().waiting) != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_core_fails_its_pairs_whole(opened: Opened, golden: Golden) -> None:
    """The last test of the module: nothing runs on this core any more."""
    case = golden.cases["a2_cfg30"]
    asked = [opened.ask(replace(golden.script(case), request_id=f"lost-{n}")) for n in range(4)]
    while not all(heard.paired or heard.future.done() for heard in asked):
        time.sleep(0.005)
    kill_core(os.getpid())
    for heard in asked:
        error = heard.future.exception(SECONDS)
        assert error is None or (isinstance(error, NightjarError) and error.code is ErrorCode.WORKER_CRASH)
    assert (opened.host.stats().running, opened.host.stats().waiting) == (0, 0)
    assert opened.host.stats().state == "broken"

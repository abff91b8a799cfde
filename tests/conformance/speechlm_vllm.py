"""SpeechLM's golden cases on vLLM's V2 runner: all together, in guided pairs, one after the other, and
staggered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, SynthesisError
from pipelines.options import TokenModelOptions
from pipelines.request import Event, Failed, Listener
from pipelines.speechlm.config import SpeechLmConfig
from pipelines.speechlm.lm import Script, model_spec, read_output
from pipelines.speechlm.pipeline import SpeechLmRequestInfo, SpeechLmUtterance
from pipelines.vllm_engine.library import load_vllm, on_cpu
from tests.support.speechlm_checkpoint import named
from tests.support.vllm_v2 import v2_runner
from tests.support.wide_heads import widened

if TYPE_CHECKING:
    from pipelines.vllm_engine.host import VllmHost
    from tests.conformance.listing import Case
    from tests.conformance.speechlm import Golden, Item

SECONDS = 300
#: Cases that run alone as well: each kind of request once.
ALONE = ("max_rows8", "u_d", "short_cfg")


def cases(golden: Golden) -> Iterator[Case]:
    """Every case in one running batch, the golden batches, and a few alone; and one under every other name
    of the model."""
    opened = Opened(golden)
    try:
        for name in (name for name in ALONE if name in golden.cases):
            yield f"vllm alone {name}", lambda name=name: opened.check([name])
        yield "vllm together", lambda: opened.check(golden.cases)
        for batch in golden.content["batches"]:
            yield (
                f"vllm {batch['id']}",
                lambda batch=batch: opened.check(batch["members"], batch.get("arrival_step")),
            )
    finally:
        opened.close()
    lengths = {
        name: len(case["expected"]["stream0_ids"])
        for name, case in golden.cases.items()
        if case["expected"]["has_audio"]
    }
    for model_type in ("speechlm", "bagpiper"):
        if lengths and model_type != golden.model_type:
            shortest = min(lengths, key=lengths.__getitem__)
            yield f"vllm as {model_type} {shortest}", partial(_check_named, golden, model_type, shortest)


def _check_named(golden: Golden, model_type: str, case: str) -> None:
    """A case on the same checkpoint, whose config.json has another `model_type`."""
    opened = Opened(
        golden.under(named(model_type, golden.checkpoint)), TokenModelOptions(max_context=512, slots=4)
    )
    try:
        opened.check([case])
    finally:
        opened.close()


class Opened:
    """An engine on a golden folder's checkpoint, started at the first case."""

    def __init__(self, golden: Golden, options: TokenModelOptions | None = None, **engine: Any) -> None:
        self.golden = golden
        self._options = options or TokenModelOptions(max_context=512, slots=48)
        self._engine = engine
        self._stack = ExitStack()

    @cached_property
    def host(self) -> VllmHost:
        load_vllm()
        from pipelines.vllm_engine.host import VllmHost

        if on_cpu():
            self._stack.enter_context(v2_runner())
        spec = model_spec(SpeechLmConfig.from_folder(widened(self.golden.checkpoint)), share_prefixes=False)
        spec = replace(spec, engine={**spec.engine, **self._engine})
        return VllmHost(spec, replace(self._options, dtype="float32"))

    def close(self) -> None:
        if "host" in self.__dict__:
            self.host.close()
        self._stack.close()

    def ask(self, script: Script) -> Heard:
        """Sends a request as the pipeline does, guided audio and all."""
        golden, host = self.golden, self.host
        heard = Heard(SpeechLmRequestInfo("", 16_000, {}, True, golden.config, golden.coder, script))
        heard.engine = host
        heard.request_more(script.text_request(golden.config))
        return heard

    def check(self, names: Iterable[str], arrivals: list[int] | None = None) -> None:
        """Runs cases together; an arrival is a step of the engine, here a twentieth of a second."""
        asked: list[tuple[Item, Heard]] = []
        before = 0
        for name, arrival in zip(names, arrivals or [0] * 1000):
            time.sleep((arrival - before) / 20)
            before = arrival
            case = self.golden.cases[name]
            asked.append((case, self.ask(self.golden.script(case))))
        problems: list[str] = []
        for case, heard in asked:
            try:
                ids, rows = heard.result(SECONDS)
                self.golden.check_written(case, ids, rows)
                assert not heard.redone, f"its pair broke {heard.redone} times"
            except AssertionError as error:
                problems.append(f"{case['id']}: {error}")
        assert not problems, "; ".join(problems)


class Heard(SpeechLmUtterance):
    """A talker that keeps ids and rows instead of having them decoded."""

    def __init__(self, order: SpeechLmRequestInfo) -> None:
        #: Ids and rows, or what ended the request early.
        self.future: Future[Any] = Future()
        super().__init__(order, None, Listener(self._ended, lambda _done: None))  # pyright: ignore[reportArgumentType]

    def _ended(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.future.set_exception(event.error)

    def result(self, seconds: float) -> tuple[list[int], NDArray[np.int64]]:
        """Stream-0 ids as golden sets have them, and rows of codec token ids. Raises what ended the
        request early."""
        made: Any = self.future.result(seconds)
        return made

    def cancel(self) -> None:
        """Ends the text, or the audio behind it."""
        self._listener.cancel()
        self.engine.cancel(self.current)
        with suppress(InvalidStateError):
            self.future.set_exception(SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))

    @property
    def paired(self) -> bool:
        """Whether its audio was asked for."""
        return bool(self._before)

    @property
    def redone(self) -> int:
        """Times that its pair broke."""
        return self._redone

    def _deliver(self, ids: list[int], codes: NDArray[np.int64] | None, finished: bool) -> None:
        config = self._info.config
        answer = read_output(config, ids, codes, finished=finished)
        bases = config.codec_base_offset + config.codec_layer_size * np.arange(config.streams)
        made: Any = (answer.ids, answer.rows + bases)
        self.future.set_result(made)

"""SpeechLM's backbone on a GPU at its published size, dummy weights: text alone, eight streams, guidance pairs, in one run.

    python -m benchmarks.speechlm [--requests 512] [--prompt 120] [--steps 300] [--parts text,streams,mixed,pairs] [--tensor-parallel 1]
    python -m tests.support.vllm_v2 python -m benchmarks.speechlm --tiny --device cpu --requests 64 --prompt 20 --steps 36

`text` is text alone; `streams` draws all eight streams in every step; `mixed` writes text for two thirds of the steps and
then audio, and `pairs` does so with guidance, each request with a null branch of its own. A token is a stream-0 step of a request;
null branches do not count. Broken pairs are counted: under asynchronous scheduling there must be none. Needs vLLM. The second
command has vLLM's V2 runner in Triton's interpreter, whose steps are those of a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import ROOT, Bench, Row, environment_with, parser, read
from pipelines.errors import NightjarError
from pipelines.options import TokenModelOptions
from pipelines.speechlm.config import SpeechLmConfig
from pipelines.speechlm.lm import Script, StreamSampling, model_spec
from pipelines.tokens import TokenRequest, Tokens
from pipelines.vllm_engine.library import load_vllm

if TYPE_CHECKING:
    from pipelines.vllm_engine.host import VllmHost

#: The entry point by which vLLM's processes find our models.
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "nightjar"
GOLDEN = ROOT / "tests/golden/speechlm/checkpoint"
#: `text_config` and offsets as published (speechlm-qwen3-8b).
PUBLISHED_TEXT = {
    "vocab_size": 160_392, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
PUBLISHED = {
    "vocab_size": 160_392, "hidden_size": 4096, "codec_base_offset": 152_192, "codec_layer_size": 1025, "text_token_offset": 256,
    "text_token_end": 152_192, "adaptor_input_dim": 2048,
}  # fmt: skip


def write_shape(folder: Path, published: bool) -> SpeechLmConfig:
    """A folder with config.json alone: of the published size, or of the golden checkpoint's with heads
    that a CPU knows."""
    content: dict[str, Any] = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))
    content |= PUBLISHED if published else {}
    content["text_config"] |= PUBLISHED_TEXT if published else {"head_dim": 32}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return SpeechLmConfig.from_folder(folder)


def make_plugin_known(folder: Path) -> None:
    """Lets vLLM's own processes find our models where the package is not installed, as on a machine that
    has only a checkout."""
    if any(entry.name == PLUGIN for entry in entry_points(group=PLUGIN_GROUP)):
        return
    info = folder / "nightjar_bench-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nightjar-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[{PLUGIN_GROUP}]\n{PLUGIN} = pipelines.vllm_engine.plugin:register\n"
    )
    os.environ |= environment_with(folder)
    sys.path.insert(0, str(folder))


class Load(NamedTuple):
    """Requests of one kind: `text` steps, then `rows` of audio, guided where cfg is above 1."""

    load: str
    requests: int
    prompt: int
    text: int
    rows: int
    cfg: float = 1.0


class _Talk:
    """The receiver of one request: text first, then audio, both of fixed lengths."""

    streamed = False

    def __init__(
        self, load: Load, config: SpeechLmConfig, host: VllmHost, script: Script, done: threading.Semaphore
    ) -> None:
        self.load, self.config, self.host, self.script, self.done = load, config, host, script, done
        self.pair = self.broken = False
        self.failure = ""

    def start(self) -> None:
        if self.load.text:
            self._submit(self.script.text_request(self.config), self.load.text, ())
        else:
            self._ask_for_audio([])

    def tokens(self, ids: list[int], codes: Any) -> None: ...

    def finished(self, tokens: Tokens) -> None:
        if not self.pair and self.load.rows:
            self._ask_for_audio(list(tokens.ids))
            return
        self.broken = self.pair and tokens.finish == "stop"
        self.done.release()

    def failed(self, error: NightjarError) -> None:
        self.failure = str(error)
        self.done.release()

    def _ask_for_audio(self, written: Sequence[int]) -> None:
        self.pair, special = True, self.config.specials
        before = [special.text, *written, special.assistant, special.audio]
        request = self.script.audio_request(self.config, before, self.script.request_id)
        self._submit(request, self.load.rows, (special.pad,))

    def _submit(self, request: TokenRequest, steps: int, stops: tuple[int, ...]) -> None:
        """Asks for exactly `steps` steps, unless the pair breaks. A request that the engine refuses counts as failed, so that
        nothing waits for it."""

        def cut(one: TokenRequest) -> TokenRequest:
            sampling = replace(one.sampling, max_tokens=steps, stop_ids=stops, ignore_end=True)
            shadow = None if one.shadow is None else cut(one.shadow)
            return replace(one, sampling=sampling, shadow=shadow, extra={**one.extra, "min_rows": 1 << 20})

        try:
            self.host.submit(cut(request), self)
        except NightjarError as error:
            self.failed(error)


def run(load: Load, config: SpeechLmConfig, host: VllmHost) -> Row:
    """Runs a load to its end; tokens are stream-0 steps of the requests themselves, without null branches."""
    done, talks = threading.Semaphore(0), list[_Talk]()
    first, span = config.text_token_offset, config.text_token_end - config.text_token_offset
    for number in range(load.requests):
        body = (first + (number * 7919 + n * 104_729) % span for n in range(load.prompt - 1))
        name, prompt = f"{load.load}-{number}", [config.specials.bos, *body]
        draws = StreamSampling(0.6, 20), StreamSampling(0.8, 20)
        script = Script(name, prompt, 1 << 20, number, *draws, load.rows > 0, load.cfg)
        talks.append(_Talk(load, config, host, script, done))
    moment = host.moment
    steps, sequences, preempted = moment.steps, moment.sequence_steps, moment.preemptions
    begin = time.perf_counter()
    threading.Thread(target=lambda: [talk.start() for talk in talks], daemon=True).start()
    for _ in talks:
        done.acquire()
    seconds = time.perf_counter() - begin
    return {
        **load._asdict(),
        "tokens_per_s": load.requests * (load.text + load.rows) / seconds,
        "seconds": seconds,
        "engine_steps": moment.steps - steps,
        "sequence_steps": moment.sequence_steps - sequences,
        "preemptions": moment.preemptions - preempted,
        "broken_pairs": sum(talk.broken for talk in talks),
        "failures": [talk.failure for talk in talks if talk.failure][:5],
    }


def main() -> int:
    options = read(
        parser(__doc__), requests=512, prompt=120, steps=300, tensor_parallel=1, memory_share=0.9,
        parts=["text", "streams", "mixed", "pairs"],
    )  # fmt: skip
    vllm = load_vllm().__version__
    from pipelines.vllm_engine.host import VllmHost

    asked = {name: value for name, value in vars(options).items() if name != "json"}
    bench = Bench("speechlm", options, vllm=vllm)
    bench.keep(options=asked)
    tiny, third = options.tiny, options.steps // 3
    count, prompt, text = options.requests, options.prompt, options.steps - third
    known = {
        "text": Load("text", count, prompt, options.steps, 0),
        "streams": Load("streams", count, prompt, 0, options.steps),
        "mixed": Load("mixed", count, prompt, text, third),
        "pairs": Load("pairs", count, prompt, text, third, 3.0),
    }
    with tempfile.TemporaryDirectory() as name:
        make_plugin_known(Path(name))
        config = write_shape(Path(name), published=not tiny)
        spec = model_spec(config, share_prefixes=True)
        spec = replace(spec, engine={**spec.engine, "load_format": "dummy"})
        wanted = TokenModelOptions(
            memory_share=None if tiny else options.memory_share,
            slots=2 * count,
            waiting_room=count,
            max_context=256 if tiny else 2048,
            step_tokens=None if tiny else 16_384,
            tensor_parallel=options.tensor_parallel,
        )
        host = VllmHost(spec, wanted)
        try:
            run(Load("warm", min(32, count), prompt, 8, 8, 2.0), config, host)
            for name in options.parts:
                bench.attempt(name, lambda name=name: bench.add(run(known[name], config, host)))
        finally:
            host.close()
    return bench.end(
        "load", "requests", "tokens_per_s", "seconds", "engine_steps", "sequence_steps", "broken_pairs"
    )


if __name__ == "__main__":
    raise SystemExit(main())

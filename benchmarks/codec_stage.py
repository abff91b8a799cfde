"""Measures the codec's stage both ways in one run: utterances gathered into batches, and as a continuous
batch; front plain and fused.

    python -m benchmarks.codec_stage [--steps 256x16,128x32,512x8] [--seconds 3] [--json FILE]
    python -m benchmarks.codec_stage --parts ways --ways gathered,256x16 --seconds 1.5     # under a minute
    python -m benchmarks.codec_stage --device cpu --tiny

`host to host` rows: us a frame for utterances of one length and of 3 to 15 s, through the engine's own
stage with 512 on their way, and the shares of a core of its threads. `error` rows: relative RMS error of
each way against float32, beside that of plain bf16. `step` rows: one step of all rows alone on the device,
for every size of steps. `host` rows: the host's work for a step, measured with a decoder that does
nothing, on any machine. JSON goes to $OUT (or the working folder) as codec_stage.json.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu import Bench, Row, ThreadUse, event_us, memory, parser
from benchmarks.qwen3_load import FRAMES_PER_SECOND
from benchmarks.qwen3_tts import codec_alone
from benchmarks.random_models.qwen3_tts import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder
from pipelines.codec.blocks import Past
from pipelines.codec.graphs import Buffer, UtteranceGraphs
from pipelines.codec.stage import CodecStage, Decoder
from pipelines.codec.states import CodecState
from pipelines.errors import NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.execution import open_stage

#: What the codec should take with mixed lengths, in us a frame: aim, must; measured before for gathered
#: batches.
AIMS = {"aim": 9.0, "must": 10.5, "before": 13.7}
#: Audio that the codec's thread should keep up with, in seconds a second, and the share of a core that it may
#: take for that.
AUDIO_S_PER_S, SHARE = 3600.0, 0.10
#: Frames that an utterance has behind it in a step that is measured alone: more than the window of the
#: decoder's attention.
PAST_FRAMES = 80
#: The threads of the stage.
THREADS = ("codec-stage", "codec-samples")

Pool = list[tuple[None, int]]


class Idle(UtteranceGraphs):
    """Steps whose device does nothing: what is left is the host's work."""

    def _work(self, rows: int, frames: int) -> None: ...

    def _fetch(self, buffer: Buffer, samples: int) -> None: ...


class IdleDecoder(Decoder[CodecState]):
    """A decoder of nothing, for the lane alone."""

    def __init__(self, rows: int, frames: int) -> None:
        shape = dummy_decoder(TINY_CODEC, torch.device("cpu"), torch.float32).shape
        self.utterances = Idle(_nothing, replace(shape, state_size=1), rows, frames)

    def new_state(self) -> CodecState:
        return CodecState()


def _nothing(codes: Tensor, past: Past) -> Tensor:
    return codes.new_zeros(0)


def pools(tiny: bool) -> dict[str, Pool]:
    """Utterances of one length, and of 3 to 15 s."""
    dice, count, shortest, longest, equal = (
        random.Random(0),
        *((12, 2, 9, 6) if tiny else (512, 38, 188, 100)),
    )
    return {
        "equal": [(None, equal)] * count,
        "mixed": [(None, dice.randint(shortest, longest)) for _ in range(count)],
    }


def continuous(decoder: CodecDecoder, rows: int, frames: int) -> None:
    """Prepares a decoder for a continuous batch, on a CPU too."""
    decoder.prepare_utterances(rows, frames)
    if decoder.utterances is None:
        decoder.utterances = UtteranceGraphs(decoder._run, decoder.shape, rows, frames)
        decoder.utterances.prepare()


def host_row(bench: Bench, rows: int, frames: int, pool: Pool) -> None:
    """The host's work for a step of all rows, and the share of a core that this is at the audio to keep up
    with.

    Of a stage that has been at work: the first samples are written to memory that the process never had,
    which takes several times as long.
    """
    codes = [np.zeros((count, TINY_CODEC.num_quantizers), np.int64) for _, count in pool]
    stage, room = CodecStage[CodecState](IdleDecoder(rows, frames)), threading.Semaphore(2 * max(rows, 256))

    def order(rounds: int) -> None:
        for one in codes * rounds:
            room.acquire()
            stage.decode(one, lambda _: room.release())

    order(4)
    use, began = ThreadUse(), time.perf_counter()
    order(8)
    shares, took = use.shares(), time.perf_counter() - began
    stage.close()
    per_frame = sum(shares.get(name, 0.0) for name in THREADS) * took * 1e6 / (8 * sum(map(len, codes)))
    share = per_frame * 1e-6 * FRAMES_PER_SECOND * AUDIO_S_PER_S
    row = {
        "part": "host",
        "rows": rows,
        "frames": frames,
        "us_per_frame": per_frame,
        "us_per_step": per_frame * rows * frames,
    }
    bench.add({**row, "share_of_a_core": share, "at_audio_s_per_s": AUDIO_S_PER_S, "may": SHARE})


def spoken(decoder: CodecDecoder, codes: Sequence[Tensor]) -> Tensor:
    """All samples of these utterances, through the stage."""
    stage: CodecStage[CodecState] = open_stage(decoder)
    heard: list[SimpleQueue[NDArray[np.float32] | NightjarError]] = [SimpleQueue() for _ in codes]
    for one, place in zip(codes, heard):
        stage.decode(one.numpy(), place.put)
    found = [place.get() for place in heard]
    stage.close()
    faults = [one for one in found if isinstance(one, NightjarError)]
    if faults:
        raise faults[0]
    return torch.cat([torch.from_numpy(one) for one in found if not isinstance(one, NightjarError)])


class Ways:
    """The decoder in every way that is compared, on one device."""

    def __init__(self, bench: Bench, sizes: Sequence[tuple[int, int]], seconds: float) -> None:
        self.bench, self.sizes, self.seconds = bench, sizes, seconds
        self.tiny = bench.options.tiny
        self.config = TINY_CODEC if self.tiny else PUBLISHED_CODEC
        self.pools = {
            name: pool for name, pool in pools(self.tiny).items() if name in bench.options.lengths.split(",")
        }

    def decoder(
        self, fused_front: bool, dtype: torch.dtype | None = None, fused: bool | None = None
    ) -> CodecDecoder:
        return dummy_decoder(
            self.config, self.bench.device, dtype or self.bench.dtype, fused, fused_front=fused_front
        )

    def errors(self) -> None:
        """Each way's relative RMS error against float32, and its ratio to plain bf16's."""
        draw = torch.Generator().manual_seed(7)
        shape = (self.config.codebook_size, (24 if self.tiny else 64, self.config.num_quantizers))
        codes = [torch.randint(*shape, generator=draw) for _ in range(4)]
        wanted = spoken(self.decoder(False, torch.float32, False), codes)
        plain = 0.0
        for name, fused, front, steps in (
            ("plain", False, False, None),
            ("fused stack", None, False, None),
            ("fused stack and front", None, True, None),
            ("continuous", None, False, self.sizes[0]),
            ("continuous, fused front", None, True, self.sizes[0]),
        ):
            decoder = self.decoder(front, fused=fused)
            if steps is not None:
                continuous(decoder, *steps)
            found = spoken(decoder, codes)
            error = float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
            plain = plain or error
            self.bench.add(
                {
                    "part": "error",
                    "way": name,
                    "relative_rms": error,
                    "of_plain": error / plain if plain else None,
                }
            )
            self.bench.clean()

    def host_to_host(self, fused_front: bool) -> None:
        """Microseconds a frame through the stage: gathered first, then every size of steps, in the same
        run."""
        decoder, wanted = self.decoder(fused_front), self.bench.options.ways
        if not wanted or "gathered" in wanted.split(","):
            self.bench.attempt(
                f"gathered {fused_front}", lambda: self.way(decoder, "gathered", fused_front, 512)
            )
        for rows, frames in self.sizes:
            way = f"{rows}x{frames}"
            self.bench.attempt(
                f"{way} {fused_front}",
                lambda rows=rows, frames=frames: self.steps(decoder, rows, frames, fused_front),
            )
            decoder.utterances = None
            self.bench.clean()

    def steps(self, decoder: CodecDecoder, rows: int, frames: int, fused_front: bool) -> None:
        """One size of steps: alone on the device, then through the stage where that is asked for."""
        way, wanted = f"{rows}x{frames}", self.bench.options.ways
        continuous(decoder, rows, frames)
        assert decoder.utterances is not None
        us = self.step_us(decoder.utterances)
        self.bench.add({"part": "step", "way": way, "front": _front(fused_front), "us_per_frame": us})
        if not wanted or way in wanted.split(","):
            self.way(decoder, way, fused_front, max(512, 2 * rows))

    def step_us(self, steps: UtteranceGraphs) -> float:
        """Microseconds a frame of a step of all rows, of utterances that began longer ago than the decoder
        looks back."""
        draw, past = np.random.default_rng(0), -(-PAST_FRAMES // steps.frames)
        shape = (steps.frames, self.config.num_quantizers)
        states = [
            state
            for _ in range(steps.rows)
            if (state := steps.enter(torch.zeros(shape, dtype=torch.int64), None)) is not None
        ]
        for _ in range(past):
            samples = steps.step(states, [draw.integers(0, self.config.codebook_size, shape) for _ in states])
            samples.wait()
            samples.release()
        # What the last step was sent is there still: the same frames again.
        again = steps.graph(steps.rows, steps.frames)
        with torch.inference_mode(), steps.on_stream():
            us = event_us(again) if self.bench.on_gpu else 1000 * self.bench.milliseconds(again)
        for state in states:
            steps.leave(state)
        return us / (steps.rows * steps.frames)

    def way(self, decoder: CodecDecoder, way: str, fused_front: bool, at_once: int) -> None:
        for lengths, pool in self.pools.items():
            found = codec_alone(decoder, pool, self.seconds, min(at_once, 4 if self.tiny else at_once))
            threads = found.pop("thread_cpu_share")
            share = sum(threads.get(name, 0.0) for name in THREADS)
            row: Row = {
                "part": "host to host",
                "way": way,
                "front": _front(fused_front),
                "lengths": lengths,
                **found,
            }
            self.bench.add({**row, "thread_share": share, **memory(self.bench.device)})


def _front(fused: bool) -> str:
    return "fused" if fused else "plain"


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--steps",
        default="",
        help="rows x frames of the steps, such as 256x16,128x32; the first gives the errors",
    )
    made.add_argument("--seconds", type=float, default=3.0, help="seconds of each row of host to host")
    made.add_argument(
        "--parts", default="host,errors,ways", help="what is measured; ways: steps alone, and host to host"
    )
    made.add_argument(
        "--ways", default="", help="of host to host, such as gathered,256x16; default: gathered and all steps"
    )
    made.add_argument("--fronts", default="plain,fused", help="fronts of the ways")
    made.add_argument("--lengths", default="equal,mixed", help="lengths of the utterances of the ways")
    options = made.parse_args()
    default, seconds = ("4x4", 0.05) if options.tiny else ("256x16,128x32,512x8", options.seconds)
    sizes = [
        (int(rows), int(frames))
        for rows, _, frames in (one.partition("x") for one in (options.steps or default).split(","))
    ]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench = Bench("codec_stage", options, aims_us=AIMS)
    ways, parts = Ways(bench, sizes, seconds), options.parts.split(",")
    if "host" in parts:
        mixed = pools(options.tiny)["mixed"]
        for rows, frames in sizes:
            bench.attempt(
                f"host {rows}x{frames}", lambda rows=rows, frames=frames: host_row(bench, rows, frames, mixed)
            )
    if "errors" in parts:
        bench.attempt("errors", ways.errors)
    for fused_front in (False, True) if "ways" in parts else ():
        if _front(fused_front) in options.fronts.split(","):
            bench.attempt(
                f"host to host {fused_front}", lambda fused_front=fused_front: ways.host_to_host(fused_front)
            )
    for row in bench.rows:
        if row["part"] in ("host to host", "step"):
            name = f"{row['part']:13}{row['way']:10}{row['front']:7}{row.get('lengths', ''):7}"
            print(f"{name}{row['us_per_frame']:9.2f} us a frame  threads {row.get('thread_share', 0.0):.0%}")
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())

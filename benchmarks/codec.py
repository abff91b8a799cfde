"""The codec of Qwen3-TTS: its decoder on the device, and its stage from codes on the host to samples on the host.

    python -m benchmarks.codec [--parts errors,decode,ways] [--steps 256x16,128x32] [--seconds 3]
    python -m benchmarks.codec --device cpu --tiny

`errors`: the audio of each way through the stage against float32, beside that of plain bfloat16. `decode`: whole
utterances of one length, us a frame: launched, as a graph, and with plain ops. `ways`: utterances of one length and of 3
to 15 s with 512 on their way, gathered into batches and as a continuous batch of a number of rows and frames a step,
the front plain and fused; `thread_share` is what the stage's threads take of a core.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.checkpoint import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder
from benchmarks.common import Bench, event_us, graph_us, memory, parser, read
from benchmarks.engine import codec_alone
from pipelines.codec.graphs import UtteranceGraphs
from pipelines.errors import NightjarError
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.execution import open_stage

#: What the codec should take with mixed lengths, in us a frame, and the floor of its products.
AIMS = {"floor": 6.3, "aim": 9.0, "must": 10.5}
PARTS = ("errors", "decode", "ways")
#: The threads of the stage.
THREADS = ("codec-stage", "codec-samples")
#: Rows and frames of `decode`.
BATCHES, TINY_BATCHES = ((32, 100), (1, 100), (8, 100), (64, 64), (16, 256)), ((2, 3),)


def spoken(decoder: CodecDecoder, codes: Sequence[Tensor]) -> Tensor:
    """All samples of the utterances, through the stage."""
    stage = open_stage(decoder)
    heard: list[SimpleQueue[NDArray[np.float32] | NightjarError]] = [SimpleQueue() for _ in codes]
    for one, place in zip(codes, heard, strict=True):
        stage.decode(one.numpy(), place.put)
    found = [place.get() for place in heard]
    stage.close()
    if faults := [one for one in found if isinstance(one, NightjarError)]:
        raise faults[0]
    return torch.cat([torch.from_numpy(one) for one in found])


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


class Codec:
    """The decoder in every way that is compared, on one device."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.tiny = bench, bench.options.tiny
        self.config = TINY_CODEC if self.tiny else PUBLISHED_CODEC
        self.steps = [tuple(map(int, one.split("x"))) for one in bench.options.steps]

    def decoder(
        self, front: bool, steps: Sequence[int] = (), dtype: torch.dtype | None = None, fused: bool | None = None
    ) -> CodecDecoder:  # fmt: skip
        """`front`: whether it is fused; `steps`: rows and frames of a continuous batch, on a CPU too."""
        device, dtype = self.bench.device, dtype or self.bench.dtype
        made = dummy_decoder(self.config, device, dtype, fused, fused_front=front)
        if steps:
            made.prepare_utterances(*steps)
            if made.utterances is None:
                made.utterances = UtteranceGraphs(made.run, made.shape, *steps)
                made.utterances.prepare()
        return made

    def errors(self) -> None:
        """Each way's relative RMS error against float32, and its ratio to plain bf16's."""
        draw, frames = torch.Generator().manual_seed(7), 24 if self.tiny else 64
        shape = self.config.codebook_size, (frames, self.config.num_quantizers)
        codes = [torch.randint(*shape, generator=draw) for _ in range(4)]
        wanted = spoken(self.decoder(False, dtype=torch.float32, fused=False), codes)
        plain, steps = 0.0, self.steps[0]
        for way, front, given, fused in (
            ("plain", False, (), False),
            ("fused stack", False, (), None),
            ("fused stack and front", True, (), None),
            ("continuous", False, steps, None),
            ("continuous, fused front", True, steps, None),
        ):
            error = relative_rms(spoken(self.decoder(front, given, fused=fused), codes), wanted)
            plain = plain or error
            ratio = error / plain if plain else None
            self.bench.add({"part": "error", "way": way, "relative_rms": error, "of_plain": ratio})
            self.bench.clean()

    @torch.inference_mode()
    def decode(self) -> None:
        """Whole utterances of one length."""
        bench, dice = self.bench, torch.Generator(self.bench.device).manual_seed(7)
        fused, plain = self.decoder(True), self.decoder(False, fused=False)

        def us(decoder: CodecDecoder, codes: Tensor, graph: bool = False) -> float:
            work = lambda: decoder.run(codes, None)  # noqa: E731
            if not bench.on_gpu:
                return 1000 * bench.milliseconds(work)
            return graph_us(work) if graph else event_us(work)

        for rows, frames in TINY_BATCHES if self.tiny else BATCHES:
            size = rows, frames, self.config.num_quantizers
            codes = torch.randint(self.config.codebook_size, size, generator=dice, device=bench.device)
            found = {
                "graph_us": us(fused, codes, True),
                "launched_us": us(fused, codes),
                "plain_us": us(plain, codes),
            }
            each = {name: value / (rows * frames) for name, value in found.items()}
            bench.add({"part": "decode", "rows": rows, "frames": frames, **each, **memory(bench.device)})

    def ways(self, front: bool) -> None:
        dice = random.Random(0)
        count, shortest, longest, equal, most = (
            (12, 2, 9, 6, 4) if self.tiny else (512, 38, 188, 100, 1 << 30)
        )
        pools = {"equal": [equal] * count, "mixed": [dice.randint(shortest, longest) for _ in range(count)]}
        for steps in ((), *self.steps):
            decoder, seconds = self.decoder(front, steps), 0.05 if self.tiny else self.bench.options.seconds
            way, at_once = "x".join(map(str, steps)) or "gathered", max(512, 2 * steps[0] if steps else 0)
            for lengths, pool in pools.items():
                found = codec_alone(decoder, pool, seconds, min(at_once, most))
                threads = found.pop("thread_cpu_share")
                share = sum(threads.get(name, 0.0) for name in THREADS)
                about = {"part": "host to host", "way": way, "front": "fused" if front else "plain"}
                used = {"thread_share": share, **memory(self.bench.device)}
                self.bench.add({**about, "lengths": lengths, **found, **used})
            del decoder
            self.bench.clean()


def main() -> int:
    options = read(parser(__doc__), parts=list(PARTS), known={"parts": PARTS}, steps=str, seconds=3.0)
    options.steps = options.steps or (["4x4"] if options.tiny else ["256x16", "128x32"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    bench = Bench("codec", options, aims_us=AIMS)
    codec = Codec(bench)
    for part in options.parts:
        for given in ((False,), (True,)) if part == "ways" else ((),):
            bench.attempt(" ".join(map(str, (part, *given))), getattr(codec, part), *given)
    return bench.end(
        "part", "way", "front", "lengths", "rows", "frames", "us_per_frame", "graph_us", "launched_us", "plain_us",
        "thread_share", "relative_rms", "of_plain",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

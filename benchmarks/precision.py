"""How far products in fp8 (`benchmarks.fp8`, emulated) move Qwen3-TTS away from float32, beside bfloat16's own error.

    python -m benchmarks.precision --sizes tiny 0b6 --parts products codec drift
    python -m benchmarks.precision --sizes --checkpoints path/to/checkpoint --parts products
    python -m benchmarks.precision --tiny

`products`: logits of each frame of random codes, given the frames before. `codec`: samples of random codes. `drift`:
speech of `--frames` frames, drawn with the same noise from the model's own codes, which the float32 model then reads.
Whatever is not in fp8 is in bfloat16. Sizes have random weights; `--checkpoints` are folders whose language models
are exact in bfloat16, as published ones are. `--draw FOLDER` writes the plots of the result `--json`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks import plots
from benchmarks.checkpoint import PUBLISHED_CODEC, TINY_CODEC, DummyWeights, codec_values, dummy_model
from benchmarks.common import FRAMES_PER_SECOND, Bench, Row, parser, read
from benchmarks.fp8 import Fp8, compared, divergence, error_of, judged
from kernels.layers import rms_norm
from kernels.reference import depth_frame, next_inputs, run_stack
from kernels.sampler import DrawFlags
from pipelines.engine.executor import FrameSettings
from pipelines.engine.runaway import RunawayGuard
from pipelines.engine.state import Placement, SamplingParams
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.config import CodecConfig, Qwen3TTSConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights

#: Frames of a row of `drift`.
WINDOW = 100
PAGE_SIZE = 64
PUBLISHED = "0b6", "1b7"
KINDS = torch.float32, torch.bfloat16


def open_model(name: str, bench: Bench, dtype: torch.dtype, positions: int) -> Qwen3TTSModel:
    """The model of a checkpoint's folder, or one with random weights by its size."""
    if not (folder := Path(name)).is_dir():
        return dummy_model(name, bench.device, dtype, positions)
    config = Qwen3TTSConfig.from_folder(folder)
    with Checkpoint(folder) as source:
        return Qwen3TTSModel(config, take_weights(source, config, dtype, bench.device), positions)


def open_decoder(name: str, bench: Bench, dtype: torch.dtype, scale: float) -> CodecDecoder:
    """The same of the codec's decoder, in plain operations. `scale` is that of the random weights of its residual units;
    those of its last convolution are so small that no sample is clipped."""

    def values(weight: str, noise: Tensor) -> Tensor:
        unit = weight.endswith((".conv1.conv.weight", ".conv2.conv.weight"))
        last = weight.startswith(f"decoder.decoder.{len(PUBLISHED_CODEC.upsample_rates) + 2}.")
        return codec_values(weight, noise) * (scale if unit else 0.03 if last else 1.0)

    if not Path(name).is_dir():
        shape = TINY_CODEC if name == "tiny" else PUBLISHED_CODEC
        return CodecDecoder(shape, DummyWeights(bench.device, values), bench.device, dtype, fused=False)
    config = CodecConfig.load(folder := Path(name, "speech_tokenizer"))
    with Checkpoint(folder) as source:
        return CodecDecoder(config.decoder, source, bench.device, dtype, fused=False)


def lm_parts(model: Qwen3TTSModel) -> dict[str, list[Tensor]]:
    """The weights of each kind of product in talker and predictor, of each of both, and of all."""
    found = dict[str, list[Tensor]]()
    for name, stack in zip(("talker", "predictor"), model.tensors.stacks, strict=True):
        for kind in ("gate_up", "down", "qkv", "o"):
            found[f"{name} {kind}"] = [getattr(layer, kind) for layer in stack.layers]
        found[name] = [weight for part, of in found.items() if part.startswith(name) for weight in of]
    return found | {"all": found["talker"] + found["predictor"]}


def random_codes(model: Qwen3TTSModel, rows: int) -> Tensor:
    """int64 [rows, codebooks]."""
    shape, dice = (rows, model.codebooks), torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.predictor.vocab, shape, generator=dice).to(model.device)


def inputs_of(model: Qwen3TTSModel, codes: Tensor) -> Tensor:
    """The talker's inputs [frames, hidden] after frames of codes [frames, codebooks] beyond the end of the text."""
    pad = torch.full_like(codes[:, 0], model.config.text_ids.tts_pad_token_id)
    return next_inputs(model.tensors.feedback, codes, pad)


def logits(model: Qwen3TTSModel, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of each frame but the first, given all frames before it and its own earlier codes.

    codes: [1 + frames, codebooks] -> float32 [1, frames, vocab] and [codebooks - 1, frames, codes].
    """
    (stack, depth), frames = (model.tensors.backbone, model.tensors.depth), len(codes) - 1
    assert depth is not None

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q = q.transpose(0, 1)[None]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)

    x, at = inputs_of(model, codes[:-1]), torch.arange(frames, device=model.device)
    keys, values = x.new_zeros(2, len(stack.layers), 1, stack.kv_heads, frames, stack.head_dim)
    x = run_stack(x, stack, (at, torch.zeros_like(at), at), keys, values, attend)
    hidden = rms_norm(x, stack.norm, stack.eps)
    # Nothing of the draws is used.
    one, flags, own = torch.ones(frames, device=model.device), DrawFlags.of([(0.0, 0, 1.0)]), codes[1:]
    greedy, noise = (one, torch.zeros_like(at), one, one > 0), torch.zeros_like(own)
    _, _, later = depth_frame(depth, hidden, own[:, 0], noise, greedy, flags, False, own)
    return linear(hidden, model.tensors.head).float()[None], later


@torch.inference_mode()
def products(bench: Bench, name: str) -> None:
    start, positions = {"part": "products", "model": Path(name).name}, bench.options.positions
    exact, model = (open_model(name, bench, kind, positions) for kind in KINDS)
    wanted = logits(exact, codes := random_codes(exact, 1 + positions))
    own = compared(wanted, logits(model, codes))
    bench.add({**start, "precision": "bfloat16", **own})
    for part, weights in lm_parts(model).items():
        with Fp8(weights):
            row = judged(compared(wanted, logits(model, codes)), own)
        bench.add({**start, "precision": "fp8", "of": part, **row})


@torch.inference_mode()
def codec(bench: Bench, name: str, scale: float) -> None:
    """The error of the samples with fp8 in both convolutions of the residual units of one width, and of all; and the mean
    error of these units when each is given the exact input."""
    start = {"part": "codec", "model": Path(name).name, "scale": scale}
    exact, decoder = (open_decoder(name, bench, kind, scale) for kind in KINDS)
    shape, dice = (bench.options.codec_frames, exact.config.num_quantizers), torch.Generator().manual_seed(2)
    codes = [torch.randint(0, exact.config.codebook_size, shape, generator=dice)]
    blocks: tuple[Any, ...] = tuple(zip(exact._stack.blocks, decoder._stack.blocks, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    units, kept = [unit for _, block in blocks for unit in block.units], list[tuple[Tensor, Tensor]]()

    def keep(unit: Any) -> Any:
        return lambda x, past: kept.append((x, unit(x, past))) or kept[-1][1]

    for block, _ in blocks:
        block.units = [keep(unit) for unit in block.units]
    (wave,), pairs = exact.decode(codes), list(zip(units, kept, strict=True))

    def samples() -> Row:
        error = error_of(decoder.decode(codes)[0], wave)
        return {"samples_error": error, "snr_db": -20 * math.log10(error)}

    def alone(widths: Sequence[int]) -> float:
        given = [(unit, *pair) for unit, pair in pairs if unit.span.channels in widths]
        return statistics.mean(error_of(unit(x.to(decoder.dtype), None), y) for unit, x, y in given)

    own = samples()
    bench.add({**start, "precision": "bfloat16", **own})
    widths = list(dict.fromkeys(unit.span.channels for unit in units))
    for part, of in (*((f"units of {width}", [width]) for width in widths), ("all units", widths)):
        plain = alone(of)
        with Fp8(pair[0] for unit in units if unit.span.channels in of for pair in (unit.wide, unit.narrow)):
            row = judged(samples(), own) | {"unit_own_error": plain, "unit_error": alone(of)}
        row |= {"unit_times": row["unit_error"] / plain}
        bench.add({**start, "precision": "fp8", "of": part, **row})


@torch.inference_mode()
def spoken(model: Qwen3TTSModel, rows: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws speech. Row r has the noise of seed r and begins after a random frame of its own.

    Returns codes [rows, 1 + frames, codebooks], from that frame on, and the logits that they were drawn from: float32
    [frames, rows, vocab] and [frames, codebooks - 1, rows, codes].
    """
    begun, pages = random_codes(model, rows), -(-frames // PAGE_SIZE)
    kv, state = model.make_kv(rows * pages, PAGE_SIZE), model.make_state(rows, pages, 0)
    sampling, none = SamplingParams(min_new_tokens=frames + 1), np.zeros(0, np.int64)
    for row, embedding in enumerate(inputs_of(model, begun)):
        own = [kv.free.pop() for _ in range(pages)]
        state.place([Placement(row, own, row, sampling, none, embedding, 0)])
    slots, settings = torch.arange(rows, device=model.device), FrameSettings(0, [sampling] * rows)
    made = [model.frame(slots, settings._replace(max_length=at + 1), state, kv) for at in range(frames)]
    codes = torch.stack([begun, *(one.codes for one in made)], 1)
    first, residual = ([getattr(one, f"{name}_logits") for one in made] for name in ("first", "residual"))
    return codes, torch.stack(first), torch.stack(residual)


def runaways(codes: Tensor) -> int:
    """The number of rows that the engine's guard would end. codes: [rows, frames], of codebook 0."""
    rows, guard = range(len(codes)), RunawayGuard(len(codes), 1 / FRAMES_PER_SECOND)
    for row in rows:
        guard.begin(row, None)
    return len({row for frame in codes.t().cpu().numpy() for row in guard.record(rows, frame[None])})


def windows(exact: Qwen3TTSModel, codes: Tensor, first: Tensor, residual: Tensor) -> Iterator[Row]:
    """Mean divergence, and the mean log probability that the exact model gives a code, by spans of 100 frames; arguments
    as `spoken` returns them."""
    found: dict[str, list[Tensor]] = {}
    for row, own in enumerate(codes):
        drawn = first[None, :, row], residual[:, :, row].transpose(0, 1)
        told = own[1:].t().split((1, codes.shape[2] - 1))
        for name, wanted, given, code in zip(("first", "residual"), logits(exact, own), drawn, told):
            chance = wanted.log_softmax(-1).gather(2, code[..., None])[..., 0]
            found.setdefault(f"{name}_kl", []).append(divergence(wanted, given).mean(0))
            found.setdefault(f"{name}_log_probability", []).append(chance.mean(0))
    means = {name: torch.stack(each).mean(0).split(WINDOW) for name, each in found.items()}
    for at in range(len(means["first_kl"])):
        yield {"from": at * WINDOW, **{name: each[at].mean().item() for name, each in means.items()}}


@torch.inference_mode()
def drift(bench: Bench, name: str) -> None:
    rows, frames = bench.options.rows, bench.options.frames
    exact, model = (open_model(name, bench, kind, frames) for kind in KINDS)
    parts, wanted = lm_parts(model), None
    for precision, part in (("float32", ""), ("bfloat16", ""), ("fp8", "talker gate_up"), ("fp8", "all")):
        with Fp8(parts.get(part, [])):
            made = spoken(exact if precision == "float32" else model, rows, frames)
        wanted = made[0] if wanted is None else wanted
        other = (made[0][:, 1:] != wanted[:, 1:]).any(2).long()
        row: Row = {"part": "drift", "model": Path(name).name, "precision": precision, "of": part}
        row |= {"rows": rows, "frames": frames, "runaways": runaways(made[0][:, 1:, 0])}
        row |= {"same_frames": [int(one.argmax()) if one.any() else frames for one in other]}
        bench.add({**row, "windows": list(windows(exact, *made))})


WORK = {"products": products, "codec": codec, "drift": drift}


def main() -> int:
    made = parser(__doc__, "cpu")
    made.add_argument("--draw", type=Path, help="folder for plots of the result --json; measures nothing")
    options = read(
        made, known={"parts": WORK, "sizes": ("tiny", *PUBLISHED)}, sizes=["tiny"], checkpoints=str, parts=[*WORK],
        positions=128, codec_frames=24, scales=[1.0, 0.5], rows=4, frames=1000, minutes=600.0,
    )  # fmt: skip
    if options.draw:
        return plots.draw(json.loads(options.json.read_text(encoding="utf-8")), options.draw)
    if options.tiny:
        options.sizes, options.positions, options.codec_frames, options.frames = ["tiny"], 8, 2, 20
    torch.backends.cudnn.allow_tf32 = False
    bench = Bench("precision", options, positions=options.positions, codec_frames=options.codec_frames)
    for part, name in product(options.parts, [*options.checkpoints, *options.sizes]):
        if part == "codec":
            for scale in options.scales[: 1 if Path(name).is_dir() else None]:
                bench.attempt(f"codec {name} {scale}", codec, bench, name, scale)
        else:
            # A frame of full size takes seconds on two cores; a GPU takes less.
            seconds = 4.0 * options.frames if part == "drift" and name in PUBLISHED else 0.0
            bench.attempt(f"{part} {name}", WORK[part], bench, name, needs=seconds)
    times = ("first_error_times", "residual_error_times", "samples_error_times", "unit_times")
    return bench.end("part", "model", "scale", "precision", "of", *times, "within_twice", "runaways")


if __name__ == "__main__":
    raise SystemExit(main())

"""The least time a frame can take on a device: every weight and key read once, or every product at the
matrix units' speed.

The arithmetic of the tables in `docs/adr`; no GPU is needed to compute it.
`python -m benchmarks.roofline` prints what is predicted of SparkTTS and Fish Speech on our own engine,
from floors and from what was measured of Qwen3-TTS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.random_models.qwen3_tts import published_config
from benchmarks.random_models.spark_tts import LM

BYTES = 2  # of a bfloat16 value
#: Rows of the head of SparkTTS: 8,192 semantic and 4,096 global tokens, control tokens, the end, up to a
#: multiple of 64.
SPARK_ROWS = 12_352
#: What frames of 128 to 512 rows of Qwen3-TTS 0.6B took: so much a launch, and so many times the floor
#: (within 4 %).
LAUNCH_SECONDS, FLOOR_TIMES = 3.85e-6, 1.2
#: What a prefill of many prompts took of Qwen3-TTS 0.6B and 1.7B: so much a layer, and so many times the
#: products' floor.
PREFILL_LAYER_SECONDS, PREFILL_TIMES = 0.114e-3, 1.03
#: What LM and codec on one device took together, of the sum of what they take alone.
TOGETHER = 1.1
#: Multiply-adds of the published codec decoder for one frame.
CODEC_MACS = 2.48e9


@dataclass(frozen=True, slots=True)
class Device:
    """Measured limits: bytes a second that streaming reads reach, floating-point operations a second of
    large bfloat16 products."""

    name: str
    bandwidth: float
    flops: float


#: What a device's name says of it, by the part of the name that tells.
DEVICES = (Device("H200", 4.3e12, 790e12), Device("H100", 3.0e12, 790e12))


def device_named(name: str) -> Device | None:
    """The known device whose name is part of this one; None for others, which have no floor."""
    return next((device for device in DEVICES if device.name in name), None)


@dataclass(frozen=True, slots=True)
class Stack:
    """Sizes of one decoder stack. `matrices`: weights of all layers; `kv`: values kept for one position,
    over all layers."""

    matrices: int
    kv: int
    hidden: int
    heads_width: int
    layers: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Stack:
        hidden, inner, layers = (
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
        )
        return cls.sized(
            hidden,
            inner,
            layers,
            config["num_attention_heads"] * config["head_dim"],
            config["num_key_value_heads"] * config["head_dim"],
        )

    @classmethod
    def sized(cls, hidden: int, inner: int, layers: int, q: int, kv: int) -> Stack:
        """`q`, `kv`: the width of all heads, and of all heads of keys."""
        return cls(
            layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner),
            2 * kv * layers,
            hidden,
            q,
            layers,
        )

    def attention_flops(self, positions: float) -> float:
        """Operations of one new position over that many, the products with keys and with values."""
        return 4 * self.layers * self.heads_width * positions


@dataclass(frozen=True, slots=True)
class Frame:
    """Sizes of a frame. `head`: values of the rows that are drawn from; `heads`: those of all codebooks
    behind, in `steps` draws."""

    backbone: Stack
    head: int
    depth: Stack | None = None
    heads: int = 0
    steps: int = 0
    project: int = 0

    @property
    def launches(self) -> int:
        """Kernels of a frame of many rows: eight a layer; the heads, draws, the first input and the last
        norm."""
        behind = 0 if self.depth is None else self.depth.layers * self.steps
        return 8 * (self.backbone.layers + behind) + 2 * (1 + self.steps) + 2


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one frame of a whole batch: by reading and by computing, of the backbone and of the
    codebooks behind."""

    talker_read: float
    talker_compute: float
    predictor_read: float
    predictor_compute: float

    @property
    def seconds(self) -> float:
        return max(self.talker_read, self.talker_compute) + max(self.predictor_read, self.predictor_compute)


def qwen3_frame(size: str) -> Frame:
    """The frame of Qwen3-TTS at a published size ("0b6" or "1b7")."""
    config = published_config(size)["talker_config"]
    inner = config["code_predictor_config"]
    talker, predictor = Stack.of(config), Stack.of(inner)
    steps = config["num_code_groups"] - 1
    project = talker.hidden * predictor.hidden if talker.hidden != predictor.hidden else 0
    return Frame(
        talker,
        config["vocab_size"] * talker.hidden,
        predictor,
        steps * inner["vocab_size"] * predictor.hidden,
        steps,
        project,
    )


def spark_frame() -> Frame:
    """The frame of SparkTTS: one token, drawn from the rows of codes and control tokens."""
    backbone = Stack.sized(
        LM.hidden, LM.intermediate, LM.layers, LM.heads * LM.head_dim, LM.kv_heads * LM.head_dim
    )
    return Frame(backbone, SPARK_ROWS * LM.hidden)


def fish_frame() -> Frame:
    """The frame of Fish Speech S2 Pro: a slow AR of 36 layers, a fast AR of 4 for the nine codebooks
    behind, one head for all of them."""
    slow, fast = (Stack.sized(2560, 9728, layers, 32 * 128, 8 * 128) for layers in (36, 4))
    return Frame(slow, 4160 * 2560, fast, 9 * 4096 * 2560, 9)


def frame_floor(size: str, rows: int, context: float, device: Device) -> Floor:
    """One frame of Qwen3-TTS for `rows` rows at this mean context, without prefill and codec."""
    return floor_of(qwen3_frame(size), rows, context, device)


def floor_of(frame: Frame, rows: int, context: float, device: Device) -> Floor:
    """One frame of `rows` rows at this mean context, without prefill and codec."""
    backbone, depth, steps = frame.backbone, frame.depth, frame.steps
    read = BYTES * (backbone.matrices + frame.head + rows * context * backbone.kv) / device.bandwidth
    flops = rows * (2 * (backbone.matrices + frame.head) + backbone.attention_flops(context))
    if depth is None:
        return Floor(read, flops / device.flops, 0.0, 0.0)
    #: Positions that the depth's queries see: 1 and 2 in its first step, then one more each.
    seen = sum(range(1, steps + 2))
    behind_bytes = BYTES * (
        steps * depth.matrices + frame.heads + frame.project + rows * (seen - 1) * depth.kv
    )
    behind_flops = rows * (
        2 * ((steps + 1) * depth.matrices + frame.heads + frame.project) + depth.attention_flops(seen)
    )
    return Floor(read, flops / device.flops, behind_bytes / device.bandwidth, behind_flops / device.flops)


def codec_floor(frames: float, device: Device) -> float:
    """Seconds of decoding that many frames."""
    return 2 * CODEC_MACS * frames / device.flops


def prefill_floor(size: str, positions: float, device: Device) -> float:
    """Seconds of prefilling that many positions of short prompts, whose attention is next to nothing."""
    return 2 * Stack.of(published_config(size)["talker_config"]).matrices * positions / device.flops


def mean_context(lengths: Iterable[tuple[int, int]]) -> float:
    """The context that a slot has on average over time, for utterances of (prompt positions, frames)."""
    frames = total = 0.0
    for prompt, made in lengths:
        frames += made
        total += made * (prompt + made / 2)
    return total / frames if frames else 0.0


def floor_ms(part: str, size: str, rows: int, context: float, device: Device | None) -> float | None:
    """Milliseconds of a frame of the whole batch: "lm", "all" (language model, then codec) or "codec" (of
    one row); None if unknown."""
    if device is None or size == "tiny":
        return None
    if part == "codec":
        return 1000 * codec_floor(1, device)
    seconds = frame_floor(size, rows, context, device).seconds
    return 1000 * (seconds + (0.0 if part == "lm" else codec_floor(rows, device)))


@dataclass(frozen=True, slots=True)
class Load:
    """What is kept busy: tokens or frames of a second of speech, seconds of an utterance, positions before
    it, and those to prefill.

    `codec`: measured seconds of the codec for a second of speech, by the smallest number of rows.
    """

    frame: Frame
    rate: float
    seconds: float
    prompt: int
    prefilled: int
    codec: dict[int, float]
    #: Frames of the engine between two prefills.
    admission: int = 8


#: Speech of 5 to 10 s in cloned voices, as the benchmarks ask for it. The codecs' rates are those of 8, 32
#: and 64 utterances of mixed lengths in `benchmarks/results`.
SPARK = Load(spark_frame(), 50.0, 7.5, 80, 128, {64: 1 / 3770, 256: 1 / 5441, 512: 1 / 5688})
FISH = Load(fish_frame(), 44_100 / 2048, 7.5, 200, 128, {16: 1 / 1893, 64: 1 / 2192, 256: 1 / 2564})
FISH_NOTHING_KEPT = Load(FISH.frame, FISH.rate, FISH.seconds, FISH.prompt, 256, FISH.codec)


def frame_ms(frame: Frame, rows: int, context: float, device: Device) -> float:
    """What a frame of many rows should take, by what Qwen3-TTS's took."""
    return 1000 * (
        frame.launches * LAUNCH_SECONDS + FLOOR_TIMES * floor_of(frame, rows, context, device).seconds
    )


def predicted(load: Load, rows: int, device: Device) -> dict[str, float]:
    """Milliseconds of a step and its parts, and the audio seconds a second of so many rows kept busy, with
    the host hidden."""
    frames = load.rate * load.seconds
    context = load.prompt + frames / 2
    prompts = load.admission * rows / frames
    positions = 2 ** max(math.ceil(math.log2(prompts)), 0) * load.prefilled
    layers = load.frame.backbone.layers * PREFILL_LAYER_SECONDS
    prefill = layers + PREFILL_TIMES * 2 * load.frame.backbone.matrices * positions / device.flops
    found = {
        "floor": 1000 * floor_of(load.frame, rows, context, device).seconds,
        "frame": frame_ms(load.frame, rows, context, device),
        "prefill": 1000 * prefill * min(prompts, 1.0) / load.admission,
        "codec": 1000
        * rows
        / load.rate
        * next(each for least, each in sorted(load.codec.items(), reverse=True) if rows >= least),
    }
    found["step"] = TOGETHER * (found["frame"] + found["prefill"] + found["codec"])
    return {**found, "lm_audio_s_per_s": 1000 * rows / load.rate / (found["frame"] + found["prefill"]),
            "audio_s_per_s": 1000 * rows / load.rate / found["step"]}  # fmt: skip


def main() -> None:
    """Prints the predictions on an H200."""
    titles = ("floor", "frame", "prefill", "codec", "step", "lm_audio_s_per_s", "audio_s_per_s")
    print(f"{'':26}{'rows':>5}" + "".join(f"{title:>18}" for title in titles))
    for name, load in (
        ("SparkTTS", SPARK),
        ("Fish, kept voices", FISH),
        ("Fish, nothing kept", FISH_NOTHING_KEPT),
    ):
        for rows in load.codec:
            found = predicted(load, rows, DEVICES[0])
            print(f"{name:26}{rows:5}" + "".join(f"{found[title]:18,.2f}" for title in titles))


if __name__ == "__main__":
    main()

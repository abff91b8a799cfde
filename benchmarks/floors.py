"""The least time that a frame can take on a device: every weight and key read once, or every product at the matrix
units' speed. Results are shown beside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.checkpoint import SPARK_LM, qwen3_config


@dataclass(frozen=True, slots=True)
class Device:
    """Measured limits: bytes a second that streaming reads reach, floating-point operations a second of large
    bfloat16 products."""

    name: str
    bandwidth: float
    flops: float


DEVICES = (Device("H200", 4.3e12, 790e12), Device("H100", 3.0e12, 790e12))
BYTES = 2  # of a bfloat16 value
#: Rows of the head of SparkTTS: 8,192 semantic and 4,096 global tokens, control tokens, the end, up to a multiple
#: of 64.
SPARK_ROWS = 12_352
#: Multiply-adds of the published codec decoder for one frame.
CODEC_MACS = 2.48e9


def device_named(name: str) -> Device | None:
    """The known device whose name is part of this one; None for others, which have no floor."""
    return next((device for device in DEVICES if device.name in name), None)


@dataclass(frozen=True, slots=True)
class Stack:
    """Sizes of one decoder stack. `matrices`: weights of all layers; `kv`: values kept for one position, over all
    layers."""

    matrices: int
    kv: int
    hidden: int
    heads_width: int
    layers: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Stack:
        heads, kv_heads, dim = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        sizes = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        return cls.sized(*sizes, heads * dim, kv_heads * dim)

    @classmethod
    def sized(cls, hidden: int, inner: int, layers: int, q: int, kv: int) -> Stack:
        """`q`, `kv`: the width of all heads, and of all heads of keys."""
        matrices = layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner)
        return cls(matrices, 2 * kv * layers, hidden, q, layers)

    def attention_flops(self, positions: float) -> float:
        """Operations of one new position over that many, the products with keys and with values."""
        return 4 * self.layers * self.heads_width * positions


@dataclass(frozen=True, slots=True)
class Frame:
    """Sizes of a frame. `head`: values of the rows that are drawn from; `heads`: those of all codebooks behind, in
    `steps` draws."""

    backbone: Stack
    head: int
    depth: Stack | None = None
    heads: int = 0
    steps: int = 0
    project: int = 0


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one frame of a whole batch: by reading and by computing, of the backbone and of the codebooks
    behind."""

    talker_read: float
    talker_compute: float
    predictor_read: float = 0.0
    predictor_compute: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.talker_read, self.talker_compute) + max(self.predictor_read, self.predictor_compute)


def qwen3_frame(size: str) -> Frame:
    """The frame of Qwen3-TTS at a published size ("0b6" or "1b7")."""
    config = qwen3_config(size)["talker_config"]
    inner = config["code_predictor_config"]
    talker, predictor, steps = Stack.of(config), Stack.of(inner), config["num_code_groups"] - 1
    project = talker.hidden * predictor.hidden if talker.hidden != predictor.hidden else 0
    head, heads = config["vocab_size"] * talker.hidden, steps * inner["vocab_size"] * predictor.hidden
    return Frame(talker, head, predictor, heads, steps, project)


def spark_frame() -> Frame:
    """The frame of SparkTTS: one token, drawn from the rows of codes and control tokens."""
    lm = SPARK_LM
    widths = lm.heads * lm.head_dim, lm.kv_heads * lm.head_dim
    return Frame(Stack.sized(lm.hidden, lm.intermediate, lm.layers, *widths), SPARK_ROWS * lm.hidden)


def fish_frame() -> Frame:
    """The frame of Fish Speech S2 Pro: a slow AR of 36 layers, a fast AR of 4 for the nine codebooks behind, one
    head for all of them."""
    slow, fast = (Stack.sized(2560, 9728, layers, 32 * 128, 8 * 128) for layers in (36, 4))
    return Frame(slow, 4160 * 2560, fast, 9 * 4096 * 2560, 9)


def floor_of(frame: Frame, rows: int, context: float, device: Device) -> Floor:
    """One frame of `rows` rows at this mean context, without prefill and codec: every weight and key read once, or
    every product at the matrix units' speed."""
    backbone, depth, steps = frame.backbone, frame.depth, frame.steps
    read = BYTES * (backbone.matrices + frame.head + rows * context * backbone.kv) / device.bandwidth
    flops = rows * (2 * (backbone.matrices + frame.head) + backbone.attention_flops(context))
    if depth is None:
        return Floor(read, flops / device.flops)
    #: Positions that the depth's queries see: 1 and 2 in its first step, then one more each.
    seen = sum(range(1, steps + 2))
    values = steps * depth.matrices + frame.heads + frame.project + rows * (seen - 1) * depth.kv
    products = 2 * ((steps + 1) * depth.matrices + frame.heads + frame.project)
    behind_flops = rows * (products + depth.attention_flops(seen))
    return Floor(read, flops / device.flops, BYTES * values / device.bandwidth, behind_flops / device.flops)


def mean_context(lengths: Iterable[tuple[int, int]]) -> float:
    """The context that a slot has on average over time, for utterances of (prompt positions, frames)."""
    frames = total = 0.0
    for prompt, made in lengths:
        frames += made
        total += made * (prompt + made / 2)
    return total / frames if frames else 0.0


def floor_ms(part: str, size: str, rows: int, context: float, device: Device | None) -> float | None:
    """Milliseconds of a frame of the whole batch of Qwen3-TTS: "lm", "all" (language model, then codec) or "codec"
    (of one row); None if unknown."""
    if device is None or size == "tiny":
        return None
    codec = 2 * CODEC_MACS / device.flops
    if part == "codec":
        return 1000 * codec
    seconds = floor_of(qwen3_frame(size), rows, context, device).seconds
    return 1000 * (seconds + (0.0 if part == "lm" else rows * codec))

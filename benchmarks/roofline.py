"""The least time a Qwen3-TTS frame can take on a device: every weight and key read once, or every product at the matrix units' speed.

The arithmetic of the table in `benchmarks/NOTES.md`; no GPU is needed to compute it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipelines.qwen3_tts.dummy import published_config

BYTES = 2  # of a bfloat16 value
#: Multiply-adds of the published codec decoder for one frame.
CODEC_MACS = 2.48e9


@dataclass(frozen=True, slots=True)
class Device:
    """Measured limits: bytes a second that streaming reads reach, floating-point operations a second of large bfloat16 products."""

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
    """Sizes of one decoder stack. `matrices`: weights of all layers; `kv`: values kept for one position, over all layers."""

    matrices: int
    kv: int
    hidden: int
    heads_width: int
    layers: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Stack:
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        q = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        return cls(layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner), 2 * kv * layers, hidden, q, layers)

    def attention_flops(self, positions: float) -> float:
        """Operations of one new position over that many, the products with keys and with values."""
        return 4 * self.layers * self.heads_width * positions


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one frame of a whole batch: by reading and by computing, of talker and predictor."""

    talker_read: float
    talker_compute: float
    predictor_read: float
    predictor_compute: float

    @property
    def seconds(self) -> float:
        return max(self.talker_read, self.talker_compute) + max(self.predictor_read, self.predictor_compute)


def frame_floor(size: str, rows: int, context: float, device: Device) -> Floor:
    """One frame of `rows` rows at this mean context, without prefill and codec."""
    config = published_config(size)["talker_config"]
    inner = config["code_predictor_config"]
    talker, predictor = Stack.of(config), Stack.of(inner)
    steps = config["num_code_groups"] - 1
    head = config["vocab_size"] * talker.hidden
    heads = steps * inner["vocab_size"] * predictor.hidden
    project = talker.hidden * predictor.hidden if talker.hidden != predictor.hidden else 0
    #: Positions that the predictor's queries see: 1 and 2 in its first step, then one more each.
    seen = sum(range(1, steps + 2))
    talker_bytes = BYTES * (talker.matrices + head + rows * context * talker.kv)
    talker_flops = rows * (2 * (talker.matrices + head) + talker.attention_flops(context))
    predictor_bytes = BYTES * (steps * predictor.matrices + heads + project + rows * (seen - 1) * predictor.kv)
    predictor_flops = rows * (2 * ((steps + 1) * predictor.matrices + heads + project) + predictor.attention_flops(seen))
    return Floor(
        talker_bytes / device.bandwidth,
        talker_flops / device.flops,
        predictor_bytes / device.bandwidth,
        predictor_flops / device.flops,
    )


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
    """Milliseconds of a frame of the whole batch: "lm", "all" (language model, then codec) or "codec" (of one row); None if unknown."""
    if device is None or size == "tiny":
        return None
    if part == "codec":
        return 1000 * codec_floor(1, device)
    seconds = frame_floor(size, rows, context, device).seconds
    return 1000 * (seconds + (0.0 if part == "lm" else codec_floor(rows, device)))

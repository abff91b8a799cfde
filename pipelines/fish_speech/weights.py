"""Tensors of a checkpoint folder: the published names of both transformers, and those of codec.pth, which is read without pickle code."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.frame import Layer
from pipelines.fish_speech.config import CODEC_WEIGHTS, FishConfig, StackConfig
from pipelines.nn.checkpoint import Checkpoint, Loader, TensorSource, bad_checkpoint, require_names
from pipelines.nn.stack import StackWeights

log = logging.getLogger(__name__)

SLOW, FAST = "text_model.model.", "audio_decoder."
#: Names under which the fast AR's input projection may be stored, where its width is not the slow AR's.
PROJECTIONS = ("project_in", "fast_project_in")
#: Buffers that older files of the codec hold, and what trains it.
_CODEC_UNUSED = ("*freqs_cis*", "*causal_mask*", "*cluster_size*", "discriminator*")
#: Where the weight norm of a convolution may be stored: gain and direction; a plain `weight` has it folded in.
_NORMS = (("parametrizations.weight.original0", "parametrizations.weight.original1"), ("weight_g", "weight_v"))
_SNAKE_EPS = 1e-9


class NormedSource(TensorSource, Protocol):
    """A source that tells which of the alternative names it holds: a `Checkpoint`, a `TensorTable`, or something that makes tensors up."""

    def __contains__(self, name: str) -> bool: ...


class TensorTable:
    """The tensors of one pickled state dictionary, taken out one by one; `finish` names what nobody took."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._path = path
        self._tensors = tensors
        self._left = set(tensors)

    @classmethod
    def read(cls, path: Path) -> TensorTable:
        """Reads tensors only, never code: flat, under `state_dict` or `generator`, or with `generator.` in their names.

        Raises `ModelError` (`model.bad_checkpoint`) that names the file.
        """
        if not path.is_file():
            raise bad_checkpoint(f"{path} is missing.")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise bad_checkpoint(f"{path} cannot be read as tensors: {type(error).__name__}.") from error
        return cls(path, _flat(path, content))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        """One tensor of exactly this shape. Raises `ModelError` (`model.bad_checkpoint`) that names it."""
        if name not in self._tensors:
            raise bad_checkpoint(f"Tensor {name} is missing from {self._path}.")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise bad_checkpoint(f"Tensor {name} of {self._path} has shape {list(tensor.shape)}, not {list(shape)}.")
        if not tensor.is_floating_point():
            raise bad_checkpoint(f"Tensor {name} of {self._path} is stored as {tensor.dtype}, not as floating point.")
        self._left.discard(name)
        return tensor.to(device=device, dtype=dtype)

    def finish(self) -> list[str]:
        """The tensors that nobody took, apart from known buffers; they are logged, since older codecs hold some of their own."""
        extra = sorted(name for name in self._left if not any(fnmatchcase(name, pattern) for pattern in _CODEC_UNUSED))
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            log.warning("%s holds tensors that the codec does not use: %s", self._path, shown)
        return extra


def open_codec(folder: Path) -> TensorTable:
    """The tensors of the folder's codec. Raises as `TensorTable.read`."""
    return TensorTable.read(folder / CODEC_WEIGHTS)


def take_normed(source: NormedSource, prefix: str, shape: Sequence[int]) -> Tensor:
    """A convolution's weight in float32 with its weight norm folded in: gain * v / |v|, the norm over all but the first dimension."""
    for gain, direction in _NORMS:
        if prefix + direction in source:
            v = source.take(prefix + direction, shape, torch.float32)
            g = source.take(prefix + gain, (shape[0], 1, 1), torch.float32)
            return v * (g / v.flatten(1).norm(dim=1)[:, None, None])
    return source.take(f"{prefix}weight", shape, torch.float32)


@dataclass(frozen=True, slots=True)
class CodecLoader(Loader):
    """The codec's tensors: weight norms folded into convolutions, and snakes with one parameter a channel."""

    source: NormedSource

    @property
    def unit_names(self) -> tuple[str, str, str, str]:
        return "block.0.", "block.1.conv.", "block.2.", "block.3.conv."

    def kernel(self, *shape: int) -> Tensor:
        return take_normed(self.source, self.prefix, shape).to(self.device, self.dtype)

    def snake(self, channels: int) -> tuple[Tensor, Tensor]:
        frequency = self("alpha", 1, channels, 1).float().flatten()
        return frequency, 1.0 / (frequency + _SNAKE_EPS)


def check_language_model(config: FishConfig) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) naming the tensor when the folder lacks one, has one too many or of another shape.

    vLLM reads the tensors in a process of its own, where an error would only be a dead engine.
    """
    with Checkpoint.open(config.folder) as checkpoint:
        held = set(checkpoint.names())
    wanted = tensor_shapes(config, held)
    require_names(config.folder, held, set(wanted))
    for path in sorted(config.folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in set(file.keys()) & set(wanted):  # a file beside the index may be there that is not read
                    if (shape := tuple(file.get_slice(name).get_shape())) != wanted[name]:
                        raise bad_checkpoint(f"Tensor {name} has shape {list(shape)}, but the config asks for {list(wanted[name])}.")
        except (SafetensorError, OSError) as error:
            raise bad_checkpoint(f"{path} cannot be read: {error}.") from error


def tensor_shapes(config: FishConfig, held: set[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of both transformers. `held` tells which of the alternative names a folder uses."""
    slow, fast = config.slow, config.fast
    shapes: dict[str, tuple[int, ...]] = {
        f"{SLOW}embeddings.weight": (slow.vocab, slow.dim),
        f"{FAST}codebook_embeddings.weight": (fast.vocab * config.codebooks, slow.dim),
        f"{FAST}embeddings.weight": (fast.vocab, fast.dim),
        f"{FAST}output.weight": (fast.vocab, fast.dim),
    }
    for prefix, stack in ((SLOW, slow), (FAST, fast)):
        shapes |= _stack_shapes(prefix, stack, held)
    if fast.dim != slow.dim:
        place = projection_name(held)
        shapes |= {f"{FAST}{place}.weight": (fast.dim, slow.dim), f"{FAST}{place}.bias": (fast.dim,)}
    return shapes


def projection_name(held: NormedSource | set[str]) -> str:
    """The name under which a folder that holds these tensors stores the fast AR's input projection."""
    return next((name for name in PROJECTIONS if f"{FAST}{name}.weight" in held), PROJECTIONS[0])


def _stack_shapes(prefix: str, stack: StackConfig, held: set[str]) -> dict[str, tuple[int, ...]]:
    dim, inner = stack.dim, stack.intermediate
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}norm.weight": (dim,)}
    for layer in range(stack.layers):
        at = f"{prefix}layers.{layer}."
        if f"{at}attention.wq.weight" in held:
            shapes |= {f"{at}attention.w{part}.weight": (width, dim) for part, width in _parts(stack)}
        else:
            shapes[f"{at}attention.wqkv.weight"] = (stack.q_width + 2 * stack.kv_width, dim)
        if stack.qk_norm:
            shapes |= {f"{at}attention.{part}_norm.weight": (stack.head_dim,) for part in "qk"}
        shapes |= {
            f"{at}attention.wo.weight": (dim, stack.q_width),
            f"{at}attention_norm.weight": (dim,),
            f"{at}ffn_norm.weight": (dim,),
            f"{at}feed_forward.w1.weight": (inner, dim),
            f"{at}feed_forward.w2.weight": (dim, inner),
            f"{at}feed_forward.w3.weight": (inner, dim),
        }
    return shapes


def _parts(stack: StackConfig) -> tuple[tuple[str, int], ...]:
    return ("q", stack.q_width), ("k", stack.kv_width), ("v", stack.kv_width)


def take_stack(
    source: NormedSource, prefix: str, config: StackConfig, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> StackWeights:
    """One of the two transformers, queries and keys put in the order of halves. Raises as the source does."""

    def take(name: str, *shape: int) -> Tensor:
        return source.take(f"{prefix}{name}.weight", shape, dtype, device)

    layers: list[Layer] = []
    for index in range(config.layers):
        at, widths = f"layers.{index}.", [width for _, width in _parts(config)]
        if f"{prefix}{at}attention.wq.weight" in source:
            query, key, value = (take(f"{at}attention.w{part}", width, config.dim) for part, width in _parts(config))
        else:
            query, key, value = take(f"{at}attention.wqkv", sum(widths), config.dim).split(widths)
        norms = [halves(take(f"{at}attention.{part}_norm", config.head_dim), config.head_dim) if config.qk_norm else None for part in "qk"]
        layers.append(
            Layer(
                input_norm=take(f"{at}attention_norm", config.dim),
                qkv=torch.cat([halves(query, config.head_dim), halves(key, config.head_dim), value]),
                o=take(f"{at}attention.wo", config.dim, config.q_width),
                post_norm=take(f"{at}ffn_norm", config.dim),
                gate_up=torch.cat([take(f"{at}feed_forward.{name}", config.intermediate, config.dim) for name in ("w1", "w3")]),
                down=take(f"{at}feed_forward.w2", config.dim, config.intermediate),
                q_norm=norms[0],
                k_norm=norms[1],
            )
        )
    return StackWeights(tuple(layers), take("norm", config.dim))


_QWEN3 = {
    "attention.wo.": "self_attn.o_proj.",
    "attention.q_norm.": "self_attn.q_norm.",
    "attention.k_norm.": "self_attn.k_norm.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
}


def as_qwen3(name: str, tensor: Tensor, stack: StackConfig) -> Iterator[tuple[str, Tensor]]:
    """A tensor of the slow AR in transformers' names for Qwen3, with `model.` in front; wqkv becomes three.

    Qwen3's kernels rotate the two halves of a head and this model neighbours: rows of q and k, and the weights of their norms,
    are put in the order (0, 2, 4, ..., 1, 3, 5, ...) by head.
    """
    short = name.removeprefix(SLOW)
    if short == "embeddings.weight":
        yield "model.embed_tokens.weight", tensor
        return
    if short == "norm.weight":
        yield "model.norm.weight", tensor
        return
    _, layer, part = short.split(".", 2)
    at = f"model.layers.{layer}."
    if part == "attention.wqkv.weight":
        for (letter, _), rows in zip(_parts(stack), tensor.split([width for _, width in _parts(stack)])):
            yield f"{at}self_attn.{letter}_proj.weight", rows if letter == "v" else halves(rows, stack.head_dim)
        return
    if part.startswith("attention.w") and (letter := part[len("attention.w")]) in "qkv":
        yield f"{at}self_attn.{letter}_proj.weight", tensor if letter == "v" else halves(tensor, stack.head_dim)
        return
    if part.endswith(("q_norm.weight", "k_norm.weight")):
        tensor = halves(tensor, stack.head_dim)
    before = next(published for published in _QWEN3 if part.startswith(published))
    yield at + _QWEN3[before] + part.removeprefix(before), tensor


def halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] with each head's even rows before its odd ones."""
    heads = tensor.unflatten(0, (-1, head_dim // 2, 2))
    return heads.transpose(1, 2).reshape(tensor.shape)


def rotary_table(positions: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 and on, [positions, head_dim / 2] each: float32 values that bfloat16 can hold.

    The published model is trained with tables that are rounded so; exact ones change its voice.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), 1.0 / base**exponents)
    return angles.cos().bfloat16().float(), angles.sin().bfloat16().float()


def _flat(path: Path, content: Any) -> dict[str, Tensor]:
    """The tensors of a file by the codec's own names, whatever they are wrapped in."""
    for wrapper in ("state_dict", "generator"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict):
        raise bad_checkpoint(f"{path} does not hold tensors by name.")
    tensors = {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    inside = {name.rpartition("generator.")[2]: tensor for name, tensor in tensors.items() if "generator." in name}
    return inside or tensors

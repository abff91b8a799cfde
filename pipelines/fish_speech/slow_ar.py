"""The slow AR as a model of vLLM's: Qwen3 whose input at speech positions is token and codes, and whose sampler draws whole frames.

Imported by vLLM's own processes, for the architecture of `pipelines.fish_speech.language_model`.
"""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, linear
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from kernels.registry import to_device
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.fast_ar import FastAr, fast_tensors
from pipelines.fish_speech.frame import RANKS, WINDOW, FrameGraphs, FrameMaker, Rows
from pipelines.fish_speech.language_model import PROMPT_CODES
from pipelines.fish_speech.weights import FAST, SLOW, as_qwen3, rotary_table
from pipelines.vllm_engine.frames import Admitted, FrameModel, FrameState, FrameStep


class FishState(FrameState):
    """What is known of the running requests: how they are drawn, and the codes of their prompts."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        slots, config = self.max_num_reqs, model.fish
        self._semantic = config.semantic
        self._scale = 1 / math.sqrt(config.codebooks + 1)
        self._offsets = torch.arange(config.codebooks, device=device) * config.fast.vocab
        self._back = torch.arange(-WINDOW, 0, device=device)
        self._temperature = torch.ones(slots, device=device)
        self._top_p = torch.ones(slots, device=device)
        self._top_k = torch.ones(slots, dtype=torch.int64, device=device)
        #: Where the first drawn token of a slot stands.
        self._first = torch.zeros(slots, dtype=torch.int64, device=device)
        self._wide = np.zeros(slots, dtype=bool)
        graphed = not vllm_config.model_config.enforce_eager
        maker = FrameMaker(config, model.fast, device, compiled=graphed and device.type == "cuda")
        self._frames = FrameGraphs(maker, slots, graphed)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Captures the graphs before vLLM measures the memory that is left."""
        model: Any = self.model
        with torch.inference_mode():
            hidden = torch.zeros(1, model.fish.slow.dim, dtype=self.dtype, device=self.device)
            slots = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._frames.capture(self._rows(model.compute_logits(hidden), hidden, slots, slots))
        return super().custom_sampler(sampler)

    def admit(self, request: Admitted) -> None:
        slot, sampling = request.slot, request.sampling
        # A temperature of 0 reaches us as it is; vLLM itself turns it into argmax, and so do we.
        top_k = 1 if sampling.temperature == 0 else max(sampling.top_k, 0)
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = top_k
        self._first[slot] = len(request.prompt_ids)
        self._wide[slot] = top_k == 0 or top_k > RANKS
        stored = request.extra.get(PROMPT_CODES)
        if stored:
            codes = np.frombuffer(stored, dtype=np.int16).reshape(-1, len(self._offsets)).copy()
            ids = np.array(request.prompt_ids)
            places = np.flatnonzero((ids >= self._semantic.start) & (ids < self._semantic.stop))
            self.codes[slot, to_device(torch.from_numpy(places), self.device)] = to_device(torch.from_numpy(codes), self.device)

    def embed(self, ids: Tensor, codes: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        model: Any = self.model
        text = model.embed_input_ids(ids)
        speech = (ids >= self._semantic.start) & (ids < self._semantic.stop)
        spoken = embedding_bag(codes.long() + self._offsets, model.codebooks, mode="sum")
        return torch.where(speech[:, None], (text + spoken) * self._scale, text)

    def draw(self, logits: Tensor, hidden: Tensor, step: FrameStep) -> tuple[Tensor, Tensor]:
        rows = self._rows(logits, hidden, step.slots, step.positions)
        tokens, codes = self._frames(rows, bool(self._wide[step.slots_host].any()))
        # The next replay writes over the graph's results while these are still on their way to the host.
        return tokens.clone(), codes

    def _rows(self, logits: Tensor, hidden: Tensor, slots: Tensor, positions: Tensor) -> Rows:
        first = self._first[slots]
        places = positions[:, None] + self._back
        spoken = self.codes[slots[:, None], places.clamp(min=0), 0].long() + self._semantic.start
        # The first token of a sequence is never looked back at, as in the published loop.
        window = torch.where(places > first[:, None], spoken, 0)
        settings = self._temperature[slots], self._top_p[slots], self._top_k[slots]
        return Rows(hidden, logits, window, *settings, self.seeds[slots], positions - self.origins[slots])


class FishForCausalLM(FrameModel, Qwen3ForCausalLM):
    """Qwen3's layers with the tables and the input of Fish Speech; the fast AR is a part of it."""

    state_class = FishState

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.fish = FishConfig.from_folder(Path(vllm_config.model_config.model))
        self.width = self.fish.codebooks
        slow = self.fish.slow
        self.codebooks = nn.Parameter(torch.empty(self.fish.fast.vocab * self.fish.codebooks, slow.dim), requires_grad=False)
        #: The rows of the embedding that can be drawn: semantic tokens, then the end. The others are masked, so they are not computed.
        self.head = nn.Parameter(torch.empty(len(self.fish.semantic) + 1, slow.dim), requires_grad=False)
        self.fast = FastAr(self.fish).requires_grad_(False)
        config: Any = self.config
        self._padded = config.head_dim
        ropes: dict[int, Any] = {}
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            for norm in (attention.q_norm, attention.k_norm):
                norm.variance_epsilon = slow.eps * slow.head_dim / self._padded
            ropes[id(attention.rotary_emb)] = attention.rotary_emb
        for rope in ropes.values():
            rope.cos_sin_cache = _wide_table(rope.cos_sin_cache, slow.head_dim, slow.rope_base)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[n, dim] -> [n, semantic tokens + 1], the end last."""
        self.drawn_from = hidden_states
        return linear(hidden_states, self.head)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Reads the published names. Raises `ModelError` (`model.bad_checkpoint`) that names a tensor of the fast AR at fault."""
        others: dict[str, Tensor] = {}
        loaded = super().load_weights(self._slow_weights(weights, others))
        own = {"codebooks": others.pop(f"{FAST}codebook_embeddings.weight"), "head": others.pop("head")}
        own |= {f"fast.{name}": tensor for name, tensor in fast_tensors(self.fish, _Held(others)).items()}
        parameters = dict(self.named_parameters())
        for name, tensor in own.items():
            parameters[name].data.copy_(tensor)
        return loaded | set(own)

    def _slow_weights(self, weights: Iterable[tuple[str, Tensor]], others: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """The slow AR's tensors in the names of Qwen3; what else there is goes to `others`."""
        slow = self.fish.slow
        for name, tensor in weights:
            if not name.startswith(SLOW):
                others[name] = tensor
                continue
            if name == f"{SLOW}embeddings.weight":
                others["head"] = tensor[[*self.fish.semantic, self.fish.end]]
            for known, part in as_qwen3(name, tensor, slow):
                yield known, pad(known, part, slow.head_dim, self._padded)


def pad(name: str, tensor: Tensor, width: int, padded: int) -> Tensor:
    """A tensor of Qwen3 with heads of `padded` values, where the device's attention knows none of `width`.

    The norm of a head then divides by the root of a smaller mean, for queries and for keys, and attention by the root of a larger
    width: with the epsilon made smaller alike, the weight of the keys' norm settles both.
    """
    if padded == width or ".self_attn." not in name:
        return tensor
    if ".o_proj." in name:
        return _spread(tensor.T, width, padded, 1).T.contiguous()
    wide = _spread(tensor, width, padded, 1 if ".v_proj." in name else 2)
    return wide / math.sqrt(padded / width) if ".k_norm." in name else wide


def _spread(tensor: Tensor, width: int, padded: int, parts: int) -> Tensor:
    """[heads * width, ...] -> float32 [heads * padded, ...], zeros behind each of the `parts` of a head."""
    heads = tensor.float().unflatten(0, (-1, parts, width // parts))
    wide = heads.new_zeros((heads.shape[0], parts, padded // parts, *heads.shape[3:]))
    wide[:, :, : width // parts] = heads
    return wide.flatten(0, 2)


def _wide_table(table: Tensor, width: int, base: float) -> Tensor:
    """Cosines and sines [positions, padded width] of vLLM's rotary embedding with the published rounding; padded pairs stay as they are."""
    cosine, sine = (part.to(table.device) for part in rotary_table(len(table), width, base))
    half = table.shape[1] // 2
    wide = torch.cat((torch.ones(len(table), half), torch.zeros(len(table), half)), dim=1).to(table.device, torch.float32)
    wide[:, : width // 2], wide[:, half : half + width // 2] = cosine, sine
    return wide.to(table.dtype)


class _Held:
    """Tensors by name, as the loaders want them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        tensor = self._tensors[name]
        assert tuple(tensor.shape) == tuple(shape), f"{name}: {list(tensor.shape)}, not {list(shape)}"
        return tensor.to(device=device, dtype=dtype)

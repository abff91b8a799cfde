"""The slow AR as a model of vLLM: a Qwen3 whose input at speech positions is a token and the codes of its
frame, and whose sampler draws whole frames."""

# vLLM is an extra, so its imports are checked only if it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from kernels.frame import FrameTensors, StackTensors
from kernels.registry import to_device
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.model import PROMPT_CODES, SLOW, drawn_ids, frame_tensors, take_fast, take_layers
from pipelines.fish_speech.prompt import is_speech
from pipelines.nn.checkpoint import Checkpoint, Loader, TensorSource
from pipelines.vllm_engine.frames import EngineFrameState, FrameModel


class FishState(EngineFrameState):
    """The running requests, and the codes of their prompts."""

    def admit(self, slot: int, prompt: list[int], written: int, sampling: Any) -> None:
        super().admit(slot, prompt, written, sampling)
        data = (sampling.extra_args or {}).get(PROMPT_CODES, b"")
        codes = np.frombuffer(data, dtype=np.int16).reshape(-1, self.codes.shape[2]).copy()
        if len(codes):
            places = np.flatnonzero(is_speech(np.array(prompt), self.model.fish.semantic))
            self.codes[slot, to_device(places, self.device)] = to_device(codes, self.device)

    def embed(self, ids: Tensor, codes: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        text = self.model.embed_input_ids(ids)
        speech = is_speech(ids, self.model.fish.semantic)
        feedback = self.tensors.feedback
        spoken = embedding_bag(codes.long() + feedback.starts, feedback.table, mode="sum")
        return torch.where(speech[:, None], (text + spoken) * feedback.scale, text)


class FishForCausalLM(FrameModel, Qwen3ForCausalLM):
    """Qwen3's layers with the rotary tables and the input of Fish Speech. The other tensors of the dual AR
    are additional parameters, `beside`."""

    state_class = FishState

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.fish = FishConfig.from_folder(Path(vllm_config.model_config.model))
        self.width = self.fish.codebooks
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        #: The embeddings of the ids that can be drawn, and the fast AR. Their tensors are also parameters,
        #: because vLLM counts, moves and fills parameters.
        self.drawn = torch.empty(len(self.token_ids()), self.fish.slow.hidden, dtype=self._dtype)
        self.fast = take_fast(Loader(TensorSource(), "", self._dtype, self.drawn.device), self.fish)
        self.beside = nn.ParameterList(
            [nn.Parameter(tensor, requires_grad=False) for tensor in _tensors((self.drawn, self.fast))]
        )
        layers: Any = self.model.layers
        for layer in layers:
            rope = layer.self_attn.rotary_emb
            # As in `StackWeights.tensors`.
            rope.cos_sin_cache = rope.cos_sin_cache.bfloat16().to(rope.cos_sin_cache.dtype)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Returns the hidden states: the frame's kernels compute the logits from them."""
        self.drawn_from = hidden_states
        return hidden_states

    def token_ids(self) -> list[int]:
        """The ids of all values of code 0; the last one is the end."""
        return drawn_ids(self.fish)

    def frame_tensors(self) -> FrameTensors:
        """The tensors of a frame after the slow AR's last layer."""
        slow = self.fish.slow
        norm = cast("Tensor", cast("nn.Module", self.model.norm).weight).data
        scale = slow.head_dim**-0.5
        backbone = StackTensors(
            (), norm, norm.new_zeros(1, slow.head_dim), slow.heads, slow.kv_heads, slow.eps, scale
        )
        return frame_tensors(self.fish, backbone, self.drawn, self.fast)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Reads the folder instead of `weights`, one layer at a time. Raises `ModelError`
        (`model.bad_checkpoint`) that names a missing or wrong tensor."""
        with Checkpoint(self.fish.folder) as checkpoint:
            load = Loader(checkpoint, "", self._dtype, torch.device("cpu"))
            loaded = super().load_weights(self._slow(load.at(SLOW)))
            drawn = self._embeddings(load.at(SLOW))[self.token_ids()]
            for place, tensor in zip(self.beside, _tensors((drawn, take_fast(load, self.fish)))):
                place.data.copy_(tensor)
        return loaded | {f"beside.{index}" for index in range(len(self.beside))}

    def _slow(self, load: Loader) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the slow AR, by the names of transformers' Qwen3."""
        slow = self.fish.slow
        yield "model.embed_tokens.weight", self._embeddings(load)
        yield "model.norm.weight", load("norm.weight", slow.hidden)
        for index, layer in enumerate(take_layers(load, slow)):
            query, key, value = layer.qkv.split([slow.q_width, slow.kv_width, slow.kv_width])
            gate, up = layer.gate_up.chunk(2)
            assert layer.q_norm is not None
            assert layer.k_norm is not None
            named = {
                "self_attn.q_proj": query,
                "self_attn.k_proj": key,
                "self_attn.v_proj": value,
                "self_attn.o_proj": layer.o,
                "self_attn.q_norm": layer.q_norm,
                "self_attn.k_norm": layer.k_norm,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.down,
                "input_layernorm": layer.input_norm,
                "post_attention_layernorm": layer.post_norm,
            }
            for name, tensor in named.items():
                yield f"model.layers.{index}.{name}.weight", tensor

    def _embeddings(self, load: Loader) -> Tensor:
        return load("embeddings.weight", self.fish.slow.vocab, self.fish.slow.hidden)


def _tensors(held: Any) -> list[Tensor]:
    """All tensors in tuples, in their order."""
    return [held] if isinstance(held, Tensor) else [one for part in held or () for one in _tensors(part)]

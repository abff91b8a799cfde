"""SpeechLM on vLLM: a Qwen3 decoder whose inputs are sums of eight streams, and whose heads are rows of one table."""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from pipelines.speechlm.state import SpeechLmState
from pipelines.speechlm.weights import EMBEDDING, HEAD, STREAMS, backbone_names
from pipelines.vllm_engine.frames import FrameModel
from pipelines.vllm_engine.library import STORED_WIDTH
from pipelines.vllm_engine.padded_heads import pad_normed


class SpeechLmForCausalLM(FrameModel, Qwen3ForCausalLM):
    """The decoder. Codes beside the token are those of streams 1 and on, each 1 + its place in the stream's ids; 0 is none.

    The codec's rows of embedding and head are copied out, so that a step gathers and multiplies 8,202 rows instead of eight times
    160,392, every rank of a tensor-parallel group has them whole, and logits of audio are float32 whatever the weights are.
    """

    state_class = SpeechLmState

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.streams: int = config.num_stream
        self.layer_size: int = config.codec_layer_size
        self.codec_base: int = config.codec_base_offset
        self.text_span: tuple[int, int] = (config.text_token_offset, config.text_token_end)
        self.ends: tuple[int, int] = (config.eos_token_id, config.eot_token_id)
        self.special: Any = config
        self.width = self.streams - 1
        rows = self.streams * self.layer_size
        dtype = vllm_config.model_config.dtype
        #: [1 + width * layer, hidden]: row 0 is the code that is none and adds nothing.
        self.frame_embedding = _held(torch.zeros(1 + self.width * self.layer_size, config.hidden_size, dtype=dtype))
        #: float32 [streams * layer + 2, hidden] and its bias: every stream's ids, then eos and eot for stream 0.
        self.frame_head = _held(torch.zeros(rows + 2, config.hidden_size, dtype=torch.float32))
        self.frame_bias = _held(torch.zeros(rows + 2, dtype=torch.float32))
        if (stored := getattr(config, STORED_WIDTH, None)) is not None:
            layers: Any = self.model.layers
            for layer in layers:
                for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                    norm.variance_epsilon *= stored / config.head_dim

    def embed_frames(self, ids: Tensor, codes: Tensor) -> Tensor:
        """Sum of the embeddings of a token [n] and of its codes [n, width]: [n, hidden]."""
        offsets = torch.arange(self.width, device=codes.device) * self.layer_size
        places = torch.where(codes > 0, codes + offsets, 0)
        return self.embed_input_ids(ids) + F.embedding_bag(places, self.frame_embedding, mode="sum", padding_idx=0)

    def frame_logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, streams * layer + 2] from hidden states [n, hidden]: lm_head(h + stream_emb[s]) in the rows of stream s."""
        return F.linear(hidden.float(), self.frame_head, self.frame_bias)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes the decoder's tensors; the tower's and the codec's are not vLLM's."""
        held: dict[str, Tensor] = {}
        loaded = super().load_weights(self._decoder(weights, held))
        self._copy_rows(held)
        return loaded | {"frame_embedding", "frame_head", "frame_bias"}

    def _decoder(self, weights: Iterable[tuple[str, Tensor]], held: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        config: Any = self.config
        wanted = backbone_names(config.num_hidden_layers)
        stored = getattr(config, STORED_WIDTH, None)
        for name, tensor in weights:
            if name in (EMBEDDING, HEAD, STREAMS):
                held[name] = tensor
            if name in wanted:
                yield name, tensor if stored is None else pad_normed(name, tensor, stored, config.head_dim)

    def _copy_rows(self, held: dict[str, Tensor]) -> None:
        first, second, end = self.codec_base, self.codec_base + self.layer_size, self.codec_base + self.streams * self.layer_size
        head, embedding = held[HEAD], held[EMBEDDING]
        self.frame_embedding.data[1:] = embedding[second:end]
        self.frame_head.data[:-2] = head[first:end]
        self.frame_head.data[-2:] = head[list(self.ends)]
        shifts = held[STREAMS].to(self.frame_head.device).float()
        for stream in range(1, self.streams):
            rows = slice(stream * self.layer_size, (stream + 1) * self.layer_size)
            self.frame_bias.data[rows] = self.frame_head[rows] @ shifts[stream]


def _held(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)

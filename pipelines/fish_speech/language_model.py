"""What vLLM is told about a checkpoint folder, whose own config.json it does not know."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.prompt import Prompt, prompt_of
from pipelines.vllm_engine.library import head_width, on_cpu
from pipelines.vllm_engine.options import PRIVATE, SALTS, ModelSpec

ARCHITECTURE = "NightjarFishForCausalLM"
#: Key of a request's extras: the codes at the semantic positions of its prompt, int16 [positions, codebooks] as bytes.
PROMPT_CODES = "codes"
_SALT_BYTES = 16


class LanguageModel:
    """The slow AR as a model of vLLM: a config.json in the words of Qwen3, which lies in a folder of its own until `close`.

    Engine cores read it whenever one starts.
    """

    def __init__(self, config: FishConfig, share_prefixes: bool | None = None, **engine: Any) -> None:
        """`engine`: further arguments of vLLM's engine. Call it after `load_vllm`.

        `share_prefixes` None: on a GPU. On a CPU results are equal to the bit, and a hit would be the same arithmetic in another order.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="nightjar-fish-")
        table = qwen3_config(config, head_width(config.slow.head_dim))
        (Path(self._folder.name) / "config.json").write_text(json.dumps(table), encoding="utf-8")
        self.spec = ModelSpec(
            config.folder,
            {"architectures": [ARCHITECTURE]},
            codes_per_step=1 + config.codebooks,
            v2_runner=True,
            engine={
                "hf_config_path": self._folder.name,
                "enable_prefix_caching": not on_cpu() if share_prefixes is None else share_prefixes,
                **engine,
            },
            extra=lambda request: as_extra(prompt_of(request), config.semantic),
        )

    def close(self) -> None:
        """May be called more than once."""
        self._folder.cleanup()


def qwen3_config(config: FishConfig, head_dim: int) -> dict[str, Any]:
    """The slow AR's config in transformers' words, with heads of this width."""
    slow = config.slow
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "vocab_size": slow.vocab,
        "hidden_size": slow.dim,
        "intermediate_size": slow.intermediate,
        "num_hidden_layers": slow.layers,
        "num_attention_heads": slow.heads,
        "num_key_value_heads": slow.kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": slow.eps,
        "rope_theta": slow.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": slow.rope_base},
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": config.end,
        "torch_dtype": "bfloat16",
    }


def as_extra(prompt: Prompt, semantic: range) -> dict[str, Any]:
    """The extras of a request with this prompt: its codes, and which of them the KV of a position depends on.

    Each run of speech (the references, an answer) has a digest of its codes, so prompts that begin alike share their KV. The KV of frames
    that a request draws is its own: other frames may have the same ids.
    """
    codes, ids = prompt.codes.astype(np.int16), np.array(prompt.ids)
    places = np.flatnonzero((ids >= semantic.start) & (ids < semantic.stop))
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    runs = zip(np.split(places, breaks), np.split(codes, breaks))
    salts = [(int(run[0]), hashlib.blake2b(spoken.tobytes(), digest_size=_SALT_BYTES).digest()) for run, spoken in runs if len(run)]
    return {PROMPT_CODES: codes.tobytes(), SALTS: salts, PRIVATE: True}

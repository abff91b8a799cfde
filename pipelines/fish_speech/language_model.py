"""What vLLM is told about a checkpoint folder, whose own config.json it does not know."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.fish_speech.config import FishConfig
from pipelines.vllm_engine.library import head_width
from pipelines.vllm_engine.options import ModelSpec

ARCHITECTURE = "NightjarFishForCausalLM"
#: Key of a request's extras: the codes at the semantic positions of its prompt, int16 [positions, codebooks] as bytes.
PROMPT_CODES = "codes"


class LanguageModel:
    """The slow AR as a model of vLLM: a config.json in the words of Qwen3, which lies in a folder of its own until `close`.

    Engine cores read it whenever one starts.
    """

    def __init__(self, config: FishConfig, **engine: Any) -> None:
        """`engine`: further arguments of vLLM's engine. Call it after `load_vllm`."""
        self._folder = tempfile.TemporaryDirectory(prefix="nightjar-fish-")
        table = qwen3_config(config, head_width(config.slow.head_dim))
        (Path(self._folder.name) / "config.json").write_text(json.dumps(table), encoding="utf-8")
        self.spec = ModelSpec(
            config.folder,
            {"architectures": [ARCHITECTURE]},
            codes_per_step=1 + config.codebooks,
            v2_runner=True,
            engine={"hf_config_path": self._folder.name, **engine},
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


def as_extra(codes: NDArray[np.int64]) -> dict[str, Any]:
    """The extras of a request whose prompt holds these codes, int64 [positions, codebooks]."""
    return {PROMPT_CODES: codes.astype(np.int16).tobytes()}

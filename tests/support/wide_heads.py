"""Golden checkpoints as vLLM's attention kernels on a CPU can run them: the same models with wider
attention heads.

Published models have heads of 64 or 128 values, golden ones fewer than any kernel of the CPU knows. Zeros
behind queries, keys, values and in the output projection change nothing. Rotary embedding turns pairs,
whose angles stay when theta is raised: theta'^(-2i / wide) = theta^(-2i / narrow). Attention divides by
the root of the width, and norms of heads by that of a mean over it, so queries are larger by the root of
wide / narrow, and where heads are normed keys are too, which the weight of their norm takes back.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WIDE = 32


@cache
def widened(checkpoint: Path) -> Path:
    """A copy of a golden checkpoint of SparkTTS, Fish Speech or SpeechLM with heads of `WIDE`; it lives as
    long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-wide-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=shutil.copyfile)
    lm = copy / "LLM" if (copy / "LLM").is_dir() else copy
    config: dict[str, Any] = json.loads((lm / "config.json").read_text())
    if lm != copy:
        narrow = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        _raise(config, "rope_theta", narrow)
        # vLLM's Llama does what its Qwen2 does, and takes a width of heads and biases of its own.
        config |= {"head_dim": WIDE, "architectures": ["LlamaForCausalLM"], "qkv_bias": True}
    else:
        sections = [config[name] for name in ("text_config", "audio_decoder_config") if name in config]
        narrow = sections[0]["head_dim"]
        for section in sections:
            _raise(section, "rope_theta" if "rope_theta" in section else "rope_base", narrow)
            section["head_dim"] = WIDE
    (lm / "config.json").write_text(json.dumps(config))
    for path in lm.glob("*.safetensors"):
        tensors = load_file(path)
        normed = "text_model" if "audio_decoder_config" in config else "self_attn" if lm == copy else None
        save_file(
            {name: _wide(name, tensor, narrow, normed) for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    return copy


def _raise(section: dict[str, Any], key: str, narrow: int) -> None:
    section[key] = section[key] ** (WIDE / narrow)


def _wide(name: str, tensor: Tensor, narrow: int, normed: str | None) -> Tensor:
    """A tensor of the wide model; `normed`: what the names of heads have in them that are normed."""
    if ".audio_tower." in name:
        # transformers runs it.
        return tensor
    factor, has_norm = math.sqrt(WIDE / narrow), normed is not None and normed in name
    if ".self_attn." in name:
        if ".o_proj." in name:
            return _spread(tensor.T, narrow, 1).T.contiguous()
        made = _spread(tensor, narrow, 1 if ".v_proj." in name else 2)
        if ".q_proj." in name or (".k_proj." in name and has_norm):
            made = made * factor
        return made / factor if ".k_norm." in name else made
    if ".attention." in name:
        # Fish Speech turns neighbours.
        if ".wo." in name:
            return _spread(tensor.T, narrow, 1).T.contiguous()
        made = _spread(tensor, narrow, 1)
        if ".wqkv." in name:
            # Half of the heads are queries' in every golden checkpoint: two key heads or one for each two.
            heads = made.unflatten(0, (-1, WIDE))
            scale = torch.full((len(heads), *[1] * (heads.dim() - 1)), factor)
            queries = len(heads) // 2
            scale[queries if not has_norm else queries + (len(heads) - queries) // 2 :] = 1.0
            made = (heads * scale).flatten(0, 1)
        return made / factor if ".k_norm." in name else made
    return tensor


def _spread(tensor: Tensor, narrow: int, parts: int) -> Tensor:
    """[heads * narrow, ...] -> float32 [heads * WIDE, ...], zeros behind each of the `parts` of a head."""
    heads = tensor.float().unflatten(0, (-1, parts, narrow // parts))
    wide = heads.new_zeros((heads.shape[0], parts, WIDE // parts, *heads.shape[3:]))
    wide[:, :, : narrow // parts] = heads
    return wide.flatten(0, 2).contiguous()

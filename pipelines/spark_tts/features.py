"""Features of wav2vec2 (XLSR-53) that the semantic tokens are made of: the mean of three hidden layers."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import Wav2Vec2Config, Wav2Vec2Model

from pipelines.nn.checkpoint import bad_checkpoint, read_json

#: Indices into hidden_states, where 0 is the output of the embedding.
LAYERS = (11, 14, 16)
#: One more than needed: the last recorded state lies behind the final layer norm in some versions of transformers.
KEPT_LAYERS = max(LAYERS) + 1
_VARIANCE_FLOOR = 1e-7
_FILE = "pytorch_model.bin"
#: Heads of the pretraining, and the vector that masks training input.
_UNUSED = ("quantizer.", "project_hid.", "project_q.", "wav2vec2.masked_spec_embed")
_RENAMED = {
    "encoder.pos_conv_embed.conv.parametrizations.weight.original0": "encoder.pos_conv_embed.conv.weight_g",
    "encoder.pos_conv_embed.conv.parametrizations.weight.original1": "encoder.pos_conv_embed.conv.weight_v",
}


class SemanticFeatures:
    """A recording at 16 kHz to features at 50 Hz."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Reads a folder of wav2vec2. Raises `ModelError` (`model.bad_checkpoint`) that names the file or tensor at fault."""
        config = Wav2Vec2Config.from_dict(read_json(folder / "config.json"))
        if config.num_hidden_layers < KEPT_LAYERS:
            raise bad_checkpoint(f"{folder / 'config.json'}: num_hidden_layers must be {KEPT_LAYERS} or more.")
        stored = config.num_hidden_layers
        config.num_hidden_layers = KEPT_LAYERS
        config.apply_spec_augment = False
        self.normalize = bool(read_json(folder / "preprocessor_config.json").get("do_normalize", True))
        with torch.device("meta"):
            model = Wav2Vec2Model(config)
        tensors = _tensors(folder)
        dropped = [f"wav2vec2.encoder.layers.{index}." for index in range(KEPT_LAYERS, stored)]
        weights: dict[str, Tensor] = {}
        for name, empty in model.state_dict().items():
            published = f"wav2vec2.{_RENAMED.get(name, name)}"
            if name == "masked_spec_embed":
                weights[name] = torch.zeros(empty.shape, device=device)
                continue
            tensor = tensors.pop(published, None)
            if tensor is None:
                raise bad_checkpoint(f"Tensor {published} is missing from {folder}.")
            if tensor.shape != empty.shape:
                raise bad_checkpoint(f"Tensor {published} has shape {list(tensor.shape)}, but the config asks for {list(empty.shape)}.")
            weights[name] = tensor.to(device, torch.float32)
        if extra := sorted(name for name in tensors if not name.startswith((*_UNUSED, *dropped))):
            raise bad_checkpoint(f"{folder} holds tensors that the config does not account for: {', '.join(extra[:5])}.")
        model.load_state_dict(weights, assign=True)
        self.model = model.requires_grad_(False).eval()
        self.device = device

    def values(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The input of the model: samples [n] of zero mean and unit variance (Wav2Vec2FeatureExtractor)."""
        if not self.normalize:
            return samples
        return ((samples - samples.mean()) / np.sqrt(samples.var() + _VARIANCE_FLOOR)).astype(np.float32)

    @torch.inference_mode()
    def __call__(self, values: Tensor) -> Tensor:
        """values: float32 [batch, samples], recordings of equal length -> float32 [batch, steps, hidden]."""
        states = self.states(values)
        return torch.stack([states[index] for index in LAYERS]).mean(0)

    @torch.inference_mode()
    def states(self, values: Tensor) -> tuple[Tensor, ...]:
        """All hidden states, [batch, steps, hidden] each."""
        return self.model(values.to(self.device), output_hidden_states=True).hidden_states


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder: safetensors, or the published pickle, of which nothing but tensors is read."""
    single, path = folder / "model.safetensors", folder / _FILE
    try:
        tensors = load_file(single) if single.is_file() else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise bad_checkpoint(f"{folder} has neither {single.name} nor {path.name}.") from error
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        raise bad_checkpoint(f"The weights of {folder} cannot be read as tensors: {str(error)[:200]}.") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise bad_checkpoint(f"{path} holds more than tensors.")
    return tensors

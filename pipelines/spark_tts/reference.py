"""Recordings to clone: read as the published model reads them, encoded to tokens, and cached by content."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.models.wav2vec2.configuration_wav2vec2 import Wav2Vec2Config
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Model

from pipelines.audio import Samples
from pipelines.codec.encoding import EXACT, BatchEncoder, Encoding, rounded
from pipelines.nn.checkpoint import Checkpoint, TensorTable, fill_module, read_pickle
from pipelines.nn.config_keys import bad_checkpoint, read_table
from pipelines.recording import KEPT_BYTES, Reading, Recording, RecordingCache
from pipelines.spark_tts.bicodec import Tokenizer
from pipelines.spark_tts.config import SparkConfig

#: Indices of the states whose mean is the features; 0 is the output of the embedding.
LAYERS = (11, 14, 16)
KEPT_LAYERS = max(LAYERS)
_VARIANCE_FLOOR = 1e-7
#: Patterns of transformers' names -> published names, where they differ.
_PUBLISHED = {
    r"conv\.parametrizations\.weight\.original0": "conv.weight_g",
    r"conv\.parametrizations\.weight\.original1": "conv.weight_v",
}
#: Tensors that are not needed: heads of the pretraining, and the vector that masks training input.
_UNUSED = ("quantizer.*", "project_hid.*", "project_q.*", "wav2vec2.masked_spec_embed")


class SemanticFeatures:
    """Encodes recordings at 16 kHz to features at 50 Hz."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Reads a folder of wav2vec2. Raises `ModelError` (`model.bad_checkpoint`) that names the wrong file
        or tensor."""
        config = Wav2Vec2Config.from_dict(read_table(folder / "config.json"))
        if config.num_hidden_layers < KEPT_LAYERS:
            raise bad_checkpoint(
                f"{folder / 'config.json'}: num_hidden_layers must be {KEPT_LAYERS} or more."
            )
        dropped = [
            f"wav2vec2.encoder.layers.{index}.*" for index in range(KEPT_LAYERS, config.num_hidden_layers)
        ]
        config.num_hidden_layers = KEPT_LAYERS
        config.mask_time_prob = config.mask_feature_prob = 0.0
        self.normalize = bool(read_table(folder / "preprocessor_config.json").get("do_normalize", True))
        with torch.device("meta"):
            self.model = Wav2Vec2Model(config)
        with _tensors(folder) as tensors:
            fill_module(self.model, tensors, "wav2vec2.", device, published=_PUBLISHED)
            tensors.ignore(*_UNUSED, *dropped)
            tensors.finish()
        self.device = device

    def values(self, samples: Samples) -> Samples:
        """The input of the model: samples [n] of zero mean and unit variance (Wav2Vec2FeatureExtractor)."""
        if not self.normalize:
            return samples
        return ((samples - samples.mean()) / np.sqrt(samples.var() + _VARIANCE_FLOOR)).astype(np.float32)

    @property
    def takes_padding(self) -> bool:
        """Whether rows can be padded: unlike a layer norm, a group norm depends on all steps."""
        return self.model.config.feat_extract_norm == "layer"

    def steps(self, samples: Any) -> Any:
        """The number of steps of recordings of so many samples, a number or int64 [batch]."""
        for kernel, stride in zip(self.model.config.conv_kernel, self.model.config.conv_stride):
            samples = (samples - kernel) // stride + 1
        return samples

    @torch.inference_mode()
    def __call__(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """values: float32 [batch, samples]; mask: bool [batch, steps], False after the end of each row ->
        float32 [batch, steps, hidden]."""
        states = self.states(values, mask)
        return torch.stack([states[index] for index in LAYERS]).mean(0)

    @torch.inference_mode()
    def states(self, values: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The embedding and the output of each layer, [batch, steps, hidden] each, like the `hidden_states` of
        transformers."""
        model = self.model
        encoder = self.model.encoder
        x = model.feature_projection(model.feature_extractor(values.to(self.device)).transpose(1, 2))[0]
        x = x if mask is None else x * mask[:, :, None]
        x = x + encoder.pos_conv_embed(x)
        if not model.config.do_stable_layer_norm:
            x = encoder.layer_norm(x)
        states = [x]
        for layer in encoder.layers:
            states.append(layer(states[-1], attention_mask=None if mask is None else mask[:, None, None]))
        return states


def _tensors(folder: Path) -> TensorTable:
    """The tensors of a folder: safetensors, or the published pickle, from which only tensors are read."""
    pickled = folder / "pytorch_model.bin"
    if pickled.is_file() and not (folder / "model.safetensors").is_file():
        tensors = read_pickle(pickled)
        return TensorTable(pickled, tensors, tensors.__getitem__)
    return Checkpoint(folder)


#: Maximum clips, and seconds of recordings with their padding, of a batch on a GPU.
_CLIPS = 8
_BATCH_SECONDS = 24
#: An int of a tuple.
_TOKEN_BYTES = 36


class Reference(NamedTuple):
    """The tokens of a recording."""

    #: Global tokens.
    voice: tuple[int, ...]
    #: Semantic tokens, 50 per second; empty if they are not needed.
    semantic: tuple[int, ...]


class ReferenceEncoder:
    """Encodes recordings to tokens, in batches. Caches the most recent ones by content."""

    def __init__(self, config: SparkConfig, tokenizer: Tokenizer, features: SemanticFeatures) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.features = features
        self._batches = BatchEncoder(features.device)
        rate = config.sample_rate
        self.clips = Encoding(
            EXACT(lambda clips, _: tokenizer.speaker.tokens(tokenizer.mel(clips))),
            _CLIPS * config.clip_samples,
            int,
        )
        self.semantic = Encoding(
            self.semantic_tokens, _BATCH_SECONDS * rate, rounded if features.takes_padding else int
        )
        self._cache: RecordingCache[Reference] = RecordingCache(
            KEPT_BYTES, lambda made: _TOKEN_BYTES * (len(made.voice) + len(made.semantic))
        )

    def prepare(self, recording: Recording, with_semantic: bool) -> Reference:
        """The tokens of an audio file within the limits of `pipelines.audio`; semantic tokens only if
        `with_semantic`.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) if the device has too little memory.
        """
        return self._cache.get(
            recording, with_semantic, lambda: self.encode(self.read(recording), with_semantic)
        )

    def read(self, recording: Recording) -> Samples:
        """Samples [n] at the model's rate: the first channel, resampled at very high quality, and normalized
        in volume if the config says so."""
        samples, _ = recording.read(Reading(self.config.sample_rate, 0, "VHQ", self.config.volume_normalize))
        return samples

    def encode(self, samples: Samples, with_semantic: bool = True) -> Reference:
        """The tokens of a recording [samples] at the model's rate and volume."""
        voice = self._batches(self.clips, reference_clip(samples, self.config.clip_samples))
        semantic = list[int]()
        if with_semantic:
            made = self._batches(self.semantic, self.features.values(samples)).result()
            semantic = made[: self.features.steps(len(samples))].tolist()
        return Reference(tuple(voice.result().tolist()), tuple(semantic))

    @torch.inference_mode()
    @EXACT
    def semantic_tokens(self, values: Tensor, lengths: Tensor | None) -> Tensor:
        """values: float32 [batch, samples] of these lengths, int64 [batch] (None: no row is padded) -> int64
        [batch, steps]. The tokens of a row do not depend on its padding."""
        features = self.features
        mask = None
        if lengths is not None:
            steps = torch.arange(features.steps(values.shape[1]), device=values.device)
            mask = steps < features.steps(lengths)[:, None]
        return self.tokenizer.semantic_tokens(features(values, mask), mask)


def reference_clip(samples: Samples, length: int) -> Samples:
    """The first `length` samples; repeats shorter recordings."""
    return np.resize(samples, length)

"""Audio input: the Qwen3-Omni audio tower and an adaptor encode log-mel frames to features of the backbone's
width."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from pipelines.audio import Samples, unreadable
from pipelines.errors import input_too_long
from pipelines.nn.checkpoint import Checkpoint, bad_checkpoint, fill_module
from pipelines.speechlm.config import TOWER_SECONDS, SpeechLmConfig, own_keys
from pipelines.speechlm.weights import ADAPTOR, TOWER

SAMPLE_RATE = 16_000
_HOP = 160
#: Minimum samples of a recording: one window of the mel spectrogram.
_MIN_SAMPLES = 400


@dataclass(eq=False)
class AudioEncoder:
    """The tower with its adaptor. Each recording is encoded alone, so that its features depend on nothing
    else."""

    tower: nn.Module
    adaptor: nn.Linear
    n_window: int
    window_infer: int
    #: Whether recordings get zero mean and unit variance before the mel, as in training. The published servers do
    #: not do this.
    normalise: bool

    def __post_init__(self) -> None:
        self._mel = WhisperFeatureExtractor(
            feature_size=128, sampling_rate=SAMPLE_RATE, hop_length=_HOP, chunk_length=TOWER_SECONDS
        )
        self._lock = threading.Lock()

    def mel(self, samples: Samples) -> Tensor:
        """Log-mel [bins, frames] of samples [n] at 16 kHz, padded with zeros to whole frames."""
        made = self._mel(
            np.pad(samples, (0, -len(samples) % _HOP)),
            sampling_rate=SAMPLE_RATE,
            padding="longest",
            truncation=False,
            do_normalize=self.normalise,
            return_tensors="pt",
        )
        return made["input_features"][0]

    @torch.inference_mode()
    def encode(self, samples: Samples) -> Tensor:
        """Samples [n] at 16 kHz -> features [count, hidden] on the host.

        Raises `InputError`: `input.audio_unreadable` for less than a window, `input.too_long` for more than
        the tower's maximum.
        """
        check_length(len(samples))
        device = self.adaptor.weight.device
        mel = self.mel(samples).to(device)
        frames = mel.shape[1]
        # The library computes these only for n_window 50: which rows are not padding (only the last chunk of
        # a recording is padded), and where the windows of attention end.
        ends = window_ends(frames, self.n_window, self.window_infer)
        layout = {
            "feature_lens": torch.tensor([frames], device=device),
            "valid_indices": torch.arange(ends[-1], device=device),
            "cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device),
        }
        with self._lock:
            output: Any = self.tower(mel, **layout)
            rows = self.adaptor(output.last_hidden_state.to(self.adaptor.weight.dtype))
        return rows.cpu()


def check_length(samples: int) -> None:
    """Raises `InputError` for a recording that is too short or too long for the tower. It is never cut."""
    if samples < _MIN_SAMPLES:
        raise unreadable(f"The audio has {samples} samples at 16 kHz.", "Give at least 25 ms of audio.")
    if samples > TOWER_SECONDS * SAMPLE_RATE:
        raise input_too_long(
            f"The audio is {samples / SAMPLE_RATE:.1f} s long; the maximum of this model is {TOWER_SECONDS} s.",
            "Split it into several audio messages.",
        )


def feature_count(frames: int, n_window: int) -> int:
    """The number of features of `frames` mel frames. Each chunk of 2 * n_window frames is halved three times,
    rounding up."""
    whole, rest = divmod(frames, 2 * n_window)
    return whole * _features(2 * n_window) + _features(rest)


def window_ends(frames: int, n_window: int, window_infer: int) -> list[int]:
    """The ends of the windows of attention, after a first 0. A window has the features of window_infer // (2
    * n_window) whole chunks."""
    count = feature_count(frames, n_window)
    return [*range(0, count, _features(2 * n_window) * (window_infer // (2 * n_window))), count]


def _features(frames: int) -> int:
    return -(-frames // 8)


def load_tower(
    checkpoint: Checkpoint, config: SpeechLmConfig, device: torch.device, dtype: torch.dtype, normalise: bool
) -> AudioEncoder:
    """The tower of a checkpoint. Raises `ModelError` (`model.bad_checkpoint`) that names the tensor or the key."""
    try:
        sizes = Qwen3OmniMoeAudioEncoderConfig(**own_keys(config.audio_config))
        with torch.device("meta"):
            tower = Qwen3OmniMoeAudioEncoder._from_config(
                sizes, attn_implementation="eager" if device.type == "cpu" else "sdpa"
            )
            adaptor = nn.Linear(config.adaptor_input_dim, config.backbone.hidden)
        if sizes.n_window_infer < 2 * sizes.n_window:
            raise ValueError("n_window_infer is less than one chunk of 2 * n_window frames")
    except (TypeError, ValueError) as error:
        raise bad_checkpoint(
            f"{config.folder / 'config.json'}: audio_config does not describe a tower: {error}."
        ) from error
    fill_module(tower, checkpoint, TOWER, device, dtype)
    fill_module(adaptor, checkpoint, ADAPTOR, device, dtype)
    # This table is computed, not stored in the checkpoint.
    fresh = type(tower.positional_embedding)(sizes.max_source_positions, sizes.d_model)
    tower.positional_embedding = fresh.to(device)
    return AudioEncoder(tower, adaptor, sizes.n_window, sizes.n_window_infer, normalise)

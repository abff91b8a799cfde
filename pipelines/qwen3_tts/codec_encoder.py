"""The 12 Hz codec encoder: reference audio in, codes out. It is the encoding half of transformers' Mimi
(Kyutai)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import (
    MimiConv1d,
    MimiEncoder,
    MimiSplitResidualVectorQuantizer,
    MimiTransformerModel,
)

from pipelines.errors import ErrorCode, InputError
from pipelines.nn.checkpoint import TensorSource, fill_module
from pipelines.qwen3_tts.config import CodecConfig

#: The reference (transformers 4.57) attends to the whole past: it does not apply the config's sliding_window.
_WHOLE_PAST = 1 << 30


class CodecEncoder(nn.Module):
    """Turns mono audio into codes, `encode_downsample_rate` samples a frame. Runs in float32: a code is a
    choice, not a quantity."""

    def __init__(self, config: CodecConfig, source: TensorSource, device: torch.device | str = "cpu") -> None:
        super().__init__()
        chosen: dict[str, Any] = {"sliding_window": _WHOLE_PAST, "attn_implementation": "sdpa"}
        sizes = MimiConfig(**config.encoder | chosen)
        self.device = torch.device(device)
        self.sample_rate = config.input_sample_rate
        self.samples_per_frame = config.encode_downsample_rate
        self.codebooks = config.encoder_valid_num_quantizers
        self.codebook_size = sizes.codebook_size
        kernel = 2 * int(sizes.encodec_frame_rate / sizes.frame_rate)
        self.encoder, self.encoder_transformer = MimiEncoder(sizes), MimiTransformerModel(sizes)
        self.downsample = MimiConv1d(
            sizes, sizes.hidden_size, sizes.hidden_size, kernel, 2, bias=False, pad_mode="replicate"
        )
        self.quantizer = MimiSplitResidualVectorQuantizer(sizes)
        fill_module(self, source, "encoder.", self.device)
        self.to(self.device)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """Encodes mono audio at `sample_rate`: samples float32 [n] -> codes int64 [ceil(n /
        samples_per_frame), codebooks].

        Raises `InputError` (`input.reference_length`) when there are no samples.
        """
        if samples.dim() != 1 or not samples.numel():
            raise InputError(
                ErrorCode.INPUT_REFERENCE_LENGTH,
                "The reference audio is empty.",
                "Give a recording of at least a second.",
            )
        steps = self.encoder(samples.to(self.device, torch.float32)[None, None])
        steps = self.downsample(self.encoder_transformer(steps.transpose(1, 2))[0].transpose(1, 2))
        codes = self.quantizer.encode(steps, self.codebooks)
        return codes[:, 0, : -(-samples.numel() // self.samples_per_frame)].T.contiguous()

"""The causal 44.1 kHz codec: recordings to codes, codes to a waveform; whole utterances or chunk by chunk, with equal results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from pipelines.codec.blocks import ConvStack, Past, StateLayout, UpsampleLayers
from pipelines.codec.decoder import CausalDecoder
from pipelines.codec.fused import prepared_stack
from pipelines.fish_speech.codec_encoder import Codebook, CodecEncoder, window_transformer
from pipelines.fish_speech.config import CodecConfig, FishConfig
from pipelines.fish_speech.weights import CodecLoader, NormedSource, open_codec


class CodecDecoder(CausalDecoder):
    """Codes [frames, codebooks] to 44.1 kHz audio; codes beyond a codebook stand for its last one, as in the published model.

    `fused` as for `pipelines.codec.fused.prepared_stack`.
    """

    def __init__(
        self,
        config: CodecConfig,
        source: NormedSource,
        codebooks: Sequence[Codebook],
        device: torch.device,
        dtype: torch.dtype,
        fused: bool | None = None,
    ) -> None:
        super().__init__(device, dtype, config.codebooks, config.samples_per_frame, largest_code=None)
        self.config = config
        load, layout = CodecLoader(source, "quantizer.", dtype, device), StateLayout()
        self._table = torch.cat([codebook.table() for codebook in codebooks]).to(dtype)
        sizes = torch.tensor([config.semantic_codes] + [config.residual_codes] * config.residual_codebooks)
        self._offsets, self._last = (sizes.cumsum(0) - sizes).to(device), (sizes - 1).to(device)
        self._post = window_transformer(load.at("post_module."), layout, config.post)
        self._upsample = UpsampleLayers(load.at("upsample."), layout, config.latent, config.downsample[::-1])
        model = CodecLoader(source, "decoder.model.", dtype, device)
        stack = ConvStack(model, layout, config.latent, config.decoder_dim, config.decoder_rates, tanh=True)
        self._stack = prepared_stack(stack, device, dtype, fused)
        self.state_size = layout.size

    def latents(self, codes: Tensor) -> Tensor:
        """int64 [B, T, codebooks] -> [B, T, latent], what the codes stand for together."""
        return embedding(torch.minimum(codes.long(), self._last) + self._offsets, self._table).sum(dim=2)

    def transformed(self, x: Tensor, past: Past | None = None) -> Tensor:
        """[B, T, latent] -> [B, T, latent] behind the quantizer's transformer."""
        return self._post(x, past)

    def upsampled(self, x: Tensor, past: Past | None = None) -> Tensor:
        """[B, T, latent] -> [B, T * 4 in the published codec, latent]."""
        return self._upsample(x, past)

    def _run(self, codes: Tensor, past: Past | None) -> Tensor:
        return self._stack(self.upsampled(self.transformed(self.latents(codes), past), past), past)


@dataclass(frozen=True, slots=True)
class Codec:
    """Both halves of the codec."""

    config: CodecConfig
    decoder: CodecDecoder
    encoder: CodecEncoder


def load_codec(config: FishConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Codec:
    """Loads the folder's codec. The decoder runs in `dtype`, the encoder in float32.

    Raises `ModelError` (`model.bad_checkpoint`) that names the tensor or file at fault.
    """
    table = open_codec(config.folder)
    codec = codec_from(config.codec, table, torch.device(device), dtype)
    table.finish()
    return codec


def codec_from(config: CodecConfig, source: NormedSource, device: torch.device, dtype: torch.dtype, fused: bool | None = None) -> Codec:
    """Builds the codec from any source of tensors; `fused` as for `CodecDecoder`. Raises as the source does."""
    load = CodecLoader(source, "quantizer.", torch.float32, device)
    places = ["semantic_quantizer.quantizers.0.", *(f"quantizer.quantizers.{i}." for i in range(config.residual_codebooks))]
    sizes = [config.semantic_codes] + [config.residual_codes] * config.residual_codebooks
    codebooks = [Codebook(load.at(place), config, size) for place, size in zip(places, sizes)]
    return Codec(config, CodecDecoder(config, source, codebooks, device, dtype, fused), CodecEncoder(config, source, codebooks, device))

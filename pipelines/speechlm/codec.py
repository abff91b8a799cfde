"""Xcodec's decoder, which decodes codes of eight streams to a waveform. It is built from `transformers`;
encoders and HuBERT are never loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.dac.modeling_dac import DacDecoder
from transformers.models.xcodec.configuration_xcodec import XcodecConfig
from transformers.models.xcodec.modeling_xcodec import XcodecModel

from pipelines.codec.batches import longest_first
from pipelines.codec.stage import Decoder
from pipelines.nn.checkpoint import Checkpoint, bad_checkpoint, fill_module
from pipelines.nn.config_keys import read_table
from pipelines.request import CodecIdentity
from pipelines.speechlm.config import SpeechLmConfig, own_keys
from pipelines.speechlm.weights import CODEC

#: Maximum frames of a batch on a GPU, including padding.
BATCH_FRAMES = 16_384


class Xcodec(nn.Module):
    """The part of `XcodecModel` that decodes: a sum over the codebooks, `fc2`, and DAC's decoder without its
    tanh."""

    def __init__(self, config: Any, streams: int) -> None:
        super().__init__()
        self.codebooks = nn.ParameterList(
            torch.zeros(config.codebook_size, config.codebook_dim) for _ in range(streams)
        )
        self.fc2 = nn.Linear(config.hidden_size, config.acoustic_model_config.hidden_size)
        self.acoustic_decoder = DacDecoder(config.acoustic_model_config)
        XcodecModel._adjust_dac_decoder(self.acoustic_decoder)
        self.samples_per_frame: int = config.hop_length
        self._lengths: Tensor | None = None
        for module in self.acoustic_decoder.modules():
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                module.register_forward_hook(self._silence)

    @property
    def device(self) -> torch.device:
        return self.fc2.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc2.weight.dtype

    @torch.inference_mode()
    def forward(self, codes: Tensor, lengths: Tensor | None = None) -> Tensor:
        """int64 [batch, frames, streams] -> samples [batch, frames * samples_per_frame].

        With `lengths` [batch], each row has in its first frames the audio that it would have alone, and zeros
        after them.
        """
        streams = torch.arange(len(self.codebooks), device=codes.device)
        frames = self.fc2(torch.stack(tuple(self.codebooks))[streams, codes].sum(-2)).transpose(1, 2)
        self._lengths = None if lengths is None else lengths / codes.shape[1]
        return self.acoustic_decoder(self._silence(None, (), frames)).squeeze(1)

    def _silence(self, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
        """Sets values after the end of each row to zero: [batch, channels, time]. A convolution pads a row
        that is alone with the same zeros."""
        if self._lengths is None:
            return output
        ends = (self._lengths * output.shape[-1]).round()
        return output * (torch.arange(output.shape[-1], device=output.device) < ends[:, None])[:, None]


def load_codec(
    checkpoint: Checkpoint, config: SpeechLmConfig, device: torch.device, dtype: torch.dtype
) -> Xcodec:
    """The decoder with the weights that are in the checkpoint, so that nothing is downloaded.

    Raises `ModelError` (`model.bad_checkpoint`) that names the tensor.
    """
    sizes = _sizes(config)
    if sizes.codebook_size != config.codes:
        raise bad_checkpoint(
            f"The codec has {sizes.codebook_size} codes, but config.json says {config.codes}."
        )
    with torch.device("meta"):
        codec = Xcodec(sizes, config.streams)
    published = {r"^codebooks\.(\d+)$": r"quantizer.quantizers.\1.codebook.embed"}
    fill_module(codec, checkpoint, CODEC, device, dtype, published)
    return codec


def frame_samples(config: SpeechLmConfig) -> int:
    """Samples of a frame, without loading the codec."""
    return _sizes(config).hop_length


def identity(config: SpeechLmConfig) -> CodecIdentity:
    """The identity of the codec. Raises `ModelError` (`model.bad_checkpoint`)."""
    digest = hashlib.sha256()
    name = config.xcodec_hf_model_tag.rpartition("/")[2]
    with Checkpoint(config.folder) as checkpoint:
        checkpoint.update_digest(digest, CODEC)
    rate = config.sample_rate / frame_samples(config)
    return CodecIdentity(name, digest.hexdigest(), rate, config.sample_rate, (config.codes,) * config.streams)


def _sizes(config: SpeechLmConfig) -> Any:
    """The codec's config: that of the folder in the checkpoint, or else the published one, which is the
    library's default."""
    tag = config.xcodec_hf_model_tag
    place = config.folder / tag / "config.json"
    if ".." in Path(tag).parts or not place.is_file():
        return XcodecConfig()
    table = own_keys(read_table(place))
    try:
        return XcodecConfig(**table)
    except (TypeError, ValueError) as error:
        raise bad_checkpoint(f"{place} does not describe a codec: {error}.") from error


class XcodecDecoder(Decoder):
    """Decodes whole utterances. On the CPU each is decoded alone, because it is rounded differently in a
    batch."""

    def __init__(self, codec: Xcodec) -> None:
        self.codec = codec

    def new_state(self) -> None:
        return None

    def decode(self, codes: Sequence[Tensor], states: Sequence[None] | None = None) -> list[Tensor]:
        """Codes [frames, streams] each -> float32 samples each."""
        if self.codec.device.type == "cpu":
            return [self.codec(row[None])[0].float() for row in codes]
        made = dict[int, Tensor]()
        for batch in longest_first([len(row) for row in codes], BATCH_FRAMES):
            made.update(zip(batch, self.decode_padded([codes[index] for index in batch])))
        return [made[index] for index in range(len(codes))]

    def decode_padded(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """Decodes utterances in one batch. The padding of shorter ones does not change their audio."""
        lengths = [len(row) for row in codes]
        padded = nn.utils.rnn.pad_sequence(list(codes), batch_first=True).to(self.codec.device)
        waves = self.codec(padded, torch.tensor(lengths, device=padded.device)).float()
        return [wave[: length * self.codec.samples_per_frame] for wave, length in zip(waves, lengths)]

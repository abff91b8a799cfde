"""BiCodec: features and a recording to semantic and global tokens, tokens to a waveform."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.registry import to_device
from pipelines.nn.checkpoint import Checkpoint, fill_module
from pipelines.spark_tts.blocks import Encoder, Prenet
from pipelines.spark_tts.config import BICODEC, BiCodecConfig, SparkConfig
from pipelines.spark_tts.speaker import PUBLISHED, MelMagnitudes, SpeakerEncoder
from pipelines.spark_tts.wave_generator import FusedWave, WaveGenerator, prepared

#: In the checkpoint but not needed to speak: training targets, a pooled speaker vector, statistics, the mel filters.
_UNUSED = (
    "postnet.*",
    "mel_transformer.*",
    "quantizer.cluster_size",
    "speaker_encoder.speaker_encoder.pool.*",
    "speaker_encoder.speaker_encoder.bn.*",
    "speaker_encoder.speaker_encoder.linear.*",
)


class SemanticQuantizer(nn.Module):
    """A factorized codebook: vectors are compared in few dimensions, by direction (Yu et al., 2022)."""

    def __init__(self, dim: int, codes: int, inner: int) -> None:
        super().__init__()
        self.in_project = nn.Conv1d(dim, inner, 1)
        self.out_project = nn.Conv1d(inner, dim, 1)
        self.codebook = nn.Embedding(codes, inner)

    def tokens(self, x: Tensor) -> Tensor:
        """x: [batch, steps, dim] -> int64 [batch, steps]."""
        inner = functional.normalize(self.in_project(x.transpose(1, 2)).transpose(1, 2), dim=-1)
        return (inner @ functional.normalize(self.codebook.weight, dim=-1).T).argmax(-1)

    def vectors(self, tokens: Tensor) -> Tensor:
        """int64 [batch, steps] -> [batch, dim, steps]."""
        return self.out_project(self.codebook(tokens).transpose(1, 2))


class Tokenizer:
    """The encoding half, always in float32: ids must not depend on the type that the decoder runs in."""

    def __init__(self, encoder: Encoder, quantizer: SemanticQuantizer, speaker: SpeakerEncoder, mel: MelMagnitudes) -> None:
        self.encoder = encoder
        self.quantizer = quantizer
        self.speaker = speaker
        self.mel = mel

    @torch.inference_mode()
    def semantic_tokens(self, features: Tensor) -> Tensor:
        """features: float32 [batch, steps, dim], recordings of equal length -> int64 [batch, steps]."""
        return self.quantizer.tokens(self.encoder(features))

    @torch.inference_mode()
    def global_tokens(self, clips: Tensor) -> Tensor:
        """clips: float32 [batch, clip samples] -> int64 [batch, tokens]."""
        return self.speaker.tokens(self.mel(clips))


class BiCodec:
    """The decoding half. Not causal: about 60 tokens on either side shape a token's audio."""

    def __init__(
        self,
        config: BiCodecConfig,
        quantizer: SemanticQuantizer,
        speaker: SpeakerEncoder,
        prenet: Prenet,
        wave: WaveGenerator | FusedWave,
    ) -> None:
        self.config = config
        self.quantizer = quantizer
        self.speaker = speaker
        self.prenet = prenet
        self.wave = wave
        self.device = prenet.linear.weight.device
        self.dtype = prenet.linear.weight.dtype

    @torch.inference_mode()
    def decode(self, semantic: Sequence[Tensor], voices: Sequence[Tensor], pad_to: int = 0) -> list[Tensor]:
        """Waveforms (float32 [samples] each) of semantic tokens (int64 [steps] each) in voices (int64 [tokens] each).

        Tokens lie on the host, which does not wait for a GPU. Rows of different lengths are padded, to `pad_to` steps where that is more,
        and masked; each comes out as it would alone.
        """
        lengths = [len(row) for row in semantic]
        longest = max(pad_to, *lengths)
        tokens = to_device(torch.stack([functional.pad(row, (0, longest - len(row))) for row in semantic]), self.device)
        vector = self.vector(to_device(torch.stack(list(voices)), self.device))
        mask = None
        if min(lengths) != longest:
            ends = to_device(torch.tensor(lengths), self.device)
            mask = (torch.arange(longest, device=self.device) < ends[:, None])[:, None].to(self.dtype)
        waves = self.wave(self.mixed(tokens, vector, mask), mask).float()
        samples = self.config.samples_per_token
        return [wave[: len(row) * samples] for wave, row in zip(waves, semantic)]

    def vector(self, voices: Tensor) -> Tensor:
        """Global tokens int64 [batch, tokens] -> the voice vector [batch, output] in float32."""
        return self.speaker.vector(voices)

    def mixed(self, tokens: Tensor, vector: Tensor, mask: Tensor | None = None) -> Tensor:
        """The prenet's output plus the voice: int64 [batch, steps], [batch, output] -> [batch, output, steps]."""
        vectors = self.quantizer.vectors(tokens).to(self.dtype)
        voice = vector.to(self.dtype)
        return self.prenet(vectors, voice, mask) + voice[:, :, None]


def load_bicodec(
    config: SparkConfig, device: torch.device, dtype: torch.dtype = torch.float32, fused: bool | None = None
) -> tuple[Tokenizer, BiCodec]:
    """Reads BiCodec/; prenet and wave generator run in `dtype`, all else in float32.

    `fused` as for `pipelines.spark_tts.wave_generator.prepared`.

    Raises `ModelError` (`model.bad_checkpoint`) that names the tensor that is missing, unknown or misshapen.
    """
    sizes = config.bicodec
    with torch.device("meta"):
        encoder, prenet = Encoder(sizes.encoder), Prenet(sizes.prenet, sizes.speaker.output)
        quantizer = SemanticQuantizer(sizes.encoder.output, sizes.codebook_size, sizes.codebook_dim)
        speaker, wave = SpeakerEncoder(sizes.speaker), WaveGenerator(sizes.wave)
    with Checkpoint.open(config.folder / BICODEC) as checkpoint:
        for name, module in (("encoder.", encoder), ("quantizer.", quantizer), ("decoder.", wave)):
            fill_module(module, checkpoint, name, device)
        fill_module(speaker, checkpoint, "speaker_encoder.", device, published=PUBLISHED)
        fill_module(prenet, checkpoint, "prenet.", device, dtype)
        checkpoint.ignore(*_UNUSED)
        checkpoint.finish()
    tokenizer = Tokenizer(encoder, quantizer, speaker, MelMagnitudes(sizes.mel, config.sample_rate, device))
    return tokenizer, BiCodec(sizes, quantizer, speaker, prenet, prepared(wave, dtype, fused))

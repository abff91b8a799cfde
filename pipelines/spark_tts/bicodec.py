"""BiCodec: encodes features to semantic tokens and a recording to global tokens, and decodes both to a
waveform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.registry import to_device
from pipelines.codec.batches import longest_first
from pipelines.codec.stage import Decoder
from pipelines.nn.checkpoint import Checkpoint, fill_module
from pipelines.spark_tts.config import BICODEC, BiCodecConfig, SparkConfig, VocosConfig
from pipelines.spark_tts.speaker import MelMagnitudes, SpeakerEncoder
from pipelines.spark_tts.wave_generator import FusedWave, WaveGenerator, masked, prepared

_LAYER_NORM_EPS = 1e-6


class AdaLayerNorm(nn.Module):
    """A layer norm whose scale and shift are linear functions of a condition."""

    def __init__(self, condition: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Linear(condition, dim)
        self.shift = nn.Linear(condition, dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: [batch, steps, dim]; condition: [batch, condition]."""
        normed = functional.layer_norm(x, x.shape[-1:], eps=_LAYER_NORM_EPS)
        return normed * self.scale(condition)[:, None] + self.shift(condition)[:, None]


class ConvNeXt(nn.Module):
    """A ConvNeXt block of Vocos (Siuzdak, 2023): depthwise convolution over time, then a feed-forward network
    for each step."""

    def __init__(self, dim: int, intermediate: int, condition: int | None) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)
        self.norm = _norm(dim, condition)
        self.pwconv1 = nn.Linear(dim, intermediate)
        self.pwconv2 = nn.Linear(intermediate, dim)
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, mask: Tensor | None, condition: Tensor | None) -> Tensor:
        """x: [batch, dim, steps]; condition: [batch, condition]."""
        inner = _normed(self.norm, self.dwconv(masked(x, mask)).transpose(1, 2), condition)
        inner = self.pwconv2(functional.gelu(self.pwconv1(inner)))
        return x + (self.gamma * inner).transpose(1, 2)


class Vocos(nn.Module):
    """A stack of ConvNeXt blocks: [batch, input, steps] -> [batch, steps, dim]. Not causal."""

    def __init__(self, config: VocosConfig, input: int, layers: int, condition: int | None = None) -> None:
        super().__init__()
        dim = config.vocos_dim
        intermediate = config.vocos_intermediate_dim
        self.embed = nn.Conv1d(input, dim, 7, padding=3)
        self.norm = _norm(dim, condition)
        self.convnext = nn.ModuleList([ConvNeXt(dim, intermediate, condition) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(dim, eps=_LAYER_NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor | None = None, condition: Tensor | None = None) -> Tensor:
        x = _normed(self.norm, self.embed(masked(x, mask)).transpose(1, 2), condition).transpose(1, 2)
        for block in self.convnext:
            x = block(x, mask, condition)
        return self.final_layer_norm(x.transpose(1, 2))


class Encoder(nn.Module):
    """Maps features of wav2vec2 to the vectors from which semantic tokens are chosen: [batch, steps, input]
    -> [batch, steps, output]."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__()
        self.encoder = Vocos(config, config.input_channels, config.vocos_num_layers)
        self.downsample = _samplings(config)
        self.project = nn.Linear(config.vocos_dim, config.out_channels)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: [batch, 1, steps], 0 after the end of each row."""
        x = self.encoder(features.transpose(1, 2), mask)
        for block in self.downsample:
            x = block(x, mask)
        return self.project(x)


class Prenet(nn.Module):
    """Maps semantic vectors, conditioned on a voice, to the input of the wave generator: [batch, input,
    steps] -> [batch, output, steps]."""

    def __init__(self, config: VocosConfig, condition: int) -> None:
        super().__init__()
        self.linear_pre = nn.Linear(config.input_channels, config.vocos_dim)
        self.downsample = _samplings(config)
        self.vocos_backbone = Vocos(config, config.vocos_dim, config.vocos_num_layers, condition)
        self.linear = nn.Linear(config.vocos_dim, config.out_channels)

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> Tensor:
        """condition: [batch, condition], the voice."""
        y = self.linear_pre(x.transpose(1, 2))
        for block in self.downsample:
            y = block(y, mask)
        return self.linear(self.vocos_backbone(y.transpose(1, 2), mask, condition)).transpose(1, 2)


class Sampling(nn.Sequential):
    """The published sampling block at ratio 1, which returns three times its input, followed by a Vocos."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__(nn.Identity(), Vocos(config, config.vocos_dim, 2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """x: [batch, steps, dim]."""
        return self[1](3 * x.transpose(1, 2), mask)


def _samplings(config: VocosConfig) -> nn.ModuleList:
    return nn.ModuleList([Sampling(config) for _ in config.sample_ratios])


def _norm(dim: int, condition: int | None) -> nn.Module:
    return nn.LayerNorm(dim, eps=_LAYER_NORM_EPS) if condition is None else AdaLayerNorm(condition, dim)


def _normed(norm: nn.Module, x: Tensor, condition: Tensor | None) -> Tensor:
    return norm(x, condition) if isinstance(norm, AdaLayerNorm) else norm(x)


#: Tensors of the checkpoint that synthesis does not need: training targets, a pooled speaker vector,
#: statistics, the mel filters.
_UNUSED = (
    "postnet.*",
    "mel_transformer.*",
    "quantizer.cluster_size",
    "speaker_encoder.speaker_encoder.pool.*",
    "speaker_encoder.speaker_encoder.bn.*",
    "speaker_encoder.speaker_encoder.linear.*",
)


class SemanticQuantizer(nn.Module):
    """A factorized codebook, which compares the directions of vectors in few dimensions (Yu et al., 2022)."""

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


class Tokenizer(NamedTuple):
    """The encoder of BiCodec, always in float32, so that tokens do not depend on the dtype of the decoder."""

    encoder: Encoder
    quantizer: SemanticQuantizer
    speaker: SpeakerEncoder
    mel: MelMagnitudes

    @torch.inference_mode()
    def semantic_tokens(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """features: float32 [batch, steps, dim]; mask: bool [batch, steps], False after the end of each row
        -> int64 [batch, steps]."""
        return self.quantizer.tokens(self.encoder(features, None if mask is None else mask[:, None]))


@dataclass(eq=False)
class BiCodec:
    """The decoder of BiCodec. It is not causal: a token's audio depends on about 60 tokens on either side."""

    config: BiCodecConfig
    quantizer: SemanticQuantizer
    speaker: SpeakerEncoder
    prenet: Prenet
    wave: WaveGenerator | FusedWave

    def __post_init__(self) -> None:
        weight = self.prenet.linear.weight
        self.device = weight.device
        self.dtype = weight.dtype

    @torch.inference_mode()
    def decode(self, semantic: Sequence[Tensor], voices: Sequence[Tensor], pad_to: int = 0) -> list[Tensor]:
        """Waveforms (float32 [samples] each) of semantic tokens (int64 [steps] each) in voices (int64
        [tokens] each).

        Tokens are on the host, which does not wait for a GPU. Rows of different lengths are padded, to
        `pad_to` steps if that is longer, and masked; each gets the result that it would get alone.
        """
        lengths = [len(row) for row in semantic]
        longest = max(pad_to, *lengths)
        tokens = to_device(
            torch.stack([functional.pad(row, (0, longest - len(row))) for row in semantic]), self.device
        )
        vector = self.speaker.vector(to_device(torch.stack(list(voices)), self.device))
        mask = None
        if min(lengths) != longest:
            ends = to_device(lengths, self.device)
            mask = (torch.arange(longest, device=self.device) < ends[:, None])[:, None].to(self.dtype)
        waves = self.wave(self.mixed(tokens, vector, mask), mask).float()
        samples = self.config.samples_per_token
        return [wave[: len(row) * samples] for wave, row in zip(waves, semantic)]

    def mixed(self, tokens: Tensor, vector: Tensor, mask: Tensor | None = None) -> Tensor:
        """The prenet's output plus the voice: int64 [batch, steps], [batch, output] -> [batch, output,
        steps]."""
        vectors = self.quantizer.vectors(tokens).to(self.dtype)
        voice = vector.to(self.dtype)
        return self.prenet(vectors, voice, mask) + voice[:, :, None]


def load_bicodec(
    config: SparkConfig,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    fused: bool | None = None,
    decodes: bool = True,
) -> tuple[Tokenizer, BiCodec | None]:
    """Reads BiCodec/, the decoder only with `decodes`. Prenet and wave generator run in `dtype`, the other parts in float32.

    `fused`: see `pipelines.spark_tts.wave_generator.prepared`.

    Raises `ModelError` (`model.bad_checkpoint`) that names a tensor that is missing, unknown or of another
    shape.
    """
    sizes = config.bicodec
    with torch.device("meta"):
        encoder = Encoder(sizes.encoder)
        prenet = Prenet(sizes.prenet, sizes.speaker.out_dim)
        quantizer = SemanticQuantizer(sizes.encoder.out_channels, sizes.codebook_size, sizes.codebook_dim)
        speaker = SpeakerEncoder(sizes.speaker)
        wave = WaveGenerator(sizes.wave)
    with Checkpoint(config.folder / BICODEC) as checkpoint:
        parts = {"encoder": encoder, "quantizer": quantizer, "speaker_encoder": speaker}
        if decodes:
            parts["decoder"] = wave
            fill_module(prenet, checkpoint, "prenet.", device, dtype)
        for name, module in parts.items():
            fill_module(module, checkpoint, f"{name}.", device)
        checkpoint.ignore(*_UNUSED, *([] if decodes else ["prenet.*", "decoder.*"]))
        checkpoint.finish()
    mel = MelMagnitudes(sizes.mel_params, config.sample_rate, device)
    codec = BiCodec(sizes, quantizer, speaker, prenet, prepared(wave, dtype, fused)) if decodes else None
    return Tokenizer(encoder, quantizer, speaker, mel), codec


#: Maximum tokens of a batch of the decoder on a GPU, including padding; the widest tensor has 61 kB per token
#: in bfloat16.
BATCH_TOKENS = 8192
#: Lengths are rounded up to multiples of this, so that convolutions run with few shapes.
LENGTH_STEP = 32
#: A stream's window: the tokens before the new ones, and the tokens that must follow a new token before its
#: audio is delivered.
LEFT_TOKENS = 64
RIGHT_TOKENS = 12
#: Samples over which a window fades into the next one: the first samples after the window's new tokens.
FADE_SAMPLES = 320


@dataclass(slots=True, eq=False)
class Voice:
    """The state of an utterance: its global tokens, int64 [tokens], and the progress of a stream."""

    tokens: Tensor
    #: All semantic tokens so far.
    semantic: list[int] = field(default_factory=list[int])
    #: Number of tokens whose audio was delivered.
    delivered: int = 0
    #: Samples of the last window after the delivered ones, which fade into the next window.
    tail: Tensor | None = None


class BiCodecDecoder(Decoder):
    """Decodes semantic tokens, int64 [steps, 1], as the codes of the codec's stage. Its states are voices.

    Empty codes end a stream. On the CPU, and with `alone`, every utterance is decoded by itself: in a batch it
    is rounded differently, and on a CPU a batch is not faster.
    """

    def __init__(self, codec: BiCodec, alone: bool = False) -> None:
        self.codec = codec
        self._alone = alone or codec.device.type == "cpu"
        self._samples = codec.config.samples_per_token

    def new_state(self) -> Voice:
        """A placeholder: every request has a voice of its own."""
        return Voice(torch.zeros(self.codec.config.speaker.token_num, dtype=torch.long))

    def decode(self, codes: Sequence[Tensor], states: Sequence[Voice | None] | None = None) -> list[Tensor]:
        """Whole utterances in the voices of `states` -> float32 samples each."""
        voices = [(state or self.new_state()).tokens for state in states or [None] * len(codes)]
        return self._decode([row[:, 0] for row in codes], voices)

    def decode_chunk(self, states: Sequence[Voice], codes: Sequence[Tensor]) -> list[Tensor]:
        """Adds the next tokens of streams. Returns the audio of tokens that are followed by enough later
        ones."""
        ready = list[tuple[int, int, int]]()
        for at, (state, new) in enumerate(zip(states, codes)):
            state.semantic += new[:, 0].tolist()
            end = len(state.semantic) - (RIGHT_TOKENS if len(new) else 0)
            if end > state.delivered:
                ready.append((at, max(0, state.delivered - LEFT_TOKENS), end))
        windows = [torch.tensor(states[at].semantic[start:]) for at, start, _ in ready]
        waves = self._decode(windows, [states[at].tokens for at, _, _ in ready])
        found = [torch.zeros(0)] * len(states)
        for (at, start, end), wave in zip(ready, waves):
            state = states[at]
            first = (state.delivered - start) * self._samples
            last = (end - start) * self._samples
            found[at] = new = wave[first:last].clone()
            if state.tail is not None:
                # The last window fades into this one.
                size = min(len(state.tail), len(new))
                rise = torch.linspace(0, 1, size, device=new.device)
                new[:size] = new[:size] * rise + state.tail[:size] * (1 - rise)
            tail = wave[last : last + FADE_SAMPLES]
            state.tail = tail.clone() if len(tail) else None
            state.delivered = end
        return found

    def _decode(self, semantic: list[Tensor], voices: list[Tensor]) -> list[Tensor]:
        if self._alone:
            return [self.codec.decode([row], [voice])[0] for row, voice in zip(semantic, voices)]
        waves = dict[int, Tensor]()
        for batch in longest_first([len(row) for row in semantic], BATCH_TOKENS):
            longest = -(-len(semantic[batch[0]]) // LENGTH_STEP) * LENGTH_STEP
            made = self.codec.decode(
                [semantic[index] for index in batch], [voices[index] for index in batch], pad_to=longest
            )
            waves.update(zip(batch, made))
        return [waves[index] for index in range(len(semantic))]

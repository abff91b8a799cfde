"""The 12 Hz codec decoder: codes in, waveform out; whole utterances or chunk by chunk, with equal results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad

from kernels.registry import to_device
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.nn.checkpoint import Checkpoint
from pipelines.nn.codec_fused import FusedStack, codec_kernels
from pipelines.qwen3_tts.codec_blocks import (
    CausalConv,
    ConvNeXt,
    ConvStack,
    Loader,
    Past,
    Repeat,
    SlidingTransformer,
    StateLayout,
    TensorSource,
)
from pipelines.qwen3_tts.codec_config import CodecConfig, CodecDecoderConfig
from pipelines.qwen3_tts.codec_encoder import CodecEncoder

#: Lengths are filled up to a multiple of this, which bounds the number of shapes that kernels and libraries meet.
LENGTH_STEP = 8
#: Frames that a batch costs at least, however small (its launches), and that each batch costs beside its own.
LEAST_FRAMES, BATCH_COST = 600, 100
#: Rows of every batch in reproducible mode.
FIXED_ROWS = 8


def round_up(frames: int) -> int:
    return -(-frames // LENGTH_STEP) * LENGTH_STEP


def cheapest(lengths: Sequence[int], most_frames: int, pass_frames: int) -> list[list[int]]:
    """The cut of utterances into batches that costs the least by the figures above; empty ones are left out.

    A batch is as wide as its longest utterance and has at most `most_frames` frames, of which a row counts at most `pass_frames`:
    longer ones are decoded in passes of that many. The longest utterances come first.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    widths = [round_up(lengths[i]) for i in order]
    # best[end]: the least cost of the first `end` utterances, and where their last batch begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        choices: list[tuple[int, int]] = []
        for begin in range(end - 1, -1, -1):
            rows, width = end - begin, widths[begin]
            if rows > 1 and rows * min(width, pass_frames) > most_frames:
                break
            choices.append((best[begin][0] + max(rows * width, LEAST_FRAMES) + BATCH_COST, begin))
        best.append(min(choices))
    batches: list[list[int]] = []
    end = len(order)
    while end:
        begin = best[end][1]
        batches.append(order[begin:end])
        end = begin
    return batches[::-1]


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of at most `FIXED_ROWS` utterances of one filled-up length: the shape that an utterance meets depends on its length only."""
    sizes: dict[int, list[int]] = {}
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        sizes.setdefault(round_up(lengths[i]), []).append(i)
    return [same[start : start + FIXED_ROWS] for same in sizes.values() for start in range(0, len(same), FIXED_ROWS)]


PRE_CONV_KERNEL = 3
USAGE_FLOOR = 1e-5
PASS_FRAMES = 512
BATCH_FRAMES = 4096


@dataclass(slots=True)
class CodecState:
    """What the decoder remembers of one stream.

    `values`: [size] flat histories of all convolutions and the last keys and values of all layers; `frames`: frames decoded so far.
    """

    values: Tensor
    frames: int

    def copy(self) -> CodecState:
        """An independent copy, so that a voice's warm state can start many streams."""
        return CodecState(self.values.clone(), self.frames)


class CodecDecoder:
    """Turns codes [frames, codebooks] into 24 kHz audio, `samples_per_frame` samples a frame, strictly causal.

    On a CPU every utterance is decoded by itself, so that its samples do not depend on its neighbours, bit for bit. On a GPU
    utterances of like length share a batch, padded on the right, which no sample inside can see; where it has to be `reproducible`,
    every batch there has the same number of rows and utterances of one padded length, so that a row's samples do not depend on its
    neighbours, bit for bit. `fused` runs the convolution stack on fused ops; by default it does in bfloat16 on a GPU, where they have
    kernels.
    """

    def __init__(
        self,
        config: CodecDecoderConfig,
        source: TensorSource,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        fused: bool | None = None,
        reproducible: bool = False,
    ) -> None:
        self.config = config
        self._alone = torch.device(device).type == "cpu"
        self._fixed = reproducible and not self._alone
        self.device = torch.device(device)
        self.dtype = dtype
        self.samples_per_frame = config.samples_per_frame
        layout = StateLayout()
        load = Loader(source, "decoder.", dtype, self.device)
        self._table = _code_table(config, load.at("quantizer.").float()).to(dtype)
        self._offsets = torch.arange(config.num_quantizers, device=self.device) * config.codebook_size
        self._pre_conv = CausalConv(load.at("pre_conv.conv."), layout, config.codebook_dim, config.latent_dim, PRE_CONV_KERNEL)
        self._transformer = SlidingTransformer(load.at("pre_transformer."), layout, config)
        self._upsample = [
            (
                Repeat(load.at(f"upsample.{i}.0.conv."), config.latent_dim, factor),
                ConvNeXt(load.at(f"upsample.{i}.1."), layout, config.latent_dim),
            )
            for i, factor in enumerate(config.upsampling_ratios)
        ]
        stack = ConvStack(load.at("decoder."), layout, config)
        if fused is None:
            fused = self.device.type == "cuda" and dtype == torch.bfloat16 and codec_kernels()
        elif fused and self.device.type == "cuda":
            import_module("kernels.codec_launch")  # gives the fused ops their kernels
        self._stack = FusedStack(stack) if fused else stack
        self.state_size = layout.size

    def new_state(self) -> CodecState:
        """The state before the first frame of a stream."""
        return CodecState(torch.zeros(self.state_size, dtype=self.dtype, device=self.device), 0)

    @torch.inference_mode()
    def decode(self, codes: Sequence[Tensor], states: Sequence[CodecState] | None = None) -> list[Tensor]:
        """Decodes whole utterances.

        codes: one [frames, codebooks] of integers each, lengths may differ. `states` (such as a cloned voice's, after its reference
        codes) are where the utterances start; they are read, not changed. Returns float32 [frames * samples_per_frame] each, in [-1, 1].
        Raises `SynthesisError` (`synth.engine`) on codes of another shape or outside the codebooks.
        """
        for item in codes:
            self._check(item)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        warm = [states is not None and states[i].frames > 0 for i in range(len(codes))]
        for indices in self._batches([len(item) for item in codes], warm):
            # A fresh state takes the same path as none, so that the samples are the same to the last bit.
            starts = [states[i] for i in indices] if states is not None and any(warm[i] for i in indices) else None
            decoded = self._decode_padded([codes[i] for i in indices], starts)
            for i, wave in zip(indices, decoded):
                waves[i] = wave[: len(codes[i]) * self.samples_per_frame]
        return waves

    @torch.inference_mode()
    def decode_chunk(self, states: Sequence[CodecState], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decodes the next frames of several streams and moves their states on.

        codes: one [n, codebooks] each, n may differ. Whatever the chunks, their concatenation equals `decode` up to rounding.
        Returns float32 [n * samples_per_frame] each. Raises as `decode`.
        """
        for item in codes:
            self._check(item)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        order = sorted(range(len(codes)), key=lambda i: len(codes[i]))
        for frames, same in groupby(order, key=lambda i: len(codes[i])):
            for indices in self._rows(list(same), frames):
                rows = self._filled([codes[i].to(self.device) for i in indices])
                past = self._past([states[i] for i in indices], len(rows))
                decoded = self._run(torch.stack(rows), past)
                for row, i in enumerate(indices):
                    states[i].values = past.after[row].clone() if len(rows) > 1 else past.after[row]
                    states[i].frames += frames
                    waves[i] = decoded[row]
        return waves

    def _check(self, codes: Tensor) -> None:
        quantizers, size = self.config.num_quantizers, self.config.codebook_size
        if codes.dim() != 2 or codes.shape[1] != quantizers or codes.is_floating_point():
            raise SynthesisError(
                ErrorCode.SYNTH_ENGINE,
                f"The codec got codes of shape {list(codes.shape)} and type {codes.dtype}, not [frames, {quantizers}] integers.",
            )
        # On a GPU this test would make the host wait for the device; there codes come from samplers that cannot leave the codebook.
        if not codes.is_cuda and codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) < size):
            raise SynthesisError(
                ErrorCode.SYNTH_ENGINE,
                f"The codec got codes from {int(codes.min())} to {int(codes.max())}; its codebooks hold 0 to {size - 1}.",
            )

    def _batches(self, lengths: Sequence[int], warm: Sequence[bool]) -> list[list[int]]:
        """Groups utterances that are decoded together; `warm` ones do not start from nothing."""
        if self._alone:
            return [[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]) if lengths[i]]
        if not self._fixed:
            return cheapest(lengths, BATCH_FRAMES, PASS_FRAMES)
        kinds = [[length if one is kind else 0 for length, one in zip(lengths, warm)] for kind in (False, True)]
        return [indices for kind in kinds for indices in alike(kind)]

    def _filled(self, codes: list[Tensor]) -> list[Tensor]:
        """Codes of one length with as many silent rows as a batch must have."""
        return codes + [torch.zeros_like(codes[0])] * (FIXED_ROWS - len(codes)) if self._fixed else codes

    def _rows(self, indices: list[int], frames: int) -> list[list[int]]:
        """Splits streams with chunks of one length into batches."""
        if not frames:
            return []
        rows = 1 if self._alone else FIXED_ROWS if self._fixed else max(1, BATCH_FRAMES // frames)
        return [indices[start : start + rows] for start in range(0, len(indices), rows)]

    def _past(self, states: Sequence[CodecState], rows: int) -> Past:
        """What the streams remember, filled up with fresh ones to so many rows."""
        states = [*states, *[self.new_state() for _ in range(rows - len(states))]]
        positions = torch.tensor([state.frames for state in states], device=self.device)
        return Past(torch.stack([state.values for state in states]), positions)

    def _decode_padded(self, codes: Sequence[Tensor], states: Sequence[CodecState] | None) -> Tensor:
        """[B] utterances -> [B, samples of the longest one, rounded up]; memory is bounded by going through long ones in passes."""
        longest = max(len(item) for item in codes)
        padded = longest if self._alone else round_up(longest)
        batch = torch.stack(self._filled([pad(item, (0, 0, 0, padded - len(item))) for item in codes]))
        batch = to_device(batch, self.device) if batch.device.type == "cpu" else batch
        if states is None and padded <= PASS_FRAMES:
            return self._run(batch, None)
        past = self._past(states or [], len(batch))
        waves: list[Tensor] = []
        for part in batch.split(PASS_FRAMES, dim=1):
            waves.append(self._run(part, past))
            past = Past(past.after, past.positions + part.shape[1])
        return torch.cat(waves, dim=1)

    def _run(self, codes: Tensor, past: Past | None) -> Tensor:
        """One pass: [B, T, codebooks] -> float32 [B, T * samples_per_frame]."""
        x = embedding(codes.long() + self._offsets, self._table).sum(dim=2)
        x = self._transformer(self._pre_conv(x, past), past)
        for repeat, convnext in self._upsample:
            x = convnext(repeat(x), past)
        return self._stack(x, past)


def _code_table(config: CodecDecoderConfig, load: Loader) -> Tensor:
    """Every code's contribution to the decoder's input: [codebooks * codebook_size, codebook_dim].

    A code's vector is embedding_sum / cluster_usage; since projection is linear, projecting the table equals projecting the sums.
    """
    size, width, dim = config.codebook_size, config.codebook_dim // 2, config.codebook_dim
    tables: list[Tensor] = []
    for name, layers in (
        ("rvq_first", config.num_semantic_quantizers),
        ("rvq_rest", config.num_quantizers - config.num_semantic_quantizers),
    ):
        load(f"{name}.input_proj.weight", width, dim, 1)  # part of the file, used for encoding only
        projection = load(f"{name}.output_proj.weight", dim, width, 1).squeeze(2)
        for i in range(layers):
            codebook = load.at(f"{name}.vq.layers.{i}._codebook.")
            usage = codebook("cluster_usage", size).clamp(min=USAGE_FLOOR)
            tables.append(linear(codebook("embedding_sum", size, width) / usage[:, None], projection))
    return torch.cat(tables)


@dataclass(frozen=True, slots=True)
class Codec:
    """Both halves of the 12 Hz codec."""

    config: CodecConfig
    decoder: CodecDecoder
    encoder: CodecEncoder


def load_codec(
    folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, reproducible: bool = False
) -> Codec:
    """Loads a `speech_tokenizer` folder. The decoder runs in `dtype`; the encoder always in float32, since codes are not continuous.

    Raises `ModelError` (`model.bad_checkpoint`) that names the tensor or file at fault when any is missing, unknown or misshapen.
    """
    config = CodecConfig.load(folder)
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.ignore("*rotary_emb*")
        codec = Codec(
            config,
            CodecDecoder(config.decoder, checkpoint, device, dtype, reproducible=reproducible),
            CodecEncoder(config, checkpoint, device),
        )
        checkpoint.finish()
    return codec

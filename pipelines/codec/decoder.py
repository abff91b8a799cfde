"""Codes to a waveform by a causal codec: batches of whole utterances, and streams chunk by chunk, with
equal results."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kernels.registry import on_device, to_device
from kernels.toolchain import triton_fault
from pipelines.codec.batches import FIXED_ROWS, PADDING_COST, alike, cheapest, round_up
from pipelines.codec.blocks import Past
from pipelines.codec.graphs import (
    STEP_FRAMES,
    StreamGraphs,
    UtteranceGraphs,
    pieces,
    stream_bytes,
    utterance_bytes,
)
from pipelines.codec.stage import Decoder
from pipelines.codec.states import CodecShape, CodecState, Written
from pipelines.codec.transfer import Samples, SamplesOnTheWay, pinned, recorded
from pipelines.errors import ErrorCode, SynthesisError

#: (rows, frames) of batches whose kernels `warm` makes. Triton makes others for multiples of 16, and tiles
#: differ by frames.
_WARM_BATCHES = ((3, 56), (3, 48), (3, 104), (3, 112), (16, 56), (16, 104), (16, 112))
#: Frames of one pass of a decoder, and of all rows of a pass: what bounds its memory.
PASS_FRAMES, BATCH_FRAMES = 512, 4096


class CausalDecoder(Decoder[CodecState]):
    """Turns codes [frames, codebooks] into audio, `samples_per_frame` samples a frame, strictly causal.

    On a CPU every utterance is decoded by itself, so that its samples do not depend on its neighbours, bit
    for bit. On a GPU utterances of like length share a batch, padded on the right, which no sample inside
    can see; where it has to be `reproducible`, every batch there has the same number of rows and
    utterances of one padded length, so that a row's samples do not depend on its neighbours, bit for bit.
    A family says what a pass is (`_run`) and sets `state_size` once its blocks are laid out.
    """

    #: Values of a stream's state.
    state_size: int
    #: Whether `_run` makes next to nothing of what lies behind `lengths`.
    skips_padding = False

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        codes_per_frame: int,
        samples_per_frame: int,
        largest_code: int | None,
        reproducible: bool = False,
    ) -> None:
        """`largest_code`: what a code may be at most; None: larger ones stand for a codebook's last."""
        self.device = torch.device(device)
        self.dtype = dtype
        self.samples_per_frame = samples_per_frame
        #: Frames of all rows of a pass; fewer take less memory.
        self.batch_frames = BATCH_FRAMES
        self._codes_per_frame = codes_per_frame
        self._largest_code = largest_code
        self._alone = self.device.type == "cpu"
        self._fixed = reproducible and not self._alone
        self._graphs: StreamGraphs | None = None

    @property
    def shape(self) -> CodecShape:
        return CodecShape(
            self.state_size, self._codes_per_frame, self.samples_per_frame, self.dtype, self.device
        )

    def new_state(self) -> CodecState:
        """The state before the first frame of a stream. Touches no device."""
        return CodecState()

    def prepare_streams(self, rows: int) -> None:
        """On a CUDA device: makes an arena for the states of so many streams, and captures the graphs that
        decode their chunks.

        Without it, and for streams beyond so many, chunks are launched op by op, which is slower. Is
        called once, before the first stream. Raises what a lack of memory raises, where the arena has no
        room.
        """
        if self.device.type == "cpu" or rows < 1:
            return
        with on_device(self.device):
            self._graphs = StreamGraphs(self._run, self.shape, rows, self._fixed).prepare()

    def stream_bytes(self, rows: int) -> int:
        """Bytes of device memory that `prepare_streams(rows)` takes."""
        return 0 if self.device.type == "cpu" or rows < 1 else stream_bytes(self.shape, rows)

    def prepare_utterances(self, rows: int, frames: int = STEP_FRAMES) -> None:
        """On a CUDA device: a stage that is opened afterwards decodes whole utterances as a continuous
        batch, in steps of so many rows and frames, whose graphs are captured here. Without it they are
        gathered into batches for `decode`.

        Raises what a lack of memory raises, where the arena has no room.
        """
        if self.device.type == "cpu" or rows < 1:
            return
        with on_device(self.device):
            self.utterances = UtteranceGraphs(
                self._run, self.shape, rows, frames, self._fixed, self._check
            ).prepare()

    def utterance_bytes(self, rows: int, frames: int = STEP_FRAMES) -> int:
        """Bytes of device memory that `prepare_utterances(rows, frames)` takes."""
        return 0 if self.device.type == "cpu" or rows < 1 else utterance_bytes(self.shape, rows, frames)

    def company(self, frames: int, last: bool) -> tuple[int, int | None]:
        return super().company(frames, last) if self._graphs is None else self._graphs.company(frames, last)

    @torch.inference_mode()
    def start_chunks(
        self, states: Sequence[CodecState], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> SamplesOnTheWay:
        """`decode_chunk` for codes on the host, whose samples come later; nobody waits for the device. One
        thread at a time may call it.

        A stream's state is given back after its last chunk. Raises as `decode`, before any state was moved
        on.
        """
        graphs = self._graphs
        if graphs is None:
            return super().start_chunks(states, codes, last)
        self._check(codes)
        with graphs.on_stream():
            inside = [index for index, state in enumerate(states) if state.enter(graphs.arena)]
            heard, buffers = graphs.replay(
                [states[i] for i in inside], [codes[i] for i in inside], [last[i] for i in inside]
            )
            found = dict(zip(inside, heard))
            parts = [
                found[i] if i in found else self._launched(states[i], codes[i], last[i])
                for i in range(len(codes))
            ]
            event = recorded() if self.device.type == "cuda" else None
        for state, final in zip(states, last):
            if final:
                state.close()
        return SamplesOnTheWay(parts, event, lambda: graphs.take_back(buffers))

    def _launched(self, state: CodecState, codes: Tensor, last: bool) -> list[Samples]:
        """The samples of a stream that has no row, on their way to the host: in the sizes of the graphs,
        so by the same kernels."""
        waves: list[Tensor] = []
        for taken, filled in pieces(len(codes), last):
            part, codes = codes[:taken], codes[taken:]
            (wave,) = self.decode_chunk([state], [pad(part, (0, 0, 0, filled - taken))])
            waves.append(wave[: taken * self.samples_per_frame])
        return pinned(waves) if self.device.type == "cuda" else [wave.numpy() for wave in waves]

    @torch.inference_mode()
    def warm(self) -> None:
        """Makes ready, on a CUDA device, what the first batches of utterances need: compiled kernels and
        set-up libraries."""
        batches = [
            [torch.zeros(frames, self._codes_per_frame, dtype=torch.int64)] * rows
            for rows, frames in _WARM_BATCHES
        ]
        if triton_fault() is None:
            with import_module("kernels.triton_launch").compiled_together():
                for codes in batches:
                    self.decode(codes)
        self.decode(batches[0])

    @torch.inference_mode()
    def decode(self, codes: Sequence[Tensor], states: Sequence[CodecState] | None = None) -> list[Tensor]:
        """Decodes whole utterances.

        codes: one [frames, codebooks] of integers each, lengths may differ. `states` (such as a cloned
        voice's, after its reference codes) are where the utterances start; they are read, not changed.
        Returns float32 [frames * samples_per_frame] each, in [-1, 1]. Raises `SynthesisError`
        (`synth.engine`) on codes of another shape or outside the codebooks.
        """
        self._check(codes)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        warm = [states is not None and states[i].frames > 0 for i in range(len(codes))]
        lengths = [len(item) for item in codes]
        for indices in self._batches(lengths, warm):
            # A fresh state takes the same path as none, so that the samples are the same to the last bit.
            starts = (
                [states[i] for i in indices] if states is not None and any(warm[i] for i in indices) else None
            )
            decoded = self._decode_padded([codes[i] for i in indices], starts)
            for i, wave in zip(indices, decoded):
                waves[i] = wave[: lengths[i] * self.samples_per_frame]
        return waves

    @torch.inference_mode()
    def decode_chunk(self, states: Sequence[CodecState], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decodes the next frames of several streams and moves their states on.

        codes: one [n, codebooks] each, n may differ. Whatever the chunks, their concatenation equals
        `decode` up to rounding. Returns float32 [n * samples_per_frame] each. Raises as `decode`.
        """
        self._check(codes)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        order = sorted(range(len(codes)), key=lambda i: len(codes[i]))
        for frames, same in groupby(order, key=lambda i: len(codes[i])):
            for indices in self._rows(list(same), frames):
                rows = self._filled([codes[i] for i in indices])
                past = self._past([states[i] for i in indices], len(rows))
                decoded = self._run(self._here(torch.stack(rows)), past)
                kept = [
                    past.after[row].clone() if len(rows) > 1 else past.after[row]
                    for row in range(len(indices))
                ]
                written = Written(self.device) if self.device.type == "cuda" else None
                for row, i in enumerate(indices):
                    states[i].values, states[i].written = kept[row], written
                    states[i].frames += frames
                    waves[i] = decoded[row]
        return waves

    def _run(self, codes: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        """One pass: [B, T, codebooks] -> float32 [B, T * samples_per_frame].

        `lengths`: samples of each row that are wanted, where `skips_padding` and there is no past; others
        may be anything.
        """
        raise NotImplementedError

    def _check(self, codes: Sequence[Tensor]) -> None:
        width, largest = self._codes_per_frame, self._largest_code
        for item in codes:
            if item.dim() != 2 or item.shape[1] != width or item.is_floating_point():
                raise SynthesisError(
                    ErrorCode.SYNTH_ENGINE,
                    f"The codec got codes of shape {list(item.shape)} and type {item.dtype}, not [frames, {width}] integers.",
                )
        # On a GPU this test would make the host wait for the device; there codes come from samplers that
        # cannot leave the codebook.
        here = [item for item in codes if not item.is_cuda and item.numel()]
        if not here:
            return
        together = here[0] if len(here) == 1 else torch.cat(here)
        low, high = int(together.min()), int(together.max())
        if low < 0 or (largest is not None and high > largest):
            bounds = "codes start at 0" if largest is None else f"its codebooks hold 0 to {largest}"
            raise SynthesisError(
                ErrorCode.SYNTH_ENGINE, f"The codec got codes from {low} to {high}; {bounds}."
            )

    def _here(self, batch: Tensor) -> Tensor:
        """A tensor on the decoder's device, which the host does not wait for."""
        return batch if batch.device == self.device or batch.is_cuda else to_device(batch, self.device)

    def _batches(self, lengths: Sequence[int], warm: Sequence[bool]) -> list[list[int]]:
        """Groups utterances that are decoded together; `warm` ones do not start from nothing."""
        if self._alone:
            return [[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]) if lengths[i]]
        if not self._fixed:
            # Rows that start somewhere are decoded to the end of their batch.
            padding = PADDING_COST if self.skips_padding and not any(warm) else 1.0
            return cheapest(lengths, self.batch_frames, PASS_FRAMES, padding)
        kinds = [
            [length if one is kind else 0 for length, one in zip(lengths, warm)] for kind in (False, True)
        ]
        return [indices for kind in kinds for indices in alike(kind)]

    def _filled(self, codes: list[Tensor]) -> list[Tensor]:
        """Codes with as many silent rows as a batch must have."""
        return codes + [torch.zeros_like(codes[0])] * (FIXED_ROWS - len(codes)) if self._fixed else codes

    def _rows(self, indices: list[int], frames: int) -> list[list[int]]:
        """Splits streams with chunks of one length into batches."""
        if not frames:
            return []
        rows = 1 if self._alone else FIXED_ROWS if self._fixed else max(1, self.batch_frames // frames)
        return [indices[start : start + rows] for start in range(0, len(indices), rows)]

    def _past(self, states: Sequence[CodecState], rows: int) -> Past:
        """What the streams remember, filled up with fresh ones to so many rows."""
        states = [*states, *[self.new_state() for _ in range(rows - len(states))]]
        positions = self._here(torch.tensor([state.frames for state in states]))
        shape = self.shape
        return Past(torch.stack([state.own_values(shape) for state in states]), positions)

    def _decode_padded(self, codes: Sequence[Tensor], states: Sequence[CodecState] | None) -> Tensor:
        """[B] utterances -> [B, samples of the longest one, rounded up]; memory is bounded by going
        through long ones in passes."""
        lengths = [len(item) for item in codes]
        longest = max(lengths)
        padded = longest if self._alone else round_up(longest)
        together = pad_sequence(self._filled(list(codes)), batch_first=True)
        batch = self._here(pad(together, (0, 0, 0, padded - longest)))
        if states is None and padded <= PASS_FRAMES:
            # Whole rows have lengths too: kernels for rows without ends would be compiled beside those with.
            ends = self.skips_padding and not self._fixed
            return self._run(
                batch, None, [length * self.samples_per_frame for length in lengths] if ends else None
            )
        past = self._past(states or [], len(batch))
        waves: list[Tensor] = []
        for part in batch.split(PASS_FRAMES, dim=1):
            waves.append(self._run(part, past))
            past = Past(past.after, past.positions + part.shape[1])
        return torch.cat(waves, dim=1)

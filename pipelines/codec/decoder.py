"""Causal codecs, which decode codes to a waveform: batches of whole utterances, or streams chunk by chunk,
with equal results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import groupby, product

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kernels.cuda_graphs import CHUNK_PRIORITY, BucketGraphs
from kernels.registry import on_device, to_device
from kernels.toolchain import triton_fault
from pipelines.audio import Samples
from pipelines.codec.batches import (
    FIXED_ROWS,
    PADDING_COST,
    cheapest_batches,
    round_up,
    same_length_batches,
)
from pipelines.codec.blocks import Past
from pipelines.codec.graphs import STEP_FRAMES, StreamGraphs, UtteranceGraphs, pieces
from pipelines.codec.stage import CodecStage, Decoder
from pipelines.codec.states import CodecShape, CodecState, WriteEvent
from pipelines.codec.transfer import PendingSamples, pinned, recorded
from pipelines.errors import engine_error

#: (rows, frames) of the batches that `warm` compiles kernels for. Triton compiles different kernels for
#: multiples of 16, and tiles depend on the number of frames.
_WARM_BATCHES = ((3, 56), (3, 48), (3, 104), (3, 112), (16, 56), (16, 104), (16, 112))
#: Maximum frames of one row of a pass, and of all its rows; they bound its memory.
PASS_FRAMES = 512
BATCH_FRAMES = 4096
#: The frames of codes whose states are made together are padded to a multiple of this; (rows, frames) of the
#: batches of a server's first requests.
STATE_FRAMES = 64
_WARM_STATES = tuple(product((1, 2, 4), (64, 128)))
#: States that keep the values that were made from their codes.
KEPT_STATES = 64
#: Codes, the values of the state after them, and the event of the write.
Made = tuple[Tensor, Tensor, WriteEvent | None]


class CausalDecoder(Decoder):
    """Decodes codes [frames, codebooks] to audio with `samples_per_frame` samples per frame; strictly causal.

    On a CPU every utterance is decoded alone, so that its bits do not depend on others. On a GPU utterances
    of similar length share a batch, padded on the right, which does not affect their samples; if
    `reproducible`, every batch has the same number of rows and one padded length, so that the bits of a row
    do not depend on the others. A family implements a pass (`run`) and sets `state_size`.
    """

    #: Number of values of a stream's state.
    state_size: int
    #: Whether `run` does almost no work for samples after `lengths`.
    skips_padding = False
    #: Minimum frames of `states_after`; 0: the decoder does not have it.
    reach = 0

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        codes_per_frame: int,
        samples_per_frame: int,
        largest_code: int | None,
        reproducible: bool = False,
    ) -> None:
        """`largest_code`: the maximum code; None: any larger code selects the codebook's last entry."""
        self.device = torch.device(device)
        self.dtype = dtype
        self.samples_per_frame = samples_per_frame
        #: Maximum frames of all rows of a pass; fewer take less memory.
        self.batch_frames = BATCH_FRAMES
        self._codes_per_frame = codes_per_frame
        self._largest_code = largest_code
        self.alone = self.device.type == "cpu"
        self.fixed = reproducible and not self.alone
        self.stream_graphs: StreamGraphs | None = None
        self.state_graphs: BucketGraphs | None = None
        #: The last values that were made from codes, with these codes, by their identity.
        self.made = dict[int, Made]()

    @property
    def shape(self) -> CodecShape:
        return CodecShape(
            self.state_size, self._codes_per_frame, self.samples_per_frame, self.dtype, self.device
        )

    def new_state(self) -> CodecState:
        """The state before the first frame of a stream. Does not use the device."""
        return CodecState()

    def state_after(self, codes: Tensor) -> CodecState:
        """The state after codes [frames, codebooks] on the host, for any number of streams and utterances. Its
        values are made when they are needed. Raises like `decode`."""
        self._check([codes])
        return CodecState(len(codes), codes=codes)

    def states_after(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """The values [B, size] of the states after rows of codes [B, T, codebooks] of these lengths [B]."""
        raise NotImplementedError

    def prepare_streams(self, rows: int, few: bool) -> None:
        """On a CUDA device: allocates an arena for the states of `rows` streams, and captures the graphs that
        decode their chunks, all or a `few`.

        Without this call, and for streams beyond `rows`, chunks are launched op by op, which is slower. Must
        be called before the first stream. Raises `torch.OutOfMemoryError` if there is no memory for the
        arena.
        """
        if self.device.type == "cpu" or rows < 1:
            return
        with on_device(self.device):
            self.stream_graphs = StreamGraphs(self.run, self.shape, rows, self.fixed).prepare(few)

    def prepare_utterances(self, rows: int, frames: int = STEP_FRAMES) -> None:
        """On a CUDA device: captures the graphs of a continuous batch of whole utterances, in steps of `rows`
        rows and `frames` frames. Stages that are opened afterwards use them instead of `decode`.

        Raises `torch.OutOfMemoryError` if there is no memory for the arena.
        """
        if self.device.type == "cpu" or rows < 1:
            return
        with on_device(self.device):
            self.utterances = UtteranceGraphs(
                self.run, self.shape, rows, frames, self.fixed, self._check, self._make_values
            ).prepare()

    def batch_key(self, frames: int, last: bool) -> tuple[int, int | None]:
        graphs = self.stream_graphs
        return super().batch_key(frames, last) if graphs is None else graphs.batch_key(frames, last)

    @torch.inference_mode()
    def start_chunks(
        self, states: Sequence[CodecState], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> PendingSamples:
        """Starts `decode_chunk` for codes on the host without waiting for the device. One thread at a time may
        call it.

        Closes a stream's state after its last chunk. Raises like `decode`, before any state is advanced.
        """
        graphs = self.stream_graphs
        if graphs is None:
            return super().start_chunks(states, codes, last)
        self._check(codes)
        with graphs.on_stream():
            self._make_values(states)
            inside = [index for index, state in enumerate(states) if state.enter(graphs.arena)]
            samples, buffers = graphs.replay(
                [states[i] for i in inside], [codes[i] for i in inside], [last[i] for i in inside]
            )
            found = dict(zip(inside, samples))
            parts = [
                found[i] if i in found else self._launched(states[i], codes[i], last[i])
                for i in range(len(codes))
            ]
            event = recorded() if self.device.type == "cuda" else None
        for state, final in zip(states, last):
            if final:
                state.close()
        return PendingSamples(parts, event, lambda: graphs.recycle(buffers))

    def _launched(self, state: CodecState, codes: Tensor, last: bool) -> list[Samples]:
        """Starts the chunk of a stream without a row, in pieces of the graphs' sizes, so that the kernels are
        the same."""
        waves = list[Tensor]()
        for taken, filled in pieces(len(codes), last):
            part = codes[:taken]
            codes = codes[taken:]
            (wave,) = self.decode_chunk([state], [pad(part, (0, 0, 0, filled - taken))])
            waves.append(wave[: taken * self.samples_per_frame])
        return pinned(waves) if self.device.type == "cuda" else [wave.numpy() for wave in waves]

    @torch.inference_mode()
    def warm(self, clones: bool = False) -> None:
        """Compiles kernels and initializes libraries for the first batches, on a CUDA device; with `clones` also
        for those that start from states."""
        make = partial(torch.zeros, dtype=torch.int64)
        batches = [[make(frames, self._codes_per_frame)] * rows for rows, frames in _WARM_BATCHES]
        states = _WARM_STATES if clones and self.reach else ()
        if triton_fault() is None:
            # What is captured in this block would be empty.
            with import_module("kernels.triton_launch").compiled_together():
                start = CodecState(1, torch.zeros(self.state_size, dtype=self.dtype, device=self.device))
                for codes in batches:
                    self.decode(codes)
                    if clones:
                        self.decode(codes, [start] * len(codes))
                for rows, frames in states:
                    codes = make(rows, frames, self._codes_per_frame, device=self.device)
                    self.states_after(codes, torch.full((rows,), frames, device=self.device))
        self.decode(batches[0])
        for rows, frames in states:
            self._after([make(frames, self._codes_per_frame) for _ in range(rows)])

    @torch.inference_mode()
    def decode(
        self, codes: Sequence[Tensor], states: Sequence[CodecState | None] | None = None
    ) -> list[Tensor]:
        """Decodes whole utterances.

        codes: one [frames, codebooks] of integers each, of any lengths. The utterances continue from `states`
        (such as the state after the reference codes of a cloned voice), which are not changed. Returns
        float32 [frames * samples_per_frame] each, in [-1, 1]. Raises `SynthesisError` (`synth.engine`) for
        codes of another shape or outside the codebooks.
        """
        self._check(codes)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        starts = states or [None] * len(codes)
        warm = [start is not None and start.frames > 0 for start in starts]
        lengths = [len(item) for item in codes]
        for indices in self._batches(lengths, warm):
            # A new state is treated like no state, so that the bits are the same.
            is_warm = any(warm[i] for i in indices)
            before = [(starts[i] or CodecState()).copy() for i in indices] if is_warm else None
            for i, wave in zip(indices, self.decode_padded([codes[i] for i in indices], before)):
                waves[i] = wave[: lengths[i] * self.samples_per_frame]
        return waves

    @torch.inference_mode()
    def decode_chunk(self, states: Sequence[CodecState], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decodes the next frames of several streams and advances their states.

        codes: one [n, codebooks] each, of any n. The concatenation of any chunks equals `decode` up to
        rounding. Returns float32 [n * samples_per_frame] each. Raises like `decode`.
        """
        self._check(codes)
        waves: list[Tensor] = [torch.empty(0, device=self.device)] * len(codes)
        order = sorted(range(len(codes)), key=lambda i: len(codes[i]))
        for frames, same in groupby(order, key=lambda i: len(codes[i])):
            for indices in self._rows(list(same), frames):
                batch = self._batch([codes[i] for i in indices], frames)
                past = self._past([states[i] for i in indices], len(batch))
                decoded = self.run(batch, past)
                kept = [
                    past.after[row].clone() if len(batch) > 1 else past.after[row]
                    for row in range(len(indices))
                ]
                written = WriteEvent(self.device) if self.device.type == "cuda" else None
                for row, i in enumerate(indices):
                    states[i].values = kept[row]
                    states[i].written = written
                    states[i].frames += frames
                    waves[i] = decoded[row]
        return waves

    def run(self, codes: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        """One pass: [B, T, codebooks] -> float32 [B, T * samples_per_frame].

        `lengths`: the number of samples that are needed of each row, if `skips_padding` is set and there is
        no past. Later samples are undefined.
        """
        raise NotImplementedError

    def _check(self, codes: Sequence[Tensor]) -> None:
        width = self._codes_per_frame
        largest = self._largest_code
        for item in codes:
            if item.dim() != 2 or item.shape[1] != width or item.is_floating_point():
                raise engine_error(
                    f"The codec got codes of shape {list(item.shape)} and type {item.dtype}, not [frames, {width}] integers.",
                )
        # For codes on a GPU this check would make the host wait for the device. They come from samplers,
        # which stay within the codebook.
        on_host = [item for item in codes if not item.is_cuda and item.numel()]
        if not on_host:
            return
        together = on_host[0] if len(on_host) == 1 else torch.cat(on_host)
        low = int(together.min())
        high = int(together.max())
        if low < 0 or (largest is not None and high > largest):
            bounds = "codes start at 0" if largest is None else f"its codebooks hold 0 to {largest}"
            raise engine_error(f"The codec got codes from {low} to {high}; {bounds}.")

    def _batches(self, lengths: Sequence[int], warm: Sequence[bool]) -> list[list[int]]:
        """Groups utterances that are decoded together; `warm`: whether each continues from a state."""
        if self.alone:
            return [[i] for i, length in enumerate(lengths) if length]
        if self.fixed:
            return same_length_batches(lengths, warm)
        # Rows that continue from a state are decoded to the padded end of their batch.
        padding = PADDING_COST if self.skips_padding and not any(warm) else 1.0
        return cheapest_batches(lengths, self.batch_frames, PASS_FRAMES, padding)

    def _batch(self, codes: Sequence[Tensor], frames: int, rows: int = 0) -> Tensor:
        """Utterances as one batch on the device, [rows, frames, codebooks]: padded on the right, and with silent
        rows up to `rows`, or up to the fixed number if there is one. The host does not wait."""
        silent = [torch.zeros_like(codes[0])] * ((FIXED_ROWS if self.fixed else rows) - len(codes))
        together = pad_sequence([*codes, *silent], batch_first=True)
        batch = pad(together, (0, 0, 0, frames - together.shape[1]))
        return batch if batch.is_cuda else to_device(batch, self.device)

    def _rows(self, indices: list[int], frames: int) -> list[list[int]]:
        """Splits streams whose chunks have one length into batches."""
        if not frames:
            return []
        rows = 1 if self.alone else FIXED_ROWS if self.fixed else max(1, self.batch_frames // frames)
        return [indices[start : start + rows] for start in range(0, len(indices), rows)]

    def _past(self, states: Sequence[CodecState], rows: int) -> Past:
        """The past of these streams, padded with new states to `rows` rows."""
        self._make_values(states)
        states = [*states, *[CodecState() for _ in range(rows - len(states))]]
        positions = to_device([state.frames for state in states], self.device)
        shape = self.shape
        return Past(torch.stack([state.own_values(shape) for state in states]), positions)

    def _make_values(self, states: Sequence[CodecState]) -> None:
        """Gives states that have only codes their values."""
        wanted = {
            id(state.codes): state.codes
            for state in states
            if state.codes is not None and state.values is None
        }
        found = {key: made for key in wanted if (made := self.made.pop(key, None)) is not None}
        found |= self._after([codes for key, codes in wanted.items() if key not in found])
        for state in states:
            if state.values is None and (made := found.get(id(state.codes))) is not None:
                _, state.values, state.written = made
        self.made |= found
        for key in [*self.made][:-KEPT_STATES]:
            self.made.pop(key, None)

    def _after(self, codes: Sequence[Tensor]) -> dict[int, Made]:
        """The values of the states after codes, by their identity."""
        found = dict[int, Made]()
        least = math.inf if self.alone or not self.reach else self.reach
        for item in codes:
            if len(item) < least:
                state = CodecState()
                self.decode_chunk([state], [item])
                assert state.values is not None
                found[id(item)] = item, state.values, state.written
        lengths = [0 if id(item) in found else len(item) for item in codes]
        for indices in self._batches(lengths, [False] * len(lengths)):
            found |= self._states([codes[i] for i in indices])
        return found

    def _states(self, codes: Sequence[Tensor]) -> dict[int, Made]:
        """`_after` for codes of at least `reach` frames on a CUDA device. A batch is one graph launch, on a
        stream of its own: several hundred launches would be far slower than what they launch."""
        ends = [len(item) for item in codes]
        frames = -(-max(ends) // STATE_FRAMES) * STATE_FRAMES
        batch = self._batch(codes, frames, 1 << (len(codes) - 1).bit_length())
        inputs = batch, to_device(ends + ends[:1] * (len(batch) - len(ends)), self.device)
        if self.state_graphs is None:
            self.state_graphs = BucketGraphs(torch.cuda.Stream(self.device, priority=CHUNK_PRIORITY))
        with self.state_graphs.following(*inputs):
            made = self.state_graphs(batch.shape, self.states_after, *inputs)
            values = [one.clone() for one in made[: len(codes)]]
            written = WriteEvent(self.device)
        return {id(item): (item, one, written) for item, one in zip(codes, values)}

    def decode_padded(self, codes: Sequence[Tensor], states: Sequence[CodecState] | None) -> Tensor:
        """[B] utterances -> [B, samples of the longest one, rounded up]; long ones are decoded in passes, which
        bounds memory."""
        lengths = [len(item) for item in codes]
        longest = max(lengths)
        padded = longest if self.alone else round_up(longest)
        batch = self._batch(codes, padded)
        if states is None and padded <= PASS_FRAMES:
            # Rows without padding have lengths too: otherwise kernels would be compiled for both cases.
            ends = self.skips_padding and not self.fixed
            return self.run(
                batch, None, [length * self.samples_per_frame for length in lengths] if ends else None
            )
        past = self._past(states or [], len(batch))
        waves = list[Tensor]()
        for part in batch.split(PASS_FRAMES, dim=1):
            waves.append(self.run(part, past))
            past = Past(past.after, past.positions + part.shape[1])
        return torch.cat(waves, dim=1)


def gathering_stage(
    decoder: CausalDecoder | None,
    max_batch: int,
    gather_seconds: float,
    gather_frames: int,
    decode_frames: int | None = None,
) -> CodecStage:
    """Opens the stage of a codec; without a decoder it only stands for one. On a GPU it gathers utterances, as
    `CodecStage` describes, into batches of up to `decode_frames` frames."""
    if decoder is None:
        return CodecStage()
    decoder.batch_frames = decode_frames or decoder.batch_frames
    if decoder.device.type == "cpu":
        return CodecStage(decoder)
    return CodecStage(decoder, max_batch, decoder.device, gather_seconds, gather_frames)

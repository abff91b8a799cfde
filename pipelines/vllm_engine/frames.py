"""Models with several codes per step, on vLLM's V2 runner: a frame of codes beside every token.

A model inherits from `FrameModel` and then from its vLLM class. It names a subclass of `FrameState`, which
embeds and draws frames; `EngineFrameState` draws them as the engine `native` does. Its sequences run with
`ModelSpec(model=..., codes_per_step=1 + width)`; `Tokens.codes` contains the codes of their steps.
"""

# vLLM is an extra, so its imports are checked only if it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from kernels.frame import FrameTensors
from kernels.registry import to_device
from pipelines.engine.state import Placement, SamplingParams, SlotState
from pipelines.request import IntArray
from pipelines.vllm_engine.engine_frames import EngineFrames
from pipelines.vllm_engine.library import CODE_SPAN

#: Maximum number of removed requests whose codes are kept, as a multiple of the slots. Fewer requests are
#: preempted at a time.
_KEPT = 4


class FrameStep(NamedTuple):
    """The rows of one step that have logits, one per request in the order of the batch; `_host`: copies on
    the host."""

    #: int64 [n].
    slots: Tensor
    slots_host: IntArray
    #: The position of the drawn token in its sequence, int64 [n].
    positions: Tensor
    positions_host: IntArray
    #: bool [n]; False if the prompt continues in a later step: the draw is dropped.
    whole: Tensor
    whole_host: NDArray[np.bool_]


class FrameModel:
    """A mixin, which precedes a model of vLLM among the bases of a class. It keeps the hidden states of the
    logits, from which the codes beside the token are drawn.

    `width` is the number of codes beside the token; `state_class` the subclass of `FrameState`.
    """

    width: int
    state_class: type[FrameState]

    def get_model_state_cls(self) -> type[FrameState]:
        return self.state_class

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        #: The hidden states [rows, hidden] of the step that is being drawn.
        self.drawn_from = hidden_states
        return super().compute_logits(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]


class FrameState(DefaultModelState):
    """The state of the running requests in the engine's process, one row per slot.

    A subclass implements `embed` and `draw`, and `begin` and `admit` if it has more data for each slot. An
    exception in them ends the engine core.
    """

    model: Any

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        slots = self.max_num_reqs
        #: int16 [slots, positions, width]: the codes of the token at each position; 0 without codes.
        self.codes = torch.zeros(slots, self.max_model_len + 1, model.width, dtype=torch.int16, device=device)
        # CUDA graphs read their input here.
        self._embeds = torch.zeros(
            self.max_num_tokens, self.inputs_embeds_size, dtype=self.dtype, device=device
        )
        self._slots = dict[str, int]()
        self._starts = np.zeros(slots, dtype=np.int64)
        self._ends = np.zeros(slots, dtype=np.int64)
        self._kept = OrderedDict[str, Tensor]()
        self.begin()

    def begin(self) -> None:
        """Makes what a subclass keeps for its slots."""

    def admit(self, slot: int, prompt: list[int], written: int, sampling: Any) -> None:
        """Initializes a slot for a request, also after a preemption. `prompt`: its ids; `written`: number of its
        tokens so far, whose codes are in the slot; `sampling`: vLLM's `SamplingParams`, with
        `TokenRequest.extra` as `extra_args`.

        Codes of its prompt may be written to `self.codes[slot, :len(prompt)]`, which is zero.
        """

    def embed(self, ids: Tensor, codes: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Input embeddings [tokens, hidden] of tokens with their codes. ids, slots, positions: [tokens];
        codes: int16 [tokens, width]."""
        raise NotImplementedError

    def draw(self, logits: Tensor, hidden: Tensor, step: FrameStep) -> tuple[Tensor, Tensor]:
        """The token int64 [n] and its codes [n, width] of every row. logits: [n, vocab]; hidden: [n,
        hidden]."""
        raise NotImplementedError

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """See vLLM's `ModelState`."""
        super().add_request(req_index, new_req_data)
        prompt = list(new_req_data.prompt_token_ids)
        self._slots[new_req_data.req_id] = req_index
        self._starts[req_index] = self._ends[req_index] = len(prompt)
        self.codes[req_index, : len(prompt)] = 0
        written = len(new_req_data.prefill_token_ids or prompt) - len(prompt)
        if written:
            kept = self._kept.pop(new_req_data.req_id, self.codes[0, :0])
            if len(kept) < written:
                raise RuntimeError(f"the codes of the preempted request {new_req_data.req_id} are gone")
            self._ends[req_index] += written
            self.codes[req_index, len(prompt) : len(prompt) + written] = kept[:written]
        self.admit(req_index, prompt, written, new_req_data.sampling_params)

    def remove_request(self, req_id: str) -> None:
        """See vLLM's `ModelState`. Keeps the codes, because the request may be preempted and return."""
        super().remove_request(req_id)
        slot = self._slots.pop(req_id, None)
        if slot is None:
            return
        self._kept[req_id] = self.codes[slot, self._starts[slot] : self._ends[slot]].clone()
        self._kept.move_to_end(req_id)
        if len(self._kept) > _KEPT * self.max_num_reqs:
            self._kept.popitem(last=False)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """See vLLM's `ModelState`."""
        return FrameSampler(sampler, self), None

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """See vLLM's `ModelState`."""
        inputs = dict(super().prepare_inputs(input_batch, req_states))
        tokens = input_batch.num_tokens
        rows = input_batch.num_reqs
        starts = input_batch.query_start_loc[: rows + 1]
        lengths = (starts[1:] - starts[:-1]).long()
        slots = torch.repeat_interleave(input_batch.idx_mapping[:rows].long(), lengths, output_size=tokens)
        positions = input_batch.positions[:tokens].long()
        self._embeds[:tokens] = self.embed(
            input_batch.input_ids[:tokens].long(), self.codes[slots, positions], slots, positions
        )
        inputs["inputs_embeds"] = self._embeds[: input_batch.num_tokens_after_padding]
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """See vLLM's `ModelState`."""
        return dict(super().prepare_dummy_inputs(num_reqs, num_tokens)) | {
            "inputs_embeds": self._embeds[:num_tokens]
        }

    def step(self, batch: Any) -> FrameStep:
        """The rows of vLLM's `InputBatch`."""
        rows = batch.num_reqs
        slots = np.asarray(batch.idx_mapping_np[:rows], dtype=np.int64)
        # Exact without speculative decoding.
        positions = batch.seq_lens_cpu_upper_bound[:rows].numpy().astype(np.int64)
        whole = positions >= batch.prefill_len_np[:rows]
        self._ends[slots[whole]] = positions[whole] + 1
        return FrameStep(
            batch.idx_mapping[:rows].long(),
            slots,
            batch.seq_lens[:rows].long(),
            positions,
            to_device(whole, self.device),
            whole,
        )

    def write(self, step: FrameStep, codes: Tensor) -> None:
        """Stores the codes [n, width] of complete rows beside their tokens."""
        old = self.codes[step.slots, step.positions]
        self.codes[step.slots, step.positions] = torch.where(step.whole[:, None], codes.to(torch.int16), old)


class FrameSampler:
    """Replaces vLLM's sampler: the state draws token and codes. Other attributes are the base sampler's."""

    def __init__(self, base: Any, state: FrameState) -> None:
        self._base = base
        self._state = state
        self._spans = torch.arange(1 + state.model.width, device=state.device) * CODE_SPAN

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __call__(self, logits: Tensor, input_batch: Any) -> SamplerOutput:
        step = self._state.step(input_batch)
        tokens, codes = self._state.draw(logits, self._state.model.drawn_from, step)
        self._state.write(step, codes)
        ids = (torch.cat((tokens[:, None], codes), 1) + self._spans).to(torch.int32)
        return SamplerOutput(
            sampled_token_ids=tokens[:, None],
            # The codes are passed as the ids of "likely tokens": first the sampled token, then the codes, each
            # offset to a span of its own.
            logprobs_tensors=LogprobsTensors(
                ids, torch.zeros(ids.shape, device=ids.device), torch.ones_like(tokens)
            ),
            num_nans=None,
            num_sampled=step.whole.to(torch.int32),
            num_rejected=torch.zeros_like(step.whole, dtype=torch.int32),
        )


class EngineFrameState(FrameState):
    """The state of requests whose frames are drawn as on the native engine, with the noise of their seeds; vLLM
    runs the backbone.

    Its model has `frame_tensors`, whose backbone has no layers, and `token_ids`: those of all values of code 0,
    of which the last one is the end.
    """

    def begin(self) -> None:
        self.tensors: FrameTensors = self.model.frame_tensors()
        tensors = self.tensors
        device = self.device
        rows = len(tensors.head)
        self._prompt = torch.zeros(tensors.backbone.hidden, dtype=self.dtype, device=device)
        self.drawing = SlotState(
            self.max_num_reqs, len(self._prompt), rows, 1, 0, 0, self.dtype, device, tensors.draw.window
        )
        self._frames = EngineFrames(tensors, self.drawing, graphed=not self.model_config.enforce_eager)
        # If logits are NaN, any row of the head may be drawn. Its unused rows end the sequence.
        ids: list[int] = self.model.token_ids()
        self._ids = torch.tensor(ids + ids[-1:] * (rows - len(ids)), device=device)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Captures the graphs before vLLM measures the free memory."""
        self._frames.capture()
        return super().custom_sampler(sampler)

    def admit(self, slot: int, prompt: list[int], written: int, sampling: Any) -> None:
        state = self.drawing
        nothing = np.zeros(0, np.int64)
        how = sampling.temperature, max(sampling.top_k, 0), sampling.top_p
        draws = SamplingParams(*how, 1.0, *how, min_new_tokens=0)
        state.place([Placement(slot, (), sampling.seed or 0, draws, nothing, self._prompt, 0)])
        state.frames[slot] = written
        window = state.recent.shape[1]
        if window and written > 1:
            # The first code of a request is outside of the repetition window.
            frames = torch.arange(max(written - window, 1), written, device=self.device)
            state.recent[slot, frames % window] = self.codes[slot, len(prompt) + frames, 0].long()

    def draw(self, logits: Tensor, hidden: Tensor, step: FrameStep) -> tuple[Tensor, Tensor]:
        codes = self._frames(hidden, torch.where(step.whole, step.slots, self.drawing.dead))
        return self._ids[codes[:, 0]], codes

"""What the kernels of prefill in one shape compute, in plain PyTorch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.attention import PackedPrompts, attend_padded, padded_places, paged_prefill_attention
from kernels.reference import run_stack
from pipelines.engine.executor import FrameModel
from pipelines.engine.state import SCRATCH_PAGE, PagedKV


def padded_twin(
    model: FrameModel, embeddings: Tensor, pages: Tensor, counts: Tensor, start: int, kv: PagedKV
) -> None:
    """`FrameModel.prefill` of chunks in one shape that depends on no prompt, all from position `start` on,
    a multiple of the page size.

    embeddings: [runs, new, hidden], finite everywhere; pages: [runs, (start + new) / page_size], the pages
    of each run, the scratch page where it has none; counts: [runs], new positions of each.
    """
    places = padded_places(pages, counts, embeddings.shape[1], start, kv.page_size, SCRATCH_PAGE)
    attend = partial(attend_padded, pages=pages, start=start)
    run_stack(
        embeddings.flatten(0, 1),
        model.tensors.backbone,
        places,
        kv.k,
        kv.v,
        attend,
        keys_only_at_the_end=True,
    )


def packed_twin(model: FrameModel, embeddings: Tensor, prompts: PackedPrompts, kv: PagedKV) -> None:
    """`FrameModel.prefill` of chunks one after the other in a row of a length that depends on no prompt:
    embeddings [total, hidden], finite everywhere."""
    places = prompts.places(len(embeddings), kv.page_size, SCRATCH_PAGE)
    attend = partial(attend_packed, prompts=prompts)
    run_stack(embeddings, model.tensors.backbone, places, kv.k, kv.v, attend, keys_only_at_the_end=True)


def attend_packed(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, prompts: PackedPrompts, scale: float
) -> Tensor:
    """Causal attention of packed prompts over their pages, which hold the new positions too; the
    reference of `lm_attention.packed_attention`.

    q: [total, heads, head_dim]; caches of one layer: [pages, kv_heads, page_size, head_dim]. Returns
    [total, heads * head_dim], zeros behind the last run. Reads the runs on the host.
    """
    used = [
        (run, start, count)
        for run, (start, count) in enumerate(zip(prompts.starts.tolist(), prompts.counts.tolist()))
        if count
    ]
    counts, out = [count for _, _, count in used], torch.zeros_like(q).flatten(1)
    if counts:
        tables = prompts.table[prompts.owners[[run for run, _, _ in used]]]
        lengths = [start + count for _, start, count in used]
        out[: sum(counts)] = paged_prefill_attention(
            q[: sum(counts)], k_cache, v_cache, tables, counts, lengths, scale
        )
    return out

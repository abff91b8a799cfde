"""What the kernels of prefill in one shape compute, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from kernels.attention import PackedPrompts, attend_packed, attend_padded, padded_places
from kernels.reference import TokenPositions, run_stack
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
    places = TokenPositions(
        *padded_places(pages, counts, embeddings.shape[1], start, kv.page_size, SCRATCH_PAGE)
    )
    scale = model.tensors.backbone.scale

    def attend(layer: int, q: Tensor) -> Tensor:
        return attend_padded(q, kv.k[layer], kv.v[layer], pages, start, scale)

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
    places = TokenPositions(*prompts.places(len(embeddings), kv.page_size, SCRATCH_PAGE))

    def attend(layer: int, q: Tensor) -> Tensor:
        return attend_packed(q, kv.k[layer], kv.v[layer], prompts, model.tensors.backbone.scale)

    run_stack(embeddings, model.tensors.backbone, places, kv.k, kv.v, attend, keys_only_at_the_end=True)

"""Keys and values in pages, and who holds which page."""

from __future__ import annotations

import torch
from torch import Tensor

#: Page 0 belongs to nobody: rows that are not in use write there.
SCRATCH_PAGE = 0


class PagedKV:
    """The key and value pages of all layers, and the list of free ones.

    `k`, `v`: [layers, pages, kv_heads, page_size, head_dim], zeros at first so that nothing read by mistake is NaN.
    """

    def __init__(
        self, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, pages + 1, kv_heads, page_size, head_dim)
        self.k: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.v: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size
        self.pages = pages
        self._free = list(range(pages, SCRATCH_PAGE, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        """Pages that hold this many positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """That many free pages, or None when there are fewer."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(pages)

    def scrub(self, pages: list[int]) -> None:
        """Zeroes pages that hold NaN, which would reach their next owner through masked positions (0 * NaN)."""
        if pages:
            self.k[:, pages] = 0
            self.v[:, pages] = 0
